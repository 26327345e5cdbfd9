"""fprop of a linear layer from a compressed weight: kernels for a batch so small that reading the weight is what takes the time.

More tokens, and operands in the order of tensor cores, are for ``gemm``. Sums are fp32, bias, activation and residual are applied before
the only rounding. Indices are not checked, which would make the host wait; one outside its group reads nothing outside of x. On CUDA cores
an inf or NaN of x reaches a result only through a stored value; tensor cores multiply a dense tile, where it reaches every result of its
token, as in the dense product.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from ..._dispatch import Verdict
from . import gemm
from ._core import DTYPES, contiguous, core, queue, register

FEW_TOKENS = 4
"""Up to so many tokens CUDA cores keep up with memory, in every dtype and pattern."""

MOST_TOKENS = 16
"""Up to so many tokens they keep up on dense tensor cores, for canonical indices."""

TENSOR_CORES_FROM = {4: 3}
"""Where tensor cores take fewer tokens too, by M. Counted in machine code for sm_90a, a stored value of 2:4 costs 5.9 instructions there
for up to 8 tokens, one of 1:4 8.0, and on CUDA cores 6.2, 8.9 and 13.2 for 1, 2 and 4; an H200 has 15. With larger M they cost alike."""

EMULATED_PROCESSORS = 2
"""Multiprocessors that the emulator plans for: so few that blocks take several rounds."""

_RUNS = True, "a small batch"


@cache
def _processors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _target(x: Tensor) -> int:
    return EMULATED_PROCESSORS if x.is_cpu else _processors(x.get_device())


@lru_cache(maxsize=4096)
def _plan(
    module: Any, dtype: torch.dtype, tokens: int, rows: int, cols: int, n: int, m: int, aligned: bool, processors: int
) -> tuple[str, int]:
    """The kernel, and the parts that it cuts columns into."""
    sizes = DTYPES[dtype], tokens, rows, cols, n, m, processors
    if aligned and tokens >= TENSOR_CORES_FROM.get(m, FEW_TOKENS + 1):
        splits = module.linear_mma_splits(*sizes)
        if splits:
            return "linear_mma", splits
    if tokens <= FEW_TOKENS:
        return "linear_few", module.linear_few_splits(*sizes)
    return "linear_expand", module.linear_expand_splits(*sizes)


def _tokens(x: Tensor, cols: int) -> int:
    return x.numel() // cols if cols else x.shape[:-1].numel()


def _supports(x: Tensor, values: Tensor, indices: Tensor, n: int, m: int, cols: int, *_: Any) -> Verdict:
    tokens = _tokens(x, cols)
    if _for_gemm(indices, tokens):
        can, reason = found = gemm.takes(values, indices, n, m, cols)
        if not can and tokens > MOST_TOKENS:
            return False, f"its kernels of canonical indices take up to {MOST_TOKENS} tokens, and this call has {tokens}; {reason}"
        return found
    if tokens > FEW_TOKENS and x.dtype == torch.float32:
        return False, f"more than {FEW_TOKENS} tokens are multiplied by tensor cores, in 16 bits, and this call has {tokens} in float32"
    return _RUNS


def _for_gemm(indices: Tensor, tokens: int) -> bool:
    return tokens > MOST_TOKENS or indices.dtype == torch.int32


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


@register("nm_linear", _supports)
def linear(
    x: Tensor, values: Tensor, indices: Tensor, n: int, m: int, cols: int, bias: Tensor | None = None, activation: str = "",
    residual: Tensor | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``nm_linear``."""
    rows, tokens = values.shape[0], _tokens(x, cols)
    y = x.new_empty(*x.shape[:-1], rows) if out is None else out
    if not y.numel():
        return y
    if _for_gemm(indices, tokens):
        return gemm.multiply(values, indices, x, y, tokens, cols, False, bias, activation, residual)
    x, values, indices = contiguous(x), contiguous(values), indices.contiguous()
    b, r = None if bias is None else contiguous(bias), None if residual is None else contiguous(residual)
    module, processors = core(x), _target(x)
    aligned = not (values.data_ptr() & 15 or indices.data_ptr() & 3)
    kernel, splits = _plan(module, x.dtype, tokens, rows, cols, n, m, aligned, processors)
    if kernel == "linear_mma" and x.data_ptr() & 15:
        x = x.clone()
    parts = x.new_empty(splits, tokens, rows, dtype=torch.float32) if splits > 1 else None
    addresses = (x.data_ptr(), values.data_ptr(), indices.data_ptr(), _address(b), _address(r), y.data_ptr(), _address(parts))
    getattr(module, kernel)(
        *addresses, DTYPES[x.dtype], gemm.ACTIVATIONS[activation], tokens, rows, cols, n, m, splits, processors, *queue(x)
    )  # fmt: skip
    return y
