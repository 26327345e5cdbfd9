"""Which layers of a model can be made N:M sparse, and the reason for each that cannot or should not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ..nn import CompressedLinear, NMWeight, is_conv1d, is_conv1d_type
from ..pattern import Pattern, RecipeError, ShapeError
from .report import Entry, Report

FilterFn = Callable[[nn.Module, str], bool]
Judgement = Callable[[int, int], str]
DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
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
    misshapen: bool = False


def select(
    model: nn.Module,
    pattern: Pattern,
    filter_fn: FilterFn | None = None,
    unwise: Judgement | None = None,
    obstacle: Judgement = lambda rows, cols: "",
) -> tuple[list[Candidate], Report]:
    """The layers to make sparse and the report on all of them; nothing is changed.

    Args:
        pattern: M must divide a layer's ``in_features``.
        filter_fn: ``filter_fn(module, name) -> bool`` chooses among the linear layers, output heads and tiny ones included; by default
            every layer is taken that nothing speaks against.
        unwise: ``unwise(out, in)`` says what speaks against a layer of that shape beside the general rules; empty where nothing does.
        obstacle: ``obstacle(out, in)`` says why the recipe cannot do with a weight of that shape; empty where it can.

    Raises:
        ShapeError: the filter chose a layer that M does not divide.
        RecipeError: it chose one that cannot be made sparse for another reason.
    """
    chosen, report = [], Report()
    for c in _candidates(model, pattern, obstacle):
        wanted = filter_fn is None or bool(filter_fn(c.module, c.name))
        if filter_fn is not None and wanted and c.impossible:
            error = ShapeError if c.misshapen else RecipeError
            raise error(
                f"sparsify_: the filter chose layer {c.name!r}, which cannot be made {pattern} sparse: {c.impossible}. "
                "Leave it out of the filter."
            )
        against = c.unwise or (unwise(*c.shape) if unwise is not None and len(c.shape) == 2 else "")
        reason = c.impossible or (against if filter_fn is None else "") or ("" if wanted else "not chosen by the filter")
        if not reason:
            chosen.append(c)
        report.entries.append(Entry(c.name, type(c.module).__name__, c.shape, not reason, reason or str(pattern)))
    return chosen, report


def _candidates(model: nn.Module, pattern: Pattern, obstacle: Judgement) -> Iterator[Candidate]:
    # a module may stand under several names; only a parameter of several modules is tied
    uses = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    bypassed = {id(m.out_proj) for m in model.modules() if isinstance(m, nn.MultiheadAttention)}
    heads = _output_heads(model)
    for name, module in model.named_modules():
        if _looks_linear(module):
            yield _judge(name, module, pattern, obstacle, uses, bypassed, heads)
        elif isinstance(module, nn.MultiheadAttention):
            for key, p in module.named_parameters(recurse=False):
                if p.dim() == 2:
                    yield Candidate(_join(name, key), module, tuple(p.shape), "nn.MultiheadAttention multiplies it itself")
        elif not isinstance(module, _ConvNd):
            for key, p in module.named_parameters(recurse=False):
                # one matrix per expert; position embeddings and class tokens are 3-D with a first size of 1
                if p.dim() == 3 and p.shape[0] > 1:
                    yield Candidate(_join(name, key), module, tuple(p.shape), "3-D expert weights are not supported; only matrices are")


def _looks_linear(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, NMWeight, CompressedLinear)) or any(map(is_conv1d_type, type(module).__mro__))


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _judge(
    name: str, module: nn.Module, pattern: Pattern, obstacle: Judgement, uses: Counter[int], bypassed: set[int], heads: set[int]
) -> Candidate:
    if isinstance(module, CompressedLinear):
        return Candidate(name, module, module.weight.shape, "it is compressed already")
    weight: Tensor = module.weight  # type: ignore[assignment]
    if isinstance(weight, nn.parameter.UninitializedParameter):
        return Candidate(name, module, (), "its parameters are not initialised yet; run the model once first")
    shape = tuple(weight.shape) if isinstance(module, nn.Linear) else tuple(weight.shape[::-1])
    impossible = _obstacle(module, weight, uses, bypassed)
    misshapen = ""
    if not impossible:
        misshapen = f"in_features={shape[1]} is not a multiple of M={pattern.m}" if shape[1] % pattern.m else obstacle(*shape)
    unwise = ""
    if id(module) in heads or name.rpartition(".")[2] in HEADS:
        unwise = "output head"
    elif shape and min(shape) < TINY:
        unwise = f"tiny: fewer than {TINY} features on one side"
    return Candidate(name, module, shape, impossible or misshapen, unwise, bool(misshapen))


def _obstacle(module: nn.Module, weight: Tensor, uses: Counter[int], bypassed: set[int]) -> str:
    """Why a linear layer cannot be made sparse whatever the pattern is; empty if it can."""
    kind = type(module).__name__
    if isinstance(module, NMWeight):
        return "it is sparse already; give the dense model back with handle.remove() or densify_ first"
    if id(module) in bypassed:
        return "nn.MultiheadAttention reads out_proj's weight and never calls the layer"
    if type(module) is not nn.Linear and not is_conv1d(module):
        return f"{kind} is a subclass of {'nn.Linear' if isinstance(module, nn.Linear) else 'Conv1D'} with behaviour of its own"
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance (a hook of accelerate, for instance), which bypasses the layer's own"
    if module._parameters.get("weight") is not weight:
        return "its weight is computed from other tensors (weight_norm, spectral_norm or torch's pruning); make it a plain Parameter first"
    if uses[id(weight)] > 1:
        return "its weight is tied to another module"
    if weight.dtype not in DTYPES:
        return f"its weight is {weight.dtype}; only float16, bfloat16, float32 and float64 have kernels"
    if weight.dim() != 2:
        return f"its weight has {weight.dim()} dimensions and not two: it is flattened or sharded; call sparsify_ before the wrapper"
    return ""


def _output_heads(model: nn.Module) -> set[int]:
    """Ids of the modules that the model, or one inside a wrapper, names as its output embeddings."""
    heads = set()
    for module in model.modules():
        getter = getattr(module, "get_output_embeddings", None)
        if not callable(getter):
            continue
        try:
            heads.add(id(getter()))
        except (NotImplementedError, AttributeError):
            continue  # Hugging Face's way to say that there is none
    return heads
