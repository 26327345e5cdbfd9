"""What every reference family shares: argument checks, the compute dtype, groups as a last axis, sums in a fixed order, distances."""

from __future__ import annotations

import torch
from torch import Tensor

from ..pattern import DtypeError, Pattern, ShapeError

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that arithmetic runs in: float64 for float64, else float32 (results are rounded once)."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_float(op: str, what: str, x: Tensor) -> None:
    """Raise ``DtypeError`` unless ``x`` is fp16, bf16, fp32 or fp64."""
    if x.dtype not in FLOATS:
        way = "take .abs() or split real and imaginary parts" if x.is_complex() else "convert it first, e.g. with .float()"
        raise DtypeError(f"{op}: {what} has dtype {x.dtype}; it must be float16, bfloat16, float32 or float64. {way[0].upper()}{way[1:]}.")


def check(op: str, w: Tensor, n: int, m: int) -> Pattern:
    """The pattern n:m, after the checks of every op that groups a dense tensor along its last dimension."""
    p = Pattern(n, m)
    check_float(op, "the input", w)
    if not w.dim():
        raise ShapeError(
            f"{op}: the input is 0-dimensional; groups run along the last dimension, so it needs one. Reshape it to at least 1-D."
        )
    if w.shape[-1] % m:
        p.check_divides(op, int(w.shape[-1]))
    return p


def check_packed(op: str, values: Tensor, indices: Tensor, n: int, m: int, cols: int) -> Pattern:
    """The checks of every op that takes a compressed operand of ``cols`` dense columns."""
    p = Pattern(n, m)
    check_float(op, "values", values)
    if indices.dtype != torch.uint8:
        raise DtypeError(f"{op}: indices have dtype {indices.dtype}; packed indices are uint8. Make them with nm.ops.compress.")
    if cols < 0:
        raise ShapeError(f"{op}: cols is {cols}; the number of dense columns cannot be negative.")
    kept, size = p.kept(cols), p.index_bytes(cols)
    if not values.dim() or values.shape[-1] != kept:
        raise ShapeError(
            f"{op}: values have shape {tuple(values.shape)}; {cols} columns at {p} store {kept} values per row. "
            "Pass the number of dense columns that was compressed, and the same pattern."
        )
    if indices.shape != (*values.shape[:-1], size):
        raise ShapeError(
            f"{op}: indices have shape {tuple(indices.shape)}; {cols} columns at {p} need {(*values.shape[:-1], size)} "
            f"({p.index_bits} bits per kept element, each row starting on a byte). Make them with nm.ops.compress."
        )
    if values.device != indices.device:
        check_device(op, values=values, indices=indices)
    return p


def check_matrix(op: str, what: str, x: Tensor) -> None:
    """Raise ``ShapeError`` unless ``x`` is 2-D."""
    if x.dim() != 2:
        raise ShapeError(
            f"{op}: {what} has shape {tuple(x.shape)}; it must be a matrix. Flatten the leading dimensions with .reshape(-1, size)."
        )


def check_same_dtype(op: str, first: str, a: Tensor, second: str, b: Tensor) -> None:
    """Raise ``DtypeError`` unless both have one dtype."""
    if a.dtype != b.dtype:
        raise DtypeError(f"{op}: {first} is {a.dtype} and {second} is {b.dtype}; they must be the same. Convert one with .to({a.dtype}).")


def check_device(op: str, **tensors: Tensor | None) -> None:
    """Raise ``ShapeError`` unless all tensors are on one device."""
    first: tuple[str, torch.device] | None = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if first is None:
            first = (name, tensor.device)
        elif tensor.device != first[1]:
            raise ShapeError(
                f"{op}: {first[0]} is on {first[1]} and {name} is on {tensor.device}; all tensors must be on one device. "
                f"Move {name} with .to({str(first[1])!r})."
            )


def grouped(x: Tensor, m: int) -> Tensor:
    """``[..., cols]`` seen as ``[..., cols / m, m]``."""
    return x.unflatten(-1, (x.shape[-1] // m, m))


def magnitude_keys(w: Tensor) -> Tensor:
    """Integers that order as the magnitudes of ``w`` do, with every NaN equal and above infinity.

    The bits of a non-negative IEEE number, read as an integer, order as the number does; so the sign bit is
    cleared (-0.0 equals 0.0) and everything past infinity becomes one value.
    """
    ints = {2: torch.int16, 4: torch.int32, 8: torch.int64}[w.element_size()]
    infinity = int(torch.tensor(float("inf"), dtype=w.dtype).view(ints))
    return (w.resolve_neg().view(ints) & torch.iinfo(ints).max).clamp_max(infinity + 1)


CHUNK = 4096
"""Elements in one partial sum."""


def chunked_sum(x: Tensor) -> Tensor:
    """Sum every element in float64, 0-d: partials over 4096-element chunks of the row-major flattening, added in order.

    sum = ((c_0 + c_1) + c_2) + ..., c_k = ((x_{4096k} + x_{4096k+1}) + ...), each addition rounded once in float64.
    """
    flat = x.reshape(-1).to(torch.float64)
    # cumsum adds from left to right; a zero in front changes no sum and gives the empty tensor a last element.
    whole, rest = flat[: flat.numel() // CHUNK * CHUNK], flat[flat.numel() // CHUNK * CHUNK :]
    partials = whole.view(-1, CHUNK).cumsum(-1)[:, -1] if whole.numel() else whole
    last = rest.cumsum(0)[-1:]
    return torch.cat([flat.new_zeros(1), partials, last]).cumsum(0)[-1]


WINDOW = 1 << 24
"""Elements that are compared at once."""


def distance(y: Tensor, z: Tensor) -> float:
    """The largest |y − z| of two matrices of one shape, in float64, in pieces; NaN where either has one, 0 for empty ones."""
    if not y.numel():
        return 0.0
    step = max(1, WINDOW // y.shape[1])
    return float(torch.stack([(y[i : i + step].double() - z[i : i + step]).abs().max() for i in range(0, len(y), step)]).max())
