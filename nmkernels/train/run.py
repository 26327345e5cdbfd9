"""The run of a recipe on one model: the state of its schedule, and what that makes of the layers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..autograd.transforms import HardMask, WeightTransform, read_as
from ..gemm.choose import unmeasured
from ..nn.effective import readable
from ..nn.weight import NMWeight
from ..optim.adamw import MaskedAdamW
from ..pattern import NMError, RecipeError
from ..recipes.compose import check_state
from ..recipes.contract import Hooks, Recipe, Stage, State
from ..recipes.registry import spec
from ..shards import Groups, anywhere, groups_of, is_sharded, reduced
from .guards import Guards
from .layer_names import listed
from .parts import Held, Patterns, Streams
from .report import Report

MANY_TOKENS = 1024
"""Rows of a layer's input for which the report says whether the choice of methods was measured."""


class Run:
    """A recipe on the layers of one model.

    Attributes:
        state: the schedule's, the very one in the optimizer's parameter group; empty before one is attached.
        stage: what training does now, set ``revision`` times.
        patterns, streams, held: its parts, which a checkpoint has in addition to the schedule; ``guards`` only watch.
        hooks: what the method does in addition.
        attachments: the optimizers, in the order in which they step; the last one drives the schedule.
        max_applied_steps: an upper bound of the applied steps, known without waiting for the device.
        attached_shards: whether an optimizer was attached to sharded weights; ``shard_metrics``: the metrics of their last step.
        holds: whether layers hold masks at some time of the run.
        recording: the steps that the CUDA graph that is captured now has so far; None if none is captured, see ``CapturedStep``.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, layers: dict[str, NMWeight], report: Report) -> None:
        self.model, self.recipe, self.layers, self.report = model, recipe, layers, report
        self.state: State = {}
        self.attachments: list[Attachment] = []
        self.revision = 0
        self.max_applied_steps = 0
        self.attached_shards = False
        self.shard_metrics: dict[str, Tensor] = {}
        self.recording: list[Recorded] | None = None
        self._transforms: dict[WeightTransform, WeightTransform] = {}
        setup = recipe.setup
        self.guards = Guards(recipe, layers)
        self.patterns = Patterns(recipe, layers, report)
        self.streams = Streams(layers)
        self.held = Held(layers, setup.mask_score, self.guards)
        self.stage = recipe.stage({})
        self.start("sparsify_")
        transforms = {self.stage.transform, self.stage.later, *(layer.final for layer in layers.values())}
        self.holds = setup.mask_score is not None or any(read_as("held", transform) for transform in transforms)
        self.hooks = Hooks(recipe, self) if setup.hooks is None else setup.hooks(self)
        self._use(self.stage)
        self.held.begin({}, self.stage)
        self.hooks.enter(self.stage)
        self.guards.watch()

    def __deepcopy__(self, memo: dict[int, Any]) -> Run:
        """A run on copied layers, without optimizers, which torch copies without their hooks; ``attach`` continues."""
        new = memo[id(self)] = object.__new__(Run)
        new.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items() if name != "attachments"})
        new.attachments = []
        return new

    # ---- the verbs of a run

    def start(self, verb: str, overwrite: bool = False, choose: bool = True) -> None:
        """Take from the present weights what comes from them once: patterns, unless ``choose`` is off, and what transforms start from;
        ``overwrite``: also what came from a checkpoint."""
        if choose:
            self.patterns.choose()
        used = self.stage.transform or self.stage.later
        for name, layer in self.layers.items():
            transforms = [self._fitted(transform, layer) for transform in (self.recipe.final_transform(), used) if transform is not None]
            try:
                layer.begin(*transforms, overwrite=overwrite)
            except NMError as error:
                raise RecipeError(f"{verb}: layer {name!r}: {error}") from error

    def begin(self) -> None:
        """Bring the layers in line with the state: a stage begins, or is resumed."""
        stage = self.recipe.stage(self.state)
        self.hooks.enter(stage)
        self._use(stage)
        self.patterns.begin(self.state)
        self.streams.begin(self.state)
        self.held.begin(self.state, stage)

    def first_state(self, group: dict[str, Any]) -> State:
        """The schedule's state at its beginning, with the recipe's own description for checkpoints."""
        state = {"spec": spec(self.recipe), **self.recipe.first_state(group)}
        self.patterns.begin(state)
        return state

    def check(self, saved: Any, group: dict[str, Any]) -> None:
        """Raise ``CheckpointError`` unless ``saved`` was written by this recipe, with this pattern, on these layers."""
        check_state(self.recipe, saved, group)
        for part in (self.patterns, self.streams, self.held):
            part.check(saved)

    def load(self, state: State) -> None:
        """Continue from ``state``, which lies in the optimizer already."""
        patterns = self.patterns.own
        self.guards.load()
        self.patterns.load(state)
        self.held.load(state)
        state.pop("held", None)
        if "seed" not in state and self.recipe.stage(state).plan.wgrad == "mvue":  # the checkpoint is of a run without estimates
            state["seed"] = self.recipe.setup.first_seed
        self.state, self.max_applied_steps = state, int(state.get("t", 0))
        if self.patterns.own != patterns:
            self.start("resume", choose=False)
        self.begin()
        self.report.remark = self.stage.remark

    def save(self) -> State:
        """What a checkpoint has: the state, and what the parts add; of sharded layers this rank's part."""
        return {**self.state, **self.held.save()}

    def end(self) -> None:
        self.hooks.close()
        self.guards.end()
        self.streams.end()
        self.held.names = {}  # finished layers hold nothing

    # ---- what else may happen

    def reset(self) -> None:
        """Return to the time before an optimizer was attached."""
        self.state = {}
        self._use(self.recipe.stage({}))
        self.hooks.enter(self.stage)

    def renew(self, verb: str, overwrite: bool = False) -> None:
        """Take patterns, masks and what transforms start from again, from the present weights; ``overwrite`` as for ``start``."""
        self.start(verb, overwrite=overwrite)
        self.held.load({})
        self.begin()
        if self.guards.hashes:
            self.guards.hash_weights()

    def renew_held(self) -> None:
        """Give transforms the numbers of the present state, and choose again what they hold, if anything."""
        if "held_steps" in self.state:
            self.feed()
            self.held.renew(self.state)

    def watch(self) -> None:
        """The recipe begins: if it has taken something from the present weights, watch for other weights until the first step."""
        taken = any(layer.learned() or layer._buffers.keys() - layer._non_persistent_buffers_set for layer in self.layers.values())
        if taken or self.held.masks or self.held.names or self.patterns.own:
            self.guards.hash_weights()

    def check_weights(self, verb: str, waits: bool = True) -> list[str]:
        """The layers that have lost the zeros of their held masks, with a warning; where weights were replaced before the first step, what
        was taken from them is taken again. ``waits``: may wait for the device and for other ranks."""
        if not waits and self.sharded:
            return []
        if self.guards.hashes:
            if waits or all(readable(layer.master) for layer in self.layers.values()):
                self.renew_if_replaced(verb)
            return []
        written = self.guards.written(self.layers)
        return self.find_lost(verb, [name for name, layer in self.layers.items() if waits or readable(layer.master) or name in written])

    def find_lost(self, verb: str, names: list[str]) -> list[str]:
        """Which of the layers ``names`` have lost the zeros of their held masks; a warning says so."""
        lost = {name: count for name in names if (count := self.held.lost(name))}
        self.guards.warn_of_lost(verb, lost)
        return list(lost)

    def renew_if_replaced(self, verb: str) -> None:
        """Take again what the recipe took from weights that were replaced before the first step, with a warning."""
        guards = self.guards
        replaced = guards.replaced()
        # renewing may gather shards, so all ranks have to decide the same
        if not any([anywhere(layer.parameter, name in replaced) for name, layer in self.layers.items()]):
            return
        self.renew(verb)
        inputs = " Their inputs are those that handle.calibrate() saw before." if self.held.score == "wanda" else ""
        trained = {id(p) for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]}
        left = [name for name in replaced if id(self.layers[name].parameter) not in trained]
        by = f" by {guards.foreign}, which is not attached" if guards.foreign else ""
        again = f" No attached optimizer has the new Parameters of {listed(left)}: make one and attach it." if left else ""
        warnings.warn(
            f"{verb}: the weights of {listed(replaced or self.layers)} were loaded or changed after handle.attach{by}. No step was made; "
            f"what the recipe {self.recipe.name} takes from the weights at its beginning (masks, scales, the order of channels) was taken "
            f"again, from the present ones.{inputs}{again} Load weights before attach to avoid this.",
            stacklevel=4,
        )

    # ---- the layers

    def _use(self, stage: Stage) -> None:
        """Set what every layer does from now on; optimizers notice the new ``revision`` at their next step."""
        self.stage = stage
        self.revision += 1
        for layer in self.layers.values():
            layer.use(None if stage.transform is None else self._fitted(stage.transform, layer), stage.plan)
            if stage.transform is None:
                layer.effective.release()  # a dense phase needs the memory more
            else:
                layer.drop()
        problems = (some for layer in self.layers.values() for some in layer.problems(MANY_TOKENS))
        self.report.unmeasured = unmeasured(*some) if (some := next(problems, None)) else ""
        self.feed()

    def _fitted(self, transform: WeightTransform, layer: NMWeight) -> WeightTransform:
        fitted = self.recipe.layer(layer.pattern, layer.shape, transform).transform
        assert fitted is not None
        # one object of each kind for the whole run: a compiled model guards on its identity
        return self._transforms.setdefault(fitted, fitted)

    def feed(self) -> None:
        """Write the schedule's numbers into the layers whose transform reads them."""
        reads = {} if self.stage.transform is None else self.stage.transform.reads
        values = {f"nm_{name}": value for name, value in self.recipe.values(self.state).items() if f"nm_{name}" in reads} if reads else {}
        for layer in self.layers.values() if values else ():
            layer.hold(values, in_place=True)

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """All that update the model."""
        return tuple(attachment.updating for attachment in self.attachments)

    @property
    def sharded(self) -> bool:
        """Whether ranks share the weights."""
        return any(is_sharded(layer.parameter) for layer in self.layers.values())

    @torch.no_grad()
    def metrics(self, density: bool = False) -> dict[str, Tensor]:
        """The transforms' own metrics, each the mean over all weights of the layers that have it, whichever rank holds them.

        With ``density``, or where the optimizer's count is not that of the transform, that too: non-zeros of W̃ / weights.
        """
        density = density or not (self.stage.transform is None or isinstance(self.stage.transform, HardMask))
        parts: dict[Groups, dict[str, Tensor]] = {}
        for layer in self.layers.values():
            size, part = layer.master.numel(), parts.setdefault(groups_of(layer.parameter), {})
            sums = {name: value.double() * size for name, value in layer.watched().items()}
            if density:
                sums["density"] = layer.effective_weight().count_nonzero().double()
            for name, value in sums.items():
                pair = torch.stack([value, torch.full_like(value, size)])
                part[name] = part[name] + pair if name in part else pair
        names = sorted({name for part in parts.values() for name in part})
        if not names:
            return {}
        nothing = next(pair for part in parts.values() for pair in part.values()).new_zeros(2)
        rows = {groups: torch.cat([part.get(name, nothing) for name in names]) for groups, part in parts.items()}
        return {name: total / size for name, (total, size) in zip(names, reduced(rows).view(-1, 2), strict=True)}

    def final_transforms(self, names: Iterable[str]) -> dict[str, WeightTransform]:
        """The transforms that ``finish`` applies to the layers ``names``."""
        if self.stage.later is not None:
            self.start("a dense phase", overwrite=True)
            self.held.preview()
        return {name: self.held.final_mask(name) or self.layers[name].final for name in names}

    def not_ready_reason(self) -> str:
        """Why it is too early to finish, to complete "the recipe <name> …"; empty where it is not."""
        if not self.state:
            return ""
        stage = self.recipe.stage(self.state)
        return stage.not_ready or ("is still in its dense phase" if self.recipe.final != "dense" and stage.phase == 0 else "")


@dataclass(eq=False)
class Attachment:
    """One optimizer of a run, with the swapped layers whose weights it updates.

    Attributes:
        optimizer: as torch steps it; ``updating`` is the one that keeps the moments, and ``masked`` that if it masks and counts itself.
        forms: who makes the forms of W̃: the ``"forward"`` pass after a step, or the ``"step"``.
        due: the optimizer has stepped since the model was called last.
        stats: the sums of the last step, or of the last applied one where that was skipped, over ``numel`` weights.
        observed: those that the schedule has not seen yet.
        own_pass: ``masked`` where it masks, decays and counts the present step in its own pass over memory.
        took, masks, pruned: of the present step elsewhere, before it: the layers, masks, and the sums of pruned weights and gradients.
        bits: the bits of held masks, with the mask that they were made of and its version.
        revision: of the run, when ``masked`` got its rule.
        size: the number of parameters when layers were taken last; ``unsharded``: those that were not sharded then.
        first_step: the optimizer had no state before the present step, ``rehearsal``: which trains nothing.
        loaded, loaded_masks: of a checkpoint that is being loaded.
    """

    run: Run
    optimizer: torch.optim.Optimizer
    updating: torch.optim.Optimizer
    masked: MaskedAdamW | None
    layers: dict[str, NMWeight] = field(default_factory=dict)
    forms: str = "forward"
    due: bool = False
    stats: Tensor | None = None
    observed: Tensor | None = None
    numel: int = 0
    own_pass: MaskedAdamW | None = None
    took: list[str] = field(default_factory=list)
    masks: dict[str, Tensor] = field(default_factory=dict)
    pruned: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    bits: dict[str, tuple[Tensor, int, Tensor]] = field(default_factory=dict)
    revision: int = 0
    size: int = 0
    unsharded: list[NMWeight] = field(default_factory=list)
    first_step: bool = False
    rehearsal: bool = False
    loaded: State | None = None
    loaded_masks: dict[str, Tensor] = field(default_factory=dict)
    removers: list[Any] = field(default_factory=list)

    @property
    def group(self) -> dict[str, Any]:
        """The parameter group of the maskable weights."""
        return group_of(self.optimizer, self.layers)

    def updated_by(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """For each maskable weight that the optimizer has, its parameter group and its state."""
        groups = {id(p): group for group in self.updating.param_groups for p in group["params"]}
        weights = [layer.parameter for layer in self.layers.values() if id(layer.parameter) in groups]
        return [(groups[id(p)], self.updating.state.get(p, {})) for p in weights]


Recorded = tuple[Attachment, Tensor | None, int, Tensor | None]
"""A step in a CUDA graph: its statistics, over how many weights, and ``found_inf``, in the memory of the graph."""


def group_of(optimizer: torch.optim.Optimizer, layers: Mapping[str, NMWeight]) -> dict[str, Any]:
    """The parameter group that updates the first of ``layers``; the first one where a load has replaced that layer's Parameter."""
    first = next((layer.parameter for layer in layers.values()), None)
    owners = [group for group in optimizer.param_groups if any(p is first for p in group["params"])]
    return (owners or optimizer.param_groups)[0]
