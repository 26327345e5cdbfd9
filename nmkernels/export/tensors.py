"""A model's tensors under the names of the dense model, written; and a safetensors file read, with words for all that can be wrong."""

from __future__ import annotations

import json
import os
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import Repr
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..nn import CompressedLinear, CompressedStack, NMWeight, StackedWeight
from ..nn.experts import child_name, layer_name
from ..pattern import CheckpointError
from ..shards import local
from ..tuning.table import regular_size
from .files import atomic_write

Layer = NMWeight | CompressedLinear | CompressedStack

WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Names under which ``torch.compile``, activation checkpointing and FSDP hold the module that they wrap."""
PARALLEL = "module"
"""The same of ``DistributedDataParallel`` and ``DataParallel``; other modules may have a child of that name."""


def unwrapped(name: str) -> str:
    """``name`` without the wrappers that any name tells."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def plain_names(model: nn.Module) -> Callable[[str], str]:
    """The function from names in ``model`` to those in the same model without its wrappers, at whatever depth they are."""
    modules = model.named_modules(remove_duplicate=False)
    parallel = {unwrapped(name) for name, m in modules if isinstance(m, (DistributedDataParallel, nn.DataParallel))}

    def plain(name: str) -> str:
        path, kept = "", []
        for part in unwrapped(name).split("."):
            if part != PARALLEL or path not in parallel:
                kept.append(part)
            path = f"{path}.{part}" if path else part
        return ".".join(kept)

    return plain


def plain_modules(model: nn.Module) -> dict[str, tuple[str, nn.Module]]:
    """Every module of ``model`` and its name there, by its name in the model without wrappers; of a wrapped one, what is inside."""
    plain = plain_names(model)
    # the wrapper comes first, and what it holds takes its place
    return {plain(name): (name, module) for name, module in model.named_modules(remove_duplicate=False)}


def sparse_layers(model: nn.Module) -> dict[str, Layer]:
    """Every sparse layer of ``model`` by its name in the model without wrappers; a shared one appears under each of its names, a stack of
    experts under that of its Parameter."""
    return {layer_name(name, m): m for name, (_, m) in plain_modules(model).items() if isinstance(m, Layer)}


def weight_name(name: str, layer: Layer) -> str:
    """What the dense model calls the weight of ``layer``."""
    return name if isinstance(layer, (StackedWeight, CompressedStack)) else f"{name}.weight" if name else "weight"


def other_tensors(model: nn.Module, layers: Mapping[str, Layer]) -> dict[str, Tensor]:
    """The state dict without the weights of ``layers``, under the names of the dense model without wrappers."""
    homes = (child_name(name) if isinstance(layer, CompressedStack) else name for name, layer in layers.items())
    own = {f"{home}.{part}" for home in homes for part in ("weight", "values", "indices", "columns")}
    plain = plain_names(model)
    tensors: dict[str, Tensor] = {}
    for given, value in model.state_dict().items():
        key = plain(given)
        if key in own:
            continue
        if not isinstance(value, Tensor):
            raise CheckpointError(f"the model's state {key!r} is a {type(value).__name__}, and the file holds only tensors; save it apart.")
        tensors[key] = value
    return tensors


def write(path: str | os.PathLike[str], tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write ``tensors`` and ``metadata`` as one safetensors file, atomically."""
    import safetensors.torch  # here and below, because training does not need it

    ready = {}
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise CheckpointError(f"tensor {name!r} is on the meta device and has no data to save; load weights into the model first.")
        # a fresh copy per tensor: the format refuses tensors that are windows into one storage
        ready[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)

    def fill(temporary: Path) -> None:
        safetensors.torch.save_file(ready, temporary, metadata)
        _sort_metadata(temporary)

    try:
        atomic_write(path, fill)
    except CheckpointError:
        raise
    except (KeyError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path}: safetensors refuses to write this model: {error}.") from error


def _sort_metadata(path: Path) -> None:
    """Put the metadata in order: the library writes it in a random one, and the same model should give the same bytes."""
    with path.open("r+b") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) <= length:
            file.seek(8)
            file.write(text.ljust(length))


def without_aliases(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors with one name each, other name -> the name that is kept), for weights that are tied."""
    seen: dict[tuple[object, ...], str] = {}
    kept: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        first = seen.setdefault(place(tensor), name) if tensor.numel() and not tensor.is_meta else name
        if first == name:
            kept[name] = tensor
        else:
            aliases[name] = first
    return kept, aliases


def place(tensor: Tensor) -> tuple[object, ...]:
    """What two tensors share that are one in memory, unless they are empty or on the meta device."""
    return tensor.device, local(tensor).data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


HEADER_LENGTH = 8
LARGEST_HEADER = 100_000_000
LONGEST_WORD = 200  # characters of a file's own words that a message repeats

quoted = Repr()
quoted.maxstring = quoted.maxlong = quoted.maxother = LONGEST_WORD


def quote(value: object) -> str:
    """``repr`` of what a file says, cut in the middle where it is long."""
    return quoted.repr(value)


def shortened(said: object) -> str:
    """``str`` of what a file or an error says, cut where it is long, and without the characters that cannot be printed."""
    words = str(said).rstrip(".")
    words = words if len(words) <= 2 * LONGEST_WORD else words[: 2 * LONGEST_WORD] + "..."
    return words.encode("utf-8", "backslashreplace").decode()


def parse(text: str | bytes) -> Any:
    """The value of a JSON text that leaves nothing open: no name twice, no NaN and no infinity."""
    try:
        return json.loads(text, object_pairs_hook=_once, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"it has the name {quote(name)} twice")
    return table


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not a number of JSON")


@dataclass
class Contents:
    """What a safetensors file holds; the tensors are windows into the mapped file, of which nothing has been read yet."""

    path: Path
    tensors: dict[str, Tensor]
    metadata: dict[str, str]

    def json(self, key: str) -> dict[str, Any]:
        """The JSON object stored under ``key`` of the metadata; empty where the key is absent."""
        try:
            value = parse(self.metadata.get(key, "{}"))
        except ValueError as error:
            raise CheckpointError(f"{self.path}: the metadata entry {key!r} is damaged ({shortened(error)}).") from error
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.path}: the metadata entry {key!r} is not a table.")
        return value


def read(path: str | os.PathLike[str]) -> Contents:
    """Open ``path`` and find out what it holds."""
    import safetensors

    path = Path(path)
    _check_frame(path)
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return Contents(path, {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {}))  # noqa: SIM118
    except Exception as error:  # of the library and of torch below it, each in words of its own
        raise CheckpointError(f"{path} is not a sound safetensors file: {shortened(error)}.") from error


SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""What ``save_pretrained`` calls the one file, and the table of tensors where they are in several."""


def read_folder(folder: str | os.PathLike[str]) -> Contents:
    """Find out what the safetensors files hold that ``save_pretrained`` has put into ``folder``, as if they were one."""
    folder = Path(folder)
    if (folder / SINGLE).exists():
        return read(folder / SINGLE)
    try:
        index = parse((folder / INDEX).read_bytes())
        files = sorted(set(index["weight_map"].values()))
        if not files or not all(type(name) is str and Path(name).name == name for name in files):
            raise ValueError("weight_map names no files of this folder")
    except OSError as error:
        raise CheckpointError(f"{folder} holds neither {SINGLE} nor {INDEX}; give the folder of save_pretrained, or a file.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / INDEX} is damaged ({type(error).__name__}: {shortened(error)}).") from error
    whole = Contents(folder, {}, {})
    for name in files:
        part = read(folder / name)
        if (whole.metadata and whole.metadata != part.metadata) or whole.tensors.keys() & part.tensors.keys():
            raise CheckpointError(f"{folder / name} does not belong to {folder / files[0]}; save the model into an empty folder.")
        whole.tensors |= part.tensors
        whole.metadata = part.metadata
    return whole


def _check_frame(path: Path) -> None:
    """The format's frame: 8 bytes of header length, a JSON header, and data up to the last offset it names."""
    try:
        size = regular_size(path)
        with path.open("rb") as file:
            start = file.read(HEADER_LENGTH)
            length = struct.unpack("<Q", start)[0] if len(start) == HEADER_LENGTH else 0
            header = file.read(min(length, LARGEST_HEADER, size))
    except (OSError, ValueError) as error:  # no path at all, with a NUL in it, is a ValueError
        raise CheckpointError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    if length > LARGEST_HEADER or (header and not header.startswith(b"{")):
        raise CheckpointError(f"{path} is not a safetensors file.")
    truncated = f"{path} is truncated: it has {size:,} bytes; copy or save it again."
    if len(header) < length or not header:
        raise CheckpointError(truncated)
    try:
        entries = parse(header)
        ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
        if not all(type(end) is int and 0 <= end < 1 << 63 for end in ends):
            raise ValueError("an offset is not a size in bytes")
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a safetensors file: its header cannot be read ({shortened(error)}).") from error
    end = max(ends, default=0)
    if size < HEADER_LENGTH + length + end:
        raise CheckpointError(f"{truncated[:-1]} (it should have {HEADER_LENGTH + length + end:,}).")
