"""Turns a dense layer into a sparse one and back, by changing its class, and switches off torch's fused paths that would bypass it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from ..layouts import CONV1D
from ..pattern import Pattern, PatternLike, RecipeError
from .adapter import adapter_of, folded
from .classes import change_class_, class_of
from .compressed import CompressedLinear
from .conv import SparseConv2d, check_groups
from .experts import StackedWeight, make_stack_dense_
from .linear import NMLinear, SparseLinear
from .weight import NMWeight, WeightState, warn_if_changed


def is_conv1d(module: nn.Module) -> bool:
    """True for ``transformers.pytorch_utils.Conv1D`` itself; matches by name, so that transformers is never imported."""
    return is_conv1d_type(class_of(module))


def is_conv1d_type(kind: type) -> bool:
    """True for the class ``transformers.pytorch_utils.Conv1D``."""
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


class SparseConv1D(NMLinear):
    """y = x W̃ + b with the parameter ``weight`` stored ``(in, out)``; groups run along ``in``, its dimension 0.

    ``sparsify_`` makes it of a model's Conv1D, and ``handle.remove()`` turns it back; it has no constructor of its own.
    """

    layout = CONV1D
    nf: int
    nx: int

    @property
    def in_features(self) -> int:
        """Length of the input, ``nx``."""
        return int(self.weight.shape[0])

    @property
    def out_features(self) -> int:
        """Length of the output, ``nf``."""
        return int(self.weight.shape[1])

    def forward(self, x: Tensor) -> Tensor:
        """y = x W̃ + b; the argument is called x, as in Conv1D."""
        return super().forward(x)


FAST_PATHS: tuple[tuple[type[nn.Module], str, object], ...] = (
    (nn.TransformerEncoderLayer, "activation_relu_or_gelu", 0),
    # nested tensors are only understood by the fused path
    (nn.TransformerEncoder, "use_nested_tensor", False),
)
post_swap_hooks: list[Callable[[nn.Module], object]] = []
"""Called by ``after_swap`` with the model; integrations register here."""

KEPT = "_nm_fast_path"
"""The attribute in which a module keeps its former setting while its fused path is off."""


def make_sparse_(layer: nn.Module, pattern: PatternLike) -> NMWeight:
    """Turn ``layer``, an ``nn.Linear``, ``nn.Conv2d`` or Hugging Face's ``Conv1D``, into its sparse form in place, and return it."""
    p = Pattern(pattern)
    kind = class_of(layer)
    if kind is nn.Linear:
        p.check_divides("sparsify_", int(layer.in_features), "in_features")  # type: ignore[arg-type]
        change_class_(layer, SparseLinear)
    elif is_conv1d_type(kind):
        p.check_divides("sparsify_", int(layer.weight.shape[0]), "in_features")  # type: ignore[index]
        layer.__dict__["dense_type"] = kind
        change_class_(layer, SparseConv1D)
    elif kind is nn.Conv2d:
        check_groups("sparsify_", p, int(layer.in_channels), int(layer.groups))  # type: ignore[arg-type]
        change_class_(layer, SparseConv2d)
    else:
        raise RecipeError(f"make_sparse_: {kind.__name__} has no sparse form; nn.Linear, nn.Conv2d and Hugging Face's Conv1D have one.")
    assert isinstance(layer, NMWeight)
    layer._start(p)
    return layer


def make_dense_(layer: NMWeight) -> nn.Module:
    """Turn ``layer`` back into the dense layer that it was, in place; its weight stays as it is, dense or finished. A stack of experts
    becomes a plain Parameter of its module, which is returned. An adapter that has learned something is folded into the weight."""
    if isinstance(layer, StackedWeight):
        return make_stack_dense_(layer)
    warn_if_changed(layer)
    adapter = adapter_of(layer)
    if adapter is not None and not adapter[1].is_meta and bool(adapter[1].any()):
        with torch.no_grad():
            layer.master.copy_(folded(layer.master.detach(), *adapter))
    kind = layer.dense_type
    layer.remove_extras()
    for name in ("dense_type", *(attribute.name for attribute in fields(WeightState))):
        layer.__dict__.pop(name, None)
    change_class_(layer, kind)
    return layer


def replace_each_(model: nn.Module, pairs: Mapping[nn.Module, nn.Module]) -> None:
    """Replace modules, old → new, everywhere in ``model``: a module may be registered under several names, and some modules call their
    layers from a plain list (MaskFormer's)."""
    for parent in list(model.modules()):
        for key, child in list(parent._modules.items()):
            if child is not None and child in pairs:
                setattr(parent, key, pairs[child])
                if key == "_orig_mod":  # of torch.compile, which caches its module's call, and takes the new one's here as after unpickling
                    parent.__setstate__(parent.__getstate__())
        for key, value in list(vars(parent).items()):
            if key not in REGISTRIES and (held := _exchanged(value, pairs)) is not value:
                vars(parent)[key] = held


REGISTRIES = frozenset(vars(nn.Module()))
"""Where torch itself keeps a module's Parameters, children and hooks."""


def _exchanged(value: Any, pairs: Mapping[nn.Module, nn.Module], deep: int = 3) -> Any:
    """``value`` with the modules in it exchanged: nested lists and dicts in place, tuples as new ones."""
    if isinstance(value, nn.Module):
        return pairs.get(value, value)
    if deep and isinstance(value, (list, dict)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, held in list(items):
            if (other := _exchanged(held, pairs, deep - 1)) is not held:
                value[key] = other
    elif deep and type(value) is tuple:
        exchanged = tuple(_exchanged(held, pairs, deep - 1) for held in value)
        if any(one is not other for one, other in zip(value, exchanged, strict=True)):
            return exchanged
    return value


def after_swap(model: nn.Module) -> None:
    """Update ``model`` after its layers became sparse, compressed or dense again: its fused paths, then the ``post_swap_hooks``."""
    switch_fast_paths(model)
    for hook in post_swap_hooks:
        hook(model)


def switch_fast_paths(model: nn.Module) -> None:
    """Switch off the fused path of encoder layers with a sparse or compressed layer: in eval it would read dense weights."""
    for module in model.modules():
        for kind, name, off in FAST_PATHS:
            if not isinstance(module, kind):
                continue
            if any(isinstance(m, (NMWeight, CompressedLinear)) for m in module.modules()):
                module.__dict__.setdefault(KEPT, getattr(module, name))
                setattr(module, name, off)
            elif KEPT in module.__dict__:
                setattr(module, name, module.__dict__.pop(KEPT))
