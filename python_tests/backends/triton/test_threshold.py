"""soft_threshold_scale in Triton: sums over several programs, their ragged ends, cancellation, values that are not finite, out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nmkernels import Pattern, dispatch, reference, testing
from nmkernels.backends.triton.groups import BLOCK, ELEMENTS, TILES, scale_kernel
from nmkernels.backends.triton.launch import launch

PER_PROGRAM = ELEMENTS * TILES
"""Elements of one program where M is a power of two."""
INF, NAN = float("inf"), float("nan")


def scale(w: Tensor, pattern: str, out: Tensor | None = None) -> Tensor:
    p = Pattern(pattern)
    return next(i.fn for i in dispatch.implementations("nm_soft_threshold_scale") if i.backend == "triton")(w, p.n, p.m, out=out)


def check(w: Tensor, pattern: str, device: str) -> Tensor:
    p = Pattern(pattern)
    got, want = scale(w.to(device), pattern), reference.soft_threshold_scale(w, p.n, p.m)
    assert (got.shape, got.dtype, got.device.type) == ((), torch.float32, device)
    torch.testing.assert_close(
        got.cpu(), want, rtol=1e-6, atol=0, equal_nan=True, msg=lambda m: f"{m}\n{tuple(w.shape)} {pattern} {w.dtype}"
    )
    return got


@pytest.mark.parametrize("pattern", ["2:4", "1:1", "1:8", "3:5", "4:32", "255:256", "256:256"])
def test_equals_the_reference(pattern: str, device: str, poison: None) -> None:
    for dtype in [torch.float32, torch.bfloat16]:
        m = Pattern(pattern).m
        for groups in (1, PER_PROGRAM // m + 1):
            check(torch.randn(groups, m).to(dtype), pattern, device)


def test_more_partial_sums_than_are_added_at_once(device: str) -> None:
    """The second kernel alone, on powers of two: one left out or added twice shows."""
    for programs in (0, 1, BLOCK, 2 * BLOCK + 1):
        sums, got = torch.zeros(2, programs, dtype=torch.float64), torch.full((), 7.0, device=device)
        if programs:
            sums[0, [0, programs // 2, -1]] = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
            sums[1, [0, programs // 2, -1]] = torch.tensor([8.0, 16.0, 32.0], dtype=torch.float64)
        launch(scale_kernel, 1, (sums.to(device), got, programs), BLOCK=BLOCK)
        want = sums[0].sum() / sums[1].sum() if programs else torch.zeros(())
        assert got.cpu() == want.float()


def test_float64_sums(device: str) -> None:
    """Many small products beside one large: float32 sums would lose them."""
    w = torch.full((2, PER_PROGRAM), 1.0)
    w[:, ::4], w[:, 1::4] = 0.999, 0.0
    w[0, 0] = 3e4
    check(w, "2:4", device)


@pytest.mark.parametrize("case", testing.cases("2:4", torch.float32), ids=lambda c: c.id)
def test_nasty_inputs(case: testing.Case, device: str) -> None:
    check(case.x, "2:4", device)


def test_not_finite_and_zero(device: str) -> None:
    for values in [[NAN, 1, 2, 3], [INF, 1, 2, 3], [INF, INF, INF, 3], [0, 0, 0, 0], [1, 1, 1, 1]]:
        w = torch.zeros(700, 4)
        w[699] = torch.tensor(values)
        check(w, "2:4", device)
        check(w, "3:4", device)


def test_out_and_two_runs(device: str) -> None:
    w = torch.randn(1000, 24, device=device)
    out = torch.full((), 7.0, device=device)
    assert scale(w, "2:8", out) is out
    testing.assert_equal_bits(out, scale(w, "2:8"))
    scale(w[:0], "2:8", out)
    assert out == 0


def test_unaligned_and_strided(device: str) -> None:
    check(torch.randn(1201)[1:].view(-1, 12), "1:4", device)
    check(torch.randn(24, 50).t(), "2:4", device)
