"""Addresses on the device: what a kernel over many tensors reads instead of an argument per tensor.

A table is int64 words, one row per param. Its words travel as scalar arguments of a tiny kernel: they are read at the launch, so
that the host waits for nothing, no pinned memory has to outlive the call, and a CUDA graph captures them by value.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._launch import launch

BATCH = 32
"""Words of one launch."""


@triton.jit(do_not_specialize=list(range(1, 2 + BATCH)))
def words_kernel(
    table, first: tl.int64,
    a0: tl.int64, a1: tl.int64, a2: tl.int64, a3: tl.int64, a4: tl.int64, a5: tl.int64, a6: tl.int64, a7: tl.int64,
    b0: tl.int64, b1: tl.int64, b2: tl.int64, b3: tl.int64, b4: tl.int64, b5: tl.int64, b6: tl.int64, b7: tl.int64,
    c0: tl.int64, c1: tl.int64, c2: tl.int64, c3: tl.int64, c4: tl.int64, c5: tl.int64, c6: tl.int64, c7: tl.int64,
    d0: tl.int64, d1: tl.int64, d2: tl.int64, d3: tl.int64, d4: tl.int64, d5: tl.int64, d6: tl.int64, d7: tl.int64,
):  # fmt: skip
    """table[first : first + 32] = the words."""
    words = (a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7,
             c0, c1, c2, c3, c4, c5, c6, c7, d0, d1, d2, d3, d4, d5, d6, d7)  # fmt: skip
    for i in tl.static_range(32):
        tl.store(table + first + i, words[i])


def upload(words: Sequence[int], device: torch.device) -> Tensor:
    """The words as an int64 tensor on ``device``, padded with zeros to whole batches."""
    padded = [*words, *[0] * (-len(words) % BATCH)]
    table = torch.empty(max(len(padded), 1), dtype=torch.int64, device=device)
    for first in range(0, len(padded), BATCH):
        launch(words_kernel, 1, (table, first, *padded[first : first + BATCH]), warps=1)
    return table


__all__ = ["BATCH", "upload"]
