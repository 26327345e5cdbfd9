"""A feed-forward block in training, whole and by its pieces: dense, S-STE (two GEMMs sparse) and FST (all three)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import nmkernels as nm

from ..registry import Grid, Provider, Ratio, Spec, Work, family
from ..timing import Timed
from . import _ours
from .step import GEMM, one_gemm, settle

PIECES = ("forward", "forward+backward", "step")
RECIPES: dict[str, dict[str, Any]] = {"srste": {}, "sste": {"seed": 0}, "fst": {"seed": 0, "end": None}}
DENSE = "torch dense"


def allowed(recipe: str, r: float) -> float:
    """How many times as fast forward and backward can be where one sparse GEMM is r times as fast as a dense one.

    Of three equal GEMMs S-STE has two sparse ones, 3/(1 + 2/r), SR-STE one, 3/(2 + 1/r), and FST all, r. That is how it is on tensor
    cores; a CPU's kernel takes packed rows for the gradient of the input too, so that shares above 1 are to be expected there.
    """
    sparse = {"srste": 1, "sste": 2, "fst": 3}[recipe]
    return 3 / (3 - sparse + sparse / r)


@family(
    "ffn",
    grids=(
        Grid(("4096x1024",), ("2:4",), tokens=(2048,)),
        Grid(("14336x4096", "4096x1024"), ("2:4",), ("bfloat16",), tokens=(4096, 16384), on="cuda"),
    ),
)
def ffn(spec: Spec, device: str) -> Work:
    """Two linear layers with GELU between them, fp32 weights, autocast where the case is in 16 bits; ``defaults, on a GPU tuned first."""
    torch.manual_seed(0)
    up = nn.Linear(spec.cols, spec.rows, device=device)
    block = nn.Sequential(up, nn.GELU(), nn.Linear(spec.rows, spec.cols, device=device))
    x = _ours.normal(spec.tokens, spec.cols, device=device, dtype=torch.float32, seed=1)
    dense = _Block(block, x, spec, None)
    blocks = {name: _Block(copy.deepcopy(block), x, spec, name) for name in RECIPES}
    providers, ratios = [], []
    for i, piece in enumerate(PIECES):
        theirs = Provider(f"{DENSE}, {piece}", dense.piece(i))
        providers.append(theirs)
        for name, mine in blocks.items():
            ours = Provider(f"nmkernels {name}, {piece}", mine.piece(i), check=mine.check)
            providers.append(ours)
            ratios.append(Ratio("x dense", ours.name, (theirs.name,)))
            if piece == "step":
                ratios.append(Ratio("time over dense", ours.name, (theirs.name,), "time"))
    gemms = one_gemm(spec.rows, spec.cols, spec.tokens, spec, device)
    providers += gemms
    ratios.append(Ratio("x dense", gemms[0].name, (gemms[1].name,)))
    return Work(providers, ratios, derive=_shares)


def _shares(timed: Timed) -> dict[tuple[str, str], list[float]]:
    """What was gained over what could be, by the ratio of one GEMM in the same round; above 1 where the other GEMMs gain more."""
    found = {}
    for name in RECIPES:
        whole = PIECES[1]
        mine, theirs = f"nmkernels {name}, {whole}", f"{DENSE}, {whole}"
        one, dense_one = f"nmkernels, {GEMM}", f"{DENSE}, {GEMM}"
        rounds = [r for r in timed.rounds if {mine, theirs, one, dense_one} <= r.keys()]
        found[mine, "share of what one GEMM allows"] = [
            r[theirs] / r[mine] / allowed(name, max(1.0, r[dense_one] / r[one])) for r in rounds
        ]
    return found


class _Block:
    """One block in training."""

    def __init__(self, block: nn.Module, x: Tensor, spec: Spec, recipe: str | None) -> None:
        self.block, self.x, self.spec, self.settled = block, x, spec, False
        if recipe is None:
            self.handle = None
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(block.parameters(), lr=1e-4, fused=True)
            return
        chosen = nm.recipes.get(f"{recipe}:{spec.pattern}", total_steps=1000, **RECIPES[recipe])
        self.handle = nm.sparsify_(block, chosen, filter_fn=lambda module, name: isinstance(module, nn.Linear))
        self.optimizer = self.handle.attach(chosen.optimizer(block.parameters(), lr=1e-4))
        if x.is_cuda:
            nm.tune(block, tokens=spec.tokens)

    def _cast(self) -> AbstractContextManager[object]:
        mixed = self.spec.dtype != "float32"
        return torch.autocast(self.x.device.type, self.spec.torch_dtype) if mixed else nullcontext()

    def piece(self, pieces: int) -> Callable[[], object]:
        """Forward; with ``pieces`` 1 backward too, with 2 the optimizer's step as well."""

        def call() -> object:
            with self._cast():
                y = self.block(self.x)
            if pieces:
                y.backward(y.detach())
            if pieces == 2:
                self.optimizer.step()
                self.optimizer.zero_grad()
            return y

        return call

    def check(self) -> None:
        """After some steps, the output is that of a dense block with the effective weights."""
        assert self.handle is not None
        if not self.settled:
            step, self.settled = self.piece(2), True
            step()
            settle(self.handle, step)
        baseline = nm.densify_(copy.deepcopy(self.block))
        with torch.no_grad():
            for name, layer in self.handle.layers.items():
                baseline.get_submodule(name).weight.copy_(layer.effective_weight())  # type: ignore[operator]
            with self._cast():
                mine, theirs = self.block(self.x), baseline(self.x)
        eps = torch.finfo(self.spec.torch_dtype).eps
        error, bound = (mine - theirs).abs().max(), 64 * eps * theirs.abs().max()
        assert error <= bound, f"outputs differ by {float(error):.3g}, more than rounding ({float(bound):.3g})"
