"""pack: the weight of a layer, compressed along its rows, its columns or both, in the dtype and order that its products read."""

from __future__ import annotations

import torch
from torch import Tensor

from ..pattern import Pattern, PatternLike
from ..reference.pack import check_operands, check_pack, operand_shapes
from ._check import as_pattern, check_device, check_matrix
from ._define import Spec, define
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
    return *_operand(p, height, width, dtype, layout, rows), *_operand(p, width, height, dtype, layout, columns)


def _operand(p: Pattern, rows: int, cols: int, dtype: torch.dtype, layout: str, wanted: bool) -> tuple[Spec, Spec]:
    """The values and the indices, or metadata, of a dense ``(rows, cols)``; both ``(0,)`` where they are not wanted."""
    values, indices, kind = operand_shapes(p, rows, cols, layout)
    return (values if wanted else (0,), dtype), (indices if wanted else (0,), kind)


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
    check: bool = True,
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
        check: False: a bool mask is N:M for certain, so that the host need not wait for a GPU to say so. One that is not gives anything.
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
    select, given = ("given" if check else "held", mask) if isinstance(mask, Tensor) else (mask, None)
    values, indices, values_t, indices_t = nm_pack(w, p.n, p.m, select, given, scale, dtype, rows, columns, layout)
    height, width = w.shape
    return Packed(
        _form(values, indices, layout, p, (height, width)) if rows else None,
        _form(values_t, indices_t, layout, p, (width, height)) if columns else None,
    )


def _form(values: Tensor, indices: Tensor, layout: str, p: Pattern, shape: tuple[int, int]) -> Compressed | DeviceCompressed:
    return Compressed(values, indices, p, shape) if layout == "canonical" else DeviceCompressed(values, indices, layout, p, shape)


def empty_packed(
    w: Tensor,
    pattern: PatternLike,
    *,
    dtype: torch.dtype | None = None,
    rows: bool = True,
    columns: bool = False,
    layout: str = "canonical",
) -> Packed:
    """Uninitialised buffers of the shape that ``pack`` would return, for ``masked_adamw_(..., packs=)`` to write.

    Args:
        w: the weight ``(out, in)``, of which only shape, dtype and device are looked at. The others as in ``pack``.

    Raises:
        ShapeError, PatternError, DtypeError, OptionError: as ``pack``.

    Example:
        >>> empty_packed(torch.ones(64, 128), "2:4", dtype=torch.float16, columns=True, layout="mma.sp").columns.meta.shape
        torch.Size([8, 1, 32])
    """
    p, dtype = as_pattern(pattern), dtype or w.dtype
    check_matrix("empty_packed", "the weight", w)
    check_operands("empty_packed", w.shape, p, dtype, rows, columns, layout)

    def part(height: int, width: int) -> Compressed | DeviceCompressed:
        values, indices, kind = operand_shapes(p, height, width, layout)
        return _form(w.new_empty(values, dtype=dtype), w.new_empty(indices, dtype=kind), layout, p, (height, width))

    height, width = w.shape
    return Packed(part(height, width) if rows else None, part(width, height) if columns else None)


__all__ = ["empty_packed", "pack"]
