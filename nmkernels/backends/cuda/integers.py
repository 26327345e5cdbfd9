"""Compressed weights whose values are integers: decoding, and the linear layer.

Up to 16 tokens the stored integers are read once and multiplied as they are: 2:4 with x in 16 bits on sparse tensor cores, x as two digits
of 8 bits; all else on CUDA cores in fp32, four tokens at a time. More are decoded once, and ``linear`` multiplies them. Rounding to
integers, once per model, is left to the reference.

Indices are not checked; an out-of-range one never reads outside of x. On sparse tensor cores they must ascend in each group, as
``compress`` writes them, or results are undefined. An inf or NaN of x reaches a result only through a stored value.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...dispatch import Verdict
from ..shared import DENSE, address, contiguous, packed_sizes
from .core import DTYPES, core, queue, register
from .linear import ACTIVATIONS, FEW_TOKENS, MOST_TOKENS, gpu_of, linear, takes, tokens_of

BITS = {torch.int8: 8, torch.uint8: 4}
"""Bits of an integer by the dtype that stores it."""


@register("nm_dequantize_values")
def dequantize_values(values: Tensor, step: Tensor, kept: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    values, step = values.contiguous(), contiguous(step)
    result = values.new_empty((*values.shape[:-1], kept), dtype=dtype) if out is None else out
    if result.numel():
        core(values).dequantize(
            values.data_ptr(), step.data_ptr(), values.shape[:-1].numel(), kept, step.shape[-1], BITS[values.dtype], DTYPES[dtype],
            result.data_ptr(), *queue(values),
        )  # fmt: skip
    return result


def _supports(x: Tensor, values: Tensor, indices: Tensor, step: Tensor, n: int, m: int, cols: int, *_: Any) -> Verdict:
    tokens = tokens_of(x, cols)
    if m == 1:
        return DENSE
    if tokens <= MOST_TOKENS:
        return True, "a small batch"
    if x.dtype != torch.bfloat16:
        why = "which lacks the range of a step" if x.dtype == torch.float16 else "which tensor cores do not multiply"
        return False, f"it decodes integers to x's dtype for more than {MOST_TOKENS} tokens, {why} in {x.dtype}; this call has {tokens}"
    decoded = x.new_empty(1, 1).expand(values.shape[0], packed_sizes(n, m, cols)[0])
    can, reason = answer = takes(decoded, indices, n, m, cols)
    return answer if can else (False, f"its kernels of integers take up to {MOST_TOKENS} tokens, and this call has {tokens}; {reason}")


@lru_cache(maxsize=4096)
def _plan(module: Any, dtype: torch.dtype, tokens: int, wide: bool, sizes: tuple[int, ...]) -> list[tuple[str, int, int, int]]:
    """The launches: a kernel, its first token, its number of tokens, and that of the parts that it splits columns into; none: decode.

    Bytes for each stored integer of 8 bits at 2:4, of which 1.25 are read by a kernel here: to decode it to bf16 and multiply that reads or
    writes 5.25. Sparse tensor cores multiply 16 tokens in one pass. Four passes on CUDA cores read 5, but cost 60 instructions, where 5.25
    bytes of an H200's memory leave time for 37. ``sizes``: rows, cols, N, M, bits, steps and multiprocessors.
    """
    if wide:
        splits = module.linear_integers_splits(DTYPES[dtype], tokens, *sizes)
        if splits:
            return [("linear_integers", 0, tokens, splits)]
    if tokens > FEW_TOKENS and dtype == torch.bfloat16:
        return []
    some = [(first, min(FEW_TOKENS, tokens - first)) for first in range(0, tokens, FEW_TOKENS)]
    return [("linear_few_integers", first, count, module.linear_few_integers_splits(DTYPES[dtype], count, *sizes)) for first, count in some]


@register("nm_linear_integers", _supports)
def linear_integers(
    x: Tensor, values: Tensor, indices: Tensor, step: Tensor, n: int, m: int, cols: int, bias: Tensor | None = None, activation: str = "",
    residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    rows, tokens, steps = values.shape[0], tokens_of(x, cols), step.shape[-1]
    y = x.new_empty(*x.shape[:-1], rows)
    if not y.numel():
        return y
    values, indices, step = values.contiguous(), indices.contiguous(), contiguous(step)
    module, bits = core(x), BITS[values.dtype]
    sizes = rows, cols, n, m, bits, steps, gpu_of(module, x.get_device())[1]
    wide = not (values.data_ptr() | indices.data_ptr()) & 15
    launches = _plan(module, x.dtype, tokens, wide, sizes) if tokens <= MOST_TOKENS else []
    if not launches:
        decoded = dequantize_values(values, step, packed_sizes(n, m, cols)[0], x.dtype)
        return linear(x, decoded, indices, n, m, cols, bias, activation, residual, out=y)
    x, bias = contiguous(x), None if bias is None else contiguous(bias)
    residual = None if residual is None else contiguous(residual)
    if x.data_ptr() & 15:
        x = x.clone()
    most = max(count * splits for _, _, count, splits in launches)
    parts = x.new_empty(most, rows, dtype=torch.float32) if any(splits > 1 for *_, splits in launches) else None
    weight, size = (values.data_ptr(), indices.data_ptr(), step.data_ptr(), address(bias)), x.element_size()
    for kernel, first, count, splits in launches:
        of_y = first * rows * size
        r = 0 if residual is None else residual.data_ptr() + of_y
        getattr(module, kernel)(
            x.data_ptr() + first * cols * size, *weight, r, y.data_ptr() + of_y, address(parts), DTYPES[x.dtype], ACTIVATIONS[activation],
            count, rows, cols, n, m, bits, steps, splits, sizes[-1], *queue(x),
        )  # fmt: skip
    return y
