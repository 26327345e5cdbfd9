"""GEMMs of a linear layer with a compressed weight.

Up to 16 tokens with canonical indices: kernels bound by reading the weight. Indices are not checked, which would synchronise; an
out-of-range one never reads outside of x. On CUDA cores an inf or NaN of x reaches a result only through a stored value; dense tensor cores
multiply an expanded tile, where it reaches every result of its token, as in a dense GEMM.

More tokens, tensor-core layouts, and wgrad: 2:4 on sparse tensor cores, with ``wgmma.sp`` on GPUs of compute capability 9.0 if rows are a
multiple of 64 and metadata is not in the layout of ``mma.sp``, otherwise with ``mma.sp``. The backend ``cuda-mma.sp`` runs ``mma.sp`` on
the same operands as ``wgmma.sp``, and ``cuda-stream-k`` divides tiles that do not fill a last wave along k, in case they measure
faster. Metadata is not checked; an inf or NaN of the dense operand reaches a result
only through a stored value.

Sums are fp32; bias, activation and residual are applied before the only rounding.
"""

from __future__ import annotations

from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from ...capability import cuda_kernels
from ...dispatch import Verdict
from ...reference.layouts import COLUMNS, WARPS
from ..shared import address, aligned, contiguous
from .compress import metadata
from .core import DTYPES, PRIORITY, core, module_of, queue, register

ACTIVATIONS = {"": 0, "gelu": 1, "silu": 2, "relu2": 3}
"""The kernels' code for each activation."""

EMULATED = (80, 2, 163 << 10, 1410000, 1593000, 5120)
"""The GPU that the emulator plans for, in the form of the core's ``gpu``: an A100 with few multiprocessors, so that blocks run in several
waves."""


@lru_cache(maxsize=4096)
def plan(module: Any, kernel: str, device: int, *sizes: Any) -> tuple[Any, ...]:
    """What the core plans for a kernel and its sizes on a GPU, or for the emulator, device -1.

    The tile, and the number of parts that k is split into; for stream-K the tile, the floats of its workspace, and the estimated time, that
    of ``gemm_wgmma`` being 1.
    """
    return tuple(getattr(module, f"{kernel}_plan")(*sizes, *gpu_of(module, device)))


def gpu_of(module: Any, device: int) -> tuple[int, ...]:
    """Compute capability, multiprocessors, shared memory of a block, clocks and bus width of a GPU, or of the one that is emulated."""
    return EMULATED if device < 0 else _gpu(module, device)


@cache
def _gpu(module: Any, device: int) -> tuple[int, ...]:
    return tuple(module.gpu(device))


@cache
def wgmma_obstacle(module: Any, device: int) -> str:
    """Why ``wgmma.sp`` cannot run on a GPU or in the emulator; empty if it can."""
    return str(module.wgmma_obstacle(device))


def why_not_wgmma(device: torch.device) -> str:
    """The same for any device, even one without these kernels."""
    if device.type != "cuda":
        return f"wgmma.sp is of NVIDIA GPUs, and this is {device}"
    can, reason = cuda_kernels(device.index)
    if not can:
        return reason
    return wgmma_obstacle(module_of(False), torch.cuda.current_device() if device.index is None else device.index)


def not_by_wgmma(values: Tensor, indices: Tensor) -> str:
    """Why ``mma.sp`` and not ``wgmma.sp`` multiplies this operand; empty if ``wgmma.sp`` does."""
    obstacle = wgmma_obstacle(core(values), values.get_device())
    if obstacle:
        return obstacle
    if indices.dtype == torch.int32 and _warps(indices) != WARPS["wgmma.sp"]:
        return "its metadata is in the order of mma.sp"
    if values.shape[0] % 64 or not values.shape[1]:
        return f"wgmma.sp takes 64 rows at once and some columns, and this operand is {values.shape[0]} by {2 * values.shape[1]}"
    return ""


def takes(values: Tensor, indices: Tensor, n: int, m: int, cols: int) -> Verdict:
    """Whether there is a kernel for a compressed operand with ``cols`` columns."""
    if (n, m) != (2, 4):
        return False, f"sparse tensor cores multiply 2:4, and this operand is {n}:{m}; nm.ops.relayout makes 2:4 of some"
    if values.element_size() != 2:
        return False, f"sparse tensor cores multiply 16 bits, and this call is in {values.dtype}"
    rows, tile = values.shape[0], 16 * _warps(indices)
    if rows % tile or cols % COLUMNS:
        return False, f"it takes operands of whole tiles, {tile} rows and {COLUMNS} columns, and this one is ({rows}, {cols})"
    why = not_by_wgmma(values, indices)
    return True, f"sparse tensor cores, by mma.sp: {why}" if why else "sparse tensor cores, by wgmma.sp"


def _warps(indices: Tensor) -> int:
    """Number of warps whose metadata is contiguous; 1 for canonical indices, which will be converted."""
    return indices.shape[-1] // 32 if indices.dtype == torch.int32 else 1


def _straight(x: Tensor | None) -> bool:
    return x is None or (x.is_contiguous() and not x.is_neg())


def multiply(
    values: Tensor, indices: Tensor, dense: Tensor, out: Tensor, n: int, k: int, by_column: bool,
    bias: Tensor | None = None, activation: str = "", residual: Tensor | None = None, by: str = "",
) -> Tensor:  # fmt: skip
    """Compute D = A B for a compressed A ``(m, k)``, into the contiguous ``out``.

    B is ``[n, k]``, and D ``[n, m]``, activation(D + bias) + residual; with ``by_column`` B is ``[k, n]`` and D ``[m, n]``, as it is, and
    not rounded if ``out`` is float32.
    ``by``: ``MMA``, use ``mma.sp`` even if ``wgmma.sp`` could run; or ``STREAM_K``, divide the last wave of ``wgmma.sp`` along k.
    """
    v, i, d, o = values.data_ptr(), indices.data_ptr(), dense.data_ptr(), out.data_ptr()
    b, r = address(bias), address(residual)
    straight = _straight(values) and _straight(dense) and indices.is_contiguous() and _straight(bias) and _straight(residual)
    if not straight or (v | i | d | o | b | r) & 15:
        bias, residual = bias if bias is None else aligned(bias), residual if residual is None else aligned(residual)
        y = torch.empty_like(out) if o & 15 else out
        multiply(aligned(values), aligned(indices), aligned(dense), y, n, k, by_column, bias, activation, residual, by)
        return out if y is out else out.copy_(y)
    m, module, warps = values.shape[0], core(values), _warps(indices)
    by_wgmma = by != MMA and not not_by_wgmma(values, indices)
    if indices.dtype != torch.int32:
        indices = metadata(indices, k, "wgmma.sp" if by_wgmma else "mma.sp")  # kept alive until the call
        i, warps = indices.data_ptr(), _warps(indices)
    kernel, planned = (module.gemm_wgmma_sp, "gemm_wgmma") if by_wgmma else (module.gemm_mma_sp, "gemm")
    sizes = values.get_device(), m, n, k, by_column
    if by == STREAM_K:
        tile, floats, _ = plan(module, "gemm_stream_k", *sizes)
        splits = 0  # the kernel's code for it
    else:
        tile, splits = plan(module, planned, *sizes)
        floats = splits * m * n if splits > 1 else 0
    parts = values.new_empty(floats, dtype=torch.float32) if floats else None
    kernel(
        v, i, d, b, r, o, address(parts), DTYPES[values.dtype], ACTIVATIONS[activation], m, n, k, by_column,
        warps, tile, splits, out.dtype != values.dtype, *queue(values),
    )  # fmt: skip
    return out


def _takes_wgrad(values: Tensor, indices: Tensor, n: int, m: int, cols: int, x: Tensor, *_: Any) -> Verdict:
    if x.shape[1] % 8:  # 16 bytes
        return False, f"it copies 8 columns of x at once, and this one has {x.shape[1]}"
    return takes(values, indices, n, m, cols)


@register("nm_linear_wgrad", _takes_wgrad)
def linear_wgrad(
    values: Tensor, indices: Tensor, n: int, m: int, cols: int, x: Tensor, out_dtype: torch.dtype | None = None, out: Tensor | None = None,
    by: str = "",
) -> Tensor:  # fmt: skip
    y = x.new_empty(values.shape[0], x.shape[1], dtype=out_dtype or x.dtype) if out is None else out
    return multiply(values, indices, x, y, x.shape[1], cols, True, by=by) if y.numel() else y


FEW_TOKENS = 4
"""Most tokens for CUDA cores, in every dtype and pattern: on an H100 they take 0.7 to 1.0 of the time of tensor cores for 4."""

MOST_TOKENS = 16
"""Most tokens for which dense tensor cores keep up, with canonical indices."""


@lru_cache(maxsize=4096)
def _plan(
    module: Any, dtype: torch.dtype, tokens: int, rows: int, cols: int, n: int, m: int, wide: bool, processors: int, shared: int
) -> tuple[str, int]:
    """The kernel, and the number of parts that it splits columns into; ``wide``: values and indices are aligned to 16 and 4 bytes."""
    sizes = DTYPES[dtype], tokens, rows, cols, n, m, processors
    if wide and tokens > FEW_TOKENS:
        splits = module.linear_mma_splits(*sizes, shared)
        if splits:
            return "linear_mma", splits
    if tokens <= FEW_TOKENS:
        return "linear_few", module.linear_few_splits(*sizes)
    return "linear_expand", module.linear_expand_splits(*sizes)


def tokens_of(x: Tensor, cols: int) -> int:
    return x.numel() // cols if cols else x.shape[:-1].numel()


def _supports(x: Tensor, values: Tensor, indices: Tensor, n: int, m: int, cols: int, *_: Any) -> Verdict:
    tokens = tokens_of(x, cols)
    if _for_gemm(indices, tokens):
        can, reason = answer = takes(values, indices, n, m, cols)
        if not can and tokens > MOST_TOKENS:
            return False, f"its kernels of canonical indices take up to {MOST_TOKENS} tokens, and this call has {tokens}; {reason}"
        return answer
    if tokens > FEW_TOKENS and x.dtype == torch.float32:
        return False, f"more than {FEW_TOKENS} tokens are multiplied by tensor cores, in 16 bits, and this call has {tokens} in float32"
    return True, "a small batch"


def _for_gemm(indices: Tensor, tokens: int) -> bool:
    return tokens > MOST_TOKENS or indices.dtype == torch.int32


@register("nm_linear", _supports, layout=lambda device: "mma.sp" if why_not_wgmma(device) else "wgmma.sp")
def linear(
    x: Tensor, values: Tensor, indices: Tensor, n: int, m: int, cols: int, bias: Tensor | None = None, activation: str = "",
    residual: Tensor | None = None, out: Tensor | None = None, by: str = "",
) -> Tensor:  # fmt: skip
    rows, tokens = values.shape[0], tokens_of(x, cols)
    y = x.new_empty(*x.shape[:-1], rows) if out is None else out
    if not y.numel():
        return y
    if _for_gemm(indices, tokens):
        return multiply(values, indices, x, y, tokens, cols, False, bias, activation, residual, by)
    x, values, indices = contiguous(x), contiguous(values), indices.contiguous()
    b, r = None if bias is None else contiguous(bias), None if residual is None else contiguous(residual)
    module = core(x)
    _, processors, shared, *_ = gpu_of(module, x.get_device())
    wide = not (values.data_ptr() & 15 or indices.data_ptr() & 3)
    kernel, splits = _plan(module, x.dtype, tokens, rows, cols, n, m, wide, processors, shared)
    if kernel == "linear_mma" and x.data_ptr() & 15:
        x = x.clone()
    parts = x.new_empty(splits, tokens, rows, dtype=torch.float32) if splits > 1 else None
    addresses = (x.data_ptr(), values.data_ptr(), indices.data_ptr(), address(b), address(r), y.data_ptr(), address(parts))
    getattr(module, kernel)(
        *addresses, DTYPES[x.dtype], ACTIVATIONS[activation], tokens, rows, cols, n, m, splits, processors, *queue(x)
    )  # fmt: skip
    return y


# ---- on the operands of wgmma.sp, in case it measures faster

MMA, STREAM_K = "cuda-mma.sp", "cuda-stream-k"
SMALL = 1 << 16
"""Elements of a result for which stream-K runs whatever its estimate, among them the calls that check a kernel before its first use."""


def _takes_by(by: str, op: str, *args: Any) -> Verdict:
    """What ``wgmma.sp`` multiplies; by stream-K only if that is estimated to be faster, or the call is small."""
    wgrad = op == "nm_linear_wgrad"
    x, values, indices, n, m, cols = (args[5], *args[:5]) if wgrad else args[:6]
    if indices.dtype != torch.int32:
        return False, "it reads metadata, in the order of wgmma.sp, and this operand has canonical indices"
    can, reason = answer = _takes_wgrad(*args) if wgrad else takes(values, indices, n, m, cols)
    why = not_by_wgmma(values, indices) if can else ""
    if why:
        return False, f"{'cuda multiplies by mma.sp itself' if by == MMA else 'it divides tiles of wgmma.sp'}: {why}"
    if by == MMA or not can:
        return answer
    width = x.shape[1] if wgrad else tokens_of(x, cols)
    if not width or not values.shape[0]:
        return False, "there is nothing to divide"
    *_, time = plan(core(values), "gemm_stream_k", values.get_device(), values.shape[0], width, cols, wgrad)
    if time == float("inf"):
        return False, "all waves of tiles are full"
    if time >= 1 and values.shape[0] * width > SMALL:
        return False, f"it is estimated to take {time:.2f} of the time without"
    return True, f"{reason}, the last wave of tiles divided along k: {time:.2f} of the estimated time without"


for _by, _priority in ((MMA, PRIORITY - 1), (STREAM_K, PRIORITY - 2)):
    for _op, _fn in (("nm_linear", linear), ("nm_linear_wgrad", linear_wgrad)):
        register(_op, partial(_takes_by, _by, _op), backend=_by, priority=_priority)(partial(_fn, by=_by))
