"""MaskLLM: the mask is drawn from learned logits, the weights are frozen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from ...autograd.transforms import CombinationMask, Traits, WeightTransform, combination_count, reading, wide
from ...nn.weight import NMWeight, is_learned
from ...optim.rules import UpdateRule
from ...pattern import Pattern, RecipeError, ShapeError
from ...reference import uniforms24
from ...shards import is_sharded
from ..contract import About, Hooks, Setup, Stage, State, choice, flag, number, random_seed
from ..registry import recipe
from ..schedule import ScheduledRecipe, left_of


@dataclass(frozen=True)
class LikeliestMask(CombinationMask):
    """W̃ = W ⊙ P_k with k the largest logit of each group: what MaskLLM deploys."""

    reads = reading(nm_logits="fixed")

    def kept(self, weight: Tensor, *extras: Tensor) -> Tensor:
        return self.best(wide(extras[0]), weight)


@dataclass(frozen=True)
class GumbelMask(LikeliestMask):
    """W̃ = W ⊙ M̃ with ``MaskLLM``'s M̃, π in ``nm_logits`` ``(groups, C)`` and the noise a function of the held ``nm_draw`` alone."""

    hard: bool = False
    prior: float = 3.0
    spread: float = 0.01

    reads = reading(nm_logits="learned", nm_draw="held", nm_tau="fed", nm_kappa="fed", nm_penalty="fed")

    def _traits(self) -> Traits:
        return replace(super()._traits(), is_nm=self.hard)

    def start(self, weight: Tensor) -> dict[str, Tensor]:
        mask = torch.ops.nmkernels.nm_mask(weight, self.pattern.n, self.pattern.m)
        return {"nm_logits": self.preferring(mask, weight)}

    def preferring(self, mask: Tensor, weight: Tensor) -> Tensor:
        """Fresh logits that prefer ``mask`` M₀ ``(out, in)``: π_k + σ(π) (⟨M₀, P_k⟩ − N/2) α, with σ(π) their spread in this layer."""
        dtype = torch.promote_types(weight.dtype, torch.float32)
        shape = weight.numel() // self.pattern.m, combination_count(self.pattern)
        # in fp32 whatever the dtype is: the same seed gives the same logits
        logits = (torch.randn(shape, dtype=torch.float32, device=weight.device) * self.spread).to(dtype)
        overlap = self.grouped(mask).to(dtype) @ self.table(logits).t()
        return logits + logits.std(correction=0) * (overlap - self.pattern.n / 2) * self.prior

    def renew(self, weight: Tensor, extras: Sequence[Tensor | None], generator: torch.Generator) -> dict[str, Tensor]:
        return {"nm_draw": torch.randint(-(2**63), 2**63 - 1, (2,), generator=generator, dtype=torch.int64)}

    def choices(self, *extras: Tensor) -> Tensor:
        """ỹ ``(groups, C)``."""
        logits, (_, draw, tau, kappa, _) = wide(extras[0]), extras
        return ((logits * kappa + gumbel(draw, logits)) / tau).softmax(1).to(logits.dtype)

    def mixture(self, choices: Tensor) -> Tensor:
        """M̃ ``(groups, M)``."""
        table = self.table(choices)
        return table[choices.argmax(1)] if self.hard else choices @ table

    def __call__(self, weight: Tensor, *extras: Tensor, out: Tensor | None = None) -> Tensor:
        soft = self.mixture(self.choices(*extras)).reshape(weight.shape).to(weight.dtype)
        return weight.detach().contiguous() * soft if out is None else torch.mul(weight.detach(), soft, out=out)

    def gradient(self, g: Tensor, weight: Tensor, *extras: Tensor) -> tuple[Tensor | None, dict[str, Tensor]]:
        """∂L/∂π = (κ/τ) ỹ ⊙ (d − ⟨ỹ, d⟩) with d_k = ⟨g ⊙ W, P_k⟩ over the group; none of the weights, which are frozen."""
        return None, {"nm_logits": self._to_logits(self.choices(*extras), self.grouped(g) * self.grouped(weight), *extras)}

    def penalty(self, weight: Tensor, *extras: Tensor) -> dict[str, Tensor]:
        """The gradient of −λ ‖W ⊙ M̃‖², λ the schedule's ``nm_penalty``."""
        choices, w = self.choices(*extras), self.grouped(weight)
        return {"nm_logits": self._to_logits(choices, -2.0 * extras[4] * w * w * self.mixture(choices), *extras)}

    def _to_logits(self, choices: Tensor, d_mask: Tensor, *extras: Tensor) -> Tensor:
        """From the gradient of M̃ ``(groups, M)`` to that of π."""
        logits, _, tau, kappa, _ = extras
        d = d_mask.to(choices.dtype) @ self.table(choices).t()
        return (choices * (d - (choices * d).sum(1, keepdim=True)) * (kappa / tau)).to(logits.dtype)

    def watch(self, weight: Tensor, *extras: Tensor) -> dict[str, Tensor]:
        """``sharpness``, the mean of the largest ỹ of each group: 1/C says that nothing is decided, 1 that all is."""
        return {"sharpness": self.choices(*extras).amax(1).mean()}


class Freeze(Hooks):
    """Until the recipe ends no weight of its layers trains, and with ``others="frozen"`` no parameter but the learned ones."""

    frozen: Sequence[str] = ()
    """By name: loading and moving a model may give it other Parameters."""

    def enter(self, stage: Stage) -> None:
        if not self.frozen:
            layers = self.run.layers.values()
            weights = {id(layer.parameter) for layer in layers}
            learned = {id(p) for layer in layers for p in layer.learned().values()}
            others = self.recipe.others == "frozen"
            chosen = ((name, p) for name, p in self.run.model.named_parameters() if id(p) in weights or (others and id(p) not in learned))
            self.frozen = [name for name, p in chosen if p.requires_grad]
        for p in self._frozen():
            p.requires_grad_(False)
            p.grad = None  # zeros left by zero_grad(set_to_none=False) would still be decayed

    def _frozen(self) -> list[nn.Parameter]:
        present = dict(self.run.model.named_parameters())
        return [present[name] for name in self.frozen if name in present]

    def close(self) -> None:
        for p in self._frozen():
            p.requires_grad_(True)


def gumbel(draw: Tensor, like: Tensor) -> Tensor:
    """Standard Gumbel noise −log(−log u) of the shape and dtype of ``like``, a function of ``draw`` alone (int64 ``(2,)``).

    u = (k + ½) / 2²⁴, k the 24-bit numbers of Philox in row-major order; computed in fp64, where u never rounds to 1.
    """
    u = (uniforms24(draw, like.numel()).double() + 0.5) / 2**24
    return -(-u.log()).log().to(like.dtype).reshape(like.shape)


@recipe("maskllm")
@dataclass(frozen=True)
class MaskLLM(ScheduledRecipe):
    """MaskLLM (Fang et al., "MaskLLM: learnable semi-structured sparsity for large language models", NeurIPS 2024, arXiv 2409.17481).

    For a trained dense model: W is frozen, and each group learns logits π over its C(M, N) combinations P_k::

        ỹ = softmax((κ π + G) / τ)      G Gumbel noise, new for every step
        M̃ = Σ_k ỹ_k P_k,  W̃ = W ⊙ M̃   used in forward and backward
        L(W̃) − λ Σ ‖W ⊙ M̃‖²            is minimised over π alone
        τ: 4 → 0.05,  κ: 100 → 500       linear over ``total_steps``

    ``finish`` leaves W ⊙ P_k, k the largest logit. π is the Parameter ``nm_logits`` ``(groups, C)`` of each layer, in the model's state
    dict until then; a dense checkpoint loads strictly and starts it again.

    Args:
        tau_start, tau_end, kappa_start, kappa_end: τ and κ at both ends of the run.
        decay, decay_schedule: λ; ``"constant"``, the paper's equation; ``"linear"`` falls to 0 over the run, as in the authors' code.
        prior_strength: α, by which the logits prefer the mask of the N largest magnitudes at the start, π_k += σ(π) (⟨M₀, P_k⟩ − N/2) α;
            0 for no prior. ``set_prior_`` takes another mask.
        init_std: of the initial logits, drawn from torch's generator.
        hard: multiply the combination of the largest ỹ instead of M̃; the gradient is that of M̃.
        others: ``"frozen"``, the paper's: no other parameter of the model trains either, until ``finish`` or ``remove``; ``"trained"``:
            they do.
        lr_multiplier, seed: of the logits, in ``optimizer``; of the noise, None for torch's initial seed.

    Raises:
        PatternError: more than 256 combinations.

    Example:
        >>> recipe = MaskLLM("2:4", total_steps=2000)
        >>> {name: round(float(x), 2) for name, x in recipe.values({"t": torch.tensor(500.0)}).items() if name != "penalty"}
        {'tau': 3.01, 'kappa': 200.0}
    """

    tau_start: float = number(4.0, above=True)
    tau_end: float = number(0.05, above=True)
    kappa_start: float = number(100.0, above=True)
    kappa_end: float = number(500.0, above=True)
    decay: float = number(1e-5)
    decay_schedule: str = choice("constant", "linear")
    prior_strength: float = number(3.0)
    init_std: float = number(0.01)
    hard: bool = flag(False)
    others: str = choice("frozen", "trained")
    lr_multiplier: float = number(10.0, above=True)
    seed: int | None = random_seed()

    about = About(
        paper="Fang et al., NeurIPS 2024, arXiv 2409.17481",
        patterns="any N:M of at most 256 combinations",
        extra_state="C(M, N) logits per group, and their moments",
        cost="a dense step without weight updates; C(M, N) Gumbel numbers per group, made three times a step",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        combination_count(Pattern(self.pattern))
        if self.total_steps is None:
            raise RecipeError("MaskLLM: total_steps is needed, the number of optimizer steps over which temperature and scale change.")

    @property
    def setup(self) -> Setup:
        reason, only = "learns logits for each whole weight", "learns logits for the weights of linear layers"
        return Setup(hooks=partial(Freeze, self), draws=True, seed=self.seed, needs_whole=reason, linear_only=only)

    def optimizer(self, params: Iterable[Any], lr: float | Tensor = 1e-3, **kwargs: Any) -> torch.optim.Optimizer:
        return super().optimizer(learned_apart("MaskLLM", params, lr, self.lr_multiplier), lr, **kwargs)

    def set_prior_(self, layers: Mapping[str, NMWeight], masks: Mapping[str, Tensor]) -> None:
        """Initialise the logits of some layers again, preferring given masks (of Wanda or SparseGPT, for instance), before training.

        Args:
            layers: ``handle.layers``.
            masks: layer name -> bool ``(out, in)``, at most N in each group.
        """
        transform = self.stages[0][1].transform
        assert isinstance(transform, GumbelMask)
        n, m = transform.pattern.n, transform.pattern.m
        for name, mask in masks.items():
            if name not in layers:
                raise RecipeError(f"MaskLLM: a prior mask is given for {name!r}, but the sparse layers are {', '.join(layers)}.")
            weight = layers[name].master.detach()
            if mask.shape != weight.shape or int(mask.bool().reshape(-1, m).sum(1).amax()) > n:
                raise ShapeError(f"MaskLLM: the prior mask of {name!r} must be {n}:{m} and of shape {tuple(weight.shape)}.")
        for name, mask in masks.items():
            weight = layers[name].master.detach()
            layers[name].restore({"nm_logits": transform.preferring(mask.bool().to(weight.device), weight)})

    @cached_property
    def stages(self) -> tuple[tuple[int, Stage], ...]:
        """Always phase 1, with new noise after every step."""
        transform = GumbelMask(Pattern(self.pattern), hard=self.hard, prior=self.prior_strength, spread=self.init_std)
        return ((0, Stage(phase=1, transform=transform, rule=UpdateRule(masked=True), every=1)),)

    def values(self, state: State) -> dict[str, Tensor]:
        t = state["t"] if "t" in state else torch.zeros((), dtype=torch.float64)
        done = (t / (self.total_steps or 1)).clamp(max=1.0)
        return {
            "tau": self.tau_start + (self.tau_end - self.tau_start) * done,
            "kappa": self.kappa_start + (self.kappa_end - self.kappa_start) * done,
            "penalty": self.decay * (1.0 - done if self.decay_schedule == "linear" else torch.ones_like(done)),
        }

    def final_transform(self) -> WeightTransform:
        return LikeliestMask(Pattern(self.pattern))

    def stage(self, state: State) -> Stage:
        stage, total = super().stage(state), self.total_steps or 1
        if not state or not (left := left_of(state["t"], total)):
            return stage
        return replace(stage, not_ready=f"has {left} of {total} steps to go, its masks are still mixtures")


def learned_apart(recipe: str, params: Iterable[Any], lr: float | Tensor, multiplier: float) -> list[dict[str, Any]]:
    """Parameter groups with the learned parameters in their own groups, at ``multiplier`` times their group's learning rate, or ``lr``."""
    listed = list(params)
    groups: list[dict[str, Any]] = listed if listed and isinstance(listed[0], dict) else [{"params": listed}]
    result, every = [], []
    for group in groups:
        entries = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        every += entries
        rest, apart = ([entry for entry in entries if is_learned(entry) is learned] for learned in (False, True))
        result += [{**group, "params": rest}] if rest else []
        result += [{**group, "params": apart, "lr": group.get("lr", lr) * multiplier}] if apart else []
    if not any(map(is_learned, every)):
        if any(is_sharded(entry[1] if isinstance(entry, tuple) else entry) for entry in every):
            raise RecipeError(f"{recipe} learns numbers for each whole weight, and the parameters are sharded. Do not shard the model.")
        raise RecipeError(
            f"{recipe}: the parameters hold nothing that the recipe learns. Call sparsify_ first, then "
            "recipe.optimizer(model.parameters()); for a copied or wrapped model give model.named_parameters()."
        )
    return result
