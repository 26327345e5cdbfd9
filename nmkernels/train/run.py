"""The run of a recipe on one model: the state of its schedule, and what that makes of the layers. Optimizers are in ``attach.py``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..autograd import HardMask, WeightTransform
from ..autograd.transforms import read_as
from ..gemm.choose import unmeasured
from ..nn import NMWeight
from ..nn.effective import readable
from ..pattern import NMError, RecipeError
from ..recipes.compose import check_state
from ..recipes.contract import Hooks, Observed, Recipe, Stage, State
from ..recipes.registry import spec
from ..shards import Groups, add, anywhere, groups_of, is_sharded, reduced
from .masks import HeldMasks
from .readers import Readers
from .report import Report
from .state import MASK, HeldTensors, LayerPatterns, Streams, own_rank
from .writes import Writes, listed

if TYPE_CHECKING:
    from .attach import Attachment, Recorded


MANY_TOKENS = 1024
"""Rows of a layer's input for which the report says whether the choice of methods was measured."""


class Run:
    """A recipe on the layers of one model.

    Attributes:
        state: the schedule's, the very one in the optimizer's parameter group; empty before one is attached.
        stage: what training does now; ``revision`` counts how often it was set.
        hooks: what the method does besides.
        attachments: the optimizers, in the order in which they step; the last one drives the schedule.
        max_applied_steps: an upper bound of the applied steps, known without waiting for the device.
        attached_shards: whether an optimizer was attached to sharded weights.
        shard_metrics: the metrics then, at the last step, as all ranks have added them up.
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
        self.patterns = LayerPatterns(recipe, layers, report)
        self.masks = HeldMasks(layers, setup.mask_score, lambda: self.gradients.seen)
        self.tensors = HeldTensors(layers)
        self.streams = Streams(layers)
        self.writes = Writes(layers)
        self.stage = recipe.stage({})
        self.begin("sparsify_")
        self.gradients = Gradients(layers)
        transforms = {self.stage.transform, self.stage.later, *(layer.final for layer in layers.values())}
        self.holds = setup.mask_score is not None or any(read_as("held", transform) for transform in transforms)
        self.hooks = Hooks(recipe, self) if setup.hooks is None else setup.hooks(self)
        self.apply(self.stage)
        self.feed()
        self.tensors.adopt({})
        self.hooks.enter(self.stage)
        self.readers = Readers(layers)

    def begin(self, verb: str, overwrite: bool = False, patterns: bool = True) -> None:
        """Take from the present weights what transforms start from, and with ``patterns`` the layers' patterns; ``overwrite``: also what
        came from a checkpoint."""
        if patterns:
            self.patterns.choose()
        transform = self.stage.transform or self.stage.later
        for name, layer in self.layers.items():
            used = () if transform is None else (self._fitted(transform, layer),)
            try:
                layer.begin(self._fitted(self.recipe.final_transform(), layer), *used, overwrite=overwrite)
            except NMError as error:
                raise RecipeError(f"{verb}: layer {name!r}: {error}") from error

    def _fitted(self, transform: WeightTransform, layer: NMWeight) -> WeightTransform:
        fitted = self.recipe.layer(layer.pattern, layer.shape, transform).transform
        assert fitted is not None
        # one object of each kind for the whole run: a compiled model guards on its identity
        return self._transforms.setdefault(fitted, fitted)

    def first_state(self, group: dict[str, Any]) -> State:
        """The schedule's state at its beginning, with the recipe's own description for checkpoints."""
        state = {"spec": spec(self.recipe), **self.recipe.first_state(group)}
        self.patterns.save(state)
        return state

    def check(self, state: Any, group: dict[str, Any]) -> None:
        """Raise ``CheckpointError`` unless ``state`` was written by this recipe, with this pattern, on these layers."""
        check_state(self.recipe, state, group)
        for part in (self.patterns, self.masks, self.streams, self.tensors):
            part.check(state)

    def adopt(self, state: State) -> None:
        """Continue from ``state``, which lies in the optimizer already."""
        held = state.pop("held", {})
        self.writes.forget()
        self.state, self.max_applied_steps = state, int(state.get("t", 0))
        if self.patterns.adopt(state):
            self.begin("resume", patterns=False)
        self.masks.load(held)
        self.tensors.load(held)
        self._restage()
        self.report.remark = self.stage.remark

    def reset(self) -> None:
        """Back to the time before an optimizer was attached."""
        self.state = {}
        self.apply(self.recipe.stage({}))
        self.hooks.enter(self.stage)

    # ---- weights written by something else than the attached optimizers

    def watch(self) -> None:
        """The recipe begins: if it has taken something from the present weights, watch for other weights until the first step."""
        own = any(layer.learned() or layer._buffers.keys() - layer._non_persistent_buffers_set for layer in self.layers.values())
        if own or self.masks.masks or self.tensors.names or self.patterns.own:
            self.writes.start()

    def renew(self, verb: str, overwrite: bool = False) -> None:
        """Take patterns, masks and what transforms start from again, from the present weights; ``overwrite``: also what came from a
        checkpoint."""
        self.begin(verb, overwrite=overwrite)
        self.patterns.save(self.state)
        self.masks.forget()
        self.tensors.load({})
        self._restage()
        if self.writes.hashes:
            self.writes.start()

    def before_step(self, names: Iterable[str]) -> None:
        """An optimizer is about to step the weights of the layers ``names``."""
        if self.writes.hashes:
            self._renew_if_replaced("step")
            self.writes.forget()
        elif self.masks.masks and (written := self.writes.since_step(names)):
            self.report_lost("step", written)

    def check_weights(self, verb: str, waits: bool = True) -> list[str]:
        """The layers that have lost the zeros of their held masks, with a warning; where weights were replaced before the first step, what
        was taken from them is taken again. ``waits``: may wait for the device and for other ranks."""
        if not waits and self.sharded:
            return []
        if self.writes.hashes:
            if waits or all(readable(layer.master) for layer in self.layers.values()):
                self._renew_if_replaced(verb)
            return []
        written = self.writes.since_step(self.layers)
        return self.report_lost(verb, (name for name, layer in self.layers.items() if waits or readable(layer.master) or name in written))

    def report_lost(self, verb: str, names: Iterable[str]) -> list[str]:
        """Which of the layers ``names`` have lost the zeros of their held masks; a warning says so."""
        lost = {name: count for name in names if name in self.masks.masks and (count := int(self.masks.lost(name)))}
        self.writes.report_lost(verb, lost)
        return list(lost)

    def _renew_if_replaced(self, verb: str) -> None:
        replaced = self.writes.replaced()
        # renewing may gather shards, so all ranks have to decide the same
        if not any([anywhere(layer.parameter, name in replaced) for name, layer in self.layers.items()]):
            return
        self.renew(verb)
        inputs = " Their inputs are those that handle.calibrate() saw before." if self.masks.score == "wanda" else ""
        trained = {id(p) for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]}
        left = [name for name in replaced if id(self.layers[name].parameter) not in trained]
        by = f" by {self.writes.foreign}, which is not attached" if self.writes.steps else ""
        again = f" No attached optimizer has the new Parameters of {listed(left)}: make one and attach it." if left else ""
        warnings.warn(
            f"{verb}: the weights of {listed(replaced or self.layers)} were loaded or changed after handle.attach{by}. No step was made; "
            f"what the recipe {self.recipe.name} takes from the weights at its beginning (masks, scales, the order of channels) was taken "
            f"again, from the present ones.{inputs}{again} Load weights before attach to avoid this.",
            stacklevel=4,
        )

    def held(self) -> State:
        """What a checkpoint holds in addition to ``state``: held masks and other tensors; of sharded layers this rank's part."""
        held = self.tensors.values()
        for name, mask in self.masks.masks.items():
            held.setdefault(name, {})[MASK] = mask
        return {"held": held} if held else {}

    def advance(self, seen: Observed, applied: Callable[[], bool]) -> Tensor | None:
        """Advance the schedule by one step of the attached optimizers; returns how many mask bits a renewal of held masks has changed.

        ``applied()``, whether the step was not skipped, may wait for the device, and is called only where that matters.
        """
        self.gradients.end()
        self.readers.warn()
        self.max_applied_steps += 1
        state, before = self.state, None
        due = "held_steps" in state and applied() and self.tensors.due(state, self.stage.every)
        if self.recipe.advance(state, seen):
            stage = self.recipe.stage(state)
            if stage.remark and stage.remark != self.report.remark and own_rank() == 0:
                warnings.warn(stage.remark, stacklevel=2)
            self.report.remark = stage.remark
            if self.stage.later is not None and stage.later is None:
                # the dense phase is over: later stages start from the present weights
                self.begin("the sparse phase", overwrite=True)
                self.patterns.save(state)
            before = self._kept() if "held_steps" in state else None
            self._restage()
            if "held_steps" not in state:
                before = None  # the new stage holds nothing
        else:
            self.feed()
        if due and "held_steps" in state:
            before = before or self._kept()
            self.tensors.renew(state)
        if before is None:
            return None
        parts: dict[Groups, Tensor] = {}
        for name, now in self._kept().items():
            add(parts, self.layers[name].parameter, (now ^ before[name]).sum())
        return reduced(parts).reshape(())

    def _restage(self) -> None:
        """Bring the layers in line with the state."""
        stage = self.recipe.stage(self.state)
        self.streams.adopt(self.state)
        self.hooks.enter(stage)
        if stage.held_mask:
            self.masks.adopt()
        else:
            self.masks.forget()
        self.apply(stage)
        self.feed()
        self.tensors.adopt(self.state)

    def apply(self, stage: Stage) -> None:
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

    def feed(self) -> None:
        """Write the schedule's numbers into the layers whose transform reads them."""
        transform = self.stage.transform
        if transform is None or not transform.reads:
            return
        values = {f"nm_{name}": value for name, value in self.recipe.values(self.state).items() if f"nm_{name}" in transform.reads}
        if values:
            for layer in self.layers.values():
                layer.hold(values, in_place=True)

    def _kept(self) -> dict[str, Tensor]:
        return {name: layer.kept() for name, layer in self.layers.items()}

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
            self.begin("a dense phase", overwrite=True)
            self.tensors.preview()
        return {name: self.masks.preview(name) or self.layers[name].final for name in names}

    def not_ready_reason(self) -> str:
        """Why it is too early to finish, to complete "the recipe <name> …"; empty where it is not."""
        if not self.state:
            return ""
        stage = self.recipe.stage(self.state)
        return stage.not_ready or ("is still in its dense phase" if self.recipe.final != "dense" and stage.phase == 0 else "")

    def end(self) -> None:
        self.hooks.close()
        self.gradients.end()
        self.readers.warn()
        self.readers.end()


class Gradients:
    """Notices gradients of the sparse layers before any attached optimizer has stepped: then the model is trained without the recipe.

    By hooks of the Parameters, since a ``.grad`` may be older than the recipe, and is often cleared after a step.
    """

    def __init__(self, layers: dict[str, NMWeight]) -> None:
        self.seen = False
        self.warned: set[str] = set()
        trained = [p for layer in layers.values() for p in (layer.parameter, *layer.learned().values()) if p.requires_grad]
        self._removers = [p.register_post_accumulate_grad_hook(self._see) for p in trained]

    def _see(self, p: Tensor) -> None:
        self.seen = True

    def end(self) -> None:
        while self._removers:
            self._removers.pop().remove()

    def warn(self, verb: str, recipe: Recipe, attached: bool) -> None:
        """Warn if there were gradients, once for each ``verb``; ``attached``: there is an optimizer, and it has not stepped."""
        if not self.seen or verb in self.warned:
            return
        self.warned.add(verb)
        missing = "no attached optimizer has made a step" if attached else "no optimizer was ever attached"
        warnings.warn(
            f"{verb}: the sparse layers got gradients, but {missing}. So nothing that the recipe {recipe.name} does in optimizer steps has "
            "happened (its schedule, decay, held masks, metrics). Before training, call handle.attach with the optimizer that steps.",
            stacklevel=3,
        )
