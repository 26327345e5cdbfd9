"""Parse patterns and check tensors, shared by the ops' contracts."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..pattern import DtypeError, OptionError, Pattern, PatternError, PatternLike, ShapeError
from ..reference.layouts import EIGHT_BIT, LAYOUTS, meta_shape, tile_of
from ..reference.linear import ACTIVATIONS

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
STORED = {torch.int8: 8, torch.uint8: 4}
"""Bits of the integers that a compressed tensor of that dtype has as values."""


@lru_cache(maxsize=1024)
def _parsed(spec: Any) -> Pattern:
    return Pattern(spec)


def as_pattern(spec: PatternLike) -> Pattern:
    """Return the ``Pattern`` of a string or pattern argument; strings are parsed once."""
    if isinstance(spec, Pattern):
        return spec
    # a graph would record the cache's lock
    return _parsed(spec) if isinstance(spec, str) and not torch.compiler.is_compiling() else Pattern(spec)


def check_float(op: str, what: str, x: Tensor) -> None:
    if x.dtype not in FLOATS:
        way = "Take .abs() or split real and imaginary parts" if x.is_complex() else "Convert it first, e.g. with .float()"
        raise DtypeError(f"{op}: {what} has dtype {x.dtype}; it must be float16, bfloat16, float32 or float64. {way}.")


def check_same_dtype(op: str, first: str, a: Tensor, second: str, b: Tensor) -> None:
    if a.dtype != b.dtype:
        raise DtypeError(f"{op}: {first} is {a.dtype} and {second} is {b.dtype}; they must be the same. Convert one with .to({a.dtype}).")


def check_device(op: str, **tensors: Tensor | None) -> None:
    (first, device), *rest = [(name, x.device) for name, x in tensors.items() if x is not None]
    for name, other in rest:
        if other != device:
            raise ShapeError(
                f"{op}: {first} is on {device} and {name} is on {other}; all tensors must be on one device. "
                f"Move {name} with .to({str(device)!r})."
            )


def check_matrix(op: str, what: str, x: Tensor) -> None:
    if x.dim() != 2:
        raise ShapeError(
            f"{op}: {what} has shape {tuple(x.shape)}; it must be a matrix. Flatten the leading dimensions with .reshape(-1, size)."
        )


def check_mask(op: str, mask: Tensor, w: Tensor) -> None:
    if mask.dtype != torch.bool:
        raise DtypeError(f"{op}: mask has dtype {mask.dtype}; it must be bool. Compare it, e.g. mask != 0.")
    if mask.shape != w.shape:
        raise ShapeError(f"{op}: mask has shape {tuple(mask.shape)}, the weight {tuple(w.shape)}; they must be equal.")
    check_device(op, w=w, mask=mask)


def check_dense(op: str, w: Tensor, n: int, m: int) -> Pattern:
    """Check a dense tensor that is grouped along its last dimension; return its pattern n:m."""
    p = Pattern(n, m)
    check_float(op, "the input", w)
    if not w.dim():
        raise ShapeError(
            f"{op}: the input is 0-dimensional; groups run along the last dimension, so it needs one. Reshape it to at least 1-D."
        )
    p.check_divides(op, w.shape[-1])
    return p


def check_packed(op: str, values: Tensor, indices: Tensor, n: int, m: int, cols: int, step: Tensor | None = None) -> Pattern:
    """Check a compressed operand with ``cols`` dense columns in canonical form, of integers if it has a step; return its pattern n:m."""
    p, bits = Pattern(n, m), 0
    if step is None:
        check_float(op, "values", values)
    else:
        bits = STORED.get(values.dtype, 0)
        if not bits or step.dtype != torch.bfloat16:
            raise DtypeError(
                f"{op}: values are {values.dtype} with steps of {step.dtype}; they must be int8, or uint8 with two of 4 bits, with "
                "bfloat16 steps. Make them with nm.ops.quantize_values."
            )
    check_indices(op, indices)
    if cols < 0:
        raise ShapeError(f"{op}: cols is {cols}; the number of dense columns cannot be negative.")
    lead, stored = tuple(values.shape[:-1]), -(-p.kept(cols) // 2) if bits == 4 else p.kept(cols)
    for what, tensor, size in (("values", values, stored), ("indices", indices, p.index_bytes(cols, bits != 0))):
        if not values.dim() or tuple(tensor.shape) != (*lead, size):
            raise ShapeError(
                f"{op}: {what} have shape {tuple(tensor.shape)}; {cols} columns at {p} need {(*lead, size)}. Pass the number of dense "
                "columns that was compressed, and the same pattern."
            )
    if step is not None:
        steps = step.shape[-1] if step.dim() else 0
        if tuple(step.shape[:-1]) != lead or (steps != 1 and (not steps or cols % (steps * m))):
            raise ShapeError(
                f"{op}: steps have shape {tuple(step.shape)}; they are {(*lead, 1)}, or more per row if each has a whole number of groups "
                f"of {m} of the {cols} columns."
            )
    check_device(op, values=values, indices=indices, step=step)
    return p


def check_indices(op: str, indices: Tensor) -> None:
    if indices.dtype != torch.uint8:
        raise DtypeError(f"{op}: indices have dtype {indices.dtype}; packed indices are uint8. Make them with nm.ops.compress.")


def check_last(op: str, what: str, x: Tensor, size: int) -> None:
    """Check the last dimension of what a compressed weight multiplies."""
    if not x.dim() or x.shape[-1] != size:
        raise ShapeError(f"{op}: {what} has shape {tuple(x.shape)}; its last dimension must be {size} to match the compressed weight.")


def check_linear(
    op: str, x: Tensor, rows: int, cols: int, bias: Tensor | None, activation: str, residual: Tensor | None
) -> tuple[tuple[Any, torch.dtype]]:
    """Check x, bias, activation and residual of fprop with a weight ``(rows, cols)``; return the shape and dtype of the result."""
    check_last(op, "x", x, cols)
    if activation not in ACTIVATIONS:
        names = ", ".join(repr(name) for name in ACTIVATIONS if name)
        raise OptionError(f"{op}: activation {activation!r} is unknown; choose one of {names}, or None.")
    shape = (*x.shape[:-1], rows)
    for what, extra, wanted in (("bias", bias, (rows,)), ("residual", residual, shape)):
        if extra is not None:
            if extra.shape != wanted:
                raise ShapeError(f"{op}: {what} has shape {tuple(extra.shape)}; it must be {tuple(wanted)} to match the result.")
            check_same_dtype(op, "x", x, what, extra)
            check_device(op, **{"x": x, what: extra})
    return ((shape, x.dtype),)


def check_layout(op: str, layout: str, rows: int, cols: int, pattern: Pattern, dtype: torch.dtype) -> None:
    """Raise unless a ``(rows, cols)`` operand of that pattern and dtype can have the layout."""
    if layout not in LAYOUTS:
        raise OptionError(f"{op}: layout {layout!r} is not known; it is one of {', '.join(map(repr, LAYOUTS))}.")
    if layout == "canonical":
        return
    if (pattern.n, pattern.m) != (2, 4):
        raise PatternError(
            f"{op}: layout {layout!r} holds the metadata of 2:4, which the tensor cores read, not {pattern}. Use 'canonical'."
        )
    if layout == EIGHT_BIT and dtype.itemsize != 1:
        raise DtypeError(f"{op}: layout {layout!r} belongs to 8-bit values, not {dtype}. Make them with nm.ops.quantize_pack.")
    if layout != EIGHT_BIT and dtype.itemsize != 2:
        raise DtypeError(f"{op}: layout {layout!r} belongs to 16-bit values, not {dtype}. Pass dtype=torch.bfloat16, or use 'canonical'.")
    height, width = tile_of(layout)
    if rows % height or cols % width:
        raise ShapeError(
            f"{op}: layout {layout!r} has tiles of {height} rows and {width} columns, and the packed operand is ({rows}, {cols}). "
            "Pad it to whole tiles, or use 'canonical'."
        )


def check_ordered(op: str, values: Tensor, meta: Tensor, pattern: Pattern, layout: str, rows: int, cols: int) -> None:
    """Check a compressed ``(rows, cols)`` operand in a tensor-core layout."""
    check_float(op, "values", values)
    check_layout(op, layout, rows, cols, pattern, values.dtype)
    expected = (rows, cols // 2), meta_shape(rows, cols, layout)
    if (tuple(values.shape), tuple(meta.shape)) != expected:
        raise ShapeError(
            f"{op}: values {tuple(values.shape)} and metadata {tuple(meta.shape)} are not {layout!r} of {(rows, cols)}, "
            f"which has {expected[0]} and {expected[1]}. Make them with nm.ops.pack."
        )
    check_device(op, values=values, meta=meta)
