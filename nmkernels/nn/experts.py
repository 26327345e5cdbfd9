"""Experts of mixture-of-experts models, whose matrices are stacked in 3-D Parameters: sparse for training, compressed for inference.

The new class of a Hugging Face experts module (``use_experts_implementation``, transformers 5) derives from its old one, so the module
keeps its own implementation. Each stack is one N:M weight, with the matrices of all experts one below the other. Its settings are in a
child ``nm_<name>`` of the module, so that the Parameter keeps its name, also in state dicts.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from ..arguments import whole_number
from ..autograd.transforms import WeightTransform
from ..gemm.choose import Routes
from ..layouts import EXPERTS, EXPERTS_T, REDUCED, as_matrix, as_stored, ordered
from ..pattern import NMError, Pattern, PatternLike, ShapeError
from .classes import change_class_, class_of
from .compressed import CompressedLinear, other_kind, other_pattern, uncast
from .weight import NMWeight, warn_if_changed

PREFIX = "nm_"
"""Prefix of a stack's name: the name of the child that makes the stack sparse or holds it compressed."""

LOCK = threading.Lock()


def stacks_of(module: nn.Module) -> dict[str, str]:
    """The stacked Parameters that a Hugging Face experts module multiplies, name → layout; empty for other modules.

    The layout follows from attributes that ``use_experts_implementation`` sets, so no list of models is needed.
    """
    attributes = module.__dict__
    if not (hasattr(type(module), "_apply_gate") and {"is_transposed", "has_bias", "has_gate"} <= attributes.keys()):
        return {}
    layout = EXPERTS_T if attributes["is_transposed"] else EXPERTS
    names = "gate_up_proj" if attributes["has_gate"] else "up_proj", "down_proj"
    return {name: layout for name in names if (p := module._parameters.get(name)) is not None and p.dim() == 3}


def experts_per_token(module: nn.Module) -> int | None:
    """The number of experts per token of a Hugging Face experts module, from the model's config; None if unknown."""
    config = module.__dict__.get("config")
    known = (getattr(config, name, None) for name in ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k"))
    return next((count for count in known if isinstance(count, int) and count > 0), None)


def _joined(front: Any, dense: Any) -> Any:
    name = front.__name__.removesuffix("Experts") + dense.__name__
    return type(name, (front, dense), {"__module__": __name__, "__doc__": front.__doc__, "front": front, "dense_type": dense})


in_front: Callable[..., Any] = cache(_joined)
"""The class that derives from ``front`` and ``dense``; cached, so that all modules of a model share it."""


def _empty(front: type[nn.Module], dense: type[nn.Module]) -> Any:
    return nn.Module.__new__(in_front(front, dense))


class _InFront(nn.Module):
    """Base of both classes: copies and pickles restore the derived class, also in another process."""

    dense_type: ClassVar[type[nn.Module]]
    front: ClassVar[type[nn.Module]]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _empty, (self.front, self.dense_type), self.__dict__


def layer_name(name: str, module: nn.Module) -> str:
    """The name of the layer ``module``, which is called ``name`` in its model; for a stack the name of its Parameter."""
    if not isinstance(module, (StackedWeight, CompressedStack)):
        return name
    parent, dot, child = name.rpartition(".")
    return f"{parent}{dot}{child.removeprefix(PREFIX)}"


def sparse_layers(model: nn.Module) -> dict[str, NMWeight | CompressedLinear | CompressedStack]:
    """The layers of ``model`` that have an N:M weight, by name; stacks of experts by the name of their Parameter."""
    kinds = (NMWeight, CompressedLinear, CompressedStack)
    return {layer_name(name, module): module for name, module in model.named_modules() if isinstance(module, kinds)}


def child_name(name: str) -> str:
    """The inverse of ``layer_name`` for a stack: the name of the child for the Parameter ``name``."""
    parent, dot, key = name.rpartition(".")
    return f"{parent}{dot}{PREFIX}{key}"


class StackedWeight(NMWeight):
    """The N:M weight that a stack of an experts module is: the matrices of all experts one below the other, ``(E·out, in)``.

    A child of the module whose Parameter it makes sparse. What a method takes once from each weight, such as S-STE's scale, it takes from
    each expert's matrix.
    """

    bias = None
    owner: nn.Module

    def __init__(self, module: nn.Module, key: str, layout: str, pattern: Pattern) -> None:
        super().__init__()
        self.__dict__["owner"] = module  # no child: it is the parent
        self.key, self.layout = key, layout
        self.loads = False
        self._start(pattern)

    @property
    def weight(self) -> nn.Parameter:  # type: ignore[override]
        """The Parameter of the experts module, as that stores it."""
        parameter: Any = self.owner._parameters.get(self.key)
        # torch.nn.utils may compute it, which check_computed refuses
        return getattr(self.owner, self.key) if parameter is None else parameter

    @property
    def home(self) -> tuple[nn.Module, str]:
        """The experts module, and the name of the stack there."""
        return self.owner, self.key

    @property
    def experts(self) -> int:
        """E, the number of experts."""
        return int(self.weight.shape[0])

    def by_expert(self, matrix: Tensor) -> Tensor:
        """A matrix like ``master`` ``(E·out, in)`` as ``(E, out, in)``."""
        return matrix.unflatten(0, (self.experts, -1))

    def tunable(self, counts: Sequence[int]) -> Iterator[tuple[str, NMWeight, Sequence[int]]]:
        """None here: the experts module has them."""
        return iter(())

    def forward(self, weight: Tensor) -> Tensor:
        """W̃ of ``weight``, both as the Parameter is stored; the gradient reaches ``weight`` by the transform's rule."""
        self.ran = True
        return self.differentiable_weight(weight, weight.dtype)

    def _started(self, transform: WeightTransform) -> dict[str, Tensor]:
        if type(transform).start is WeightTransform.start:
            return {}
        starts = []
        for number, matrix in enumerate(self.by_expert(self.master.detach())):
            try:
                starts.append(transform.start(matrix))
            except NMError as error:
                raise type(error)(f"expert {number}: {error}") from error
        return {name: torch.stack([values[name] for values in starts]) for name in starts[0]}

    def _extras(self, transform: WeightTransform) -> list[Tensor]:
        # one number for each expert, as a column over the rows of all
        rows = self.shape[0] // self.experts
        extras = ((getattr(self, name), kind) for name, kind in transform.reads.items())
        return [value.repeat_interleave(rows).unsqueeze(1) if kind == "fixed" else value for value, kind in extras]

    def _loads(self, state_dict: dict[str, Any], prefix: str) -> bool:
        return self.loads

    def extra_repr(self) -> str:
        return f"experts={self.experts}, in_features={self.shape[1]}, layout={self.layout}, {self._uses()}"


class SparseExperts(_InFront):
    """An experts module that multiplies the N:M forms of its stacks, with the implementation that the model's config names.

    ``sparsify_`` converts a model's experts module in place. During a call, attributes of the module shadow the Parameters, so that
    ``self.gate_up_proj`` is W̃.
    """

    @property
    def stacks(self) -> dict[str, StackedWeight]:
        """The sparse stacks by the names of their Parameters."""
        return {child.key: child for child in self._modules.values() if isinstance(child, StackedWeight)}

    def tunable(self, counts: Sequence[int]) -> Iterator[tuple[str, nn.Module, Sequence[int]]]:
        """The stacks, for the report of ``nm.tune``; there is nothing to tune, since torch multiplies them until ``compress_``."""
        yield from ((key, stack, counts) for key, stack in self.stacks.items())

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The dense module's forward, with W̃ instead of W."""
        stacks, attributes = self.stacks, self.__dict__
        if all(stack.transform is None for stack in stacks.values()):  # dense, or finished
            for stack in stacks.values():
                stack.ran = True
            return super().forward(*args, **kwargs)
        for key, stack in stacks.items():
            if key not in self._parameters:
                stack.check_computed()
        self._enter(1)
        try:
            for key, stack in stacks.items():
                # in a replica of DataParallel the weights are plain attributes, not Parameters
                attributes[key] = stack(self._parameters[key] if key in self._parameters else attributes["_former_parameters"][key])
            return super().forward(*args, **kwargs)
        finally:
            if self._enter(-1) == 0:
                for key in stacks:
                    attributes.pop(key, None)

    def _enter(self, more: int) -> int:
        """Count the running calls, so that the effective weights are removed only when the last thread's call ends."""
        attributes = self.__dict__
        if torch.compiler.is_compiling():
            return 1 - more if more > 0 else 0
        with LOCK:
            attributes["_nm_calls"] = count = attributes.get("_nm_calls", 0) + more
        return int(count)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        for key, stack in self.stacks.items():
            stack.loads = f"{prefix}{key}" in state_dict  # torch passes children only their own keys

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        moved = super()._apply(*args, **kwargs)
        for stack in self.stacks.values():
            stack.put_in_order()
        return moved


class CompressedStack(nn.Module):
    """The compressed matrices of all experts, each multiplied with its expert's tokens.

    Args:
        weight: the compressed matrices one below the other, ``(E·out, in)``, a constant.
        experts: E.
        layout: how the dense model stores them, ``"experts"`` ``(E, out, in)`` or ``"experts_t"`` ``(E, in, out)``.
        keep_dense, dtype: as for ``CompressedLinear``.

    The buffers are ``values`` ``(E, out, kept)``, ``indices`` ``(E, out, bytes)``, and for integers ``step`` ``(E, out, steps)``, which
    stays bfloat16 when the module is cast.

    Example:
        >>> stack = CompressedStack(ops.compress(torch.randn(3 * 4, 8), "2:4"), experts=3)
        >>> stack(torch.randn(5, 8), [2, 0, 3]).shape
        torch.Size([5, 4])
    """

    _is_hf_initialized = True
    """Tells transformers that there is nothing to initialise."""
    values: Tensor
    indices: Tensor
    step: Tensor

    def __init__(
        self,
        weight: ops.Compressed,
        experts: int,
        layout: str = EXPERTS,
        keep_dense: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        rows, cols = (int(size) for size in weight.shape)
        experts = whole_number(ShapeError, "CompressedStack: experts", experts)
        if rows % experts:
            raise ShapeError(f"CompressedStack: {rows} rows cannot be divided among {experts} experts.")
        if layout not in (EXPERTS, EXPERTS_T):
            raise ShapeError(f"CompressedStack: layout {layout!r} is unknown; choose {EXPERTS} or {EXPERTS_T}.")
        self.pattern: Pattern = weight.pattern
        self.layout, self.keep_dense = layout, keep_dense
        self.experts, self.out_features, self.in_features = experts, rows // experts, cols
        self._dtype = dtype or torch.get_default_dtype()
        self._put(weight)

    def _put(self, weight: ops.Compressed) -> None:
        size = self.experts, self.out_features
        for name, tensor in (("values", weight.values), ("indices", weight.indices), ("step", weight.step)):
            if tensor is not None:
                # as in CompressedLinear, dense integers have no indices
                self.register_buffer(name, tensor.unflatten(0, size), persistent=name != "indices" or tensor.shape[1] > 0)
        self._forget()

    @property
    def weight(self) -> ops.Compressed:
        """The compressed matrices one below the other, ``(E·out, in)``, as a view of the module's buffers."""
        if not self.indices.numel() and self.indices.device != self.values.device:  # as in CompressedLinear
            self.indices = torch.empty_like(self.indices, device=self.values.device)
        shape, step = (self.experts * self.out_features, self.in_features), self._buffers.get("step")
        parts = self.values.flatten(0, 1), self.indices.flatten(0, 1)
        return ops.Compressed(*parts, self.pattern, shape, None if step is None else step.flatten(0, 1))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values, or with integers of the dense stack that it replaces."""
        return self.values.dtype if self._buffers.get("step") is None else self._dtype

    def round_(self, weight: ops.Compressed) -> None:
        """Take ``weight`` ``(E·out, in)``, whose values are integers with a step, instead of the one with floating-point values."""
        self._dtype = self.dtype
        self._put(weight)

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(E, out, in)``."""
        return self.experts, self.out_features, self.in_features

    @property
    def stored_shape(self) -> tuple[int, int, int]:
        """The shape of the dense Parameter."""
        rows, cols = self.out_features, self.in_features
        return (self.experts, rows, cols) if self.layout == EXPERTS else (self.experts, cols, rows)

    def dense(self) -> Tensor:
        """The dense stack, as the dense model stores it."""
        return as_stored(self.weight.dense(self.dtype), self.layout, self.stored_shape)

    def forward(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """y = x Wₑᵀ ``(tokens, out)`` for tokens x ``(tokens, in)`` sorted by expert, with ``counts[e]`` tokens of expert e."""
        parts = [layer(part) for layer, part in zip(self.layers, x.split(list(counts)), strict=True) if part.shape[0]]
        return torch.cat(parts) if parts else x.new_empty(0, self.out_features)

    @property
    def layers(self) -> list[CompressedLinear]:
        """One layer for each expert, with views of the buffers."""
        made_of = self.values, self.indices, self._buffers.get("step"), self.keep_dense
        before, layers = self._layers.get("layers", ((), []))
        # moving or loading the module replaces its buffers
        if len(before) != len(made_of) or any(old is not new for old, new in zip(before, made_of, strict=True)):
            forms, dtype = matrices_of(self.weight, self.experts), self.dtype
            layers = [CompressedLinear(form, keep_dense=self.keep_dense, dtype=dtype).train(self.training) for form in forms]
            self._layers.put("layers", (made_of, layers))
        return layers

    def _forget(self) -> None:
        self._layers = Routes()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        problem = other_kind(self.values, state_dict, prefix) or other_pattern(self, state_dict, prefix)
        if problem:
            rest[-1].append(problem)  # torch's list of errors
        else:
            super()._load_from_state_dict(state_dict, prefix, *rest)
        self._forget()

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        self._forget()
        return super()._apply(uncast(self, fn), *args, **kwargs)

    def train(self, mode: bool = True) -> CompressedStack:
        self._forget()
        return super().train(mode)

    def extra_repr(self) -> str:
        sizes = f"experts={self.experts}, in_features={self.in_features}, out_features={self.out_features}"
        weight = self.weight
        integers = "" if weight.step is None else f"values={weight.kind}, group={weight.group or 'row'}, "
        return f"{sizes}, pattern={self.pattern}, {integers}dtype={self.dtype}, layout={self.layout}"


def matrices_of(weight: ops.Compressed, experts: int) -> list[ops.Compressed]:
    """The matrices ``(out, in)`` of a compressed stack ``(E·out, in)``, as views."""
    rows, cols = (int(size) for size in weight.shape)
    shape, size = (rows // experts, cols), (experts, rows // experts)
    values, indices = weight.values.unflatten(0, size), weight.indices.unflatten(0, size)
    steps = [None] * experts if weight.step is None else weight.step.unflatten(0, size)
    return [ops.Compressed(v, i, weight.pattern, shape, step) for v, i, step in zip(values, indices, steps, strict=True)]


def by_expert(module: nn.Module, keep: Tensor | None, *args: Any, **kwargs: Any) -> Iterator[tuple[int, Tensor, Tensor]]:
    """For each expert of an experts module, dense, finished or compressed, that has tokens in a call: its number, its tokens
    ``(tokens, hidden)``, and what its last matrix multiplies. ``keep``: which tokens count; None for all.
    """
    experts: Any = module
    forward = getattr(module, "dense_type", type(module)).forward
    x, numbers = tuple(inspect.signature(forward).bind(module, *args, **kwargs).arguments.values())[1:3]
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    stack = experts.stacks.get(first) if isinstance(module, CompressedExperts) else None
    weight = experts.get_parameter(first) if stack is None else stack
    for expert in range(len(weight) if stack is None else stack.experts):
        chosen = (numbers == expert).any(-1)
        tokens = x[chosen if keep is None else chosen & keep].to(weight.dtype)
        if len(tokens):
            bias = experts.get_parameter(f"{first}_bias")[expert] if experts.has_bias else None
            if stack is None:
                y = F.linear(tokens, weight[expert].t() if experts.is_transposed else weight[expert], bias)
            else:
                y = stack.layers[expert](tokens)
                y = y if bias is None else y + bias
            yield expert, tokens, experts._apply_gate(y) if experts.has_gate else experts.act_fn(y)


_Layers = Routes
"""The name in pickles of earlier versions."""


class CompressedExperts(_InFront):
    """An experts module with compressed stacks, which multiplies each expert's tokens by its matrices, one expert after the other.

    ``compress_`` and ``load_compressed`` convert a model's experts module in place; everything but the compressed stacks, including stacks
    that were left dense, remains the model's own. Differentiable in the tokens, their weights and the biases. Under ``torch.compile``,
    where the number of tokens per expert is unknown, the stacks are expanded and the model's own implementation runs.
    """

    _is_hf_initialized = True
    """Stops transformers from initialising the dense Parameters, which do not exist."""

    @property
    def stacks(self) -> dict[str, CompressedStack]:
        """The compressed stacks by the names of the Parameters that they replace."""
        return {key.removeprefix(PREFIX): child for key, child in self._modules.items() if isinstance(child, CompressedStack)}

    def tunable(self, counts: Sequence[int]) -> Iterator[tuple[str, nn.Module, Sequence[int]]]:
        """For ``nm.tune``: the first expert's layer of each stack, with the average number of tokens per expert."""
        chosen = experts_per_token(self) or 1
        for key, stack in self.stacks.items():
            yield key, stack.layers[0], [-(-tokens * chosen // stack.experts) for tokens in counts]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The weighted sum over each token's experts ``(tokens, hidden)``; arguments: tokens, experts and weights ``(tokens, k)``."""
        if torch.compiler.is_compiling():
            return self._expanded(*args, **kwargs)
        if kwargs:
            args = tuple(inspect.signature(self.dense_type.forward).bind(self, *args, **kwargs).arguments.values())[1:]
        x, numbers, weights = args
        tokens, choices = numbers.shape
        chosen = numbers.reshape(-1)
        order = chosen.argsort(stable=True)
        experts = next(iter(self.stacks.values())).experts
        # synchronises once; under expert parallelism the index after the last expert means another rank's expert
        counts = torch.bincount(chosen, minlength=experts)[:experts].tolist()
        order = order[: sum(counts)]
        expert_of = chosen[order]
        first, last = ("gate_up_proj" if self.has_gate else "up_proj"), "down_proj"
        y = self._times(first, x[order // choices], counts, expert_of)
        y = self._apply_gate(y) if self.has_gate else self.act_fn(y)  # type: ignore[operator]
        y = self._times(last, y, counts, expert_of)
        if self.__dict__.get("has_post_expert_norm"):
            y = self.post_expert_norm(y)  # type: ignore[operator]
        y = y * weights.reshape(-1)[order, None]
        by_token = y.new_zeros(tokens * choices, y.shape[-1]).index_copy(0, order, y)
        return by_token.view(tokens, choices, -1).sum(1).to(x.dtype)

    def _times(self, name: str, x: Tensor, counts: list[int], expert_of: Tensor) -> Tensor:
        """Multiply each token by its expert's matrix of the stack ``name``, and add that expert's bias."""
        stack = self.stacks.get(name)
        if stack is not None:
            y = stack(x if torch.is_autocast_enabled(x.device.type) else x.to(stack.dtype), counts)
        else:
            weight = self.get_parameter(name)
            matrices = weight.transpose(1, 2) if self.is_transposed else weight
            parts = [F.linear(part, matrix) for part, matrix in zip(x.split(counts), matrices, strict=True) if part.shape[0]]
            y = torch.cat(parts) if parts else x.new_empty(0, matrices.shape[1])
        return y + self.get_parameter(f"{name}_bias")[expert_of].to(y.dtype) if self.has_bias else y

    def _expanded(self, *args: Any, **kwargs: Any) -> Tensor:
        stacks = self.stacks
        try:
            for name, stack in stacks.items():
                self.__dict__[name] = stack.dense()
            return super().forward(*args, **kwargs)
        finally:
            for name in stacks:
                self.__dict__.pop(name, None)


# ---- from dense to sparse, and on to compressed, in place


def make_stack_sparse_(module: nn.Module, key: str, pattern: PatternLike) -> StackedWeight:
    """Make the stack ``key`` of an experts module sparse, in place, and return it; raises ``ShapeError`` if M does not divide ``in``."""
    p, layout = Pattern(pattern), stacks_of(module)[key]
    p.check_divides("sparsify_", int(module._parameters[key].shape[REDUCED[layout]]), "in_features")  # type: ignore[union-attr]
    stack = StackedWeight(module, key, layout, p).train(module.training)
    stack.put_in_order()
    if not isinstance(module, SparseExperts):
        change_class_(module, in_front(SparseExperts, class_of(module)))
    module.add_module(PREFIX + key, stack)
    return stack  # type: ignore[return-value]


def make_stack_dense_(stack: StackedWeight) -> nn.Module:
    """Turn ``stack`` back into a plain Parameter with the same values, and return the experts module."""
    warn_if_changed(stack)
    stack.remove_extras()
    module = stack.owner
    del module._modules[PREFIX + stack.key]
    if isinstance(module, SparseExperts) and not module.stacks:
        change_class_(module, module.dense_type)
        module.__dict__.pop("_nm_calls", None)
    return module


def compress_stacks_(module: nn.Module, stacks: dict[str, CompressedStack]) -> CompressedExperts:
    """Replace Parameters of an experts module by compressed ``stacks``; its other stacks become dense."""
    if isinstance(module, SparseExperts):
        for stack in module.stacks.values():
            make_stack_dense_(stack)
    for key, compressed in stacks.items():
        del module._parameters[key]
        module.add_module(PREFIX + key, compressed.train(module.training))
    if not isinstance(module, CompressedExperts):
        change_class_(module, in_front(CompressedExperts, class_of(module)))
    return module  # type: ignore[return-value]


def expand_stacks_(module: CompressedExperts) -> nn.Module:
    """Restore the dense Parameters and the class of a compressed experts module; the inverse of ``compress_stacks_``."""
    for key, stack in module.stacks.items():
        del module._modules[PREFIX + key]
        module.register_parameter(key, nn.Parameter(stack.dense().contiguous()))
    change_class_(module, module.dense_type)
    return module


def compressed_stack(
    weight: Tensor, layout: str, pattern: PatternLike, keep_dense: bool = False, values: str | None = None, group: int | None = None
) -> CompressedStack:
    """Compress an N:M stack, passed as the dense model stores it; with ``values``, its values become integers."""
    with torch.no_grad():
        packed = ops.compress(as_matrix(ordered(weight.detach(), layout), layout), Pattern(pattern))
        packed = packed if values is None else ops.quantize_values(packed, values, group)
    return CompressedStack(packed, int(weight.shape[0]), layout, keep_dense, weight.dtype)
