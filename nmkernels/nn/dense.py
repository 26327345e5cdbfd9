"""Dense layers whose weights are integers with steps: which layers can have them, and an embedding that decodes only rows it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from .. import ops
from ..arguments import skips
from ..gemm.problem import Problem
from ..layouts import CONV1D, EMBEDDING, LINEAR, as_matrix, matrix_shape
from ..ops.compress import group_of
from ..ops.integers import BITS, nm_dequantize_values
from ..pattern import OptionError, Pattern, PatternError, RecipeError
from ..shards import is_sharded, place
from .classes import class_of, computed_by
from .compressed import CompressedLinear
from .swap import is_conv1d
from .traces import PROXY, constant, is_tracing, leaf
from .weight import NMWeight

DENSE = Pattern(1, 1)
"""The pattern of a dense weight of integers, which has no indices."""
MOST_NAMED = 5
"""How many layers an error names."""


class CompressedEmbedding(CompressedLinear):
    """An embedding y = W[ids] that stores W as integers with steps and decodes only the rows that it returns.

    Args:
        weight: dense integers ``(ids, features)``: ``ops.quantize_values(ops.compress(w, "1:1"), ...)``. An output head that is tied to the
            embedding may share it.
        padding_idx: as of ``nn.Embedding``.
        dtype: of y, and of the dense layer that it replaces; default torch's.

    Raises:
        PatternError: the weight is not of dense integers.

    Example:
        >>> c = ops.quantize_values(ops.compress(torch.tensor([[127.0, -1.0], [0.0, 2.0]]), "1:1"), "int8")
        >>> CompressedEmbedding(c)(torch.tensor([0, 0]))
        tensor([[127.,  -1.],
                [127.,  -1.]])
    """

    layouts = (EMBEDDING,)
    sparse = scale_grad_by_freq = False
    """Settings of the dense layer, which ``densify_`` restores."""

    def __init__(self, weight: ops.Compressed, padding_idx: int | None = None, dtype: torch.dtype | None = None) -> None:
        if weight.step is None or weight.pattern.m != 1:
            raise PatternError(f"CompressedEmbedding: its rows are dense integers, 1:1 with steps, and the weight is {weight!r}.")
        super().__init__(weight, None, EMBEDDING, dtype=dtype)
        self.num_embeddings, self.embedding_dim = self.shape
        self.padding_idx = padding_idx

    def forward(self, input: Tensor) -> Tensor:
        """y ``(..., features)``, the rows that the whole numbers ``input`` ``(...)`` name."""
        ids = input
        if isinstance(ids, PROXY):
            return leaf(self, ids)
        if is_tracing():
            return F.embedding(ids, constant(partial(self.dense, self.dtype)))
        rows = ids.reshape(-1)
        values, step = self.values.index_select(0, rows), self.step.index_select(0, rows)
        return nm_dequantize_values(values, step, self.embedding_dim, self.dtype).view(*ids.shape, self.embedding_dim)

    def as_op(self, x: Tensor) -> tuple[tuple[Any, ...], str]:
        raise RecipeError("explain: an embedding reads rows and multiplies nothing; explain one of the other layers.")

    def problems(self, tokens: int) -> list[tuple[Problem, ...]]:
        """None: no GEMM."""
        return []

    def tunable(self, counts: Sequence[int]) -> Iterator[tuple[str, CompressedLinear, Sequence[int]]]:
        """None: no GEMM."""
        return iter(())

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        weight = self.weight
        form = f"values={weight.kind}, group={weight.group or 'row'}, dtype={self.dtype}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, {form}"


def dense_integers(weight: Tensor, values: str, group: int | None = None) -> ops.Compressed:
    """A dense weight ``(out, in)`` as integers with steps."""
    return ops.quantize_values(ops.compress(weight, DENSE), values, group)


def has_dense_integers(module: nn.Module) -> bool:
    """Whether ``module`` is a dense layer whose weight is integers."""
    return isinstance(module, CompressedLinear) and module.pattern.m == 1 and "step" in module._buffers


def weight_key(layer: CompressedLinear) -> object:
    """A key that is equal for layers whose dense weights are one tensor: dense integers that an embedding and an output head share."""
    if not has_dense_integers(layer) or layer.adapter is not None or layer.order is not None or not layer.values.numel():
        return layer
    return place(layer.values), place(layer.step), layer.dtype, layer.shape, layer.layout == CONV1D


def dense_layout(module: nn.Module) -> str:
    """The layout of the weight of ``module`` if it is a dense layer whose weight can be integers; else empty."""
    if isinstance(module, (NMWeight, CompressedLinear)):
        return ""
    if isinstance(module, nn.Embedding):
        return EMBEDDING
    return LINEAR if isinstance(module, nn.Linear) else CONV1D if is_conv1d(module) else ""


def why_not_dense(module: nn.Module, values: str, group: int | None) -> str:
    """Why the dense layer ``module`` cannot have integers as weights, as a part of a sentence; empty if it can."""
    reason = computed_by(module, "weight") or computed_by(module, "bias")
    if reason:
        return reason
    if class_of(module) not in (nn.Linear, nn.Embedding) and not is_conv1d(module):
        return f"it is a {type(module).__name__}, which may do more with its weight than the layers of torch that can have integers"
    if getattr(module, "max_norm", None) is not None:
        return "its max_norm rescales rows of the weight whenever they are read; set max_norm = None once training is over"
    weight = module._parameters.get("weight")
    if weight is None:
        return "it has no Parameter weight"
    if is_sharded(weight):
        return "its weight is sharded; save a dense checkpoint, and load it into a plain model"
    if type(weight.detach()) not in (Tensor, FakeTensor) or not weight.is_floating_point():
        return f"its weight is a {type(weight.detach()).__name__} of {weight.dtype}, which is quantised already"
    if not weight.numel():
        return "its weight is empty"
    try:
        group = group_of("", values, group, DENSE, matrix_shape(weight.shape, dense_layout(module))[1])
    except OptionError as error:
        return str(error).removeprefix(": ").rstrip(".")
    if type(weight.detach()) is not Tensor or weight.is_meta:
        return ""
    if not bool(weight.isfinite().all()):
        return "its weight has NaN or infinite values, which no integers with a step can hold"
    matrix = as_matrix(weight.detach(), dense_layout(module))
    problem = too_large(matrix, values, lambda: dense_integers(matrix, values, group).dense(matrix.dtype))
    return problem and f"it has {problem}"


def too_large(weight: Tensor, values: str, decoded: Callable[[], Tensor]) -> str:
    """What is wrong if ``decoded()``, ``weight`` rounded to integers, overflows its dtype, as a part of a sentence; else empty. Rounding
    adds a few percent, so only weights near the largest number are decoded."""
    low, high = weight.aminmax() if weight.numel() else (0.0, 0.0)
    largest, dtype = max(-float(low), float(high)), weight.dtype
    limit = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)  # integers are decoded in fp32
    if largest <= limit / 2 or bool(decoded().isfinite().all()):
        return ""
    way = "cast the model to torch.bfloat16" if dtype == torch.float16 else "scale them down"
    return f"weights of up to {largest:.4g}, which rounded to {values} overflow {dtype}; {way} first, or keep floating-point values"


def dense_layers(verb: str, model: nn.Module, names: Sequence[str], values: str | None, group: int | None) -> dict[str, nn.Module]:
    """The dense layers of ``model`` that ``names`` name, and those that share their weights, by name; ``NMError`` unless all can have
    integers as weights."""
    names = [names] if isinstance(names, str) else list(names)
    if not names:
        return {}
    if values not in BITS:
        raise OptionError(f"{verb}: dense={names!r} stores weights as integers; pass values='int8' or 'int4' with it.")
    modules = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    fits = {name: module for name, module in modules.items() if dense_layout(module)}
    chosen: dict[str, nn.Module] = {}
    for wanted in names:
        found = {name: module for name, module in fits.items() if skips(name, wanted)}
        if not found:
            sparse = next((n for n, m in modules.items() if isinstance(m, (NMWeight, CompressedLinear)) and skips(n, wanted)), None)
            why = f"which has {', '.join(map(repr, [*fits][:MOST_NAMED])) or 'none'}{', ...' if len(fits) > MOST_NAMED else ''}"
            if sparse is not None:
                done = isinstance(modules[sparse], CompressedLinear)
                why = f"and {sparse!r} is {'compressed already' if done else 'sparse: values= rounds it without being named'}"
            raise RecipeError(f"{verb}: dense={wanted!r} names no dense linear layer or embedding of the model, {why}.")
        chosen |= found
    shared = {id(module._parameters.get("weight")): name for name, module in chosen.items()}
    for name, module in modules.items():
        partner = next((shared[id(p)] for p in module._parameters.values() if p is not None and id(p) in shared), None)
        if partner is None or name in chosen:
            continue
        if name not in fits:
            what = f"{name!r}, a {type(module).__name__}, which cannot read integers"
            raise RecipeError(f"{verb}: layer {partner!r} shares its weight with {what}; leave it out of dense=.")
        chosen[name] = module
    for name, module in chosen.items():
        reason = why_not_dense(module, values, group)
        if not reason and module._parameters["weight"].is_meta:  # type: ignore[union-attr]
            reason = "it has no data to round: its weight is on the meta device, or offloaded"
        if reason:
            kind = OptionError if reason.startswith("group=") else RecipeError
            raise kind(f"{verb}: layer {name!r} cannot be rounded: {reason}. Leave it out of dense=, or change that first.")
    return chosen
