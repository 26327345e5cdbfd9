"""Compressed weights whose values are integers: rounding to them and back, and the linear layer.

Products with few tokens read the stored integers; for more, values are decoded once and ``linear`` multiplies them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...dispatch import Verdict
from ...reference.linear import ACTIVATIONS
from ..shared import Scratch, address, contiguous
from .core import DTYPES, core, register, supports
from .groups import check_indices
from .linear import linear

FEW = 24
"""Tokens up to which rows are decoded one by one in the cache; held to AVX2, 32 tokens take 22 ms so and 16 ms decoded at once (4096 x 4096
at 2:4, int8, x in bf16, one thread of a Sapphire Rapids, 2026-11-26)."""
BY_DIGITS = {(1, 1), (2, 4), (1, 4), (1, 8)}
"""Patterns whose products with more tokens are of integers."""


def _few(isa: str, dtype: torch.dtype, n: int, m: int) -> int:
    """The most tokens for which the stored integers are multiplied as they are; for more, values are decoded once.

    In 4096 x 4096, int8, x in bf16, one thread, with AMX 128 tokens take 8.4 ms as integers and 9.6 ms decoded (Sapphire Rapids,
    2026-11-26). With VNNI alone 24 tokens take 4.8 and 8.0 ms at 2:4 and 48 9.1 and 9.4; at 1:4 12 take 2.4 and 2.9 and 24 4.5 and 4.0; at
    1:8 12 take 2.2 and 1.8 (Zen 4, 2026-11-27). Dense, 49152 x 576, 16 take 10.9 ms and a bf16 GEMM 11.7, 32 take 21.6 and 15.8 (Zen 4,
    2026-11-30).
    """
    if dtype == torch.float32 or (n, m) not in BY_DIGITS or isa not in ("amx", "avx512_bf16"):
        return FEW
    return 128 if isa == "amx" else 16 if m == 1 else 72 * n // m


_decoded = Scratch()


@register("nm_quantize_values")
def quantize_values(values: Tensor, bits: int, steps: int) -> tuple[Tensor, Tensor]:
    w, lead, stored = contiguous(values), values.shape[:-1], values.shape[-1]
    integers = w.new_empty((*lead, stored if bits == 8 else -(-stored // 2)), dtype=torch.int8 if bits == 8 else torch.uint8)
    step = w.new_empty((*lead, steps), dtype=torch.bfloat16)
    core().quantize_values(
        w.data_ptr(), DTYPES[w.dtype], lead.numel(), stored, steps, bits, integers.data_ptr(), step.data_ptr(), torch.get_num_threads()
    )
    return integers, step


def _decodes(values: Tensor, step: Tensor, kept: int, dtype: torch.dtype, *rest: Any) -> Verdict:
    if dtype == torch.float64:
        return False, "it decodes to float32, bfloat16 and float16, and this call is for float64"
    return supports(values, step)


@register("nm_dequantize_values", _decodes)
def dequantize_values(values: Tensor, step: Tensor, kept: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    values, step = values.contiguous(), contiguous(step)
    result = values.new_empty((*values.shape[:-1], kept), dtype=dtype) if out is None else out
    core().dequantize_values(
        values.data_ptr(), step.data_ptr(), values.shape[:-1].numel(), kept, step.shape[-1], 8 if values.dtype == torch.int8 else 4,
        DTYPES[dtype], result.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return result


def _dense(
    x: Tensor, weight: Tensor, indices: Tensor, n: int, m: int, cols: int, bias: Tensor | None, activation: str, residual: Tensor | None
) -> Tensor:
    """``linear`` with a weight that has no zeros and no indices."""
    y = ACTIVATIONS[activation](F.linear(x, weight, bias))
    return y if residual is None else y + residual


@register("nm_linear_integers")
def linear_integers(
    x: Tensor, values: Tensor, indices: Tensor, step: Tensor, n: int, m: int, cols: int, bias: Tensor | None = None, activation: str = "",
    residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    shape, rows, stored, module = x.shape, values.shape[0], -(-cols // m) * n, core()
    multiply: Any = linear if m > 1 else _dense
    tokens = x.numel() // cols if cols else shape[:-1].numel()
    if tokens > _few(module.isa(), x.dtype, n, m):
        # fp16 lacks the range of a step
        wide = torch.float32 if x.dtype == torch.float16 else x.dtype
        extras = [None if extra is None else extra.to(wide) for extra in (bias, residual)]
        decoded = dequantize_values(values, step, stored, wide, out=_decoded.like(values, (rows, stored), wide))
        return multiply(x.to(wide), decoded, indices, n, m, cols, extras[0], activation, extras[1]).to(x.dtype)
    x, values, indices, step = contiguous(x), values.contiguous(), indices.contiguous(), contiguous(step)
    bias = None if bias is None else contiguous(bias)
    # what follows the product is done in fp32, and rounded once
    plain = not activation and residual is None
    y = x.new_empty((*shape[:-1], rows), dtype=x.dtype if plain else torch.float32)
    valid = module.linear_integers(
        x.data_ptr(), values.data_ptr(), indices.data_ptr(), step.data_ptr(), address(bias), y.data_ptr(), DTYPES[x.dtype], DTYPES[y.dtype],
        tokens, rows, cols, stored, step.shape[-1], 8 if values.dtype == torch.int8 else 4, n, m, torch.get_num_threads(),
    )  # fmt: skip
    if not valid:
        check_indices("linear_integers", valid, m)
    if plain:
        return y
    y = ACTIVATIONS[activation](y)
    return (y if residual is None else y + residual.float()).to(x.dtype)
