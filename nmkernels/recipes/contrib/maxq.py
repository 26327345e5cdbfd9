"""MaxQ: soft N:M masks from queries along several axes, and groups that become N:M one after the other."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ...autograd.transforms import Traits, WeightTransform, masked, reading
from ...optim.rules import UpdateRule
from ...pattern import Pattern, RecipeError
from ..contract import About, Setup, Stage, State, choice, count, flag, number
from ..registry import recipe
from ..schedule import ScheduledRecipe, left_of, phases

CURVE = 1.5  # c of the exponential schedule: 0.05 per epoch over the 30 epochs of the authors' runs


@dataclass(frozen=True)
class SoftQuery(WeightTransform):
    """W̃ = M(W) ⊙ (1 + Q(W)) ⊙ W with ``MaxQ``'s Q; ``whole`` is its ``kernel``, and ``chain`` its gradient g ⊙ M ⊙ (1 + Q)."""

    tau: float = 1e-2
    whole: bool = False
    chain: bool = False

    def __call__(self, weight: Tensor, *extras: Tensor, out: Tensor | None = None) -> Tensor:
        return masked(weight * self.factor(weight).to(weight.dtype), self.kept(weight, *extras), out)

    def gradient(self, g: Tensor, weight: Tensor, *extras: Tensor) -> tuple[Tensor | None, dict[str, Tensor]]:
        return masked(g * self.factor(weight).to(g.dtype), self.kept(weight, *extras)) if self.chain else g, {}

    def factor(self, weight: Tensor) -> Tensor:
        """1 + Q of every weight, kept or not; in fp32 for 16-bit weights."""
        size = weight.abs() if weight.dtype.itemsize > 2 else weight.abs().float()
        factor = 1.0 + self._query(size)
        return factor + self._query(size.reshape(1, -1)).reshape(size.shape) if self.whole else factor

    def _query(self, size: Tensor) -> Tensor:
        below = size.shape[1] - self.pattern.kept(size.shape[1])
        if not below:  # layer-wise patterns may leave a layer dense, and then no weight ranks above another
            return torch.zeros_like(size)
        low, high = (size.kthvalue(k, dim=1, keepdim=True).values for k in (below, below + 1))
        return torch.where(size >= high, torch.sigmoid((size - (low + high) / 2) / self.tau), 0.0)


@dataclass(frozen=True)
class PartlyDense(SoftQuery):
    """The same with M all ones in the ⌊D · groups⌋ of the smallest Σ|w|, ties by position; D is the schedule's ``nm_dense_groups``."""

    reads = reading(nm_dense_groups="fed")

    def _traits(self) -> Traits:
        return replace(super()._traits(), is_nm=False)

    def kept(self, weight: Tensor, *extras: Tensor) -> Tensor:
        sums = weight.abs().reshape(-1, self.pattern.m).sum(1, dtype=torch.promote_types(weight.dtype, torch.float32))
        order = sums.argsort(stable=True)
        rank = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
        # a share that stands for a whole number of groups must not fall below it by rounding
        dense = rank < torch.floor(extras[0] * order.numel() + 1e-6)
        return super().kept(weight) | dense.repeat_interleave(self.pattern.m).reshape(weight.shape)


@recipe("maxq")
@dataclass(frozen=True)
class MaxQ(ScheduledRecipe):
    """MaxQ (Xiang et al., "MaxQ: multi-axis query for N:M sparsity network", CVPR 2024, arXiv 2312.07061).

    Forward with W̃ = M ⊙ (1 + Q) ⊙ W, M and Q of the present weight. M is the mask of the N largest magnitudes of each group, except that a
    share D(t) of the layer's groups, those of the smallest Σ|w|, stay dense. Q enlarges weights that matter in their row: with k = cols N/M
    and a₍ₖ₎ the k-th largest magnitude of the row, Q = σ((|w| − θ)/τ), θ = (a₍ₖ₎ + a₍ₖ₊₁₎)/2, for |w| ≥ a₍ₖ₎, else 0. The
    gradient is g = ∂L/∂W̃ itself, plus SR-STE's λ (1 − M) ⊙ W. ``finish`` leaves M ⊙ (1 + Q) ⊙ W.
    With u from 0 to 1 between ``start`` and ``end``, after which D = 0::

        linear 1 − u     cubic (1 − u)³     cos cos(π u/2)     exp 1 − (1 − e^(−c u)) / (1 − e^(−c)), c = 1.5

    The equations are those of the authors' code for 1×1 convolutions. Kept weights are up to twice as large as W: without normalisation
    layers the model's scale changes.

    Args:
        schedule: of D.
        start, end: the steps, or shares of ``total_steps``, until which all groups are dense (and enlarged), and from which on N:M.
        levels: hold D over each of so many equal parts; None changes it at every step.
        tau, decay: τ, on the scale of the weights, and λ.
        kernel: a second query, over the whole weight; the authors have one for each position in the kernel of larger convolutions.
        gradient: ``"ste"`` g, as in the authors' scripts; ``"chain"`` g ⊙ M ⊙ (1 + Q).

    Raises:
        RecipeError: N = M.

    Example:
        >>> recipe = MaxQ("2:4", total_steps=100, start=10, end=50)
        >>> [round(recipe.share(torch.tensor(float(t))).item(), 2) for t in (0, 10, 30, 50)]
        [1.0, 1.0, 0.5, 0.0]
    """

    schedule: str = choice("linear", "cubic", "cos", "exp")
    start: float | int = 0
    end: float | int = 0.25
    levels: int | None = count(None, least=1, none="for a smooth decay")
    tau: float = number(1e-2, above=True)
    decay: float = number(2e-4)
    kernel: bool = flag(False)
    gradient: str = choice("ste", "chain")

    about = About(
        paper="Xiang et al., CVPR 2024, arXiv 2312.07061",
        cost="order statistics of each row at every step; dense GEMMs until all groups are N:M",
    )
    setup = Setup(needs_whole="compares groups over each whole weight")

    def __post_init__(self) -> None:
        super().__post_init__()
        if Pattern(self.pattern).density == 1:
            raise RecipeError(f"MaxQ: {self.pattern} prunes nothing, so a row has no threshold; use Dense.")

    @cached_property
    def stages(self) -> tuple[tuple[int, Stage], ...]:
        """Phase 0 with all groups dense, then phase 1: a share of them, and none."""
        start, end = phases("MaxQ", self.total_steps, self.start, self.end)
        rule = UpdateRule(masked=True, decay=self.decay)
        dense = Stage(phase=0, transform=self._transform(PartlyDense), rule=rule)
        last = Stage(phase=1, transform=self.final_transform(), rule=rule)
        return (0, dense), (start, replace(dense, phase=1)), (end, last)

    def stage(self, state: State) -> Stage:
        """Before an optimizer is attached all is dense, and nothing enlarged."""
        if not state:
            return Stage(phase=0)
        stage = super().stage(state)
        if not stage.phase or not left_of(state["t"], self.stages[-1][0]):
            return stage
        return replace(stage, not_ready=f"still has {float(self.share(state['t'])):.1%} of its groups dense")

    def share(self, t: Tensor) -> Tensor:
        """D after ``t`` applied steps of the run (float64), computed where t lies."""
        (_, _), (start, _), (stop, _) = self.stages
        u = ((t - start) / (stop - start)).clamp(0.0, 1.0)
        if self.levels is not None:
            # the small shift keeps a boundary from falling below itself
            u = torch.floor(u * self.levels + 1e-9) / self.levels
        if self.schedule == "exp":
            d = 1.0 - (1.0 - (-CURVE * u).exp()) / (1.0 - math.exp(-CURVE))
        elif self.schedule == "cos":
            d = (u * (math.pi / 2)).cos()
        else:
            d = (1.0 - u) ** (3 if self.schedule == "cubic" else 1)
        return torch.where(t < stop, d, 0.0)

    def values(self, state: State) -> dict[str, Tensor]:
        return {"dense_groups": self.share(state["t"])} if state else {}

    def _transform(self, kind: type[SoftQuery]) -> SoftQuery:
        return kind(Pattern(self.pattern), self.tau, self.kernel, self.gradient == "chain")

    def final_transform(self) -> WeightTransform:
        return self._transform(SoftQuery)
