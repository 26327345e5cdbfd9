"""Training recipes. Each method is one file of ``methods`` or ``contrib`` with a frozen dataclass, which is registered automatically."""

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from . import contrib, methods
from .base import Observed, Recipe, Setup, Span, Stage
from .capture import CapturedStep
from .contrib.ast import distill_loss
from .contrib.proxsparse import prox
from .decay_search import DecaySearch, search_decay
from .existing import adopt
from .handle import Handle, densify_
from .hooks import Hooks
from .methods.permutation import Permutation, search_permutation
from .oneshot import prune_
from .registry import find, get, names, recipe, text
from .report import Report
from .sparsify import sparsify_

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


for _folder in (methods, contrib):
    for _module in iter_modules(_folder.__path__):
        import_module(f"{_folder.__name__}.{_module.name}")

_recipes = {cls.__name__: cls for cls in map(find, names())}
globals().update(_recipes)
__all__ = [
    *_recipes,
    "CapturedStep",
    "DecaySearch",
    "Permutation",
    "Handle",
    "Hooks",
    "Observed",
    "Recipe",
    "Report",
    "Setup",
    "Span",
    "Stage",
    "adopt",
    "densify_",
    "distill_loss",
    "get",
    "names",
    "prox",
    "prune_",
    "recipe",
    "search_decay",
    "search_permutation",
    "sparsify_",
    "text",
]
