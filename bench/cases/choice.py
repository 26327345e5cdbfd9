"""GEMMs through the dispatcher, which takes the fastest measured candidate, compared with dense ones: never slower."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from nmkernels import CompressedLinear, ops, testing
from nmkernels.gemm.candidates import measure
from nmkernels.gemm.choose import choose, using
from nmkernels.gemm.forms import forms as forms_of
from nmkernels.gemm.methods import DENSE, UNESTIMATED, Method, dense_estimate, methods, random_operands, run
from nmkernels.gemm.problem import Problem

from ..registry import Grid, Provider, Ratio, Spec, Work, family

OURS, THEIRS = "nmkernels through the dispatcher", "torch dense"
SIZES = ("1024x1024", "3072x768", "4096x4096")
TOKENS = (1, 16, 64, 256, 2048)
ON_CUDA = ("14336x4096", "4096x4096")
PART = 16
"""Rows of a result that are compared with float64."""


def _grids(tokens: tuple[int, ...], patterns: tuple[str, ...] = ("2:4",)) -> tuple[Grid, ...]:
    return (
        Grid(SIZES, patterns, tokens=tokens),
        Grid(SIZES, patterns, ("bfloat16",), tokens=tokens),
        Grid(ON_CUDA, ("2:4",), ("bfloat16",), tokens=(1, 16, 256, 2048, 8192), on="cuda"),
    )


@family("choice(fprop)", grids=_grids(TOKENS, ("2:4", "1:8")))
def fprop(spec: Spec, device: str) -> Work:
    """``CompressedLinear(x)`` with ``keep_dense``, after ``nm.tune``, compared with ``nn.Linear(x)`` with the same weights."""
    dense = nn.Linear(spec.cols, spec.rows, device=device, dtype=spec.torch_dtype).requires_grad_(False)
    c = ops.compress(dense.weight, spec.pattern)
    dense.weight.copy_(c.dense())
    layer = CompressedLinear(c, dense.bias, keep_dense=True)
    x = torch.randn(spec.tokens, spec.cols, device=device, dtype=spec.torch_dtype)
    ((gemm,),) = layer.problems(spec.tokens)

    def through(module: nn.Module) -> Callable[[], Tensor]:
        @torch.no_grad()
        def call() -> Tensor:
            return module(x)

        return call

    def exact(part: slice) -> Tensor:
        return nn.functional.linear(x[part].double(), dense.weight.double(), dense.bias.double())

    return _work(spec, gemm, through(layer), through(dense), exact)


@family("choice(dgrad)", grids=_grids(TOKENS[2:]))
def dgrad(spec: Spec, device: str) -> Work:
    """``dx = g W`` with W in dense layout and packed both ways, compared with the dense GEMM."""
    forms = forms_of(spec.rows, spec.cols, spec.n, spec.m, spec.torch_dtype, torch.device(device), columns=True)
    return _plain(Problem("dgrad", spec.tokens, spec.rows, spec.cols, spec.n, spec.m, spec.torch_dtype, torch.device(device), forms), spec)


@family("choice(wgrad)", grids=_grids(TOKENS[3:]))
def wgrad(spec: Spec, device: str) -> Work:
    """``dW = ĝᵀ x`` from g, including the estimate, compared with the GEMM of the same estimate in dense layout."""
    where = torch.device(device)
    forms = forms_of(spec.rows, spec.tokens, spec.n, spec.m, spec.torch_dtype, where)
    return _plain(Problem("wgrad", spec.tokens, spec.rows, spec.cols, spec.n, spec.m, spec.torch_dtype, where, forms, "exact"), spec)


def _plain(gemm: Problem, spec: Spec) -> Work:
    other, operand, seed = random_operands(gemm)
    dense = dense_estimate(gemm, operand, seed) if gemm.role == "wgrad" else operand[DENSE.form]

    def ours() -> Tensor:
        return run(choose(gemm)[0], gemm, other, operand, seed=seed)

    def theirs() -> Tensor:
        return run(DENSE, gemm, other, operand, seed=seed)

    def exact(part: slice) -> Tensor:
        a, b = (dense, other) if gemm.role == "wgrad" else (other, dense)
        return a[part].double() @ b.double()

    return _work(spec, gemm, ours, theirs, exact)


def _work(spec: Spec, gemm: Problem, ours: Callable[[], Tensor], theirs: Callable[[], Tensor], exact: Callable[[slice], Tensor]) -> Work:
    """The dispatcher and dense, and the chosen method's speed-up when it was measured; 1 if that is dense."""
    found = measure(gemm)
    best: Method = next(m for m in methods(gemm) if m.name == found.best)
    part, full = slice(0, PART), 2.0 * spec.tokens * spec.rows * spec.cols

    def check() -> None:
        if best == UNESTIMATED:  # torch's GEMM too, but of the gradient itself
            return
        with using((gemm, best)):
            testing.assert_no_worse(ours()[part], theirs()[part], exact(part), spec.op)

    mine = Provider(OURS, ours, check=check, under=lambda: using((gemm, best)))
    facts = {(OURS, "gain when measured"): found.gain or 1.0}
    return Work([mine, Provider(THEIRS, theirs, flops=full)], [Ratio("x dense", OURS, (THEIRS,))], facts)
