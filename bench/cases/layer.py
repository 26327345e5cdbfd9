"""The deployed layer against the dense one, over few and many tokens: it may never cost much more."""

from __future__ import annotations

import copy
import inspect

import torch
from torch import nn

from nmkernels import CompressedLinear, ops, testing

from ..device import rotated
from ..registry import Grid, Provider, Ratio, Spec, Work, family
from . import _ours
from .machine import last_level_cache

SIZES = ("1024x1024", "3072x768", "4096x4096")
KEEPS_DENSE = "keep_dense" in inspect.signature(CompressedLinear.__init__).parameters


@family(
    "CompressedLinear",
    grids=(
        Grid(SIZES, ("2:4",), tokens=(1, 16, 256, 2048)),
        Grid(SIZES[-1:], ("1:8",), tokens=(16, 2048)),
        Grid((SIZES[0], SIZES[-1]), ("2:4",), ("bfloat16",), tokens=(1, 16, 256, 2048)),
        Grid(("14336x4096",), ("2:4",), ("bfloat16",), tokens=(1, 16, 256, 4096), on="cuda"),
    ),
)
def layer(spec: Spec, device: str) -> Work:
    """``CompressedLinear(x)`` beside ``nn.Linear(x)`` with the same weights and bias, without gradients."""
    dense = nn.Linear(spec.cols, spec.rows, device=device, dtype=spec.torch_dtype).requires_grad_(False)
    c = ops.compress(dense.weight, spec.pattern)
    dense.weight.copy_(c.dense())
    x = _ours.normal(spec.tokens, spec.cols, device=device, dtype=spec.torch_dtype)
    full = 2 * spec.tokens * spec.rows * spec.cols
    layers = {"nmkernels CompressedLinear": CompressedLinear(c, dense.bias)}
    if KEEPS_DENSE:
        layers["nmkernels CompressedLinear(keep_dense)"] = CompressedLinear(c, dense.bias, keep_dense=True)

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

        return Provider(
            name, call, flops=full * spec.n / spec.m if name != "torch dense" else full, check=check if module is not dense else None
        )

    ours = [provider(name, module) for name, module in layers.items()]
    ratios = [Ratio("time over dense", p.name, ("torch dense",), "time") for p in ours]
    return Work([*ours, provider("torch dense", dense)], ratios)
