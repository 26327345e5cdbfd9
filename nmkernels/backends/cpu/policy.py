"""Which of the three products run on the compressed form, and which decompress it and multiply densely.

The sparse kernels do N/M of the work at a rate of their own, so they win where N/M is small enough, whatever the size of the
matrix; torch's own rate depends on the dtype. Measured on an AMD EPYC Zen 5, 2 threads, torch 2.13, 2026-11-21, 4096 x 4096 and
11008 x 4096, 16 to 1024 tokens: float32 up to 1/2 and 16 bits up to 1/8. Beyond that the numbers follow the trend; those of
"avx512" are taken from "avx512_bf16", whose kernels for many tokens are the same.
"""

from __future__ import annotations

import torch

from ..._capability import compiled_core
from ._core import core

FEW_TOKENS = 16
"""Up to so many tokens ``linear`` reads every stored weight once for all of them; above, tiles of tokens."""

FEW_TOKENS_16_BIT = 1
"""The same, in 16 bits, next to a dense weight at hand."""

DENSEST = {
    # instruction set -> largest N/M that beats dense: float32; 16-bit numbers in fprop and wgrad; in dgrad,
    # which sorts first (or in fprop next to a dense weight at hand)
    "avx512_bf16": (3 / 4, 1 / 8, 1 / 16),
    "avx512": (3 / 4, 1 / 8, 1 / 16),
    "avx2": (1 / 2, 1 / 16, 1 / 16),
    "portable": (1 / 4, 1 / 32, 1 / 32),
}


def sparse_wins(dtype: torch.dtype, n: int, m: int, dgrad: bool = False) -> bool:
    """Whether a product with many tokens is faster from the compressed form than dense."""
    wide, narrow, narrow_dgrad = DENSEST[core().isa()]
    return n / m <= (wide if dtype == torch.float32 else narrow_dgrad if dgrad else narrow)


def packed_wins(role: str, dtype: torch.dtype, tokens: int, n: int, m: int) -> bool:
    """Whether one of a layer's products is done faster from the compressed weight as it is than from a dense one that is at hand.

    In 16 bits that is less often than ``sparse_wins`` says, which compares with expanding the weight first. Of wgrad, the dense operand
    is an estimate in dense layout.
    """
    if dtype == torch.float64 or not compiled_core().ok:
        return False
    wide = dtype == torch.float32
    if role == "fprop" and tokens <= (FEW_TOKENS if wide else FEW_TOKENS_16_BIT):
        return True
    return sparse_wins(dtype, n, m, dgrad=True)
