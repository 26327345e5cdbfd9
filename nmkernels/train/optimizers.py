"""How torch calls the two halves of ``step.py``: hooks, closures, scalers, ZeRO, wrappers, and what a checkpoint does to an optimizer.

The recipe's state is ``param_groups[0]["nm_recipe"]``: trainers that rebuild a state dict drop unknown top-level keys, but not entries of a
parameter group. ``checkpoint.py`` has the saved form.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..autograd.transforms import WEIGHT
from ..layouts import MATRICES, ORDERS, REDUCED
from ..nn.sharding import check_mesh, connect, data_dims
from ..nn.weight import NMWeight
from ..optim.adamw import MaskedAdamW
from ..optim.rules import PLAIN, Target
from ..pattern import RecipeError, ShapeError
from ..recipes.contract import Recipe, State
from ..shards import is_sharded, total
from . import gradients, step
from .ahead import Ahead, makes_ahead
from .checkpoint import HELD, restored, written
from .layer_names import listed
from .run import Attachment, Run, group_of

STATE_KEY = "nm_recipe"
FIRST = {"step": 0, "mu_product": 1}
"""What an optimizer counts in the state of a parameter, and where it begins."""


# ---- attaching


def attach(run: Run, optimizers: Sequence[torch.optim.Optimizer], forms: str) -> None:
    """Have ``optimizers``, of which the last one that updates a layer drives the schedule, step the layers of ``run`` from now on.

    After an error nothing has changed.
    """
    check_flat(run.layers)
    # sharded layers make W̃ from this rank's shard, and no rank holds more than that
    connect(run.model, list(run.layers.values()))
    check_whole(run.recipe, run.layers)
    check_shards(run.layers)
    run.attached_shards = run.sharded
    before, resumed = list(run.attachments), bool(run.state)
    known = {a.optimizer: a for a in before}
    owners = [(optimizer, layers) for optimizer in optimizers if (layers := owned(optimizer, run.layers))]
    _check(run, owners, (*optimizers, *known), known, forms)
    last, layers = owners[-1]
    saved, loaded = None if last in known else last.param_groups[0].get(STATE_KEY), None
    if saved is run.state:  # model, handle and optimizer were copied together
        saved = None
    if saved is not None:
        states = {name: o.state.get(layer.parameter) or {} for o, of_o in owners for name, layer in of_o.items()}
        loaded = restored(saved, run.layers, {name: state[HELD] for name, state in states.items() if HELD in state})
        run.check(loaded, group_of(last, layers))
    elif run.stage.rule.frozen and run.state:
        moments = inner(last).state
        if missing := [name for name, layer in layers.items() if "exp_avg_sq" not in moments.get(layer.parameter, {})]:
            raise RecipeError(
                f"attach: {run.recipe.name} has frozen the second moment, and this {type(last).__name__} has none for {listed(missing)}. "
                "Give it the state of the one before: optimizer.load_state_dict(earlier.state_dict())."
            )
    try:
        run.attachments[:] = [a for a in before if a.optimizer not in optimizers]
        # one without a sparse weight may get some with a later group, but drives no schedule
        for optimizer in sorted(optimizers, key=lambda o: bool(owned(o, run.layers))):
            a = known.get(optimizer) or _hook(run, optimizer)
            run.attachments.append(a)
            _take_layers(a)
            a.forms = forms
            for target in a.masked.targets.values() if a.masked is not None else ():
                target.forms = None
        driver = run.attachments[-1]
        if resumed and loaded is None:
            take_over_schedule(driver)
        else:
            if loaded is None:
                run.start("attach")  # weights may have been initialised since sparsify_
            begin(driver, loaded)
    except Exception:
        new = [a for a in run.attachments if a not in before]
        run.attachments[:] = [*before, *new]
        for a in new:
            detach(a)
        if saved is not None:
            last.param_groups[0][STATE_KEY] = saved
        if not resumed:
            run.reset()
        raise
    for i, a in enumerate(run.attachments):
        if a in before and a is not driver:  # later ones have the schedule, and the count of those layers that they update too
            a.optimizer.param_groups[0].pop(STATE_KEY, None)
            if any(name in other.layers for name in a.layers for other in run.attachments[i + 1 :]):
                a.stats = a.observed = None


def _hook(run: Run, optimizer: torch.optim.Optimizer) -> Attachment:
    a = Attachment(run, optimizer, inner(optimizer), masked_adamw(optimizer))
    a.removers = [
        # compiling optimizer.step would bake the schedule's numbers into the graph; the optimizer's own step is compiled as ever
        optimizer.register_step_pre_hook(torch.compiler.disable(partial(_before, a))),
        optimizer.register_step_post_hook(torch.compiler.disable(partial(_after, a))),
        optimizer.register_state_dict_post_hook(partial(_after_state_dict, a)),
        optimizer.register_load_state_dict_pre_hook(partial(_before_load, a)),
        optimizer.register_load_state_dict_post_hook(partial(_after_load, a)),
        *(Ahead(a).watch(run.model) if makes_ahead(run) else ()),
    ]
    if not _watches:
        _watches.append(register_optimizer_step_post_hook(torch.compiler.disable(on_foreign_step)))
    _attached.add(a)
    weakref.finalize(a, _stop_watching)
    return a


def _take_layers(a: Attachment) -> dict[str, NMWeight]:
    """Take over every layer whose weight the optimizer has, also in groups that were added since; returns the new ones."""
    a.size, layers = sum(len(group["params"]) for group in a.optimizer.param_groups), owned(a.optimizer, a.run.layers)
    a.unsharded = [layer for layer in layers.values() if not is_sharded(layer.weight)]
    new = {name: layer for name, layer in layers.items() if name not in a.layers}
    a.layers |= new
    for layer in new.values():
        layer.effective.attached = True
        if a.masked is not None:
            a.masked.targets[layer.parameter] = Target(layer.pattern, layer.layout, partial(lambda x: x.penalties().get(WEIGHT), layer))
    a.revision = 0  # the next step gives the targets the patterns of the stage
    return new


def begin(a: Attachment, state: State | None) -> None:
    """Drive the schedule from ``state`` on; None: from the recipe's beginning, with the present weights."""
    fresh = state is None
    state = a.optimizer.param_groups[0][STATE_KEY] = a.run.first_state(a.group) if state is None else state
    a.run.load(state)
    if fresh:
        a.run.watch()
    for other in a.run.attachments:
        mark_held_masks(other)


def take_over_schedule(a: Attachment) -> None:
    """Drive the schedule that another attachment has driven until now."""
    a.optimizer.param_groups[0][STATE_KEY] = a.run.state
    mark_held_masks(a)


def detach(a: Attachment) -> None:
    """Remove every trace of the recipe from the optimizer and from the layers that no other attachment has."""
    if a in a.run.attachments:
        a.run.attachments.remove(a)
    _attached.discard(a)
    _stop_watching()
    for remover in a.removers:
        remover.remove()
    for optimizer in (a.optimizer, a.updating):  # ZeRO copies what stands in the groups of the one to the other
        for group in optimizer.param_groups[:1]:
            group.pop(STATE_KEY, None)
        for layer in a.layers.values():
            optimizer.state.get(layer.parameter, {}).pop(HELD, None)
    for name, layer in a.layers.items():
        if not any(name in other.layers for other in a.run.attachments):
            layer.detach()
    if a.masked is not None:
        a.masked.forget()


# ---- steps


def _before(a: Attachment, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    a.first_step = not a.updating.state
    if a.first_step and _is_rehearsal(optimizer):
        a.rehearsal = True
        if a.masked is not None:
            a.revision, a.masked.rule = 0, PLAIN
        return None
    if a.stats is None and any(is_sharded(layer.weight) for layer in a.unsharded):
        raise RecipeError(
            "step: the model was sharded after handle.attach. Call fully_shard or parallelize_module (accelerator.prepare) first, then "
            "build the optimizer and attach it."
        )
    size = 0
    for group in optimizer.param_groups:
        size += len(group["params"])
    if size != a.size:
        _join(a)
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    prepare = getattr(a.optimizer, "prepare", gradients.prepare) if step.before(a, closure is not None) else None
    idle = False
    for layer in a.run.layers.values():
        idle = idle or bool(layer.idle)
    if closure is None:
        if idle:
            gradients.remove_idle(a)
        if prepare is not None:
            prepare(a)
        return None

    # with a closure backward runs inside it, after this hook: the gradients exist only then
    def wrapped() -> Any:
        loss = closure()
        if idle:
            gradients.remove_idle(a)
        if prepare is not None:
            prepare(a)
        return loss

    return ((args[0], wrapped, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": wrapped})


def _after(a: Attachment, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if a.first_step:
        mark_held_masks(a)
    if a.rehearsal:
        a.rehearsal = False
        for state in a.updating.state.values():
            for key in FIRST.keys() & state.keys():
                count = state[key]
                state[key] = torch.full_like(count, FIRST[key]) if isinstance(count, Tensor) else type(count)(FIRST[key])
        return
    if a.run.attachments[-1:] == [a]:
        # ZeRO replaces the groups by the loaded ones after the hooks of a load
        optimizer.param_groups[0][STATE_KEY] = a.run.state
    step.after(a)


def _join(a: Attachment) -> None:
    """Take over the layers of parameter groups that were added since the last step."""
    _check_class(a.run.recipe, a.optimizer)
    if a.layers and not owned(a.optimizer, a.run.layers):
        raise RecipeError(
            "step: the optimizer has other parameters than at attach, none of them a sparse layer's weight, as after deepspeed.initialize. "
            "Call nm.integrations.deepspeed.attach(handle, engine) after that, instead of handle.attach."
        )
    new = _take_layers(a)
    a.first_step = a.first_step or bool(new)


def _is_rehearsal(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the coming step trains nothing: ``torch.distributed.checkpoint`` makes a step with zero gradients at learning rate 0, to
    have a fresh optimizer fill its state."""
    groups = optimizer.param_groups
    if any(float(group.get("lr", 1.0)) != 0.0 for group in groups):
        return False
    grads = [p.grad for group in groups for p in group["params"] if p.grad is not None]
    sharded = [grad for grad in grads if is_sharded(grad)]
    if not grads or any(bool(grad.any()) for grad in grads if not is_sharded(grad)):
        return False
    return not sharded or total(lambda grad: grad.count_nonzero(), sharded).item() == 0


_attached: weakref.WeakSet[Attachment] = weakref.WeakSet()
_watches: list[Any] = []
"""The hook by which attachments see the steps of all optimizers of the process; it is there only while there are attachments."""


def on_foreign_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Any optimizer of the process has stepped: no copy of W̃ is used again unchecked, and one that is not attached is counted."""
    for a in list(_attached):
        packed = a.masked.packed if a.masked is not None and optimizer in (a.optimizer, a.updating) else {}
        for layer in a.layers.values():
            if not packed or layer.parameter not in packed:  # by this very step
                layer.effective.doubt()
        attached = a.run.attachments[-1:] != [a] or any([optimizer in (b.optimizer, b.updating) for b in a.run.attachments])
        if not attached and (layers := owned(optimizer, a.run.layers)):
            a.run.guards.foreign_step(type(optimizer).__name__, layers)


def _stop_watching() -> None:
    """Remove the hook if nothing is attached any more."""
    if _watches and next(iter(_attached), None) is None:
        hooks = _watches[0].hooks_dict_ref()
        # an attachment may be collected while torch iterates over the hooks, when only the last one can be removed
        if hooks and next(reversed(hooks)) == _watches[0].id:
            _watches.pop().remove()


# ---- saving and loading


def holding(a: Attachment) -> dict[str, NMWeight]:
    """The layers whose held masks are saved in the optimizer's state of their weights: trained ones, without ZeRO, which shards it.

    Not in an empty state, since torch's optimizers take a weight whose state has something to have been stepped.
    """
    if not a.run.holds or a.updating is not a.optimizer:
        return {}
    # load_state_dict(assign=True) gives a layer another Parameter than the one that this optimizer updates
    trained = {id(p) for group in a.optimizer.param_groups for p in group["params"] if p.requires_grad}
    layers = {name: layer for name, layer in a.layers.items() if id(layer.parameter) in trained}
    return {name: x for name, x in layers.items() if a.optimizer.state.get(x.parameter) or is_sharded(x.parameter)}


def mark_held_masks(a: Attachment) -> None:
    """Put a placeholder for its held masks into the optimizer's state of each weight, as some loaders take only keys that are there.

    Not into an empty state, which the optimizer has yet to fill.
    """
    state, layers = a.optimizer.state, holding(a)
    for name, layer in a.layers.items():
        moments = state.get(layer.parameter, {})
        moments.pop(HELD, None)  # loaded before the optimizer was attached
        if moments and name in layers:
            moments[HELD] = torch.zeros((), dtype=torch.uint8)
        elif not moments:
            state.pop(layer.parameter, None)


def _join_added(a: Attachment) -> None:
    """Take over the layers of parameter groups that were added since the last step, of which a state dict has masks too."""
    if sum(len(group["params"]) for group in a.optimizer.param_groups) != a.size:
        _join(a)


def _after_state_dict(a: Attachment, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    _join_added(a)
    run, layers, drives = a.run, holding(a), a.run.attachments[-1:] == [a]
    every = {name: layer for other in run.attachments for name, layer in holding(other).items()} if drives else layers
    text, masks = written(run.save(), run.layers, every)
    if drives:
        state_dict["param_groups"][0][STATE_KEY] = text
    keys = _keys(optimizer, state_dict)
    for name, layer in layers.items():
        key = keys[layer.parameter]
        state_dict["state"][key] = {**state_dict["state"].get(key, {}), HELD: masks[name]}


def _before_load(a: Attachment, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    _join_added(a)
    keys, states = _keys(optimizer, state_dict), dict(state_dict["state"])
    a.loaded_masks, a.loaded = {}, None
    for name, layer in a.layers.items():
        moments = states.get(keys.get(layer.parameter))
        if moments and HELD in moments:
            # torch would cast them to the weight's dtype
            a.loaded_masks[name] = moments[HELD]
            states[keys[layer.parameter]] = {key: value for key, value in moments.items() if key != HELD}
    state_dict["state"] = {key: moments for key, moments in states.items() if moments != {}}
    saved = state_dict["param_groups"][0].get(STATE_KEY)
    if a.run.attachments[-1:] == [a] and saved is not None:
        masks = {name: bits for other in a.run.attachments for name, bits in other.loaded_masks.items()}
        a.loaded = restored(saved, a.run.layers, masks)
        a.run.check(a.loaded, a.group)


def _after_load(a: Attachment, optimizer: torch.optim.Optimizer) -> None:
    if a.run.attachments[-1:] != [a]:
        mark_held_masks(a)
        return
    # from a state of plain AdamW the recipe starts from its beginning with the loaded moments
    begin(a, a.loaded)
    a.loaded = None
    for other in a.run.attachments:
        other.loaded_masks = {}


def _keys(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[Tensor, Any]:
    """What ``state_dict`` calls the parameters; they are matched by position."""
    groups = zip(optimizer.param_groups, state_dict["param_groups"], strict=False)
    return {p: key for mine, theirs in groups for p, key in zip(mine["params"], theirs["params"], strict=False)}


# ---- kinds of optimizers


def owned(optimizer: torch.optim.Optimizer, layers: Mapping[str, NMWeight]) -> dict[str, NMWeight]:
    """Those of ``layers`` whose weights ``optimizer`` has, frozen ones too: they may be unfrozen later."""
    params = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return {name: layer for name, layer in layers.items() if id(layer.parameter) in params}


def unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer whose step hooks run: this one, also ZeRO, or the one inside a wrapper such as Accelerate's or Lightning's."""
    if type(optimizer).__module__.startswith("deepspeed."):
        raise RecipeError(
            "attach: DeepSpeed's optimizer updates flat copies of the weights. Call nm.integrations.deepspeed.attach(handle, engine) after "
            "deepspeed.initialize; that knows ZeRO-1 and ZeRO-2."
        )
    inside = optimizer
    while "_optimizer_step_pre_hooks" not in getattr(inside, "__dict__", {}):
        # a learning rate scheduler has an optimizer as well, but nothing to step it by
        wraps = all(hasattr(inside, name) for name in ("step", "zero_grad", "param_groups"))
        inside = next((vars(inside)[name] for name in ("optimizer", "_optimizer") if name in vars(inside)), None) if wraps else None
        if inside is None:
            several = "; give several one by one, attach(first, second)" if isinstance(optimizer, (list, tuple, dict)) else ""
            raise RecipeError(
                f"attach: {type(optimizer).__name__} is neither an optimizer with torch's step hooks nor a wrapper with one in its "
                f"attribute 'optimizer'. Give a torch.optim.Optimizer{several}."
            )
    if getattr(inside, "_overlap_with_ddp", False):
        raise RecipeError(
            "attach: ZeroRedundancyOptimizer updates inside backward, without step hooks, with overlap_with_ddp=True; leave it out."
        )
    return inside


def inner(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that updates the weights and keeps their moments: that of this rank's share inside ZeRO, else ``optimizer``."""
    zero = any(kind.__name__ in ("ZeroRedundancyOptimizer", "ZeroOptimizer") for kind in type(optimizer).__mro__)
    return optimizer.optim if zero else optimizer  # type: ignore[attr-defined]


def masked_adamw(optimizer: torch.optim.Optimizer) -> MaskedAdamW | None:
    """The ``MaskedAdamW`` that updates every weight of ``optimizer``, so that it can mask and count; None with ZeRO over several ranks."""
    updating = inner(optimizer)
    alone = updating is optimizer or getattr(optimizer, "world_size", 0) == 1  # DeepSpeed's steps flat copies, also alone
    return updating if alone and isinstance(updating, MaskedAdamW) else None


# ---- checks


def _check(run: Run, owners: Sequence[tuple[torch.optim.Optimizer, Any]], every: Sequence[Any], known: Iterable[Any], forms: str) -> None:
    """Raise ``RecipeError`` unless ``owners`` update something, those not ``known`` fit the recipe, all make ``forms``, and ``every``
    optimizer together trains what the recipe learns in addition to the weights."""
    if not owners:
        raise RecipeError(
            "attach: none of the optimizers updates a weight of the sparse layers. Build it from model.parameters() of the very model "
            "given to sparsify_ (before a wrapper copies the parameters). If those layers are left out because they are frozen, attach "
            "the optimizer after adding them to it."
        )
    for optimizer in (optimizer for optimizer, _ in owners if optimizer not in known):
        _check_class(run.recipe, optimizer)
        if any(a.optimizer is optimizer and a.layers for a in _attached):
            raise RecipeError("attach: the optimizer drives the recipe of another model already; give each model its own optimizer.")
    if forms not in ("forward", "step"):
        raise RecipeError(f"attach: forms={forms!r} is not known; it is 'forward' or 'step'.")
    unfit = next((optimizer for optimizer, _ in owners if masked_adamw(optimizer) is None), None)
    if forms == "step" and unfit is not None:
        raise RecipeError(
            f"attach: forms='step' needs an optimizer that packs in its own pass, which {type(unfit).__name__} does not. Leave it out, "
            "or take MaskedAdamW: optimizer = handle.attach(nm.optim.MaskedAdamW(model.parameters(), lr=...), forms='step')."
        )
    trained = {id(p) for optimizer in every for group in optimizer.param_groups for p in group["params"]}
    missing = [f"{name}.{key}" for name, layer in run.layers.items() for key, p in layer.learned().items() if id(p) not in trained]
    if missing:
        names = ", ".join(missing[:3]) + (" and more" if len(missing) > 3 else "")
        raise RecipeError(
            f"attach: no optimizer has {names}, which the recipe learns in addition to the weights. Build it from model.parameters() after "
            "sparsify_, as recipe.optimizer(model.parameters()) does."
        )


def _check_class(recipe: Recipe, optimizer: torch.optim.Optimizer) -> None:
    """Raise ``RecipeError`` if ``recipe`` cannot run with optimizers of this class."""
    wanted, updating = recipe.setup.optimizer, masked_adamw(optimizer) or optimizer
    if wanted is not None and not isinstance(updating, wanted):
        raise RecipeError(
            f"{type(recipe).__name__} {recipe.setup.needs}, which {type(updating).__name__} cannot do. Replace it in one line: optimizer = "
            f"handle.attach(nm.optim.{wanted.__name__}(model.parameters(), lr=...)). It takes AdamW's keywords and state."
        )


# ---- weights that can be trained


def check_own(verb: str, layers: Mapping[str, NMWeight], *keys: str) -> None:
    """Raise ``RecipeError`` where the weight of a layer, or another tensor of ``keys``, is computed from others."""
    for name, layer in layers.items():
        if reason := layer.computed(*keys):
            raise RecipeError(f"{verb}: layer {name!r} is not as sparsify_ left it: {reason}.")


def check_flat(layers: dict[str, NMWeight]) -> None:
    """Raise ``RecipeError`` where weights were made one flat tensor."""
    check_own("attach", layers)
    for name, layer in layers.items():
        module, key = layer.home
        weight = module._parameters.get(key)
        if weight is None or weight.dim() != len(ORDERS[layer.layout]):
            raise RecipeError(
                f"attach: the weight of layer {name!r} was flattened, as FullyShardedDataParallel (FSDP1) does. Use "
                "torch.distributed.fsdp.fully_shard, which keeps Parameters apart."
            )


def check_whole(recipe: Recipe, layers: dict[str, NMWeight]) -> None:
    """Raise ``RecipeError`` where ``recipe`` needs weights whole and those of ``layers`` are sharded."""
    why, name = recipe.setup.needs_whole, next((name for name, layer in layers.items() if is_sharded(layer.parameter)), None)
    if why and name is not None:
        raise RecipeError(
            f"{type(recipe).__name__} {why}, and the weight of layer {name!r} is sharded. Train it with DistributedDataParallel; or take a "
            "recipe that runs on shards, such as SR-STE, STEP, S-STE, MdGf, SdGf, FST, or ASP by magnitude."
        )


def check_shards(layers: dict[str, NMWeight]) -> None:
    """Raise ``ShapeError`` where shards cut the groups of a mask, ``RecipeError`` where a layer cannot be sharded."""
    for name, layer in layers.items():
        weight: Any = layer.parameter
        if not is_sharded(weight):
            continue
        if layer.layout not in MATRICES:
            raise RecipeError(
                f"attach: the weight of layer {name!r}, a {type(layer).__name__}, is sharded; only those of linear layers can be. Train "
                "it with DistributedDataParallel, leave it out of fully_shard, or out of sparsify_ with filter_fn."
            )
        check_mesh(f"attach: layer {name!r}", weight, data_dims(layer))
        splits = {"out": 1, "in": 1}  # over all dimensions of the mesh
        for dim, placement in enumerate(weight.placements):
            if not placement.is_replicate():
                splits["in" if placement.dim == REDUCED[layer.layout] else "out"] *= weight.device_mesh.size(dim)
        traits = layer.final.traits
        if traits.columns is not None and splits["in"] > 1:
            raise ShapeError(
                f"attach: layer {name!r} is split along in, between weights of one group: the recipe's groups are not adjacent. "
                "Split out (fully_shard, ColwiseParallel), or leave the layer out with filter_fn."
            )
        for (which, parts), size in zip(splits.items(), layer.shape, strict=True):
            if (which == "in" or traits.transposable) and parts > 1 and size % (parts * layer.pattern.m):
                raise ShapeError(
                    f"attach: layer {name!r} is sharded {parts} ways along {which}={size}, which cuts groups of M={layer.pattern.m}: a "
                    f"multiple of {parts * layer.pattern.m} is needed. Shard the other dimension, on fewer ranks, or leave the layer out "
                    "with filter_fn."
                )
