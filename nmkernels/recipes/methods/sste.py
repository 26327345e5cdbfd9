"""S-STE: a continuous projection onto N:M in place of the hard mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...autograd import GemmPlan, SoftThreshold, WeightTransform
from ...optim import UpdateRule
from ...pattern import NMError, Pattern, PatternLike, RecipeError
from ..base import Recipe, Stage, State
from ..packing import packing
from ..registry import recipe
from ..schedule import check_seed


@recipe("sste")
@dataclass(frozen=True)
class SSTE(Recipe):
    """S-STE (Hu, Zhu, Chen, "S-STE: continuous pruning function for efficient 2:4 sparse pre-training", NeurIPS 2024).

    Forward with W̃ = β S(W), where S(w)_i = sign(w_i) max(|w_i| − t, 0) and t is the (N+1)-th largest magnitude of the group:
    continuous in W, so that a weight enters and leaves the kept ones at 0. β = ⟨W, S(W)⟩ / ‖S(W)‖² of the initial weight, one
    number per tensor, then frozen (renewed at every step it drifts upward). The gradient ∂L/∂W := ∂L/∂W̃ has neither β nor a mask.
    Sparse from the first step to the last; there is no decay and no dense fine-tuning. ``finish`` leaves β S(W), what training multiplied.

    β is taken by ``sparsify_`` and again by ``attach``, after the model's own initialisation. It is the buffer ``nm_scale`` of each layer
    in the model's state dict until ``finish`` or ``remove``; a state dict without it, a dense checkpoint, loads strictly and renews it.

    2:4 is the paper's; for other N:M, t and β are our extension. The paper sparsifies the feed-forward linears only (``filter_fn``).
    Uniform weight decay rescales S(W) and does not move the mask. Works with any optimizer; under Adam β acts as a learning rate would.

    Args:
        mvue: the output gradient g is replaced in ∂L/∂W = gᵀ x by its unbiased N:M estimate along tokens (Chmiel et al., ICLR 2023):
            ``"exact"``, of least variance; ``"approx"``, the two-draw sampler that the authors ran (its error is 1.0 to 2 times as
            large); None, the dense product. The authors' code uses ``"approx"``; exact costs no more here and is at least as good.
            ``"magnitude"`` takes the N largest instead, which is biased: for comparison only.
        mvue_pattern: N:M of the estimate. 2:4 whatever the weights' pattern is, as hardware wants it and the papers tried it.
        fp8: also round the operands of all three products to emulated FP8 with the current largest magnitude as scale, on any device:
            ``"paper"`` e4m3 forward, e5m2 for both operands in backward, as in the authors' code; ``"hybrid"`` e5m2 for gradients only.
            ``finish`` leaves weights that are not rounded. None for no emulation.
        packed: multiply the compressed weight: False never; True forward, and for ∂L/∂x where a kernel reads it (on CPUs); "auto" at every
            call and in every product where that was measured to be faster than the dense layout (``nm.tune``). It is packed once per
            step, by one call of ``nm.ops.pack``. Results differ from the dense layout's by rounding. In fp32 on 2 CPU cores a step
            (forward, backward, MaskedAdamW) of a 4096×1024 layer takes 0.81 of the dense layer's time with 256 tokens and 0.64 with 2048,
            of a 1024×1024 one 0.80 and 0.68; unpacked 0.88 to 0.98 (AMD EPYC, 2026-11-21). bf16 gains nothing there.
        seed: of the estimates; None takes torch's initial seed. Every layer and data-parallel rank has a stream of its own, advanced
            on the device by each backward pass and saved with the optimizer.

    Raises:
        RecipeError: an option is unknown, or ``mvue="approx"`` with an ``mvue_pattern`` whose N is not 2; at ``sparsify_``, ``attach`` or
            when loading, a weight without a scale (all zero).

    Example:
        >>> SSTE("2:4", mvue=None).stage({}).transform
        SoftThreshold(pattern=Pattern("2:4"))
    """

    paper = "Hu, Zhu, Chen, NeurIPS 2024, arXiv 2409.09099"
    patterns = "any N:M; 2:4 in the paper"
    extra_state = "one frozen scale per layer, and a random stream for the estimates"
    cost = "fprop at N/M, wgrad at that of mvue_pattern; a threshold at every step, an estimate of g in every backward"

    mvue: str | None = "exact"
    mvue_pattern: PatternLike = "2:4"
    fp8: str | None = None
    packed: bool | str = False
    seed: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "mvue_pattern", Pattern(self.mvue_pattern))
        check_seed("SSTE", self.seed)
        packing("SSTE", self.packed, self.pattern)
        try:
            self.plan()
        except NMError as error:
            options = f"mvue={self.mvue!r}, mvue_pattern={self.mvue_pattern}, fp8={self.fp8!r}, packed={self.packed!r}"
            raise RecipeError(f"SSTE: {options} do not go: {error}") from error

    def plan(self) -> GemmPlan:
        """β S(W) in fprop and dgrad, by ``packed`` in dense layout or compressed, and the weight gradient by ``mvue``."""
        p = Pattern(self.mvue_pattern)
        if self.mvue is None:
            plan = GemmPlan(fp8=self.fp8)
        elif self.mvue == "magnitude":
            plan = GemmPlan(wgrad="magnitude", n=p.n, m=p.m, fp8=self.fp8)
        else:
            plan = GemmPlan(wgrad="mvue", n=p.n, m=p.m, method=self.mvue, fp8=self.fp8)
        return packing("SSTE", self.packed, self.pattern, plan)

    def final_transform(self) -> WeightTransform:
        """β S(W), what training multiplies."""
        return SoftThreshold(Pattern(self.pattern))

    def start(self, group: dict[str, Any]) -> State:
        """The run's seed, where estimates are drawn."""
        if self.mvue is None:
            return {}
        return {"seed": torch.initial_seed() if self.seed is None else self.seed}

    def stage(self, state: State) -> Stage:
        """Always phase 1; the mask is only watched for its flips."""
        return Stage(phase=1, transform=self.final_transform(), rule=UpdateRule(masked=True), plan=self.plan())
