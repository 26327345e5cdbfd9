"""Changing the class of a module, which keeps the object, its Parameters, hooks, mode and every reference to it; and what other libraries
have made of its tensors."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized


def class_of(module: nn.Module) -> type[nn.Module]:
    """The class of ``module``, without the one that FSDP2's ``fully_shard`` puts in front."""
    kind = type(module)
    return kind.__mro__[2] if kind.__mro__[1].__name__ == "FSDPModule" else kind


def change_class_(module: nn.Module, kind: type[nn.Module]) -> None:
    """Make ``module`` one of ``kind``, with FSDP2's class in front as before."""
    old = type(module)
    if class_of(module) is not old:
        kind = type(f"FSDP{kind.__name__}", (old.__mro__[1], kind), {k: v for k, v in vars(old).items() if k == "__deepcopy__"})
    module.__class__ = kind


def computed_by(module: nn.Module, key: str = "weight") -> str:
    """What computes the tensor ``key`` of ``module`` from others, and how to undo that; empty where nothing known does."""
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
    """The attribute ``qconfig``: warns that torch.ao.quantization, which sets it on every module, then skips layers of a class that it does
    not know."""

    def __get__(self, layer: nn.Module | None, kind: type[nn.Module]) -> Any:
        if layer is None:
            return self
        if "qconfig" not in layer.__dict__:
            raise AttributeError(f"{kind.__name__!r} object has no attribute 'qconfig'")
        return layer.__dict__["qconfig"]

    def __set__(self, layer: nn.Module, value: object) -> None:
        layer.__dict__["qconfig"] = value
        warnings.warn(
            f"torch.ao.quantization matches exact classes only: it passes over {type(layer).__name__} and leaves it as it is. To quantise "
            "such layers, give the dense ones back first, with the zeros in their weights: handle.remove() after finish(), or "
            "nm.densify_(model).",
            stacklevel=2,
        )

    def __delete__(self, layer: nn.Module) -> None:
        del layer.__dict__["qconfig"]
