"""Safetensors files: writing a model's tensors under the names of the dense model, and reading with checks for damage."""

from __future__ import annotations

import json
import os
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from reprlib import Repr
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..files import atomic_write
from ..nn.compressed import CompressedLinear
from ..nn.experts import CompressedStack, StackedWeight, layer_name
from ..nn.weight import NMWeight
from ..pattern import CheckpointError
from ..timing.table import regular_size

Layer = NMWeight | CompressedLinear | CompressedStack

WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Child names by which ``torch.compile``, activation checkpointing and FSDP hold the wrapped module."""
PARALLEL = "module"
"""The same for ``DistributedDataParallel`` and ``DataParallel``; other modules may have a child with that name too."""


def unwrapped(name: str) -> str:
    """``name`` without ``WRAPPERS``."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def plain_names(model: nn.Module) -> Callable[[str], str]:
    """A function that maps names in ``model`` to names in the model without wrappers, which may be at any depth."""
    modules = model.named_modules(remove_duplicate=False)
    parallel = {unwrapped(name) for name, m in modules if isinstance(m, (DistributedDataParallel, nn.DataParallel))}

    def plain(name: str) -> str:
        path, parts = "", []
        for part in unwrapped(name).split("."):
            if part != PARALLEL or path not in parallel:
                parts.append(part)
            path = f"{path}.{part}" if path else part
        return ".".join(parts)

    return plain


def plain_modules(model: nn.Module) -> dict[str, nn.Module]:
    """{name without wrappers: module} for every module; for wrapped ones the inner module."""
    plain = plain_names(model)
    # a wrapper comes before the module that it holds, which overwrites it
    return {plain(name): module for name, module in model.named_modules(remove_duplicate=False)}


def sparse_layers(model: nn.Module) -> dict[str, Layer]:
    """Every sparse layer of ``model`` by its name without wrappers; a shared layer has several names, a stack of experts that of its
    Parameter."""
    return {layer_name(name, m): m for name, m in plain_modules(model).items() if isinstance(m, Layer)}


def weight_name(name: str, layer: Layer) -> str:
    """The name of the weight of ``layer`` in the dense model."""
    return name if isinstance(layer, (StackedWeight, CompressedStack)) else f"{name}.weight" if name else "weight"


def plain_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict, by names without wrappers."""
    plain, state = plain_names(model), model.state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            what = f"the model's state {plain(name)!r} is a {type(value).__name__}"
            raise CheckpointError(f"{what}, and a file holds tensors only; save it separately.")
    return {plain(name): value for name, value in state.items()}


def write(path: str | os.PathLike[str], tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write ``tensors`` and ``metadata`` as one safetensors file, atomically."""
    import safetensors.torch  # imported here and below only: training does not need it

    ready = {}
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise CheckpointError(f"tensor {name!r} is on the meta device and has no data to save; load weights into the model first.")
        # a copy per tensor: the format refuses tensors that share storage
        ready[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)

    def fill(temporary: Path) -> None:
        safetensors.torch.save_file(ready, temporary, metadata)
        # safetensors writes metadata in random order; sorted, the same model gives the same bytes
        with temporary.open("r+b") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
            header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
            text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
            if len(text) <= length:
                file.seek(8)
                file.write(text.ljust(length))

    try:
        atomic_write(path, fill)
    except CheckpointError:
        raise
    except (KeyError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path}: safetensors refuses to write this model: {error}.") from error


MAX_QUOTED = 200
"""How many characters from a file an error message may repeat."""

quoted = Repr()
quoted.maxstring = quoted.maxlong = quoted.maxother = MAX_QUOTED


def quote(value: object) -> str:
    """``repr`` of a value from a file, shortened in the middle if it is long."""
    return quoted.repr(value)


def shortened(value: object) -> str:
    """``str`` of a value from a file or of an error, shortened if it is long, with escapes for characters that cannot be printed."""
    text = str(value).rstrip(".")
    text = text if len(text) <= 2 * MAX_QUOTED else text[: 2 * MAX_QUOTED] + "..."
    return text.encode("utf-8", "backslashreplace").decode()


def first_line(error: BaseException, typed: bool = False) -> str:
    """The first line of a message, and the next if it announces one, without a full stop; ``typed``: after the error's type, as always
    where the message is a key or empty.

    Example:
        >>> first_line(ValueError("It is wrong:\\n  too long.\\nAnd more.")), first_line(KeyError("name"))
        ('It is wrong: too long', "KeyError: 'name'")
    """
    kind = f"{type(error).__name__}: " if typed or isinstance(error, KeyError) else ""
    lines = f"{kind}{error}".strip().splitlines() or [type(error).__name__]
    text = " ".join(line.strip() for line in lines[: 1 + lines[0].endswith(":")])
    return text[:200].rstrip(":. ")


def parse(text: str | bytes) -> Any:
    """Parse JSON strictly: duplicate names, NaN and infinity are errors."""
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
    """The contents of a safetensors file; its tensors are views of the mapped file and not read yet."""

    path: Path
    tensors: dict[str, Tensor]
    metadata: dict[str, str]

    def json(self, key: str) -> dict[str, Any]:
        """The JSON object under ``key`` in the metadata; empty if there is none."""
        try:
            value = parse(self.metadata.get(key, "{}"))
        except ValueError as error:
            raise CheckpointError(f"{self.path}: the metadata entry {key!r} is damaged ({shortened(error)}).") from error
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.path}: the metadata entry {key!r} is not a table.")
        return value


def read(path: str | os.PathLike[str]) -> Contents:
    """Open the safetensors file ``path``."""
    import safetensors

    path = Path(path)
    try:
        size = regular_size(path)
        path.open("rb").close()
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        raise CheckpointError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return Contents(path, {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {}))  # noqa: SIM118
    except Exception as error:  # safetensors and torch raise many types
        raise CheckpointError(
            f"{path} is not a valid safetensors file, or is truncated: {shortened(error)}. It has {size:,} bytes; copy or save it again."
        ) from error


SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""File names of ``save_pretrained``: the single file, or the index of several."""


def weight_files(folder: Path) -> list[str]:
    """The names of the safetensors files of ``save_pretrained`` in ``folder``."""
    if (folder / SINGLE).exists():
        return [SINGLE]
    try:
        index = parse((folder / INDEX).read_bytes())
        files = sorted(set(index["weight_map"].values()))
        if not files or not all(type(name) is str and Path(name).name == name for name in files):
            raise ValueError("weight_map names no files of this folder")
        return files
    except OSError as error:
        raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}; pass a folder of save_pretrained, or a file.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / INDEX} is damaged ({type(error).__name__}: {shortened(error)}).") from error


def read_folder(folder: str | os.PathLike[str]) -> Contents:
    """Open the safetensors files of ``save_pretrained`` in ``folder`` as one."""
    folder = Path(folder)
    first, *others = (read(folder / name) for name in weight_files(folder))
    for part in others:
        if first.metadata != part.metadata or first.tensors.keys() & part.tensors.keys():
            raise CheckpointError(f"{part.path} does not belong to {first.path}; save the model into an empty folder.")
        first.tensors |= part.tensors
    return Contents(folder, first.tensors, first.metadata)
