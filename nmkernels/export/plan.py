"""Loading a compressed file into a model. Everything is checked before anything is changed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..gemm.problem import plain
from ..layouts import CONV1D, CONV2D, EXPERTS, EXPERTS_T, LINEAR, MATRICES, REDUCED, matrix_shape
from ..nn import (
    ADAPTER,
    CompressedExperts,
    CompressedLinear,
    CompressedStack,
    NMWeight,
    SparseExperts,
    compressed_like,
    is_conv1d,
    is_order,
)
from ..nn.classes import class_of
from ..nn.compressed import LAYOUTS
from ..nn.experts import compress_stacks_, stacks_of
from ..nn.sharding import IN, split_along
from ..nn.swap import after_swap, replace_each_
from ..ops import Compressed
from ..ops.check import FLOATS
from ..ops.integers import BITS, STORED
from ..pattern import CheckpointError, NMError, Pattern
from ..reference import unpack_indices
from ..shards import is_sharded, local, spread
from .tensors import Contents, place, plain_modules, plain_names, quote, shortened

MAX_PROBLEMS = 5
"""How many problems an error message lists."""

PARTS = ("weight.values", "weight.indices", "weight.step", "weight.columns", *ADAPTER)
"""The tensors of a layer in a file. Every layer has the first two; a stack of experts has these two only, without "weight"."""

DTYPES = {plain(dtype): dtype for dtype in FLOATS}

STACKS = (EXPERTS, EXPERTS_T)  # a tuple, because values from an untrusted file may not be hashable


class LayerPlan(NamedTuple):
    """One compressed layer of a file. ``parts`` are the tensors of ``PARTS`` that the file has, ``shape`` is ``(out, in)`` or
    ``(E, out, in)``, ``kernel`` is that of a convolution."""

    pattern: Pattern
    shape: tuple[int, ...]
    layout: str
    parts: dict[str, Tensor]
    kernel: tuple[int, int] = (1, 1)

    def equals(self, other: LayerPlan) -> bool:
        own, its = self.parts, other.parts
        return (
            (self.pattern, self.kernel) == (other.pattern, other.kernel)
            and own.keys() == its.keys()
            and all(_same(own[part], its[part]) for part in own)
        )

    def to(self, device: torch.device) -> LayerPlan:
        """A copy on ``device`` (on the CPU instead of the meta device), in new memory instead of the mapped file."""
        on = "cpu" if device.type == "meta" else device
        return self._replace(parts={part: tensor.to(on, copy=True) for part, tensor in self.parts.items()})

    def layer(self, dense: nn.Module, keep_dense: bool) -> CompressedLinear:
        values, indices, step, columns, left, right = (self.parts.get(part) for part in PARTS)
        assert values is not None and indices is not None
        adapter = None if left is None or right is None else (left, right)
        weight: Any = dense.weight
        shape = self.shape
        if is_sharded(weight):
            values, indices = self._part(values, weight), self._part(indices, weight)
            if step is not None and not (
                step.shape[1] == 1 and split_along(weight, self.layout) == IN
            ):  # else all ranks have that of a row
                step = self._part(step, weight)
            rows, cols = self._stored(local(weight)).shape
            shape = (rows, cols)
        return compressed_like(dense, Compressed(values, indices, self.pattern, shape, step), self.layout, keep_dense, adapter, columns)

    def stack(self, keep_dense: bool) -> CompressedStack:
        values, indices = (self.parts[part].flatten(0, 1) for part in PARTS[:2])
        experts, rows, cols = self.shape
        return CompressedStack(Compressed(values, indices, self.pattern, (experts * rows, cols)), experts, self.layout, keep_dense)

    def _stored(self, tensor: Tensor) -> Tensor:
        """Convert between (out, in) and the dense layer's storage order."""
        return tensor.t() if self.layout == CONV1D else tensor

    def _part(self, tensor: Tensor, weight: Tensor) -> Tensor:
        """This rank's part of ``tensor``, which is split like the rows of ``weight``."""
        return self._stored(local(spread(weight, self._stored(tensor)))).clone(memory_format=torch.contiguous_format)


class _Unfit(Exception):
    """A layer of the file is damaged or does not fit the model; the message says why."""


def load(model: nn.Module, contents: Contents, table: dict[str, Any], keep_dense: bool = False) -> None:
    """Check everything, then copy tensors and swap the layers of ``table``; a module with several names stays one module."""
    layers: dict[str, LayerPlan] = {}
    problems: list[str] = []
    rest = dict(contents.tensors)
    modules = plain_modules(model)
    planned: dict[object, str] = {}
    for name, about in table.items():
        stack = isinstance(about, dict) and about.get("layout") in STACKS
        names = {part: f"{name}.{part.removeprefix('weight.') if stack else part}" for part in PARTS}
        parts = {part: rest.pop(stored) for part, stored in names.items() if stored in rest}
        # a stack is a Parameter of its module
        home, dot, key = name.rpartition(".") if stack else (name, "", "")
        own_name, module = modules.get(home, (home, None))
        own_name += (dot if own_name else "") + key
        try:
            layers[own_name] = layer = _layer(name, about, parts, module)
            first = planned.setdefault((id(module), key), own_name)
            if not layer.equals(layers[first]):
                raise _Unfit(f"in the model it is also {first!r}, for which the file has another weight")
        except _Unfit as error:
            problems.append(f"layer {quote(name)}: {error}")
    others = _match_others(layers, rest, model, problems)
    if problems:
        shown = "\n  ".join(problems[:MAX_PROBLEMS])
        more = f"\n  and {len(problems) - MAX_PROBLEMS} more" if len(problems) > MAX_PROBLEMS else ""
        raise CheckpointError(f"{contents.path} does not fit the model, which is unchanged:\n  {shown}{more}")
    # first what may run out of memory
    homes = {name: home_of(name, layer._asdict()) for name, layer in layers.items()}
    dense: dict[str, Any] = {name: model.get_submodule(home) for name, (home, _) in homes.items()}
    once = {(id(dense[name]), key): name for name, (_, key) in homes.items()}
    moved = {name: layers[name].to(getattr(dense[name], key).device) for (_, key), name in once.items()}
    meta = any(t.is_meta for t in model.state_dict().values() if isinstance(t, Tensor))
    present = model.state_dict(keep_vars=True)
    tied: dict[int, nn.Parameter] = {}
    for name, tensor in others.items():
        old = present[name]
        others[name] = spread(old, tensor)
        if meta and isinstance(old, nn.Parameter):  # assign one Parameter to all names of a tied weight
            others[name] = tied.setdefault(id(old), nn.Parameter(others[name], old.requires_grad))
    model.load_state_dict(others, strict=False, assign=meta)
    made = {dense[name]: plan.layer(dense[name], keep_dense) for name, plan in moved.items() if plan.layout not in STACKS}
    for name, plan in moved.items():
        if plan.layout in STACKS:
            compress_stacks_(dense[name], {homes[name][1]: plan.stack(keep_dense)})
    replace_each_(model, made)
    after_swap(model)


def home_of(name: str, about: Any) -> tuple[str, str]:
    """(module name, Parameter name) of the weight that the entry ``about`` of ``name`` describes."""
    if not (isinstance(about, dict) and about.get("layout") in STACKS):
        return name, "weight"
    home, _, key = name.rpartition(".")
    return home, key


def announced(name: str, about: Any, dense: nn.Module, keep_dense: bool = False) -> CompressedLinear | CompressedStack:
    """The compressed layer for the entry ``about``, to replace the module ``dense`` or its stack of experts. Its tensors are on the meta
    device and have the dtype of the dense weight.

    Raises:
        CheckpointError: the entry is damaged, or does not fit ``dense``.
    """
    try:
        pattern, layout, _, shape, kernel = _entry(about)
        integers = _integers(about, pattern, layout, shape)
        dtype: Any = getattr(dense._parameters.get(home_of(name, about)[1]), "dtype", None)
        if layout in STACKS:
            _check_stack(name, dense, layout, shape, dtype)
        else:
            _check_module(name, dense, layout, shape, kernel, dtype)
        rank, columns = about.get("rank"), about.get("columns", False)
        if (rank is not None and (type(rank) is not int or not 1 <= rank < 1 << 31)) or type(columns) is not bool:
            raise _Unfit(f"its entry in the metadata is damaged: rank {quote(rank)} and columns {quote(columns)}")
    except _Unfit as error:
        raise CheckpointError(f"layer {quote(name)} does not fit the model: {error}.") from None

    def empty(*sizes: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    *outer, cols = shape
    indices, step = empty(*outer, pattern.index_bytes(cols), dtype=torch.uint8), None
    if integers is None:
        values = empty(*outer, pattern.kept(cols))
    else:
        width, stored, steps = integers
        values, step = empty(*outer, width, dtype=stored), empty(*outer, steps, dtype=torch.bfloat16)
    if layout in STACKS:
        return LayerPlan(pattern, shape, layout, dict(zip(PARTS, (values, indices), strict=False))).stack(keep_dense)
    adapter = None if rank is None else (empty(cols, rank), empty(rank, *outer))
    layer = compressed_like(dense, Compressed(values, indices, pattern, shape, step), layout, keep_dense, adapter)
    if columns:
        layer.register_buffer("columns", empty(cols, dtype=torch.int32))
    return layer


def check_filled(name: str, layer: CompressedLinear | CompressedStack, offloaded: Mapping[str, Tensor], missing: set[str]) -> None:
    """Check an ``announced`` layer whose tensors another library has read, as ``load`` does.

    Args:
        offloaded: indices, steps and columns that are put into the layer only while it runs.
        missing: names of its tensors that were not read.

    Raises:
        CheckpointError: a part was not read, or is damaged.
    """
    tensors = {**layer._buffers, **offloaded}
    try:
        if missing:
            raise _Unfit(f"the file lacks its {', '.join(sorted(missing))}")
        values, indices, columns, cols = layer.values, tensors["indices"], tensors.get("columns"), layer.in_features
        step = tensors.get("step")
        assert indices is not None
        if step is not None:
            if values.dtype not in STORED or step.dtype != torch.bfloat16 or indices.dtype != torch.uint8:
                raise _Unfit(f"values are {values.dtype}, steps {step.dtype} and indices {indices.dtype}, which no layer with integers has")
            _check_rounded(values, step, layer.pattern.kept(cols))
        elif not values.is_floating_point() or indices.dtype != torch.uint8:
            raise _Unfit(f"values are {values.dtype} and indices {indices.dtype}; expected floating-point values and torch.uint8 indices")
        _check_indices(indices, layer.pattern, cols)
        if columns is not None and not is_order(columns, cols):
            raise _Unfit(f"the order of its inputs is not a permutation of {cols}; the file is damaged")
    except _Unfit as error:
        raise CheckpointError(f"layer {quote(name)}: {error}.") from None


def _same(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return one.data_ptr() == other.data_ptr() or torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def _layer(name: str, about: Any, parts: dict[str, Tensor], module: Any) -> LayerPlan:
    pattern, layout, dtype, shape, kernel = _entry(about)
    *outer, cols = shape
    integers = _integers(about, pattern, layout, shape)
    values, indices, step, columns, left, right = (parts.get(part) for part in PARTS)
    if values is None or indices is None:
        raise _Unfit(f"the file lacks its {'values' if values is None else 'indices'}")
    if (integers is None) is not (step is None):
        raise _Unfit("the file lacks its steps" if step is None else "its entry in the metadata does not announce its steps")
    floats = values.dtype if integers is None else DTYPES.get(dtype)
    if floats is None:
        raise _Unfit(f"its entry in the metadata is damaged: dtype {quote(dtype)}")
    if layout in STACKS:
        _check_stack(name, module, layout, shape, floats)
    else:
        _check_module(name, module, layout, shape, kernel, floats)
    stored = plain(integers.stored) if integers is not None else dtype
    if str(values.dtype) != f"torch.{stored}" or indices.dtype != torch.uint8:
        raise _Unfit(f"values are {values.dtype} and indices {indices.dtype}; its entry says torch.{shortened(stored)} and torch.uint8")
    want = (*outer, pattern.kept(cols) if integers is None else integers.width), (*outer, pattern.index_bytes(cols))
    if (tuple(values.shape), tuple(indices.shape)) != want:
        raise _Unfit(
            f"values have shape {tuple(values.shape)} and indices {tuple(indices.shape)}; "
            f"a {pattern} weight {shape} has {want[0]} and {want[1]}"
        )
    _check_indices(indices, pattern, cols)
    if integers is not None and step is not None:
        if step.dtype != torch.bfloat16 or tuple(step.shape) != (*outer, integers.steps):
            raise _Unfit(f"steps are {step.dtype} {tuple(step.shape)}; its entry says torch.bfloat16 {(*outer, integers.steps)}")
        _check_rounded(values, step, pattern.kept(cols))
    _check_adapter(about.get("rank"), left, right, floats, shape)
    if about.get("columns", False) is not (columns is not None):
        lacks = "its entry in the metadata does not announce" if columns is not None else "the file lacks"
        raise _Unfit(f"{lacks} the order of its inputs")
    if columns is not None and not is_order(columns, cols):
        raise _Unfit(f"the order of its inputs is not a permutation of {cols}; the file is damaged")
    if layout == CONV2D and (left is not None or columns is not None or cols // math.prod(kernel) % pattern.m):
        raise _Unfit(f"a convolution has no adapter and no reordered inputs, and {pattern.m} divides its input channels")
    plan = LayerPlan(pattern, shape, layout, parts, kernel)
    if layout not in STACKS and module is not None and is_sharded(module.weight):
        _check_split(plan, module.weight)
    return plan


def _check_split(plan: LayerPlan, weight: Any) -> None:
    """Check what tensor parallelism requires: whole bytes of indices on each rank, and no adapter."""
    if plan.layout not in MATRICES:
        raise _Unfit("it is sharded, and the file has a convolution; load into a plain model")
    if weight.is_meta:
        raise _Unfit("it is sharded on the meta device; load before parallelize_module, or move the model first")
    if plan.parts.keys() & set(ADAPTER):
        raise _Unfit("it is sharded, and the file has an adapter for it; load into a plain model")
    p, ways = plan.pattern, 1
    for dim, placement in enumerate(weight.placements):
        if placement.is_shard(REDUCED[plan.layout]):
            ways *= weight.device_mesh.size(dim)
    if ways == 1:
        return
    if "weight.columns" in plan.parts:
        raise _Unfit("it reorders its inputs, which tensor parallelism has split; load into a plain model")
    cols = plan.shape[1]
    steps = plan.parts["weight.step"].shape[1] if "weight.step" in plan.parts else 1
    if steps % ways and steps > 1:
        raise _Unfit(f"it is split {ways} ways along in={cols}, which would cut groups of {cols // steps} columns; load into a plain model")
    if plan.parts["weight.values"].dtype == torch.uint8 and cols % ways == 0 and p.kept(cols // ways) % 2:
        raise _Unfit(f"it is split {ways} ways along in={cols}, which would cut bytes of two integers; load into a plain model")
    if cols % (ways * p.m) or p.kept(cols // ways) * p.index_bits % 8:
        raise _Unfit(f"it is split {ways} ways along in={cols}, which would cut bytes of packed {p} indices; load into a plain model")


def _entry(about: Any) -> tuple[Pattern, str, str, tuple[int, ...], tuple[int, int]]:
    """(pattern, layout, dtype, shape, kernel) of a layer from its entry in the metadata."""
    try:
        spec, layout, dtype, shape = about["pattern"], about["layout"], about["dtype"], about["shape"]
        if not isinstance(spec, str) or not isinstance(dtype, str) or layout not in (*LAYOUTS, *STACKS):
            raise ValueError(f"pattern {quote(spec)}, dtype {quote(dtype)} and layout {quote(layout)}")
        sizes, least = tuple(shape), int(layout in STACKS)
        if len(sizes) != 2 + least or not all(type(size) is int and least <= size < 1 << 63 for size in sizes):
            raise ValueError(f"shape {quote(shape)}")
        height, width = about["kernel"] if layout == CONV2D else (1, 1)
        if not all(type(size) is int and 0 < size < 1 << 31 for size in (height, width)) or sizes[-1] % (height * width):
            raise ValueError(f"kernel {quote([height, width])} with rows of {sizes[-1]}")
        return Pattern(spec), layout, dtype, sizes, (height, width)
    except (KeyError, TypeError, ValueError, NMError) as error:
        raise _Unfit(f"its entry in the metadata is damaged ({type(error).__name__}: {shortened(error)})") from error


class _Integers(NamedTuple):
    """The values of a layer with integers: how many elements of which dtype a row has, and how many steps."""

    width: int
    stored: torch.dtype
    steps: int


def _integers(about: Any, pattern: Pattern, layout: str, shape: tuple[int, ...]) -> _Integers | None:
    """What the entry says of integers; None for floating-point values."""
    if "values" not in about and "group" not in about:
        return None
    values, group, cols = about.get("values"), about.get("group"), shape[-1]
    whole = type(group) is int and (group == 0 or (0 < group <= cols and cols % group == 0 and group % pattern.m == 0))
    if type(values) is not str or values not in BITS or not whole or layout not in MATRICES:
        raise _Unfit(f"its entry in the metadata is damaged: values {quote(values)} and group {quote(group)} for {cols} columns")
    kept = pattern.kept(cols)
    size = (kept, torch.int8) if BITS[values] == 8 else (-(-kept // 2), torch.uint8)
    return _Integers(*size, cols // group if group else 1)


def _check_rounded(values: Tensor, step: Tensor, kept: int) -> None:
    """Check that steps are finite, and that integers are in the range that rounding gives."""
    if not bool(step.isfinite().all()):
        raise _Unfit("a step is NaN or infinite; the file is damaged")
    if values.is_meta or not values.numel():  # offloaded
        return
    if values.dtype == torch.int8 and int(values.min()) == -128:
        raise _Unfit("an integer is -128, and the smallest is -127; the file is damaged")
    if values.dtype == torch.uint8 and kept % 2 and int(values[:, -1].max()) > 15:
        raise _Unfit("the spare half of a row's last byte of integers is not 0; the file is damaged")


def _check_adapter(rank: Any, left: Tensor | None, right: Tensor | None, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Check for L (in, rank) and R (rank, out) if the entry has a rank, and for no adapter if it has none."""
    if rank is None and left is None and right is None:
        return
    if rank is None or left is None or right is None:
        lacks = "its entry in the metadata does not announce" if rank is None else "the file lacks"
        raise _Unfit(f"{lacks} its adapter, or a part of it")
    matrices = left.dim() == right.dim() == 2 and {left.dtype, right.dtype} == {dtype}
    if not matrices or type(rank) is not int or not left.shape[1] == right.shape[0] == rank >= 1:
        raise _Unfit(
            f"its entry says an adapter of rank {shortened(rank)} in {dtype}; "
            f"L is {tuple(left.shape)} in {left.dtype} and R {tuple(right.shape)} in {right.dtype}"
        )
    if (right.shape[1], left.shape[0]) != shape:
        raise _Unfit(f"its adapter does not fit a weight {shape} (out, in)")


def _check_module(name: str, module: Any, layout: str, shape: tuple[int, ...], kernel: tuple[int, int], dtype: torch.dtype) -> None:
    if module is None:
        raise _Unfit("the model has no such module")
    if isinstance(module, (CompressedLinear, NMWeight)):
        raise _Unfit(f"it is already a {type(module).__name__}; load into a freshly built dense model")
    if not name:
        raise _Unfit("the model itself is one layer, which cannot be swapped in place; put it in an nn.Sequential")
    kinds = (
        (LINEAR, isinstance(module, nn.Linear)),
        (CONV1D, is_conv1d(module)),
        (CONV2D, class_of(module) is nn.Conv2d and module.groups == 1),
    )
    kind = next((word for word, fits in kinds if fits), type(module).__name__)
    if kind != layout:
        raise _Unfit(f"the file holds a {layout} layer, the model a {kind}")
    if layout == CONV2D and tuple(module.kernel_size) != kernel:
        raise _Unfit(f"the file's kernel is {kernel}, the model's {tuple(module.kernel_size)}")
    have = matrix_shape(module.weight.shape, layout)
    if have != shape:
        raise _Unfit(f"the file's weight is {shape} (out, in), the model's {have}")
    if module.weight.dtype != dtype:
        raise _Unfit(f"the file's weight is {dtype}, the model's {module.weight.dtype}; build the model with model.to({dtype})")


def _check_stack(name: str, module: Any, layout: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if module is None:
        raise _Unfit("the model has no such module")
    if isinstance(module, (SparseExperts, CompressedExperts)):
        raise _Unfit(f"it is already in a {type(module).__name__}; load into a freshly built dense model")
    key = name.rpartition(".")[2]
    if stacks_of(module).get(key) != layout:
        raise _Unfit(f"the file holds a stack of experts (layout {layout}), the model's {type(module).__name__} has none of that name")
    weight = module._parameters[key]
    if is_sharded(weight):
        raise _Unfit("it is sharded, and compressed experts cannot be; load into a plain model")
    have = tuple(weight.shape) if layout == EXPERTS else (weight.shape[0], weight.shape[2], weight.shape[1])
    if have != shape:
        raise _Unfit(f"the file's weight is {shape} (experts, out, in), the model's {have}")
    if weight.dtype != dtype:
        raise _Unfit(f"the file's weight is {dtype}, the model's {weight.dtype}; build the model with model.to({dtype})")


def _check_indices(indices: Tensor, pattern: Pattern, cols: int) -> None:
    """Check that indices increase within each group and are below M, and that spare bits are 0, as the kernels require."""
    count, bits = pattern.kept(cols), pattern.index_bits
    spare = indices.shape[-1] * 8 - count * bits
    if spare and indices.numel() and int(indices[..., -1].max()) >> (8 - spare):
        raise _Unfit("the spare bits of a row's last index byte are not 0; the file is damaged")
    if not spare and 8 % (pattern.n * bits) == 0:  # a byte holds whole groups: check each of the 256 values once, in 1/20 of the time
        indices, count = torch.bincount(indices.flatten(), minlength=256).nonzero().to(torch.uint8), 8 // bits
    positions = unpack_indices(indices, bits, count).unflatten(-1, (-1, pattern.n)).short()
    if positions.numel() and int(positions.max()) >= pattern.m:
        raise _Unfit(f"index {int(positions.max())} is out of range for groups of {pattern.m}; the file is damaged")
    if not bool((positions.diff(dim=-1) > 0).all()):
        raise _Unfit("the indices of a group do not increase; the file is damaged")


def _match_others(layers: dict[str, LayerPlan], rest: dict[str, Tensor], model: nn.Module, problems: list[str]) -> dict[str, Tensor]:
    """Every tensor that is not a compressed weight, by its name in the model; names, shapes and dtypes have to match."""
    plain = plain_names(model)
    swapped = {plain(name) if layer.layout in STACKS else f"{plain(name)}.weight" for name, layer in layers.items()}
    failed = any(problems)
    others: dict[str, Tensor] = {}
    tied: dict[tuple[object, ...], str] = {}
    for own_name, value in model.state_dict().items():
        key = plain(own_name)
        if key in swapped:
            continue
        tensor = rest.pop(key, None)
        if tensor is None:
            if not (failed and key.endswith(".weight")):  # it may be of a layer whose problem is already listed
                problems.append(f"the file lacks {quote(key)}")
        elif not isinstance(value, Tensor) or tensor.shape != value.shape:
            have = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            problems.append(f"{quote(key)} has shape {tuple(tensor.shape)} in the file, {have} in the model")
        elif tensor.dtype != value.dtype:
            problems.append(f"{quote(key)} is {tensor.dtype} in the file, {value.dtype} in the model; use model.to({tensor.dtype})")
        else:
            # on the meta device the model takes this very tensor, which must not stay part of the mapped file
            others[own_name] = tensor.clone() if value.is_meta else tensor
            known = type(value) is Tensor and value.numel() and not value.is_meta
            first = tied.setdefault(place(value), own_name) if known else own_name
            if not _same(others[first], tensor):
                problems.append(f"{quote(key)} is tied to {first!r} in the model, but the file has another tensor for it")
    problems += [f"the model has no {quote(key)}" for key in rest]
    return others
