"""The products as compiled for sm_80 and sm_90, run on the CPU by ``python_tests.ptx``: fragments, copies, swizzles and all."""

from __future__ import annotations

import re

import pytest
import torch

from nmkernels import Pattern, reference
from nmkernels.backends.triton import interpreted
from nmkernels.backends.triton import linear as family
from nmkernels.backends.triton._plan import Plan, candidates
from nmkernels.backends.triton.aot import recording
from nmkernels.testing import assert_no_worse, poison

if interpreted():
    pytest.skip("TRITON_INTERPRET=1 compiles nothing", allow_module_level=True)

from python_tests.ptx import emulated

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
WIDE = Plan("gemm", 128, 128, 64, 8, 3)


def check(op, capability, pattern, dtype, rows, cols, width, warps_apart=True, epilogue=()):
    """An op's result against the reference, and the names of the kernels that ran."""
    p = Pattern(pattern)
    w = torch.nn.functional.pad(torch.randn(rows, cols), (0, -cols % p.m)).to(dtype)
    e = (*reference.compress(w, p.n, p.m), p.n, p.m, cols)
    x = torch.randn(width, rows if op == "linear_dgrad" else cols).to(dtype)
    args = (*e, x.t().contiguous()) if op == "linear_wgrad" else (x, *e, *epilogue)
    with poison(), emulated(capability, warps_apart=warps_apart) as ran:
        result = getattr(family, op)(*args)
    wide = [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
    assert_no_worse(result, getattr(reference, op)(*args), getattr(reference, op)(*wide), f"{op} {pattern} sm_{capability}")
    return ran


@pytest.mark.parametrize("op", ["linear", "linear_dgrad", "linear_wgrad"])
@pytest.mark.parametrize(
    ("pattern", "dtype", "capability"),
    [("2:4", BF16, 80), ("2:4", BF16, 90), ("1:8", F16, 90), ("2:4", F32, 80), ("3:5", BF16, 90)],
    ids=str,
)
def test_narrow(op, pattern, dtype, capability):
    check(op, capability, pattern, dtype, 66, 136, 6)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("op", ["linear", "linear_dgrad", "linear_wgrad"])
def test_wide_tiles_of_whole_blocks(op, capability, monkeypatch):
    monkeypatch.setattr(family, "choose", lambda *_args: WIDE)
    check(op, capability, "2:4", BF16, 128, 256, 130, warps_apart=False)


@pytest.mark.parametrize("op", ["linear", "linear_wgrad"])
@pytest.mark.parametrize("width", [16, 32, 64])
def test_hopper_waits_for_what_reads_registers(op, width, monkeypatch):
    """Several steps of each width of tile: the machine refuses to overwrite what a wgmma in flight reads."""
    monkeypatch.setattr(family, "choose", lambda *_args: Plan("gemm", 64, width, 64, 4, 3))
    check(op, 90, "2:4", BF16, 64, 256, width)


@pytest.mark.parametrize("kind", ["fprop", "wgrad"])
@pytest.mark.parametrize("width", [32, 512])
def test_no_plan_leaves_wgmma_in_flight_that_reads_registers(kind, width, monkeypatch):
    """As compiled for sizes of models, where the compiler chooses otherwise than for small ones: nothing of a step outlives it."""
    x = torch.empty(width, 4096, dtype=BF16, device="meta")
    e = (*(torch.empty(4096, s, dtype=d, device="meta") for s, d in ((2048, BF16), (512, torch.uint8))), 2, 4, 4096)
    plans = {(p.rows, p.width, p.cols): p for p in candidates(kind, BF16, 4096, 4096, width, 2, 4, 90) if p.method == "gemm"}
    for p in plans.values():
        monkeypatch.setattr(family, "choose", lambda *_args, p=p: p)
        with recording(90) as kernels:
            family.linear(x, *e) if kind == "fprop" else family.linear_wgrad(*e, x.t().contiguous())
        ptx = kernels[0].asm["ptx"]
        waits = {int(n) for n in re.findall(r"wgmma\.wait_group\.sync\.aligned (\d+)", ptx)}
        reads_registers = re.search(r"wgmma\.mma_async\S+ *\{[^}]*\}, *\{", ptx)
        assert waits and (waits == {0} or not reads_registers), p


@pytest.mark.parametrize("capability", [80, 90])
def test_split_with_an_epilogue(capability, monkeypatch):
    monkeypatch.setattr(family, "choose", lambda *_args: Plan("gemm", 64, 16, 128, 4, 3, 3))
    ran = check("linear", capability, "2:4", BF16, 70, 512, 9, epilogue=(torch.randn(70, dtype=BF16), "silu"))
    assert ran == ["spmm_kernel", "combine_kernel"]


@pytest.mark.parametrize("activation", ["", "gelu", "relu2"])
def test_epilogues(activation):
    check("linear", 90, "1:4", F16, 20, 64, 7, epilogue=(torch.randn(20, dtype=F16), activation))


def test_one_of_everything():
    """Triton compiles a size of 1 as a constant."""
    for op in ("linear", "linear_dgrad", "linear_wgrad"):
        check(op, 90, "2:4", BF16, 1, 64, 5)
    check("linear", 90, "2:4", BF16, 5, 4, 5)
