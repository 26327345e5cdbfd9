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
from .attach import STATE_KEY, Attachment, check_moments, check_optimizer, group_of, loaded_beside, owned, unwrapped
from .base import Recipe, State
from .checks import check_flat, check_learned, check_own, check_shards, check_stages, check_whole
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
    check_own("densify_", {name: m for name, m in model.named_modules() if isinstance(m, NMWeight)}, "weight", "bias")
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
        Give several optimizers in the order in which they step: the last one that owns a swapped weight keeps the schedule. Parameter
        groups that are added to them later take part.

        Called again, for instance for a second phase of training, it continues: schedule and masks stay as they are, and the last of the
        new optimizers keeps them. Earlier optimizers stay attached until ``detach``.

        Raises:
            RecipeError: one is no optimizer, none of them updates a swapped weight, one has another model's recipe, the recipe cannot run
                with it, or it cannot choose its masks.
            CheckpointError: the optimizer has loaded the state of another recipe. Nothing has changed then.

        Example:
            >>> from nmkernels import sparsify_
            >>> model = nn.Linear(64, 64)
            >>> handle = sparsify_(model, "asp:2:4")
            >>> warm_up = handle.attach(torch.optim.SGD(model.parameters(), lr=0.1))
            >>> main = handle.attach(torch.optim.AdamW(model.parameters(), lr=1e-3))
            >>> handle.detach(warm_up)
        """
        if self.finished:
            raise RecipeError("attach: the recipe is finished; sparsify_ the model again to train on.")
        self._take_shards()
        run, before = self.run, list(self._attachments)
        stepped = tuple(dict.fromkeys(map(unwrapped, optimizers)))
        known = {id(a.optimizer): a for a in before}
        owners = [(o, layers) for o in stepped if (layers := owned(o, self.layers))]
        if not owners:
            raise RecipeError(
                "attach: none of the optimizers updates a weight of the swapped layers. Build it from model.parameters() of the very model "
                "given to sparsify_ (before a wrapper copies the parameters). If those layers are left out because they are frozen, attach "
                "the optimizer once they have been added to it."
            )
        for optimizer, _ in owners:
            if id(optimizer) not in known:
                check_optimizer(self.recipe, optimizer)
        check_learned(self.layers, (*stepped, *(a.optimizer for a in before)))
        last, layers = owners[-1]
        found, loaded = None if id(last) in known else last.param_groups[0].get(STATE_KEY), None
        if found is not None:
            beside = {name: bits for optimizer, own in owners for name, bits in loaded_beside(optimizer, own).items()}
            loaded = restored(found, self.layers, beside)
            run.check(loaded, group_of(last, layers))
        elif run.state:
            check_moments(run, last, layers)
        going = bool(run.state)
        try:
            self._attachments[:] = [a for a in before if a.optimizer not in stepped]
            # one without a swapped weight may get some with a later group, but keeps no schedule
            for optimizer in sorted(stepped, key=lambda o: bool(owned(o, self.layers))):
                self._attachments.append(known.get(id(optimizer)) or Attachment(run, optimizer, self._attachments))
                self._attachments[-1].take()
            keeper = self._appoint()
            assert keeper is not None
            if going and loaded is None:
                keeper.continues()
            else:
                if loaded is None:
                    run.begin("attach")  # weights may have been initialised since sparsify_
                keeper.load(loaded)
        except Exception:
            for attachment in self._attachments:
                if attachment not in before:
                    attachment.detach()
            self._attachments[:] = before
            self._appoint()
            if found is not None:
                last.param_groups[0][STATE_KEY] = found
            if not going:
                run.state = {}
                run.apply(self.recipe.stage({}))
            raise
        for earlier in before:
            if earlier is not keeper:
                earlier.hand_over(self._attachments[self._attachments.index(earlier) + 1 :])
        return optimizers[0] if len(optimizers) == 1 else optimizers

    def detach(self, *optimizers: torch.optim.Optimizer) -> None:
        """Take the recipe out of some of the attached optimizers, or of all; the schedule and the masks stay.

        Of those that remain the last one keeps the schedule. With none left nothing is held or counted until ``attach`` is called again,
        which continues.

        Raises:
            RecipeError: one of them is not attached.
        """
        parts = [a for o in map(unwrapped, optimizers) for a in self._attachments if a.optimizer is o]
        if len(parts) < len(optimizers):
            raise RecipeError("detach: one of the optimizers is not attached to this handle.")
        for part in parts or list(self._attachments):
            part.detach()
            self._attachments.remove(part)
        if keeper := self._appoint():
            keeper.continues()

    def renew_masks(self) -> None:
        """Take from the present weights what the recipe took from earlier ones: masks, S-STE's scale, learned logits, channel order.

        For weights that were loaded in the middle of a run, where what was chosen stays (so that weights can be rewound under the same
        mask). The schedule goes on. Before ``attach`` there is nothing to renew: it takes all from the weights that it finds.

        Raises:
            RecipeError: the recipe is finished, or the present weights are of no use to it.

        Example:
            >>> from nmkernels import sparsify_
            >>> model = nn.Linear(64, 64)
            >>> handle = sparsify_(model, "asp:2:4")
            >>> optimizer = handle.attach(torch.optim.AdamW(model.parameters()))
            >>> _ = model.load_state_dict(nn.Linear(64, 64).state_dict())
            >>> handle.renew_masks()
            >>> round(handle.metrics()["density"].item(), 2)
            0.5
        """
        if self.finished:
            raise RecipeError("renew_masks: the recipe is finished; sparsify_ the model again to prune other weights.")
        reshard(self.model)
        if self.run.state:
            self.run.renew("renew_masks", overwrite=True)

    def _appoint(self) -> Attachment | None:
        """Have the last attachment keep the schedule, and return it; None where there is none."""
        self.run.optimizers = tuple(a.updating for a in self._attachments)
        keeper = self._attachments[-1] if self._attachments else None
        for attachment in self._attachments:
            attachment.all = self._attachments if attachment is keeper else ()
        return keeper

    def _take_shards(self) -> None:
        """Have sharded layers make W̃ from this rank's shard, and every rank hold no more than that."""
        check_flat(self.layers)
        connect(self.model, list(self.layers.values()))
        check_whole(self.recipe, self.layers)
        check_stages(self.recipe, self.layers)
        check_shards(self.layers)

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
        if not self.finished:
            self.run.check_weights("metrics", waits=False)
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
        """Run the model inside to collect the input norms that ``ASP(score="wanda")`` ranks weights by.

        Tokens with NaN or infinite values are left out, and a warning names the layer and the forward pass; another one lists the layers
        that got fewer than M tokens.
        """
        return self.run.masks.inputs.collecting()

    # ---- the end

    @contextmanager
    def deployable(self) -> Iterator[nn.Module]:
        """Inside, the model computes what ``finish()`` would leave; outside, training goes on as before."""
        if self.finished:
            yield self.model
            return
        lost = self.run.check_weights("deployable")
        # with no optimizer attached, finish() is what prunes
        with self.run.masks.permuted(not self.run.state), self._previewed(lost):
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
    def _previewed(self, lost: Iterable[str]) -> Iterator[None]:
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
            for name in lost:
                self.layers[name].use(self.run.masks.preview(name), STRAIGHT_THROUGH)
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

        Layers that never ran are treated like the others, and a warning lists them.

        Args:
            allow_unused: no warning of layers that never ran, for instance when a model pruned elsewhere is adopted without running it.

        Raises:
            RecipeError: a weight is not finite, or cannot be pruned as the recipe has it. Nothing has changed then.
        """
        if self.finished:
            return self.model
        check_own("finish", self.layers)
        reshard(self.model)  # what FSDP2 left unsharded is a copy
        idle = [name for name, layer in self.layers.items() if not layer.ran and not allow_unused]
        if idle:
            self._warn_idle(idle)
        self.run.check_weights("finish")
        if not self.run.calls:
            self.run.gradients.warn("finish", self.recipe, attached=bool(self._attachments))
        early = self.recipe.not_ready_reason(self.state) if self.run.state else ""
        if early:
            self._warn_early(early)
        if self.recipe.final == "dense":
            self.remove()
        else:
            if not self.run.state:
                self.run.masks.permute_({})
            make_nm(self.layers, self.run.final_transforms())
            self._end()
        self.run.activations.use(self.run.activations.final)
        return self.model

    def _warn_idle(self, names: list[str]) -> None:
        fate = "made dense again" if self.recipe.final == "dense" else "pruned"
        warnings.warn(
            f"finish: these layers never ran and are {fate} like the others: {', '.join(names)}. Either the model did not call them, or "
            "their parent reads the weight itself, so that it was trained dense; leave out such layers with filter_fn. "
            "finish(allow_unused=True) does not warn.",
            stacklevel=3,
        )

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
        layers = {name: layer for name, layer in self.layers.items() if isinstance(layer, NMWeight)}  # densify_ may have been here
        check_own("remove", layers, "weight", "bias")
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
        self._attachments[:], self.run.optimizers = [], ()
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
    # what the last step counted is not what is multiplied once something else has written the weights; held masks do not prevent that
    written = run.stage.held_mask or bool(run.writes.since_step(run.layers))
    # users ask on one rank only, where a collective would wait for ever: what sharded layers tell is from the last step
    told = run.told if run.sharded else run.tell(density=written or not parts)
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
