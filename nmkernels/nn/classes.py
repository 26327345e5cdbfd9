"""Changing the class of a module: the object stays, and with it its Parameters, hooks, mode and everything that refers to it."""

from __future__ import annotations

from torch import nn


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
