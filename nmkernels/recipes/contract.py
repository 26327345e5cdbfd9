"""What a recipe is: a frozen configuration, and pure functions from its schedule's state to what training does next."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from ..arguments import as_int, as_number, finite_number
from ..autograd.transforms import HardMask, WeightTransform
from ..gemm.plan import STRAIGHT_THROUGH, GemmPlan
from ..nn.weight import NMWeight
from ..optim.adamw import MaskedAdamW
from ..optim.rules import PLAIN, UpdateRule
from ..pattern import Pattern, PatternLike, RecipeError

State = dict[str, Any]
"""A recipe's schedule state: plain values and tensors, kept in the optimizer's ``param_groups[0]["nm_recipe"]``."""


@dataclass(frozen=True)
class About:
    """What ``python -m nmkernels recipes`` prints about a method: its paper, the N:M that it takes, what it stores in addition to the dense
    weights and the optimizer's moments, and what it adds to, or saves from, a dense training step."""

    paper: str = ""
    patterns: str = "any N:M"
    extra_state: str = "none"
    cost: str = ""


@dataclass(frozen=True)
class Span:
    """``steps`` consecutive optimizer steps and what the three GEMMs of a sparse layer cost in them, as shares of the dense ones.

    A GEMM counts as cheaper where N:M groups lie along the dimension that it sums over. Zeros without structure count as numbers.

    Args:
        fprop: N/M where the forward weight is N:M along ``in``; 1 while it is dense or only fading.
        dgrad: N/M where the weight of dgrad is N:M along ``out`` (transposable, double-pruned, or with a mask of its own); else 1.
        wgrad: N/M of the output gradient's estimate along tokens (1/2 for MVUE 2:4); 0 where no weight gradient is computed; else 1.
        rank: of a dense low-rank adapter next to the weight, which adds 2·rank·(in + out) to each GEMM; see ``rank_for``.
        teacher: dense forward passes of the whole model in addition to each training step, for distillation.

    Example:
        >>> Span(100, fprop=0.5, wgrad=0.5)
        Span(steps=100, fprop=0.5, dgrad=1.0, wgrad=0.5, rank=0, teacher=0)
    """

    steps: int
    fprop: float = 1.0
    dgrad: float = 1.0
    wgrad: float = 1.0
    rank: float | int = 0
    teacher: int = 0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            object.__setattr__(self, name, finite_number(RecipeError, f"Span: {name}", value))


def rank_for(rank: float | int, shape: tuple[int, ...]) -> int:
    """The rank of an adapter of a weight of ``shape``: ``rank`` if whole, else that share of the smaller side, at least 1; 0 for none."""
    return int(rank) if isinstance(rank, int) or rank == 0 else max(1, round(rank * min(shape[-2:])))


def truncate(spans: Iterable[Span], steps: int) -> list[Span]:
    """The first ``steps`` steps of consecutive ``spans``; the last span continues if they are too short."""
    *most, last = spans
    result = []
    for span in (*most, replace(last, steps=steps)):
        if taken := min(span.steps, steps):
            result.append(replace(span, steps=taken))
        steps -= taken
    return result


def stream_key(seed: int, name: str, rank: int) -> int:
    """The 64-bit key of a random stream, a signed number: a hash of the run's seed, the name of a layer or a purpose, and a rank."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{rank}/{name}".encode(), digest_size=8).digest(), "little", signed=True)


def generator_of(seed: int, name: str) -> torch.Generator:
    """A generator on the CPU, the same on every rank: the replicas of a weight must hold the same."""
    return torch.Generator().manual_seed(stream_key(seed, name, 0) & (2**63 - 1))


@dataclass(frozen=True)
class Setup:
    """What a recipe needs from a run, fixed for its whole length.

    Args:
        optimizer: the only class of optimizer that it runs with; ``needs``: what for, to complete "<Recipe> …, which SGD cannot".
        mask_score: how a mask that is chosen once is scored, for recipes that hold one.
        hooks: makes the ``Hooks`` of a run, for what the method does besides transforming and updating weights.
        draws: it draws random numbers in training, by a seed that its state holds; ``seed``: that one, None for torch's initial seed.
        needs_whole: why it cannot run with sharded weights, to complete "<Recipe> …"; empty where it can.
        linear_only: why it cannot take layers whose GEMMs are torch's own (convolutions, stacked experts), to complete "<Recipe> …";
            empty where all that it does to a layer is its W̃ and its update.
        patterns: N:M of each layer, from the present weights ``(out, in)`` by name; None: all have the recipe's own. A resumed run has
            those of its checkpoint.
    """

    optimizer: type[torch.optim.Optimizer] | None = None
    needs: str = ""
    mask_score: str | None = None
    hooks: Callable[[TrainedModel], Hooks] | None = None
    draws: bool = False
    seed: int | None = None
    needs_whole: str = ""
    linear_only: str = ""
    patterns: Callable[[Mapping[str, Tensor]], dict[str, Pattern]] | None = None

    @property
    def first_seed(self) -> int:
        """``seed``, or torch's initial seed."""
        return torch.initial_seed() if self.seed is None else self.seed


@dataclass(frozen=True)
class Stage:
    """What happens in one phase of a recipe; a method whose ``Hooks`` need to know more subclasses it.

    Args:
        phase: 0 dense or preconditioning, 1 mask learning, 2 fixed mask.
        transform: how the forward pass makes W̃ of each weight, and its gradient that of the weight; None uses the weight as it is.
        rule: how the maskable parameters are updated.
        plan: how each of a layer's three GEMMs is computed.
        held_mask: the mask was chosen once for good: gradients and weights are masked around each step.
        every: the transform's held tensors are renewed after every so many applied steps; 0: never.
        later: in a dense stage, the transform of the sparse ones: what that takes once from the weights, and the patterns of the layers,
            come from the weights at the end of this stage and not from those of ``sparsify_``.
        not_ready: why it is too early to finish, to complete "the recipe <name> …"; empty where it is not.
        remark: what a user should know of how the schedule came here, for a warning and the report; empty for nothing.
    """

    phase: int
    transform: WeightTransform | None = None
    rule: UpdateRule = PLAIN
    plan: GemmPlan = STRAIGHT_THROUGH
    held_mask: bool = False
    every: int = 0
    later: WeightTransform | None = None
    not_ready: str = ""
    remark: str = ""

    def span(self, steps: int, pattern: Pattern) -> Span:
        """The FLOPs of ``steps`` steps: fprop at N/M where W̃ is N:M, dgrad where it has an N:M weight too, wgrad by the plan; ``pattern``
        is that of a held mask."""
        transform, packed = self.transform, self.plan.n / max(self.plan.m, 1)
        traits = None if transform is None else transform.traits
        sparse = self.held_mask or (traits is not None and traits.is_nm)
        share = (pattern if transform is None else transform.pattern).density if sparse else 1.0
        both = traits is not None and (traits.transposable or traits.own_dgrad)
        wgrad = {"mvue": packed, "magnitude": packed, "none": 0.0}.get(self.plan.wgrad, 1.0)
        return Span(steps, fprop=share, dgrad=share if both else 1.0, wgrad=wgrad)


@dataclass(frozen=True)
class LayerSetup:
    """What a recipe does with one layer.

    Args:
        transform: the recipe's transform, adapted to the layer.
        unsupported_reason: why the recipe cannot take a weight of that shape, whose ``in`` M divides; empty where it can.
        keep_dense_reason: why the layer stays dense unless the user's filter chooses it; empty where it need not.
        note: its line in the report.
    """

    transform: WeightTransform | None
    unsupported_reason: str = ""
    keep_dense_reason: str = ""
    note: str = ""


# ---- settings: fields that say what values fit, which Recipe checks, and whether a resumed run may have another


def setting(default: Any, fits: Callable[[Any], bool], wanted: str, none: str = "", resume: str = "") -> Any:
    """A field whose value ``fits``; for any other value the error says ``name=value`` and what is ``wanted``.

    Args:
        none: what None is for, where it fits too.
        resume: ``"any"``: a resumed run may differ from its checkpoint; ``"same"``: it may not. By default it may not in a
            ``ScheduledRecipe``, whose steps have been counted by it.
    """
    metadata = {"fits": fits, "wanted": wanted, "resume": resume}
    if none:
        metadata |= {"fits": lambda x: x is None or fits(x), "wanted": f"{wanted}, or None {none}"}
    return field(default=default, metadata=metadata)


def number(default: float | None, above: bool = False, none: str = "", resume: str = "") -> Any:
    """A finite number of at least 0 or ``above`` it, as infinity times a kept weight's zero would be NaN; ``none`` as for ``count``."""
    wanted = f"must be a finite number {'above' if above else 'of at least'} 0"
    return setting(default, lambda x: (value := as_number(x)) is not None and (value > 0 if above else value >= 0), wanted, none, resume)


def count(default: int | None, least: int = 0, none: str = "", resume: str = "") -> Any:
    """A whole number of at least ``least``, or None where ``none`` says what that is for."""
    return setting(default, lambda x: as_int(x) is not None and x >= least, f"must be a whole number of at least {least}", none, resume)


def choice(default: Any, *others: Any, resume: str = "") -> Any:
    """One of the given values, the first one by default."""
    known = (default, *others)
    return setting(default, lambda x: x in known, f"is unknown; choose one of {', '.join(map(str, known))}", resume=resume)


def flag(default: bool) -> Any:
    """True or False, and not 1 or 0."""
    return setting(default, lambda x: isinstance(x, bool), "must be True or False")


def random_seed(default: int | None = None) -> Any:
    """A whole number of 64 bits; by default None, for torch's initial seed."""
    none = "for torch's initial seed" if default is None else ""
    return setting(default, lambda x: as_int(x) is not None and -(2**63) <= x < 2**64, "must be a whole number of 64 bits", none)


# ---- recipes


class TrainedModel(Protocol):
    """What ``Hooks`` may use of a run.

    Attributes:
        model, layers: the model, and its sparse layers by name.
        state: of the recipe, as ``Recipe.stage`` gets it; empty before an optimizer is attached.
        optimizers: all that update the model.
        report: ``handle.report``.
        held: the masks that are chosen once, and the scores by which they are; ``ASP`` reorders channels with them.
    """

    model: nn.Module
    layers: dict[str, NMWeight]
    state: State
    report: Any
    held: Any

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]: ...

    def renew_held(self) -> None:
        """Give transforms the numbers of the present state, and choose again what they hold, if anything."""


class Hooks:
    """What a method changes on one model that no ``Stage`` describes; every method of this base does nothing.

    A recipe that needs one subclasses it in its own file and names it in ``Setup(hooks=partial(MyHooks, self))``; ``sparsify_`` calls that
    with the run.

    Attributes:
        recipe: the recipe that has named it, also inside another one.
        run: the run.
        metrics: 0-d tensors by name, which ``handle.metrics()`` returns with the others.

    Example:
        >>> class FreezeInTheEnd(Hooks):
        ...     def enter(self, stage):
        ...         for layer in self.run.layers.values():
        ...             layer.parameter.requires_grad_(stage.phase < 2)
    """

    def __init__(self, recipe: Any, run: TrainedModel) -> None:
        self.recipe, self.run = recipe, run
        self.metrics: dict[str, Tensor] = {}
        self.begin()

    def begin(self) -> None:
        """``sparsify_`` has swapped the layers; raise ``RecipeError`` where the method cannot work on this model."""

    def enter(self, stage: Stage) -> None:
        """Bring the model in line with ``stage``: as it begins, when a run resumes in it, and after a preview of ``use_final_form``.

        ``run.state`` is the new one already, while layers and held masks are still those of the stage before.
        """

    def after_step(self, updated: Iterable[tuple[NMWeight, float | Tensor]], found_inf: Tensor | None) -> None:
        """An optimizer has stepped: ``updated`` are the layers that had a gradient, each with its learning rate; where ``found_inf``, a
        number on the device, is not 0, a ``GradScaler`` has skipped the step."""

    def use_final_form(self) -> None:
        """Put the model into the form that ``finish`` leaves, before weights are pruned; after a preview ``enter`` is called."""

    def close(self) -> None:
        """The recipe ends, by ``finish`` or ``remove``: undo what was for training only."""


@dataclass(frozen=True)
class Recipe:
    """Base of every recipe: frozen, holds no state, and works with any optimizer unless ``setup`` names one.

    Args:
        pattern: N:M of the layers, ``"2:4"`` or a ``Pattern``.
        total_steps: optimizer steps of the whole run, for recipes with a schedule.

    Raises:
        PatternError, RecipeError: a value is out of range.
    """

    pattern: PatternLike = "2:4"
    total_steps: int | None = count(None, least=1, none="where nothing depends on it")

    name: ClassVar[str] = ""
    about: ClassVar[About] = About()
    final: ClassVar[str] = "nm"
    """What ``finish()`` leaves: ``"nm"``, ``"dense"``, or ``"nm+adapter"``, N:M weights with a low-rank adapter each; an instance whose
    settings change that has its own."""
    _resume: ClassVar[str] = "any"
    """``resume`` of the settings that do not give it."""
    _optional_state: ClassVar[tuple[str, ...]] = ()
    """Keys of ``first_state`` without which a run can resume: checkpoints of earlier versions, or of other settings, lack them."""
    _renamed: ClassVar[Mapping[str, str]] = {}
    """Values of settings in checkpoints of earlier versions, and what they are called now."""

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            # NumPy's numbers and a tensor's as Python's, for checkpoints
            plain = Pattern(value) if f.type == "PatternLike" else as_number(value)
            if plain is not None:
                value = plain
                object.__setattr__(self, f.name, value)
            if "fits" in f.metadata and not f.metadata["fits"](value):
                raise RecipeError(f"{type(self).__name__}: {f.name}={value!r} {f.metadata['wanted']}.")

    @property
    def setup(self) -> Setup:
        """What the recipe needs from a run."""
        return Setup()

    def optimizer(self, params: Iterable[Any], lr: float | Tensor = 1e-3, **kwargs: Any) -> torch.optim.Optimizer:
        """The optimizer that serves this recipe best, with the keywords of ``torch.optim.AdamW``."""
        return (self.setup.optimizer or MaskedAdamW)(params, lr=lr, **kwargs)  # type: ignore[call-arg]

    def first_state(self, group: dict[str, Any]) -> State:
        """The schedule's first state; ``group`` is the parameter group of the maskable weights."""
        return {"seed": self.setup.first_seed} if self.setup.draws else {}

    def stage(self, state: State) -> Stage:
        """What training does in ``state``, which is empty before an optimizer is attached."""
        raise RecipeError(f"{type(self).__name__} defines no stage.")

    def advance(self, state: State, observed: Observed) -> bool:
        """Count one finished optimizer step in ``state``, in place; returns True when the stage may have changed."""
        return False

    def values(self, state: State) -> dict[str, Tensor]:
        """The schedule's numbers of the next step, 0-d tensors by name: metrics of the handle, and ``nm_<name>`` of transforms."""
        return {}

    def layer(self, pattern: Pattern, shape: tuple[int, int], transform: WeightTransform | None = None) -> LayerSetup:
        """What the recipe does with a layer of this ``pattern`` and ``(out, in)``; ``transform``: of the present or the final stage."""
        if transform is not None and pattern != self.pattern:
            transform = replace(transform, pattern=pattern)
        return LayerSetup(transform, note=str(pattern))

    def final_transform(self) -> WeightTransform:
        """What ``finish`` applies to each weight unless ``final`` is ``"dense"``."""
        return HardMask(Pattern(self.pattern))

    def profile(self, steps: int) -> list[Span]:
        """The FLOPs of the first ``steps`` steps, in consecutive spans, for ``nm.flops``."""
        return [self.stage({}).span(steps, Pattern(self.pattern))]


@dataclass(frozen=True)
class Observed:
    """What one optimizer step showed, over the maskable parameters.

    Args:
        stats: float64 sums, named by ``nmkernels.ops.STATS``.
        numel: number of maskable weights that took part.
        max_applied_steps: an upper bound of the applied steps, which the host knows without waiting for the device.
        updated_by: returns for each of these weights that has moments its parameter group and what the optimizer keeps for it, such as
            "exp_avg_sq" and "step".
        find_group: returns the parameter group of the maskable weights, as for ``Recipe.first_state``.
    """

    stats: Tensor
    numel: int
    max_applied_steps: int
    updated_by: Callable[[], list[tuple[dict[str, Any], dict[str, Any]]]] = list
    find_group: Callable[[], dict[str, Any]] = dict
