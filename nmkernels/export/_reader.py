"""Reading a safetensors file with an answer in words to everything that can be wrong with it."""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ..pattern import CheckpointError
from ._tensors import library

HEADER_LENGTH = 8
LARGEST_HEADER = 100_000_000


@dataclass
class Contents:
    """What a safetensors file holds."""

    path: Path
    tensors: dict[str, Tensor]
    metadata: dict[str, str]

    def json(self, key: str) -> dict[str, object]:
        """The JSON object stored under ``key`` of the metadata; empty where the key is absent.

        Raises:
            CheckpointError: it is not a JSON object.
        """
        try:
            value = json.loads(self.metadata.get(key, "{}"))
        except json.JSONDecodeError as error:
            raise CheckpointError(f"{self.path}: the metadata entry {key!r} is damaged ({error}).") from error
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.path}: the metadata entry {key!r} is not a table.")
        return value


def read(path: str | os.PathLike[str]) -> Contents:
    """Read all of ``path``.

    Raises:
        CheckpointError: no such file, not safetensors, or truncated.
    """
    path = Path(path)
    _check_frame(path)
    lib = library()
    try:
        with lib.safe_open(path, framework="pt") as file:
            # own memory, aligned and writable, instead of a window into the mapped file
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            return Contents(path, tensors, dict(file.metadata() or {}))
    except (lib.SafetensorError, OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{path} is not a sound safetensors file: {error}.") from error


def _check_frame(path: Path) -> None:
    """The format's frame: 8 bytes of header length, a JSON header, and data up to the last offset it names."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(HEADER_LENGTH)
            length = struct.unpack("<Q", start)[0] if len(start) == HEADER_LENGTH else 0
            header = file.read(min(length, LARGEST_HEADER, size))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
    if length > LARGEST_HEADER or (header and not header.startswith(b"{")):
        raise CheckpointError(f"{path} is not a safetensors file.")
    truncated = f"{path} is truncated: it has {size:,} bytes; copy or save it again."
    if len(header) < length or not header:
        raise CheckpointError(truncated)
    try:
        entries = json.loads(header)
        end = max((e["data_offsets"][1] for n, e in entries.items() if n != "__metadata__"), default=0)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a safetensors file: its header cannot be read.") from error
    if size < HEADER_LENGTH + length + end:
        raise CheckpointError(f"{truncated[:-1]} (it should have {HEADER_LENGTH + length + end:,}).")
