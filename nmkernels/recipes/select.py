"""Which layers of a model can be made N:M sparse, and the reason for each that cannot or should not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ..nn import NMWeight, is_conv1d
from ..pattern import Pattern, RecipeError, ShapeError
from .report import Entry, Report

FilterFn = Callable[[nn.Module, str], bool]
HEADS = frozenset({"lm_head", "head", "classifier"})
TINY = 16
"""Fewer features than this on either side: the mask costs more than the product."""


@dataclass(frozen=True)
class Candidate:
    """A module that looks like a linear layer, with what stands against making it sparse."""

    name: str
    module: nn.Module
    shape: tuple[int, ...]
    impossible: str = ""
    unwise: str = ""


def select(model: nn.Module, pattern: Pattern, filter_fn: FilterFn | None = None) -> tuple[list[Candidate], Report]:
    """The layers to make sparse and the report on all of them; nothing is changed.

    Args:
        pattern: M must divide a layer's ``in_features``.
        filter_fn: ``filter_fn(module, name) -> bool`` chooses among the linear layers, output heads and tiny ones included; by default
            every layer is taken that nothing speaks against.

    Raises:
        ShapeError: the filter chose a layer that M does not divide. RecipeError: it chose one that cannot be made sparse for another reason.
    """
    chosen, report = [], Report()
    for c in _candidates(model, pattern):
        wanted = filter_fn(c.module, c.name) if filter_fn else True
        if filter_fn and wanted and c.impossible:
            error = ShapeError if "not a multiple" in c.impossible else RecipeError
            raise error(f"sparsify_: the filter chose layer {c.name!r}, which cannot be made {pattern} sparse: {c.impossible}. Leave it out of the filter.")
        reason = c.impossible or (c.unwise if filter_fn is None else "") or ("" if wanted else "not chosen by the filter")
        if not reason:
            chosen.append(c)
        report.entries.append(Entry(c.name, type(c.module).__name__, c.shape, not reason, reason or str(pattern)))
    return chosen, report


def _candidates(model: nn.Module, pattern: Pattern) -> Iterator[Candidate]:
    # a module may stand under several names; only a parameter of several modules is tied
    uses = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    bypassed = {id(m.out_proj) for m in model.modules() if isinstance(m, nn.MultiheadAttention)}
    head = _output_head(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) or is_conv1d(module) or isinstance(module, NMWeight):
            yield _judge(name, module, pattern, uses, bypassed, module is head)
        elif not isinstance(module, _ConvNd):
            for key, p in module.named_parameters(recurse=False):
                if p.dim() == 3:
                    full = f"{name}.{key}" if name else key
                    yield Candidate(full, module, tuple(p.shape), "3-D expert weights are not supported; only matrices are")


def _judge(name: str, module: nn.Module, pattern: Pattern, uses: Counter[int], bypassed: set[int], is_head: bool) -> Candidate:
    weight: Tensor = module.weight  # type: ignore[assignment]
    lazy = isinstance(weight, nn.parameter.UninitializedParameter)
    shape = () if lazy else tuple(weight.shape) if isinstance(module, nn.Linear) else tuple(weight.shape[::-1])
    impossible = unwise = ""
    if isinstance(module, NMWeight):
        impossible = "it is sparse already; give the dense model back with handle.remove() or densify_ first"
    elif id(module) in bypassed:
        impossible = "nn.MultiheadAttention reads out_proj's weight and never calls the layer"
    elif lazy:
        impossible = "its parameters are not initialised yet; run the model once first"
    elif isinstance(module, nn.Linear) and type(module) is not nn.Linear:
        impossible = f"{type(module).__name__} is a subclass of nn.Linear with behaviour of its own"
    elif uses[id(weight)] > 1:
        impossible = "its weight is tied to another module"
    elif not weight.is_floating_point():
        impossible = f"its weight is {weight.dtype}, not floating point"
    elif shape[1] % pattern.m:
        impossible = f"in_features={shape[1]} is not a multiple of M={pattern.m}"
    elif is_head or name.rpartition(".")[2] in HEADS:
        unwise = "output head"
    elif min(shape) < TINY:
        unwise = f"tiny: fewer than {TINY} features on one side"
    return Candidate(name, module, shape, impossible, unwise)


def _output_head(model: nn.Module) -> nn.Module | None:
    getter = getattr(model, "get_output_embeddings", None)
    found = getter() if callable(getter) else None
    return found if isinstance(found, nn.Module) else None
