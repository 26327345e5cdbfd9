"""Folders of Hugging Face models that become others: what is checked before, and which files are carried over."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Mapping, Set
from contextlib import suppress
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor

from ..pattern import CheckpointError, NMError
from .tensors import INDEX, SINGLE, first_line, quote, shortened, weight_files

CONFIG = "config.json"
REPORT = "report.json"
RESULT = "result"
"""The folder inside a work folder in which the one to be written is assembled, so that it may have any name."""
OWN = {CONFIG, REPORT, "generation_config.json"}
WEIGHTS = (
    "model*.safetensors", "model*.safetensors.index.json", "pytorch_model*", "tf_model*", "flax_model*", "rust_model*", "consolidated*",
    "*.gguf", "*.onnx*", "openvino_model*", "*.tflite", "*.mlmodel", "*.mlpackage", "*.ckpt",
)  # fmt: skip
"""Names of the dense model's own weights, in any format, which are not carried over."""
MODULES = "modules.json"


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration of a model's folder."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such folder; pass one that save_pretrained wrote, with {CONFIG} and {SINGLE}.")
    if not (folder / CONFIG).is_file():
        raise CheckpointError(f"{folder} has no {CONFIG}; pass a folder that save_pretrained wrote.")
    try:
        return dict(json.loads((folder / CONFIG).read_bytes()))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{folder / CONFIG} is damaged ({shortened(error)}).") from error


def check_weights(folder: Path) -> list[str]:
    """The names of a model's safetensors files, which are there."""
    if not (folder / SINGLE).is_file() and not (folder / INDEX).is_file():
        other = next((path.name for path in sorted(folder.glob("*.bin"))), None)
        instead = f"; {other} is an older format: load the model and call save_pretrained" if other else ""
        raise CheckpointError(f"{folder} has no weights in {SINGLE} or {INDEX}{instead}.")
    files = weight_files(folder)
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f"{folder} lacks {missing[0]}, which {INDEX} names; download it again.")
    return files


def check_complete(folder: Path, model: Any, tensors: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError unless ``tensors``, by their names in the files, are all that transformers' ``model`` loads.

    transformers itself loads their shapes, without data: it alone knows which names it converts, ties or does without.
    """
    if find_spec("accelerate") is None:
        raise NMError(f"{folder} cannot be checked without accelerate, with which transformers loads shapes; pip install accelerate.")
    config, forms = copy.deepcopy(model.config), {name: t.to("meta") for name, t in tensors.items()}
    for part in (config, config.get_text_config(decoder=True)):
        part.__dict__.pop("quantization_config", None)  # the weights here are those of the dense model
    try:
        _, info = type(model).from_pretrained(
            None, config=config, state_dict=forms, device_map="meta", ignore_mismatched_sizes=True, output_loading_info=True
        )
    except Exception as error:  # many types
        raise unloadable(folder, error) from error
    check_loaded(folder, model, info)


def unloadable(folder: Path, error: Exception) -> CheckpointError:
    """What is raised in place of an ``error`` of ``from_pretrained``."""
    reason = first_line(error).partition(" For details look at")[0]  # a report, which is not shown
    return CheckpointError(f"transformers cannot load {folder}: {reason.rstrip('.')}.")


def check_loaded(folder: Path, model: Any, info: Mapping[str, Any]) -> None:
    """Raise CheckpointError if ``info``, which ``from_pretrained`` returned, has a tensor that was missing or had another shape."""
    kind = type(model).__name__
    for name in sorted(info["missing_keys"]):
        raise CheckpointError(f"{folder} lacks {quote(name)}, which {kind} has; download or save it again.")
    for name, stored, wanted in sorted(info["mismatched_keys"]):
        shapes = f"{tuple(stored)} in the files, and {tuple(wanted)} in a {kind} with this {CONFIG}"
        raise CheckpointError(f"{folder}: {quote(name)} has shape {shapes}; download or save it again.")


def check_out(source: Path | None, out: Path) -> None:
    """Raise CheckpointError if ``out`` holds something, is a part of ``source``, or is not a folder."""
    place, origin = out.resolve(), source and source.resolve()
    if origin and (place == origin or origin in place.parents):
        raise CheckpointError(f"{out} is inside the model's folder {source}, which is not changed; pass a folder elsewhere.")
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise CheckpointError(f"{out} is not a folder; pass a new one.")
    if os.path.ismount(out):
        raise CheckpointError(f"{out} is a mount point, which cannot be replaced in one step; pass a folder in it.")
    if out.is_dir() and (names := sorted(os.listdir(out))):
        finished = (out / REPORT).is_file() and (out / CONFIG).is_file()
        what = "a finished result" if finished else f"other files ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
        raise CheckpointError(f"{out} holds {what}; pass a new folder, or delete this one.")


def carry_over(source: Path, folder: Path, replaced: Set[str]) -> list[str]:
    """Copy all files of a model but those ``replaced``; returns what else was left, which holds the same weights in other formats.

    A subfolder that ``modules.json`` names is a module of its own (sentence-transformers), and is copied with its weights. Hidden files
    are not part of a model.
    """
    module_folders: set[str] = set()
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        module_folders = {module["path"].partition("/")[0] for module in json.loads((source / MODULES).read_bytes())}
    left = []
    for path in sorted(source.iterdir()):
        name = path.name
        if name.startswith(".") or name in OWN or name in replaced:
            continue
        inside = [path] if path.is_file() else [part for part in path.rglob("*") if part.is_file()]
        if name not in module_folders and any(fnmatchcase(part.name, each) for part in inside for each in WEIGHTS):
            left.append(name)
        elif path.is_file():
            shutil.copyfile(path, folder / name)
        elif inside:
            shutil.copytree(path, folder / name)
    return left


def parts_of(weight: Any) -> dict[str, Tensor]:
    """The tensors of a compressed weight, or of a layer that has one, by the ends of their names."""
    parts = {part: t for part in ("values", "indices", "step") if (t := getattr(weight, part, None)) is not None}
    return parts if parts["indices"].shape[-1] else {part: parts[part] for part in ("values", "step")}  # dense integers have no indices
