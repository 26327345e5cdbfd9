"""Hugging Face models whose blocks stay on disk, each in memory only while it is used."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from ..export.card import own_class
from ..export.folders import CONFIG, check_complete, check_loaded, check_weights, read_config, unloadable
from ..export.tensors import first_line, quote, read, shortened
from ..files import FULL, write_error
from ..pattern import CheckpointError, NMError
from ..train.report import Report
from ..train.sparsify import LayerCandidate
from .prune import remove_hooks_
from .relay import block_lists, on_device

log = logging.getLogger("nmkernels.prune")


class OnDisk:
    """``with disk(module)``: the weights of ``module`` are in memory, on ``device``, and on the meta device again after the outermost.
    ``device``: where blocks run; None: on the CPU.
    """

    def __init__(self, model: nn.Module, loader: Any, device: torch.device | None) -> None:
        self.device, self._loader = device, loader
        self.names = set() if loader is None else {name for name, t in _tensors(model) if t.is_meta}  # of the tensors on disk
        self.prefix = {module: name for name, module in model.named_modules()}
        self.change: Callable[[nn.Module], object] | None = None  # called with a module that was read, to write other weights into it

    def read(self, name: str) -> Tensor:
        """A tensor of the dense model, on the CPU, in memory of its own."""
        tensor: Tensor = self._loader[name]
        return tensor.detach().to("cpu", copy=True)

    @contextmanager
    def __call__(self, module: nn.Module) -> Iterator[None]:
        prefix, home = self.prefix[module], self.device or torch.device("cpu")
        if not any(t.is_meta and name in self.names for name, t in _tensors(module, prefix)):
            with on_device(module, self.device):
                yield
            return
        tables: list[tuple[str, dict[str, Any]]] = [
            (name, table) for name, part in module.named_modules(prefix=prefix) for table in (part._parameters, part._buffers)
        ]
        before = [(table, dict(table)) for _, table in tables]
        try:
            for owner, table in tables:
                for key, t in table.items():
                    name = f"{owner}.{key}".removeprefix(".")
                    if t is not None and t.is_meta and name in self.names:
                        tensor = self.read(name).to(home)
                        table[key] = nn.Parameter(tensor, requires_grad=False) if isinstance(t, nn.Parameter) else tensor
                    elif t is not None and not isinstance(t, nn.Parameter):
                        table[key] = t.to(home)
            if self.change is not None:
                with torch.no_grad():
                    self.change(module)
            yield
        finally:
            for table, empty in before:
                table.update(empty)


def _tensors(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(prefix)
    yield from module.named_buffers(prefix)


def check_folder(folder: Path) -> dict[str, Any]:
    """The configuration of a folder, and the names of its "weight files"; CheckpointError unless these are dense safetensors files."""
    config = read_config(folder)
    about: Any = config.get("quantization_config")
    if about is not None:
        method = about.get("quant_method") if isinstance(about, dict) else about
        if method == "nmkernels":
            raise CheckpointError(f"{folder} is compressed by nmkernels already; pass the folder of the dense model.")
        raise CheckpointError(f"{folder} is quantised ({shortened(method)}); pass the folder of the unquantised model.")
    return {**config, "weight files": check_weights(folder)}


def class_of(folder: Path, config: dict[str, Any], trust_remote_code: bool = False) -> tuple[Any, Any]:
    """(the model's class, its configuration); CheckpointError if neither transformers knows it nor code in the folder that is trusted."""
    names = config.get("architectures") or []
    if not isinstance(names, list):
        raise CheckpointError(f"{folder / CONFIG} is damaged: its architectures are {quote(names)}, not a list of names.")
    named = next(iter(names), None)
    kind = getattr(transformers, named, None) if isinstance(named, str) else None
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        kind = None
    _, reference = own_class(config.get("auto_map"), named)
    if kind is None and not (reference and trust_remote_code):
        what = f"the architecture {named!r}" if named else "no architecture"
        if reference:
            raise CheckpointError(
                f"{folder / CONFIG} names {what}, whose code lies in the folder ({reference.partition('.')[0]}.py) and is not run; read "
                "it, and pass --trust-remote-code (in Python trust_remote_code=True) if you trust it."
            )
        raise CheckpointError(f"{folder / CONFIG} names {what}; transformers {transformers.__version__} has to know it.")
    try:
        if reference and trust_remote_code:
            kind = get_class_from_dynamic_module(reference, folder, local_files_only=True)
        return kind, transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, **({"trust_remote_code": True} if trust_remote_code else {})
        )
    except Exception as error:  # many types
        raise CheckpointError(f"transformers cannot read {folder / CONFIG}: {first_line(error)}.") from error


def on_meta(folder: Path, kind: Any, settings: Any) -> Any:
    """The model of a folder without data; CheckpointError if its configuration describes none."""
    try:
        with torch.device("meta"):
            return kind(settings)
    except Exception as error:  # many types
        raise CheckpointError(f"transformers cannot build a {kind.__name__} as {folder / CONFIG} says: {first_line(error)}.") from error


def open_folder(
    folder: Path,
    kind: Any,
    settings: Any,
    choice: Callable[[nn.Module], tuple[list[LayerCandidate], Report]],
    *,
    offload: Path,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> tuple[Any, OnDisk]:
    """A model of the class ``kind`` with its blocks on the meta device, and what brings them into memory.

    Blocks are those that ``prune_`` would find. A model without blocks, or with a weight that several blocks share, is loaded whole.
    ``offload``: a folder for weights that transformers converts while loading (stacks of experts).
    """
    skeleton = on_meta(folder, kind, settings)
    lists = block_lists(skeleton, choice(skeleton)[0])
    blocks = [f"{name}.{i}" for name, members in lists.items() for i in range(len(members))]
    inside = tuple(f"{block}." for block in blocks)
    tied = [key for pair in getattr(skeleton, "all_tied_weights_keys", {}).items() for key in pair]
    shared = next((key for key in tied if key.startswith(inside)), None)
    places = dict.fromkeys(blocks, "disk")
    for name, _ in (*skeleton.named_parameters(remove_duplicate=False), *skeleton.named_buffers(remove_duplicate=False)):
        if not name.startswith(inside):
            owner = name.rpartition(".")[0]  # accelerate takes a module, and a tensor of one that has blocks inside
            places[name if any(block.startswith(f"{owner}.") for block in blocks) else owner or name] = "cpu"
    reason = "it has no blocks" if not blocks else f"{shared!r} is shared between modules" if shared else ""
    if not reason and find_spec("accelerate") is None:
        reason = "accelerate is not installed"
    if not reason:  # of tensors that stay on disk transformers compares only the names
        check_complete(folder, skeleton, {name: t for file in check_weights(folder) for name, t in read(folder / file).tensors.items()})
    del skeleton, lists
    wanted: dict[str, Any] = {"dtype": dtype or "auto", "local_files_only": True, "output_loading_info": True}
    model: Any = None
    loader = None
    if not reason:
        model = _loaded(kind, folder, offload, device_map=places, offload_folder=str(offload), **wanted)
        loader = _undispatched(model)
        strange = next((name for name, t in _tensors(model) if t.is_meta and (loader is None or name not in loader)), None)
        reason = f"transformers does not read {strange!r} from disk" if strange else ""
    if reason:
        log.info("%s is loaded whole: %s", folder, reason)
        model, loader = _loaded(kind, folder, offload, **wanted), None
    return model, OnDisk(model, loader, device)


def load_whole(kind: Any, folder: Path, **options: Any) -> Any:
    """The model of a folder, dense or compressed, in memory."""
    return _loaded(kind, folder, folder, local_files_only=True, output_loading_info=True, **options)


def _loaded(kind: Any, folder: Path, offload: Path, **options: Any) -> Any:
    try:
        model, info = kind.from_pretrained(folder, ignore_mismatched_sizes=True, **options)
    except NMError:
        raise
    except Exception as error:  # many types
        if (code := re.search(r"os error (\d+)", str(error))) or isinstance(error, OSError):
            reason = os.strerror(int(code[1])) if code else getattr(error, "strerror", None)
            if reason in FULL:
                raise write_error(offload / "weights", reason) from error
        raise unloadable(folder, error) from error
    check_loaded(folder, model, info)
    return model.eval()


def _undispatched(model: nn.Module) -> Any:
    """Remove accelerate's hooks, and return their mapping from names to tensors on disk."""
    hooks = [getattr(module, "_hf_hook", None) for module in model.modules()]
    maps = (getattr(part, "weights_map", None) for hook in hooks for part in getattr(hook, "hooks", (hook,)))
    loader = next((each.dataset for each in maps if each is not None), None)
    remove_hooks_(model)
    for name in ("to", "cuda", "hf_device_map"):
        model.__dict__.pop(name, None)
    return loader
