"""Tables of what compilers make of kernels: a row is a frozen dataclass of text and integers, its fields are the columns."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

Row = TypeVar("Row")


def read(kind: type[Row], path: Path) -> list[Row]:
    """The rows of a table; none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    numbers = {f.name for f in fields(kind) if f.type == "int"}  # type: ignore[arg-type]
    made: list[dict[str, Any]] = [{k: int(v) if k in numbers else v for k, v in row.items()} for row in rows]
    return [kind(**row) for row in made]


def write(kind: type[Row], rows: Iterable[Row], path: Path) -> None:
    """Write a table, whole, in the order of the rows."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, [f.name for f in fields(kind)], lineterminator="\n")  # type: ignore[arg-type]
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)  # type: ignore[call-overload]
    path.write_text(text.getvalue())
