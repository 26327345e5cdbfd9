"""A model's tensors under the names of the dense model, ready to be written."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..nn import CompressedLinear
from ..pattern import CheckpointError
from ._files import atomic_write


def library() -> Any:
    """The safetensors package; imported late, because training does not need it."""
    try:
        import safetensors.torch
    except ImportError as error:
        raise CheckpointError("reading and writing these files needs the safetensors package: pip install safetensors.") from error
    return safetensors


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


def compressed_layers(model: nn.Module) -> dict[str, CompressedLinear]:
    """Every CompressedLinear of ``model`` by its name in the model without wrappers; a shared one appears under each of its names."""
    return {name: m for name, (_, m) in plain_modules(model).items() if isinstance(m, CompressedLinear)}


def other_tensors(model: nn.Module, layers: dict[str, CompressedLinear]) -> dict[str, Tensor]:
    """The state dict without the compressed weights, under the names of the dense model without wrappers.

    Raises:
        CheckpointError: an entry is not a tensor, or has no data (meta device).
    """
    own = {f"{name}.{part}" for name in layers for part in ("values", "indices", "columns")}
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
    """Write ``tensors`` and ``metadata`` as one safetensors file, atomically.

    Raises:
        CheckpointError: a tensor has no data (meta device) or a dtype that the format lacks, or the file cannot be written.
    """
    ready = {}
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise CheckpointError(f"tensor {name!r} is on the meta device and has no data to save; load weights into the model first.")
        # a fresh copy per tensor: the format refuses tensors that are windows into one storage
        ready[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)

    def fill(temporary: Path) -> None:
        library().torch.save_file(ready, temporary, metadata)
        _sort_metadata(temporary)

    try:
        atomic_write(path, fill)
    except (KeyError, ValueError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
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
        at = place(tensor)
        if tensor.numel() and not tensor.is_meta and at in seen:
            aliases[name] = seen[at]
        else:
            seen[at] = name
            kept[name] = tensor
    return kept, aliases


def place(tensor: Tensor) -> tuple[object, ...]:
    """What two tensors share that are one in memory, unless they are empty or on the meta device."""
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
