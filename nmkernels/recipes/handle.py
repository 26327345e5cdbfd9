"""The handle: the mutable side of a recipe on one model, from sparsify_ to finish."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..autograd import HardMask, WeightTransform
from ..nn import NMWeight
from ..optim import MaskedAdamW
from ..pattern import CheckpointError, Pattern, RecipeError
from .attach import STATE_KEY, Attachment
from .base import Recipe, Stage, State
from .fixed import FixedMasks
from .report import Report
from .swap import densify_


class Handle:
    """Drives one recipe on one model: ``attach`` an optimizer, train as always, ``finish``.

    Made by ``sparsify_``. It keeps the schedule's state in the optimizer's own state dict, so a trainer that saves only model and
    optimizer resumes correctly. Attributes: ``model``, ``recipe``, ``layers`` (name -> layer), ``report``.
    """

    def __init__(
        self, model: nn.Module, recipe: Recipe, layers: dict[str, NMWeight], report: Report, changed: list[tuple[nn.Module, str, object]]
    ) -> None:
        self.model, self.recipe, self.layers, self.report = model, recipe, layers, report
        self._changed = changed
        self._attachments: list[Attachment] = []
        self._state: State | None = None
        self.fixed = FixedMasks(layers, recipe.mask_score)
        self.finished = False
        self.apply(recipe.stage({}))

    # ---- attach

    def attach(self, *optimizers: torch.optim.Optimizer) -> Any:
        """Hook the recipe into one or several optimizers and return them as they came.

        The hooks run inside ``optimizer.step()``, after unscaling, accumulation and clipping, also with a closure or a ``GradScaler``.
        With several optimizers the first that owns a swapped weight keeps the schedule.

        Raises:
            RecipeError: none of them updates a swapped weight, one is attached already, or the recipe cannot run with it.
        """
        if self.finished:
            raise RecipeError("attach: the recipe is finished; sparsify_ the model again to train on.")
        if self._attachments:
            raise RecipeError("attach: this handle has its optimizers already; give all of them in one call, attach(opt1, opt2).")
        owners = [(o, self._owned(o)) for o in optimizers]
        if not any(owned for _, owned in owners):
            raise RecipeError(
                "attach: none of the optimizers updates a weight of the swapped layers. Build it from model.parameters() of the very model "
                "given to sparsify_ (before a wrapper copies the parameters)."
            )
        for optimizer, owned in owners:
            if owned:
                self.recipe.check_optimizer(optimizer)
        for optimizer, owned in owners:
            if owned:
                self._attachments.append(Attachment(self, optimizer, owned, primary=not self._attachments))
        primary = self._attachments[0]
        if STATE_KEY in primary.group0:
            self.check_state(primary.group0[STATE_KEY])
            self._state = primary.group0[STATE_KEY]
        else:
            self._state = {"spec": self.recipe.spec(), **self.recipe.start(primary.group)}
            primary.group0[STATE_KEY] = self._state
        self.restage()
        return optimizers[0] if len(optimizers) == 1 else optimizers

    def _owned(self, optimizer: torch.optim.Optimizer) -> dict[str, NMWeight]:
        params = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return {name: layer for name, layer in self.layers.items() if id(layer.weight) in params and layer.weight.requires_grad}

    # ---- the schedule's state

    @property
    def state(self) -> State:
        """The schedule's state, as it lies in the optimizer."""
        if self._state is None:
            raise RecipeError("the handle has no state yet: call handle.attach(optimizer) first.")
        return self._state

    def adopt(self, state: State) -> None:
        """Continue from ``state``, which lies in the optimizer already."""
        self._state = state
        self.restage()

    def restage(self) -> None:
        """Bring layers and optimizers in line with the schedule's state."""
        stage = self.recipe.stage(self.state)
        if stage.fixed:
            self.fixed.ensure(self.state)
        self.apply(stage)

    def apply(self, stage: Stage) -> None:
        """Set what every layer and optimizer does from now on."""
        self.stage = stage
        pattern = Pattern(self.recipe.pattern)
        for layer in self.layers.values():
            layer.transform = HardMask(pattern) if stage.masked else None
            layer.used.drop()
        for attachment in self._attachments:
            attachment.apply(stage)

    def check_state(self, state: Any) -> None:
        """Raise ``CheckpointError`` unless ``state`` was written by this recipe with this pattern."""
        spec = state.get("spec") if isinstance(state, dict) else None
        mine = self.recipe.spec()
        if not isinstance(spec, dict) or "recipe" not in spec:
            raise CheckpointError("the optimizer state holds a recipe state that nmkernels did not write.")
        for key in ("recipe", "pattern"):
            if spec.get(key) != mine[key]:
                raise CheckpointError(
                    f"the checkpoint was trained with {spec['recipe']}:{spec.get('pattern')}, this run uses {mine['recipe']}:{mine['pattern']}. "
                    "Resume with the same recipe, or load only the model's weights."
                )

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
        return self._attachments[0]

    # ---- watching

    def metrics(self) -> dict[str, Tensor]:
        """Figures of the last optimizer step as 0-d tensors; reading them is what synchronises, asking does not.

        ``flip_rate``: mask bits changed by the last step / maskable weights (a swap counts 2). ``density``: non-zeros of the weights
        used / maskable weights. ``phase``: see the recipe. ``decay_ratio``: λΣ|w| / Σ|g| over pruned weights. ``max_update``: the largest
        |m̂/D| where the optimizer tells. Further ones are the recipe's own.
        """
        phase = torch.tensor(self.stage.phase)
        parts = [a for a in self._attachments if a.stats is not None]
        if not parts:
            return {"flip_rate": torch.tensor(0.0), "density": self._density(), "phase": phase, "decay_ratio": torch.tensor(0.0)}
        numel = sum(a.numel for a in parts)
        s = dict(zip(ops.STATS, torch.stack([a.stats for a in parts if a.stats is not None]).sum(0), strict=True))
        grads = s["pruned_grad_abs"]
        ratio = torch.where(grads > 0, self.stage.rule.decay * s["pruned_abs"] / grads, 0.0)
        common = {"flip_rate": s["flips"] / numel, "density": s["nonzeros"] / numel, "phase": phase, "decay_ratio": ratio}
        own = self.recipe.metrics(self.state)
        updates = [a.stats[ops.STATS.index("max_update")] for a in parts if a.stats is not None and isinstance(a.optimizer, MaskedAdamW)]
        return {**common, **own, **({"max_update": torch.stack(updates).amax()} if updates else {})}

    def _density(self) -> Tensor:
        used = [layer.used_weight() for layer in self.layers.values()]
        return torch.tensor(sum(int(u.count_nonzero()) for u in used) / max(1, sum(u.numel() for u in used)))

    @contextmanager
    def calibrate(self) -> Iterator[None]:
        """Run the model inside to collect the input norms that ``ASP(score="wanda")`` ranks weights by."""
        with self.fixed.collecting():
            yield

    # ---- the end

    @contextmanager
    def deployable(self) -> Iterator[nn.Module]:
        """Inside, the model computes what ``finish()`` would leave; outside, training goes on as before."""
        kept: dict[str, WeightTransform | None] = {name: layer.transform for name, layer in self.layers.items()}
        try:
            if self.recipe.final == "nm" and not self.stage.fixed and not self.finished:
                for name, layer in self.layers.items():
                    layer.transform = self.fixed.preview(name) or HardMask(layer.pattern)
                    layer.used.drop()
            yield self.model
        finally:
            for name, layer in self.layers.items():
                if layer.transform is not kept[name]:
                    layer.transform = kept[name]
                    layer.used.drop()

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
                f"finish: these swapped layers never ran: {', '.join(idle)}. Their parent probably reads the weight itself, so it was never "
                "masked. Leave them out with filter_fn, or call finish(allow_unused=True) if the model was not meant to run."
            )
        if self.recipe.final == "nm":
            self._make_nm()
        self._detach()
        self.finished = True
        if self.recipe.final == "dense":
            self.remove()
        return self.model

    def _make_nm(self) -> None:
        self.fixed.ensure_scored()
        for name, layer in self.layers.items():
            if not bool(torch.isfinite(layer.weight).all()):
                raise RecipeError(f"finish: the weight of layer {name!r} has NaN or infinite values; training has diverged before this point.")
        for name, layer in self.layers.items():
            with torch.no_grad():
                layer.master.copy_((self.fixed.preview(name) or HardMask(layer.pattern))(layer.master.detach()))
            if not ops.is_nm(layer.master.detach(), layer.pattern):
                raise RecipeError(f"finish: layer {name!r} is not {layer.pattern} after pruning; this is a bug of nmkernels, please report it.")
            layer.transform, layer.finished = None, True
            layer.used.release()

    def remove(self) -> nn.Module:
        """Give every layer back as the dense layer it was made from, with its weight as it is, and take every hook away."""
        self._detach()
        for module, name, value in self._changed:
            setattr(module, name, value)
        self._changed = []
        for layer in self.layers.values():
            layer.used.release()
        return densify_(self.model)

    def _detach(self) -> None:
        for attachment in self._attachments:
            attachment.detach()
        self._attachments = []

