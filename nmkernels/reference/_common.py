"""What every reference family shares: argument checks, the compute dtype, and groups as a last axis."""

from __future__ import annotations

import torch
from torch import Tensor

from ..pattern import DtypeError, Pattern, ShapeError

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that arithmetic runs in: float64 for float64, else float32 (results are rounded once)."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_float(op: str, name: str, x: Tensor) -> None:
    """Raise ``DtypeError`` unless ``x`` is float16, bfloat16, float32 or float64."""
    if x.dtype not in FLOATS:
        raise DtypeError(f"{op}: {name} has dtype {x.dtype}, but only float16, bfloat16, float32 and float64 are supported; cast it first.")


def check(op: str, w: Tensor, n: int, m: int) -> Pattern:
    """The pattern n:m, after checking that ``w`` is a float tensor whose last dimension holds whole groups.

    Raises:
        PatternError, DtypeError, ShapeError: naming ``op``.
    """
    pattern = Pattern(n, m)
    check_float(op, "the tensor", w)
    if w.dim() == 0:
        raise ShapeError(f"{op}: a 0-d tensor has no dimension to group by {pattern}; give at least one dimension.")
    pattern.check_divides(op, w.shape[-1])
    return pattern


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
