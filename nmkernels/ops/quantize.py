"""8-bit tensors with a step size, and the GEMM of two of them, one packed at 2:4 for tensor cores."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..pattern import DtypeError, OptionError, Pattern, ShapeError
from ..reference.common import compute_dtype
from ..reference.layouts import EIGHT_BIT, meta_shape
from ..reference.quantize import LARGEST, scale_for
from .check import check_device, check_float, check_layout, check_matrix
from .compress import Compressed
from .define import Spec, define
from .derivatives import require_no_grad
from .pack import nm_metadata

_HARDWARE = Pattern(2, 4)
RESULTS = (torch.bfloat16, torch.float16, torch.float32)
"""Result dtypes of the GEMM."""


class Quantized(NamedTuple):
    """x ``(rows, cols)`` as 8-bit ``values`` of the same shape, x ≈ values · step; ``step``: fp32, 0-d or one per row.

    Example:
        >>> quantize(torch.eye(2), torch.int8).values[0]
        tensor([127,   0], dtype=torch.int8)
    """

    values: Tensor
    step: Tensor


class QuantizedPacked(NamedTuple):
    """W ``(rows, cols)`` at 2:4 as 8-bit ``values`` ``(rows, cols/2)``, positions ``meta`` in layout ``"wgmma.sp.8bit"``, and ``step``.

    Example:
        >>> quantize_pack(torch.randn(64, 128), torch.int8).values.shape
        torch.Size([64, 64])
    """

    values: Tensor
    meta: Tensor
    step: Tensor


def _check_eight(op: str, dtype: torch.dtype) -> None:
    if dtype not in LARGEST:
        raise OptionError(f"{op}: dtype {dtype} is not an 8-bit dtype; use one of {', '.join(map(str, LARGEST))}.")


def _check_scale(op: str, what: str, scale: Tensor, rows: int, wide: torch.dtype) -> None:
    if scale.dtype != wide or (scale.numel() != 1 and scale.shape != (rows,)):
        raise ShapeError(
            f"{op}: {what} is {scale.dtype} of shape {tuple(scale.shape)}; it is {wide}, one number or one for each of {rows} rows."
        )


def _quantize(x: Tensor, scale: Tensor, dtype: torch.dtype, transposed: bool) -> tuple[Spec, ...]:
    op = "nm_quantize"
    check_float(op, "the input", x)
    check_matrix(op, "the input", x)
    _check_eight(op, dtype)
    shape = (x.shape[1], x.shape[0]) if transposed else tuple(x.shape)
    _check_scale(op, "the scale", scale, shape[0], compute_dtype(x.dtype))
    check_device(op, x=x, scale=scale)
    return ((shape, dtype),)


def _quantize_pack(w: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Spec, ...]:
    op = "nm_quantize_pack"
    check_float(op, "the weight", w)
    check_matrix(op, "the weight", w)
    _check_eight(op, dtype)
    rows, cols = w.shape
    check_layout(op, EIGHT_BIT, rows, cols, _HARDWARE, dtype)
    _check_scale(op, "the scale", scale, rows, compute_dtype(w.dtype))
    check_device(op, w=w, scale=scale)
    return ((rows, cols // 2), dtype), (meta_shape(rows, cols, EIGHT_BIT), torch.int32)


def _linear_quantized(
    x: Tensor, x_step: Tensor, values: Tensor, meta: Tensor, step: Tensor, bias: Tensor | None, dtype: torch.dtype, transposed: bool,
    fast: bool,
) -> tuple[Spec, ...]:  # fmt: skip
    op = "nm_linear_quantized"
    check_matrix(op, "x", x)
    check_matrix(op, "the weight", values)
    for what, operand in (("x", x), ("the weight", values)):
        if operand.dtype not in LARGEST:
            raise DtypeError(
                f"{op}: {what} is {operand.dtype}, which is not an 8-bit dtype. Make it with nm.ops.quantize or nm.ops.quantize_pack."
            )
    if (x.dtype == torch.int8) != (values.dtype == torch.int8):
        raise DtypeError(f"{op}: x is {x.dtype} and the weight is {values.dtype}; int8 can only be multiplied by int8.")
    rows, cols = values.shape[0], 2 * values.shape[1]
    check_layout(op, EIGHT_BIT, rows, cols, _HARDWARE, values.dtype)
    if x.shape[1] != cols:
        raise ShapeError(f"{op}: x has shape {tuple(x.shape)}; its last dimension must be {cols} to match the packed weight.")
    if tuple(meta.shape) != meta_shape(rows, cols, EIGHT_BIT) or meta.dtype != torch.int32:
        raise ShapeError(
            f"{op}: metadata is {meta.dtype} of shape {tuple(meta.shape)}, and a weight of ({rows}, {cols}) has int32 of "
            f"{meta_shape(rows, cols, EIGHT_BIT)}. Make it with nm.ops.quantize_pack."
        )
    _check_scale(op, "x's step", x_step, x.shape[0], torch.float32)
    _check_scale(op, "the weight's step", step, rows, torch.float32)
    if dtype not in RESULTS:
        raise OptionError(f"{op}: the result cannot be {dtype}; it is one of {', '.join(map(str, RESULTS))}.")
    if bias is not None and (bias.shape != (rows,) or bias.dtype != dtype):
        raise ShapeError(f"{op}: bias is {bias.dtype} of shape {tuple(bias.shape)}; it must be {dtype} of ({rows},).")
    check_device(op, x=x, x_step=x_step, values=values, meta=meta, step=step, bias=bias)
    return (((rows, x.shape[0]) if transposed else (x.shape[0], rows), dtype),)


nm_quantize = define("nm_quantize", "(Tensor x, Tensor scale, ScalarType dtype, bool transposed) -> Tensor", _quantize)
nm_quantize_pack = define("nm_quantize_pack", "(Tensor w, Tensor scale, ScalarType dtype) -> (Tensor values, Tensor meta)", _quantize_pack)
nm_linear_quantized = define(
    "nm_linear_quantized",
    "(Tensor x, Tensor x_step, Tensor values, Tensor meta, Tensor step, Tensor? bias, ScalarType dtype, bool transposed, bool fast) "
    "-> Tensor",
    _linear_quantized,
)


def quantize(x: Tensor, dtype: torch.dtype, *, rows: bool = False, transposed: bool = False) -> Quantized:
    """Round x to 8 bits, scaled by its largest magnitude: x ≈ values · step, step = max|x| / largest number of ``dtype``.

    Rounds to nearest, ties to even. If x has an infinity or NaN, so has the step, or all values are NaN.

    Args:
        x: ``(rows, cols)``, a float tensor.
        dtype: ``torch.float8_e4m3fn``, ``torch.float8_e5m2`` or ``torch.int8``.
        rows: one step per row of the result, instead of one for all.
        transposed: return xᵀ ``(cols, rows)``, row-major, as 8-bit tensor cores require.

    Raises:
        OptionError: ``dtype`` is not one of these.
        ShapeError, DtypeError: ``x`` is not a floating-point matrix.

    Example:
        >>> quantize(torch.tensor([[1.0, -2.0], [0.3, 4.0]]), torch.int8).values
        tensor([[  32,  -64],
                [  10,  127]], dtype=torch.int8)
    """
    require_no_grad("nm_quantize", x=x)
    _check_eight("nm_quantize", dtype)
    scale = scale_for(x.t() if transposed else x, dtype, rows)
    return Quantized(nm_quantize(x, scale, dtype, transposed), 1.0 / scale)


def quantize_pack(w: Tensor, dtype: torch.dtype, *, rows: bool = False) -> QuantizedPacked:
    """Pack a weight at 2:4 by magnitude with 8-bit values, rounded as by ``quantize``, in the layout of ``wgmma.sp`` for 8-bit operands.

    Reads w twice: once for the largest magnitude, once to pack it.

    Args:
        w: ``(out, in)``, a float tensor; ``out`` a multiple of 64, ``in`` of 128.
        dtype, rows: see ``quantize``.

    Raises:
        OptionError, ShapeError, DtypeError: as ``quantize``; or the sizes are not multiples of a tile.

    Example:
        >>> p = quantize_pack(torch.randn(64, 128), torch.float8_e4m3fn, rows=True)
        >>> p.values.shape, p.meta.shape, p.step.shape
        (torch.Size([64, 64]), torch.Size([1, 1, 256]), torch.Size([64]))
    """
    require_no_grad("nm_quantize_pack", w=w)
    _check_eight("nm_quantize_pack", dtype)
    scale = scale_for(w, dtype, rows)
    values, meta = nm_quantize_pack(w, scale, dtype)
    return QuantizedPacked(values, meta, 1.0 / scale)


def _packed(c: Compressed) -> QuantizedPacked:
    """A 2:4 weight of int8 values with a step per row in the layout of 8-bit tensor cores; cached."""
    op = "nm_linear_quantized"
    if c.kind != "int8" or c.group or len(c.shape) != 2:
        raise OptionError(
            f"{op}: the weight is {c!r}; it must be a matrix of int8 values with one step per row. Make it with "
            'nm.ops.quantize_values(c, "int8"), or multiply by nm.ops.linear, which leaves x as it is.'
        )
    rows, cols = c.shape
    check_layout(op, EIGHT_BIT, rows, cols, c.pattern, c.dtype)

    def build(c: Compressed) -> QuantizedPacked:
        assert c.step is not None
        return QuantizedPacked(c.values, nm_metadata(c.indices, cols, EIGHT_BIT), c.step.float().squeeze(-1))

    packed: QuantizedPacked = c.layout(EIGHT_BIT, build)
    return packed


def linear_quantized(
    x: Quantized, w: QuantizedPacked | Compressed, bias: Tensor | None = None, *, dtype: torch.dtype = torch.bfloat16,
    transposed: bool = False, fast_accumulate: bool = False,
) -> Tensor:  # fmt: skip
    """The output ``y = x Wᵀ + b`` of a linear layer from 8-bit operands, W at 2:4; the steps are applied to the sum.

    Runs ``wgmma.sp`` on GPUs of compute capability 9.0; elsewhere the fp32 reference, which saves no time. With the packed gradient gᵀ and
    ``quantize(x, ..., transposed=True)`` it computes the weight gradient, transposed.

    Args:
        x: ``(tokens, in)``.
        w: ``(out, in)``; both int8, or both float8 of either kind. A ``Compressed`` at 2:4 with int8 values and a step per row
            (``quantize_values``) is brought into the layout once and cached; ``out`` must be a multiple of 64, ``in`` of 128.
        bias: ``(out,)`` in ``dtype``, added before the only rounding.
        dtype: of the result: bfloat16, float16 or float32.
        transposed: return yᵀ ``(out, tokens)``.
        fast_accumulate: True leaves float8 sums to the tensor cores, which accumulate with about 14 bits (DeepSeek-V3 report, arXiv
            2412.19437, §3.3.2). False adds partial sums in fp32 every 128 products.

    Raises:
        ShapeError, DtypeError, OptionError: the operands do not match.
        OptionError, PatternError, ShapeError: a ``Compressed`` has other values, steps, pattern or sizes.

    Example:
        >>> w, x = torch.eye(128)[:64], torch.ones(1, 128)
        >>> linear_quantized(quantize(x, torch.int8), quantize_pack(w, torch.int8), dtype=torch.float32).sum()
        tensor(64.)
    """
    packed = _packed(w) if isinstance(w, Compressed) else w
    return nm_linear_quantized(*x, *packed, bias, dtype, transposed, fast_accumulate)
