"""Loading compressed layers: announced without data from the file's table, checked, filled, and only then put into the model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..gemm.problem import plain
from ..layouts import CONV1D, CONV2D, EMBEDDING, EXPERTS, EXPERTS_T, LINEAR, MATRICES, ORDERS, REDUCED, matrix_shape
from ..nn.adapter import ADAPTER
from ..nn.classes import class_of, computed_by
from ..nn.compress import compressed_like
from ..nn.compressed import LAYOUTS, CompressedLinear, index_problem, is_order
from ..nn.experts import CompressedExperts, CompressedStack, SparseExperts, child_name, compress_stacks_, stacks_of
from ..nn.swap import after_swap, is_conv1d, replace_each_
from ..nn.weight import NMWeight
from ..ops import Compressed
from ..ops.check import FLOATS, STORED
from ..ops.integers import BITS
from ..pattern import CheckpointError, NMError, Pattern
from ..shards import is_sharded, local, place, spread
from .tensors import Contents, plain_modules, plain_names, quote, shortened

MAX_PROBLEMS = 5
"""How many problems an error message lists."""
BUFFERS = ("values", "indices", "step", "columns")
"""The buffers of a compressed layer. Each has the first two, but dense integers have no indices; a stack of experts has no columns."""
DTYPES = {plain(dtype) for dtype in FLOATS}
STACKS = (EXPERTS, EXPERTS_T)  # a tuple, because values from an untrusted file may not be hashable


class _Unfit(Exception):
    """A layer of the file is damaged or does not fit the model; the message says why."""


@contextmanager
def _of_layer(name: str, problems: list[str] | None = None) -> Iterator[None]:
    """Turn ``_Unfit`` into one of ``problems``, or without a list into a CheckpointError."""
    try:
        yield
    except _Unfit as error:
        problem = f"layer {quote(name)}: {error}"
        if problems is None:
            raise CheckpointError(f"{problem}.") from None
        problems.append(problem)


class _Expected(NamedTuple):
    """A tensor that the file has to hold: its name in the state dict of the model, or of ``layer``, and what is there now."""

    name: str
    present: Any
    layer: str = ""


def load(model: nn.Module, contents: Contents, table: dict[str, Any], keep_dense: bool = False, fill_tied: bool = False) -> None:
    """Check everything, then put the layers of ``table`` into the model and load all tensors; a module with several names stays one module.
    ``fill_tied``: the file may lack tensors that the model ties to others.
    """
    modules, tensors = plain_modules(model), contents.tensors
    layers = announce(contents.path, modules, table, keep_dense, cast=False)
    # what the model has then, by names without wrappers
    expected: dict[str, _Expected] = {}
    plain_name, replaced = plain_names(model), set()
    for home, module in modules.items():
        for key in module._parameters:
            if (module, key) in layers:
                layer = layers[module, key][1]
                replaced.add(weight := f"{home}.{key}".removeprefix("."))
                name, inside = (weight, child_name(weight)) if isinstance(layer, CompressedStack) else (home, home)
                state = layer.state_dict(keep_vars=True)
                expected |= {f"{inside}.{part}": _Expected(part, tensor, name) for part, tensor in state.items() if part != "bias"}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if plain_name(name) not in replaced:
            expected[plain_name(name)] = _Expected(name, tensor)
    _refuse(contents.path, list(_compare(expected, tensors, fill_tied)))
    parts: dict[str, dict[str, Tensor]] = {}
    problems: list[str] = []
    for key, (part, _, name) in expected.items():
        parts.setdefault(name, {})[part] = tensors[key]
    for name, layer in layers.values():
        with _of_layer(name, problems):
            _check_contents(layer, parts[name])
    _refuse(contents.path, problems)
    # first what may run out of memory; copies, because nothing may stay part of the mapped file
    shared: dict[int, dict[str, Tensor]] = {}
    for (dense, key), (name, layer) in layers.items():
        weight, layer_state = dense._parameters[key], layer.state_dict()
        device = "cpu" if weight.is_meta else weight.device
        present = shared.setdefault(id(layer.values), {})  # layers that share a weight share its integers
        moved = {
            part: present[part] if part in present else spread(layer_state[part], tensor).to(device, copy=True)
            for part, tensor in parts[name].items()
        }
        present |= {part: moved[part] for part in ("values", "step") if part in moved}
        if "indices" not in moved:
            layer.indices = torch.empty_like(layer.indices, device=device)
        layer.load_state_dict(moved, strict=False, assign=True)
    dense_tensors = parts.get("", {})
    present = {name: value for name, value, layer in expected.values() if not layer}
    filled: dict[str, Tensor] = {}  # what has data is filled in place, and what is on the meta device gets a tensor of its own
    assigned: dict[str, Tensor] = {}
    tied: dict[int, nn.Parameter] = {}
    for name, value in present.items():
        tensor = spread(value, dense_tensors[name].clone() if value.is_meta else dense_tensors[name])
        if value.is_meta and isinstance(value, nn.Parameter):  # one Parameter for all names of a tied weight
            tensor = tied.setdefault(id(value), nn.Parameter(tensor, value.requires_grad))
        (assigned if value.is_meta else filled)[name] = tensor
    for (dense, key), (_, layer) in layers.items():
        if isinstance(layer, CompressedStack):
            compress_stacks_(dense, {key: layer})
    replace_each_(model, {dense: layer for (dense, _), (_, layer) in layers.items() if isinstance(layer, CompressedLinear)})
    if assigned:
        model.load_state_dict(assigned, strict=False, assign=True)
    model.load_state_dict(filled, strict=False)
    after_swap(model)


def announce(
    where: object, modules: Mapping[str, nn.Module], table: Mapping[str, Any], keep_dense: bool = False, cast: bool = True
) -> dict[tuple[Any, str], tuple[str, CompressedLinear | CompressedStack]]:
    """{(dense module, name of its Parameter): (name, layer)} for the entries of ``table``, which ``where`` has. The layers are not in the
    model yet, and their tensors are on the meta device. ``cast``: dtypes of dense weights that differ from those of the entries are taken.
    CheckpointError if an entry is damaged, or does not fit the model.
    """
    layers: dict[tuple[Any, str], tuple[str, CompressedLinear | CompressedStack]] = {}
    problems: list[str] = []
    shared: dict[tuple[int, str], Compressed] = {}
    for name, about in table.items():
        home, key = home_of(name, about)
        dense = modules.get(home)
        with _of_layer(name, problems):
            if (dense, key) not in layers:
                layers[dense, key] = name, _announced(name, key, about, dense, keep_dense, cast, shared)
            elif about != table[layers[dense, key][0]]:
                raise _Unfit(f"in the model it is also {layers[dense, key][0]!r}, for which the file has another entry")
    _refuse(where, problems)
    return layers


def _refuse(where: object, problems: list[str]) -> None:
    if problems:
        more = [f"and {len(problems) - MAX_PROBLEMS} more"] if len(problems) > MAX_PROBLEMS else []
        shown = "\n  ".join(problems[:MAX_PROBLEMS] + more)
        raise CheckpointError(f"{where} does not fit the model, which is unchanged:\n  {shown}")


def _compare(expected: Mapping[str, _Expected], tensors: dict[str, Tensor], fill_tied: bool) -> Iterator[str]:
    """Compare names, shapes, dtypes and ties with those of the file, and yield the problems. Adds to ``tensors`` what the model ties."""
    tied: dict[object, list[str]] = {}
    for key, (part, value, layer) in expected.items():
        if layer and part == "step" and is_sharded(value) and key in tensors and tensors[key].shape[1:] == (1,):
            tensors[key] = tensors[key].expand(-1, value.shape[1])  # ranks that split a row have the same step
        known = isinstance(value, Tensor) and type(value.detach()) is Tensor and value.numel() and not value.is_meta
        tied.setdefault(place(value) if known else id(value), []).append(key)
    for keys in tied.values():
        stored = next((tensors[key] for key in keys if key in tensors), None)
        for key in keys:
            part, value, layer = expected[key]
            if fill_tied and stored is not None:
                tensors.setdefault(key, stored)
            tensor = tensors.get(key)
            if tensor is None or not isinstance(value, Tensor):
                yield f"layer {quote(layer)}: the file lacks its {part}" if layer else f"the file lacks {quote(key)}"
            elif (tensor.shape, tensor.dtype) != (value.shape, value.dtype):
                wanted, its = (f"{t.dtype} {tuple(t.shape)}" for t in (value, tensor))
                way = f"; use model.to({tensor.dtype})" if tensor.shape == value.shape else ""
                entry = f"layer {quote(layer)}: the file has {part} {its}; its entry in the metadata says {wanted}"
                yield entry if layer else f"{quote(key)} is {its} in the file, {wanted} in the model{way}"
            elif stored is not None and not _same(stored, tensor):
                yield f"{quote(key)} is tied to {quote(keys[0])} in the model, but the file has another tensor for it"
    for key in tensors:
        if key not in expected:
            home, _, part = key.rpartition(".")
            layer = expected.get(f"{home}.values", _Expected("", None)).layer if part in (*BUFFERS, *ADAPTER) else ""
            entry = f"layer {quote(layer)}: its entry in the metadata does not announce its {part}"
            yield entry if layer else f"the model has no {quote(key)}"


def home_of(name: str, about: Any) -> tuple[str, str]:
    """(module name, Parameter name) of the weight that the entry ``about`` of ``name`` describes."""
    if not (isinstance(about, dict) and about.get("layout") in STACKS):
        return name, "weight"
    home, _, key = name.rpartition(".")
    return home, key


def _announced(
    name: str, key: str, about: Any, dense: Any, keep_dense: bool, cast: bool, shared: dict[tuple[int, str], Compressed]
) -> CompressedLinear | CompressedStack:
    """The layer for one entry; if tensor parallelism has split the dense weight, this rank's part. ``shared``: the forms of dense integers,
    by dense weight and entry, since an embedding and an output head that share a weight share them."""
    pattern, layout, dtype, shape, kernel = _entry(about)
    bits, steps = _integers(about, pattern, layout, shape[-1])
    weight = _weight_of(dense, key, name, layout, shape, kernel)
    if not cast and plain(weight.dtype) != dtype:
        way = f"build the model with model.to(torch.{dtype})"
        raise _Unfit(f"the file's weight is torch.{dtype}, the model's {weight.dtype}; {way}")
    rank, columns = about.get("rank"), about.get("columns", False)
    if (rank is not None and (type(rank) is not int or not 1 <= rank < 1 << 31)) or type(columns) is not bool:
        raise _Unfit(f"its entry in the metadata is damaged: rank {quote(rank)} and columns {quote(columns)}")
    if layout == CONV2D and shape[1] // math.prod(kernel) % pattern.m:
        raise _Unfit(f"{pattern.m} does not divide its input channels")
    if layout not in MATRICES - {EMBEDDING} and (rank is not None or columns):
        raise _Unfit("convolutions, embeddings and experts have no adapter and no reordered inputs")
    if layout == EMBEDDING and (not bits or pattern.m > 1 or is_sharded(weight)):
        raise _Unfit("the rows of an embedding are dense integers, 1:1, and are not split by tensor parallelism")
    if is_sharded(weight):
        _check_split(layout, weight, pattern, bits, steps, rank is not None, columns)
    rows, cols = matrix_shape(local(weight).shape, layout)
    stored = pattern.kept(cols)

    def empty(*sizes: int, dtype: torch.dtype = weight.dtype) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    values, step = empty(rows, stored), None
    if bits:
        values = empty(rows, stored, dtype=torch.int8) if bits == 8 else empty(rows, -(-stored // 2), dtype=torch.uint8)
        step = empty(rows, max(1, steps * cols // shape[-1]), dtype=torch.bfloat16)
    packed = Compressed(values, empty(rows, pattern.index_bytes(cols, bits != 0), dtype=torch.uint8), pattern, (rows, cols), step)
    if bits and pattern.m == 1:
        packed = shared.setdefault((id(weight), f"{values.dtype} {steps}"), packed)
    if layout in STACKS:
        return CompressedStack(packed, shape[0], layout, keep_dense, weight.dtype)
    layer = compressed_like(dense, packed, layout, keep_dense, None if rank is None else (empty(cols, rank), empty(rank, rows)))
    if columns:
        layer.register_buffer("columns", empty(cols, dtype=torch.int32))
    return layer


def check_filled(name: str, layer: CompressedLinear | CompressedStack, elsewhere: Mapping[str, Tensor], missing: set[str]) -> None:
    """Check a layer of ``announce`` whose tensors another library has read, as ``load`` does.

    ``elsewhere``: indices, steps and columns that are put into the layer only while it runs. ``missing``: what was not read.
    """
    with _of_layer(name):
        if missing:
            raise _Unfit(f"the file lacks its {', '.join(sorted(missing))}")
        _check_contents(layer, {**layer._buffers, **elsewhere})


def _check_contents(layer: CompressedLinear | CompressedStack, tensors: Mapping[str, Any]) -> None:
    pattern, cols = layer.pattern, layer.whole_shape[1] if isinstance(layer, CompressedLinear) else layer.in_features
    values, indices, step, columns = (tensors.get(part) for part in BUFFERS)
    indices = layer.indices if indices is None else indices
    assert values is not None and indices is not None
    if step is not None:
        if values.dtype not in STORED or step.dtype != torch.bfloat16 or indices.dtype != torch.uint8:
            raise _Unfit(f"values are {values.dtype}, steps {step.dtype} and indices {indices.dtype}, which no layer with integers has")
        if not bool(step.isfinite().all()):
            raise _Unfit("a step is NaN or infinite; the file is damaged")
        present = values.numel() and not values.is_meta  # else it is offloaded
        if present and values.dtype == torch.uint8 and pattern.kept(cols) % 2 and int(values[..., -1].max()) > 15:
            raise _Unfit("the spare half of a row's last byte of integers is not 0; the file is damaged")
    elif not values.is_floating_point() or indices.dtype != torch.uint8:
        raise _Unfit(f"values are {values.dtype} and indices {indices.dtype}; expected floating-point values and torch.uint8 indices")
    if indices.shape[-1] and (problem := index_problem(indices, pattern, cols)):
        raise _Unfit(f"{problem}; the file is damaged")
    if columns is not None and not is_order(columns, cols):
        raise _Unfit(f"the order of its inputs is not a permutation of {cols}; the file is damaged")


def _entry(about: Any) -> tuple[Pattern, str, str, tuple[int, ...], tuple[int, int]]:
    """(pattern, layout, dtype, shape, kernel) of a layer from its entry in the metadata."""
    try:
        spec, layout, dtype, shape = about["pattern"], about["layout"], about["dtype"], about["shape"]
        if not isinstance(spec, str) or not isinstance(dtype, str) or dtype not in DTYPES or layout not in (*LAYOUTS, *STACKS):
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


def _integers(about: Any, pattern: Pattern, layout: str, cols: int) -> tuple[int, int]:
    """(bits of a value, steps of a row) from the entry; zeros for floating-point values."""
    if "values" not in about and "group" not in about:
        return 0, 0
    values, group = about.get("values"), about.get("group")
    fits = type(group) is int and (group == 0 or (0 < group <= cols and cols % group == 0 and group % pattern.m == 0))
    if type(values) is not str or values not in BITS or not fits or layout == CONV2D:
        raise _Unfit(f"its entry in the metadata is damaged: values {quote(values)} and group {quote(group)} for {cols} columns")
    return BITS[values], cols // group if group else 1


def _weight_of(module: Any, key: str, name: str, layout: str, shape: tuple[int, ...], kernel: tuple[int, int]) -> Any:
    """The dense weight ``key`` of ``module``, which has to be that of the entry."""
    if module is None:
        raise _Unfit("the model has no such module")
    if isinstance(module, (CompressedLinear, NMWeight, SparseExperts, CompressedExperts)):
        raise _Unfit(f"it is already a {type(module).__name__}; load into a freshly built dense model")
    if not name:
        raise _Unfit("the model itself is one layer, which cannot be swapped in place; put it in an nn.Sequential")
    kinds = {
        LINEAR: isinstance(module, nn.Linear),
        EMBEDDING: isinstance(module, nn.Embedding) and class_of(module) is nn.Embedding and module.max_norm is None,
        CONV1D: is_conv1d(module),
        CONV2D: class_of(module) is nn.Conv2d and module.groups == 1,
        stacks_of(module).get(key, ""): True,
    }
    if not kinds.get(layout):
        kind = next((word for word, fits in kinds.items() if fits and word), type(module).__name__)
        what = f"stack of experts (layout {layout})" if layout in STACKS else f"{layout} layer"
        held, present = (f"{'an' if word[0] in 'aeiou' else 'a'} {word}" for word in (what, kind))
        raise _Unfit(f"the file holds {held}, the model {present}")
    reason = computed_by(module, key) or computed_by(module, "bias")
    if reason:
        raise _Unfit(reason)
    weight: Any = module._parameters[key]
    if layout == CONV2D and tuple(module.kernel_size) != kernel:
        raise _Unfit(f"the file's kernel is {kernel}, the model's {tuple(module.kernel_size)}")
    sizes = tuple(weight.shape)
    have = tuple(sizes[dim] for dim in ORDERS[layout]) if layout in STACKS else matrix_shape(sizes, layout)
    if have != shape:
        raise _Unfit(f"the file's weight is {shape} ({'experts, ' * (layout in STACKS)}out, in), the model's {have}")
    return weight


def _check_split(layout: str, weight: Any, pattern: Pattern, bits: int, steps: int, adapter: bool, columns: bool) -> None:
    """Check what tensor parallelism requires: whole bytes of indices on each rank, and no adapter."""
    if layout not in MATRICES:
        raise _Unfit("it is sharded, and the file has a convolution or experts; load into a plain model")
    if weight.is_meta:
        raise _Unfit("it is sharded on the meta device; load before parallelize_module, or move the model first")
    if adapter:
        raise _Unfit("it is sharded, and the file has an adapter for it; load into a plain model")
    cols, ways = weight.shape[REDUCED[layout]], 1
    for dim, placement in enumerate(weight.placements):
        ways *= weight.device_mesh.size(dim) if placement.is_shard(REDUCED[layout]) else 1
    if ways == 1:
        return
    if columns:
        raise _Unfit("it reorders its inputs, which tensor parallelism has split; load into a plain model")
    cut = f"groups of {cols // steps} columns" if steps > 1 and steps % ways else ""
    if cols % (ways * pattern.m) or (pattern.kept(cols // ways) * pattern.index_bits % 8 and not (bits and pattern.m == 1)):
        cut = cut or f"bytes of packed {pattern} indices"
    elif bits == 4 and pattern.kept(cols // ways) % 2:
        cut = cut or "bytes of two integers"
    if cut:
        raise _Unfit(f"it is split {ways} ways along in={cols}, which would cut {cut}; load into a plain model")


def _same(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return one.data_ptr() == other.data_ptr() or torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
