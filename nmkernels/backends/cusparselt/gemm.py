"""compress and matmul: cuSPARSELt's GEMMs in all its dtypes and layouts, including 8-bit ones, which the ops do not support."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...pattern import DtypeError, OptionError, ShapeError
from ..shared import aligned
from .algorithms import plan_for
from .blobs import Blob, compress_as
from .context import ACTIVATIONS, LAYOUTS, RESULTS, Matmul, capturing, device_and_stream, misfit, on_other_device, session_on, width_step

COMPRESS_LAYOUTS = ("nt", "nn", "tn")
"""The layouts that ``compress`` takes."""


def compress(dense: Tensor, layout: str = "nt", mask: Tensor | None = None) -> Blob:
    """Compress a 2:4 matrix into the library's format, for one of the GEMMs of a linear layer.

    Args:
        dense: ``"nt"``: W ``(out, in)``, 2:4 along in. ``"nn"``: W ``(out, in)``, 2:4 along out, as with a transposable mask. ``"tn"``: the
            output's gradient g ``(tokens, out)``, 2:4 along tokens. float16, bfloat16, int8 or float8; both sizes multiples of 16, for
            8-bit dtypes of 32.
        layout: ``"nt"``, ``"nn"`` or ``"tn"``.
        mask: bool, shaped like ``dense``: the values to keep. If None, ``dense`` must be 2:4. Both are checked, which synchronises, except
            during capture of a CUDA graph.

    Returns:
        a ``Blob`` for ``matmul``.

    Raises:
        ShapeError: a size is unsupported, or a group keeps more than 2 of 4 values.
        DtypeError: the library does not support this dtype.
        OptionError: the layout is unknown.
        BackendError: the library is not available.

    Example:
        >>> import torch
        >>> from nmkernels.backends.cusparselt import compress
        >>> compress(torch.ones(16, 16), "tt")
        Traceback (most recent call last):
        nmkernels.pattern.OptionError: compress: layout 'tt' is unknown; it is one of 'nt', 'nn', 'tn'.
    """
    if layout not in COMPRESS_LAYOUTS:
        raise OptionError(f"compress: layout {layout!r} is unknown; it is one of {', '.join(map(repr, COMPRESS_LAYOUTS))}.")
    if dense.dtype not in RESULTS:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in RESULTS)
        raise DtypeError(f"compress: cuSPARSELt multiplies {names}, not {dense.dtype}.")
    if dense.dim() != 2 or (mask is not None and (mask.shape != dense.shape or mask.dtype != torch.bool)):
        mask_text = "" if mask is None else f", and a mask {tuple(mask.shape)} of {mask.dtype}"
        raise ShapeError(f"compress: needs a matrix, and a bool mask of the same shape; got {tuple(dense.shape)}{mask_text}.")
    wrong = misfit(dense.dtype, *dense.shape)
    if wrong:
        raise ShapeError(f"compress: {wrong}; pad with zeros.")
    device, stream = device_and_stream(dense)
    if on_other_device(dense, device):
        with torch.cuda.device(device):
            return compress(dense, layout, mask)
    masked = dense if mask is None else torch.where(mask, _bits(dense), 0).view(dense.dtype)
    transposed, eight = LAYOUTS[layout][0], dense.dtype.itemsize == 1
    if not capturing(dense):
        nonzero = (masked.float() if eight else masked) != 0
        groups = (nonzero.t() if transposed else nonzero).reshape(-1, 4)
        if bool((groups.sum(-1, dtype=torch.int32) > 2).any()):
            way = "first" if transposed else "last"
            raise ShapeError(f"compress: a group of 4 along the {way} dimension keeps more than 2 values; prune it, or pass a mask.")
    if eight and transposed:  # 8-bit operands must be contiguous along the sum
        masked = _bits(masked).t().contiguous().view(masked.dtype)
    return compress_as("nt" if eight else layout, masked, session_on(device), stream, layout)


def _bits(x: Tensor) -> Tensor:
    """8-bit tensors as int8, since torch lacks most operations on float8."""
    return x.view(torch.int8) if x.dtype.itemsize == 1 else x


def matmul(
    blob: Blob, dense: Tensor, bias: Tensor | None = None, activation: str = "", residual: Tensor | None = None, alpha: float = 1.0,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Multiply a compressed matrix and a dense one, in the layout of the blob.

    ``"nt"``: y = f(α x Wᵀ + b); ``"nn"``: dx = f(α g W + b); ``"tn"``: dW = f(α gᵀ x + b); without f, a residual can be added.

    Args:
        blob: from ``compress``.
        dense: nt: x ``(tokens, in)``; nn: g ``(tokens, out)``; tn: x ``(tokens, in)``. In the blob's dtype.
        bias: b, one number per row of the sparse operand, that is per output of the layer (nn: per input); in the result's dtype, float32
            with int8 operands.
        activation: f: ``""``, ``"relu"``, or ``"gelu"`` as implemented by the library.
        residual: in the result's shape and dtype; not with an activation.
        alpha: α; for 8-bit operands the product of their scales.
        out_dtype: for 16-bit operands their own dtype; for int8 int32, int8, float16 or bfloat16; for float8 bfloat16, float16 or float32.
            The first is the default.

    Returns:
        nt: ``(tokens, out)``; nn: ``(tokens, in)``; tn: ``(out, in)``.

    Raises:
        ShapeError, DtypeError, OptionError: the operands or options are unsupported.
        BackendError: the library does not support this GEMM, or none of its algorithms computes it correctly.
    """
    out_dtype = out_dtype or RESULTS[blob.dtype][0]
    by_token = blob.layout != "tn"
    _check(blob, dense, bias, activation, residual, out_dtype)
    device, stream = device_and_stream(dense)
    if on_other_device(dense, device):
        with torch.cuda.device(device):
            return matmul(blob, dense, bias, activation, residual, alpha, out_dtype)
    transposed = not by_token and blob.stored == "nt"  # 8-bit tn is computed as nt: dWᵀ = xᵀ g
    b = _bits(dense).t().contiguous().view(dense.dtype) if transposed else dense
    r = residual.t() if transposed and residual is not None else residual
    width = b.shape[0] if by_token or transposed else b.shape[1]
    pad = -width % max(width_step(blob.dtype), width_step(out_dtype))
    if pad:
        b = _padded(b, by_token or transposed, pad)
        r = _padded(r, by_token or transposed, pad) if r is not None else None
    epilogue = bias is not None, activation, residual is not None
    problem = Matmul(blob.stored, blob.dtype, out_dtype, blob.rows, blob.cols, width + pad, *epilogue)
    session = session_on(device)
    plan = plan_for(problem, session, dense, stream)
    shape = (width + pad, blob.rows) if problem.by_token else (blob.rows, width + pad)
    out = torch.empty(shape, dtype=out_dtype, device=dense.device)
    bias, r = (None if x is None else aligned(x) for x in (bias, r))
    session.run(plan, blob.data.data_ptr(), aligned(b), out, bias, r, stream, alpha)
    y = out[:width] if problem.by_token else out[:, :width]
    return (y.t() if transposed else y).contiguous()


def _padded(x: Tensor, rows: bool, pad: int) -> Tensor:
    """Pad x with ``pad`` rows or columns of zeros."""
    return F.pad(_bits(x.contiguous()), (0, 0, 0, pad) if rows else (0, pad)).view(x.dtype)


def _check(blob: Blob, dense: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None, out_dtype: torch.dtype) -> None:
    by_token = blob.layout != "tn"
    tokens = dense.shape[0] if dense.dim() == 2 else 0
    if dense.dim() != 2 or not dense.numel() or dense.shape[1 if by_token else 0] != blob.cols:
        wanted = f"(tokens, {blob.cols})" if by_token else f"({blob.cols}, in)"
        raise ShapeError(f"matmul: the dense operand has shape {tuple(dense.shape)}; {blob.layout} with this blob needs {wanted}.")
    if dense.dtype != blob.dtype or dense.device != blob.data.device:
        raise DtypeError(f"matmul: the blob is {blob.dtype} on {blob.data.device}, the dense operand {dense.dtype} on {dense.device}.")
    if out_dtype not in RESULTS[blob.dtype]:
        raise DtypeError(f"matmul: the result of {blob.dtype} may be {', '.join(map(str, RESULTS[blob.dtype]))}, not {out_dtype}.")
    if activation not in ACTIVATIONS:
        raise OptionError(f"matmul: activation {activation!r} is unknown; it is one of {', '.join(map(repr, ACTIVATIONS))}.")
    if activation and residual is not None:
        raise OptionError("matmul: the library adds a residual before the activation; add it afterwards.")
    if not out_dtype.is_floating_point and (bias is not None or activation == "gelu"):
        raise OptionError(f"matmul: a bias and GELU have fractions, and the result is {out_dtype}; pass out_dtype=torch.bfloat16.")
    result: tuple[int, ...] = (tokens, blob.rows) if by_token else (blob.rows, dense.shape[1])
    bias_dtype = torch.float32 if blob.dtype == torch.int8 else out_dtype
    for what, x, shape, dtype in (("bias", bias, (blob.rows,), bias_dtype), ("residual", residual, result, out_dtype)):
        if x is not None and (tuple(x.shape) != shape or x.dtype != dtype or x.device != dense.device):
            where = f"{x.dtype} {tuple(x.shape)} on {x.device}"
            raise ShapeError(f"matmul: the {what} is {where}; it must be {dtype} {shape} on {dense.device}.")
