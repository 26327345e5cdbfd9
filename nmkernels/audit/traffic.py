"""Bytes a weight that a training step reads and writes outside of its GEMMs: change them here when the kernels change.

With float32 weights, GEMMs in 16 bits and 2:4::

                                               dense   SR-STE, S-STE   FST      STEP, v frozen
    AdamW: reads p g m v, writes p m v         28      28              28       24
    held mask, a bit a weight                                  0.125
    weight cast in forward                     6
    W̃ made in forward, all forms in one read           7.125           6.125    7.125
    sum                                        34      35.125          34.25    31.125

W̃ is written packed along its rows for fprop (1.125) and dense for dgrad (2), or, with a transposable mask, packed both ways; of a held mask
the bits are read, and between renewals only values are written (2). Both sides are counted with a cast of the weight's gradient to the
weight's dtype (6), of which a GEMM here that returns its sums saves 4: not counted until a GPU has confirmed it.
"""

from __future__ import annotations

import torch

from ..gemm.problem import packed_bytes
from ..pattern import Pattern

STATE = 4
"""Bytes of a moment of ``MaskedAdamW``, whatever the weight's dtype; torch's AdamW has moments in the weight's dtype."""
BITS, MASK = 0.125, 1.0
"""Of a held mask, as the optimizer reads it, and what makes W̃ at 2:4 in bfloat16; elsewhere a byte is read."""


def update(master: torch.dtype, *, ours: bool, held: bool = False, frozen: bool = False) -> float:
    """Of AdamW's step on a weight of dtype ``master``, by ``MaskedAdamW`` (``ours``) or torch's; ``frozen``: v is only read."""
    if not ours:
        return 7.0 * master.itemsize
    return 3 * master.itemsize + (3 if frozen else 4) * STATE + BITS * held


def cast(weight: torch.dtype, gemm: torch.dtype) -> float:
    """Of copying a weight to the dtype of its GEMMs, or its gradient back; 0 where both are the same."""
    return 0.0 if weight == gemm else float(weight.itemsize + gemm.itemsize)


def forms(form: str, pattern: Pattern, master: torch.dtype, gemm: torch.dtype, held: bool = False) -> float:
    """Of making W̃ as ``"dense"``, ``"rows"``, ``"rows+dense"`` or ``"both"`` (packed along rows and along columns) in one read."""
    packed, dense, mask = packed_bytes(pattern, gemm), float(gemm.itemsize), MASK * held
    if held and (pattern.n, pattern.m, master, gemm) == (2, 4, torch.float32, torch.bfloat16):
        packed, mask = pattern.density * gemm.itemsize, BITS  # positions stay until the mask is renewed
    written = {"dense": dense, "rows": packed, "rows+dense": packed + dense, "both": 2 * packed}[form]
    return master.itemsize + written + mask
