"""The cost of never using a stale effective weight: a training layer whose copy of W̃ is verified at every use."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from unittest.mock import patch

import torch
from torch import nn

import nmkernels as nm
from nmkernels import testing
from nmkernels.nn import effective

from ..registry import Grid, Provider, Ratio, Spec, Work, family
from . import _ours

MICROBATCHES = 4
VERIFIED, BELIEVED, ANEW, DENSE = "nmkernels verified", "nmkernels believed", "nmkernels made anew", "torch dense"


@family("effective_weight", grids=(Grid(("1024x1024",), ("2:4",), tokens=(16, 256, 2048)),))
def forward(spec: Spec, device: str) -> Work:
    """``SparseLinear(x)`` in evaluation: with a verified copy, an unverified one (wrong after ``.data.copy_``), none, and dense."""
    x = _ours.normal(spec.tokens, spec.cols, device=device, dtype=spec.torch_dtype)

    def provider(
        name: str, layer: nn.Linear, handle: nm.recipes.Handle | None, under: Callable[[], AbstractContextManager[object]]
    ) -> Provider:
        @torch.no_grad()
        def call() -> object:
            if handle is not None and name == ANEW:
                handle.refresh()
            return layer(x)

        def check() -> None:
            weight, bias = nm.ops.prune(layer.weight.detach(), spec.pattern), layer.bias.detach()
            exact = nn.functional.linear(x.double(), weight.double(), bias.double())
            testing.assert_no_worse(layer(x).detach(), nn.functional.linear(x, weight, bias), exact, name)

        return Provider(name, call, check=None if handle is None else check, under=under)

    return _work(spec, device, provider)


@family("effective_weight(step)", grids=(Grid(("1024x1024",), ("2:4",), tokens=(256, 2048)),))
def step(spec: Spec, device: str) -> Work:
    """Forward and backward of four microbatches, and the optimizer's step: SR-STE, and dense with fused AdamW."""
    x = _ours.normal(spec.tokens, spec.cols, device=device, dtype=spec.torch_dtype).requires_grad_()

    def provider(
        name: str, layer: nn.Linear, handle: nm.recipes.Handle | None, under: Callable[[], AbstractContextManager[object]]
    ) -> Provider:
        if handle is None:
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-5, fused=True)
        else:
            optimizer = handle.run.optimizers[0]

        def call() -> None:
            optimizer.zero_grad()
            for _ in range(MICROBATCHES):
                if handle is not None and name == ANEW:
                    handle.refresh()
                layer(x).sum().backward()
            optimizer.step()

        return Provider(name, call, under=under)

    return _work(spec, device, provider)


def _work(spec: Spec, device: str, provider: Callable[..., Provider]) -> Work:
    providers = []
    for name in (VERIFIED, BELIEVED, ANEW, DENSE):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(spec.cols, spec.rows)).to(device=device, dtype=spec.torch_dtype)
        handle = None
        if name != DENSE:
            recipe = nm.recipes.SRSTE(spec.pattern)
            handle = nm.sparsify_(model, recipe)
            handle.attach(recipe.optimizer(model.parameters(), lr=1e-5))
        providers.append(provider(name, model.get_submodule("0"), handle, _believing if name == BELIEVED else nullcontext))
    ratios = [Ratio("time over believed", VERIFIED, (BELIEVED,), "time")]
    ratios += [Ratio("time over dense", name, (DENSE,), "time") for name in (VERIFIED, BELIEVED, ANEW)]
    return Work(providers, ratios)


def _believing() -> AbstractContextManager[object]:
    """Inside, all fingerprints are equal, so that a copy is always reused."""
    return patch.object(effective, "fingerprint", lambda *tensors: ())
