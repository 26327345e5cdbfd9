"""Which of the three products run on the compressed form, and which decompress it and multiply densely.

Rows of the table are measured crossovers: the sparse kernels do N/M of the work at a rate of their own, so they win
where N/M is small enough, whatever the size of the matrix; torch's own rate depends on the dtype. (AMD EPYC Zen 5,
2 threads, torch 2.13, 2026-11-21; 4096 x 4096 and 11008 x 4096, 16 to 1024 tokens.)
"""

from __future__ import annotations

import torch

from ._core import core

FEW_TOKENS = 16
"""Up to so many tokens ``linear`` reads every stored weight once for all of them; above, tiles of tokens."""

DENSEST = {
    # instruction set -> largest N/M of fprop and wgrad that beats dense, for float32 and for 16-bit numbers
    "avx512_bf16": (0.75, 0.2),
    "avx512": (0.75, 0.2),
    "avx2": (0.5, 0.2),
    "portable": (0.25, 0.125),
}


def sparse_wins(dtype: torch.dtype, n: int, m: int) -> bool:
    """Whether a product with many tokens is faster from the compressed form than dense."""
    wide, narrow = DENSEST[core().isa()]
    return n / m <= (wide if dtype == torch.float32 else narrow)
