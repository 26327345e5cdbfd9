"""What loading a compressed file would change in a model, all of it checked before anything is changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..nn import ADAPTER, CompressedLinear, NMWeight, deployed, is_conv1d, is_order, switch_fast_paths
from ..nn.compressed import LAYOUTS
from ..nn.swap import put_
from ..ops import Compressed
from ..pattern import CheckpointError, NMError, Pattern
from ..reference import unpack_indices
from .tensors import Contents, place, plain_modules, plain_names, quote, shortened

SHOWN = 5


class LayerPlan(NamedTuple):
    """What one compressed layer is made of."""

    weight: Compressed
    layout: str
    adapter: tuple[Tensor, Tensor] | None
    columns: Tensor | None

    def tensors(self) -> tuple[Tensor, ...]:
        """All that the file holds of it."""
        return (self.weight.values, self.weight.indices, *(self.adapter or ()), *(() if self.columns is None else (self.columns,)))

    def equals(self, other: LayerPlan) -> bool:
        own, its = self.tensors(), other.tensors()
        return self.weight.pattern == other.weight.pattern and len(own) == len(its) and all(map(_same, own, its))

    def to(self, device: torch.device) -> LayerPlan:
        """The same on ``device``, on the CPU instead of the meta device, in memory of its own instead of the mapped file."""
        on = "cpu" if device.type == "meta" else device
        values, indices, *more = (tensor.to(on, copy=True) for tensor in self.tensors())
        adapter = None if self.adapter is None else (more[0], more[1])
        weight = Compressed(values, indices, self.weight.pattern, self.weight.shape)
        return LayerPlan(weight, self.layout, adapter, None if self.columns is None else more[-1])


@dataclass
class LoadPlan:
    """Layers to swap and tensors to copy, by their names in the model."""

    layers: dict[str, LayerPlan] = field(default_factory=dict)
    others: dict[str, Tensor] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def apply(self, model: nn.Module, keep_dense: bool = False) -> None:
        """Copy the tensors and swap the layers; a module that the model holds twice stays one module."""
        # what may fail, for want of memory, comes first
        dense: dict[str, Any] = {name: model.get_submodule(name) for name in self.layers}
        moved: dict[int, LayerPlan] = {}
        for name, old in dense.items():
            if id(old) not in moved:
                moved[id(old)] = self.layers[name].to(old.weight.device)
        meta = any(t.is_meta for t in model.state_dict().values() if isinstance(t, Tensor))
        model.load_state_dict(self.others, strict=False, assign=meta)
        made: dict[int, CompressedLinear] = {}
        for name, old in dense.items():
            if id(old) not in made:
                layer = moved[id(old)]
                made[id(old)] = deployed(old, layer.weight, layer.layout, keep_dense, layer.adapter, layer.columns)
            parent, _, child = name.rpartition(".")
            put_(model.get_submodule(parent), child, made[id(old)])
        switch_fast_paths(model)


class _Unfit(Exception):
    """Why a layer of the file is damaged or does not fit the model's."""


def plan_load(model: nn.Module, contents: Contents, layers: dict[str, Any]) -> LoadPlan:
    """The plan for loading ``contents`` into ``model``; ``layers`` is the table of compressed ones."""
    plan = LoadPlan()
    rest = dict(contents.tensors)
    modules = plain_modules(model)
    planned: dict[int, str] = {}
    for name, about in layers.items():
        parts = [rest.pop(f"{name}.{part}", None) for part in ("weight.values", "weight.indices", "weight.columns", *ADAPTER)]
        given, module = modules.get(name, (name, None))
        try:
            plan.layers[given] = layer = _layer(name, about, parts, module)
            first = planned.setdefault(id(module), given)
            if not layer.equals(plan.layers[first]):
                raise _Unfit(f"the model has it under the name {first!r} too, where the file holds another weight")
        except _Unfit as error:
            plan.problems.append(f"layer {quote(name)}: {error}")
    _match_others(plan, rest, model)
    if plan.problems:
        shown = "\n  ".join(plan.problems[:SHOWN])
        more = f"\n  and {len(plan.problems) - SHOWN} more" if len(plan.problems) > SHOWN else ""
        raise CheckpointError(f"{contents.path} does not fit the model, which was left as it was:\n  {shown}{more}")
    return plan


def _same(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return one.data_ptr() == other.data_ptr() or torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def _layer(name: str, about: Any, parts: list[Tensor | None], module: Any) -> LayerPlan:
    pattern, layout, dtype, (rows, cols) = _entry(about)
    values, indices, columns, left, right = parts
    if values is None or indices is None:
        raise _Unfit(f"the file lacks its {'values' if values is None else 'indices'}")
    _check_module(name, module, layout, (rows, cols), values.dtype)
    if str(values.dtype) != f"torch.{dtype}" or indices.dtype != torch.uint8:
        raise _Unfit(f"values are {values.dtype} and indices {indices.dtype}; torch.{shortened(dtype)} and torch.uint8 were announced")
    want = (rows, pattern.kept(cols)), (rows, pattern.index_bytes(cols))
    if (tuple(values.shape), tuple(indices.shape)) != want:
        raise _Unfit(
            f"values {tuple(values.shape)} and indices {tuple(indices.shape)} are not those "
            f"of a {pattern} weight ({rows}, {cols}), which are {want[0]} and {want[1]}"
        )
    _check_indices(indices, pattern, cols)
    adapter = _adapter(about.get("rank"), left, right, values)
    if adapter is not None and (adapter[0].shape[0], adapter[1].shape[1]) != (cols, rows):
        raise _Unfit(f"its adapter does not fit a weight ({rows}, {cols}) (out, in)")
    if about.get("columns", False) is not (columns is not None):
        lacks = "its entry in the metadata does not announce" if columns is not None else "the file lacks"
        raise _Unfit(f"{lacks} the order of its inputs")
    if columns is not None and not is_order(columns, cols):
        raise _Unfit(f"the order of its inputs is not a permutation of {cols}; the file is damaged")
    return LayerPlan(Compressed(values, indices, pattern, (rows, cols)), layout, adapter, columns)


def _entry(about: Any) -> tuple[Pattern, str, str, tuple[int, int]]:
    """Pattern, layout, dtype and shape of a layer as its entry in the metadata says them."""
    try:
        spec, layout, dtype, (rows, cols) = about["pattern"], about["layout"], about["dtype"], about["shape"]
        if not isinstance(spec, str) or not isinstance(dtype, str) or layout not in LAYOUTS:
            raise ValueError(f"pattern {quote(spec)}, dtype {quote(dtype)} and layout {quote(layout)}")
        if not all(type(size) is int and 0 <= size < 1 << 63 for size in (rows, cols)):
            raise ValueError(f"shape {quote([rows, cols])}")
        return Pattern(spec), layout, dtype, (rows, cols)
    except (KeyError, TypeError, ValueError, NMError) as error:
        raise _Unfit(f"its entry in the metadata is damaged ({type(error).__name__}: {shortened(error)})") from error


def _adapter(rank: Any, left: Tensor | None, right: Tensor | None, values: Tensor) -> tuple[Tensor, Tensor] | None:
    """(L, R) of a layer whose entry announces ``rank``; None where it announces no adapter and the file has none."""
    if rank is None and left is None and right is None:
        return None
    if rank is None or left is None or right is None:
        lacks = "its entry in the metadata does not announce" if rank is None else "the file lacks"
        raise _Unfit(f"{lacks} its adapter, or a part of it")
    matrices = left.dim() == right.dim() == 2 and {left.dtype, right.dtype} == {values.dtype}
    if not matrices or type(rank) is not int or not left.shape[1] == right.shape[0] == rank >= 1:
        raise _Unfit(
            f"an adapter of rank {shortened(rank)} in {values.dtype} was announced, "
            f"L is {tuple(left.shape)} in {left.dtype} and R {tuple(right.shape)} in {right.dtype}"
        )
    return left, right


def _check_module(name: str, module: Any, layout: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    if module is None:
        raise _Unfit("the model has no such module")
    if isinstance(module, (CompressedLinear, NMWeight)):
        raise _Unfit(f"it is a {type(module).__name__} already; load into a freshly built dense model")
    if not name:
        raise _Unfit("the model itself is one layer, which cannot be swapped in place; put it in an nn.Sequential")
    kind = "conv1d" if is_conv1d(module) else "linear" if isinstance(module, nn.Linear) else type(module).__name__
    if kind != layout:
        raise _Unfit(f"the file holds a {layout} layer, the model a {kind}")
    have = tuple(module.weight.shape) if layout == "linear" else tuple(module.weight.shape)[::-1]
    if have != shape:
        raise _Unfit(f"the file's weight is {shape} (out, in), the model's {have}")
    if module.weight.dtype != dtype:
        raise _Unfit(f"the file's weight is {dtype}, the model's {module.weight.dtype}; build the model with model.to({dtype})")


def _check_indices(indices: Tensor, pattern: Pattern, cols: int) -> None:
    """Positions rise within each group, stay below M, and spare bits are 0: what compress writes and the kernels rely on."""
    positions = unpack_indices(indices, pattern.index_bits, pattern.kept(cols)).unflatten(-1, (-1, pattern.n)).short()
    if positions.numel() and int(positions.max()) >= pattern.m:
        raise _Unfit(f"index {int(positions.max())} is out of range for groups of {pattern.m}; the file is damaged")
    if not bool((positions.diff(dim=-1) > 0).all()):
        raise _Unfit("the indices of a group do not rise; the file is damaged")
    spare = indices.shape[-1] * 8 - pattern.kept(cols) * pattern.index_bits
    if spare and indices.numel() and int(indices[..., -1].max()) >> (8 - spare):
        raise _Unfit("the spare bits of a row's last index byte are not 0; the file is damaged")


def _match_others(plan: LoadPlan, rest: dict[str, Tensor], model: nn.Module) -> None:
    """Every tensor that is not a compressed weight: same names on both sides, same shapes, same dtypes."""
    plain = plain_names(model)
    swapped = {f"{plain(name)}.weight" for name in plan.layers}
    state = {given: value for given, value in model.state_dict().items() if plain(given) not in swapped}
    failed = any(plan.problems)
    tied: dict[tuple[object, ...], str] = {}
    for given, value in state.items():
        key = plain(given)
        tensor = rest.pop(key, None)
        if tensor is None:
            if not (failed and key.endswith(".weight")):  # a layer that failed above is named there already
                plan.problems.append(f"the file lacks {quote(key)}")
        elif not isinstance(value, Tensor) or tensor.shape != value.shape:
            have = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            plan.problems.append(f"{quote(key)} has shape {tuple(tensor.shape)} in the file, {have} in the model")
        elif tensor.dtype != value.dtype:
            plan.problems.append(f"{quote(key)} is {tensor.dtype} in the file, {value.dtype} in the model; use model.to({tensor.dtype})")
        else:
            # on the meta device the model takes the tensor itself, which must not stay a part of the mapped file
            plan.others[given] = tensor.clone() if value.is_meta else tensor
            known = type(value) is Tensor and value.numel() and not value.is_meta
            first = tied.setdefault(place(value), given) if known else given
            if not _same(plan.others[first], tensor):
                plan.problems.append(f"{quote(key)} is tied to {first!r} in the model, and the file holds another tensor for it")
    plan.problems += [f"the model has no {quote(key)}" for key in rest]
