"""What loading a compressed file would change in a model, all of it checked before anything is changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..nn import ADAPTER, CompressedLinear, NMWeight, deployed, is_conv1d, is_order, switch_fast_paths
from ..ops import Compressed
from ..pattern import CheckpointError, NMError, Pattern
from ..reference import unpack_indices
from ._reader import Contents

SHOWN = 5


class LayerPlan(NamedTuple):
    """What one compressed layer is made of."""

    weight: Compressed
    layout: str
    adapter: tuple[Tensor, Tensor] | None
    columns: Tensor | None


@dataclass
class LoadPlan:
    """Layers to swap, by name, and tensors to copy, by the dense model's names."""

    layers: dict[str, LayerPlan] = field(default_factory=dict)
    others: dict[str, Tensor] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def apply(self, model: nn.Module, keep_dense: bool = False) -> None:
        """Copy the tensors and swap the layers; a module that the model holds twice stays one module."""
        meta = any(t.is_meta for t in model.state_dict().values() if isinstance(t, Tensor))
        model.load_state_dict(self.others, strict=False, assign=meta)
        dense = {name: model.get_submodule(name) for name in self.layers}
        made: dict[int, CompressedLinear] = {}
        for name, layer in self.layers.items():
            old: Any = dense[name]
            if id(old) not in made:
                on = "cpu" if old.weight.is_meta else old.weight.device
                adapter = None if layer.adapter is None else (layer.adapter[0].to(on), layer.adapter[1].to(on))
                made[id(old)] = deployed(old, layer.weight.to(on), layer.layout, keep_dense, adapter, layer.columns)
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, made[id(old)])
        switch_fast_paths(model)


def plan_load(model: nn.Module, contents: Contents) -> LoadPlan:
    """The plan for loading ``contents`` into ``model``.

    Raises:
        CheckpointError: a list of everything that does not fit; the model is as it was.
    """
    plan = LoadPlan()
    rest = dict(contents.tensors)
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, about in contents.json("layers").items():
        parts = [rest.pop(f"{name}.{part}", None) for part in ("weight.values", "weight.indices", "weight.columns", *ADAPTER)]
        try:
            plan.layers[name] = _layer(name, about, parts, modules.get(name))
        except CheckpointError as error:
            plan.problems.append(str(error))
    _match_others(plan, rest, model)
    if plan.problems:
        shown = "\n  ".join(plan.problems[:SHOWN])
        more = f"\n  and {len(plan.problems) - SHOWN} more" if len(plan.problems) > SHOWN else ""
        raise CheckpointError(f"{contents.path} does not fit the model, which was left as it was:\n  {shown}{more}")
    return plan


def _layer(name: str, about: Any, parts: list[Tensor | None], module: Any) -> LayerPlan:
    try:
        pattern, layout, dtype = Pattern(str(about["pattern"])), str(about["layout"]), str(about["dtype"])
        rows, cols = (int(s) for s in about["shape"])
    except (KeyError, TypeError, ValueError, NMError) as error:
        raise CheckpointError(f"layer {name!r}: its entry in the metadata is damaged ({type(error).__name__}: {error})") from error
    values, indices, columns, left, right = parts
    if values is None or indices is None:
        raise CheckpointError(f"layer {name!r}: the file lacks its {'values' if values is None else 'indices'}")
    _check_module(name, module, layout, (rows, cols), values.dtype)
    if str(values.dtype) != f"torch.{dtype}" or indices.dtype != torch.uint8:
        raise CheckpointError(
            f"layer {name!r}: values are {values.dtype} and indices {indices.dtype}; torch.{dtype} and torch.uint8 were announced"
        )
    want = (rows, pattern.kept(cols)), (rows, pattern.index_bytes(cols))
    if (tuple(values.shape), tuple(indices.shape)) != want:
        raise CheckpointError(
            f"layer {name!r}: values {tuple(values.shape)} and indices {tuple(indices.shape)} are not those "
            f"of a {pattern} weight ({rows}, {cols}), which are {want[0]} and {want[1]}"
        )
    _check_indices(name, indices, pattern, cols)
    adapter = _adapter(name, about.get("rank"), left, right, values)
    if adapter is not None and (adapter[0].shape[0], adapter[1].shape[1]) != (cols, rows):
        raise CheckpointError(f"layer {name!r}: its adapter does not fit a weight ({rows}, {cols}) (out, in)")
    _check_columns(name, about.get("columns", False), columns, cols)
    return LayerPlan(Compressed(values, indices, pattern, (rows, cols)), layout, adapter, columns)


def _check_columns(name: str, announced: Any, columns: Tensor | None, cols: int) -> None:
    if announced is not (columns is not None):
        lacks = "its entry in the metadata does not announce" if columns is not None else "the file lacks"
        raise CheckpointError(f"layer {name!r}: {lacks} the order of its inputs")
    if columns is not None and not is_order(columns, cols):
        raise CheckpointError(f"layer {name!r}: the order of its inputs is not a permutation of {cols}; the file is damaged")


def _adapter(name: str, rank: Any, left: Tensor | None, right: Tensor | None, values: Tensor) -> tuple[Tensor, Tensor] | None:
    """(L, R) of a layer whose entry announces ``rank``; None where it announces no adapter and the file has none."""
    if rank is None and left is None and right is None:
        return None
    if rank is None or left is None or right is None:
        lacks = "its entry in the metadata does not announce" if rank is None else "the file lacks"
        raise CheckpointError(f"layer {name!r}: {lacks} its adapter, or a part of it")
    if (
        left.dim() != 2
        or right.dim() != 2
        or not left.shape[1] == right.shape[0] == rank >= 1
        or {left.dtype, right.dtype} != {values.dtype}
    ):
        raise CheckpointError(
            f"layer {name!r}: an adapter of rank {rank} in {values.dtype} was announced, L is {tuple(left.shape)} in {left.dtype} "
            f"and R {tuple(right.shape)} in {right.dtype}"
        )
    return left, right


def _check_module(name: str, module: Any, layout: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    if module is None:
        raise CheckpointError(f"layer {name!r}: the model has no such module")
    if isinstance(module, (CompressedLinear, NMWeight)):
        raise CheckpointError(f"layer {name!r}: it is a {type(module).__name__} already; load into a freshly built dense model")
    kind = "conv1d" if is_conv1d(module) else "linear" if isinstance(module, nn.Linear) else type(module).__name__
    if kind != layout or not name:
        raise CheckpointError(f"layer {name!r}: the file holds a {layout} layer, the model a {kind}")
    have = tuple(module.weight.shape) if layout == "linear" else tuple(module.weight.shape)[::-1]
    if have != shape:
        raise CheckpointError(f"layer {name!r}: the file's weight is {shape} (out, in), the model's {have}")
    if module.weight.dtype != dtype:
        raise CheckpointError(
            f"layer {name!r}: the file's weight is {dtype}, the model's {module.weight.dtype}; build the model with model.to({dtype})"
        )


def _check_indices(name: str, indices: Tensor, pattern: Pattern, cols: int) -> None:
    """Positions rise within each group, stay below M, and spare bits are 0: what compress writes and the kernels rely on."""
    positions = unpack_indices(indices, pattern.index_bits, pattern.kept(cols)).unflatten(-1, (-1, pattern.n)).short()
    if positions.numel() and int(positions.max()) >= pattern.m:
        raise CheckpointError(
            f"layer {name!r}: index {int(positions.max())} is out of range for groups of {pattern.m}; the file is damaged"
        )
    if not bool((positions.diff(dim=-1) > 0).all()):
        raise CheckpointError(f"layer {name!r}: the indices of a group do not rise; the file is damaged")
    spare = indices.shape[-1] * 8 - pattern.kept(cols) * pattern.index_bits
    if spare and indices.numel() and int(indices[..., -1].max()) >> (8 - spare):
        raise CheckpointError(f"layer {name!r}: the spare bits of a row's last index byte are not 0; the file is damaged")


def _match_others(plan: LoadPlan, rest: dict[str, Tensor], model: nn.Module) -> None:
    """Every tensor that is not a compressed weight: same names on both sides, same shapes, same dtypes."""
    swapped = {f"{name}.weight" for name in plan.layers}
    state = {key: value for key, value in model.state_dict().items() if key not in swapped}
    failed = any(plan.problems)
    for key, value in state.items():
        tensor = rest.pop(key, None)
        if tensor is None:
            if not (failed and key.endswith(".weight")):  # a layer that failed above is named there already
                plan.problems.append(f"the file lacks {key!r}")
        elif not isinstance(value, Tensor) or tensor.shape != value.shape:
            have = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            plan.problems.append(f"{key!r} has shape {tuple(tensor.shape)} in the file, {have} in the model")
        elif tensor.dtype != value.dtype:
            plan.problems.append(f"{key!r} is {tensor.dtype} in the file, {value.dtype} in the model; use model.to({tensor.dtype})")
        else:
            plan.others[key] = tensor
    plan.problems += [f"the model has no {key!r}" for key in rest]
