"""xFormers' names for 2:4."""

from __future__ import annotations

import itertools

import pytest
import torch

from nmkernels import ops
from nmkernels.integrations.xformers import sparsify24, sparsify24_like, sparsify24_ste
from nmkernels.pattern import OptionError, ShapeError
from python_tests.for_each import for_each

ROWS = [row for row in itertools.product((0.0, 1.0), repeat=4) if sum(row) == 2]
TILES = torch.tensor([t for t in itertools.product(ROWS, repeat=4) if all(sum(c) == 2 for c in zip(*t, strict=True))])
"""The 90 masks of a tile."""


@for_each("algo", ["", "largest_values_greedy", "largest_abs_values_greedy"])
def test_the_best_zeros_of_every_tile(algo):
    x = torch.randn(8, 12)
    y = sparsify24(x, algo)
    score = x.abs() if algo == "largest_abs_values_greedy" else x
    for i, j in itertools.product(range(0, 8, 4), range(0, 12, 4)):
        tile, kept = score[i : i + 4, j : j + 4], (y[i : i + 4, j : j + 4] != 0).float()
        assert any(torch.equal(kept, mask) for mask in TILES)
        assert torch.isclose((tile * kept).sum(), (TILES * tile).sum((1, 2)).max(), rtol=1e-6)
    assert torch.equal(y[y != 0], x[y != 0])
    assert ops.is_nm(y, "2:4") and ops.is_nm(y.t().contiguous(), "2:4")


@for_each("gradient", ["24sparse", "24dense", "ste"])
def test_gradients(gradient):
    x, w = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8)
    y = sparsify24(x, gradient=gradient)
    (y * w).sum().backward()
    assert torch.equal(x.grad, w if gradient == "ste" else torch.where(y != 0, w, 0.0))
    z = torch.randn(8, 8, requires_grad=True)
    like = sparsify24_like(z, y, gradient)
    assert torch.equal(like != 0, y != 0)
    (like * w).sum().backward()
    assert torch.equal(z.grad, x.grad)


def test_ste_weighs_kept_and_pruned():
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)
    y = sparsify24_ste(x, bw_mul0=0.5, bw_mul1=2.0)
    (y * w).sum().backward()
    assert torch.equal(x.grad, torch.where(y != 0, 2.0 * w, 0.5 * w))


def test_like_remembers_zeros_that_were_kept():
    x = torch.relu(torch.randn(8, 8))
    y = sparsify24(x)
    kept = sparsify24_like(torch.ones(8, 8), y)
    assert kept.sum() == 32 and (y != 0).sum() < 32
    assert torch.equal(sparsify24_like(torch.ones(8, 8), y.clone()), (y != 0).float())  # which a copy does not tell


@pytest.mark.slow
def test_in_a_linear_layer_and_compiled():
    x, w = torch.randn(8, 16), torch.randn(32, 16, requires_grad=True)

    def f(w):
        return torch.nn.functional.linear(x, sparsify24(w, "largest_abs_values_greedy", gradient="ste")).square().sum()

    f(w).backward()
    expected, w.grad = w.grad, None
    torch.compile(f, backend="aot_eager", fullgraph=True)(w).backward()
    assert torch.allclose(w.grad, expected)


def test_refused():
    x = torch.randn(8, 8)
    for call in (lambda: sparsify24(x, "causal1122"), lambda: sparsify24(x, gradient="dense"), lambda: sparsify24_like(x, x > 9, "no")):
        with pytest.raises(OptionError, match="sparsify24"):
            call()
    for call in (lambda: sparsify24(x[0]), lambda: sparsify24(x[:, :6]), lambda: sparsify24_like(x, x), lambda: sparsify24_like(x, x[:4])):
        with pytest.raises(ShapeError, match="sparsify24"):
            call()
