"""pack: the weight of a layer, compressed along its rows, its columns or both, in the dtype and order that its products read."""

from __future__ import annotations

import torch
from torch import Tensor

from ..pattern import Pattern, PatternLike
from ..reference.layouts import meta_shape
from ..reference.pack import check_pack
from ._check import as_pattern, check_device
from ._define import Spec, define
from ._grad import refuse_grad
from .compressed import Compressed
from .packed import DeviceCompressed, Packed


def _pack(
    w: Tensor, n: int, m: int, select: str, mask: Tensor | None, scale: Tensor | None,
    dtype: torch.dtype | None, rows: bool, columns: bool, layout: str,
) -> tuple[Spec, ...]:  # fmt: skip
    p = check_pack("nm_pack", w, n, m, select, mask, scale, dtype, rows, columns, layout)
    check_device("nm_pack", w=w, mask=mask, scale=scale)
    height, width = w.shape
    dtype = dtype or w.dtype
    return *operand_specs(p, height, width, dtype, layout, rows), *operand_specs(p, width, height, dtype, layout, columns)


def operand_specs(p: Pattern, rows: int, cols: int, dtype: torch.dtype, layout: str, wanted: bool = True) -> tuple[Spec, Spec]:
    """The values and the indices, or metadata, of a dense ``(rows, cols)``; both ``(0,)`` where they are not wanted."""
    kind = torch.uint8 if layout == "canonical" else torch.int32
    if not wanted:
        return ((0,), dtype), ((0,), kind)
    shape = (rows, p.index_bytes(cols)) if layout == "canonical" else meta_shape(rows, cols, layout)
    return ((rows, cols // p.m * p.n), dtype), (shape, kind)


nm_pack = define(
    "nm_pack",
    "(Tensor w, int n, int m, str select, Tensor? mask, Tensor? scale, ScalarType? dtype, bool rows, bool columns, str layout) "
    "-> (Tensor values, Tensor indices, Tensor values_t, Tensor indices_t)",
    _pack,
)


def pack(
    w: Tensor,
    pattern: PatternLike,
    mask: str | Tensor = "magnitude",
    *,
    scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
    rows: bool = True,
    columns: bool = False,
    layout: str = "canonical",
) -> Packed:
    """A weight packed for the forward pass, its transpose for the backward one, cast on the way; one read where there is a kernel for it.

    ``rows = compress(cast(W), M)`` and ``columns = compress(cast(Wᵀ), Mᵀ)``, the mask taken from w as it is, the fp32 master weight.

    Args:
        w: the weight ``(out, in)``; any strides.
        pattern: ``"N:M"`` or a ``Pattern``.
        mask: ``"magnitude"``: the N largest of every group of the operand. ``"transposable"``: ``transposable_mask(w)``, for W and Wᵀ.
            ``"threshold"``: as magnitude, and the values are ``soft_threshold`` times ``scale`` (S-STE, Hu et al. 2024, arXiv 2409.09099).
            Or a bool tensor of w's shape; a group with fewer than N is filled up with zeros at its lowest unkept positions.
        scale: of ``"threshold"``: one fp32 element (fp64 for fp64 weights) on w's device; the product is rounded to fp32, then ``dtype``.
        dtype: of the values, rounded once to nearest even; w's own if not given, whose bits stay.
        rows: pack W. columns: pack Wᵀ. Both at once need ``"transposable"`` or a mask.
        layout: ``"canonical"``; or ``"mma.sp"`` or ``"wgmma.sp"``: 2:4 and 16-bit values, in tiles of 16, or 64, rows and 64 columns.

    Returns:
        ``Packed``, its parts ``Compressed``, or ``DeviceCompressed`` in a device layout. It has no gradient: backward through it raises.

    Raises:
        ShapeError: ``w`` is no matrix, does not divide, or the mask keeps more than N in a group of an operand that is packed.
        PatternError: rows and columns by magnitudes, which are two different weights; a device layout of another pattern than 2:4.
        DtypeError: ``w`` or ``dtype`` is not floating-point, ``mask`` not bool; a device layout of values that have not 16 bits.
        OptionError: ``mask`` or ``layout`` is not known, ``scale`` stands beside another mask, or neither rows nor columns are wanted.

    Example:
        >>> p = pack(torch.tensor([[1.0, 0.0, -2.0, 3.0]]), "2:4", dtype=torch.bfloat16)
        >>> p.rows.values, p.rows.indices, p.columns
        (tensor([[-2.,  3.]], dtype=torch.bfloat16), tensor([[14]], dtype=torch.uint8), None)
    """
    p = as_pattern(pattern)
    select, given = ("given", mask) if isinstance(mask, Tensor) else (mask, None)
    values, indices, values_t, indices_t = nm_pack(w, p.n, p.m, select, given, scale, dtype, rows, columns, layout)
    height, width = w.shape

    def part(wanted: bool, values: Tensor, indices: Tensor, shape: tuple[int, int]) -> Compressed | DeviceCompressed | None:
        if not wanted:
            return None
        values = refuse_grad("nm_pack", w, values)
        return Compressed(values, indices, p, shape) if layout == "canonical" else DeviceCompressed(values, indices, layout, p, shape)

    return Packed(part(rows, values, indices, (height, width)), part(columns, values_t, indices_t, (width, height)))


__all__ = ["pack"]
