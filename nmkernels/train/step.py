"""What happens in ``optimizer.step()``, on one page, for each optimizer of a run:

1. ``before`` the update. Weights that something else has written are noticed. ``MaskedAdamW`` gets the rule and held masks of the stage;
   for other optimizers ``gradients.prepare`` masks or decays the gradients.
2. The optimizer updates its parameters.
3. ``after`` it. The method may do something of its own, the sums over the step are taken, and every copy of W̃ is out of date: the next
   forward pass makes it again.
4. After the last optimizer the schedule advances. A stage may begin, the numbers that transforms read are written, and held tensors are
   chosen again after every k-th step.

How torch calls ``before`` and ``after``, and what else may happen to an optimizer, is in ``optimizers.py``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..autograd.transforms import WeightTransform
from ..backends.streams import capturing
from ..nn.weight import NMWeight
from ..optim.adamw import MaskedAdamW, merge_stats
from ..recipes.contract import Hooks, Observed
from ..shards import is_sharded, own_rank, summed
from . import gradients
from .ahead import bits_of
from .layer_names import listed
from .run import Attachment

APPLIED, FLIPS, NONZEROS = (ops.STATS.index(name) for name in ("applied", "flips", "nonzeros"))


def before(a: Attachment, closure: bool) -> bool:
    """An optimizer is about to step, with or without a ``closure``.

    A ``MaskedAdamW`` gets the rule and the masks of the stage, by which it masks, decays and counts in its own pass over memory. Where it
    cannot, and for every other optimizer, this returns True: ``gradients.prepare`` must follow once the gradients exist.
    """
    run = a.run
    if run.guards.hashes and run.recording is None:
        run.renew_if_replaced("step")
        run.guards.load()
    elif run.held.masks and run.recording is None and (written := run.guards.written(a.layers)):
        run.find_lost("step", written)
    stage, transform = run.stage, run.stage.transform
    if stage.rule.frozen:
        _warn_of_young(a)
    if a.masked is None:
        a.own_pass = None
        return True
    # masks that stay until they are chosen again; MaskedAdamW reads them as bits
    holds = stage.held_mask or (stage.rule.masked and transform is not None and transform.traits.holds_mask)
    holds = holds and (transform is None or type(transform).penalty is WeightTransform.penalty)
    a.own_pass = a.masked if holds or not (stage.held_mask or (transform is not None and transform.traits.own_mask)) else None
    if a.revision != run.revision:
        a.revision, rule = run.revision, stage.rule if a.own_pass is not None else replace(stage.rule, masked=False, decay=0.0)
        a.masked.rule = replace(rule, masked=True, fixed=True) if holds and stage.held_mask else rule
        for layer in a.layers.values():
            if layer.parameter in a.masked.targets:
                a.masked.targets[layer.parameter].pattern = layer.mask_pattern
    if holds or a.bits or a.forms == "step":
        # with a closure, the forward pass that reads the copies of W̃ is yet to come; what a hook of the recipe writes is not in them
        packs = a.forms == "step" and a.own_pass is not None and not closure and type(run.hooks) is Hooks and run.recording is None
        _give(a, a.masked, holds, packs)
    return a.own_pass is None


@torch.no_grad()
def after(a: Attachment) -> None:
    """An optimizer has stepped."""
    run, counting, found_inf = a.run, a.own_pass, getattr(a.optimizer, "found_inf", None)
    if type(run.hooks) is not Hooks:
        run.hooks.after_step(_updated(a), found_inf)
    if counting is not None and counting.stats is None:
        # only what is learned in addition to the weights had gradients, such as SLoPe's adapters
        counting = None
        gradients.take_part(a)
    if counting is None:
        stats = gradients.count(a, found_inf) if a.numel else None
    else:
        stats, a.numel = counting.stats, counting.stats_numel
    if run.recording is not None:
        run.recording.append((a, stats, a.numel, found_inf))
        return
    finish_step(a, stats, found_inf, None if counting is None else counting.packed)


def finish_step(a: Attachment, stats: Tensor | None, found_inf: Tensor | None, packed: dict[Tensor, int] | None = None) -> None:
    """What the host does after a step, of which these are the statistics; ``packed`` is ``MaskedAdamW.packed`` of an eager one."""
    run, a.due = a.run, True
    for layer in a.layers.values():
        layer.effective.drop()
        if not layer.stepped:
            layer.stepped, layer.effective.pruned = True, None
        if layer.gather is not None:
            layer.gather.fresh = False
        if packed and layer.parameter in packed:
            assert a.masked is not None
            layer.effective.offer(layer.master, packed[layer.parameter], a.masked.targets[layer.parameter].forms)
    run.guards.stepped(a.layers)
    a.observed = stats
    if stats is not None and found_inf is not None:
        # where the step was skipped, the metrics of the last applied one, with no flips; decided on the device
        old = torch.zeros_like(stats) if a.stats is None else a.stats.clone()
        if a.stats is None:
            layers = [layer for layer in a.layers.values() if layer.takes_part()]
            old[NONZEROS] = summed((layer.parameter, layer.effective_weight().count_nonzero().double()) for layer in layers)[0]
        old[FLIPS].zero_()
        a.stats = torch.where(stats[APPLIED] > 0, stats, old)
    elif stats is not None:
        a.stats = stats
    if run.attachments[-1:] == [a]:  # it drives the schedule
        _advance(a, found_inf)


def _advance(driver: Attachment, found_inf: Tensor | None) -> None:
    """Let the schedule see the step that every optimizer of the run has just done."""
    run, stats, numel = driver.run, None, 0
    for a in run.attachments:
        if a.observed is not None:
            stats = a.observed if stats is None else merge_stats(stats, a.observed)
            numel += a.numel
            a.observed = None
    if stats is None:
        return
    run.max_applied_steps += 1
    state, stage, due = run.state, run.stage, False
    if state.keys() & {"t", "held_steps"} and capturing(stats.device):
        warnings.warn(
            "step: a CUDA graph is being captured, and its replays will not advance the schedule of the recipe "
            f"{run.recipe.name}. Use nm.recipes.CapturedStep(handle, step), which does.",
            stacklevel=2,
        )
    # waits for the device only where a scaler may have skipped the step
    if "held_steps" in state and (found_inf is None or bool(stats[APPLIED].item() > 0)):
        state["held_steps"] += 1
        due = stage.every > 0 and state["held_steps"] % stage.every == 0

    # of optimizers that rest in this step too, whose moments the schedule freezes as well
    def updated_by() -> list[tuple[dict[str, Any], dict[str, Any]]]:
        return [pair for a in run.attachments for pair in a.updated_by() if "exp_avg_sq" in pair[1]]

    if begins := run.recipe.advance(state, Observed(stats, numel, run.max_applied_steps, updated_by, lambda: driver.group)):
        new = run.recipe.stage(state)
        if new.remark and new.remark != run.report.remark and own_rank() == 0:
            warnings.warn(new.remark, stacklevel=2)
        run.report.remark = new.remark
        if stage.later is not None and new.later is None:
            run.start("the sparse phase", overwrite=True)  # later stages start from the present weights
    elif stage.transform is not None and stage.transform.reads:
        run.feed()
    before = {name: layer.kept() for name, layer in run.layers.items()} if "held_steps" in state and (begins or due) else {}
    if begins:
        run.begin()
    if due and "held_steps" in state:
        run.held.renew(state)
    if before and "held_steps" in state and driver.stats is not None:  # mask bits that were chosen again count as flips of this step
        driver.stats = driver.stats.clone()
        driver.stats[FLIPS] += summed((layer.parameter, (layer.kept() ^ before[name]).sum()) for name, layer in run.layers.items())[0]
    if run.attached_shards:
        run.shard_metrics = run.metrics(density=run.stage.held_mask)


def _warn_of_young(a: Attachment) -> None:
    """Layers get their first gradient, or joined the optimizer, after the second moment was frozen."""
    state = a.updating.state
    layers = [(name, layer.parameter) for name, layer in a.layers.items() if layer.parameter.grad is not None]
    if young := [name for name, p in layers if "exp_avg_sq" not in state.get(p, {})]:
        warnings.warn(
            f"step: {listed(young)} had no gradient before {a.run.recipe.name} froze the second moment; theirs is zero: their updates are "
            "as large as the clamp allows. Add every group and unfreeze every layer before the switch.",
            stacklevel=2,
        )


def _give(a: Attachment, optimizer: MaskedAdamW, holds: bool, packs: bool) -> None:
    """Give every target the bits of its held mask, and where the step ``packs`` the copies of W̃ that the last forward pass read, for the
    step to overwrite."""
    sure = getattr(a.optimizer, "found_inf", None) is not None
    for name, layer in a.layers.items():
        target, transform = optimizer.targets.get(layer.parameter), layer.transform
        if target is None:
            continue
        if holds:
            target.bits = bits_of(a, name, a.run.held.masks[name] if a.run.stage.held_mask else layer.kept())
        else:
            target.bits = None
            a.bits.pop(name, None)
        if not packs or transform is None or layer.gather is not None or is_sharded(layer.parameter) or layer.parameter.grad is None:
            target.forms = None
        else:
            target.forms = layer.effective.request(layer.master, transform, target.bits, layer._extras(transform), sure)


def _updated(a: Attachment) -> Iterator[tuple[NMWeight, float | Tensor]]:
    """The layers whose weights had a gradient, each with the learning rate of its group."""
    rates = {id(p): group["lr"] for group in a.optimizer.param_groups for p in group["params"]}
    for layer in a.layers.values():
        # load_state_dict(assign=True) gives the layer another Parameter than the one that this optimizer updates
        if layer.parameter.grad is not None and id(layer.parameter) in rates:
            yield layer, rates[id(layer.parameter)]
