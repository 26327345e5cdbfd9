"""compress and decompress: dense to the canonical N:M form and back."""

from __future__ import annotations

import torch
from torch import Tensor

from ..pattern import DtypeError, PatternLike, ShapeError
from ._check import as_pattern, check_dense, check_device, check_packed
from ._define import Spec, define, define_out
from .compressed import Compressed


def _compress(w: Tensor, n: int, m: int, mask: Tensor | None = None) -> tuple[Spec, ...]:
    op = "nm_compress"
    p = check_dense(op, w, n, m)
    if mask is not None:
        if mask.dtype != torch.bool:
            raise DtypeError(f"{op}: mask has dtype {mask.dtype}; it must be bool. Compare it, e.g. mask != 0.")
        if mask.shape != w.shape:
            raise ShapeError(f"{op}: mask has shape {tuple(mask.shape)}, w has {tuple(w.shape)}; they must be the same.")
        check_device(op, w=w, mask=mask)
    cols, lead = w.shape[-1], tuple(w.shape[:-1])
    return ((*lead, cols // m * n), w.dtype), ((*lead, p.index_bytes(cols)), torch.uint8)


def _decompress(values: Tensor, indices: Tensor, n: int, m: int, cols: int) -> tuple[Spec, ...]:
    check_packed("nm_decompress", values, indices, n, m, cols)
    return (((*values.shape[:-1], cols), values.dtype),)


_SCHEMA = "(Tensor w, int n, int m, Tensor? mask=None)"
_DECOMPRESS = "(Tensor values, Tensor indices, int n, int m, SymInt cols)"
nm_compress = define("nm_compress", _SCHEMA + " -> (Tensor, Tensor)", _compress, leading=("w", "mask"))
nm_compress_out = define_out("nm_compress", _SCHEMA, _compress, outs=("out_values", "out_indices"))
nm_decompress = define("nm_decompress", _DECOMPRESS + " -> Tensor", _decompress, leading=("values", "indices"))
nm_decompress_out = define_out("nm_decompress", _DECOMPRESS, _decompress)


def compress(w: Tensor, pattern: PatternLike, mask: Tensor | None = None, out: Compressed | None = None) -> Compressed:
    """The compressed form of ``w``: the N kept values of every group of M and their positions.

    ``values[..., g·N + k] = w[..., g·M + index[..., g·N + k]]``, in order of index; the bits of kept values stay.

    Args:
        w: weights ``(..., in)``, usually ``(out, in)``; any strides.
        pattern: ``"N:M"`` or a ``Pattern``.
        mask: bool, the shape of ``w``: what to keep instead of the N largest magnitudes. A group with fewer than N is filled up
            with zeros at its lowest unkept positions.
        out: a ``Compressed`` of the same pattern, shape and dtype, whose buffers are written.

    Returns:
        ``Compressed`` of shape ``(..., in)``. It has no gradient: backward through it raises.

    Raises:
        ShapeError: ``in`` is not a multiple of M, the mask keeps more than N in a group, or ``out`` does not fit.
        DtypeError: ``w`` is not floating-point, or ``mask`` not bool.

    Example:
        >>> c = compress(torch.tensor([[1.0, 0.0, -2.0, 3.0]]), "2:4")
        >>> c.values, c.indices  # positions 2 and 3: 2 + 3·4
        (tensor([[-2.,  3.]]), tensor([[14]], dtype=torch.uint8))
    """
    p = as_pattern(pattern)
    if out is None:
        values, indices = nm_compress(w, p.n, p.m, mask)
        return Compressed(values, indices, p, w.shape)
    check_same_form("nm_compress", out, p.n, p.m, w.shape)
    nm_compress_out(w, p.n, p.m, mask, out_values=out.values, out_indices=out.indices)
    return out


def decompress(c: Compressed, out: Tensor | None = None) -> Tensor:
    """The dense tensor of a compressed one, zeros included.

    ``y[..., g·M + index] = value``, +0.0 elsewhere.

    Args:
        c: the compressed tensor.
        out: tensor of c's shape and dtype to write into.

    Returns:
        ``c.shape``, the dtype of the values, contiguous.

    Raises:
        ShapeError, DtypeError: ``out`` does not fit.

    Example:
        >>> decompress(compress(torch.tensor([1.0, 0.5, -2.0, 3.0]), "1:4"))
        tensor([0., 0., 0., 3.])
    """
    p, cols = c.pattern, c.shape[-1]
    if out is None:
        return nm_decompress(c.values, c.indices, p.n, p.m, cols)
    nm_decompress_out(c.values, c.indices, p.n, p.m, cols, out=out)
    return out


def check_same_form(op: str, out: Compressed, n: int, m: int, shape: torch.Size) -> None:
    """Raise ``ShapeError`` unless ``out`` holds a tensor of that pattern and dense shape."""
    if (out.pattern.n, out.pattern.m) != (n, m) or out.shape != shape:
        raise ShapeError(f"{op}: out is {out!r}, the result is {n}:{m} of shape {tuple(shape)}. Pass one made from a tensor of that shape.")


__all__ = ["compress", "decompress"]
