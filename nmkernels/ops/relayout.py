"""relayout: a compressed matrix in the order in which tensor cores read its positions."""

from __future__ import annotations

import torch
from torch import Tensor

from ..pattern import DtypeError, Pattern, PatternError, ShapeError
from ..reference.layouts import check_layout, meta_shape
from ._define import Spec, define
from .compressed import Compressed
from .packed import DeviceCompressed

_HARDWARE = Pattern(2, 4)


def _metadata(indices: Tensor, cols: int, layout: str) -> tuple[Spec, ...]:
    op = "nm_metadata"
    if indices.dtype != torch.uint8:
        raise DtypeError(f"{op}: indices have dtype {indices.dtype}; packed indices are uint8. Make them with nm.ops.compress.")
    if indices.dim() != 2 or indices.shape[1] * 8 != cols:
        raise ShapeError(f"{op}: indices of shape {tuple(indices.shape)} are not those of {cols} columns at 2:4, (rows, {cols // 8}).")
    if layout == "canonical":
        raise ShapeError(f"{op}: canonical indices are in that order already; ask for 'mma.sp' or 'wgmma.sp'.")
    check_layout(op, layout, indices.shape[0], cols, _HARDWARE, torch.bfloat16)
    return ((meta_shape(indices.shape[0], cols, layout), torch.int32),)


nm_metadata = define("nm_metadata", "(Tensor indices, SymInt cols, str layout) -> Tensor", _metadata, floats=False)


def tensor_core_pattern(pattern: Pattern) -> bool:
    """Whether every weight of the pattern is a 2:4 one too: at most 2 of every M, and M a multiple of 4.

    Example:
        >>> [tensor_core_pattern(Pattern(p)) for p in ("2:4", "1:4", "2:8", "1:16", "4:8", "1:2")]
        [True, True, True, True, False, False]
    """
    return pattern.n <= 2 and pattern.m % 4 == 0


def relayout(c: Compressed, layout: str) -> DeviceCompressed:
    """A compressed matrix for the tensor cores: the same values, their positions as metadata of ``mma.sp`` or ``wgmma.sp``.

    2:4 keeps its values. At most 2 of every M, M a multiple of 4 (1:4, 2:8, 1:16, ...), is a 2:4 matrix with zeros among its values, and
    is packed as one: half of all columns are stored then, whatever the pattern was.

    Args:
        c: ``(rows, cols)`` in 16 bits, rows a multiple of 16 (wgmma.sp: 64), cols of 64.
        layout: ``"mma.sp"`` or ``"wgmma.sp"``; see ``DeviceCompressed``.

    Returns:
        ``DeviceCompressed`` of pattern 2:4, its values those of ``c`` where that is 2:4.

    Raises:
        OptionError: there is no such layout. PatternError: a pattern that tensor cores cannot read. ShapeError: no matrix of whole tiles.
        DtypeError: the values have not 16 bits.

    Example:
        >>> from nmkernels import ops
        >>> w = ops.prune(torch.randn(16, 64, dtype=torch.bfloat16), "1:8")
        >>> d = relayout(ops.compress(w, "1:8"), "mma.sp")
        >>> d.pattern, d.meta.shape, torch.equal(d.dense(), w)
        (Pattern("2:4"), torch.Size([1, 1, 32]), True)
    """
    op, p = "nm_metadata", c.pattern
    if not tensor_core_pattern(p):
        raise PatternError(f"{op}: {p} is not always 2:4, which tensor cores read; at most 2 of every M are, with M a multiple of 4.")
    if len(c.shape) != 2:
        raise ShapeError(f"{op}: the operand has shape {tuple(c.shape)}; it must be a matrix.")
    rows, cols = c.shape
    check_layout(op, layout, rows, cols, _HARDWARE, c.dtype)
    if p == _HARDWARE:
        return DeviceCompressed(c.values, nm_metadata(c.indices, cols, layout), layout, p, c.shape)
    values, meta, _, _ = torch.ops.nmkernels.nm_pack(c.dense(), 2, 4, "magnitude", None, None, None, True, False, layout)
    return DeviceCompressed(values, meta, layout, _HARDWARE, c.shape)


__all__ = ["relayout", "tensor_core_pattern"]
