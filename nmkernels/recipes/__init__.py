"""Training recipes. Each method is one file with a frozen dataclass, which is registered automatically."""

from typing import TYPE_CHECKING, Any

from . import methods  # noqa: F401 every recipe registers itself
from .base import Observed, Recipe, Span, Stage
from .existing import adopt
from .handle import Handle, densify_
from .methods.ast import distill_loss
from .methods.proxsparse import prox
from .registry import find, get, names, recipe, text
from .report import Report
from .search.decay import DecaySearch, search_decay
from .search.permutation import Found, search_permutation
from .sparsify import sparsify_

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


_recipes = {cls.__name__: cls for cls in map(find, names())}
globals().update(_recipes)
__all__ = [
    *_recipes,
    "DecaySearch",
    "Found",
    "Handle",
    "Observed",
    "Recipe",
    "Report",
    "Span",
    "Stage",
    "adopt",
    "densify_",
    "distill_loss",
    "get",
    "names",
    "prox",
    "recipe",
    "search_decay",
    "search_permutation",
    "sparsify_",
    "text",
]
