"""CompressedLinear: the deployed layer, which holds only the compressed weight."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from ..autograd import linear_compressed
from ..autograd.gemms import AUTO, DENSE, Gemm, call, choose, form_of, forms
from ..backends.cpu.linear import FEW_TOKENS
from ..ops.compress import counts_writes
from ..ops.define import kind_of
from ..ops.pack import positions
from ..pattern import DtypeError, Pattern, ShapeError
from .adapter import adapter_of, add_adapter, set_adapter
from .linear import autocast_dtype, castable

LAYOUTS = ("linear", "conv1d")
ORDINARY = (AUTO, "cpu rows")
"""Candidates that ``linear_compressed`` takes by itself, and by a shorter way."""


class CompressedLinear(nn.Module):
    """y = x Wᵀ + b with W held in the compressed N:M form: N/M of the values and 2, 4 or 8 bits of index for each.

    Args:
        weight: the compressed weight of shape ``(out, in)``, a constant. bias: ``(out,)`` or None; a Parameter stays the same Parameter.
        layout: how the dense module stores its weight: ``"linear"`` ``(out, in)`` or ``"conv1d"`` ``(in, out)``. The GEMM is the same.
        keep_dense: keep the dense weight too, made at the first call that wants it, and multiply it where that is faster: as
            ``nm.tune(model, tokens=...)`` has measured, else by rule. The layer then needs ``1 + M/N`` times the memory of its values; the
            copy is not saved. Writes that torch does not count (through ``.data``, by a collective) are seen after ``load_state_dict``,
            ``to``, ``train`` or ``eval``; a weight made under ``torch.inference_mode`` is expanded at every call: load it outside.
        adapter: (L ``(in, r)``, R ``(r, out)``) of a low-rank adapter, y += x L R / r, kept as the Parameters ``nm_left`` and ``nm_right``.
        columns: a permutation of the inputs, int ``(in,)``: y = x[..., columns] Wᵀ + b, for groups that are no neighbours among the inputs.

    An inf or NaN of x reaches those outputs whose stored weights meet it; where the GEMM is a dense one, all of its row. Differentiable
    in all but the weight.

    Raises:
        ShapeError: the weight is not a matrix, the bias, the adapter or the columns do not fit, or the layout is unknown.

    Example:
        >>> c = ops.compress(torch.randn(4, 8), "2:4")
        >>> CompressedLinear(c)(torch.randn(3, 8)).shape
        torch.Size([3, 4])
    """

    values: Tensor
    indices: Tensor
    bias: nn.Parameter | None

    def __init__(
        self,
        weight: ops.Compressed,
        bias: Tensor | None = None,
        layout: str = "linear",
        keep_dense: bool = False,
        adapter: tuple[Tensor, Tensor] | None = None,
        columns: Tensor | None = None,
    ) -> None:
        super().__init__()
        if len(weight.shape) != 2:
            raise ShapeError(f"CompressedLinear: the weight must be a matrix (out, in), got shape {tuple(weight.shape)}.")
        if layout not in LAYOUTS:
            raise ShapeError(f"CompressedLinear: layout {layout!r} is unknown; choose one of {', '.join(LAYOUTS)}.")
        self.out_features, self.in_features = (int(s) for s in weight.shape)
        if bias is not None and tuple(bias.shape) != (self.out_features,):
            raise ShapeError(f"CompressedLinear: bias has shape {tuple(bias.shape)}, the weight needs ({self.out_features},).")
        self.pattern: Pattern = weight.pattern
        self.layout = layout
        self.keep_dense = keep_dense
        self.register_buffer("values", weight.values)
        self.register_buffer("indices", weight.indices)
        self.register_parameter("bias", bias if bias is None or isinstance(bias, nn.Parameter) else nn.Parameter(bias))
        if columns is not None:
            if not is_order(columns, self.in_features):
                raise ShapeError(f"CompressedLinear: columns must be a permutation of the {self.in_features} inputs.")
            self.register_buffer("columns", columns.to(weight.values.device, torch.int32))
        if adapter is not None:
            set_adapter(self, *adapter, self.out_features, self.in_features)
        self._view: ops.Compressed | None = weight
        self._asked: Gemm | None = None
        self._few = FEW_TOKENS * self.in_features

    @property
    def adapter(self) -> tuple[nn.Parameter, nn.Parameter] | None:
        """(L, R) of the low-rank adapter, or None."""
        return adapter_of(self)

    @property
    def order(self) -> Tensor | None:
        """``columns``, int32 ``(in,)``, or None."""
        return self._buffers.get("columns")

    def dense(self) -> Tensor:
        """The weight ``(out, in)`` in dense layout, its columns in the order of the inputs."""
        packed, order = self.weight.dense(), self.order
        return packed if order is None else packed.index_select(1, order.long().argsort())

    @property
    def weight(self) -> ops.Compressed:
        """The compressed weight ``(out, in)``, over the layer's own buffers; its columns in the order ``columns`` where there is one."""
        view, buffers = self._view, self._buffers  # found at once, unlike self.values
        # moving or casting the module replaces its buffers; the view and its cached layouts go with them
        if view is None or view.values is not buffers["values"] or view.indices is not buffers["indices"]:
            view = ops.Compressed(self.values, self.indices, self.pattern, (self.out_features, self.in_features))
            if not torch.compiler.is_compiling():
                self._view = view
        return view

    def forward(self, x: Tensor) -> Tensor:
        """y = x Wᵀ + b, and the adapter's part; x ``(..., in)`` in the weight's dtype, or any floating dtype under autocast."""
        weight, dtype = self.weight, autocast_dtype(x)
        if dtype is not None and castable(weight.dtype):
            x = x.to(dtype) if castable(x.dtype) else x
            weight = _cast(weight, dtype)
        if x.dtype != weight.values.dtype:
            raise DtypeError(f"CompressedLinear: x is {x.dtype}, the weight {weight.dtype}; cast one of them, or use torch.autocast.")
        inputs, order = x, self.order
        if order is not None:
            x = x.index_select(-1, order if counts_writes(order) else order.clone())
        # few tokens on a CPU by the shortest way, and a graph may not ask for their number
        many = not torch.compiler.is_compiling() and (self.keep_dense or x.numel() > self._few or not x.is_cpu)
        y = self._chosen(x, weight) if many else linear_compressed(x, weight, self.bias)
        adapter = self.adapter
        return y if adapter is None else add_adapter(y, inputs, *adapter)

    def _chosen(self, x: Tensor, weight: ops.Compressed) -> Tensor:
        """y = x Wᵀ + b by the candidate that is chosen for it."""
        gemm = self._gemm_of(x.numel() // (self.in_features or 1), x.dtype, x.device)
        name, bias = choose(gemm), self._parameters["bias"]
        if name in ORDINARY:
            return linear_compressed(x, weight, bias)
        b = bias if bias is None or bias.dtype == x.dtype else bias.to(x.dtype)
        if name == DENSE:
            return F.linear(x, weight.layout("dense", ops.Compressed.dense), b)
        if torch.is_grad_enabled() or kind_of("", (x, weight.values, bias)) is None:
            return linear_compressed(x, weight, bias)
        form = form_of(name, gemm)
        return call(name, gemm, x, {form: weight.layout(form, partial(_packed, form))}, bias=b)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._view = None  # a hook may have written where torch does not count it

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._view = None  # nor keep what lies where the module was
        return super()._apply(*args, **kwargs)

    def train(self, mode: bool = True) -> CompressedLinear:
        self._view = None  # made anew, also after writes that torch does not count
        return super().train(mode)

    def gemms(self, tokens: int, dtype: torch.dtype | None = None) -> tuple[Gemm, ...]:
        """Its one GEMM, with so many rows of the input, for ``nm.tune``; ``dtype``: of the input under autocast, the weight's if None."""
        return (self._gemm_of(tokens, dtype or self.values.dtype, self.values.device),)

    def _gemm_of(self, tokens: int, dtype: torch.dtype, device: torch.device) -> Gemm:
        last = self._asked
        if last is not None and last.tokens == tokens and last.dtype == dtype and last.device == device:
            return last
        rows, cols, n, m = self.out_features, self.in_features, self.pattern.n, self.pattern.m
        at_hand = forms(rows, cols, n, m, dtype, device.type, self.keep_dense)
        gemm = self._asked = Gemm("fprop", tokens, rows, cols, n, m, dtype, device, at_hand)
        return gemm

    def extra_repr(self) -> str:
        more = "" if self.order is None else ", inputs reordered"
        more += "" if self.adapter is None else f", rank={self.adapter[0].shape[1]}"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"pattern={self.pattern}, dtype={self.values.dtype}, layout={self.layout}{', keep_dense=True' if self.keep_dense else ''}{more}"
        )


def is_order(columns: Tensor, count: int) -> bool:
    """Whether ``columns`` has every number below ``count`` once."""
    whole = columns.dtype in (torch.int32, torch.int64) and tuple(columns.shape) == (count,)
    return whole and (columns.is_meta or torch.equal(columns.sort().values.long(), torch.arange(count, device=columns.device)))


def _cast(weight: ops.Compressed, dtype: torch.dtype) -> ops.Compressed:
    if weight.dtype == dtype or torch.compiler.is_compiling():
        return weight.to(dtype)
    # cast once, with the layouts that a backend then builds for it, and not at every call
    return weight.layout(str(dtype), lambda c: c.to(dtype))


def _packed(form: str, weight: ops.Compressed) -> tuple[Tensor, Tensor]:
    layout = form.partition(":")[2]
    operand = ops.relayout(weight, layout) if layout else weight
    return operand.values, positions(operand)
