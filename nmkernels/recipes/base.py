"""What a recipe is: a frozen configuration, and pure functions from its schedule's state to what training does next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..autograd import STRAIGHT_THROUGH, GemmPlan, HardMask, WeightTransform
from ..nn import ActivationRule
from ..optim import PLAIN, MaskedAdamW, UpdateRule
from ..pattern import CheckpointError, Pattern, PatternLike, RecipeError
from .cost import Span
from .search.channels import Search
from .text import text

State = dict[str, Any]
"""A recipe's schedule state: plain values and tensors, kept in the optimizer's ``param_groups[0]["nm_recipe"]``."""


@dataclass(frozen=True)
class Stage:
    """What happens in one phase of a recipe.

    Args:
        phase: 0 dense or preconditioning, 1 mask learning, 2 fixed mask.
        transform: what the forward pass makes of each weight, and how the gradient gets back to it; None uses the weight as it is.
        rule: how the maskable parameters are updated.
        plan: the rule of each of a layer's three products.
        fixed: the mask was chosen once for good: gradients and weights are masked around each step.
        renew: what the transform holds is chosen anew after every so many applied steps; 0 for only when the stage begins.
        later: in a stage before the sparse ones, the transform that they will begin with: what it takes once from the weights, and the
            patterns of the layers, are then taken from the weights at the end of this stage and not from those of ``sparsify_``.
        adapter: the layers' low-rank adapters take part, where ``Recipe.adapter_rank`` gives them some.
        activation: the rule of the squared-ReLU activations, for a recipe with a ``final_activation``; None for dense ones.
        part: where it differs from that of the stage before, what both hold is renewed, and its steps are counted from there; otherwise it
            goes on as it is.
    """

    phase: int
    transform: WeightTransform | None = None
    rule: UpdateRule = PLAIN
    plan: GemmPlan = STRAIGHT_THROUGH
    fixed: bool = False
    renew: int = 0
    later: WeightTransform | None = None
    adapter: bool = False
    activation: ActivationRule | None = None
    part: int = 0


@dataclass(frozen=True)
class Recipe:
    """Base of every recipe: frozen, validates itself, holds no state.

    Args:
        pattern: N:M of the layers, ``"2:4"`` or a ``Pattern``.
        total_steps: optimizer steps of the whole run, for recipes with a schedule; None where there is none.

    Raises:
        PatternError, RecipeError: a value is out of range. TypeError: an unknown keyword.
    """

    pattern: PatternLike = "2:4"
    total_steps: int | None = None

    name: ClassVar[str] = ""
    final: ClassVar[str] = "nm"
    """What ``finish()`` leaves: ``"nm"``, ``"dense"``, or ``"nm+adapter"``, N:M weights with a low-rank adapter beside each; an instance
    whose settings change that has its own."""

    mask_score: ClassVar[str | None] = None
    """How a mask that is chosen once is scored, for recipes that hold one."""

    search: ClassVar[Search | None] = None
    """How channels are reordered before a mask is chosen once, for recipes that do."""

    paper: ClassVar[str] = ""
    """Authors, where published, and arXiv number."""

    patterns: ClassVar[str] = ""
    """The N:M that it takes."""

    extra_state: ClassVar[str] = ""
    """What it keeps beside the dense weights and the optimizer's moments."""

    cost: ClassVar[str] = ""
    """What it adds to, or saves from, a dense training step."""

    @property
    def freezes(self) -> str:
        """Whose gradients are off until the recipe ends: ``""`` nobody's, ``"weights"`` of its layers, ``"all"`` but what it learns."""
        return ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "pattern", Pattern(self.pattern))
        total = self.total_steps
        if total is not None and (not isinstance(total, int) or isinstance(total, bool) or total < 1):
            raise RecipeError(f"{type(self).__name__}: total_steps={total!r} must be a whole number of at least 1.")

    def spec(self) -> dict[str, Any]:
        """The recipe as plain values, for checkpoints and logs; patterns and inner recipes as text."""
        return {"recipe": self.name, **{f.name: _plain(getattr(self, f.name)) for f in fields(self)}}

    def text(self) -> str:
        """The recipe as one line that ``nmkernels.recipes.get`` reads, without what is left at its default.

        Example:
            >>> Recipe("2:4", total_steps=10).text()
            ':2:4(total_steps=10)'
        """
        own = {f.name: _plain(getattr(self, f.name)) for f in fields(self) if f.name != "pattern"}
        return text(self.name, str(self.pattern), {f.name: own[f.name] for f in fields(self) if f.name in own and own[f.name] != f.default})

    def optimizer(self, params: Iterable[Any], lr: float | Tensor = 1e-3, **kwargs: Any) -> torch.optim.Optimizer:
        """The optimizer that serves this recipe best: ``MaskedAdamW`` with the keywords of ``torch.optim.AdamW``."""
        return MaskedAdamW(params, lr=lr, **kwargs)

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ``RecipeError`` if this recipe cannot run with ``optimizer``; by default any will do."""

    def start(self, group: dict[str, Any]) -> State:
        """The schedule's first state; ``group`` is the parameter group of the maskable weights."""
        return {}

    def stage(self, state: State) -> Stage:
        """What training does in ``state``; an empty one stands for the time before an optimizer is attached."""
        raise RecipeError(f"{type(self).__name__} defines no stage.")

    def advance(self, state: State, observed: Observed) -> bool:
        """Take one finished optimizer step into ``state``, in place; True when the stage may have changed."""
        return False

    def profile(self, steps: int) -> list[Span]:
        """The FLOPs of the first ``steps`` steps, in consecutive spans, for ``nm.flops``.

        By default ``stage({})`` is taken to last: fprop costs N/M where it has a transform or a held mask, dgrad where the transform has
        a weight of its own for it, wgrad what the plan says. Recipes whose stages change, whose transform is not N:M, or whose masks
        are transposable say so themselves.
        """
        stage, share = self.stage({}), Pattern(self.pattern).density
        masked, turned = stage.transform is not None or stage.fixed, stage.transform is not None and stage.transform.traits.own_dgrad
        packed = stage.plan.n / max(stage.plan.m, 1)
        wgrad = {"mvue": packed, "magnitude": packed, "none": 0.0}.get(stage.plan.wgrad, 1.0)
        return [Span(steps, fprop=share if masked else 1.0, dgrad=share if turned else 1.0, wgrad=wgrad)]

    def of_pattern(self, pattern: Pattern) -> Recipe:
        """The same recipe with another pattern, to count the FLOPs of layers that have one of their own."""
        return replace(self, pattern=pattern)

    def switched_at(self, step: int) -> Recipe:
        """The same recipe with its own choice of a switching step replaced by ``step``, to count the FLOPs of a run afterwards.

        Raises:
            RecipeError: the recipe has no such choice.
        """
        raise RecipeError(f"{self.name or type(self).__name__} does not choose a switching step by itself, so switch_step has no meaning.")

    def deployed(self) -> Span:
        """One forward pass of what ``finish`` leaves: ``fprop`` at N/M, or dense where ``final`` is; ``rank`` where an adapter stays."""
        return Span(1, fprop=1.0 if self.final == "dense" else Pattern(self.pattern).density, dgrad=0.0, wgrad=0.0)

    def final_transform(self) -> WeightTransform:
        """What ``finish`` applies to each weight unless ``final`` is ``"dense"``; by default the mask of the N largest magnitudes."""
        return HardMask(Pattern(self.pattern))

    def final_activation(self) -> ActivationRule | None:
        """What ``finish`` leaves the squared-ReLU activations at; by default None: they are none of the recipe's business."""
        return None

    def obstacle(self, rows: int, cols: int) -> str:
        """Why this recipe cannot do with a weight ``(rows, cols)`` whose ``cols`` M divides; empty where it can."""
        return ""

    def layer_patterns(self, weights: Mapping[str, Tensor]) -> dict[str, Pattern] | None:
        """N:M of each layer, from the present weights ``(out, in)`` by name; by default None: all layers have the recipe's own.

        Asked at ``sparsify_``, at ``attach`` and at the end of a dense stage (``Stage.later``); a resumed run has those of its checkpoint.
        """
        return None

    def fit(self, transform: WeightTransform, pattern: Pattern, shape: tuple[int, int]) -> WeightTransform:
        """``transform`` as it suits a layer: by default with the layer's own ``pattern``, where that is not the recipe's.

        Args:
            shape: of the layer's weight, ``(out, in)``.
        """
        return transform if pattern == self.pattern else replace(transform, pattern=pattern)

    def unwise(self, rows: int, cols: int) -> str:
        """Why a weight ``(rows, cols)`` had better stay dense under this recipe, unless the user's filter chooses it; by default empty."""
        return ""

    def note(self, pattern: Pattern, shape: tuple[int, int]) -> str:
        """What the report says of a layer that was made sparse; by default its pattern."""
        return str(pattern)

    def adapter_rank(self, rows: int, cols: int) -> int:
        """Rank of the low-rank adapter that ``sparsify_`` adds to a weight ``(rows, cols)``; by default 0, none."""
        return 0

    def inputs(self, state: State) -> dict[str, Tensor]:
        """Numbers of the schedule that the transform reads, by buffer name, as 0-d tensors; renewed after every step."""
        return {}

    def settle(self, state: State, weight: Tensor, lr: float | Tensor) -> Tensor | None:
        """What becomes of a master weight ``(out, in)`` after an applied step, as a proximal method has it; by default None, nothing."""
        return None

    def unready(self, state: State) -> str:
        """Why it is too early to finish in ``state``; empty where it is not."""
        return "is still in its dense phase" if self.final != "dense" and self.stage(state).phase == 0 else ""

    def check_state(self, state: Any, group: dict[str, Any]) -> None:
        """Raise ``CheckpointError`` unless training can go on from ``state``, which a checkpoint holds.

        Args:
            group: the parameter group of the maskable weights, as for ``start``.
        """
        spec = state.get("spec") if isinstance(state, dict) else None
        mine = self.spec()
        if not isinstance(spec, dict) or "recipe" not in spec:
            raise CheckpointError("the optimizer state holds a recipe state that nmkernels did not write.")
        if any(spec.get(key) != mine[key] for key in ("recipe", "pattern")):
            raise CheckpointError(
                f"the checkpoint is of {spec['recipe']}:{spec.get('pattern')}, this run uses {mine['recipe']}:{mine['pattern']}. "
                "Resume with the same recipe, or load only the model's weights."
            )
        missing = sorted(set(self.start(group)) - set(state))
        if missing:
            raise CheckpointError(f"the checkpoint's recipe state is incomplete or of another version: it has no {', '.join(missing)}.")

    def metrics(self, state: State) -> dict[str, Tensor]:
        """Figures of this recipe's own, as 0-d tensors, beside the common ones."""
        return {}


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Pattern) else value.text() if isinstance(value, Recipe) else value


@dataclass(frozen=True)
class Observed:
    """What one optimizer step showed, over the maskable parameters.

    Args:
        stats: float64 sums, named by ``nmkernels.ops.STATS``.
        numel: number of maskable weights that took part.
        second_moments: their raw ``exp_avg_sq`` where the optimizer keeps one.
        step: the optimizer's own step count of these parameters, None where it has none; reading it may wait for the device.
        calls: how many steps can have been applied at most; known to the host, which cannot see whether a step was skipped.
        group: the parameter group of the maskable weights, as for ``Recipe.start``.
    """

    stats: Tensor
    numel: int
    second_moments: list[Tensor]
    step: Tensor | None
    calls: int
    group: dict[str, Any] = field(default_factory=dict)
