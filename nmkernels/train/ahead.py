"""Before a forward pass of the model: the forms of all weights that a step has changed, in one launch for each kind.

On a GPU a layer's first forward pass after a step makes W̃ in the forms that its GEMMs read, which is an op and a launch for each layer.
Those that the last forward pass read are made here for all layers at once, of the weights as they are when the model is called, and are
believed in this one call: what the model does not read in it is out of date again when it ends. Weights that its modules' hooks might
write in between are left to the layers.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from .. import ops
from ..backends.streams import capturing
from ..nn import effective
from ..nn.weight import NMWeight
from ..ops.adamw_pack import StepForms, arguments, in_one_pass, nm_pack_forms_
from ..pattern import Pattern
from ..shards import is_sharded
from .run import Attachment, Run

HARDWARE = Pattern(2, 4)


class Ahead:
    """Hooks of a model for one of its optimizers; a copy of the model has them without effect."""

    def __init__(self, a: Attachment | None = None) -> None:
        self._attachment = None if a is None else weakref.ref(a)
        self._made: list[NMWeight] = []
        self._known: dict[Any, bool] = {}

    def __reduce__(self) -> tuple[type[Ahead], tuple[()]]:
        return Ahead, ()

    def watch(self, model: nn.Module) -> list[Any]:
        """Have forward passes of ``model`` begin with ``before`` and end with ``after``; returns what removes that."""
        return [model.register_forward_pre_hook(self.before), model.register_forward_hook(self.after, always_call=True)]

    def before(self, model: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        a = None if self._attachment is None else self._attachment()
        if a is None or not a.due or model is not a.run.model or a.run.recording is not None:
            return
        a.due = False
        if _hooked(model):
            return
        kinds: dict[Any, list[tuple[NMWeight, StepForms, Tensor | None]]] = {}
        for name, layer in a.layers.items():
            transform, device = layer.transform, layer.weight.device
            if transform is None or transform.pattern != HARDWARE or layer.gather is not None or is_sharded(layer.parameter):
                continue
            if capturing(device):
                continue
            extras = layer._extras(transform)
            forms = layer.effective.outdated(layer.master, transform, extras)
            bits = None if forms is None or forms.rule != "held" else bits_of(a, name, extras[0])
            if forms is not None and self._has_kernel(layer, forms, bits):
                kinds.setdefault((forms.kind, device), []).append((layer, forms, bits))
        for some in kinds.values():
            layers, many, masks = zip(*some, strict=True)
            weights = [layer.master.detach() for layer in layers]
            nm_pack_forms_(*arguments(HARDWARE, many), weights, None if masks[0] is None else list(masks))
            for layer in layers:
                layer.effective.made(layer.master)
            self._made += layers

    def after(self, model: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        for layer in self._made:
            layer.effective.forget_unread()
        self._made.clear()

    def _has_kernel(self, layer: NMWeight, forms: StepForms, bits: Tensor | None) -> bool:
        weight = layer.master.detach()
        key = forms.kind, weight.shape, weight.dtype, weight.device, weight.is_contiguous()
        if key not in self._known:
            call = *arguments(HARDWARE, [forms]), [weight], None if bits is None else [bits]
            self._known[key] = in_one_pass(call, "nm_pack_forms_")
        return self._known[key]


def bits_of(a: Attachment, name: str, mask: Tensor) -> Tensor:
    """The bits of a held mask, made once for each mask and always in the same memory, which a CUDA graph keeps reading."""
    made = a.bits.get(name)
    if made is None or made[0] is not mask or made[1] != mask._version:
        bits = ops.mask_bits(mask)
        bits = bits if made is None or made[2].shape != bits.shape or made[2].device != bits.device else made[2].copy_(bits)
        made = a.bits[name] = mask, mask._version, bits
    return made[2]


def makes_ahead(run: Run) -> bool:
    """Whether forms can be made ahead in a run: of whole weights on a GPU."""
    return not any(is_sharded(layer.parameter) or effective.readable(layer.master) for layer in run.layers.values())


def _hooked(model: nn.Module) -> bool:
    """Whether a module has hooks before its forward pass, which might write weights."""
    hooks = (hook for m in model.modules() for hook in m._forward_pre_hooks.values())
    return bool(torch_module._global_forward_pre_hooks) or any(not isinstance(getattr(hook, "__self__", None), Ahead) for hook in hooks)
