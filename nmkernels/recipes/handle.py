"""The handle: the mutable side of a recipe on one model, from sparsify_ to finish and back to the dense model."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..autograd import STRAIGHT_THROUGH, WeightTransform
from ..nn import NMWeight, StackedWeight, decompress_, make_dense_, switch_fast_paths
from ..nn.gather import connect, reshard
from ..optim import merge_stats
from ..pattern import CheckpointError, RecipeError
from ..shards import anywhere
from .attach import STATE_KEY, Attachment, check_optimizer, group_of, inner, loaded_beside, unwrapped
from .base import Recipe, State
from .checks import check_flat, check_learned, check_shards, check_stages, check_whole
from .report import Report
from .run import Run
from .saved import restored


def densify_(model: nn.Module) -> nn.Module:
    """Turn every sparse layer of ``model`` back into the dense layer that it was, in place, with the weight as it is; returns the model.

    A ``CompressedLinear`` becomes the dense layer that computes the same, with an adapter folded into its weight.

    Raises:
        RecipeError: an optimizer is attached; ``handle.remove()`` takes the recipe out of it and then does the same. Or a compressed layer
            is split by tensor parallelism, or offloaded.

    Example:
        >>> from nmkernels.nn import SparseLinear
        >>> model = nn.Sequential(SparseLinear(64, 64), nn.ReLU())
        >>> type(densify_(model)[0]).__name__
        'Linear'
    """
    layers = [m for m in model.modules() if isinstance(m, NMWeight)]
    if any(layer.effective.attached for layer in layers):
        raise RecipeError("densify_: an optimizer is attached to this model's recipe; call handle.remove(), which detaches it first.")
    decompress_(model)
    return _make_dense_(model, layers)


def _make_dense_(model: nn.Module, layers: Iterable[NMWeight]) -> nn.Module:
    for layer in layers:
        make_dense_(layer)
    switch_fast_paths(model)
    return model


class Handle:
    """Drives one recipe on one model: ``attach`` an optimizer, train as always, ``finish``. Made by ``sparsify_``.

    Attributes: ``model``, ``recipe``, ``layers`` (name -> layer), ``report``.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, layers: dict[str, NMWeight], report: Report) -> None:
        self.model, self.recipe, self.layers, self.report = model, recipe, layers, report
        check_whole(recipe, layers)
        self.run = Run(model, recipe, layers, report)
        self.finished = False
        self._attachments: list[Attachment] = []
        self._expert_masks: dict[str, Tensor] = {}

    @property
    def state(self) -> State:
        """The schedule's state, as it lies in the optimizer."""
        if not self.run.state:
            raise RecipeError("the handle has no state yet: call handle.attach(optimizer) first.")
        return self.run.state

    def state_dict(self) -> dict[str, Any]:
        """A copy of the schedule's state and of the masks that are held, of sharded weights this rank's part.

        The optimizer's state dict has all of it too, and in a form that other numbers of ranks can load.
        """
        return {STATE_KEY: copy.deepcopy({**self.state, **self.run.held()})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what ``state_dict`` returned.

        Raises:
            CheckpointError: it is of another recipe or pattern, or not of a handle.
        """
        if STATE_KEY not in state_dict:
            raise CheckpointError(f"this is not a handle's state dict: it has no {STATE_KEY!r}.")
        if not self._attachments:
            raise RecipeError("the handle has no optimizer yet: call handle.attach(optimizer) first.")
        self.run.check(state_dict[STATE_KEY], self._attachments[-1].group)
        self._attachments[-1].load(copy.deepcopy(state_dict[STATE_KEY]))

    # ---- attach

    def attach(self, *optimizers: torch.optim.Optimizer) -> Any:
        """Hook the recipe into one or several optimizers and return them as they came.

        The hooks run inside ``optimizer.step()``, after unscaling, accumulation and clipping, also with a closure or a ``GradScaler``.
        Give several optimizers in the order in which they step: the last one that owns a swapped weight keeps the schedule.

        Raises:
            RecipeError: one is no optimizer, none of them updates a swapped weight, one has a recipe already, the recipe cannot run with
                it, or it cannot choose its masks.
            CheckpointError: the optimizer has loaded the state of another recipe. Nothing has changed then.
        """
        if self.finished:
            raise RecipeError("attach: the recipe is finished; sparsify_ the model again to train on.")
        if self._attachments:
            raise RecipeError("attach: this handle has its optimizers already; give all of them in one call, attach(opt1, opt2).")
        self._take_shards()
        stepped = tuple(map(unwrapped, optimizers))
        owners = [(optimizer, owned) for optimizer in stepped if (owned := self._owned(optimizer))]
        if not owners:
            raise RecipeError(
                "attach: none of the optimizers updates a weight of the swapped layers. Build it from model.parameters() of the very model "
                "given to sparsify_ (before a wrapper copies the parameters)."
            )
        for optimizer, _ in owners:
            check_optimizer(self.recipe, optimizer)
        check_learned(self.layers, stepped)
        last, owned = owners[-1]
        found, loaded = last.param_groups[0].get(STATE_KEY), None
        if found is not None:
            beside = {name: bits for optimizer, layers in owners for name, bits in loaded_beside(optimizer, layers).items()}
            loaded = restored(found, self.layers, beside)
            self.run.check(loaded, group_of(last, owned))
        run = self.run
        run.optimizers = tuple(map(inner, stepped))
        self._attachments = [Attachment(run, o, layers) for o, layers in owners[:-1]]
        self._attachments.append(Attachment(run, last, owned, self._attachments))
        try:
            if loaded is None:
                run.begin("attach")  # weights may have been initialised since sparsify_
            self._attachments[-1].load(loaded or run.first_state(group_of(last, owned)))
        except Exception:
            self._detach()
            if found is not None:
                last.param_groups[0][STATE_KEY] = found
            run.state = {}
            run.apply(self.recipe.stage({}))
            raise
        return optimizers[0] if len(optimizers) == 1 else optimizers

    def _take_shards(self) -> None:
        """Have sharded layers make W̃ from this rank's shard, and every rank hold no more than that."""
        check_flat(self.layers)
        connect(self.model, list(self.layers.values()))
        check_whole(self.recipe, self.layers)
        check_stages(self.recipe, self.layers)
        check_shards(self.layers)

    def _owned(self, optimizer: torch.optim.Optimizer) -> dict[str, NMWeight]:
        # frozen layers too: they may be unfrozen later
        params = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return {name: layer for name, layer in self.layers.items() if id(layer.parameter) in params}

    # ---- watching

    def metrics(self) -> dict[str, Tensor]:
        """Figures of the last optimizer step as 0-d tensors; reading them is what synchronises, asking does not.

        ``flip_rate``: mask bits changed by the last step / maskable weights (a swap counts 2). ``density``: non-zeros of the weights
        used / maskable weights. ``phase``: 0 dense, 1 mask learning, 2 fixed mask. ``decay_ratio``: λΣ|w| / Σ|g| over pruned weights.
        ``max_update``: the largest |m̂/D| before any clamp, where the optimizer tells. ``kept_gain``: what reordering channels before
        pruning has won, where ASP did. Further ones are the recipe's own. Before an optimizer is attached ``flip_rate`` and
        ``decay_ratio`` are NaN.
        """
        if not self.run.state and not self.finished:
            self.run.gradients.warn("metrics", self.recipe, attached=False)
        return metrics_of(self.run, self._attachments)

    @torch.no_grad()
    def expert_metrics(self) -> dict[str, dict[str, Tensor]]:
        """Figures ``(E,)`` of the single experts of each stack, by the name of its Parameter; none without stacked experts.

        ``density``: non-zeros of the weights used / weights. ``flip_rate``: mask bits changed since this was asked last / weights, NaN at
        the first time; for that a bool for each weight is kept. An expert that got no token has a gradient of zero and not none: weight
        decay, and the recipe's own, shrink it as a dense AdamW would, so its mask may change too.
        """
        told: dict[str, dict[str, Tensor]] = {}
        for name, layer in self.layers.items():
            if not isinstance(layer, StackedWeight):
                continue
            mask, before = layer.by_expert(layer.kept()), self._expert_masks.get(name)
            size = mask[0].numel()
            flips = mask.new_full(mask.shape[:1], torch.nan, dtype=torch.float64)
            if before is not None:
                flips = (mask ^ before).flatten(1).sum(1).double() / size
            used = layer.by_expert(layer.effective_weight())
            told[name] = {"density": used.ne(0).flatten(1).sum(1).double() / size, "flip_rate": flips}
            self._expert_masks[name] = mask
        return told

    def calibrate(self) -> AbstractContextManager[None]:
        """Run the model inside to collect the input norms that ``ASP(score="wanda")`` ranks weights by."""
        return self.run.masks.collecting()

    # ---- the end

    @contextmanager
    def deployable(self) -> Iterator[nn.Module]:
        """Inside, the model computes what ``finish()`` would leave; outside, training goes on as before."""
        if self.finished:
            yield self.model
            return
        # with no optimizer attached, finish() is what prunes
        with self.run.masks.permuted(not self._attachments), self._previewed():
            yield self.model

    def refresh(self) -> None:
        """Compute with the present weights from now on, whatever has written them.

        On a CPU every write is noticed anyway. On a GPU one kind is not: through ``.data``, in training mode, between two forward passes
        of one optimizer step. Call this after it.
        """
        reshard(self.model)
        for layer in self.layers.values():
            layer.effective.release()
            layer.put_in_order()
            layer.adopt_shard()

    @contextmanager
    def _previewed(self) -> Iterator[None]:
        reshard(self.model)
        kept = {name: (layer.transform, layer.plan, layer.adapts) for name, layer in self.layers.items()}
        try:
            self.run.activations.use(self.run.activations.final)
            for layer in self.layers.values():
                layer.effective.doubt()
                layer.adapts |= self.recipe.final == "nm+adapter"
                if self.recipe.final == "dense":
                    layer.use(None, STRAIGHT_THROUGH)
            if self.recipe.final != "dense" and not self.run.stage.held_mask:
                for name, transform in self.run.final_transforms().items():
                    # emulated roundings and packed GEMMs belong to training; any other plan computes the same forward pass
                    plan = kept[name][1]
                    self.layers[name].use(transform, plan if plan.fp8 is None and plan.fprop == "dense" else STRAIGHT_THROUGH)
            yield
        finally:
            reshard(self.model)
            for name, layer in self.layers.items():
                before, plan, layer.adapts = kept[name]
                layer.use(before, plan)
                layer.effective.doubt()
            self.run.activations.use(self.run.stage.activation)

    def finish(self, allow_unused: bool = False) -> nn.Module:
        """End the recipe and leave ``recipe.final``: every weight exactly N:M, asserted; the same with adapters; or the dense model back.

        Hooks are removed. Layers stay SparseLinear with pruned weights, ready for ``compress_``, until ``remove()``; adapters stay their
        Parameters ``nm_left`` and ``nm_right``.

        Args:
            allow_unused: accept layers that never ran, for instance when a model pruned elsewhere is adopted without running it.

        Raises:
            RecipeError: a swapped layer never ran (its parent bypasses it, so nothing was trained sparse), or a weight is not finite.
        """
        if self.finished:
            return self.model
        reshard(self.model)  # what FSDP2 left unsharded is a copy
        idle = [name for name, layer in self.layers.items() if not layer.ran and not allow_unused]
        if idle:
            raise RecipeError(
                f"finish: these swapped layers never ran: {', '.join(idle)}. Their parent probably reads the weight itself, so it was "
                "never masked. Leave them out with filter_fn, or call finish(allow_unused=True) if the model was not meant to run."
            )
        if all(attachment.stats is None for attachment in self._attachments):
            self.run.gradients.warn("finish", self.recipe, attached=bool(self._attachments))
        early = self.recipe.not_ready_reason(self.state) if self._attachments else ""
        if early:
            self._warn_early(early)
        if self.recipe.final == "dense":
            self.remove()
        else:
            if not self._attachments:
                self.run.masks.permute_({})
            make_nm(self.layers, self.run.final_transforms())
            self._end()
        self.run.activations.use(self.run.activations.final)
        return self.model

    def _warn_early(self, reason: str) -> None:
        recipe = self.recipe
        what = "weights" if recipe.setup.activation is None else "activations"
        form = "dense" if what == "weights" and recipe.final == "dense" else recipe.pattern
        trained = f"the {what} become {form} without having been trained in that form"
        left = "the adapters add nothing" if recipe.final == "nm+adapter" else trained
        warnings.warn(
            f"finish: the recipe {recipe.name} {reason}, so {left}; total_steps is probably larger than the number of steps taken.",
            stacklevel=3,
        )

    def remove(self) -> nn.Module:
        """Give every layer back as the dense layer it was made from, with its weight as it is, and take every hook away.

        A low-rank adapter that has learned something is folded into the weight, W + (L R)ᵀ / r, which is then no longer N:M. To have the
        N:M weight alone, zero ``nm_right`` first. The handle has no further use: ``sparsify_`` the model again to go on.
        """
        reshard(self.model)
        self._end()
        self.run.activations.restore()
        return _make_dense_(self.model, [m for m in self.model.modules() if isinstance(m, NMWeight)])

    def _end(self) -> None:
        self._detach()
        self.run.end()
        self.finished = True

    def _detach(self) -> None:
        for attachment in self._attachments:
            attachment.detach()
        self._attachments, self.run.optimizers = [], ()
        self.run.streams.forget()


@torch.no_grad()
def make_nm(layers: dict[str, NMWeight], transforms: dict[str, WeightTransform]) -> None:
    """Replace every layer's weight by what its transform makes of it, and take from the layer what only training needed."""
    for name, layer in layers.items():
        if anywhere(layer.parameter, not bool(torch.isfinite(layer.master).all())):
            raise RecipeError(f"finish: the weight of layer {name!r} has NaN or infinite values; training diverged before this point.")
    pruned, orders = {}, {}
    for name, transform in transforms.items():
        columns, weight = transform.traits.columns, layers[name].transformed(transform)
        order = None if columns is None else columns(weight.shape[1])
        used = weight if order is None else weight[:, order.to(weight.device)]
        if anywhere(layers[name].parameter, not ops.is_nm(used, layers[name].pattern)):
            raise RecipeError(f"finish: layer {name!r} is not {layers[name].pattern} after pruning; please report this bug.")
        pruned[name], orders[name] = weight, order
    for name, layer in layers.items():
        layer.master.copy_(pruned.pop(name))
        layer.use(None, STRAIGHT_THROUGH)
        layer.finished, layer.columns = True, orders[name]
        layer.forget(adapter=False)
        layer.adapts = True
        layer.effective.release()


def metrics_of(run: Run, attachments: list[Attachment]) -> dict[str, Tensor]:
    """What ``Handle.metrics`` tells; nothing here waits for the device. λ is the recipe's own figure ``decay``, if any."""
    stage, state = run.stage, run.state
    phase = torch.tensor(stage.phase)
    parts = [a for a in attachments if a.stats is not None]
    # users ask on one rank only, where a collective would wait for ever: what sharded layers tell is from the last step
    told = run.told if run.sharded else run.tell(density=not parts)
    if not parts:
        # without a state no optimizer was ever attached, and nobody counts
        nothing = torch.full((), 0.0 if state else torch.nan, dtype=torch.float64)
        return {"flip_rate": nothing, "density": told.get("density", nothing), "phase": phase, "decay_ratio": nothing.clone()}
    numel = sum(a.numel for a in parts)
    total: Tensor = functools.reduce(merge_stats, [a.stats for a in parts if a.stats is not None])
    s = dict(zip(ops.STATS, total, strict=True))
    grads = s["pruned_grad_abs"]
    own = {**run.recipe.values(state), **told}
    ratio = torch.where(grads > 0, own.get("decay", stage.rule.decay) * s["pruned_abs"] / grads, 0.0)
    common = {"flip_rate": s["flips"] / numel, "density": s["nonzeros"] / numel, "phase": phase, "decay_ratio": ratio}
    updates = any(a.masked is not None for a in parts)
    gains = [after / before - 1 for before, after in state.get("kept", {}).values() if before]
    gain = {"kept_gain": torch.tensor(sum(gains) / len(gains), dtype=torch.float64)} if gains else {}
    return {**common, **own, **gain, **({"max_update": s["max_update"]} if updates else {})}
