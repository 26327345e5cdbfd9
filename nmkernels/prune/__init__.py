"""One-shot pruning of pretrained models: ``prune_`` in memory, ``folder.prune_folder`` from one Hugging Face folder to another.

Each method is one file of ``methods``, registered automatically.
"""

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from ..nn.compress import data_rounders
from . import methods
from .base import METHODS, OneShot
from .prune import prune_
from .round_layers import round_on_data

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


for _module in iter_modules(methods.__path__):
    import_module(f"{methods.__name__}.{_module.name}")

data_rounders.append(round_on_data)
_kinds = {cls.__name__: cls for cls in METHODS.values()}
globals().update(_kinds)
__all__ = [*_kinds, "OneShot", "prune_"]
