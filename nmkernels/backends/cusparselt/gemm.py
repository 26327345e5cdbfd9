"""compress and matmul: cuSPARSELt's GEMMs in every dtype and layout that it has, 8 bits too, which the ops have no room for."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...pattern import DtypeError, OptionError, ShapeError
from ..shared import aligned
from .algorithms import ready_for
from .blobs import Blob, compress_as
from .context import ACTIVATIONS, LAYOUTS, RESULTS, Problem, capturing, elsewhere, here, misfit, place, width_step

GIVEN = ("nt", "nn", "tn")
"""The layouts that ``compress`` takes."""


def compress(dense: Tensor, layout: str = "nt", mask: Tensor | None = None) -> Blob:
    """A 2:4 matrix in the library's own form, for one of the GEMMs of a linear layer.

    Args:
        dense: ``"nt"``: W ``(out, in)``, 2:4 along in. ``"nn"``: W ``(out, in)``, 2:4 along out, as a transposable mask leaves it.
            ``"tn"``: the output's gradient g ``(tokens, out)``, 2:4 along tokens. float16, bfloat16, int8 or float8; both sizes
            multiples of 16, in 8 bits of 32.
        layout: one of these.
        mask: bool of the same shape: what is kept. Without one, ``dense`` must be 2:4 as it is; that is checked, for which the host
            waits, except while a CUDA graph is captured.

    Raises:
        ShapeError: the sizes do not fit, or more than 2 of 4 are kept.
        DtypeError: the library does not multiply this dtype.
        OptionError: the layout is unknown.
        BackendError: there is no library.

    Example:
        >>> import torch
        >>> from nmkernels.backends.cusparselt import compress
        >>> compress(torch.ones(16, 16), "tt")
        Traceback (most recent call last):
        nmkernels.pattern.OptionError: compress: layout 'tt' is unknown; it is one of 'nt', 'nn', 'tn'.
    """
    if layout not in GIVEN:
        raise OptionError(f"compress: layout {layout!r} is unknown; it is one of {', '.join(map(repr, GIVEN))}.")
    if dense.dtype not in RESULTS:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in RESULTS)
        raise DtypeError(f"compress: cuSPARSELt multiplies {names}, not {dense.dtype}.")
    if dense.dim() != 2 or (mask is not None and (mask.shape != dense.shape or mask.dtype != torch.bool)):
        given = "" if mask is None else f", and a mask {tuple(mask.shape)} of {mask.dtype}"
        raise ShapeError(f"compress: needs a matrix, and a bool mask of its shape; got {tuple(dense.shape)}{given}.")
    wrong = misfit(dense.dtype, *dense.shape)
    if wrong:
        raise ShapeError(f"compress: {wrong}; pad with zeros.")
    device, stream = place(dense)
    if elsewhere(dense, device):
        with torch.cuda.device(device):
            return compress(dense, layout, mask)
    kept = dense if mask is None else torch.where(mask, _bits(dense), 0).view(dense.dtype)
    transposed, eight = LAYOUTS[layout][0], dense.dtype.itemsize == 1
    if not capturing(dense):
        nonzero = (kept.float() if eight else kept) != 0
        groups = (nonzero.t() if transposed else nonzero).reshape(-1, 4)
        if bool((groups.sum(-1, dtype=torch.int32) > 2).any()):
            way = "first" if transposed else "last"
            raise ShapeError(f"compress: a group of 4 along the {way} dimension keeps more than 2 values; prune it, or pass a mask.")
    if eight and transposed:  # 8 bits are read along the sum only
        kept = _bits(kept).t().contiguous().view(kept.dtype)
    return compress_as("nt" if eight else layout, kept, here(device), stream, layout)


def _bits(x: Tensor) -> Tensor:
    """What torch works on in 8 bits, of which it knows too little as floats."""
    return x.view(torch.int8) if x.dtype.itemsize == 1 else x


def matmul(
    blob: Blob, dense: Tensor, bias: Tensor | None = None, activation: str = "", residual: Tensor | None = None, alpha: float = 1.0,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """The GEMM of a compressed matrix and a dense one, in the layout that the blob was made for.

    ``"nt"``: y = f(α x Wᵀ + b) + ...; ``"nn"``: dx = f(α g W + b); ``"tn"``: dW = f(α gᵀ x + b); with a residual r and no f, + r

    Args:
        blob: from ``compress``.
        dense: nt: x ``(tokens, in)``; nn: g ``(tokens, out)``; tn: x ``(tokens, in)``. In the blob's dtype.
        bias: one number per row of the sparse operand, that is per output of the layer (nn: per input); in the result's dtype, float32
            with int8 operands.
        activation: f: ``""``, ``"relu"``, or ``"gelu"`` as the library has it.
        residual: of the result's shape and dtype; not together with an activation.
        alpha: a factor, the product of both operands' scales in 8 bits.
        out_dtype: the operands' own in 16 bits; int32, int8, float16 or bfloat16 of int8; bfloat16, float16 or float32 of float8. The first
            is the default.

    Returns:
        nt: ``(tokens, out)``; nn: ``(tokens, in)``; tn: ``(out, in)``.

    Raises:
        ShapeError, DtypeError, OptionError: the operands do not fit.
        BackendError: the library does not do this GEMM, or none of its algorithms computes it right.
    """
    out_dtype = out_dtype or RESULTS[blob.dtype][0]
    by_token = blob.layout != "tn"
    _check(blob, dense, bias, activation, residual, out_dtype)
    device, stream = place(dense)
    if elsewhere(dense, device):
        with torch.cuda.device(device):
            return matmul(blob, dense, bias, activation, residual, alpha, out_dtype)
    transposed = not by_token and blob.stored == "nt"  # in 8 bits, as nt: dWᵀ = xᵀ g
    b = _bits(dense).t().contiguous().view(dense.dtype) if transposed else dense
    r = residual.t() if transposed and residual is not None else residual
    width = b.shape[0] if by_token or transposed else b.shape[1]
    pad = -width % max(width_step(blob.dtype), width_step(out_dtype))
    if pad:
        b = _padded(b, by_token or transposed, pad)
        r = _padded(r, by_token or transposed, pad) if r is not None else None
    epilogue = bias is not None, activation, residual is not None
    problem = Problem(blob.stored, blob.dtype, out_dtype, blob.rows, blob.cols, width + pad, *epilogue)
    at = here(device)
    ready = ready_for(problem, at, dense, stream)
    shape = (width + pad, blob.rows) if problem.by_token else (blob.rows, width + pad)
    out = torch.empty(shape, dtype=out_dtype, device=dense.device)
    bias, r = (None if x is None else aligned(x) for x in (bias, r))
    at.run(ready, blob.address, aligned(b), out, bias, r, stream, alpha)
    y = out[:width] if problem.by_token else out[:, :width]
    return (y.t() if transposed else y).contiguous()


def _padded(x: Tensor, rows: bool, pad: int) -> Tensor:
    """With more rows, or columns, of zeros."""
    return F.pad(_bits(x.contiguous()), (0, 0, 0, pad) if rows else (0, pad)).view(x.dtype)


def _check(blob: Blob, dense: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None, out_dtype: torch.dtype) -> None:
    by_token = blob.layout != "tn"
    tokens = dense.shape[0] if dense.dim() == 2 else 0
    if dense.dim() != 2 or not dense.numel() or dense.shape[1 if by_token else 0] != blob.cols:
        wanted = f"(tokens, {blob.cols})" if by_token else f"({blob.cols}, in)"
        raise ShapeError(f"matmul: the dense operand has shape {tuple(dense.shape)}; {blob.layout} with this blob takes {wanted}.")
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
