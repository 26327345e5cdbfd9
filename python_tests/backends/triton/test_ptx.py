"""What Triton compiles for sm_80 and sm_90 gives the bits of the reference: its PTX, run on the CPU by ``python_tests.ptx``.

The interpreter tests what the kernels say; this tests what the compiler makes of it: layouts, shuffles, shared memory, conversions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nmkernels import Pattern, dispatch, testing
from nmkernels.backends.triton import interpreted
from nmkernels.backends.triton.groups import ELEMENTS

if interpreted():
    pytest.skip("TRITON_INTERPRET=1 compiles nothing", allow_module_level=True)

from python_tests.ptx import emulated

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
CODE = [(90, F32), (90, BF16), (80, BF16)]
"""Compute capabilities and dtypes; sm_80 shares all but a few instructions with sm_90."""


def backend(op: str, name: str) -> Callable[..., Any]:
    return next(i.fn for i in dispatch.implementations(op) if i.backend == name)


def nasty(p: Pattern, dtype: torch.dtype) -> list[Tensor]:
    """The nasty inputs, and one that ends inside its second tile."""
    columns = (ELEMENTS // p.m + 3) * p.m
    return [*(c.x for c in testing.cases(p, dtype)), torch.randn(1, columns).to(dtype)]


@pytest.mark.parametrize(("capability", "dtype"), [*CODE, (90, F16)])
@pytest.mark.parametrize("pattern", ["2:4", "3:5", "4:32"])
@pytest.mark.parametrize("op", ["nm_mask", "nm_prune", "nm_soft_threshold", "nm_compress"])
def test_groups(op: str, pattern: str, dtype: torch.dtype, capability: int) -> None:
    p = Pattern(pattern)
    for i, x in enumerate(nasty(p, dtype)):
        with testing.poison(), emulated(capability, warps_apart=i % 2 == 0) as ran:
            got = backend(op, "triton")(x, p.n, p.m)
        assert len(ran) == (x.numel() > 0)
        testing.assert_equal_bits(got, backend(op, "reference")(x, p.n, p.m), f"{op} {pattern} sm_{capability}")


@pytest.mark.parametrize(("capability", "dtype"), CODE)
@pytest.mark.parametrize("pattern", ["2:4", "1:8", "4:8", "3:5", "8:256"])
def test_compressed_form(pattern: str, dtype: torch.dtype, capability: int) -> None:
    p = Pattern(pattern)
    for rows, cols in ((9, 5 * p.m), (2, 2500 // p.m * p.m + p.m)):
        w = torch.randn(rows, cols).to(dtype)
        mask = backend("nm_mask", "reference")(w, p.n, p.m) & (torch.rand(w.shape) < 0.7)
        want = backend("nm_compress", "reference")(w, p.n, p.m, mask)
        with testing.poison(), emulated(capability):
            got = backend("nm_compress", "triton")(w, p.n, p.m, mask)
            dense = backend("nm_decompress", "triton")(*want, p.n, p.m, cols)
        testing.assert_equal_bits(got, want, f"compress {pattern} sm_{capability}")
        testing.assert_equal_bits(dense, torch.where(mask, w, 0), f"decompress {pattern} sm_{capability}")


@pytest.mark.parametrize(("capability", "dtype"), CODE)
def test_transposable_mask(capability: int, dtype: torch.dtype) -> None:
    options = torch.tensor([0.0, 1.0, 2.0, -3.0, float("nan"), float("inf")], dtype=dtype)
    for w in (options[torch.randint(4, (8, 256))], options[torch.randint(6, (8, 256))], torch.randn(4, 1028).to(dtype)):
        with testing.poison(), emulated(capability):
            got = backend("nm_transposable_mask", "triton")(w, 2, 4)
        testing.assert_equal_bits(got, backend("nm_transposable_mask", "reference")(w, 2, 4), f"sm_{capability}")


@pytest.mark.parametrize("capability", [80, 90])
def test_soft_threshold_scale(capability: int) -> None:
    """Over two programs, the second of one group."""
    w = torch.randn(4 * ELEMENTS // 4 + 1, 4).to(BF16)
    with testing.poison(), emulated(capability) as ran:
        got = backend("nm_soft_threshold_scale", "triton")(w, 2, 4)
    assert len(ran) == 2
    torch.testing.assert_close(got, backend("nm_soft_threshold_scale", "reference")(w, 2, 4), rtol=1e-6, atol=0)
