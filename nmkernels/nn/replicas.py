"""``DistributedDataParallel`` sends compressed weights once, as it does the frozen Parameters of a dense model.

They are buffers, since they are constants and no optimizer has a use for them, and by default DDP broadcasts all buffers of a model before
every forward pass, in case they have changed on the first rank.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from .compressed import CompressedLinear
from .experts import CompressedStack


def _wrapped(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    """For each module that becomes a part of another: DDP is built, and has not sent anything yet."""
    if isinstance(parent, DistributedDataParallel) and name == "module":
        parent.register_forward_pre_hook(_Once())


class _Once:
    """Before the first forward pass, when all ranks have got the Parameters and buffers of the first, leave constants out."""

    done = False

    def __call__(self, ddp: Any, args: Any) -> None:
        if not self.done:
            self.done = True
            ddp.parameters_to_ignore |= constants(ddp.module)
            ddp._assign_modules_buffers()  # it would fail to send an empty list


def constants(model: nn.Module) -> set[str]:
    """The names of all buffers of compressed weights in ``model``."""
    layers = ((name, m) for name, m in model.named_modules() if isinstance(m, (CompressedLinear, CompressedStack)))
    return {f"{name}.{key}" if name else key for name, layer in layers for key in layer._buffers}


register_module_module_registration_hook(_wrapped)
