"""The overhead of calls, on tiny tensors: a layer of 64 by 64, forward, the optimizer's step of two, and ``compress``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import nmkernels as nm
from nmkernels import testing

from ..registry import Grid, Provider, Ratio, Spec, Work, family
from . import _ours

DENSE, ADAMW = "torch dense forward", "torch AdamW(fused) step"


@family("calls", grids=(Grid(("64x64",), tokens=(8,)),))
def calls(spec: Spec, device: str) -> Work:
    """Microseconds of each call; SR-STE with ``packed`` True and False, compared with torch's dense layer and AdamW."""
    x, w = (_ours.normal(n, spec.cols, device=device, dtype=spec.torch_dtype) for n in (spec.tokens, spec.rows))

    def dense() -> nn.Sequential:
        torch.manual_seed(0)
        options: dict[str, Any] = {"device": device, "dtype": spec.torch_dtype}
        return nn.Sequential(nn.Linear(spec.cols, spec.rows, **options), nn.Linear(spec.rows, spec.cols, **options))

    def forward(layer: nn.Module) -> Callable[[], Tensor]:
        return lambda: layer(x)

    providers = [Provider("nmkernels compress", lambda: nm.ops.compress(w, spec.pattern), check=lambda: _same(w, spec.pattern))]
    for packed in (True, False):
        model, recipe = dense(), nm.recipes.SRSTE(spec.pattern, packed=packed)
        optimizer = nm.sparsify_(model, recipe).attach(recipe.optimizer(model.parameters(), lr=1e-5))
        model(x).sum().backward()
        name = "packed" if packed else "masked"
        providers += [Provider(f"nmkernels {name} forward", forward(model[0])), Provider(f"nmkernels {name} step", optimizer.step)]
    model = dense()
    plain = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    model(x).sum().backward()
    providers += [Provider(DENSE, forward(model[0])), Provider(ADAMW, plain.step)]
    for provider in providers:
        provider.host = True
    ratios = [Ratio("us beyond torch", p.name, (DENSE if "forward" in p.name else ADAMW,), "more") for p in providers[1:5]]
    return Work(providers, ratios)


def _same(w: Tensor, pattern: str) -> None:
    testing.assert_equal_bits(nm.ops.compress(w, pattern).dense(), nm.ops.prune(w, pattern))
