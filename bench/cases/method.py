"""Every method of doing a layer's GEMM, each for itself: the rows that ``bench.fit_rates`` makes the estimate from.

Methods take turns. What they read of the weight is cold, as in a model that comes back to a layer when others have been there; in the
cases named ``cached`` it stays in the cache, as that of a small layer does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from nmkernels import dispatch, ops, testing
from nmkernels.gemm import estimate, methods
from nmkernels.gemm.problem import Problem
from nmkernels.ops.define import CALLS

from ..registry import Grid, Provider, Ratio, Spec, Work, family
from . import _ours
from .dense import LINEAR

MATRICES = ("256x256", "512x2048", "1024x1024", "1024x4096", "4096x1024", "3072x768", "4096x4096", "11008x4096")
TOKENS = (1, 4, 16, 64, 256, 1024, 2048)
MOST_WORK = 4_500_000_000
"""Multiplications of the largest cases: about 50 ms in float32 on two cores."""
SMALL = ("128x128", "256x256", "512x512", "256x1024", "1024x256")
"""Weights that stay in the cache: ``nn.compressed.SMALL_BYTES`` at most."""
COLD, MOST_COPIES = 64 << 20, 192
"""Bytes of each operand and its copies together, more than a core's share of the caches; and the most copies of a small one."""
PART = 16
"""Rows of a result that are compared with float64, of 256 columns."""

T = TypeVar("T")


def _grids(tokens: tuple[int, ...], some: tuple[int, ...]) -> tuple[Grid, ...]:
    """All sizes for the usual patterns and dtypes, two sizes for the rest."""
    found = []
    for matrix in MATRICES:
        rows, cols = map(int, matrix.split("x"))
        fits = tuple(t for t in tokens if t * rows * cols <= MOST_WORK)
        found.append(Grid((matrix,), ("2:4", "1:4", "1:8"), ("float32", "bfloat16"), tokens=fits))
    found.append(Grid(("1024x1024", "4096x4096"), ("2:8", "4:8", "1:16"), ("float32", "bfloat16"), tokens=some))
    found.append(Grid(("1024x1024", "4096x1024"), ("1:16", "2:16", "8:16", "1:32"), ("float32", "bfloat16"), tokens=some))
    found.append(Grid(("1024x1024", "4096x1024"), ("2:4", "1:4", "1:8"), ("float16",), tokens=some))
    return tuple(found)


@family("method(fprop)", grids=_grids(TOKENS, (1, 16, 64, 256)))
@family("method(fprop, cached)", grids=(Grid(SMALL, ("2:4", "1:4", "1:8"), ("float32", "bfloat16"), tokens=TOKENS),))
def fprop(spec: Spec, device: str) -> Work:
    """``y = x W̃ᵀ`` dense, sparse and expanded; and making W̃ from the master weight."""
    return _of_weight(spec, device, "nm_linear", lambda x, w: F.linear(x, w))


@family("method(dgrad)", grids=_grids(TOKENS, (1, 16, 64, 256)))
def dgrad(spec: Spec, device: str) -> Work:
    """``dx = g W̃`` dense, sparse and expanded."""
    return _of_weight(spec, device, "nm_linear_dgrad", lambda g, w: g @ w)


@family("method(wgrad)", grids=_grids(TOKENS[2:], (16, 64, 256)))
def wgrad(spec: Spec, device: str) -> Work:
    """``dW = ĝᵀ x``, the estimate ĝ made in the form that is multiplied; and making it alone."""
    problem, pattern = _problem(spec, device), (spec.n, spec.m)
    x = _ours.normal(spec.tokens, spec.cols, device=device, dtype=spec.torch_dtype)
    g = _ours.normal(spec.tokens, spec.rows, device=device, dtype=spec.torch_dtype, seed=1)
    seed = torch.tensor([1, 2], device=device)
    words = (*pattern, 0, seed, problem.rule)
    dense, packed = _function("nm_mvue", g, *words), _function("nm_mvue_compress", g, *words)
    values, indices = packed(g, *words)
    arguments = (*pattern, spec.tokens, x)
    multiply = _function("nm_linear_wgrad", values, indices, *arguments)
    turn = _turns(g, spec)

    def check() -> None:
        estimated = dense(g, *words).t()[:PART]
        testing.assert_no_worse(multiply(values, indices, *arguments)[:PART], estimated @ x, estimated.double() @ x.double(), spec.op)

    def sparse() -> Tensor:
        return multiply(*packed(turn(), *words), *arguments)

    ours = Provider(f"nmkernels {estimate.kernel(problem)}", sparse, check=check)
    theirs = Provider(LINEAR, lambda: dense(turn(), *words).t() @ x)
    making = [
        Provider("nmkernels make dense", lambda: dense(turn(), *words)),
        Provider("nmkernels make packed", lambda: packed(turn(), *words)),
    ]
    return Work([ours, theirs, *making], [Ratio("x dense", ours.name, (LINEAR,))])


_OF_INTEGERS = (
    Grid(("1024x1024", "4096x1024", "4096x4096", "11008x4096"), ("2:4", "1:4", "1:8"), ("float32", "bfloat16"), tokens=TOKENS[:-1]),
    Grid(("1024x1024", "4096x4096"), ("4:8", "1:16"), ("float32", "bfloat16"), tokens=(1, 16, 64, 256)),
    Grid(("1024x1024", "4096x1024"), ("2:4", "1:8"), ("float16",), tokens=(1, 16, 64, 256)),
)
_SMALL_INTEGERS = (
    Grid(SMALL, ("2:4", "1:8"), ("float32", "bfloat16"), tokens=TOKENS),
    Grid(SMALL[1:3], ("1:16",), ("float32", "bfloat16"), tokens=(1, 16, 256)),
)


@family("method(int8)", "method(int4)", grids=_OF_INTEGERS)
@family("method(int8, cached)", "method(int4, cached)", grids=_SMALL_INTEGERS)
def integers(spec: Spec, device: str) -> Work:
    """``y = x Wᵀ`` with W as integers with a step: multiplied as they are, or decoded and expanded; and dense."""
    dtype = spec.torch_dtype
    master = _ours.normal(spec.rows, spec.cols, device=device, dtype=torch.float32)
    c = ops.quantize_values(ops.compress(master, spec.pattern), _role(spec))
    assert c.step is not None
    problem = _problem(spec, device)._replace(role="fprop", rule="", forms=("rows",), values=c.kind, group=c.group)
    x, weight = _ours.normal(spec.tokens, spec.cols, device=device, dtype=dtype, seed=1), c.dense(dtype)
    turn, dense_turn = _turns((c.values, c.indices, c.step), spec), _turns(weight, spec)

    def multiply(method: methods.Method) -> Tensor:
        with torch.no_grad():
            return methods.run(method, problem, x, {"rows": turn()})

    def provider(method: methods.Method) -> Provider:
        def check() -> None:
            y, exact = multiply(method)[:PART, :256], c.dense()[:256].double()
            testing.assert_no_worse(y, F.linear(x[:PART], weight[:256]), F.linear(x[:PART].double(), exact), spec.op)

        name = estimate.kernel(problem) if method.name == methods.OP else method.name
        return Provider(f"nmkernels {name}", lambda: multiply(method), check=check)

    usual = (methods.OP, methods.EXPAND, methods.AS_FLOAT32)
    ours = [provider(method) for method in methods.methods(problem) if method.name in usual]
    return Work([*ours, Provider(LINEAR, lambda: F.linear(x, dense_turn()))], [Ratio("x dense", ours[0].name, (LINEAR,))])


def _of_weight(spec: Spec, device: str, op: str, gemm: Callable[[Tensor, Tensor], Tensor]) -> Work:
    """The methods of fprop or dgrad, ``gemm(x, W̃)`` being torch's."""
    problem, pattern, dtype = _problem(spec, device), (spec.n, spec.m), spec.torch_dtype
    forward = problem.role == "fprop"
    master = _ours.normal(spec.rows, spec.cols, device=device, dtype=dtype)
    other = _ours.normal(spec.tokens, spec.cols if forward else spec.rows, device=device, dtype=dtype, seed=1)
    prune, compress = _function("nm_prune", master, *pattern), _function("nm_compress", master, *pattern, None)
    weight, packed = prune(master, *pattern), compress(master, *pattern, None)
    arguments = (*pattern, spec.cols, None) if forward else (*pattern, spec.cols)
    # small GEMMs take microseconds, so those are timed as a layer calls them, with what the op costs on the host
    multiply = CALLS[op] if _cached(spec) else _function(op, other, *packed, *arguments)
    expand = _function("nm_decompress", *packed, *pattern, spec.cols)
    room, wide = torch.empty_like(weight), torch.empty(weight.shape, device=device)
    dense_turn, packed_turn = _turns(weight, spec), _turns(packed, spec)

    def check() -> None:
        y, w = multiply(other, *packed, *arguments)[:PART], weight
        y, w = (y[:, :256], w[:256]) if forward else (y[:, :256], w[:, :256])
        x = other[:PART]
        testing.assert_no_worse(y, gemm(x, w), gemm(x.double(), w.double()), spec.op)

    def expanded() -> Tensor:
        return gemm(other, expand(*packed_turn(), *pattern, spec.cols, out=room))

    def expanded_to_float32() -> Tensor:
        values, indices = packed_turn()
        return gemm(other.float(), expand(values.float(), indices, *pattern, spec.cols, out=wide)).to(dtype)

    ours = Provider(f"nmkernels {estimate.kernel(problem)}", lambda: multiply(other, *packed_turn(), *arguments), check=check)
    providers = [ours, Provider(LINEAR, lambda: gemm(other, dense_turn())), Provider("nmkernels expand", expanded)]
    if dtype != torch.float32:
        providers.append(Provider("nmkernels expand float32", expanded_to_float32))
    if forward and spec.tokens == 1 and not _cached(spec):  # the making does not depend on tokens
        turn, kept = _turns(master, spec), tuple(map(torch.empty_like, packed))
        providers += [
            Provider("nmkernels make dense", lambda: prune(turn(), *pattern, out=room)),
            Provider("nmkernels make packed", lambda: compress(turn(), *pattern, None, out=kept)),
        ]
    return Work(providers, [Ratio("x dense", ours.name, (LINEAR,))])


def _problem(spec: Spec, device: str) -> Problem:
    role = _role(spec)
    rule = "exact" if role == "wgrad" else ""
    sizes = spec.tokens, spec.rows, spec.cols, spec.n, spec.m
    return Problem(role, *sizes, spec.torch_dtype, torch.device(device), rule=rule, cached=_cached(spec))


def _role(spec: Spec) -> str:
    """What comes first in the brackets of the op's name: the role, or the kind of integers."""
    return spec.op.partition("(")[2].rstrip(")").partition(",")[0]


def _cached(spec: Spec) -> bool:
    return spec.op.endswith("cached)")


def _function(op: str, *args: Any) -> Callable[..., Any]:
    """The function of the backend that runs ``op(*args)``, which takes ``out=``."""
    return dispatch.choose(op, *args).fn


def _turns(operand: T, spec: Spec) -> Callable[[], T]:
    """``operand``, a tensor or a tuple of tensors, and copies of it in turn, so that each is cold; itself alone in a cached case."""
    parts: tuple[Tensor, ...] = (operand,) if isinstance(operand, Tensor) else operand  # type: ignore[assignment]
    copies = 1 if _cached(spec) else min(MOST_COPIES, -(-COLD // max(1, sum(part.nbytes for part in parts))))
    every: list[Any] = [operand]
    for _ in range(copies - 1):
        every.append(operand.clone() if isinstance(operand, Tensor) else tuple(part.clone() for part in parts))
    return itertools.cycle(every).__next__
