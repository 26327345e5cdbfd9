"""What integers as values lose, with and without 2:4, in both orders: one row per model, mask, values and order in ``rounding.csv``.

``prune`` first: nm.prune_, then the kept values are rounded. ``round`` first: the dense weight is rounded, then Wanda's mask is chosen on
the rounded weight, so that the result has both properties too. Models, data and evaluation are those of the other cells.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import nmkernels as nm
from nmkernels import ops

from ..accuracy.rows import append_lines, load_lines, stamp
from ..rows import RESULTS
from ..tables import table
from .cells import SEQUENCES
from .models import Model, model_of
from .page import NAMES, update

PATH = RESULTS / "rounding.csv"
PATTERN, WHOLE = "2:4", "4:4"
"""The masks, and the pattern that keeps everything, by which a dense weight is rounded like a sparse one."""
VALUES = ("", "int8", "int4")
COLUMNS = ("model", "pattern", "method", "first", "values", "loss", "cosine", "bytes", "data", "machine", "versions", "commit", "date")


@dataclass(frozen=True)
class Rounding:
    """One cell: ``method`` of ``nm.prune_``, empty for the dense model; ``first``: what is done first, ``prune`` or ``round``; ``values``:
    ``int8``, ``int4``, or empty for floating-point ones."""

    model: str
    method: str
    first: str
    values: str


def plan(models: tuple[str, ...] = ("smollm2", "minilm")) -> list[Rounding]:
    """All cells."""
    cells = []
    for model in models:
        cells += [Rounding(model, method, "prune", values) for method in ("", "wanda", "admm") for values in VALUES]
        cells += [Rounding(model, "wanda", "round", values) for values in VALUES[1:]]
    return cells


def rounded_(layers: dict[str, nn.Module], values: str, pattern: str) -> int:
    """Round the weights of ``layers`` in place; returns the bytes of the compressed forms."""
    total = 0
    for layer in layers.values():
        weight: Any = layer.weight
        packed = ops.compress(weight.detach(), pattern)
        if values:
            packed = ops.quantize_values(packed, values)
            with torch.no_grad():
                weight.copy_(packed.dense(weight.dtype))
        indices = 0 if pattern == WHOLE else packed.indices.nbytes
        total += packed.values.nbytes + indices + (0 if packed.step is None else packed.step.nbytes)
    return total


def run(cells: list[Rounding]) -> list[dict[str, Any]]:
    """The rows of cells of one model; those with the same mask share one pruning."""
    it: Model = model_of(cells[0].model)
    rows = []
    for method, first in dict.fromkeys((cell.method, cell.first) for cell in cells):
        mine = [cell for cell in cells if (cell.method, cell.first) == (method, first)]
        starts = {cell.values for cell in mine} if first == "round" else {""}
        for start in sorted(starts):
            model = it.model()
            probe = nm.sparsify_(it.model(), f"ste:{PATTERN}", it.filter_fn)
            layers = {name: model.get_submodule(name) for name in probe.layers}
            if start:
                rounded_(layers, start, WHOLE)
            if method:
                handle = nm.prune_(model, PATTERN, it.calibration(SEQUENCES[cells[0].model]), it.filter_fn, method=method)
                handle.finish(allow_unused=True)
                handle.remove()
            saved = {name: layer.weight.detach().clone() for name, layer in layers.items()}  # type: ignore[operator]
            for cell in mine if first == "prune" else [c for c in mine if c.values == start]:
                with torch.no_grad():
                    for name, layer in layers.items():
                        layer.weight.copy_(saved[name])  # type: ignore[operator]
                # a weight that was rounded before is on its grid still, and Wanda keeps values
                size = rounded_(layers, cell.values if first == "prune" else "", PATTERN if method else WHOLE)
                found = it.evaluate(model)
                made = stamp()
                rows.append(
                    {
                        "model": cell.model,
                        "pattern": PATTERN if method else "dense",
                        "method": method,
                        "first": first if method and cell.values else "",
                        "values": cell.values,
                        **{key: round(found.get(key, math.nan), 5) for key in ("loss", "cosine")},
                        "bytes": size if first == "prune" else 0,
                        "data": it.digest,
                        **{key: made[key] for key in ("machine", "versions", "commit", "date")},
                    }
                )
    return rows


def measure(models: tuple[str, ...], path: Path = PATH) -> None:
    """Append the rows of ``models``."""
    for model in models:
        append_lines(run(plan((model,))), COLUMNS, path)


def load(path: Path = PATH) -> list[dict[str, str]]:
    """All rows, the last one of each cell."""
    return list({tuple(row[key] for key in COLUMNS[:5]): row for row in load_lines(path)}.values())


PAGE = Path(__file__).parents[2] / "docs" / "guides" / "quantized.md"
LINES = {
    ("dense", "", ""): "dense",
    (PATTERN, "wanda", ""): "2:4, Wanda's mask",
    (PATTERN, "wanda", "prune"): "2:4, Wanda's mask",
    (PATTERN, "wanda", "round"): "rounded first, then Wanda's mask",
    (PATTERN, "admm", ""): "2:4, ADMM",
    (PATTERN, "admm", "prune"): "2:4, ADMM",
}
"""(pattern, method, what is first) -> the line of the table."""


def text(rows: list[dict[str, str]]) -> str:
    """A row per model and mask, a column per kind of values."""
    lines = [["model", "", "floating point", "int8", "int4"]]
    for model in dict.fromkeys(row["model"] for row in rows):
        for title in dict.fromkeys(LINES.values()):
            shown = []
            for values in VALUES:
                found = [
                    row
                    for row in rows
                    if row["model"] == model and row["values"] == values and LINES[row["pattern"], row["method"], row["first"]] == title
                ]
                value = next((row["loss"] if row["loss"] != "nan" else row["cosine"] for row in found), "")
                shown.append(f"{float(value):.3f}" if value else "")
            if any(shown):
                lines.append([NAMES[model], title, *shown])
    made = [", ".join(sorted({row[key] for row in rows})) for key in ("machine", "versions", "date")]
    return f"{table(lines)}\n\n*{'; '.join(made)}.*"


def write(check: bool = False) -> int:
    """Write the table of the guide to integers; see ``page.update``."""
    return update(PAGE, {"rounding": text(load())}, check)
