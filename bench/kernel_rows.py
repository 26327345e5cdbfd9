"""Tables of compiled kernels: a row is a frozen dataclass of text and integers whose fields are the columns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from . import rows as tidy

Row = TypeVar("Row")


def read(kind: type[Row], path: Path) -> list[Row]:
    """The rows of a table; empty if there is no file."""
    numbers = {f.name for f in fields(kind) if f.type == "int"}  # type: ignore[arg-type]
    made: list[dict[str, Any]] = [{k: int(v) if k in numbers else v for k, v in row.items()} for row in tidy.load(path)]
    return [kind(**row) for row in made]


def write(kind: type[Row], rows: Iterable[Row], path: Path) -> None:
    """Write a table, whole, in the order of the rows."""
    tidy.save([asdict(row) for row in rows], [f.name for f in fields(kind)], path)  # type: ignore[arg-type, call-overload]
