"""Reading a safetensors file with an answer in words to everything that can be wrong with it."""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from reprlib import Repr
from typing import Any

from torch import Tensor

from .._store import regular_size
from ..pattern import CheckpointError
from ._tensors import library

HEADER_LENGTH = 8
LARGEST_HEADER = 100_000_000
LONGEST_WORD = 200
"""Characters of a file's own words that a message repeats."""

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
    """The value of a JSON text that leaves nothing open: no name twice, no NaN and no infinity.

    Raises:
        ValueError: it is not such a text, or it is nested deeper than can be read.
    """
    try:
        return json.loads(text, object_pairs_hook=_once, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        seen: set[str] = set()
        name = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
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
        """The JSON object stored under ``key`` of the metadata; empty where the key is absent.

        Raises:
            CheckpointError: it is not a JSON object.
        """
        try:
            value = parse(self.metadata.get(key, "{}"))
        except ValueError as error:
            raise CheckpointError(f"{self.path}: the metadata entry {key!r} is damaged ({shortened(error)}).") from error
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.path}: the metadata entry {key!r} is not a table.")
        return value


def read(path: str | os.PathLike[str]) -> Contents:
    """Open ``path`` and find out what it holds.

    Raises:
        CheckpointError: no such file, none that can be mapped, not safetensors, or truncated.
    """
    path = Path(path)
    _check_frame(path)
    lib = library()
    try:
        with lib.safe_open(path, framework="pt") as file:
            return Contents(path, {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {}))  # noqa: SIM118
    except Exception as error:  # of the library and of torch below it, each in words of its own
        raise CheckpointError(f"{path} is not a sound safetensors file: {shortened(error)}.") from error


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
