"""fprop of a linear layer from a compressed weight, for a batch so small that reading the weight is what takes the time.

Sums are fp32, bias and activation are applied before the only rounding. Indices are not checked, which would make the host wait; one
outside its group reads nothing outside of x.
"""

from __future__ import annotations

from functools import cache, lru_cache
from types import SimpleNamespace

import torch
from torch import Tensor

from ..._dispatch import Verdict
from ._core import DTYPES, contiguous, core, queue, register

FEW_TOKENS = 4
"""Up to so many tokens CUDA cores keep up with memory."""

ACTIVATIONS = {"": 0, "gelu": 1, "silu": 2, "relu2": 3}
"""The kernels' code of each activation."""

EMULATED_PROCESSORS = 2
"""Multiprocessors that the emulator plans for: so few that blocks take several rounds."""


@cache
def _processors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _fits(
    x: Tensor, values: Tensor, indices: Tensor, n: int, m: int, cols: int, bias: Tensor | None = None, activation: str = ""
) -> Verdict:
    tokens = x.shape[:-1].numel()
    if tokens > FEW_TOKENS:
        return False, f"its kernels take up to {FEW_TOKENS} tokens, and this call has {tokens}"
    return True, "a few tokens"


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


@lru_cache(maxsize=4096)
def _splits(emulated: bool, dtype: torch.dtype, tokens: int, rows: int, cols: int, n: int, m: int, processors: int) -> int:
    where = SimpleNamespace(is_cpu=emulated)
    return int(core(where).linear_few_splits(DTYPES[dtype], tokens, rows, cols, n, m, processors))  # type: ignore[arg-type]


@register("nm_linear", _fits)
def linear(
    x: Tensor, values: Tensor, indices: Tensor, n: int, m: int, cols: int, bias: Tensor | None = None, activation: str = "",
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``nm_linear``."""
    rows, tokens = values.shape[0], x.shape[:-1].numel()
    y = x.new_empty(*x.shape[:-1], rows) if out is None else out
    if not y.numel():
        return y
    x, values, indices = contiguous(x), contiguous(values), indices.contiguous()
    b = None if bias is None else contiguous(bias)
    where = queue(x)
    processors = EMULATED_PROCESSORS if x.is_cpu else _processors(where[0])
    splits = _splits(x.is_cpu, x.dtype, tokens, rows, cols, n, m, processors)
    parts = x.new_empty(splits, tokens, rows, dtype=torch.float32) if splits > 1 else None
    addresses = (x.data_ptr(), values.data_ptr(), indices.data_ptr(), _address(b), y.data_ptr(), _address(parts))
    core(x).linear_few(*addresses, DTYPES[x.dtype], ACTIVATIONS[activation], tokens, rows, cols, n, m, splits, processors, *where)
    return y
