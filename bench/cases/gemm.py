"""2:4 GEMM of many tokens on the sparse tensor cores, compared with cuBLAS and torch's own 2:4 path.

``nmkernels cuda`` is ``wgmma.sp`` if that runs, with ``mma.sp`` as ``nmkernels cuda-mma.sp``, and otherwise ``mma.sp``. ``nmkernels
cuda-stream-k``, where the last wave of tiles is divided along k, is also compared with the former. Triton multiplies the canonical form.
cuSPARSELt has two rows: with its default algorithm, and with the fastest found by a search, which is stored on disk as by ``nm.tune``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from nmkernels import BackendError, ops
from nmkernels.backends.cuda.linear import STREAM_K
from nmkernels.gemm.forms import layout_on
from nmkernels.ops.linear import nm_linear
from nmkernels.ops.pack import positions

from ..device import rotated
from ..registry import Grid, Provider, Ratio, Spec, Work, family
from ..shapes import MODELS
from . import _ours
from .linear import no_worse, semi_structured
from .machine import last_level_cache

BF16 = ("bfloat16",)
TOKENS = (16, 64, 256, 1024, 4096, 16384)
CUBE, CUBE_TOKENS = "8192x8192", 8192
FFN, FFN_TOKENS = tuple(MODELS["llama3-8b"][name] for name in ("up", "down")), (1, 16, 512, 4096, 8192)
"""Llama-3-8B's up (and gate) and down projections."""

LAYERS = tuple(dict.fromkeys(matrix for model in ("llama3-8b", "vit-l") for matrix in MODELS[model].values()))


@family(
    "nm_linear(cores)",
    grids=(
        Grid((CUBE,), dtypes=BF16, tokens=(CUBE_TOKENS,), on="cuda"),
        Grid(LAYERS, dtypes=BF16, tokens=TOKENS, on="cuda"),
        Grid(FFN, dtypes=BF16, tokens=FFN_TOKENS, on="cuda"),
    ),
)
def fprop(spec: Spec, device: str) -> Work:
    """``y = x Wᵀ`` with W as packed by MaskedAdamW, and in the canonical form; both compared with the dense GEMM."""
    c = ops.compress(_ours.normal(spec.rows, spec.cols, device=device, dtype=spec.torch_dtype), spec.pattern)
    dense, x = c.dense(), _ours.normal(spec.tokens, spec.cols, device=device, dtype=spec.torch_dtype, seed=1)

    def check(operand: ops.Compressed | ops.DeviceCompressed) -> None:
        no_worse(ops.linear(x, operand), x, dense.t(), spec)

    def args(operand: ops.Compressed | ops.DeviceCompressed) -> tuple[Any, ...]:
        return x, operand.values, positions(operand), 2, 4, spec.cols, None

    # the raw op: ops.linear would convert canonical indices once and keep the metadata
    work = _work(spec, device, "nm_linear", c, args, lambda operand: nm_linear(*args(operand)), check, dense, lambda w: F.linear(x, w))
    if semi := semi_structured(spec, device, dense, x):
        work.providers.append(Provider("torch semi-structured", semi))
        work.ratios += [Ratio("x semi-structured", r.of, ("torch semi-structured",)) for r in list(work.ratios)]
    return work


@family(
    "nm_linear_wgrad(cores)",
    grids=(
        Grid(("4096x4096", "14336x4096"), dtypes=BF16, tokens=(1024, 4096, 16384), on="cuda"),
        Grid(FFN, dtypes=BF16, tokens=FFN_TOKENS[2:], on="cuda"),
    ),
)
def wgrad(spec: Spec, device: str) -> Work:
    """``dW = gᵀ x`` with gᵀ estimated along the tokens: the GEMM alone, and with the estimate of every backward pass."""
    g = _ours.normal(spec.tokens, spec.rows, device=device, dtype=spec.torch_dtype, seed=1)
    x = _ours.normal(spec.tokens, spec.cols, device=device, dtype=spec.torch_dtype, seed=2)
    gc = ops.mvue_compress(g, "2:4", dim=0, seed=0)
    dense = gc.dense()

    def check(operand: ops.Compressed | ops.DeviceCompressed) -> None:
        no_worse(ops.linear_wgrad(operand, x), dense, x, spec)

    def args(operand: ops.Compressed | ops.DeviceCompressed) -> tuple[Any, ...]:
        return operand.values, positions(operand), 2, 4, spec.tokens, x

    work = _work(spec, device, "nm_linear_wgrad", gc, args, lambda operand: ops.linear_wgrad(operand, x), check, g, lambda w: w.t() @ x)
    work.providers.append(Provider("nmkernels, with the estimate", lambda: ops.linear_wgrad(ops.mvue_compress(g, "2:4", dim=0, seed=0), x)))
    work.ratios.append(Ratio("x dense", "nmkernels, with the estimate", ("torch dense",)))
    return work


def _work(
    spec: Spec,
    device: str,
    op: str,
    c: ops.Compressed,
    args: Callable[[Any], tuple[Any, ...]],
    gemm: Callable[[Any], Tensor],
    check: Callable[[Any], None],
    dense: Tensor,
    theirs: Callable[[Tensor], Tensor],
) -> Work:
    """Ours with metadata and with canonical indices, and ``theirs`` with the dense operand, each rotating among copies."""
    ordered = ops.relayout(c, layout_on(c.values.device, c.shape[0]))
    cache = last_level_cache(device) if device.startswith("cuda") else 0
    full = 2.0 * spec.tokens * spec.rows * spec.cols
    packed = c.values.nbytes + ordered.meta.nbytes
    others = (spec.tokens * spec.cols + spec.tokens * spec.rows + spec.rows * spec.cols) * 2 - dense.nbytes
    found = []
    for operand, how in ((ordered, ""), (c, ", canonical")):
        turning = rotated(operand, packed, cache, copy.deepcopy)

        def make(operand: Any = operand, how: str = how, turning: Callable[[], Any] = turning) -> Provider:
            return Provider(how, lambda: gemm(turning()), packed + others, full / 2, check=lambda: check(operand))

        for p in _ours.ours(op, args(operand), make):
            found += [p] if p.name != f"nmkernels cusparselt{how}" else cusparselt(op, args(operand), p, make())
    weight = rotated(dense, dense.nbytes, cache, Tensor.clone)
    cublas = Provider("torch dense", lambda: theirs(weight()), dense.nbytes + others, full)
    ratios = [Ratio("x dense", p.name, (cublas.name,)) for p in found]
    ratios += [Ratio("x without stream-K", p.name, (found[0].name,)) for p in found if p.name == f"nmkernels {STREAM_K}"]
    return Work([*found, cublas], ratios)


def cusparselt(op: str, args: tuple[Any, ...], default: Provider, searched: Provider) -> list[Provider]:
    """cuSPARSELt's provider with its default algorithm, whatever was stored before, and another with the fastest found by a search.

    Each algorithm is chosen when its provider is first entered, so if the search fails only this provider is lost.
    """
    from nmkernels.backends.cusparselt import algorithms, context, linear, search

    like = next(a for a in args if isinstance(a, Tensor))

    @contextmanager
    def using(choose: Callable[[], tuple[Any, Any]]) -> Iterator[None]:
        with _ours.forced(linear.NAME):
            problem, algorithm = choose()
            session = context.session_on(context.device_and_stream(like)[0])
            if algorithms.checked_algorithm(problem, session) != algorithm:
                algorithms.remember(problem, session, algorithm)
            yield

    @cache
    def by_default() -> tuple[Any, Any]:
        (problem,) = linear.problem_of(op, *args)
        device, stream = context.device_and_stream(like)
        session = context.session_on(device)
        return problem, algorithms.first_right(problem, session, like, stream, algorithms.DEFAULT)

    @cache
    def by_search() -> tuple[Any, Any]:
        found = search(op, *args)
        (problem,) = linear.problem_of(op, *args)
        best = algorithms.checked_algorithm(problem, context.session_on(context.device_and_stream(like)[0]))
        if not found.seconds or best is None:
            raise BackendError(f"cuSPARSELt: {found}")
        return problem, best

    default.under = partial(using, by_default)
    searched.name, searched.under = f"{default.name}, searched", partial(using, by_search)
    return [default, searched]
