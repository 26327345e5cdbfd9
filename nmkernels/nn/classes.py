"""Changing the class of a module: the object stays, and with it its Parameters, hooks, mode and everything that refers to it. And what
other libraries have made of a module's tensors."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized


def class_of(module: nn.Module) -> type[nn.Module]:
    """The class of ``module``; where FSDP2's ``fully_shard`` has put its own in front of it, the one behind."""
    kind = type(module)
    return kind.__mro__[2] if kind.__mro__[1].__name__ == "FSDPModule" else kind


def change_class_(module: nn.Module, kind: type[nn.Module]) -> None:
    """Make ``module`` one of ``kind``, and FSDP2's as before where it was that."""
    old = type(module)
    if class_of(module) is not old:
        kind = type(f"FSDP{kind.__name__}", (old.__mro__[1], kind), {k: v for k, v in vars(old).items() if k == "__deepcopy__"})
    module.__class__ = kind


def computed_by(module: nn.Module, key: str = "weight") -> str:
    """What makes the tensor ``key`` of ``module`` from others, and how to undo that; empty where it is a Parameter, or nothing known."""
    if is_parametrized(module, key):
        kinds = ", ".join(type(part).__name__ for part in module.parametrizations[key])  # type: ignore[index]
        undo = f"remove_parametrizations(layer, {key!r})"
        return f"its {key} is computed by torch.nn.utils.parametrize ({kinds}); undo it first, by torch.nn.utils.parametrize.{undo}"
    for hook in module._forward_pre_hooks.values():
        library = type(hook).__module__
        if not library.startswith("torch.nn.utils.") or getattr(hook, "_tensor_name", getattr(hook, "name", None)) != key:
            continue
        last = library.rpartition(".")[2]
        undo = f"torch.nn.utils.prune.remove(layer, {key!r})" if last == "prune" else f"torch.nn.utils.remove_{last}(layer)"
        return f"its {key} is computed by {library} before every forward pass; undo it first, by {undo}"
    return ""


class QuantisedByClass:
    """The attribute ``qconfig``, which torch.ao.quantization sets on every module of a model that it quantises: of layers that it then
    passes over, as it goes by exact class, this says so."""

    def __get__(self, layer: nn.Module | None, kind: type[nn.Module]) -> Any:
        if layer is None:
            return self
        if "qconfig" not in layer.__dict__:
            raise AttributeError(f"{kind.__name__!r} object has no attribute 'qconfig'")
        return layer.__dict__["qconfig"]

    def __set__(self, layer: nn.Module, value: object) -> None:
        layer.__dict__["qconfig"] = value
        warnings.warn(
            f"torch.ao.quantization goes by exact class: it passes over {type(layer).__name__}, which stays as it is. To quantise such "
            "layers, give the dense ones back first, with the zeros in their weights: handle.remove() after finish(), or "
            "nm.densify_(model).",
            stacklevel=2,
        )

    def __delete__(self, layer: nn.Module) -> None:
        del layer.__dict__["qconfig"]
