"""The raw ops of compressed weights whose values are 8- or 4-bit integers with a step: quantise, decode, multiply."""

from __future__ import annotations

import torch
from torch import Tensor

from ..pattern import DtypeError, OptionError, ShapeError
from ..reference.integers import LARGEST
from .check import FLOATS, STORED, check_device, check_float, check_linear, check_matrix, check_packed
from .define import Spec, define

BITS = {"int8": 8, "int4": 4}
"""What ``values=`` may be."""
GROUPS = (128, 64, 32)
"""Columns that share a step at 4 bits, the first that fits."""


def kind_of(values: Tensor) -> str:
    """What stored values are: ``"float"``, ``"int8"`` or ``"int4"``."""
    bits = STORED.get(values.dtype)
    return f"int{bits}" if bits else "float"


def _quantize_values(values: Tensor, bits: int, steps: int) -> tuple[Spec, ...]:
    op = "nm_quantize_values"
    check_float(op, "the values", values)
    if bits not in LARGEST:
        raise OptionError(f"{op}: bits={bits} is neither 8 nor 4.")
    width = values.shape[-1] if values.dim() else 0
    if not values.dim() or steps < 1 or width % steps:
        raise ShapeError(f"{op}: values of shape {tuple(values.shape)} cannot have {steps} steps per row.")
    lead = tuple(values.shape[:-1])
    stored = (width, torch.int8) if bits == 8 else (-(-width // 2), torch.uint8)
    return ((*lead, stored[0]), stored[1]), ((*lead, steps), torch.bfloat16)


def _dequantize_values(values: Tensor, step: Tensor, kept: int, dtype: torch.dtype) -> tuple[Spec, ...]:
    op = "nm_dequantize_values"
    bits = STORED.get(values.dtype)
    if not bits or step.dtype != torch.bfloat16 or dtype not in FLOATS:
        raise DtypeError(f"{op}: values {values.dtype} with steps of {step.dtype} cannot become {dtype}.")
    lead = tuple(values.shape[:-1])
    if not values.dim() or values.shape[-1] != (kept if bits == 8 else -(-kept // 2)):
        raise ShapeError(f"{op}: values of shape {tuple(values.shape)} do not hold {kept} of {bits} bits per row.")
    steps = step.shape[-1] if step.dim() else 0
    if tuple(step.shape[:-1]) != lead or not steps or kept % steps:
        raise ShapeError(f"{op}: steps of shape {tuple(step.shape)} do not divide rows of {kept} values of shape {tuple(values.shape)}.")
    check_device(op, values=values, step=step)
    return (((*lead, kept), dtype),)


def _linear_integers(
    x: Tensor, values: Tensor, indices: Tensor, step: Tensor, n: int, m: int, cols: int, bias: Tensor | None = None, activation: str = "",
    residual: Tensor | None = None,
) -> tuple[Spec, ...]:  # fmt: skip
    op = "nm_linear_integers"
    check_matrix(op, "the compressed operand", values)
    check_packed(op, values, indices, n, m, cols, step)
    check_float(op, "x", x)
    check_device(op, **{"x": x, "the compressed operand": values})
    return check_linear(op, x, values.shape[0], cols, bias, activation, residual)


nm_quantize_values = define(
    "nm_quantize_values", "(Tensor values, int bits, SymInt steps) -> (Tensor, Tensor)", _quantize_values, leading=("values",)
)
nm_dequantize_values = define(
    "nm_dequantize_values",
    "(Tensor values, Tensor step, SymInt kept, ScalarType dtype) -> Tensor",
    _dequantize_values,
    outs=("out",),
    leading=("values", "step"),
)
nm_linear_integers = define(
    "nm_linear_integers",
    "(Tensor x, Tensor values, Tensor indices, Tensor step, int n, int m, SymInt cols, Tensor? bias=None, "
    'str activation="", Tensor? residual=None) -> Tensor',
    _linear_integers,
    leading=("x", "residual"),
)
