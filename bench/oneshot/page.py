"""The tables of ``docs/guides/oneshot.md``, from the rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from .. import tables
from ..rows import load as load_csv
from ..tables import table
from . import cells, layers
from .cells import DENSE, HELD, METHODS, PATTERNS, SEQUENCES, CellRow

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "oneshot.md"
END = "<!-- oneshot: end -->"
NAMES = {
    "smollm2": "SmolLM2-135M, loss",
    "minilm": "MiniLM-L6, cosine",
    "gpt": "byte GPT, loss",
    "sentiment": "MiniLM-L6 as a classifier, loss",
}
TITLES = {"magnitude": "magnitude", "wanda": "Wanda", "sparsegpt": "SparseGPT", "admm": "ADMM", DENSE: "dense"}
RECIPES = {"srste": "SR-STE", "mdgf": "MdGf"}
SIZE = "4096x4096"
COSTS = {
    f"hessian of {layers.TOKENS} tokens": f"H of {layers.TOKENS:,} tokens",
    "magnitude": "magnitude",
    "wanda": "Wanda",
    "sparsegpt": "SparseGPT",
    layers.ALONE: "SparseGPT, its solver alone",
    layers.LOOP: "SparseGPT as a loop over columns",
    "admm": "ADMM",
}
FORMS = {layers.SECONDS: ".1f", layers.MEMORY: ".1f", layers.ERROR: ".3f"}
Rows = Sequence[CellRow]


def begin(name: str) -> str:
    """The line before a table."""
    return f"<!-- oneshot {name}: written by python -m bench.oneshot table -->"


def pruned(rows: Rows) -> str:
    """Every model and pattern, by method, without a recipe."""
    lines = [["model, pattern", "dense", *(TITLES[method] for method in METHODS)]]
    for model in SEQUENCES:
        dense = [r for r in rows if r.model == model and r.method == DENSE and not r.recipe]
        for p in PATTERNS:
            found = [[r for r in rows if r.key == cells.Cell(model, p, method, "", SEQUENCES[model]).key] for method in METHODS]
            if any(found):
                lines.append([f"{NAMES[model]}, {p}", _value(dense), *_best([_value(f) for f in found], model)])
    return table(lines)


def _value(rows: Rows) -> str:
    """The loss, or else the cosine."""
    return f"{rows[0].loss:.3f}" if rows and rows[0].loss == rows[0].loss else f"{rows[0].cosine:.3f}" if rows else ""


def _best(values: list[str], model: str) -> list[str]:
    """The values, the best in bold."""
    known = [v for v in values if v]
    best = (max if "cosine" in NAMES[model] else min)(known, key=float, default="")
    return [f"**{v}**" if v == best else v for v in values]


def tuned(rows: Rows) -> str:
    """Every start and recipe after the steps of a recipe: means over seeds."""
    found = [r for r in rows if r.recipe]
    columns = [(model, p) for model in ("sentiment", "gpt") for p in PATTERNS if any(r.model == model and r.pattern == p for r in found)]
    lines = [["weights → recipe", *(f"{NAMES[m]}, {p}" for m, p in columns)]]
    starts = [(method, HELD) for method in METHODS] + [(DENSE, recipe) for recipe in RECIPES]
    starts += sorted({(r.method, r.recipe) for r in found} - {*starts, (DENSE, DENSE)})
    groups = [[[r for r in found if (r.model, r.pattern, r.method, r.recipe) == (m, p, *start)] for m, p in columns] for start in starts]
    groups.append([[r for r in found if (r.model, r.method, r.recipe) == (m, DENSE, DENSE)] for m, _ in columns])
    lowest = [min((_mean(line[i]) for line in groups[:-1] if line[i]), default=0.0) for i in range(len(columns))]
    for (method, recipe), line in zip([*starts, (DENSE, DENSE)], groups, strict=True):
        title = (
            f"{TITLES[method]} → {'masks held' if recipe == HELD else RECIPES.get(recipe, recipe)}"
            if recipe != DENSE
            else "dense, not pruned"
        )
        shown = [_tuned(some, _mean(some) == least) if some else "" for some, least in zip(line, lowest, strict=True)]
        if any(shown):
            lines.append([title, *shown])
    return table(lines)


def _mean(rows: Rows) -> float:
    return sum(r.loss for r in rows) / len(rows)


def _tuned(rows: Rows, best: bool) -> str:
    """The mean loss with its range over seeds, and the mean accuracy if there is one."""
    losses = [r.loss for r in rows]
    mean = f"**{_mean(rows):.3f}**" if best else f"{_mean(rows):.3f}"
    spread = f" ({min(losses):.3f} to {max(losses):.3f})" if len(rows) > 1 else ""
    accuracy = sum(r.accuracy for r in rows) / len(rows)
    return f"{mean}{spread}" + (f", {accuracy:.1f} %" if accuracy == accuracy else "")


def tokens(rows: Rows) -> str:
    """The same model and pattern with more and less calibration data."""
    found = [r for r in rows if r.pattern == "2:4" and not r.recipe and r.method in METHODS[1:] and r.model in ("smollm2", "minilm")]
    lines = [["model, 2:4", "tokens", *(TITLES[method] for method in METHODS[1:])]]
    for model in ("smollm2", "minilm"):
        for count in sorted({r.tokens for r in found if r.model == model}):
            values = [_value([r for r in found if (r.model, r.tokens, r.method) == (model, count, m)]) for m in METHODS[1:]]
            if all(values):  # some alone would have nothing to be compared with
                lines.append([NAMES[model], f"{count:,}", *_best(values, model)])
    return table(lines)


def whole(rows: Rows) -> str:
    """CPU seconds of ``prune_`` at 2:4."""
    lines = [["CPU seconds at 2:4", *(TITLES[method] for method in METHODS)]]
    for model in ("smollm2", "minilm"):
        found = [[r for r in rows if r.key == cells.Cell(model, "2:4", method, "", SEQUENCES[model]).key] for method in METHODS]
        if all(found):
            seconds = [f"{f[0].pruning:.0f}" for f in found]
            lines.append([f"{NAMES[model].partition(',')[0]}, {found[0][0].tokens:,} tokens", *seconds])
    return table(lines)


def costs(rows: list[dict[str, str]]) -> str:
    """One layer: seconds, memory and error, a table for each machine."""
    parts = []
    for machine in dict.fromkeys(r["machine"] for r in rows):
        mine = [r for r in rows if r["machine"] == machine]
        chosen = [r for r in mine if r["shape"] == SIZE or r["metric"] == layers.RATE]
        # a peak of memory is what a run may need: the higher percentile
        value = {(r["provider"], r["metric"]): float(r["p80" if r["metric"] == layers.MEMORY else "p50"]) for r in chosen}
        lines = [["", "CPU seconds", "peak memory beyond W and H, in W", "error"]]
        for name, title in COSTS.items():
            shown = [f"{value[name, metric]:{form}}" if (name, metric) in value else "" for metric, form in FORMS.items()]
            lines += [[title, *shown]] if any(shown) else []
        rates = [v for (_, metric), v in value.items() if metric == layers.RATE]
        made = [", ".join(sorted({r[key] for r in mine})) for key in ("versions", "date", "commit")]
        fast = f"; torch multiplies float32 matrices at {rates[0]:.0f} GFLOP/s" if rates else ""
        parts.append(table(lines) + f"\n\n*{machine}{fast}; {made[0]}; {made[1]}; commit {made[2]}.*")
    return "\n\n".join(parts)


def source(rows: Rows) -> str:
    """Where the rows were measured."""
    parts = [", ".join(sorted({getattr(r, key) for r in rows})) for key in ("machine", "versions", "date", "commit")]
    return f"*{parts[0]}; {parts[1]}; {parts[2]}; commit {parts[3]}.*"


TABLES: dict[str, Callable[[Rows, list[dict[str, str]]], str]] = {
    "pruned": lambda rows, _: pruned(rows),
    "tuned": lambda rows, _: tuned(rows),
    "tokens": lambda rows, _: tokens(rows),
    "whole": lambda rows, _: whole(rows),
    "costs": lambda _, times: costs(times),
    "source": lambda rows, _: source(rows),
}


def write(page: Path = PAGE, path: Path = cells.PATH, timed: Path = layers.PATH, check: bool = False) -> int:
    """Write the tables of the guide to one-shot pruning; see ``bench.tables.update``."""
    rows, times = cells.load(path), load_csv(timed)
    return update(page, {name: made(rows, times) for name, made in TABLES.items()}, check)


def update(page: Path, named: Mapping[str, str], check: bool = False) -> int:
    """Write each table between its markers; see ``bench.tables.update``."""
    return tables.update(page, {(begin(name), END): text for name, text in named.items()}, check, "bench.oneshot table")
