"""Training recipes. Each method is one file of ``methods`` or ``contrib`` with a frozen dataclass, which is registered automatically."""

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from ..train.capture import CapturedStep
from ..train.decay_search import DecaySearch as DecaySearch
from ..train.decay_search import search_decay
from ..train.handle import Handle
from ..train.handle import densify_ as densify_
from ..train.report import Report as Report
from ..train.sparsify import sparsify_ as sparsify_
from . import contrib, methods
from .contract import Hooks, Observed, Recipe, Setup, Span, Stage
from .contrib.ast import distill_loss
from .contrib.proxsparse import prox
from .existing import adopt
from .methods.permutation import Permutation as Permutation
from .methods.permutation import search_permutation
from .registry import find, get, names, recipe, text

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
    "Handle",
    "Hooks",
    "Observed",
    "Recipe",
    "Setup",
    "Span",
    "Stage",
    "adopt",
    "distill_loss",
    "get",
    "names",
    "prox",
    "recipe",
    "search_decay",
    "search_permutation",
    "text",
]
