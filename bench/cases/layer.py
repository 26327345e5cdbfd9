"""The deployed layer and the training layer compared with the dense one, over few and many tokens: never much slower."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn

import nmkernels as nm
from nmkernels import CompressedLinear, ops, testing

from ..device import rotated
from ..registry import Grid, Provider, Ratio, Spec, Work, family
from . import _ours, machine
from .machine import last_level_cache

SIZES = ("1024x1024", "3072x768", "4096x4096")
SMALL = "128x128"
TIME = "time over nn.Linear"
LINEAR = "torch nn.Linear"


@family(
    "CompressedLinear",
    grids=(
        Grid(SIZES, ("2:4",), tokens=(1, 16, 256, 2048)),
        Grid((SMALL,), ("2:4",), tokens=(1, 16)),
        Grid(SIZES[-1:], ("1:8",), tokens=(16, 2048)),
        Grid((SIZES[0], SIZES[-1]), ("2:4",), ("bfloat16",), tokens=(1, 16, 256, 2048)),
        Grid(("14336x4096",), ("2:4",), ("bfloat16",), tokens=(1, 16, 256, 4096), on="cuda"),
    ),
)
def layer(spec: Spec, device: str) -> Work:
    """``CompressedLinear(x)`` compared with ``nn.Linear(x)`` with the same weights and bias, without gradients."""
    dense = nn.Linear(spec.cols, spec.rows, device=device, dtype=spec.torch_dtype).requires_grad_(False)
    c = ops.compress(dense.weight, spec.pattern)
    dense.weight.copy_(c.dense())
    x = _ours.normal(spec.tokens, spec.cols, device=device, dtype=spec.torch_dtype)
    full = 2 * spec.tokens * spec.rows * spec.cols
    names = {"nmkernels CompressedLinear": False, "nmkernels CompressedLinear(keep_dense)": True}
    layers = {name: CompressedLinear(c, dense.bias, keep_dense=keep) for name, keep in names.items()}

    def provider(name: str, module: nn.Module) -> Provider:
        size = dense.weight.nbytes if module is dense else c.nbytes
        turn = rotated(module, size, last_level_cache(device) if device.startswith("cuda") else 0, copy.deepcopy)

        @torch.no_grad()
        def call() -> object:
            return turn()(x)

        def check() -> None:
            part = slice(0, min(spec.tokens, 16))
            exact = nn.functional.linear(x[part].double(), dense.weight.double(), dense.bias.double())
            with torch.no_grad():
                testing.assert_no_worse(module(x)[part], dense(x[part]), exact, name)

        others = spec.tokens * (spec.rows + spec.cols) * x.element_size()
        if module is dense:
            return Provider(name, call, dense.weight.nbytes + others, full)
        return Provider(name, call, c.nbytes + others, full * spec.n / spec.m, check=check)

    ours, theirs = [provider(name, module) for name, module in layers.items()], provider(LINEAR, dense)
    ratios = [Ratio(TIME, p.name, (LINEAR,), "time") for p in ours]
    if device.startswith("cuda"):
        return Work([*ours, theirs], ratios)
    read = machine.reader(ours[0].bytes)
    return Work([*ours, theirs, read], ratios, derive=machine.shares(spec, ours, [theirs], read))


@family(
    "SparseLinear",
    grids=(
        Grid((SIZES[0], SIZES[-1]), ("2:4",), tokens=(16, 256, 2048)),
        Grid(SIZES[:1], ("2:4",), ("bfloat16",), tokens=(16, 256)),
    ),
)
def trained(spec: Spec, device: str) -> Work:
    """Forward and backward of a layer under SR-STE with its defaults, a microbatch of an accumulated step, compared with ``nn.Linear``."""
    dense = nn.Linear(spec.cols, spec.rows, device=device, dtype=spec.torch_dtype)
    model = nn.Sequential(copy.deepcopy(dense))
    recipe = nm.recipes.SRSTE(spec.pattern)
    handle = nm.sparsify_(model, recipe)
    handle.attach(recipe.optimizer(model.parameters(), lr=1e-5))
    x = _ours.normal(spec.tokens, spec.cols, device=device, dtype=spec.torch_dtype).requires_grad_()
    g = _ours.normal(spec.tokens, spec.rows, device=device, dtype=spec.torch_dtype, seed=1)

    def provider(name: str, module: nn.Module, check: Callable[[], None] | None = None) -> Provider:
        def call() -> None:
            x.grad = None
            module(x).backward(g)

        return Provider(name, call, flops=6 * spec.tokens * spec.rows * spec.cols, check=check)

    def check() -> None:
        part = slice(0, min(spec.tokens, 16))
        weight, bias = ops.prune(dense.weight.detach(), spec.pattern), dense.bias.detach()
        exact = nn.functional.linear(x[part].double(), weight.double(), bias.double()).detach()
        testing.assert_no_worse(model(x)[part].detach(), nn.functional.linear(x[part], weight, bias).detach(), exact, "SparseLinear")

    ours = provider("nmkernels SparseLinear", model[0], check)
    return Work([ours, provider(LINEAR, dense)], [Ratio(TIME, ours.name, (LINEAR,), "time")])
