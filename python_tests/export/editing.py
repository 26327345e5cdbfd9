"""Reading a safetensors file whole, and writing it again with something changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

Edit = Callable[[dict[str, Tensor], dict[str, str]], object]


def parts(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata."""
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata())  # noqa: SIM118


def edited(path: Path, edit: Edit) -> Path:
    tensors, metadata = parts(path)
    edit(tensors, metadata)
    save_file(tensors, path, metadata)
    return path
