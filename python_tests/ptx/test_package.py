"""The package's CUDA kernels as nvcc compiles them give the bits of the reference: their PTX, run on the CPU."""

from __future__ import annotations

import pytest
import torch

from nmkernels import reference, testing

from .machine import execute
from .nvcc import CSRC, NVCC, ptx
from .parse import parse

pytestmark = [pytest.mark.slow, pytest.mark.skipif(NVCC is None or not CSRC.is_dir(), reason="no nvcc, or not a source checkout")]

BF16 = torch.bfloat16
MODES = ["earliest", "latest", 1]


@pytest.mark.parametrize("mode", MODES)
def test_packing_along_rows(mode: str | int) -> None:
    """Two blocks, the second with whole chunks and threads without any."""
    text = ptx(CSRC / "cuda" / "compress.cu", "sm_90a", "-fmad=false")
    for dtype, name in ((BF16, "INS_4bf16ES3_NS_5FixedILi2ELi4EEELi0E"), (torch.float32, "IffNS_5FixedILi2ELi4EEELi0E")):
        w = torch.randn(40, 512, dtype=dtype)
        w[3, :64] = 0
        chunks = w.numel() // (16 if dtype == BF16 else 8)
        want = reference.compress(w, 2, 4)
        got = torch.empty_like(want[0]), torch.empty_like(want[1])
        execute(parse(text, name), -(-chunks // 512), [w, 0, 0, *got, 0, chunks], mode=mode, threads=256)
        testing.assert_equal_bits(got, want, f"{dtype} {mode}")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("op", "reference_of"), [("Mask", reference.mask), ("Prune", reference.prune)])
def test_groups_in_registers_and_in_shared_memory(op: str, reference_of, mode: str | int) -> None:
    text = ptx(CSRC / "cuda" / "groups.cu", "sm_90a", "-fmad=false")
    w = torch.randn(8192 + 64).to(BF16)
    out = torch.empty_like(reference_of(w, 2, 4))
    one = parse(text, f"13groups_kernelINS1_{len(op)}{op}ENS_4bf16ENS_5FixedILi2ELi4E")
    execute(one, 2, [w, out, w.numel(), 1], mode=mode, threads=256)
    testing.assert_equal_bits(out, reference_of(w, 2, 4), f"{op} 2:4")
    w = torch.randn(5 * 300).to(BF16)
    out = torch.empty_like(reference_of(w, 3, 5))
    name = f"any_groups_kernelINS1_{len(op)}{op}ENS_4bf16E"
    execute(parse(text, name), 1, [w, out, 300, 3, 5], mode=mode, threads=256)
    testing.assert_equal_bits(out, reference_of(w, 3, 5), f"{op} 3:5")


def test_metadata_for_the_tensor_cores() -> None:
    text = ptx(CSRC / "cuda" / "metadata.cu", "sm_90a", "-fmad=false")
    w = torch.randn(128, 256).to(BF16)
    indices = reference.compress(w, 2, 4)[1]
    for code, layout in ((1, "mma.sp"), (2, "wgmma.sp")):
        want = reference.to_layout(indices, 256, layout)
        got = torch.empty_like(want)
        execute(parse(text), 1, [indices, 128, 4, code, 1, got], threads=256)
        testing.assert_equal_bits(got, want, layout)
