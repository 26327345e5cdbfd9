"""2:4 GEMMs of 8-bit operands on the sparse tensor cores, with torch's dense GEMMs in bf16 and in float8.

``nmkernels cuda`` promotes sums of e4m3 products to fp32 every 128 products; ``fast`` leaves them to the tensor cores; ``int8`` is exact.
Quantizing the activations is not timed: it is part of the op that computes them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from nmkernels import ops, testing

from ..device import rotated
from ..registry import Grid, Provider, Ratio, Spec, Work, family
from . import _ours
from .gemm import BF16, CUBE, CUBE_TOKENS, FFN
from .linear import part
from .machine import last_level_cache

OP, E4M3 = "nm_linear_quantized", torch.float8_e4m3fn
MODES = {"": (E4M3, False), ", fast": (E4M3, True), ", int8": (torch.int8, False)}
"""The dtype of both operands, and whether sums stay in the tensor cores."""


@family(
    OP,
    grids=(Grid((CUBE,), dtypes=BF16, tokens=(CUBE_TOKENS,), on="cuda"), Grid(FFN, dtypes=BF16, tokens=(16, 1024, 4096), on="cuda")),
)
def fprop(spec: Spec, device: str) -> Work:
    """``y = x Wᵀ`` in bf16 from 8-bit operands, with a scale for each row of both."""
    w = _ours.normal(spec.rows, spec.cols, device=device, dtype=spec.torch_dtype)
    x = _ours.normal(spec.tokens, spec.cols, device=device, dtype=spec.torch_dtype, seed=1)
    cache = last_level_cache(device) if device.startswith("cuda") else 0
    full, moved = 2.0 * spec.tokens * spec.rows * spec.cols, spec.tokens * (spec.cols + 2 * spec.rows)
    found: list[Provider] = []
    for how, (dtype, fast) in MODES.items():
        found += _ours.ours(
            OP, *_provider_args(how, ops.quantize(x, dtype, rows=True), ops.quantize_pack(w, dtype, rows=True), fast, spec, cache)
        )
    dense = rotated(w, w.nbytes, cache, torch.Tensor.clone)
    theirs = [Provider("torch dense", lambda: F.linear(x, dense()), w.nbytes + 2 * moved, full)]
    x8, w8 = (ops.quantize(t, E4M3, rows=True) for t in (x, w))
    float8 = rotated(w8, w8.values.nbytes, cache, lambda q: ops.Quantized(q.values.clone(), q.step.clone()))
    for how, fast in ((", float8", False), (", float8, fast", True)):

        def scaled(fast: bool = fast) -> torch.Tensor:
            at = float8()
            steps = {"scale_a": x8.step.reshape(-1, 1), "scale_b": at.step.reshape(1, -1)}
            return torch._scaled_mm(x8.values, at.values.t(), **steps, out_dtype=spec.torch_dtype, use_fast_accum=fast)

        if _ours.works(scaled, device):
            theirs.append(Provider(f"torch dense{how}", scaled, w8.values.nbytes + moved, full))
    ratios = [Ratio("x dense", p.name, ("torch dense",)) for p in found]
    ratios += [Ratio("x float8 dense", p.name, tuple(q.name for q in theirs[1:])) for p in found if theirs[1:]]
    return Work([*found, *theirs], ratios)


def _provider_args(
    how: str, x: ops.Quantized, w: ops.QuantizedPacked, fast: bool, spec: Spec, cache: int
) -> tuple[tuple[object, ...], Callable[[], Provider]]:
    """The op's arguments, and the function that makes a provider of them."""

    def call(x: ops.Quantized, w: ops.QuantizedPacked, dtype: torch.dtype = spec.torch_dtype) -> torch.Tensor:
        return ops.linear_quantized(x, w, dtype=dtype, fast_accumulate=fast)

    def check() -> None:
        y = call(x, w)
        for some in part(spec.tokens):
            few = ops.Quantized(x.values[some], x.step[some])
            with _ours.forced("reference"):
                testing.assert_no_worse(y[some], call(few, w), call(few, w, torch.float32).double(), spec.op)

    packed = w.values.nbytes + w.meta.nbytes
    weight = rotated(w, packed, cache, lambda q: ops.QuantizedPacked(q.values.clone(), q.meta.clone(), q.step))
    moved, flops = packed + spec.tokens * (spec.cols + 2 * spec.rows), 1.0 * spec.tokens * spec.rows * spec.cols
    return (*x, *w, None, spec.torch_dtype, False, fast), lambda: Provider(how, lambda: call(x, weight()), moved, flops, check=check)
