"""CompressedLinear: the linear layer for inference, which stores only the compressed weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from .. import ops
from ..autograd.linear import linear_compressed
from ..gemm.choose import Routes, choose
from ..gemm.forms import forms
from ..gemm.methods import AS_FLOAT32, DENSE, EXPAND, OP, run
from ..gemm.problem import Problem
from ..layouts import CONV1D, CONV2D, EMBEDDING, LINEAR, matrix_shape
from ..ops.compress import PLAIN, counts_writes
from ..ops.integers import kind_of, nm_linear_integers
from ..ops.linear import nm_linear, operand_for
from ..ops.pack import positions
from ..pattern import DtypeError, Pattern, RecipeError, ShapeError
from ..reference import unpack_indices
from ..shards import local
from ..timing import TABLE
from .adapter import ADAPTER, adapter_of, add_adapter, set_adapter
from .classes import QuantisedByClass
from .linear import under_autocast
from .sharding import IN, NOTHING, OUT, check_input, check_mesh, split_along, split_linear
from .traces import PROXY, constant, is_tracing, leaf, refuse_script

LAYOUTS = (LINEAR, CONV1D, EMBEDDING, CONV2D)
"""Weight layouts that can be compressed."""
INSTEAD = {
    DENSE.name: "not called by this layer: it multiplies a dense copy of its weight by torch's GEMM, which is faster for so many tokens",
    EXPAND: "not called by this layer: it expands its weight at every call for torch's GEMM, which is faster for so many tokens",
    AS_FLOAT32: "not called by this layer: it expands its weight to float32 at every call for torch's GEMM, which is faster here",
    OP: "",
}
"""Method name → what the layer does instead of calling the op, for ``nm.explain``."""

SMALL_BYTES = 1 << 20
"""The largest dense weight of which a layer on a CPU always keeps a copy, unless its values are integers: if a call takes microseconds,
``F.linear`` is often fastest. Such a weight stays in the cache between calls."""


def _shortcut(values: Tensor, step: Tensor | None, dense: Tensor | None) -> Callable[[CompressedLinear, Tensor], Tensor | None]:
    """y = x Wᵀ + b with few checks, as a small GEMM takes microseconds: by ``F.linear`` with the dense weight, or without one by the op.

    The result is None if the layer has changed, or the call needs more. Values and indices are always written together, so values and steps
    tell of all.
    """
    version, address, revision = values._version, values.data_ptr(), TABLE.revision
    written = None if step is None else (step._version, step.data_ptr())

    def multiply(layer: CompressedLinear, x: Tensor) -> Tensor | None:
        buffers, parameters = layer._buffers, layer._parameters
        if not (
            values is buffers["values"]
            and values._version == version
            and values.data_ptr() == address
            and TABLE.revision == revision
            and (step is None or (step is buffers.get("step") and written == (step._version, step.data_ptr())))
            and not values.requires_grad  # linear_compressed raises for it
            and "bias" in parameters  # torch.nn.utils may compute it
        ):
            return None
        bias = parameters["bias"]
        if dense is not None:
            try:
                return F.linear(x, dense, bias)
            except RuntimeError:  # the layer raises a better message
                return None
        if torch.is_grad_enabled() or torch._C._is_any_autocast_enabled():
            return None
        p, cols = layer.pattern, layer.in_features  # the op checks all that is left
        if step is not None:
            fits = bias is None or x.dtype == bias.dtype
            return nm_linear_integers(x, values, buffers["indices"], step, p.n, p.m, cols, bias) if fits else None
        if x.dtype != values.dtype:
            return None
        operand = (values, buffers["indices"]) if x.is_cpu else operand_for(x, layer.weight)
        return nm_linear(x, *operand, p.n, p.m, cols, bias)

    return multiply


_Direct = Routes
"""The name in pickles of earlier versions."""


class CompressedLinear(nn.Module):
    """A linear layer y = x Wᵀ + b that stores W compressed: N/M of the values, and an index of 2, 4 or 8 bits for each.

    Args:
        weight: the compressed weight of shape ``(out, in)``, a constant.
        bias: ``(out,)`` or None; a Parameter is registered as is.
        layout: how the dense module stores its weight: ``"linear"`` ``(out, in)`` or ``"conv1d"`` ``(in, out)``. The GEMM is the same.
        keep_dense: also keep the dense weight, made at the first call that needs it, and use it where it is faster by rule, or as measured
            by ``nm.tune(model, tokens=...)``. The layer then needs ``1 + M/N`` times the memory of its values; the copy is not saved. On a
            CPU a layer with a dense weight of at most 1 MiB always does so, unless its values are integers. Writes that torch does not
            count (through ``.data``, by a collective) take effect after ``load_state_dict``, ``to``, ``train`` or ``eval``. A weight made
            under ``torch.inference_mode`` is expanded at every call; load it outside that mode.
        adapter: (L ``(in, r)``, R ``(r, out)``) of a low-rank adapter, y += x L R / r, stored as Parameters ``nm_left`` and ``nm_right``.
        columns: a permutation of the inputs, int ``(in,)``: y = x[..., columns] Wᵀ + b, for groups of inputs that are not adjacent.
        dtype: for a weight with integers: the dtype of the dense layer that it replaces, which ``dense()`` and files name; default torch's.

    A weight with integers as values (``ops.quantize_values``) has their steps in the buffer ``step``, which stays bfloat16 when the module
    is cast. It multiplies x in any floating dtype and returns y in that dtype.

    An inf or NaN in x reaches only outputs with a stored weight for it, or with a dense GEMM all outputs of its row. Differentiable in
    everything but the weight.

    Raises:
        ShapeError: the weight is not a matrix, the bias, adapter or columns have the wrong shape, or the layout is unknown.

    Example:
        >>> c = ops.compress(torch.randn(4, 8), "2:4")
        >>> CompressedLinear(c)(torch.randn(3, 8)).shape
        torch.Size([3, 4])
    """

    values: Tensor
    indices: Tensor
    step: Tensor
    bias: nn.Parameter | None
    layouts: tuple[str, ...] = (LINEAR, CONV1D)

    def __init__(
        self,
        weight: ops.Compressed,
        bias: Tensor | None = None,
        layout: str = LINEAR,
        keep_dense: bool = False,
        adapter: tuple[Tensor, Tensor] | None = None,
        columns: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if len(weight.shape) != 2:
            raise ShapeError(f"CompressedLinear: the weight must be a matrix (out, in), got shape {tuple(weight.shape)}.")
        if layout not in self.layouts:
            raise ShapeError(f"CompressedLinear: layout {layout!r} is unknown; choose one of {', '.join(self.layouts)}.")
        self.out_features, self.in_features = (int(s) for s in weight.shape)
        if bias is not None and tuple(bias.shape) != (self.out_features,):
            raise ShapeError(f"CompressedLinear: bias has shape {tuple(bias.shape)}, the weight needs ({self.out_features},).")
        self.pattern: Pattern = weight.pattern
        self.layout = layout
        self.keep_dense = keep_dense
        self.register_buffer("values", weight.values)
        # dense integers have no indices: an empty buffer for the ops, which is in no file
        self.register_buffer("indices", weight.indices, persistent=weight.step is None or weight.pattern.m > 1)
        if weight.step is not None:
            self.register_buffer("step", weight.step)
            self._dtype = dtype or torch.get_default_dtype()
        self.register_parameter("bias", bias if bias is None or isinstance(bias, nn.Parameter) else nn.Parameter(bias))
        if columns is not None:
            if not is_order(columns, self.in_features):
                raise ShapeError(f"CompressedLinear: columns must be a permutation of the {self.in_features} inputs.")
            self.register_buffer("columns", columns.to(weight.values.device, torch.int32))
        if adapter is not None:
            set_adapter(self, *adapter, self.out_features, self.in_features)
        self._view: ops.Compressed | None = weight
        self._direct = Routes()

    @property
    def adapter(self) -> tuple[nn.Parameter, nn.Parameter] | None:
        """(L, R) of the low-rank adapter, or None."""
        return adapter_of(self)

    @property
    def order(self) -> Tensor | None:
        """``columns``, int32 ``(in,)``, or None."""
        return self._buffers.get("columns")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values, or with integers of the dense layer that it replaces."""
        return self.values.dtype if self._buffers.get("step") is None else self._dtype

    @property
    def shape(self) -> tuple[int, int]:
        """``(out, in)``."""
        return self.out_features, self.in_features

    @property
    def whole_shape(self) -> tuple[int, int]:
        """``(out, in)`` of the layer on all ranks."""
        return self.shape

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the dense layer's weight."""
        return (self.in_features, self.out_features) if self.layout == CONV1D else (self.out_features, self.in_features)

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight ``(out, in)`` in dense layout and ``dtype`` (default: the layer's), its columns in the order of the inputs."""
        packed, order = self.weight.dense(dtype or self.dtype), self.order
        return packed if order is None else packed.index_select(1, order.long().argsort())

    @property
    def weight(self) -> ops.Compressed:
        """The compressed weight ``(out, in)``, a view of the layer's buffers, with its columns in the order ``columns`` if there is one."""
        view, buffers = self._view, self._buffers  # faster than self.values
        step = buffers.get("step")
        # moving or casting the module replaces its buffers, which invalidates the view and its cached layouts
        if view is None or view.values is not buffers["values"] or view.indices is not buffers["indices"] or view.step is not step:
            if not self.indices.numel() and self.indices.device != self.values.device:  # an offloaded weight's, which no file has
                self.indices = torch.empty_like(self.indices, device=self.values.device)
            view = ops.Compressed(self.values, self.indices, self.pattern, (self.out_features, self.in_features), step)
            if not torch.compiler.is_compiling():
                self._view = view
        return view

    def round_(self, weight: ops.Compressed) -> None:
        """Take ``weight``, whose values are integers with a step, instead of the one with floating-point values."""
        self._dtype = self.dtype
        self.values = weight.values  # new buffers, so that cached layouts of the old ones are dropped
        self.register_buffer("indices", weight.indices, persistent=weight.pattern.m > 1)
        self.register_buffer("step", weight.step)
        self._forget()

    def forward(self, input: Tensor) -> Tensor:
        """y = x Wᵀ + b, plus the adapter; x ``(..., in)`` in the weight's dtype, or any floating dtype under autocast or with integers."""
        x = input
        shortcut = self._direct.get(x.numel()) if type(x) is Tensor and not is_dynamo_compiling() else None
        if shortcut is not None:
            y = shortcut(self, x)
            if y is not None:
                return y
        if isinstance(x, PROXY):
            return leaf(self, x)
        return self._adapted(x, self._multiply(x, self.bias))

    __prepare_scriptable__ = refuse_script
    qconfig = QuantisedByClass()

    def as_op(self, x: Tensor) -> tuple[tuple[Any, ...], str]:
        """For ``nm.explain``: the arguments of ``nm_linear`` (with integers of ``nm_linear_integers``) for the input x, and a text on what
        the layer does instead of calling it."""
        x, weight = self._operands(x)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        parts = _parts(weight) if weight.step is not None else operand_for(x, weight)
        args = x, *parts, self.pattern.n, self.pattern.m, self.in_features, bias
        if x.shape[-1:] != (self.in_features,):
            return args, ""
        (method,) = choose(self._problem(x.numel() // (self.in_features or 1), x.dtype, x.device))
        named = f"this layer uses the kernel {method.name!r}, which was measured fastest"
        return args, INSTEAD.get(method.name, named)

    def _multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """y = x Wᵀ + ``bias``."""
        if not is_tracing():
            return self._chosen(*self._operands(x), bias)
        dtype = self.dtype if self._buffers.get("step") is None else x.dtype
        return F.linear(x, constant(partial(self.dense, dtype)), None if bias is None else bias.to(dtype))

    def _adapted(self, x: Tensor, y: Tensor) -> Tensor:
        """y plus the adapter, which is multiplied in its own dtype."""
        adapter = self.adapter if ADAPTER[0] in self._parameters else None
        return y if adapter is None else add_adapter(y, x.to(adapter[0].dtype), *adapter).to(y.dtype)

    def _operands(self, x: Tensor) -> tuple[Tensor, ops.Compressed]:
        """x with permuted columns, and the weight, both in the dtype of the GEMM."""
        weight = self.weight
        integers = weight.step is not None
        if torch._C._is_any_autocast_enabled() and (integers or weight.dtype != torch.float64):
            x, dtype = x.to(under_autocast(x, x.dtype)), under_autocast(x, weight.dtype)
            if not integers and dtype != weight.dtype:  # cast once, and not at every call
                weight = weight.to(dtype) if torch.compiler.is_compiling() else weight.layout(str(dtype), lambda c: c.to(dtype))
        if x.dtype != weight.dtype and not (integers and x.is_floating_point()):
            kind = type(self).__name__
            raise DtypeError(f"{kind}: x is {x.dtype}, the weight {weight.dtype}; cast one of them, or use torch.autocast.")
        order = self._buffers.get("columns")
        if order is not None:
            x = x.index_select(-1, order if counts_writes(order) else order.clone())
        return x, weight

    def _chosen(self, x: Tensor, weight: ops.Compressed, bias: Tensor | None) -> Tensor:
        """y = x Wᵀ + b by the method that ``choose`` returns."""
        if x.shape[-1:] != (self.in_features,) or torch.compiler.is_compiling() or type(x.numel()) is not int:
            return linear_compressed(x, weight, bias)  # which raises; or a graph, for which a copy would be made at every call
        problem = self._problem(x.numel() // (self.in_features or 1), x.dtype, x.device)
        (method,) = choose(problem)
        b = bias if bias is None or bias.dtype == x.dtype else bias.to(x.dtype)
        if method == DENSE:
            name = "dense" if weight.step is None else f"dense {x.dtype}"
            dense = weight.layout(name, ops.Compressed.dense if weight.step is None else partial(ops.Compressed.dense, dtype=x.dtype))
            copies = weight._layouts.get(name)
            # only on a CPU: on a GPU layout() must see every call, to order streams
            if b is bias and x.is_cpu and copies is not None and copies.last is not None and copies.last.value is dense:
                self._remember(x, weight, dense)
            return F.linear(x, dense, b)
        if torch.is_grad_enabled() or method.name == OP:
            if b is bias and method.name == OP:
                self._remember(x, weight, None)
            return linear_compressed(x, weight, bias)
        return run(method, problem, x, {method.form: weight.layout(method.form, partial(_packed, method.form))}, bias=b)

    def _remember(self, x: Tensor, weight: ops.Compressed, dense: Tensor | None) -> None:
        """Have ``forward`` multiply inputs of this size by the dense weight, or without one by the op, directly from now on."""
        values, step = weight.values, weight.step
        plain = weight is self._view and "columns" not in self._buffers and ADAPTER[0] not in self._parameters
        if plain and counts_writes(values) and (step is None or counts_writes(step)):
            self._direct.put(x.numel(), _shortcut(values, step, dense))

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if isinstance(param, ops.Compressed):
            raise RecipeError(
                f"CompressedLinear: {name!r} would be its compressed weight, which is a constant and not a Parameter. Apply utilities that "
                "prune or compute weights, such as torch.nn.utils.prune, before compress_, or make the model dense by nm.densify_(model)."
            )
        super().register_parameter(name, param)
        self._forget()  # it may belong to an adapter

    def _forget(self) -> None:
        """Drop all cached forms, which may be out of date after writes that torch does not count."""
        self._view = None
        self._direct = Routes()

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        problem = other_kind(self.values, state_dict, prefix) or other_pattern(self, state_dict, prefix)
        if problem:
            rest[-1].append(problem)  # torch's list of errors
        else:
            super()._load_from_state_dict(state_dict, prefix, *rest)
        self._forget()  # a hook may have changed the buffers

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        self._forget()  # free copies on the old device
        return super()._apply(uncast(self, fn), *args, **kwargs)

    def train(self, mode: bool = True) -> CompressedLinear:
        self._forget()
        return super().train(mode)

    def problems(self, tokens: int) -> list[tuple[Problem, ...]]:
        """The layer's GEMM for ``tokens`` rows of input, under the current autocast."""
        return [(self._problem(tokens, under_autocast(self.values, self.dtype), self.values.device),)]

    def tunable(self, counts: Sequence[int]) -> Iterator[tuple[str, CompressedLinear, Sequence[int]]]:
        """The layers for ``nm.tune``, with names relative to this module and the rows of their inputs: only this one."""
        yield "", self, counts

    def _problem(self, tokens: int, dtype: torch.dtype, device: torch.device) -> Problem:
        kind = tokens, dtype, device, self.keep_dense
        problem: Problem | None = self._direct.get(kind)
        if problem is not None:
            return problem
        rows, cols, n, m = self.out_features, self.in_features, self.pattern.n, self.pattern.m
        small, integers = device.type == "cpu" and rows * cols * dtype.itemsize <= SMALL_BYTES, self._buffers.get("step") is not None
        # integers are there to save memory, and a copy would take three times as much as they do
        available = forms(rows, cols, n, m, dtype, device, self.keep_dense or (small and not integers))
        problem = Problem("fprop", tokens, rows, cols, n, m, dtype, device, available, cached=small)
        if integers:
            weight, plain = self.weight, tuple(form for form in available if ":" not in form)
            problem = problem._replace(forms=plain, values=weight.kind, group=weight.group)
        self._direct.put(kind, problem)
        return problem

    def extra_repr(self) -> str:
        weight, more = self.weight, "" if self.order is None else ", inputs reordered"
        more += "" if self.adapter is None else f", rank={self.adapter[0].shape[1]}"
        integers = "" if weight.step is None else f"values={weight.kind}, group={weight.group or 'row'}, "
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, pattern={self.pattern}, "
            f"{integers}dtype={self.dtype}, layout={self.layout}{', keep_dense=True' if self.keep_dense else ''}{more}"
        )


class CompressedPart(CompressedLinear):
    """This rank's part of a CompressedLinear made from a layer under tensor parallelism; input and output are DTensors, as before.

    ``bias`` and ``adapter`` remain DTensors, and values, indices and steps are DTensors in the state dict; a step per row is then one per
    row and rank if the inputs are split. ``in_features`` and ``out_features``
    are those of the part.

    Args:
        weight: the part.
        dense: the dense layer's weight, a DTensor on a mesh of one dimension. Other arguments: see ``CompressedLinear``.
    """

    def __init__(
        self,
        weight: ops.Compressed,
        dense: Tensor,
        bias: nn.Parameter | None,
        layout: str,
        keep_dense: bool = False,
        adapter: tuple[Tensor, Tensor] | None = None,
        columns: Tensor | None = None,
    ) -> None:
        check_mesh("CompressedLinear", dense)
        super().__init__(weight, None, layout, keep_dense, columns=columns, dtype=dense.dtype)
        self.mesh: Any = dense.device_mesh  # type: ignore[attr-defined]
        self.split = split_along(dense, layout)
        self.out, cols = matrix_shape(dense.shape, layout)
        self.register_parameter("bias", bias)
        if adapter is not None:
            set_adapter(self, *adapter, self.out, cols)

    def forward(self, input: Tensor) -> Tensor:
        """y = x Wᵀ + b, plus the adapter; x ``(..., in)`` and y are DTensors."""
        x = input
        check_input(self, x)
        y = split_linear(x, self.mesh, self.split, self.out, self.bias, self._multiply)
        return self._adapted(x, y)

    @property
    def whole_shape(self) -> tuple[int, int]:
        return self.out, self.in_features * (self.mesh.size() if self.split == IN else 1)

    def _shared(self) -> tuple[str, ...]:
        """The buffers of which each rank has a part."""
        return tuple(name for name in ("values", "indices", "step") if name in self._buffers.keys() - self._non_persistent_buffers_set)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        from torch.distributed.tensor import DTensor, Replicate, Shard

        placement = {OUT: Shard(0), IN: Shard(1), NOTHING: Replicate()}[self.split]
        for name in self._shared():
            part = destination[prefix + name]
            shape = torch.Size((self.out, part.shape[1] * (self.mesh.size() if self.split == IN else 1)))
            stride = (shape[1], 1)
            destination[prefix + name] = DTensor.from_local(part, self.mesh, [placement], run_check=False, shape=shape, stride=stride)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        parts = {prefix + name: local(state_dict[prefix + name]) for name in self._shared() if prefix + name in state_dict}
        super()._load_from_state_dict({**state_dict, **parts}, prefix, *rest)


def is_order(columns: Tensor, count: int) -> bool:
    """Whether ``columns`` is a permutation of ``count`` numbers."""
    plausible = columns.dtype in (torch.int32, torch.int64) and tuple(columns.shape) == (count,)
    return plausible and (columns.is_meta or torch.equal(columns.sort().values.long(), torch.arange(count, device=columns.device)))


def index_problem(indices: Tensor, pattern: Pattern, cols: int) -> str:
    """What is wrong with packed ``indices`` of ``cols`` columns; empty if they increase within each group and are below M, and spare bits
    are 0, as the kernels require."""
    n, bits, count = pattern.n, pattern.index_bits, pattern.kept(cols)
    spare = indices.shape[-1] * 8 - count * bits
    if spare and indices.numel() and int(indices[..., -1].max()) >> (8 - spare):
        return "the spare bits of a row's last index byte are not 0"
    increase = True
    if not spare and (8 % (n * bits) == 0 or n * bits % 8 == 0):  # in 1/20 of the time: check each of the 256 values of a byte once
        if n * bits > 8:
            groups = indices.unflatten(-1, (-1, n * bits // 8))
            increase = bool((groups[..., :-1] >> (8 - bits) < groups[..., 1:] & ((1 << bits) - 1)).all())
        indices, count = torch.bincount(indices.flatten(), minlength=256).nonzero().to(torch.uint8), 8 // bits
    positions = unpack_indices(indices, bits, count).unflatten(-1, (-1, min(n, count))).short()
    if positions.numel() and int(positions.max()) >= pattern.m:
        return f"index {int(positions.max())} is out of range for groups of {pattern.m}"
    return "" if increase and bool((positions.diff(dim=-1) > 0).all()) else "the indices of a group do not increase"


def uncast(module: Any, fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """``fn`` as ``nn.Module._apply`` of a compressed ``module`` takes it: indices, integers and their steps are moved and not cast (which
    ``module.type`` does to them). With integers the dtype of the dense layer is cast instead.
    """
    step = module._buffers.get("step")
    constants = [module._buffers.get(name) for name in ("indices", "columns", *(() if step is None else ("values", "step")))]
    shared = step is not None and module.pattern.m == 1  # perhaps by an embedding and the output head tied to it
    if step is not None:
        module._dtype = fn(step.new_empty(0, dtype=module._dtype)).dtype

    def moved(tensor: Tensor) -> Tensor:
        new = fn(tensor)
        if not any(tensor is one for one in constants):
            return new
        new = tensor.to(new.device) if new.dtype != tensor.dtype else new
        if shared and torch._has_compatible_shallow_copy_type(tensor, new) and not tensor.is_inference():
            tensor.data = new  # as torch moves Parameters
            return tensor
        return new

    return moved


def other_kind(values: Tensor, state_dict: Mapping[str, Any], prefix: str) -> str:
    """The error message where ``state_dict`` has values of another kind than ``values``; empty if it has not."""
    stored = state_dict.get(f"{prefix}values")
    kind, stored_kind = kind_of(values), kind_of(stored) if isinstance(stored, Tensor) else ""
    if stored_kind in ("", kind):
        return ""
    how = "" if stored_kind == "float" else f", values={stored_kind!r}"
    return (
        f"{prefix}values are {stored_kind} in the state dict and {kind} in this layer, and loading converts neither. Build a model "
        f"with {stored_kind} values, by nm.compress_(model{how}), or load a file by nm.load_compressed."
    )


def other_pattern(layer: Any, state_dict: Mapping[str, Any], prefix: str) -> str:
    """The error message where ``state_dict`` has indices that no weight of the pattern of ``layer`` has; empty if it has not."""
    stored: Any = state_dict.get(f"{prefix}indices")
    # torch reports another shape; fake tensors have no data
    if type(stored) not in PLAIN or stored.is_meta or stored.dtype != torch.uint8 or stored.shape != layer.indices.shape:
        return ""
    problem = index_problem(stored, layer.pattern, layer.in_features) if stored.numel() else ""
    return problem and (
        f"{prefix}indices do not fit the pattern {layer.pattern} of this layer ({problem}): build a model with the pattern of the state "
        "dict, or load a file by nm.load_compressed."
    )


def _parts(weight: ops.Compressed) -> tuple[Tensor, ...]:
    return (weight.values, weight.indices) if weight.step is None else (weight.values, weight.indices, weight.step)


def _packed(form: str, weight: ops.Compressed) -> tuple[Tensor, ...]:
    if weight.step is not None:
        return _parts(weight)
    layout = form.partition(":")[2]
    operand = ops.relayout(weight, layout) if layout else weight
    return operand.values, positions(operand)
