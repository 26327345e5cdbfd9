"""MdGf: the mask fades in, and with it the gradient flow through pruned weights fades out."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ...arguments import as_number
from ...autograd.transforms import HardMask, Traits, WeightTransform, reading
from ...optim.rules import UpdateRule
from ...pattern import Pattern
from ..contract import About, Span, Stage, State, choice, count, number, setting, truncate
from ..registry import recipe
from ..schedule import ScheduledRecipe, left_of, phases


@dataclass(frozen=True)
class DecayedMask(WeightTransform):
    """W̃ = W ⊙ (M(W) + D (1 − M(W))), D the schedule's ``nm_flow``; with ``chain`` the gradient is g ⊙ (M + D (1 − M))."""

    chain: bool = True

    reads = reading(nm_flow="fed")

    def _traits(self) -> Traits:
        return replace(super()._traits(), is_nm=False)

    def __call__(self, weight: Tensor, *extras: Tensor, out: Tensor | None = None) -> Tensor:
        (flow,), mask = extras, self.kept(weight)
        if out is None:
            return torch.where(mask, weight, weight * flow).contiguous()
        return torch.where(mask, weight, weight * flow, out=out)

    def gradient(self, g: Tensor, weight: Tensor, *extras: Tensor) -> tuple[Tensor | None, dict[str, Tensor]]:
        return torch.where(self.kept(weight), g, g * extras[0]) if self.chain else g, {}


@recipe("mdgf")
@dataclass(frozen=True)
class MdGf(ScheduledRecipe):
    """Mask decay gradient flow (Bambhaniya et al., "Progressive gradient flow for robust N:M sparsity training", arXiv 2402.04744).

    Forward with W̃ = W ⊙ (M + D(t) (1 − M)), M the mask of the N largest magnitudes, recomputed at every step.
    With t counted in applied steps from ``start``, until which training is dense, and T = end − start::

        exponential  D(t) = exp(−c t),         c = ln(1/residual) / T
        linear       D(t) = max(0, 1 − c t),   c = 1 / T
        t ≥ T        D = 0

    By default the gradient is multiplied by what the forward pass multiplies the weight by, and the last quarter of the run trains under
    the binary mask, as in Kao et al. (2022, arXiv 2209.07617). Bambhaniya et al.'s public code is ``gradient="ste", end=1.0`` with c
    per step, ``coefficient=1e-4`` in its example.

    Args:
        schedule: ``"exponential"`` (best over all in the paper) or ``"linear"``.
        start, end: the steps, or shares of ``total_steps``, after which the mask fades in and is binary.
        gradient: ``"chain"`` ∂L/∂W = g ⊙ (M + D (1 − M)); ``"ste"`` g, the gradient of W̃ itself.
        residual: D just before the end of the exponential decay, from which c follows; ``coefficient``: c itself, per step, instead.
        levels: hold D constant over each of so many equal parts of the decay.

    Example:
        >>> recipe = MdGf("1:8", total_steps=100, schedule="linear", start=10, end=90)
        >>> [recipe.flow(torch.tensor(float(t))).item() for t in (0, 10, 50, 90)]
        [1.0, 1.0, 0.5, 0.0]
    """

    schedule: str = choice("exponential", "linear")
    start: float | int = 0
    end: float | int = 0.75
    gradient: str = choice("chain", "ste")
    residual: float = setting(2.5e-3, lambda x: as_number(x) is not None and 0 < x < 1, "must lie between 0 and 1")
    coefficient: float | None = number(None, above=True, none="for that of residual")
    levels: int | None = count(None, least=1, none="for a smooth decay")

    about = About(
        paper="Bambhaniya et al., 2024, arXiv 2402.04744",
        extra_state="a step count",
        cost="dense until the mask is binary, by default for 75 % of the steps; a mask search at every step",
    )

    @cached_property
    def stages(self) -> tuple[tuple[int, Stage], ...]:
        """Phase 0 dense, then phase 1: the decay, and the binary mask."""
        start, end = phases("MdGf", self.total_steps, self.start, self.end)
        rule, chain, p = UpdateRule(masked=True), self.gradient == "chain", Pattern(self.pattern)
        fading, last = DecayedMask(p, chain=chain), HardMask(p, chain=chain)
        return (0, Stage(phase=0)), (start, Stage(1, fading, rule)), (end, Stage(1, last, rule))

    def stage(self, state: State) -> Stage:
        stage = super().stage(state)
        if not state or not stage.phase or not left_of(state["t"], self.stages[-1][0]):
            return stage
        return replace(stage, not_ready=f"still lets {float(self.flow(state['t'])):.1%} of each pruned weight through")

    def rate(self) -> float:
        """c, per step."""
        if self.coefficient is not None:
            return self.coefficient
        (_, _), (start, _), (stop, _) = self.stages
        return (1.0 if self.schedule == "linear" else math.log(1.0 / self.residual)) / (stop - start)

    def flow(self, t: Tensor) -> Tensor:
        """D after ``t`` applied steps of the run (0-d, float64), computed where t lies."""
        (_, _), (start, _), (stop, _) = self.stages
        u = t - start
        if self.levels is not None:
            part = (stop - start) / self.levels
            # t and the parts are whole multiples of 1/levels: the small shift keeps a boundary from falling below itself
            u = torch.floor(u / part + 1e-9) * part
        d = (1.0 - self.rate() * u).clamp(0.0, 1.0) if self.schedule == "linear" else (-self.rate() * u).exp().clamp(max=1.0)
        return torch.where(t < stop, d, 0.0)

    def values(self, state: State) -> dict[str, Tensor]:
        return {"flow": self.flow(state["t"])} if state else {}

    def profile(self, steps: int) -> list[Span]:
        # faded weights are multiplied too
        fading = int((self.flow(torch.arange(steps, dtype=torch.float64)) > 0).sum())
        return truncate([Span(fading), Span(steps - fading, fprop=Pattern(self.pattern).density)], steps)
