"""The handle: the mutable side of a recipe on one model, from sparsify_ to finish."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..autograd import STRAIGHT_THROUGH, WeightTransform
from ..nn import NMWeight
from ..pattern import CheckpointError, NMError, RecipeError
from .attach import STATE_KEY, Attachment, group_of, is_attached
from .base import Observed, Recipe, Stage, State
from .final import make_nm
from .fixed import FixedMasks
from .metrics import figures, summed
from .report import Report
from .seeds import Seeds
from .swap import densify_


class Handle:
    """Drives one recipe on one model: ``attach`` an optimizer, train as always, ``finish``.

    Made by ``sparsify_``. It keeps the schedule's state in the optimizer's own state dict, so a trainer that saves only model and
    optimizer resumes correctly. Attributes: ``model``, ``recipe``, ``layers`` (name -> layer), ``report``.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, layers: dict[str, NMWeight], report: Report) -> None:
        self.model, self.recipe, self.layers, self.report = model, recipe, layers, report
        self._attachments: list[Attachment] = []
        self._state: State | None = None
        self._calls = 0
        self._transforms: dict[WeightTransform, WeightTransform] = {}
        self.fixed = FixedMasks(layers, recipe.mask_score)
        self.seeds = Seeds(layers)
        self.finished = False
        final = self._one(recipe.final_transform())
        for layer in layers.values():
            layer.final = final
        self.apply(recipe.stage({}))
        self._freeze("sparsify_")

    def _one(self, transform: WeightTransform) -> WeightTransform:
        # one object of each kind for the whole run: a compiled model guards on its identity
        return self._transforms.setdefault(transform, transform)

    def _freeze(self, verb: str) -> None:
        for name, layer in self.layers.items():
            try:
                layer.freeze()
            except NMError as error:
                raise RecipeError(f"{verb}: layer {name!r}: {error}") from error

    # ---- attach

    def attach(self, *optimizers: torch.optim.Optimizer) -> Any:
        """Hook the recipe into one or several optimizers and return them as they came.

        The hooks run inside ``optimizer.step()``, after unscaling, accumulation and clipping, also with a closure or a ``GradScaler``.
        Give several optimizers in the order in which they step: the last one that owns a swapped weight keeps the schedule, which
        advances when it has stepped.

        Raises:
            RecipeError: none of them updates a swapped weight, one has a recipe already, the recipe cannot run with it, or it cannot
                choose its masks. CheckpointError: the optimizer has loaded the state of another recipe. Nothing has changed then.
        """
        if self.finished:
            raise RecipeError("attach: the recipe is finished; sparsify_ the model again to train on.")
        if self._attachments:
            raise RecipeError("attach: this handle has its optimizers already; give all of them in one call, attach(opt1, opt2).")
        owners = [(optimizer, owned) for optimizer in optimizers if (owned := self._owned(optimizer))]
        if not owners:
            raise RecipeError(
                "attach: none of the optimizers updates a weight of the swapped layers. Build it from model.parameters() of the very model "
                "given to sparsify_ (before a wrapper copies the parameters)."
            )
        for optimizer, _ in owners:
            self.recipe.check_optimizer(optimizer)
            if is_attached(optimizer):
                raise RecipeError("attach: the optimizer drives the recipe of another model already; give each model its own optimizer.")
        last, owned = owners[-1]
        loaded: State | None = last.param_groups[0].get(STATE_KEY)
        if loaded is not None:
            self.check_state(loaded, group_of(last, owned))
        self._attachments = [Attachment(self, o, layers, primary=o is last) for o, layers in owners]
        primary = self._attachments[-1]
        try:
            if loaded is None:
                self._freeze("attach")  # weights may have been initialised since sparsify_
            primary.group0[STATE_KEY] = loaded or self.first_state(primary.group)
            self.adopt(primary.group0[STATE_KEY])
        except Exception:
            self._detach()
            if loaded is not None:
                last.param_groups[0][STATE_KEY] = loaded
            self._state = None
            self.apply(self.recipe.stage({}))
            raise
        return optimizers[0] if len(optimizers) == 1 else optimizers

    def _owned(self, optimizer: torch.optim.Optimizer) -> dict[str, NMWeight]:
        # frozen layers too: they may be unfrozen later, and without a gradient no optimizer touches them
        params = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return {name: layer for name, layer in self.layers.items() if id(layer.weight) in params}

    # ---- the schedule's state

    @property
    def state(self) -> State:
        """The schedule's state, as it lies in the optimizer."""
        if self._state is None:
            raise RecipeError("the handle has no state yet: call handle.attach(optimizer) first.")
        return self._state

    def first_state(self, group: dict[str, Any]) -> State:
        """The schedule's state at its beginning, with the recipe's own description for checkpoints."""
        return {"spec": self.recipe.spec(), **self.recipe.start(group)}

    def adopt(self, state: State) -> None:
        """Continue from ``state``, which lies in the optimizer already."""
        self._state = state
        self._calls = int(state["t"]) if "t" in state else 0
        self.seeds.adopt(state)
        self.restage()

    def advance(self) -> None:
        """Let the schedule see the step that every attached optimizer has just done."""
        parts = [a for a in self._attachments if a.observed is not None]
        if not parts:
            return
        seen = Observed(
            stats=summed(a.observed for a in parts if a.observed is not None),
            numel=sum(a.numel for a in parts),
            second_moments=[v for a in parts for v in a.second_moments()],
            step=self._primary().step_counter(),
            calls=self._calls + 1,
        )
        self._calls += 1
        for part in parts:
            part.observed = None
        if self.recipe.advance(self.state, seen):
            self.restage()
        else:
            self._feed()

    def _feed(self) -> None:
        transform = self.stage.transform
        if transform is None or not transform.reads:
            return
        values = {name: value for name, value in self.recipe.inputs(self.state).items() if name in transform.reads}
        if values:
            for layer in self.layers.values():
                layer.feed(values)

    def restage(self) -> None:
        """Bring layers and optimizers in line with the schedule's state."""
        stage = self.recipe.stage(self.state)
        if stage.fixed:
            self.fixed.ensure(self.state)
        else:
            self.fixed.forget()
        self.apply(stage)
        self._feed()

    def apply(self, stage: Stage) -> None:
        """Set what every layer and optimizer does from now on."""
        self.stage = stage
        for layer in self.layers.values():
            transform = stage.transform
            layer.use(None if transform is None else self._one(self.recipe.fit(transform, layer.master.shape[1])), stage.plan)
            layer.used.drop()
        for attachment in self._attachments:
            attachment.apply(stage)

    def check_state(self, state: Any, group: dict[str, Any] | None = None) -> None:
        """Raise ``CheckpointError`` unless ``state`` was written by this recipe, with this pattern, on these layers."""
        self.recipe.check_state(state, self._primary().group if group is None else group)
        self.fixed.check(state)
        self.seeds.check(state)

    def state_dict(self) -> dict[str, Any]:
        """A copy of the schedule's state; the optimizer's state dict holds the same, so saving that one is enough."""
        return {STATE_KEY: copy.deepcopy(self.state)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what ``state_dict`` returned.

        Raises:
            CheckpointError: it is of another recipe or pattern, or not of a handle.
        """
        if STATE_KEY not in state_dict:
            raise CheckpointError(f"this is not a handle's state dict: it has no {STATE_KEY!r}.")
        self.check_state(state_dict[STATE_KEY])
        primary = self._primary()
        primary.group0[STATE_KEY] = copy.deepcopy(state_dict[STATE_KEY])
        self.adopt(primary.group0[STATE_KEY])

    def _primary(self) -> Attachment:
        if not self._attachments:
            raise RecipeError("the handle has no optimizer yet: call handle.attach(optimizer) first.")
        return self._attachments[-1]

    # ---- watching

    def metrics(self) -> dict[str, Tensor]:
        """Figures of the last optimizer step as 0-d tensors; reading them is what synchronises, asking does not.

        ``flip_rate``: mask bits changed by the last step / maskable weights (a swap counts 2). ``density``: non-zeros of the weights
        used / maskable weights. ``phase``: see the recipe. ``decay_ratio``: λΣ|w| / Σ|g| over pruned weights. ``max_update``: the largest
        |m̂/D| before any clamp, where the optimizer tells. Further ones are the recipe's own.
        """
        return figures(self._attachments, self.layers, self.recipe, self.stage, self._state)

    @contextmanager
    def calibrate(self) -> Iterator[None]:
        """Run the model inside to collect the input norms that ``ASP(score="wanda")`` ranks weights by."""
        with self.fixed.collecting():
            yield

    # ---- the end

    @contextmanager
    def deployable(self) -> Iterator[nn.Module]:
        """Inside, the model computes what ``finish()`` would leave; outside, training goes on as before."""
        kept = {name: (layer.transform, layer.plan) for name, layer in self.layers.items()}
        try:
            if self.recipe.final == "nm" and not self.stage.fixed and not self.finished:
                for name, transform in self._final_transforms().items():
                    # emulated roundings belong to training; any other plan computes the same forward pass
                    plan = kept[name][1]
                    self.layers[name].use(transform, plan if plan.fp8 is None else STRAIGHT_THROUGH)
            yield self.model
        finally:
            for name, layer in self.layers.items():
                layer.use(*kept[name])

    def finish(self, allow_unused: bool = False) -> nn.Module:
        """End the recipe and leave ``recipe.final``: every weight exactly N:M, asserted; or the dense model back.

        Hooks are removed. Layers stay SparseLinear with pruned weights, ready for ``compress_``, until ``remove()``.

        Args:
            allow_unused: accept layers that never ran, for instance when a model pruned elsewhere is adopted without running it.

        Raises:
            RecipeError: a swapped layer never ran (its parent bypasses it, so nothing was trained sparse), or a weight is not finite.
        """
        if self.finished:
            return self.model
        idle = [name for name, layer in self.layers.items() if not layer.ran]
        if idle and not allow_unused:
            raise RecipeError(
                f"finish: these swapped layers never ran: {', '.join(idle)}. Their parent probably reads the weight itself, so it was "
                "never masked. Leave them out with filter_fn, or call finish(allow_unused=True) if the model was not meant to run."
            )
        if self.recipe.final == "nm":
            early = self.recipe.unready(self.state) if self._attachments else ""
            if early:
                warnings.warn(
                    f"finish: the recipe {self.recipe.name} {early}, so the weights become {self.recipe.pattern} without having been "
                    "trained in that form; total_steps is probably larger than the number of steps taken.",
                    stacklevel=2,
                )
            make_nm(self.layers, self._final_transforms())
        self._detach()
        self.finished = True
        if self.recipe.final == "dense":
            self.remove()
        return self.model

    def _final_transforms(self) -> dict[str, WeightTransform]:
        """What turns each weight into the N:M one that ``finish`` leaves."""
        return {name: self.fixed.preview(name) or layer.final for name, layer in self.layers.items()}

    def remove(self) -> nn.Module:
        """Give every layer back as the dense layer it was made from, with its weight as it is, and take every hook away.

        The handle has no further use: ``sparsify_`` the model again to go on.
        """
        self._detach()
        self.finished = True
        return densify_(self.model)

    def _detach(self) -> None:
        for attachment in self._attachments:
            attachment.detach()
        self._attachments = []
        self.seeds.forget()
