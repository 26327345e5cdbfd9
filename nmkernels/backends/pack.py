"""nm_pack made of a backend's other ops: right for every call, for backends that have no kernel which does it in one read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..reference.layouts import to_layout


@dataclass(frozen=True)
class Parts:
    """A backend's own functions, with the arguments of the raw ops."""

    mask: Callable[..., Tensor]
    soft_threshold: Callable[..., Tensor]
    transposable_mask: Callable[..., Tensor]
    compress: Callable[..., tuple[Tensor, Tensor]]


def pack(
    parts: Parts, w: Tensor, n: int, m: int, select: str, mask: Tensor | None, scale: Tensor | None,
    dtype: torch.dtype | None, rows: bool, columns: bool, layout: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``nm_pack``; a weight whose transpose is contiguous is packed along its columns without a copy."""
    dtype = dtype or w.dtype

    def one(wanted: bool, w: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
        if not wanted:
            return w.new_empty(0, dtype=dtype), w.new_empty(0, dtype=torch.uint8 if layout == "canonical" else torch.int32)
        source = w
        if select == "threshold":
            kept, source = parts.mask(w, n, m), parts.soft_threshold(w, n, m)
            source = source if scale is None else source.float() * scale.reshape(())
        # packed first and cast after, so that only what is kept is written twice
        values, indices = parts.compress(source, n, m, kept)
        return values.to(dtype), to_layout(indices, w.shape[1], layout)

    kept = parts.transposable_mask(w, n, m) if select == "transposable" else mask
    return *one(rows, w, kept), *one(columns, w.t(), None if kept is None else kept.t())


def write_rows(
    nm_pack: Callable[..., tuple[Tensor, ...]], params: Sequence[Tensor], n: int, m: int, packs: Sequence[Tensor] | None, layout: str,
    found_inf: Tensor | None = None,
) -> None:  # fmt: skip
    """The packed weights of ``nm_masked_adamw_`` by row magnitudes, made by the backend's ``nm_pack``.

    With ``found_inf`` set the buffers stay, and the host is not asked.
    """
    if not packs:
        return
    for i, p in enumerate(params):
        values, indices = packs[4 * i : 4 * i + 2]
        if values.numel():
            packed = nm_pack(p, n, m, "magnitude", None, None, values.dtype, True, False, layout)
            for target, new in zip((values, indices), packed, strict=False):
                target.copy_(new if found_inf is None else torch.where(found_inf.reshape(()) != 0, target, new))
