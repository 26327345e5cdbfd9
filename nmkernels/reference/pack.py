"""The forms of a weight for the forward and the backward pass: packed, its transpose packed, and masked in dense layout."""

from __future__ import annotations

import torch
from torch import Tensor

from .common import compute_dtype
from .compress import compress, decompress
from .layouts import to_layout
from .mask import mask as nm_mask
from .mask import soft_threshold
from .transposable import transposable_mask

SELECTS = ("magnitude", "transposable", "given", "held", "threshold")
"""The rules that choose the kept weights."""


def pack(
    w: Tensor, n: int, m: int, select: str = "magnitude", mask: Tensor | None = None, scale: Tensor | None = None,
    dtype: torch.dtype | None = None, rows: bool = True, columns: bool = False, layout: str = "canonical", dense: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Compress W along its rows, or Wᵀ along its rows (the columns of W), or both, and cast the values: see ``nm.ops.pack``.

    ``select`` says what is kept; magnitudes are always compared in w's own dtype, that of the master weight:

    * ``"magnitude"``: ``mask`` of the operand that is packed, W or Wᵀ.
    * ``"transposable"``: M = ``transposable_mask(w)`` for W, Mᵀ for Wᵀ.
    * ``"given"``: the ``mask`` argument for W, its transpose for Wᵀ, each padded as ``compress`` does.
    * ``"held"``: the same for a mask that is known to be N:M: no check where the host would have to wait for it.
    * ``"threshold"``: as magnitude, with values ``soft_threshold`` of the operand, rounded to w's dtype as that op does, times ``scale``,
      rounded once to the compute dtype (float32; float64 for float64). ``scale=None`` skips the multiplication.

    The multiplication follows IEEE: a kept S of +0.0 (a tie at the threshold) gives +0.0, -0.0 for a negative scale, NaN for an infinite
    one; underflow keeps the sign. A value is rounded once to ``dtype``, to nearest even, overflow to infinity, denormals kept; with w's own
    dtype its bits are unchanged. (float64 to 16 bits goes through float32, as in torch.)

    ``dense`` is what the rows are when they are decompressed: the values at their places, +0.0 elsewhere.

    Returns values, indices, those of Wᵀ, and the dense form; outputs that are not requested have shape ``(0,)``.
    """
    dtype = dtype or w.dtype

    def one(wanted: bool, w: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
        if not wanted:
            return w.new_empty(0, dtype=dtype), w.new_empty(0, dtype=torch.uint8 if layout == "canonical" else torch.int32)
        values, indices = compressed(w, kept)
        return values, to_layout(indices, w.shape[1], layout)

    def compressed(w: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
        kept = nm_mask(w, n, m) if kept is None else kept
        if select == "threshold":
            w = soft_threshold(w, n, m)
            if scale is not None:
                w = w.to(compute_dtype(w.dtype)) * scale.reshape(())
        return compress(w.to(dtype), n, m, kept)

    chosen = transposable_mask(w, n, m) if select == "transposable" else mask
    spread = decompress(*compressed(w, chosen), n, m, w.shape[1]) if dense else w.new_empty(0, dtype=dtype)
    return *one(rows, w, chosen), *one(columns, w.t(), None if chosen is None else chosen.t()), spread
