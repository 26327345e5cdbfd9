"""MaskLLM: the mask is drawn from learned logits, the weights are frozen."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...autograd import GumbelMask, LikeliestMask, WeightTransform, combination_count
from ...nn import NMWeight
from ...optim import UpdateRule
from ...pattern import Pattern, RecipeError, ShapeError
from ..base import Observed, Recipe, Stage, State
from ..cost import Span
from ..learned import learned_apart
from ..registry import recipe
from ..schedule import advance, check_choice, check_same_schedule

EARLY = 0.05
"""Share of the run still to come above which it counts as stopped on the way."""


@recipe("maskllm")
@dataclass(frozen=True)
class MaskLLM(Recipe):
    """MaskLLM (Fang et al., "MaskLLM: learnable semi-structured sparsity for large language models", NeurIPS 2024, arXiv 2409.17481).

    For a trained dense model: W is frozen, and each group learns logits π over its C(M, N) combinations P_k::

        ỹ = softmax((κ π + G) / τ)      G Gumbel noise, drawn anew for every step
        M̃ = Σ_k ỹ_k P_k,  W̃ = W ⊙ M̃   used in forward and backward
        L(W̃) − λ Σ ‖W ⊙ M̃‖²            is minimised over π alone
        τ: 4 → 0.05,  κ: 100 → 500       linear over ``total_steps``

    ``finish`` leaves W ⊙ P_k, k the largest logit. π is the Parameter ``nm_logits`` ``(groups, C)`` of each layer, in the model's state
    dict until then; a dense checkpoint loads strictly and starts it anew. The paper does 2:4 (its code also 1:4); any N:M with at most
    256 combinations works here.

    The noise is made anew from two words where it is needed (forward, backward, λ term) instead of being stored; on a CPU that takes longer
    than the products of a short batch.

    What the sources leave open: all microbatches of a step, and all data-parallel ranks, see one sample (the authors' code draws one
    per forward pass); the gradient of the λ term is added once per step, after unscaling and clipping, so accumulation does not
    multiply it and clipping does not touch it. The paper's settings: AdamW (0.9, 0.95), ε 1e-5, weight decay 0.1 (on the logits too), lr
    5e-5 → 5e-6 with the multiplier below, 2000 steps of 256 sequences. The code's layers default to κ 1e3 → 1e4 and τ → 0.1 instead.

    Args:
        tau_start, tau_end: temperature of the softmax.
        kappa_start, kappa_end: scale of the logits.
        weight_reg: λ.
        weight_reg_schedule: ``"constant"``, the paper's equation; ``"linear"`` falls to 0 over the run, as in the authors' code.
        prior_strength: α, by which the logits prefer the mask of the N largest magnitudes at the start, π_k += σ(π) (⟨M₀, P_k⟩ − N/2) α;
            0 for no prior. Another mask is given with ``set_prior_``.
        init_std: of the initial logits, drawn from torch's generator.
        hard: multiply the combination of the largest ỹ instead of M̃ (the gradient is that of M̃); the authors found it worse.
        others: ``"frozen"``, the paper's: no other parameter of the model trains either; ``"trained"``: biases, norms, embeddings and
            layers left dense do. Frozen parameters have ``requires_grad`` off until ``finish`` or ``remove``.
        lr_multiplier: of the logits, in ``optimizer``.
        seed: of the noise; None takes torch's initial seed.

    Raises:
        PatternError: more than 256 combinations. RecipeError: ``total_steps`` is missing or a value is out of range.

    Example:
        >>> recipe = MaskLLM("2:4", total_steps=2000)
        >>> {name: round(float(x), 2) for name, x in recipe.inputs({"t": torch.tensor(500.0)}).items() if name != "nm_penalty"}
        {'nm_tau': 3.01, 'nm_kappa': 200.0}
    """

    tau_start: float = 4.0
    tau_end: float = 0.05
    kappa_start: float = 100.0
    kappa_end: float = 500.0
    weight_reg: float = 1e-5
    weight_reg_schedule: str = "constant"
    prior_strength: float = 3.0
    init_std: float = 0.01
    hard: bool = False
    others: str = "frozen"
    lr_multiplier: float = 10.0
    seed: int | None = None

    paper: ClassVar[str] = "Fang et al., NeurIPS 2024, arXiv 2409.17481"
    patterns: ClassVar[str] = "any N:M of at most 256 combinations"
    extra_state: ClassVar[str] = "C(M, N) logits per group, and their moments"
    cost: ClassVar[str] = "a dense step without weight updates; C(M, N) Gumbel numbers per group, made three times a step"

    def __post_init__(self) -> None:
        super().__post_init__()
        combination_count(Pattern(self.pattern))
        if self.total_steps is None:
            raise RecipeError("MaskLLM: total_steps is needed, the number of optimizer steps over which temperature and scale change.")
        check_choice("MaskLLM", "weight_reg_schedule", self.weight_reg_schedule, ("constant", "linear"))
        check_choice("MaskLLM", "others", self.others, ("frozen", "trained"))
        for name in ("tau_start", "tau_end", "kappa_start", "kappa_end", "lr_multiplier"):
            if not 0 < getattr(self, name) < math.inf:
                raise RecipeError(f"MaskLLM: {name}={getattr(self, name)} must be a finite number above 0.")
        for name in ("weight_reg", "prior_strength", "init_std"):
            if not 0 <= getattr(self, name) < math.inf:
                raise RecipeError(f"MaskLLM: {name}={getattr(self, name)} must be a finite number of at least 0.")
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int)):
            raise RecipeError(f"MaskLLM: seed={self.seed!r} must be a whole number, or None for torch's initial seed.")

    @property
    def freezes(self) -> str:
        """The weights of the layers, or everything but the logits."""
        return "all" if self.others == "frozen" else "weights"

    def optimizer(self, params: Iterable[Any], lr: float | Tensor = 1e-3, **kwargs: Any) -> torch.optim.Optimizer:
        """``MaskedAdamW`` with the logits in groups of their own, at ``lr_multiplier`` times the learning rate."""
        return super().optimizer(learned_apart("MaskLLM", params, lr, self.lr_multiplier), lr, **kwargs)

    def set_prior_(self, layers: Mapping[str, NMWeight], masks: Mapping[str, Tensor]) -> None:
        """Start the logits of some layers anew, preferring given masks (of Wanda or SparseGPT, for instance), before training.

        Args:
            layers: ``handle.layers``.
            masks: layer name -> bool ``(out, in)``, at most N in each group.

        Raises:
            RecipeError: there is no such layer. ShapeError: a mask is of another shape, or not N:M.
        """
        p = Pattern(self.pattern)
        for name, mask in masks.items():
            if name not in layers:
                raise RecipeError(f"MaskLLM: a prior mask is given for {name!r}, but the sparse layers are {', '.join(layers)}.")
            weight = layers[name].master.detach()
            if mask.shape != weight.shape or int(mask.bool().reshape(-1, p.m).sum(1).amax()) > p.n:
                raise ShapeError(f"MaskLLM: the prior mask of {name!r} must be {p} and of shape {tuple(weight.shape)}.")
        for name, mask in masks.items():
            layer = layers[name]
            with torch.no_grad():
                logits = self._transform().preferring(mask.bool().to(layer.weight.device), layer.master.detach())
                layer.learned()["nm_logits"].copy_(logits)
            layer.restored = True  # as from a checkpoint: attach must not start them anew
            layer.effective.drop()

    def _transform(self) -> GumbelMask:
        return GumbelMask(Pattern(self.pattern), hard=self.hard, prior=self.prior_strength, spread=self.init_std)

    def final_transform(self) -> WeightTransform:
        """The combination of the largest logit."""
        return LikeliestMask(Pattern(self.pattern))

    def start(self, group: dict[str, Any]) -> State:
        """No step taken, and the seed of the noise."""
        seed = torch.initial_seed() if self.seed is None else self.seed
        return {"t": torch.zeros((), dtype=torch.float64), "stage": 0, "seed": seed}

    def check_state(self, state: Any, group: dict[str, Any]) -> None:
        """Also refuse to go on under another schedule."""
        super().check_state(state, group)
        check_same_schedule(state["spec"], self.spec())

    def stage(self, state: State) -> Stage:
        """Always phase 1, with new noise after every step."""
        return Stage(phase=1, transform=self._transform(), rule=UpdateRule(masked=True), renew=1)

    def profile(self, steps: int) -> list[Span]:
        """Dense, for mixtures are: all three products, ∂L/∂W̃ being what the logits learn from. With ``hard``, fprop at N/M."""
        return [Span(steps, fprop=Pattern(self.pattern).density if self.hard else 1.0)]

    def inputs(self, state: State) -> dict[str, Tensor]:
        """``nm_tau``, ``nm_kappa`` and ``nm_penalty``: τ, κ and λ of the next step."""
        assert self.total_steps is not None
        t = state["t"] if "t" in state else torch.zeros((), dtype=torch.float64)
        done = (t / self.total_steps).clamp(max=1.0)
        return {
            "nm_tau": self.tau_start + (self.tau_end - self.tau_start) * done,
            "nm_kappa": self.kappa_start + (self.kappa_end - self.kappa_start) * done,
            "nm_penalty": self.weight_reg * (1.0 - done if self.weight_reg_schedule == "linear" else torch.ones_like(done)),
        }

    def advance(self, state: State, observed: Observed) -> bool:
        """Count applied steps."""
        return advance(state, observed, ())

    def unready(self, state: State) -> str:
        """Too early while much of the annealing is still to come."""
        total = self.total_steps or 1
        left = total - int(state["t"])
        return f"has {left} of {total} steps to go, its masks are still mixtures" if left > EARLY * total else ""

    def metrics(self, state: State) -> dict[str, Tensor]:
        """``tau`` and ``kappa`` of the next step; ``sharpness``, the mean over groups of max_k ỹ_k, is the layers' own."""
        return {name: value for name, value in zip(("tau", "kappa"), self.inputs(state).values(), strict=False)}
