"""The handle, which users hold: a recipe on one model, from ``sparsify_`` to ``finish`` and back to the dense model."""

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
from ..autograd.transforms import WeightTransform
from ..gemm.plan import STRAIGHT_THROUGH
from ..nn.compress import decompress_
from ..nn.experts import StackedWeight, child_name
from ..nn.sharding import reshard
from ..nn.swap import make_dense_, switch_fast_paths
from ..nn.weight import NMWeight
from ..optim.adamw import merge_stats
from ..pattern import CheckpointError, RecipeError
from ..recipes.contract import Recipe, State
from ..shards import anywhere
from .optimizers import STATE_KEY, attach, begin, check_own, check_whole, detach, take_over_schedule, unwrapped
from .report import Report
from .run import Run


def densify_(model: nn.Module) -> nn.Module:
    """Turn every sparse layer of ``model`` back into the dense layer that it was, in place, with the weight as it is; returns the model.

    A ``CompressedLinear`` becomes the dense layer that computes the same, with an adapter folded into its weight. Handles of the model end;
    what a recipe has frozen (MaskLLM) or set elsewhere in the model (Activation24) stays so, unless ``handle.remove()`` ends it instead.

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
    """Drives one recipe on one model: attach an optimizer, train as always, finish.

    ``sparsify_`` returns it. The calls of a run, in order: ``attach``; the training loop, unchanged; ``deployable()`` around each
    evaluation; ``finish``; then ``nm.compress_(model)`` for inference, or ``remove`` for the dense model. Once ``densify_`` has made a
    layer dense again, or a later ``prune_`` has taken it over, calls raise ``RecipeError``.

    Attributes:
        model: the module that ``sparsify_`` was given.
        recipe: the recipe.
        layers: the sparse layers by their names in the model, in the model's order. ``layer.effective_weight()`` is W̃ ``(out, in)``.
        report: what became of every layer that has a weight, and why; ``print(handle.report)``.
        finished: whether ``finish`` or ``remove`` was called.

    Example:
        >>> from nmkernels import sparsify_
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        >>> handle = sparsify_(model, "srste:2:4")
        >>> optimizer = handle.attach(torch.optim.AdamW(model.parameters(), lr=1e-3))
        >>> for _ in range(3):
        ...     model(torch.randn(8, 64)).square().mean().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> _ = handle.finish()
        >>> ops.is_nm(model[0].weight.detach(), "2:4")
        True
    """

    def __init__(self, model: nn.Module, recipe: Recipe, layers: dict[str, NMWeight], report: Report) -> None:
        self.model, self.recipe, self.layers, self.report = model, recipe, layers, report
        check_whole(recipe, layers)
        self.run = Run(model, recipe, layers, report)
        self.finished = self._deployed = False
        self._expert_masks: dict[str, Tensor] = {}
        self._states = {name: layer.effective for name, layer in layers.items()}

    # ---- whose the layers are

    def _present(self, verb: str, some: bool = False) -> dict[str, NMWeight]:
        """The layers that are still sparse; raise ``RecipeError`` where a later handle has one, and unless ``some`` where one is dense."""
        present = {}
        for name, layer in self.layers.items():
            # a linear layer stays the same module whatever it becomes, and a stack of experts is another one each time
            now = layer.owner._modules.get(child_name(layer.key)) if isinstance(layer, StackedWeight) else layer
            state = getattr(now, "effective", None)  # a dense layer has none, and one that was made sparse again has another
            if state is not None and state is not self._states[name]:
                raise RecipeError(f"{verb}: this handle was replaced by a later prune_ or sparsify_; use the one that it returned.")
            if state is not None:
                present[name] = layer
            elif not some:
                raise RecipeError(
                    f"{verb}: layer {name!r} is dense again, by densify_ or a handle's remove(), or compressed, which ends this handle; "
                    "sparsify_ or prune_ the model again."
                )
        return present

    # ---- state

    @property
    def state(self) -> State:
        """The schedule's state: the dict in ``optimizer.param_groups[0]["nm_recipe"]``, plain values and 0-d tensors.

        Raises:
            RecipeError: no optimizer was attached yet.

        Example:
            >>> from nmkernels import sparsify_
            >>> model = nn.Linear(64, 64)
            >>> handle = sparsify_(model, "mdgf:2:4(total_steps=100)")
            >>> optimizer = handle.attach(torch.optim.AdamW(model.parameters()))
            >>> handle.state["t"].item()  # applied steps
            0.0
        """
        if not self.run.state:
            raise RecipeError("the handle has no state yet: call handle.attach(optimizer) first.")
        return self.run.state

    def state_dict(self) -> dict[str, Any]:
        """A copy of the schedule's state and of the held masks; of sharded weights this rank's part.

        ``optimizer.state_dict()`` holds all of it too, in a form that other numbers of ranks can load: save this one only if you do not
        save the optimizer.

        Raises:
            RecipeError: no optimizer was attached yet.

        Example:
            >>> from nmkernels import sparsify_
            >>> model = nn.Linear(64, 64)
            >>> handle = sparsify_(model, "srste:2:4")
            >>> optimizer = handle.attach(torch.optim.AdamW(model.parameters()))
            >>> list(handle.state_dict())
            ['nm_recipe']
        """
        if not self.finished:
            self._present("state_dict")
        return {STATE_KEY: copy.deepcopy({**self.state, **self.run.save()})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what ``state_dict`` returned; attach an optimizer before.

        Raises:
            CheckpointError: it belongs to another recipe or pattern, to other layers, or is not of a handle. Nothing has changed then.
            RecipeError: no optimizer was attached yet.

        Example:
            >>> from nmkernels import sparsify_
            >>> model = nn.Linear(64, 64)
            >>> handle = sparsify_(model, "asp:2:4")
            >>> optimizer = handle.attach(torch.optim.AdamW(model.parameters()))
            >>> handle.load_state_dict(handle.state_dict())
        """
        if STATE_KEY not in state_dict:
            raise CheckpointError(f"this is not a handle's state dict: it has no {STATE_KEY!r}.")
        if not self.run.attachments:
            raise RecipeError("the handle has no optimizer yet: call handle.attach(optimizer) first.")
        driver = self.run.attachments[-1]
        self.run.check(state_dict[STATE_KEY], driver.group)
        begin(driver, copy.deepcopy(state_dict[STATE_KEY]))

    # ---- attach

    def attach(self, *optimizers: torch.optim.Optimizer, forms: str = "forward") -> Any:
        """Hook the recipe into one or several optimizers and return them: one as it came, several as a tuple.

        The hooks run inside ``optimizer.step()``, after unscaling, accumulation and clipping, also with a closure or a ``GradScaler``.
        Give several optimizers in the order in which they step: the last one that owns a sparse weight drives the schedule. Parameter
        groups that are added later take part. Called again, for a second phase of training for instance, it continues: schedule and masks
        stay, the last of the new optimizers drives the schedule, and earlier ones stay attached until ``detach``.

        Args:
            optimizers: of torch, or wrappers of one.
            forms: what makes the forms of the effective weights that GEMMs read, packed ones among them. ``"forward"``: the first forward
                pass after a step. ``"step"``: on a GPU the step itself, which then reads each weight once instead of twice, for
                ``MaskedAdamW`` and the 2:4 weights for which ``nm.ops.masked_adamw_pack_`` has a kernel; all others, and CPUs, are as
                before. **You promise** that nothing else writes those weights between ``step()`` and the next forward pass (with a
                ``GradScaler``, from one forward pass to the next) without a call of ``handle.refresh()``; optimizers, and writes that count
                a version, are seen all the same. Weights that were written as a whole, as by an EMA swap through ``.data``, are noticed on
                the GPU and made again, and a warning follows. A backward pass after the step that follows its forward pass raises.

        Raises:
            RecipeError: ``forms`` is unknown, or ``"step"`` comes without ``MaskedAdamW``; one is not an optimizer, none of them updates a
                sparse weight, one drives another model's recipe, the recipe cannot run with it, or it cannot choose its masks.
            CheckpointError: the optimizer has loaded the state of another recipe. Nothing is changed then.

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
        self._present("attach")
        attach(self.run, tuple(dict.fromkeys(map(unwrapped, optimizers))), forms)
        return optimizers[0] if len(optimizers) == 1 else optimizers

    def detach(self, *optimizers: torch.optim.Optimizer) -> None:
        """Take the recipe out of some of the attached optimizers, or of all; schedule and masks stay as they are.

        Of the remaining optimizers the last one drives the schedule. With none left no mask is held and no step is counted until ``attach``
        is called again, which continues.

        Raises:
            RecipeError: one of them is not attached.

        Example:
            >>> from nmkernels import sparsify_
            >>> model = nn.Linear(64, 64)
            >>> handle = sparsify_(model, "srste:2:4")
            >>> optimizer = handle.attach(torch.optim.AdamW(model.parameters()))
            >>> handle.detach()
            >>> "nm_recipe" in optimizer.param_groups[0]
            False
        """
        attached = self.run.attachments
        parts = [a for o in map(unwrapped, optimizers) for a in attached if a.optimizer is o]
        if len(parts) < len(optimizers):
            raise RecipeError("detach: one of the optimizers is not attached to this handle.")
        for attachment in parts or list(attached):
            detach(attachment)
        if attached:
            take_over_schedule(attached[-1])

    def renew_masks(self) -> None:
        """Take from the present weights what the recipe took from earlier ones: masks, S-STE's scale, learned logits, channel order.
        SLoPe's adapters add nothing from then on, until they are trained again: they belonged to the earlier weights. LBC begins again with
        equal scores and all combinations, so there must be stages left to remove them.

        For weights that were loaded in the middle of a run, where masks otherwise stay (so that weights can be rewound under the same
        mask). The schedule continues. Before ``attach`` there is nothing to renew: it takes everything from the weights that it then finds.

        Raises:
            RecipeError: the recipe is finished, or cannot start from the present weights.

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
        self._present("renew_masks")
        reshard(self.model)
        if self.run.state:
            self.run.renew("renew_masks", overwrite=True)

    # ---- watching

    def metrics(self) -> dict[str, Tensor]:
        """Metrics of the last optimizer step, 0-d tensors by name; ``.item()`` waits for the device, this call does not.

        * ``density``: non-zeros of the effective weights / maskable weights, from N/M to 1.
        * ``flip_rate``: mask bits changed by the update of the weights / maskable weights; a swap within a group counts 2. What a schedule
          changes, such as SdGf's frames, does not count. NaN before ``attach``.
        * ``phase``: 0 dense, 1 mask learning, 2 fixed mask.
        * ``decay_ratio``: λ Σ|w| / Σ|g| over the pruned weights, λ that of the next step: far below 1 the decay hardly matters. NaN before
          ``attach``.
        * ``max_update``: the largest |m̂/D| before any clamp; only with ``MaskedAdamW``.
        * the recipe's own: ``switch_step`` of STEP, ``flow`` of MdGf, ``kept_gain`` of ASP with ``permute`` and others.

        Example:
            >>> from nmkernels import sparsify_
            >>> model = nn.Linear(64, 64)
            >>> handle = sparsify_(model, "srste:2:4")
            >>> optimizer = handle.attach(torch.optim.AdamW(model.parameters()))
            >>> model(torch.randn(8, 64)).sum().backward()
            >>> optimizer.step()
            >>> round(handle.metrics()["density"].item(), 2)
            0.5
        """
        self._present("metrics")
        if not self.run.state and not self.finished:
            self.run.guards.warn_of_gradients("metrics", attached=False)
        if not self.finished:
            self.run.check_weights("metrics", waits=False)
        run, stage, state = self.run, self.run.stage, self.run.state
        phase, counting = torch.tensor(stage.phase), [a for a in run.attachments if a.stats is not None]
        # the counts of the last step are out of date once something else has written the weights; held masks do not prevent that
        outdated = not counting or stage.held_mask or bool(run.guards.written(run.layers))
        # users call this on one rank only, where a collective would wait for ever: metrics of sharded layers are of the last step
        of_layers = run.shard_metrics if run.sharded else run.metrics(density=outdated)
        if not counting:
            # without a state no optimizer was ever attached, and nothing was counted
            none = torch.full((), 0.0 if state else torch.nan, dtype=torch.float64)
            return {"flip_rate": none, "density": of_layers.get("density", none), "phase": phase, "decay_ratio": none.clone()}
        numel = sum(a.numel for a in counting)
        total: Tensor = functools.reduce(merge_stats, [a.stats for a in counting if a.stats is not None])
        sums = dict(zip(ops.STATS, total, strict=True))
        special = {**run.recipe.values(state), **of_layers, **run.hooks.metrics}
        decayed = special.get("decay", stage.rule.decay) * sums["pruned_abs"] / sums["pruned_grad_abs"]
        return {
            "flip_rate": sums["flips"] / numel,
            "density": sums["nonzeros"] / numel,
            "phase": phase,
            "decay_ratio": torch.where(sums["pruned_grad_abs"] > 0, decayed, 0.0),
            **special,
            **({"max_update": sums["max_update"]} if any(a.masked is not None for a in counting) else {}),
        }

    @torch.no_grad()
    def expert_metrics(self) -> dict[str, dict[str, Tensor]]:
        """Metrics of each expert, tensors ``(E,)`` by the name of the stack's Parameter; empty without stacked experts.

        * ``density``: non-zeros of the expert's effective weight / its weights.
        * ``flip_rate``: mask bits changed since the last call / its weights, NaN at the first one. Each call stores the masks for the next
          one, a byte per weight. Weight decay may change the mask of an expert that got no token.

        Example:
            >>> from nmkernels import sparsify_
            >>> sparsify_(nn.Linear(64, 64), "srste:2:4").expert_metrics()
            {}
        """
        self._present("expert_metrics")
        result: dict[str, dict[str, Tensor]] = {}
        for name, layer in self.layers.items():
            if not isinstance(layer, StackedWeight):
                continue
            mask, before = layer.by_expert(layer.kept()), self._expert_masks.get(name)
            size = mask[0].numel()
            flips = mask.new_full(mask.shape[:1], torch.nan, dtype=torch.float64)
            if before is not None:
                flips = (mask ^ before).flatten(1).sum(1).double() / size
            used = layer.by_expert(layer.effective_weight())
            result[name] = {"density": used.ne(0).flatten(1).sum(1).double() / size, "flip_rate": flips}
            self._expert_masks[name] = mask
        return result

    def calibrate(self) -> AbstractContextManager[None]:
        """Collect the norms of the layers' inputs in the forward passes run inside, for ``ASP(score="wanda")``; call it before ``attach``.

        Tokens with NaN or infinite values are left out, with a warning; another one lists the layers that got fewer than M tokens. Under
        ``torch.distributed`` all ranks enter it, and their norms are added up.

        Example:
            >>> from nmkernels import sparsify_
            >>> model = nn.Linear(64, 64)
            >>> handle = sparsify_(model, 'asp:2:4(score="wanda")')
            >>> with handle.calibrate():
            ...     _ = model(torch.randn(32, 64))
            >>> optimizer = handle.attach(torch.optim.AdamW(model.parameters()))
        """
        self._present("calibrate")
        return self.run.held.inputs.collecting()

    # ---- the end

    @contextmanager
    def deployable(self) -> Iterator[nn.Module]:
        """Inside, the model computes what ``finish()`` would leave; outside, training continues as before. Yields the model.

        Weights and optimizer stay as they are, so evaluate and predict inside; do not train there.

        Example:
            >>> from nmkernels import sparsify_
            >>> model = nn.Linear(64, 64)
            >>> handle = sparsify_(model, "step:2:4(total_steps=100)")  # dense at first
            >>> with handle.deployable():
            ...     ops.is_nm(model.effective_weight(), "2:4")
            True
        """
        if self.finished or self._deployed:
            yield self.model
            return
        self._present("deployable")
        lost = self.run.check_weights("deployable")
        reshard(self.model)
        present = {name: (layer.transform, layer.plan) for name, layer in self.layers.items()}
        try:
            self._deployed = True
            self.run.hooks.use_final_form()
            for layer in self.layers.values():
                layer.effective.doubt()
                if self.recipe.final == "dense":
                    layer.use(None, STRAIGHT_THROUGH)
            if self.recipe.final != "dense" and not self.run.stage.held_mask:
                for name, transform in self.run.final_transforms(self.layers).items():
                    # emulated roundings and packed GEMMs belong to training; any other plan computes the same forward pass
                    plan = present[name][1]
                    self.layers[name].use(transform, plan if plan.fp8 is None and plan.fprop == "dense" else STRAIGHT_THROUGH)
            for name in lost:
                self.layers[name].use(self.run.held.final_mask(name), STRAIGHT_THROUGH)
            yield self.model
        finally:
            reshard(self.model)
            for name, layer in self.layers.items():
                layer.use(*present[name])
                layer.effective.doubt()
            self.run.hooks.enter(self.run.stage)
            self._deployed = False

    def refresh(self) -> None:
        """Make W̃ again from the present weights at the next forward pass, whatever has written them.

        Only for one case: on a GPU, after a write through ``.data`` in training mode between two forward passes of one optimizer step. All
        other writes are noticed.

        Example:
            >>> from nmkernels import sparsify_
            >>> model = nn.Linear(64, 64)
            >>> handle = sparsify_(model, "srste:2:4")
            >>> _ = model.weight.data.mul_(2.0)
            >>> handle.refresh()
        """
        self._present("refresh")
        reshard(self.model)
        for layer in self.layers.values():
            layer.effective.release()
            layer.adopt_parameter()

    def finish(self, allow_unused: bool = False) -> nn.Module:
        """End the recipe and return the model in its final form, which ``recipe.final`` names.

        ``"nm"``: every weight is exactly N:M, which is checked; layers stay sparse layers, ready for ``compress_``, until ``remove()``.
        ``"nm+adapter"``: the same, with adapters, the Parameters ``nm_left`` and ``nm_right``. ``"dense"``: dense layers again.
        Hooks are removed. It warns of a schedule that was cut short, of training without an attached optimizer, and of layers that never
        ran, which are treated like the others.

        Args:
            allow_unused: do not warn of layers that never ran, for instance when a model pruned elsewhere is adopted without running it.

        Raises:
            RecipeError: a weight is not finite, has no data (on the meta device), or cannot be pruned as the recipe requires. Nothing has
                changed then.

        Example:
            >>> from nmkernels import sparsify_
            >>> model = sparsify_(nn.Linear(64, 64), "asp:2:4").finish(allow_unused=True)
            >>> ops.is_nm(model.weight.detach(), "2:4")
            True
        """
        if self.finished:
            return self.model
        self._present("finish")
        check_own("finish", self.layers)
        idle, stepped = [], self.run.max_applied_steps > 0
        for name, layer in self.layers.items():
            if layer.master.is_meta and self.recipe.final != "dense":
                raise RecipeError(
                    f"finish: the weight of layer {name!r} is on the meta device, or offloaded, so there is nothing to prune. Load the "
                    "weights first: model.to_empty(device=...), then model.load_state_dict(...)."
                )
            stepped = stepped or layer.stepped
            if not layer.ran:
                idle.append(name)
        reshard(self.model)  # what FSDP2 left unsharded is a copy
        if idle and not allow_unused:
            fate = "made dense again" if self.recipe.final == "dense" else "pruned"
            warnings.warn(
                f"finish: these layers never ran and are {fate} like the others: {', '.join(idle)}. Either the model did not call them, or "
                "their parent reads the weight itself, so that it was trained dense; leave out such layers with filter_fn. "
                "finish(allow_unused=True) does not warn.",
                stacklevel=2,
            )
        self.run.check_weights("finish")
        if not stepped:
            self.run.guards.warn_of_gradients("finish", attached=bool(self.run.attachments))
        if early := self.run.not_ready_reason():
            warnings.warn(
                f"finish: the recipe {self.recipe.name} {early}, so the model has not been trained in the form that it gets now; "
                "total_steps is probably larger than the number of steps taken.",
                stacklevel=2,
            )
        if self.recipe.final == "dense":
            self.remove()
            self.run.hooks.use_final_form()
        else:
            self.run.hooks.use_final_form()
            self._make_nm(self.run.final_transforms(name for name, layer in self.layers.items() if layer.as_pruned() is None))
            self._end()
        return self.model

    def remove(self) -> nn.Module:
        """Turn every layer back into the dense layer it was, with its weight as it is, and remove every hook; returns the model.

        A low-rank adapter that has learned something is folded into the weight, W + (L R)ᵀ / r, which is then no longer N:M. To keep only
        the N:M weight, zero ``nm_right`` before. The handle cannot be used again: ``sparsify_`` the model again to train on.

        Example:
            >>> from nmkernels import sparsify_
            >>> model = nn.Sequential(nn.Linear(64, 64))
            >>> type(sparsify_(model, "srste:2:4").remove()[0]).__name__
            'Linear'
        """
        check_own("remove", self._present("remove", some=True), "weight", "bias")  # densify_ may have made some dense
        reshard(self.model)
        self._end()
        return _make_dense_(self.model, [m for m in self.model.modules() if isinstance(m, NMWeight)])

    def _end(self) -> None:
        for attachment in list(self.run.attachments):
            detach(attachment)
        self.run.end()
        self.finished = True

    @torch.no_grad()
    def _make_nm(self, transforms: dict[str, WeightTransform]) -> None:
        """Replace the weight of each layer in ``transforms`` by its transform's W̃; the others are what ``prune_`` has left. Remove from all
        layers what only training needed."""
        for name, layer in self.layers.items():
            if anywhere(layer.parameter, not bool(torch.isfinite(layer.master).all())):
                raise RecipeError(f"finish: the weight of layer {name!r} has NaN or infinite values; training diverged before this point.")
        pruned, orders = {}, {}
        for name, transform in transforms.items():
            layer, columns = self.layers[name], transform.traits.columns
            weight = transform(layer.master.detach(), *layer._extras(transform))
            order = None if columns is None else columns(weight.shape[1])
            used = weight if order is None else weight[:, order.to(weight.device)]
            if anywhere(layer.parameter, not ops.is_nm(used, layer.pattern)):
                raise RecipeError(f"finish: layer {name!r} is not {layer.pattern} after pruning; please report this bug.")
            pruned[name], orders[name] = weight, order
        for name, layer in self.layers.items():
            layer.finish(pruned.pop(name, None), orders.get(name))
