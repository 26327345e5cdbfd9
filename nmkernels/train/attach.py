"""How a recipe hooks into an optimizer's step, and keeps its state in ``param_groups[0]["nm_recipe"]``.

Trainers that rebuild a state dict drop unknown top-level keys, but not entries of a parameter group. ``saved.py`` has the saved form.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from .. import ops
from ..autograd.transforms import WEIGHT, WeightTransform, masked
from ..backends.streams import capturing
from ..layouts import MATRICES, as_matrix, ordered
from ..nn.weight import NMWeight
from ..optim.adamw import MaskedAdamW, merge_stats
from ..optim.rules import PLAIN, Target
from ..pattern import RecipeError
from ..recipes.contract import Hooks, Observed, Recipe, State
from ..shards import Groups, add, align_gradient, is_sharded, local, reduced, total
from .run import Run
from .saved import HELD, restored, written
from .writes import listed

STATE_KEY = "nm_recipe"
APPLIED, FLIPS, NONZEROS = (ops.STATS.index(name) for name in ("applied", "flips", "nonzeros"))
FIRST = {"step": 0, "mu_product": 1}
"""What an optimizer counts in the state of a parameter, and where it begins."""
COUNTED = ("pruned_abs", "pruned_grad_abs", "flips", "nonzeros")
"""What is counted here for optimizers that do not count it."""


class Attachment:
    """One optimizer of a run, with the swapped layers whose weights it updates.

    ``run.attachments`` has them in the order in which the optimizers step; the last one drives the schedule. ``stats`` are the sums of the
    last step, or of the last applied one where that was skipped, over ``numel`` weights; ``observed`` those that the schedule has not seen
    yet. ``forms`` says who makes the forms of W̃: the ``"forward"`` pass after a step, or the ``"step"``.
    """

    def __init__(self, run: Run, optimizer: torch.optim.Optimizer) -> None:
        self.run, self.optimizer = run, optimizer
        self.layers: dict[str, NMWeight] = {}
        self.masked = masked_adamw(optimizer)
        self.forms = "forward"
        self.stats: Tensor | None = None
        self.observed: Tensor | None = None
        self.numel = 0
        self._revision = self._size = 0
        self._masks: dict[str, Tensor] = {}
        self._pruned: dict[str, tuple[Tensor, Tensor]] = {}
        self._bits: dict[str, tuple[Tensor, int, Tensor]] = {}
        self.updating = inner(optimizer)
        self._starts = self._rehearsed = False
        self._own_pass: MaskedAdamW | None = None
        self._loaded_masks: dict[str, Tensor] = {}
        self._loaded: State | None = None
        self._removers = [
            optimizer.register_step_pre_hook(eager(self._before)),
            optimizer.register_step_post_hook(eager(self._after)),
            optimizer.register_state_dict_post_hook(self._after_state_dict),
            optimizer.register_load_state_dict_pre_hook(self._before_load),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        ]
        _watch_every_optimizer(self)

    @property
    def drives(self) -> bool:
        """Whether this is the optimizer that drives the schedule."""
        attachments = self.run.attachments
        return bool(attachments) and attachments[-1] is self

    def take(self) -> dict[str, NMWeight]:
        """Take over every layer whose weight the optimizer has, also in groups that were added since; returns the new ones."""
        groups = self.optimizer.param_groups
        self._size, found = sum(len(group["params"]) for group in groups), owned(self.optimizer, self.run.layers)
        self._whole = [layer for layer in found.values() if not is_sharded(layer.weight)]
        new = {name: layer for name, layer in found.items() if name not in self.layers}
        self.layers |= new
        for layer in new.values():
            layer.effective.attached = True
            if self.masked is not None:
                self.masked.targets[layer.parameter] = Target(layer.pattern, layer.layout, partial(_penalty, layer))
        self._revision = 0  # the next step gives the targets the patterns of the stage
        return new

    def make_forms(self, forms: str) -> None:
        """From now on the forms of W̃ are made as ``attach(forms=)`` says."""
        self.forms = forms
        for target in self.masked.targets.values() if self.masked is not None else ():
            target.forms = None

    @property
    def group(self) -> dict[str, Any]:
        return group_of(self.optimizer, self.layers)

    @property
    def holding(self) -> dict[str, NMWeight]:
        """The layers whose held masks are saved in the optimizer's state of their weights: trained ones, without ZeRO, which shards it."""
        if not self.run.holds or self.updating is not self.optimizer:
            return {}
        # load_state_dict(assign=True) gives a layer another Parameter than the one that this optimizer updates
        own = {id(p) for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad}
        return {name: layer for name, layer in self.layers.items() if id(layer.parameter) in own}

    def load(self, state: State | None) -> None:
        """Continue from ``state``; None: from the recipe's beginning, with the present weights."""
        own = self.run.first_state(self.group) if state is None else state
        self.optimizer.param_groups[0][STATE_KEY] = own
        self.run.adopt(own)
        if state is None:
            self.run.watch()
        for part in self.run.attachments:
            part.mark_held_masks()

    def continues(self) -> None:
        """Drive the schedule that another attachment has driven until now."""
        self.optimizer.param_groups[0][STATE_KEY] = self.run.state
        self.mark_held_masks()

    def hand_over(self) -> None:
        """Leave the schedule to later attachments, and the count of those layers that they update too."""
        self.optimizer.param_groups[0].pop(STATE_KEY, None)
        attachments = self.run.attachments
        later = attachments[attachments.index(self) + 1 :]
        if any(name in other.layers for name in self.layers for other in later):
            self.stats = self.observed = None

    def mark_held_masks(self) -> None:
        """Put a placeholder for its held masks into the optimizer's state of each weight, as some loaders take only keys that are there.

        Not into an empty state, which the optimizer has yet to fill.
        """
        state, holding = self.optimizer.state, self.holding
        for name, layer in self.layers.items():
            own = state.get(layer.parameter, {})
            own.pop(HELD, None)  # loaded before the optimizer was attached
            if own and name in holding:
                own[HELD] = torch.zeros((), dtype=torch.uint8)
            elif not own:
                state.pop(layer.parameter, None)

    def detach(self) -> None:
        """Remove every trace of the recipe from the optimizer and from the layers that no other attachment has."""
        if self in self.run.attachments:
            self.run.attachments.remove(self)
        _attached.discard(self)
        _stop_watching()
        for remover in self._removers:
            remover.remove()
        for optimizer in (self.optimizer, self.updating):  # ZeRO copies what stands in the groups of the one to the other
            for group in optimizer.param_groups[:1]:
                group.pop(STATE_KEY, None)
            for layer in self.layers.values():
                optimizer.state.get(layer.parameter, {}).pop(HELD, None)
        for name, layer in self.layers.items():
            if any(name in other.layers for other in self.run.attachments):
                continue
            layer.detach()
        if self.masked is not None:
            self.masked.forget()

    # ---- around a step

    def doubt(self, optimizer: torch.optim.Optimizer) -> None:
        """Any optimizer of the process has stepped: no copy of W̃ is used again unchecked, and one that is not attached is counted."""
        offered = self.masked.packed if self.masked is not None and optimizer in (self.optimizer, self.updating) else {}
        for layer in self.layers.values():
            if layer.parameter not in offered:  # by this very step
                layer.effective.doubt()
        if self.drives and not any(optimizer in (own.optimizer, own.updating) for own in self.run.attachments):
            self.run.writes.stepped_by(optimizer, self.run.recipe.name)

    def _before(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._starts = not self.updating.state
        if self._starts and self._rehearses():
            self._rehearsed = True
            if self.masked is not None:
                self._revision, self.masked.rule = 0, PLAIN
            return None
        if self.stats is None and any(is_sharded(layer.weight) for layer in self._whole):
            raise RecipeError(
                "step: the model was sharded after handle.attach. Call fully_shard or parallelize_module (accelerator.prepare) first, then "
                "build the optimizer and attach it."
            )
        size = 0
        for group in optimizer.param_groups:
            size += len(group["params"])
        if size != self._size:
            self._join()
        # where MaskedAdamW masks, decays and counts in its own pass over memory
        stage, holds = self.run.stage, self._holds()
        follows = not stage.held_mask and (stage.transform is None or not stage.transform.traits.own_mask)
        own = self._own_pass = self.masked if holds or follows else None
        if (self.run.writes.hashes or self.run.masks.masks) and self.run.recording is None:
            self.run.before_step(self.layers)
        if self.masked is not None and self._revision != self.run.revision:
            self._revision, rule = self.run.revision, self.run.stage.rule
            if own is None:
                rule = replace(rule, masked=False, decay=0.0)
            self.masked.rule = replace(rule, masked=True, fixed=True) if holds and stage.held_mask else rule
            for layer in self.layers.values():
                if layer.parameter in self.masked.targets:
                    self.masked.targets[layer.parameter].pattern = layer.mask_pattern
        if self.masked is not None:
            self._give_bits(self.masked, holds)
            if self.forms == "step":
                # with a closure, the forward pass that reads the copies is yet to come
                self._give_forms(self.masked, own is not None and len(args) < 2 and kwargs.get("closure") is None)
        if own is not None:
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._on_gradients()
            return None

        # with a closure backward runs inside it, after this hook: the gradients exist only then
        def wrapped() -> Any:
            loss = closure()
            self._on_gradients()
            return loss

        return ((args[0], wrapped, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": wrapped})

    def _holds(self) -> bool:
        """Whether the masks stay what they are until they are chosen again, so that MaskedAdamW can have them as bits."""
        stage, transform = self.run.stage, self.run.stage.transform
        if self.masked is None or (transform is not None and type(transform).penalty is not WeightTransform.penalty):
            return False
        return stage.held_mask or (stage.rule.masked and transform is not None and transform.traits.holds_mask)

    def _give_bits(self, optimizer: MaskedAdamW, holds: bool) -> None:
        """Give every target the bits of its held mask, made once for each mask and always in the same memory, or none."""
        for name, layer in self.layers.items():
            target = optimizer.targets.get(layer.parameter)
            if target is None:
                continue
            if not holds:
                target.bits = None
                self._bits.pop(name, None)
                continue
            mask = self.run.masks.masks[name] if self.run.stage.held_mask else layer.kept()
            made = self._bits.get(name)
            if made is None or made[0] is not mask or made[1] != mask._version:
                bits = ops.mask_bits(mask)
                # a CUDA graph keeps reading where the bits were when it was captured
                bits = bits if made is None or made[2].shape != bits.shape or made[2].device != bits.device else made[2].copy_(bits)
                made = self._bits[name] = mask, mask._version, bits
            target.bits = made[2]

    def _give_forms(self, optimizer: MaskedAdamW, own_pass: bool) -> None:
        """Have the step overwrite the copies of W̃ that the last forward pass read."""
        # what a hook of the recipe writes after the step would not be in them
        wanted = own_pass and type(self.run.hooks) is Hooks and self.run.recording is None
        sure = getattr(self.optimizer, "found_inf", None) is not None
        for layer in self.layers.values():
            target, transform = optimizer.targets.get(layer.parameter), layer.transform
            if target is None:
                continue
            if not wanted or transform is None or layer.gather is not None or is_sharded(layer.parameter) or layer.parameter.grad is None:
                target.forms = None
            else:
                target.forms = layer.effective.request(layer.master, transform, target.bits, layer._extras(transform), sure)

    def _join(self) -> None:
        """Take over the layers of parameter groups that were added since the last step."""
        check_class(self.run.recipe, self.optimizer)
        new = self.take()
        self._starts = self._starts or bool(new)
        young = [name for name, layer in new.items() if "exp_avg_sq" not in self.updating.state.get(layer.parameter, {})]
        if young and self.run.stage.rule.frozen:
            warnings.warn(
                f"step: {listed(young)} joined the optimizer after {self.run.recipe.name} froze the second moment; theirs is zero: their "
                "updates are as large as the clamp allows. Add every group before the switch.",
                stacklevel=2,
            )

    def _rehearses(self) -> bool:
        """Whether the coming step trains nothing: ``torch.distributed.checkpoint`` makes a step with zero gradients at learning rate 0, to
        have a fresh optimizer fill its state."""
        groups = self.optimizer.param_groups
        if any(float(group.get("lr", 1.0)) != 0.0 for group in groups):
            return False
        grads = [p.grad for group in groups for p in group["params"] if p.grad is not None]
        sharded = [grad for grad in grads if is_sharded(grad)]
        if not grads or any(bool(grad.any()) for grad in grads if not is_sharded(grad)):
            return False
        return not sharded or total(lambda grad: grad.count_nonzero(), sharded).item() == 0

    @torch.no_grad()
    def _on_gradients(self) -> None:
        """Mask or decay the gradients; where a fused optimizer unscales them later, the decay is scaled too."""
        stage, scale = self.run.stage, getattr(self.optimizer, "grad_scale", None)
        # with maximize the optimizer negates the gradient later; the decay must shrink the weight all the same
        negated = {id(p) for group in self.optimizer.param_groups if group.get("maximize") for p in group["params"]}
        self._masks, self._pruned, self.numel = {}, {}, 0
        for name, layer in self.layers.items():
            if not layer.takes_part():
                continue
            self.numel += layer.parameter.numel()
            learned = layer.learned()
            penalties = {} if stage.rule.adds_penalty and not learned else layer.penalties()
            extra = penalties.pop(WEIGHT, None)
            for key, value in penalties.items():
                grad = learned[key].grad
                if grad is not None:
                    _add(grad, id(learned[key]) in negated, scale, value)
            if stage.rule.masked and not stage.held_mask:
                self._masks[name] = layer.kept()
            grad = align_gradient(layer.parameter, layer.layout)
            if layer.layout not in MATRICES:
                _align_moments(self.updating.state.get(layer.parameter, {}), layer)
            if grad is None:
                continue
            w, g = layer.master.detach(), as_matrix(local(grad), layer.layout)
            put = partial(_add, g, id(layer.parameter) in negated, scale)
            if stage.held_mask:
                g.masked_fill_(~self.run.masks.masks[name], 0.0)
            elif stage.rule.masked:
                outside = ~self._masks[name]
                pruned = masked(w, outside)
                size = _magnitude(masked(g, outside))
                self._pruned[name] = _magnitude(pruned), size if scale is None else size / scale.double()
                if stage.rule.decay:
                    put(pruned, stage.rule.decay)
            if extra is not None and not stage.rule.adds_penalty:
                put(extra)

    @torch.no_grad()
    def _after(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._starts:
            self.mark_held_masks()
        if self._rehearsed:
            self._rehearsed = False
            for state in self.updating.state.values():
                for key in FIRST.keys() & state.keys():
                    count = state[key]
                    state[key] = torch.full_like(count, FIRST[key]) if isinstance(count, Tensor) else type(count)(FIRST[key])
            return
        own, drives, hooks, found_inf = self._own_pass, self.drives, self.run.hooks, getattr(optimizer, "found_inf", None)
        if drives:
            # ZeRO replaces the groups by the loaded ones after the hooks of a load
            optimizer.param_groups[0][STATE_KEY] = self.run.state
        if type(hooks) is not Hooks:
            hooks.after_step(self._updated(), found_inf)
        if own is not None and own.stats is None:  # only what is learned in addition to the weights had gradients, such as SLoPe's adapters
            self.numel = sum(layer.parameter.numel() for layer in self.layers.values() if layer.takes_part())
            own = None
        if own is not None:
            new, self.numel = own.stats, own.stats_numel
        else:
            new = self._own_stats(found_inf) if self.numel else None
        if self.run.recording is not None:
            self.run.recording.append(Recorded(self, new, self.numel, found_inf))
            return
        if drives and self.run.state.keys() & {"t", "held_steps"} and capturing(next(iter(self.layers.values())).master.device):
            warnings.warn(
                "step: a CUDA graph is being captured, and its replays will not advance the schedule of the recipe "
                f"{self.run.recipe.name}. Use nm.recipes.CapturedStep(handle, step), which does.",
                stacklevel=2,
            )
        self._stepped(new, found_inf, None if own is None else own.packed)

    def _stepped(self, new: Tensor | None, found_inf: Tensor | None, packed: dict[Tensor, int] | None = None) -> None:
        """What the host does after a step, of which ``new`` are the statistics; ``packed`` is ``MaskedAdamW.packed`` of an eager one."""
        for layer in self.layers.values():
            layer.drop(stepped=True)
            if packed and layer.parameter in packed:
                assert self.masked is not None
                layer.effective.offer(layer.master, packed[layer.parameter], self.masked.targets[layer.parameter].forms)
        self.run.writes.stepped(self.layers)
        self.observed = new
        if new is not None:
            self.stats = new if found_inf is None else self._since_applied(new)
        if self.drives:
            self._advance(found_inf)

    def _advance(self, found_inf: Tensor | None) -> None:
        """Let the schedule see the step that every optimizer of the run has just done."""
        stats: Tensor | None = None
        numel, parts = 0, []
        for part in self.run.attachments:
            if part.observed is not None:
                stats = part.observed if stats is None else merge_stats(stats, part.observed)
                numel += part.numel
                part.observed = None
                parts.append(part)
        if stats is None:
            return

        def state_of(key: str) -> list[Any]:
            """What the optimizers keep under ``key`` for the weights that took part."""
            found = [part.updating.state.get(layer.parameter, {}).get(key) for part in parts for layer in part.layers.values()]
            return [value for value in found if value is not None]

        seen = Observed(stats, numel, self.run.max_applied_steps + 1, state_of, lambda: self.group)
        # waits for the device only where a scaler may have skipped the step
        flips = self.run.advance(seen, lambda: found_inf is None or bool(stats[APPLIED].item() > 0))
        if flips is not None and self.stats is not None:
            self.stats = self.stats.clone()
            self.stats[FLIPS] += flips
        if self.run.attached_shards:
            self.run.shard_metrics = self.run.metrics(density=self.run.stage.held_mask)

    def _since_applied(self, new: Tensor) -> Tensor:
        """``new``, or where the step was skipped the metrics of the last applied one, with no flips; decided on the device."""
        old = torch.zeros_like(new) if self.stats is None else self.stats.clone()
        if self.stats is None:
            old[NONZEROS] = nonzeros([layer for layer in self.layers.values() if layer.takes_part()])
        old[FLIPS].zero_()
        return torch.where(new[APPLIED] > 0, new, old)

    def _own_stats(self, found_inf: Tensor | None) -> Tensor:
        """The sums that MaskedAdamW counts in its own pass, for other optimizers and for held masks, which it does not know."""
        device = next(iter(self.layers.values())).master.device
        nothing = torch.zeros((), dtype=torch.float64, device=device)  # a copy from the host could not be captured
        values = dict.fromkeys(ops.STATS, nothing)
        if self.masked is not None and self.masked.stats is not None:
            values.update(zip(ops.STATS, self.masked.stats, strict=True))
        values["applied"] = torch.ones_like(nothing) if found_inf is None else (found_inf == 0).double().reshape(())
        parts: dict[Groups, Tensor] = {}
        for name, layer in self.layers.items():
            if not layer.takes_part():
                continue
            w = layer.master.detach()
            if self.run.stage.held_mask:
                self.run.masks.apply(name)
            seen = dict.fromkeys(COUNTED, nothing)
            seen["pruned_abs"], seen["pruned_grad_abs"] = self._pruned.get(name, (nothing, nothing))
            if name in self._masks:
                now = layer.kept()
                if now is not self._masks[name]:  # a held mask is the same tensor until it is renewed
                    seen["flips"] = (now ^ self._masks[name]).count_nonzero()
                seen["nonzeros"] = (w.ne(0) & now).count_nonzero()
            else:
                seen["nonzeros"] = w.count_nonzero()
            row = torch.stack([seen[key].to(device=device, dtype=torch.float64) for key in COUNTED])
            add(parts, layer.parameter, row)
        self._masks, self._pruned = {}, {}
        if parts:
            values.update(zip(COUNTED, reduced(parts), strict=True))
        return torch.stack([values[key].to(device=device, dtype=torch.float64) for key in ops.STATS])

    def _updated(self) -> Iterator[tuple[NMWeight, float | Tensor]]:
        """The layers whose weights had a gradient, each with the learning rate of its group."""
        rates = {id(p): group["lr"] for group in self.optimizer.param_groups for p in group["params"]}
        for layer in self.layers.values():
            # load_state_dict(assign=True) gives the layer another Parameter than the one that this optimizer updates
            if layer.parameter.grad is not None and id(layer.parameter) in rates:
                yield layer, rates[id(layer.parameter)]

    # ---- around saving and loading

    def _after_state_dict(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        run, own = self.run, self.holding
        holding = {name: layer for part in run.attachments for name, layer in part.holding.items()} if self.drives else own
        text, masks = written({**run.state, **run.held()}, run.layers, holding)
        if self.drives:
            state_dict["param_groups"][0][STATE_KEY] = text
        keys = _keys(optimizer, state_dict)
        for name, layer in own.items():
            key = keys[layer.parameter]
            state_dict["state"][key] = {**state_dict["state"].get(key, {}), HELD: masks[name]}

    def _before_load(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        keys, state = _keys(optimizer, state_dict), dict(state_dict["state"])
        self._loaded_masks, self._loaded = {}, None
        for name, layer in self.layers.items():
            own = state.get(keys.get(layer.parameter))
            if own and HELD in own:
                # torch would cast them to the weight's dtype
                self._loaded_masks[name] = own[HELD]
                state[keys[layer.parameter]] = {key: value for key, value in own.items() if key != HELD}
        state_dict["state"] = {key: own for key, own in state.items() if own != {}}
        saved = state_dict["param_groups"][0].get(STATE_KEY)
        if self.drives and saved is not None:
            masks = {name: bits for part in self.run.attachments for name, bits in part._loaded_masks.items()}
            self._loaded = restored(saved, self.run.layers, masks)
            self.run.check(self._loaded, self.group)

    def _after_load(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.drives:
            self.mark_held_masks()
            return
        # from a state of plain AdamW the recipe starts from its beginning with the loaded moments
        self.load(self._loaded)
        self._loaded = None
        for part in self.run.attachments:
            part._loaded_masks = {}


class Recorded(NamedTuple):
    """A step of ``part`` in a CUDA graph: its statistics over ``numel`` weights, and ``found_inf``, in the memory of the graph."""

    part: Attachment
    stats: Tensor | None
    numel: int
    found_inf: Tensor | None

    def before(self) -> None:
        """The graph is about to be replayed: notice weights that something else has written, and give it the bits of new masks."""
        part = self.part
        if part.run.masks.masks:
            part.run.before_step(part.layers)
        if part.masked is not None:
            part._give_bits(part.masked, part._holds())

    @torch.no_grad()
    def after(self) -> None:
        """The graph was replayed: do what the host does after a step."""
        self.part.numel = self.numel
        # a copy, since the next replay overwrites them
        self.part._stepped(None if self.stats is None else self.stats.clone(), self.found_inf)


def _keys(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[Tensor, Any]:
    """What ``state_dict`` calls the parameters; they are matched by position."""
    groups = zip(optimizer.param_groups, state_dict["param_groups"], strict=False)
    return {p: key for own, theirs in groups for p, key in zip(own["params"], theirs["params"], strict=False)}


_attached: weakref.WeakSet[Attachment] = weakref.WeakSet()
_watches: list[Any] = []
"""The hook by which attachments see the steps of all optimizers of the process; it is there only while there are attachments."""


def _watch_every_optimizer(attachment: Attachment) -> None:
    """Have ``attachment`` see each step of any optimizer of the process, until it is detached or collected."""

    def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for part in list(_attached):
            part.doubt(optimizer)

    if not _watches:
        _watches.append(register_optimizer_step_post_hook(eager(stepped)))
    _attached.add(attachment)
    weakref.finalize(attachment, _stop_watching)


def _stop_watching() -> None:
    """Remove the hook if nothing is attached any more."""
    if _watches and next(iter(_attached), None) is None:
        hooks = _watches[0].hooks_dict_ref()
        # an attachment may be collected while torch iterates over the hooks, when only the last one can be removed
        if hooks and next(reversed(hooks)) == _watches[0].id:
            _watches.pop().remove()


def owned(optimizer: torch.optim.Optimizer, layers: dict[str, NMWeight]) -> dict[str, NMWeight]:
    """Those of ``layers`` whose weights ``optimizer`` has, frozen ones too: they may be unfrozen later."""
    params = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return {name: layer for name, layer in layers.items() if id(layer.parameter) in params}


def eager(hook: Callable[..., Any]) -> Callable[..., Any]:
    """``hook``, which ``torch.compile(optimizer.step)`` does not trace: a graph would freeze the schedule's numbers. The optimizer's own
    step is compiled as without a recipe."""
    return torch.compiler.disable(hook)


def unwrapped(given: Any) -> torch.optim.Optimizer:
    """The optimizer whose step hooks run: ``given``, also ZeRO, or the one inside a wrapper such as Accelerate's or Lightning's."""
    found = given
    while "_optimizer_step_pre_hooks" not in getattr(found, "__dict__", {}):
        # a learning rate scheduler has an optimizer as well, but nothing to step it by
        wraps = all(hasattr(found, name) for name in ("step", "zero_grad", "param_groups"))
        inside = next((vars(found)[name] for name in ("optimizer", "_optimizer") if name in vars(found)), None) if wraps else None
        if inside is None:
            several = "; give several one by one, attach(first, second)" if isinstance(given, (list, tuple, dict)) else ""
            raise RecipeError(
                f"attach: {type(given).__name__} is no optimizer with torch's step hooks, nor a wrapper with one in its attribute "
                f"'optimizer'. Give a torch.optim.Optimizer{several}."
            )
        found = inside
    if getattr(found, "_overlap_with_ddp", False):
        raise RecipeError(
            "attach: ZeroRedundancyOptimizer updates inside backward, without step hooks, with overlap_with_ddp=True; leave it out."
        )
    return found


def inner(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that updates the weights and keeps their moments: that of this rank's share inside ZeRO, else ``optimizer``."""
    for kind in type(optimizer).__mro__:
        if kind.__name__ == "ZeroRedundancyOptimizer":
            return optimizer.optim  # type: ignore[attr-defined]
    return optimizer


def masked_adamw(optimizer: torch.optim.Optimizer) -> MaskedAdamW | None:
    """The ``MaskedAdamW`` that updates every weight of ``optimizer``, so that it can mask and count; None with ZeRO over several ranks."""
    found = inner(optimizer)
    alone = found is optimizer or optimizer.world_size == 1  # type: ignore[attr-defined]
    return found if alone and isinstance(found, MaskedAdamW) else None


def loaded_masks(optimizer: torch.optim.Optimizer, layers: dict[str, NMWeight]) -> dict[str, Tensor]:
    """The held masks that ``optimizer``, not attached yet, has loaded with the moments of the weights."""
    states = {name: optimizer.state.get(layer.parameter) or {} for name, layer in layers.items()}
    return {name: state[HELD] for name, state in states.items() if HELD in state}


def group_of(optimizer: torch.optim.Optimizer, layers: dict[str, NMWeight]) -> dict[str, Any]:
    """The parameter group that updates the first of ``layers``; the first one where a load has replaced that layer's Parameter."""
    first = next((layer.parameter for layer in layers.values()), None)
    owners = [group for group in optimizer.param_groups if any(p is first for p in group["params"])]
    return (owners or optimizer.param_groups)[0]


def check_optimizer(recipe: Recipe, optimizer: torch.optim.Optimizer) -> None:
    """Raise ``RecipeError`` if ``recipe`` cannot run with ``optimizer``, or that has another model's recipe already."""
    check_class(recipe, optimizer)
    hooks = (getattr(inspect.unwrap(hook), "__self__", None) for hook in optimizer._optimizer_step_pre_hooks.values())
    if any(isinstance(other, Attachment) and other.layers for other in hooks):
        raise RecipeError("attach: the optimizer drives the recipe of another model already; give each model its own optimizer.")


def check_class(recipe: Recipe, optimizer: torch.optim.Optimizer) -> None:
    """Raise ``RecipeError`` if ``recipe`` cannot run with optimizers of this class."""
    wanted, given = recipe.setup.optimizer, masked_adamw(optimizer) or optimizer
    if wanted is not None and not isinstance(given, wanted):
        raise RecipeError(
            f"{type(recipe).__name__} {recipe.setup.needs}, which {type(given).__name__} cannot. Replace it in one line: optimizer = "
            f"handle.attach(nm.optim.{wanted.__name__}(model.parameters(), lr=...)). It takes AdamW's keywords and state."
        )


def check_forms(forms: str, optimizer: torch.optim.Optimizer) -> None:
    """Raise ``RecipeError`` unless ``forms`` of ``attach`` is known, and possible with ``optimizer``."""
    if forms not in ("forward", "step"):
        raise RecipeError(f"attach: forms={forms!r} is not known; it is 'forward' or 'step'.")
    if forms == "step" and masked_adamw(optimizer) is None:
        raise RecipeError(
            f"attach: forms='step' needs an optimizer that packs in its own pass, which {type(optimizer).__name__} does not. Leave it out, "
            "or take MaskedAdamW: optimizer = handle.attach(nm.optim.MaskedAdamW(model.parameters(), lr=...), forms='step')."
        )


def check_moments(run: Run, optimizer: torch.optim.Optimizer, layers: dict[str, NMWeight]) -> None:
    """Raise ``RecipeError`` where the run has frozen the second moment and ``optimizer`` lacks it for some of ``layers``."""
    state = inner(optimizer).state
    missing = [name for name, layer in layers.items() if "exp_avg_sq" not in state.get(layer.parameter, {})]
    if missing and run.stage.rule.frozen:
        raise RecipeError(
            f"attach: {run.recipe.name} has frozen the second moment, and this {type(optimizer).__name__} has none for {listed(missing)}. "
            "Give it the state of the one before: optimizer.load_state_dict(earlier.state_dict())."
        )


def nonzeros(layers: Iterable[NMWeight]) -> Tensor:
    """How many of the effective weights are not zero, over all ranks."""
    parts: dict[Groups, Tensor] = {}
    for layer in layers:
        add(parts, layer.parameter, layer.effective_weight().count_nonzero().double())
    return reduced(parts).reshape(())


def _align_moments(state: dict[str, Any], layer: NMWeight) -> None:
    """Bring the optimizer's moments of a weight into its memory order: torch's fused kernels ignore strides, so moments from before
    ``sparsify_``, or of a dense model's checkpoint, would be applied to other weights."""
    shape = layer.parameter.shape
    for name, value in state.items():
        if isinstance(value, Tensor) and value.shape == shape:
            state[name] = ordered(value, layer.layout)


def _magnitude(x: Tensor) -> Tensor:
    """Σ|x| in fp64: rows in fp32 first, since a sum in another precision than its operand's begins by copying the whole tensor."""
    rows = torch.promote_types(x.dtype, torch.float32)  # in 16 bits a row's sum would be worth three digits, and fp16's may be too large
    return torch.linalg.vector_norm(x, 1, -1, dtype=rows).sum(dtype=torch.float64)


def _add(g: Tensor, negated: bool, scale: Tensor | None, extra: Tensor, factor: float = 1.0) -> None:
    """Add ``factor · extra`` to a gradient that the optimizer may still negate and unscale."""
    g.add_(extra if scale is None else extra * scale, alpha=-factor if negated else factor)


def _penalty(layer: NMWeight) -> Tensor | None:
    return layer.penalties().get(WEIGHT)
