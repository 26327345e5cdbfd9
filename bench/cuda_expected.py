"""What is asked of the CUDA kernels by ``bench.cuda_resources``, and who may do otherwise, each with its reason.

The rule: no local memory; 16 bytes at once from global memory and 4 at least to it, for a mask and a packed weight are smaller than what
was read, and the 32 threads of a warp still fill whole lines with them; no wide store cut into narrow ones; PTX in which every
floating-point operation is rounded once.
Keys are regular expressions on the file and the name of a kernel; the first that is found counts.
"""

from __future__ import annotations

import re
from typing import TypeVar

T = TypeVar("T")

WIDTHS: dict[str, tuple[int, int]] = {
    # any N:M: a thread takes one element at a time
    r" any_|_any_kernel": (0, 0),
    # these write as much as they read, or results in dense layout
    r"mvue\.cu mvue_(rows|strips|columns)_kernel<": (128, 128),
    r"groups\.cu groups_kernel<(Prune|SoftThreshold)": (128, 128),
    r"adamw\.cu adamw_kernel<": (128, 128),
    # what becomes 16 bytes is 2 to 8 of them packed
    r"decompress\.cu decompress_kernel": (16, 128),
    # one block, or a thread for each of some hundred params or blocks; or nothing at all
    r"adamw_around\.cu|threshold\.cu scale_kernel|probe\.cu": (0, 0),
    # a thread has 8 bytes of a row's indices, and four threads beside each other 32
    r"metadata\.cu metadata_kernel": (64, 128),
    # adds up what the parts of a split GEMM left, and rounds it to the dtype of the result
    r"linear_parts\.cu finish_kernel": (32, 16),
    # writes results as wide as it reads operands
    r"wgmma_sp(_8bit)?\.cu .*true>$": (0, 128),  # copies of boxes read the operands, and there is no residual
    r"mma_sp(_8bit)?\.cu (wg)?mma_sp_kernel": (128, 128),
}
"""Bits of the widest read and the widest write of global memory, where they are not (128, 32)."""
RULE = 128, 32

NARROW: dict[str, int] = {
    # a row that ends early or begins at any address: the two of a group go together, element by element
    r"mvue\.cu mvue_rows_kernel<": 8,
    r"mvue\.cu mvue_columns_kernel<.*false": 16,
    # one thread of a block writes the two sums of the block
    r"threshold\.cu .*scale_sums_kernel": 2,
    # a thread for each param writes what the step needs of it
    r"adamw_around\.cu adamw_scalars_kernel": 50,
}
"""How many stores may lie beside another of their width where a wider one would do; of the others none."""

GEMMS: dict[str, str] = {
    r"wgmma_sp_8bit\.cu .*<signed char": "IGMMA.SP",
    r"wgmma_sp_8bit\.cu ": "QGMMA.SP",
    r"wgmma_sp\.cu ": "HGMMA.SP",
    r"mma_sp\.cu ": "HMMA.SP",
    r"linear_mma\.cu |linear_expand\.cu ": "HMMA",
}
"""The one instruction of tensor cores by which a kernel multiplies."""

LOOSE: dict[str, tuple[str, ...]] = {
    # GEMMs of fp32 numbers are exact in fp64: one rounding either way
    r"threshold\.cu .*scale_sums_kernel": ("fma.rn.f64", "fma.rn.bf16x2"),
    # by -1: a difference of pairs of bf16, for which sm_80 has no other instruction
    r"groups\.cu groups_kernel<SoftThreshold|(compress|pack_tiles)\.cu .*2:4, 3\b": ("fma.rn.bf16x2",),
    # fma on whole numbers below 2^24 is exact
    r"mvue\.cu ": ("fma.rn.f32",),
    # the logarithm of a statistic, in fp64, for which no bits are promised
    r"adamw(_squares)?\.cu ": (".f64",),
}
"""Ends of instructions that a kernel may have although they are not one operation rounded once."""


def expected(table: dict[str, T], source: str, kernel: str, otherwise: T) -> T:
    """What a table says of a kernel."""
    return next((value for pattern, value in table.items() if re.search(pattern, f"{source} {kernel}")), otherwise)
