"""What Triton compiles of mvue for sm_80 and sm_90, run on the CPU: layouts, shared memory, and the division without a divider."""

from __future__ import annotations

import pytest
import torch

from nmkernels import Pattern, dispatch, testing
from nmkernels.backends.triton import interpreted
from python_tests.ops.samples import seed

if interpreted():
    pytest.skip("TRITON_INTERPRET=1 compiles nothing", allow_module_level=True)

from python_tests.ptx import emulated

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


CASES = [
    ("nm_mvue", "2:4", "exact", 90, F32),
    ("nm_mvue", "3:5", "exact", 80, F16),
    ("nm_mvue", "2:4", "approx", 90, BF16),
    ("nm_mvue_compress", "2:4", "exact", 90, BF16),
    ("nm_mvue_compress", "2:4", "exact", 80, F32),
    ("nm_mvue_compress", "1:8", "exact", 90, F16),
    ("nm_mvue_compress", "4:32", "exact", 80, BF16),
]


@pytest.mark.parametrize(("op", "pattern", "method", "capability", "dtype"), CASES)
def test_mvue(op: str, pattern: str, method: str, capability: int, dtype: torch.dtype) -> None:
    p = Pattern(pattern)
    reference, triton = (next(i.fn for i in dispatch.implementations(op) if i.backend == b) for b in ("reference", "triton"))
    nasty = [c.x.reshape(-1, p.m)[:8] for c in testing.cases(p, dtype) if c.x.numel()]
    spread = torch.randn(16, p.m) * torch.logspace(0, -6, p.m, base=2)
    groups = torch.cat([*nasty, spread.to(dtype)])
    groups = groups[: len(groups) // 8 * 8]
    down = groups.reshape(-1, 8, p.m).movedim(1, -1).flatten(0, 1)
    for dim, g in ((1, groups.reshape(8, -1)), (0, down[:-1])):
        args = (p.n, p.m, dim, seed(-5, 2**40), method)
        with testing.poison(), emulated(capability, warps_apart=dim == 0):
            got = triton(g, *args)
        testing.assert_equal_bits(got, reference(g, *args), f"{op} {pattern} {method} sm_{capability} dim {dim}")
