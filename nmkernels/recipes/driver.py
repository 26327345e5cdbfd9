"""The part of a handle that follows the schedule: its state in the optimizer, and what layers and optimizers do by it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ..autograd import WeightTransform
from ..nn import NMWeight
from ..pattern import CheckpointError, NMError, RecipeError
from .activations import Activations
from .adapters import add_adapters
from .attach import STATE_KEY, Attachment
from .base import Observed, Recipe, Stage, State
from .final import Gradients
from .learned import Standstill
from .masks import FixedMasks
from .metrics import summed
from .report import Report
from .search.channels import Channels
from .state import Held, Seeds, Shares, shape_of


class Driver:
    """Keeps the state of a recipe's schedule and brings layers and optimizers in line with it; ``Handle`` is what users see."""

    def __init__(self, model: nn.Module, recipe: Recipe, layers: dict[str, NMWeight], report: Report) -> None:
        self.model, self.recipe, self.layers, self.report = model, recipe, layers, report
        self._attachments: list[Attachment] = []
        self._state: State | None = None
        self._calls = 0
        self._transforms: dict[WeightTransform, WeightTransform] = {}
        self._optimizers: tuple[torch.optim.Optimizer, ...] = ()
        channels = None if recipe.search is None else Channels(model, layers, recipe.search, report)
        self.fixed = FixedMasks(layers, recipe.mask_score, channels)
        self.seeds = Seeds(layers)
        self.held = Held(layers)
        self.shares = Shares(recipe, layers, report)
        self.activations = Activations(model, recipe.final_activation())
        self.finished = False
        self.stage = recipe.stage({})
        self._freeze("sparsify_")
        add_adapters(recipe, layers)
        self.apply(self.stage)
        self._feed({})
        self.held.ensure({})
        self.standstill = Standstill(model, layers, recipe.freezes)
        self.gradients = Gradients(layers)

    def _one(self, transform: WeightTransform) -> WeightTransform:
        # one object of each kind for the whole run: a compiled model guards on its identity
        return self._transforms.setdefault(transform, transform)

    def _freeze(self, verb: str, anew: bool = False) -> None:
        """Take from the present weights what is taken from them once: the layers' patterns, and what transforms freeze."""
        self.shares.choose()
        self._refit(verb, anew)

    def _refit(self, verb: str, anew: bool = False) -> None:
        transform = self.stage.transform or self.stage.later
        for name, layer in self.layers.items():
            layer.final = self._fitted(self.recipe.final_transform(), layer)
            layer.restored &= not anew
            try:
                layer.freeze(*() if transform is None else (self._fitted(transform, layer),))
            except NMError as error:
                raise RecipeError(f"{verb}: layer {name!r}: {error}") from error

    # ---- the schedule's state

    @property
    def state(self) -> State:
        """The schedule's state, as it lies in the optimizer."""
        if self._state is None:
            raise RecipeError("the handle has no state yet: call handle.attach(optimizer) first.")
        return self._state

    def first_state(self, group: dict[str, Any]) -> State:
        """The schedule's state at its beginning, with the recipe's own description for checkpoints."""
        state = {"spec": self.recipe.spec(), **self.recipe.start(group)}
        self.shares.save(state)
        return state

    def adopt(self, state: State) -> None:
        """Continue from ``state``, which lies in the optimizer already."""
        self._state = state
        self._calls = int(state["t"]) if "t" in state else 0
        if self.shares.adopt(state):
            self._refit("resume")
        self.restage(resumed=True)

    def advance(self) -> None:
        """Let the schedule see the step that every attached optimizer has just done."""
        parts = [a for a in self._attachments if a.observed is not None]
        if not parts:
            return
        self.gradients.end()
        seen = Observed(
            stats=summed(a.observed for a in parts if a.observed is not None),
            numel=sum(a.numel for a in parts),
            second_moments=[v for a in parts for v in a.second_moments()],
            step=self._primary().step_counter(),
            calls=self._calls + 1,
            group=self._primary().group,
        )
        self._calls += 1
        for part in parts:
            part.observed = None
        held_due = "held" in self.state and self._primary().applied(seen.stats) and self.held.advance(self.state, self.stage.renew)
        if self.recipe.advance(self.state, seen):
            if self.stage.later is not None and self.recipe.stage(self.state).later is None:
                self._begin()
            self.restage()
        else:
            self._feed(self.state)
        if held_due and "held" in self.state:
            self._renew(self._kept())

    def _begin(self) -> None:
        """The dense phase is over: what later stages take from the weights is taken from the present ones."""
        self._freeze("the sparse phase", anew=True)
        self.shares.save(self.state)

    def _kept(self) -> dict[str, Tensor]:
        return {name: layer.kept() for name, layer in self.layers.items()}

    def _renew(self, before: dict[str, Tensor]) -> None:
        self.held.renew(self.state)
        self._primary().add_flips(torch.stack([(layer.kept() ^ before[name]).sum() for name, layer in self.layers.items()]).sum())

    def _feed(self, state: State) -> None:
        transform = self.stage.transform
        if transform is None or not transform.reads:
            return
        values = {name: value for name, value in self.recipe.inputs(state).items() if name in transform.reads}
        if values:
            for layer in self.layers.values():
                layer.feed(values)

    def restage(self, resumed: bool = False) -> None:
        """Bring layers and optimizers in line with the schedule's state; what a ``resumed`` one holds is right as it is."""
        stage = self.recipe.stage(self.state)
        self.seeds.adopt(self.state)
        before = self._kept() if "held" in self.state and stage.part != self.stage.part and not resumed else None
        if stage.fixed:
            self.fixed.ensure(self.state, self._optimizers)
        else:
            self.fixed.forget()
        self.apply(stage)
        self._feed(self.state)
        if before is not None and self.held.begin(self.state):
            self._renew(before)
        else:
            self.held.ensure(self.state)

    def apply(self, stage: Stage) -> None:
        """Set what every layer and optimizer does from now on."""
        self.stage = stage
        for layer in self.layers.values():
            layer.use(None if stage.transform is None else self._fitted(stage.transform, layer), stage.plan)
            layer.adapts = stage.adapter
            if stage.transform is None:
                layer.effective.release()  # a dense phase needs the memory more
            else:
                layer.effective.drop()
        self.activations.use(stage.activation)
        for attachment in self._attachments:
            attachment.apply(stage)

    def _fitted(self, transform: WeightTransform, layer: NMWeight) -> WeightTransform:
        return self._one(self.recipe.fit(transform, layer.pattern, shape_of(layer)))

    def check_state(self, state: Any, group: dict[str, Any] | None = None) -> None:
        """Raise ``CheckpointError`` unless ``state`` was written by this recipe, with this pattern, on these layers."""
        self.recipe.check_state(state, self._primary().group if group is None else group)
        self.shares.check(state)
        self.fixed.check(state)
        self.seeds.check(state)
        self.held.check(state)

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
