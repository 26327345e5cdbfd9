"""What rounding the values of a model's N:M weights to the nearest integers would cost, layer by layer, before ``compress_`` does it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..nn.compress import Rounded, check_rounding, rounded_layers
from ..nn.experts import CompressedStack, StackedWeight, by_expert, matrices_of
from ..nn.weight import NMWeight
from ..pattern import RecipeError
from ..prune.data import call
from ..shards import is_sharded
from .flops import aligned, shape_text

HEADER = ("layer", "shape", "pattern", "columns per step", "bytes", "rounded", "error of weight", "of output", "")


@dataclass
class LayerRounding:
    """What rounding costs in one layer.

    Args:
        name: its name.
        shape: of the weight, ``(out, in)``, with the matrices of all experts one below the other.
        pattern: N:M.
        group: dense columns that share a step, 0: all of a row.
        before, after: bytes of the compressed weight, with floating-point values and with integers.
        weight: ‖Ŵ − W‖ / ‖W‖, Ŵ the rounded weight.
        output: ‖X(Ŵ − W)ᵀ‖ / ‖XWᵀ‖ over the inputs X of the layer in the data; None without data, or if the layer did not run.
    """

    name: str
    shape: tuple[int, int]
    pattern: str
    group: int
    before: int
    after: int
    weight: float
    output: float | None = None


@dataclass
class QuantizationReport:
    """The result of ``quantization_report``; ``str`` formats it as a table.

    Args:
        values: ``"int8"`` or ``"int4"``.
        layers: one entry for each layer.

    Example:
        >>> print(QuantizationReport("int8", [LayerRounding("fc", (8, 16), "2:4", 0, 288, 80, 0.0061)]))
        layer  shape   pattern  columns per step  bytes  rounded  error of weight  of output
        fc     (8,16)      2:4               row    288       80           0.61 %          -
        all                                         288       80
    """

    values: str
    layers: list[LayerRounding] = field(default_factory=list)

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [HEADER]
        for one in self.layers:
            errors = f"{100 * one.weight:.2f} %", "-" if one.output is None else f"{100 * one.output:.2f} %"
            sizes = str(one.group or "row"), f"{one.before:,}", f"{one.after:,}"
            rows.append((one.name or "(root)", shape_text(one.shape), one.pattern, *sizes, *errors, ""))
        before, after = sum(one.before for one in self.layers), sum(one.after for one in self.layers)
        rows.append(("all", "", "", "", f"{before:,}", f"{after:,}", "", "", ""))
        return "\n".join(aligned(rows))


def quantization_report(
    model: nn.Module, values: str = "int8", group: int | None = None, data: Iterable[Any] | None = None
) -> QuantizationReport:
    """How much ``compress_(model, values=values, group=group)`` would change each layer. The model is not changed.

    The error of each weight when it is rounded to the nearest; with ``data`` also that of each layer's output, without bias and adapter,
    for the inputs that it gets in the model as it is, in eval mode. ``compress_(model, values=values, data=data)`` makes the error of
    outputs smaller than that. To compare ``"int8"``, ``"int4"`` and groups, call it several times.

    Args:
        model: finished (``handle.finish()``) or compressed with floating-point values.
        values, group: as for ``compress_``.
        data: batches of what the model takes: a mapping of keyword arguments, a tuple or list of arguments, or a tensor.

    Raises:
        RecipeError, OptionError, ShapeError: as ``compress_``; or the model has no floating-point N:M weights that can be rounded, or
            sharded ones.

    Example:
        >>> import nmkernels as nm
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        >>> _ = nm.sparsify_(model, "ste:2:4").finish(allow_unused=True)
        >>> report = quantization_report(model, "int8", data=[torch.randn(8, 64)])
        >>> report.layers[0].weight < 0.01, report.layers[0].output < 0.01
        (True, True)
    """
    verb = "quantization_report"
    layers = {
        name: layer
        for name, layer in rounded_layers(verb, model, values, group).items()
        if isinstance(layer, NMWeight) or layer.weight.step is None
    }
    if not layers:
        raise RecipeError(
            f"{verb}: the model has no floating-point N:M weights that can be rounded. Call it after handle.finish() and before "
            "compress_(model, values=...)."
        )
    report, errors_of = QuantizationReport(values), {}
    for name, layer in layers.items():
        check_rounding(verb, name, layer, values, group)
        own = [layer.parameter] if isinstance(layer, StackedWeight) else layer.parameters()
        if any(is_sharded(tensor) for tensor in (*own, *layer.buffers())):
            raise RecipeError(f"{verb}: layer {name!r} is sharded; call it on a plain model.")
        with torch.no_grad():
            errors_of[layer] = errors = _Errors(model, name, layer, values, group)
            error = _ratio(*(sum(map(_square, parts)) for parts in zip(*map(errors.matrices, range(len(errors.pairs))), strict=True)))
        weight, rounded = errors.weight, errors.rounded
        sizes = int(weight.shape[0]), int(weight.shape[1])
        report.layers.append(LayerRounding(name, sizes, str(weight.pattern), rounded.group, weight.nbytes, rounded.nbytes, error))
    if data is not None:
        modes = {module: module.training for module in model.modules()}
        hooks = [errors.module.register_forward_pre_hook(errors.add, with_kwargs=True) for errors in errors_of.values()]
        try:
            model.eval()
            with torch.no_grad():
                for batch in data:
                    call(model, batch)
        finally:
            for hook in hooks:
                hook.remove()
            for module, mode in modes.items():
                module.training = mode
        for entry, errors in zip(report.layers, errors_of.values(), strict=True):
            entry.output = _ratio(*errors.squares) if errors.ran else None
    return report


class _Errors:
    """The weight of a layer, its rounded form, and the sums of squares of outputs: of their difference, and of the layer's own; ``module``
    is called with the layer's inputs."""

    def __init__(self, model: nn.Module, name: str, layer: Rounded, values: str, group: int | None) -> None:
        stacked = isinstance(layer, (StackedWeight, CompressedStack))
        home, _, self.key = name.rpartition(".")
        self.module = model.get_submodule(home) if stacked else layer
        self.weight = ops.compress(layer.grouped.detach(), layer.pattern) if isinstance(layer, NMWeight) else layer.weight
        self.order = layer.columns if isinstance(layer, NMWeight) else layer._buffers.get("columns")
        self.rounded = ops.quantize_values(self.weight, values, group)
        experts = layer.experts if isinstance(layer, (StackedWeight, CompressedStack)) else 1
        self.pairs = list(zip(*(matrices_of(weight, experts) for weight in (self.rounded, self.weight)), strict=True))
        self.add = self._add_experts if stacked else self._add
        self.squares, self.ran = [0.0, 0.0], False

    def matrices(self, expert: int = 0) -> tuple[Tensor, Tensor]:
        """(Ŵ − W, W) in float32, of one expert if there are any; their columns have the order of the groups."""
        rounded, dense = (weight.dense(torch.float32) for weight in self.pairs[expert])
        return rounded - dense, dense

    def _add(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A hook before the layer's forward pass."""
        x = (*args, *kwargs.values())[0]
        self._count(x.reshape(-1, x.shape[-1]), 0)

    def _add_experts(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The same before that of an experts module."""
        for expert, first, last in by_expert(module, None, *args, **kwargs):
            self._count(last if self.key == "down_proj" else first, expert)

    def _count(self, rows: Tensor, expert: int) -> None:
        self.ran, rows = True, rows.float()
        rows = rows if self.order is None else rows.index_select(-1, self.order.long())
        with torch._C._DisableAutocast():
            for i, matrix in enumerate(self.matrices(expert)):
                self.squares[i] += _square(rows @ matrix.t())


def _square(matrix: Tensor) -> float:
    return float(matrix.double().square().sum())


def _ratio(difference: float, total: float) -> float:
    return (difference / total) ** 0.5 if total else 0.0
