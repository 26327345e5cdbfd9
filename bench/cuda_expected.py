"""The requirements of ``bench.cuda_resources`` on the CUDA kernels, and the exceptions with their reasons.

Required are: no local memory; reads of global memory of 16 bytes and writes of at least 4 (masks and packed weights are smaller than the
data read, and the 32 threads of a warp still fill whole lines); no wide store split into narrow ones; and PTX in which every floating-point
operation is rounded once.
Keys are regular expressions on the file and the name of a kernel; the first match counts.
"""

from __future__ import annotations

import re
from typing import TypeVar

T = TypeVar("T")

WIDTHS: dict[str, tuple[int, int]] = {
    # any N:M: a thread takes one element at a time
    r" any_|_any_kernel": (0, 0),
    # these write as much as they read, or write results in dense layout
    r"mvue\.cu mvue_(rows|strips|columns)_kernel<": (128, 128),
    r"groups\.cu groups_kernel<(Prune|SoftThreshold)": (128, 128),
    r"adamw\.cu adamw_kernel<|adamw_pack\.cu adamw_pack_kernel<": (128, 128),
    # 16 bytes of output are 2 to 8 packed bytes
    r"(decompress|dequantize)\.cu de(compress|quantize)_kernel": (16, 128),
    # 16 integers of 4 bits at once
    r"linear_few_integers\.cu .*Integers<4>": (64, 16),
    # one block, or a thread for each of some hundred params or blocks; or no memory access
    r"adamw_around\.cu|threshold\.cu scale_kernel|probe\.cu": (0, 0),
    # a thread has 8 bytes of a row's indices, and four neighbouring threads 32
    r"metadata\.cu metadata_kernel": (64, 128),
    # sums the parts of a split GEMM, and rounds to the dtype of the result
    r"linear_parts\.cu finish_kernel": (32, 16),
    # adds four sums of a thread from each piece of a tile, and rounds to the dtype of the result
    r"wgmma_sp\.cu stream_k_finish_kernel<float>": (128, 32),
    r"wgmma_sp\.cu stream_k_finish_kernel": (128, 16),
    # writes results as wide as it reads operands
    r"wgmma_sp(_8bit)?\.cu .*true>$": (0, 128),  # the operands are read by bulk copies, and there is no residual
    r"mma_sp(_8bit)?\.cu ((wg)?mma_sp|wgmma_stream_k)_kernel": (128, 128),
}
"""Bits of the widest read and the widest write of global memory, if not (128, 32)."""
RULE = 128, 32

NARROW: dict[str, int] = {
    # rows of any length and alignment: the two elements of a group are written one by one
    r"mvue\.cu mvue_rows_kernel<": 8,
    r"mvue\.cu mvue_columns_kernel<\w+, false": 16,
    # one thread of a block writes the two sums of the block
    r"threshold\.cu .*scale_sums_kernel": 2,
    # a thread for each param writes its values for the step
    r"adamw_around\.cu adamw_scalars_kernel": 54,
}
"""How many narrow stores that could be a wider one are allowed; for other kernels none."""

GEMMS: dict[str, str] = {
    r"wgmma_sp\.cu stream_k_finish_kernel": "",
    r"wgmma_sp_8bit\.cu .*<signed char": "IGMMA.SP",
    r"wgmma_sp_8bit\.cu ": "QGMMA.SP",
    r"wgmma_sp\.cu ": "HGMMA.SP",
    r"mma_sp\.cu ": "HMMA.SP",
    r"linear_mma\.cu |linear_expand\.cu ": "HMMA",
    r"linear_integers\.cu ": "IMMA.SP",
}
"""The tensor-core instruction that a kernel must use."""

LOOSE: dict[str, tuple[str, ...]] = {
    # products of fp32 numbers are exact in fp64: one rounding either way
    r"threshold\.cu .*scale_sums_kernel": ("fma.rn.f64", "fma.rn.bf16x2"),
    # a multiplication by -1: sm_80 has no other instruction for a difference of pairs of bf16
    r"groups\.cu groups_kernel<SoftThreshold|(compress|pack_tiles)\.cu .*2:4, 3\b": ("fma.rn.bf16x2",),
    # fma on integers below 2^24 is exact
    r"mvue\.cu ": ("fma.rn.f32",),
    # the logarithm of a statistic, in fp64, which is not exact
    r"adamw\.cu ": (".f64",),
}
"""Suffixes of instructions that a kernel may use although they are not one operation rounded once."""


SPILLED = {"sm_120": 16}
"""Bytes of local memory that a kernel may use on a GPU that none was written for; elsewhere none."""


def expected(table: dict[str, T], source: str, kernel: str, otherwise: T) -> T:
    """The entry of a table for a kernel."""
    return next((value for pattern, value in table.items() if re.search(pattern, f"{source} {kernel}")), otherwise)
