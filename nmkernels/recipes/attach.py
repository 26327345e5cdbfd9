"""How a recipe lives inside an optimizer: step hooks, and its state in the optimizer's own state dict.

The state lies in ``param_groups[0]["nm_recipe"]``. A top-level key would be dropped by trainers that rebuild the
state dict; entries of a parameter group survive plain AdamW and distributed checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import ops
from ..nn import NMWeight
from ..optim import MaskedAdamW, Target
from ..pattern import Pattern
from .base import Observed, Stage

if TYPE_CHECKING:
    from .handle import Handle

STATE_KEY = "nm_recipe"


class Attachment:
    """One optimizer of a handle, with the swapped layers whose weights it updates."""

    def __init__(self, handle: Handle, optimizer: torch.optim.Optimizer, layers: dict[str, NMWeight], primary: bool) -> None:
        self.handle, self.optimizer, self.layers, self.primary = handle, optimizer, layers, primary
        self.numel = sum(layer.weight.numel() for layer in layers.values())
        self.stats: Tensor | None = None
        self._masks: dict[str, Tensor] = {}
        self._removers = [optimizer.register_step_pre_hook(self._before), optimizer.register_step_post_hook(self._after)]
        if primary:
            self._removers += [
                optimizer.register_load_state_dict_pre_hook(self._before_load),
                optimizer.register_load_state_dict_post_hook(self._after_load),
            ]
        for layer in layers.values():
            layer.used.attached = True
        if isinstance(optimizer, MaskedAdamW):
            optimizer.targets = {layer.weight: _target(layer) for layer in layers.values()}

    @property
    def group0(self) -> dict[str, Any]:
        """The parameter group that carries the recipe's state."""
        group: dict[str, Any] = self.optimizer.param_groups[0]
        return group

    @property
    def group(self) -> dict[str, Any]:
        """The parameter group of the first swapped weight."""
        first = next(iter(self.layers.values())).weight
        return next(g for g in self.optimizer.param_groups if any(p is first for p in g["params"]))

    def apply(self, stage: Stage) -> None:
        """Tell the optimizer how to update from now on."""
        if isinstance(self.optimizer, MaskedAdamW):
            self.optimizer.rule = stage.rule

    def detach(self) -> None:
        """Take every trace of the recipe out of the optimizer."""
        for remover in self._removers:
            remover.remove()
        for group in self.optimizer.param_groups:
            group.pop(STATE_KEY, None)
        for layer in self.layers.values():
            layer.used.attached = False
            layer.used.release()
        if isinstance(self.optimizer, MaskedAdamW):
            self.optimizer.forget()

    # ---- around a step

    def _before(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(optimizer, MaskedAdamW) and not self.handle.stage.fixed:
            return None  # its kernel does all of this in its one pass
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._on_gradients()
            return None
        wrapped = self._after_backward(closure)
        return ((args[0], wrapped, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": wrapped})

    def _after_backward(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        # trainers that pass a closure run backward inside it, after the pre-hook: the gradients exist only then
        def wrapped() -> Any:
            loss = closure()
            self._on_gradients()
            return loss

        return wrapped

    @torch.no_grad()
    def _on_gradients(self) -> None:
        """Mask or decay the gradients: unscaled ones, or scaled ones times the scale where a fused optimizer unscales later."""
        stage, scale = self.handle.stage, getattr(self.optimizer, "grad_scale", None)
        pruned_w = pruned_g = torch.zeros((), dtype=torch.float64)
        self._masks = {}
        for name, layer in self.layers.items():
            if layer.weight.grad is None:
                continue
            w, g = layer.master.detach(), _oriented(layer, layer.weight.grad)
            if stage.fixed:
                g.mul_(self.handle.fixed.masks[name])
            elif stage.rule.masked:
                kept = ops.mask(w, layer.pattern)
                self._masks[name] = kept
                decayed = w.masked_fill(kept, 0.0)
                pruned_w = pruned_w + decayed.abs().sum(dtype=torch.float64)
                size = g.masked_fill(kept, 0.0).abs().sum(dtype=torch.float64)
                pruned_g = pruned_g + (size if scale is None else size / scale.double())
                if stage.rule.decay:
                    decayed = decayed * stage.rule.decay
                    g.add_(decayed if scale is None else decayed * scale)
        self._pruned = pruned_w, pruned_g

    @torch.no_grad()
    def _after(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if isinstance(optimizer, MaskedAdamW) and not self.handle.stage.fixed:
            self.stats = optimizer.stats
        else:
            self.stats = self._own_stats()
            for layer in self.layers.values():
                layer.used.drop()
        if self.primary and self.stats is not None:
            seen = Observed(self.stats, self.numel, self._second_moments(), self._step())
            if self.handle.recipe.advance(self.handle.state, seen):
                self.handle.restage()

    def _own_stats(self) -> Tensor:
        """The sums that MaskedAdamW gives for free, for any other optimizer."""
        found_inf = getattr(self.optimizer, "found_inf", None)
        values = dict.fromkeys(ops.STATS, torch.zeros((), dtype=torch.float64))
        values["applied"] = torch.ones((), dtype=torch.float64) if found_inf is None else (found_inf == 0).double().reshape(())
        values["pruned_abs"], values["pruned_grad_abs"] = getattr(self, "_pruned", (torch.zeros(()), torch.zeros(())))
        for name, layer in self.layers.items():
            w = layer.master.detach()
            if self.handle.stage.fixed:
                w.mul_(self.handle.fixed.masks[name])
            if name in self._masks:
                now = ops.mask(w, layer.pattern)
                values["flips"] = values["flips"] + (now ^ self._masks[name]).sum()
                w = w.masked_fill(~now, 0.0)
            values["nonzeros"] = values["nonzeros"] + w.count_nonzero()
        self._masks = {}
        return torch.stack([values[key].to(device=w.device, dtype=torch.float64) for key in ops.STATS])

    def _second_moments(self) -> list[Tensor]:
        states = [self.optimizer.state.get(layer.weight, {}) for layer in self.layers.values()]
        return [s["exp_avg_sq"] for s in states if "exp_avg_sq" in s]

    def _step(self) -> int:
        step = self.optimizer.state.get(next(iter(self.layers.values())).weight, {}).get("step", 0)
        # a step counter on the host costs nothing to read; one on a device would make the host wait
        return int(step) if not isinstance(step, Tensor) or step.device.type == "cpu" else 0

    # ---- around a load

    def _before_load(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        saved = state_dict["param_groups"][0].get(STATE_KEY)
        if saved is not None:
            self.handle.check_state(saved)

    def _after_load(self, optimizer: torch.optim.Optimizer) -> None:
        if STATE_KEY not in self.group0:
            # a state of plain AdamW: the recipe starts from its beginning with the loaded moments
            self.group0[STATE_KEY] = {"spec": self.handle.recipe.spec(), **self.handle.recipe.start(self.group)}
        self.handle.adopt(self.group0[STATE_KEY])


def _target(layer: NMWeight) -> Target:
    return Target(
        Pattern(layer.pattern), layer.transposed, sink=lambda: layer.used.sink(layer.master), filled=lambda: layer.used.filled(layer.master)
    )


def _oriented(layer: NMWeight, tensor: Tensor) -> Tensor:
    return tensor.t() if layer.transposed else tensor
