"""The tables of the guides to one-shot pruning and to integers, from the rows: ``python -m bench.accuracy report``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .. import tables
from ..rows import load as load_csv
from ..tables import table
from . import layers, oneshot
from .oneshot import HELD, METHODS, PATTERNS, SEQUENCES, CellRow
from .spec import DENSE

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
END = "<!-- oneshot: end -->"
NAMES = {
    "smollm2": "SmolLM2-135M, loss",
    "smollm2-reviews": "the same, calibrated on reviews, loss",
    "minilm": "MiniLM-L6, cosine",
    "gpt": "byte GPT, loss",
    "sentiment": "MiniLM-L6 as a classifier, loss",
}
VARIED = ("smollm2", "smollm2-reviews", "minilm")
"""Models with more and less calibration data."""

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
    return f"<!-- oneshot {name}: written by python -m bench.accuracy report -->"


def pruned(rows: Rows) -> str:
    """Every model and pattern, by method, without a recipe."""
    lines = [["model, pattern", "dense", *(TITLES[method] for method in METHODS)]]
    for model in SEQUENCES:
        dense = [r for r in rows if r.model == model and r.method == DENSE and not r.recipe]
        for p in PATTERNS:
            found = [[r for r in rows if r.key == oneshot.Cell(model, p, method, "", SEQUENCES[model]).key] for method in METHODS]
            if any(found):
                lines.append([f"{NAMES[model]}, {p}", _value(dense), *_best([_value(f) for f in found], model)])
    return table(lines)


def _value(rows: Rows) -> str:
    """The loss, or else the cosine."""
    return f"{rows[0].loss:.3f}" if rows and rows[0].loss == rows[0].loss else f"{rows[0].cosine:.3f}" if rows else ""


def _best(values: list[str], model: str) -> list[str]:
    """The values, the best of several in bold."""
    known = [v for v in values if v]
    best = (max if "cosine" in NAMES[model] else min)(known, key=float, default="")
    return [f"**{v}**" if v == best and len(known) > 1 else v for v in values]


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
    found = [r for r in rows if r.pattern == "2:4" and not r.recipe and r.method in METHODS[1:] and r.model in VARIED]
    lines = [["model, 2:4", "tokens", *(TITLES[method] for method in METHODS[1:])]]
    for model in VARIED:
        for count in sorted({r.tokens for r in found if r.model == model}):
            values = [_value([r for r in found if (r.model, r.tokens, r.method) == (model, count, m)]) for m in METHODS[1:]]
            if any(values):
                lines.append([NAMES[model], f"{count:,}", *_best(values, model)])
    return table(lines)


def whole(rows: Rows) -> str:
    """CPU seconds of ``prune_`` at 2:4."""
    lines = [["CPU seconds at 2:4", *(TITLES[method] for method in METHODS)]]
    for model in ("smollm2", "minilm"):
        found = [[r for r in rows if r.key == oneshot.Cell(model, "2:4", method, "", SEQUENCES[model]).key] for method in METHODS]
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


def texts(rows: Rows, times: list[dict[str, str]]) -> dict[str, str]:
    """The tables of the guide to one-shot pruning by name, from the rows of cells and of layers."""
    made = {"pruned": pruned(rows), "tuned": tuned(rows), "tokens": tokens(rows), "whole": whole(rows)}
    return {**made, "costs": costs(times), "source": source(rows)}


def write(check: bool, folder: Path = GUIDES, path: Path = oneshot.PATH, timed: Path = layers.PATH) -> int:
    """Write the tables of both guides between their markers; see ``bench.tables.update``."""
    from . import rounding  # which takes names from here

    named = {
        **texts(oneshot.load(path), load_csv(timed)),
        "rounding": rounding.text(rounding.load()),
        "embeddings": rounding.embeddings_text(),
    }
    marked = {(begin(name), END): text for name, text in named.items()}
    return max(tables.update(folder / name, marked, check, "bench.accuracy report") for name in ("oneshot.md", "quantized.md"))
