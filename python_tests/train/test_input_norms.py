"""Calibration: what inputs it counts, in what precision, and what it warns of."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch import nn

import nmkernels as nm
from nmkernels.recipes import ASP
from python_tests.recipes.loop import top_n


def two(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32, dtype=dtype), nn.ReLU(), nn.Linear(32, 16, dtype=dtype))


def calibrated(model: nn.Module, *inputs: torch.Tensor) -> tuple[nm.recipes.Handle, list[str]]:
    """The handle after ``inputs``, and the warnings."""
    handle = nm.sparsify_(model, ASP("2:4", score="wanda"))
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        with handle.calibrate():
            for x in inputs:
                model(x)
    return handle, [str(w.message) for w in caught]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["a token", "one value", "the padding of every batch"])
def test_tokens_that_are_not_finite_are_left_out(bad, where):
    inputs = [torch.randn(2, 5, 16) for _ in range(4)]
    clean = []
    for i, x in enumerate(inputs):
        kept = torch.ones(10, dtype=torch.bool)
        if where == "the padding of every batch":
            x[1, 3:], kept[8:] = bad, False
        elif i == 2:
            x[0, 1, slice(None) if where == "a token" else 7], kept[1] = bad, False
        clean.append(x.reshape(10, 16)[kept])
    handle, (said,) = calibrated(two(), *inputs)
    want, silent = calibrated(two(), *clean)
    counts = {"a token": (16, 1, 3), "one value": (1, 1, 3), "the padding of every batch": (128, 8, 1)}[where]
    assert not silent and re.search(
        "layer '0' got {} NaN or infinite input values, in {} of 40 tokens, first in its forward pass {} of 4".format(*counts), said
    )
    if not (where == "one value" and bad == -torch.inf):
        assert "So did layer '2'" in said
    for handled in (handle, want):
        handled.finish(allow_unused=True)
    assert torch.equal(handle.model[0].weight, want.model[0].weight)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_are_wide(dtype):
    """In fp16 the square of 300 is infinite; in bf16 a sum of ones stops at 256."""
    x = torch.ones(4096, 16, dtype=dtype)
    x[:, 1] = 300.0
    x[:, 2] = 1.25
    model = nn.Sequential(nn.Linear(16, 16, bias=False, dtype=dtype))
    handle, said = calibrated(model, *x.chunk(64))
    assert not said
    norms = handle.run.held.inputs
    assert norms.squares["0"].tolist()[:4] == [4096.0, 4096.0 * 90000.0, 4096.0 * 1.5625, 4096.0] and norms.tokens["0"] == 4096
    weight = model[0].weight.detach().clone()
    handle.finish()
    assert torch.equal(model[0].weight, weight * top_n(weight.double() * norms.squares["0"].sqrt(), 2, 4))


def test_layers_with_too_few_tokens_are_listed():
    class Spare(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.rare, self.spare = (nn.Linear(16, 16) for _ in range(3))

        def forward(self, x):
            return self.body(x).sum() + self.rare(input=x[:3]).sum()

    handle, (said,) = calibrated(Spare(), torch.randn(8, 16))
    assert "'rare' (3), 'spare' (0)" in said and "body" not in said
    with pytest.raises(nm.RecipeError, match="has seen none for spare.*filter_fn"):
        handle.attach(torch.optim.SGD(handle.model.parameters(), lr=0.1))
    # a layer all of whose tokens are left out has seen none either
    handle, said = calibrated(two(), torch.full((8, 16), torch.nan))
    assert len(said) == 2 and "'0' (0), '2' (0)" in said[1]
    with pytest.raises(nm.RecipeError, match="has seen none for 0, 2"):
        handle.finish()


def test_what_was_collected_before_stays():
    """Over several calls of ``calibrate``, with no tokens at all in one batch, and one vector as a batch."""
    x = torch.randn(12, 16)
    whole, _ = calibrated(two(), x)
    model = two()
    handle = nm.sparsify_(model, ASP("2:4", score="wanda"))
    with torch.no_grad():
        for part in (x[:5], x[:0], x[5:11]):
            with handle.calibrate():
                model(part)
        with pytest.raises(ZeroDivisionError), handle.calibrate():
            model(x[11])
            raise ZeroDivisionError
    for name, squares in whole.run.held.inputs.squares.items():
        assert torch.allclose(handle.run.held.inputs.squares[name], squares, rtol=1e-5)
    assert not any(layer._forward_pre_hooks for layer in handle.layers.values())


def test_inputs_by_keyword_are_seen():
    for layer, x in ((nn.Linear(16, 16), torch.randn(8, 16)), (nn.Conv2d(16, 16, 1), torch.randn(2, 16, 3, 3))):
        model = nn.ModuleList([layer])
        want = layer(input=x).detach()
        handle = nm.sparsify_(model, "asp:2:4")
        assert torch.allclose(model[0](input=x), want, rtol=1e-5, atol=1e-6), "dense until pruned"
        handle.finish()
        want = model[0](input=x).detach()
        nm.compress_(model)
        assert torch.allclose(model[0](input=x), want, rtol=1e-5, atol=1e-6)
