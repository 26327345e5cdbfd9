"""soft_threshold_scale in CUDA: sums over several blocks, their ragged ends, fp64, values that are not finite, out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nmkernels import Pattern, dispatch, reference, testing

OP = "nm_soft_threshold_scale"
CHUNK = 4096
"""Elements of one partial sum of the usual patterns."""
INF, NAN = float("inf"), float("nan")
Ours = Callable[[str], dispatch.Impl]


@pytest.fixture
def check(device: str, ours: Ours) -> Callable[[Tensor, str], Tensor]:
    def run(w: Tensor, pattern: str) -> Tensor:
        p = Pattern(pattern)
        got, want = ours(OP).fn(w.to(device), p.n, p.m), reference.soft_threshold_scale(w.resolve_neg(), p.n, p.m)
        assert (got.shape, got.dtype, got.device.type) == ((), torch.float32, device)
        torch.testing.assert_close(
            got.cpu(), want, rtol=1e-6, atol=0, equal_nan=True, msg=lambda m: f"{m}\n{tuple(w.shape)} {pattern} {w.dtype}"
        )
        return got

    return run


Check = Callable[[Tensor, str], Tensor]


@pytest.mark.parametrize("pattern", ["2:4", "1:4", "2:8", "1:8", "1:16", "1:1", "4:4", "3:5", "4:32", "255:256", "256:256"])
def test_equals_the_reference(pattern: str, check: Check, poison: None) -> None:
    for dtype in [torch.float32, torch.bfloat16, torch.float16]:
        m = Pattern(pattern).m
        for groups in (1, CHUNK // m - 1, CHUNK // m, 2 * CHUNK // m + 1, 5 * CHUNK // m + 3):
            check(torch.randn(groups, m).to(dtype), pattern)


def test_every_partial_sum_is_added_once(check: Check) -> None:
    """More chunks than the last block has threads, one of them unlike the others: left out or added twice it shows."""
    for at in [0, 1, 255, 256, 257, 600]:
        w = torch.ones(601, CHUNK)
        w[:, ::4], w[:, 1::4] = 2.0, 2.0
        w[at, ::4] = 1000.0
        check(w, "2:4")


def test_every_element_counts(check: Check) -> None:
    w = torch.zeros(2, CHUNK)
    w[0, 0] = 1.0
    for at in (1, 5, 31 * 4, 32 * 4, 255 * 4, 1024, 3 * 1024 + 7, CHUNK - 1, CHUNK, 2 * CHUNK - 1):
        x = w.clone()
        x.view(-1)[at] = 3.0
        x.view(-1)[at // 4 * 4 + (at + 1) % 4] = 1.0
        check(x, "1:4")


def test_float64_sums(check: Check) -> None:
    """Many small products beside one large: float32 sums would lose them."""
    w = torch.full((2, CHUNK), 1.0)
    w[:, ::4], w[:, 1::4] = 0.999, 0.0
    w[0, 0] = 3e4
    check(w, "2:4")


def test_nasty_inputs(check: Check) -> None:
    for pattern in ["2:4", "3:5"]:
        for case in testing.cases(pattern, torch.float32):
            check(case.x, pattern)


def test_not_finite_and_zero(check: Check) -> None:
    for values in [[NAN, 1, 2, 3], [INF, 1, 2, 3], [INF, INF, INF, 3], [0, 0, 0, 0], [1, 1, 1, 1]]:
        w = torch.zeros(2700, 4)
        w[2699] = torch.tensor(values)
        check(w, "2:4")
        check(w, "3:4")


def test_out_and_two_runs(device: str, ours: Ours) -> None:
    w = torch.randn(1000, 24, device=device)
    out = torch.full((), 7.0, device=device)
    scale = ours(OP).fn
    assert scale(w, 2, 8, out) is out
    testing.assert_equal_bits(out, scale(w, 2, 8))
    scale(w[:0], 2, 8, out)
    assert out == 0


def test_unaligned_and_strided(check: Check) -> None:
    check(torch.randn(CHUNK * 3 + 13)[1:].view(-1, 12), "1:4")
    check(torch.randn(24, 50).t(), "2:4")
    check(torch._neg_view(torch.randn(10, 8)), "2:4")
