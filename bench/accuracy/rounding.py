"""What integers as values lose, with and without 2:4, in both orders: one row per model, mask, values and order in ``rounding.csv``.

``prune`` first: nm.prune_, then the kept values are rounded to the nearest. ``round`` first: the dense weight is rounded, then Wanda's mask
is chosen on the rounded weight, so that the result has both properties too. ``data``: the pruned model is rounded by nm.compress_ on the
calibration data. ``together``: nm.prune_ does both. Models, data and evaluation are those of ``oneshot``.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import nmkernels as nm
from nmkernels import ops

from ..rows import RESULTS
from ..tables import table
from .oneshot import SEQUENCES
from .oneshot_page import NAMES
from .rows import append_lines, load_lines, stamp
from .tasks import Task
from .tasks.pretrained import model_of

PATH = RESULTS / "rounding.csv"
PATTERN, WHOLE = "2:4", "4:4"
"""The masks, and the pattern that keeps everything, by which a dense weight is rounded like a sparse one."""
VALUES = ("", "int8", "int4")
STARTS = (("", ""), ("wanda", ""), ("admm", ""), ("wanda", "int8"), ("wanda", "int4"))
"""The method of ``nm.prune_``, empty for the dense model, and the integers to which its weight is rounded before that."""
ON_DATA = "admm"
"""The method whose weights are rounded on data too."""
COLUMNS = ("model", "pattern", "method", "first", "values", "loss", "cosine", "bytes", "data", "machine", "versions", "commit", "date")


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


def run(name: str, methods: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """The rows of a model, of all ``methods`` or of some; those that are pruned first share one pruning."""
    it = model_of(name)

    def row(method: str, first: str, values: str, size: int, found: dict[str, float]) -> dict[str, Any]:
        return {
            "model": name,
            "pattern": PATTERN if method else "dense",
            "method": method,
            "first": first,
            "values": values,
            "loss": round(found.get("val_loss", math.nan), 5),
            "cosine": round(found.get("cosine", math.nan), 5),
            "bytes": size,
            "data": it.digest,
            **stamp(),
        }

    for method, start in STARTS:
        if methods is not None and method not in methods:
            continue
        model = it.model().eval()
        probe = nm.sparsify_(it.model(), f"ste:{PATTERN}", it.filter_fn)
        layers = {each: model.get_submodule(each) for each in probe.layers}
        if start:
            rounded_(layers, start, WHOLE)
        if method:
            handle = nm.prune_(model, PATTERN, it.calibration(SEQUENCES[name]), it.filter_fn, method=method)
            handle.finish(allow_unused=True)
            handle.remove()
        saved = {each: layer.weight.detach().clone() for each, layer in layers.items()}  # type: ignore[operator]
        for values in (start,) if start else VALUES:
            with torch.no_grad():
                for each, layer in layers.items():
                    layer.weight.copy_(saved[each])  # type: ignore[operator]
            # a weight that was rounded before is on its grid still, and Wanda keeps values
            size = 0 if start else rounded_(layers, values, PATTERN if method else WHOLE)
            yield row(method, ("round" if start else "prune") if method and values else "", values, size, it.evaluate(model))
        if method != ON_DATA:
            continue
        data = it.calibration(SEQUENCES[name])
        with torch.no_grad():
            for each, layer in layers.items():
                layer.weight.copy_(saved[each])  # type: ignore[operator]
        for values in VALUES[:0:-1]:
            after = copy.deepcopy(model)
            nm.recipes.adopt(after, PATTERN, it.filter_fn).finish(allow_unused=True)
            yield row(method, "data", values, *_compressed(it, nm.compress_(after, values=values, data=data)))
        for values in VALUES[:0:-1]:
            at_once = it.model().eval()
            nm.prune_(at_once, PATTERN, data, it.filter_fn, method=method, values=values).finish(allow_unused=True)
            yield row(method, "together", values, *_compressed(it, nm.compress_(at_once)))


def _compressed(it: Task, model: nn.Module) -> tuple[int, dict[str, float]]:
    """The bytes of a model's compressed layers, and what it reaches with these weights."""
    size = sum(module.weight.nbytes for module in model.modules() if isinstance(module, nm.CompressedLinear))
    return size, it.evaluate(nm.densify_(model))


def measure(models: list[str], path: Path = PATH, methods: Sequence[str] | None = None) -> None:
    """Append the rows of ``models``, each when it is made; of all ``methods`` or of some."""
    for model in models:
        for row in run(model, methods):
            append_lines([row], COLUMNS, path)


def load(path: Path = PATH) -> list[dict[str, str]]:
    """All rows, the last one of each cell."""
    return list({tuple(row[key] for key in COLUMNS[:5]): row for row in load_lines(path)}.values())


EMBEDDINGS = RESULTS / "embeddings.csv"
BOTH = ("embed_tokens", "lm_head")
"""The embedding and the output head."""
BODIES = {("dense", ""): "dense, bf16", (PATTERN, ""): "2:4, bf16", (PATTERN, "int8"): "2:4, int8", (PATTERN, "int4"): "2:4, int4"}
"""(pattern, values) of all other linear layers -> the line of the table; 2:4 is by ADMM."""
EMBEDDING_COLUMNS = ("model", "pattern", "values", "embeddings", "loss", "bytes", "data", "machine", "versions", "commit", "date")


def measure_embeddings(name: str = "smollm2", path: Path = EMBEDDINGS) -> None:
    """Append a row for each kind of integers in embedding and output head, to the nearest; bytes with floating-point numbers in 16 bits."""
    it = model_of(name)
    pruned = it.model().eval()
    nm.prune_(pruned, PATTERN, it.calibration(SEQUENCES[name]), it.filter_fn, method=ON_DATA).finish(allow_unused=True)
    for pattern, values in BODIES:
        for kind in VALUES:
            model = copy.deepcopy(pruned) if pattern == PATTERN else it.model().eval()
            if pattern == PATTERN:
                nm.compress_(model, values=values or None)
            if kind:
                nm.compress_(model, values=kind, dense=BOTH)
            stored = {t.data_ptr(): t for t in (*model.parameters(), *model.buffers())}.values()
            size = sum(t.numel() * (2 if t.is_floating_point() else t.element_size()) for t in stored)
            found = {"loss": round(it.evaluate(model)["val_loss"], 5), "bytes": size, "data": it.digest, **stamp()}
            append_lines([{"model": name, "pattern": pattern, "values": values, "embeddings": kind, **found}], EMBEDDING_COLUMNS, path)


def embeddings_text(path: Path = EMBEDDINGS) -> str:
    """The table of the guide: loss and bytes by the values of the body (rows) and of embedding and head (columns)."""
    rows = {(r["pattern"], r["values"], r["embeddings"]): r for r in load_lines(path)}
    lines = [["layers", "embedding and head: bf16", "int8", "int4"]]
    for body, title in BODIES.items():
        found = [rows.get((*body, kind)) for kind in VALUES]
        lines.append([title, *(f"{float(r['loss']):.3f}, {int(r['bytes']) / 1e6:.1f} MB" if r else "" for r in found)])
    made = [", ".join(sorted({row[key] for row in rows.values()})) for key in ("machine", "versions", "date")]
    return f"{table(lines)}\n\n*{'; '.join(made)}.*"


LINES = {
    ("dense", "", ""): "dense",
    (PATTERN, "wanda", ""): "2:4, Wanda's mask",
    (PATTERN, "wanda", "prune"): "2:4, Wanda's mask",
    (PATTERN, "wanda", "round"): "rounded first, then Wanda's mask",
    (PATTERN, "admm", ""): "2:4, ADMM",
    (PATTERN, "admm", "prune"): "2:4, ADMM",
    (PATTERN, "admm", "data"): "2:4, ADMM, then `compress_` with `data=`",
    (PATTERN, "admm", "together"): "2:4, ADMM with `values=`",
}
"""(pattern, method, what is first) -> the line of the table."""


def text(rows: list[dict[str, str]]) -> str:
    """The table of the guide to integers: a row per model and mask, a column per kind of values."""
    keys = [(r["model"], LINES[r["pattern"], r["method"], r["first"]], r["values"]) for r in rows]
    shown = dict(zip(keys, (r["cosine"] if r["loss"] == "nan" else r["loss"] for r in rows), strict=True))
    lines = [["model", "", "floating point", "int8", "int4"]]
    for model in dict.fromkeys(row["model"] for row in rows):
        for title in dict.fromkeys(LINES.values()):
            cells = [f"{float(shown[key]):.3f}" if (key := (model, title, values)) in shown else "" for values in VALUES]
            if any(cells):
                lines.append([NAMES[model], title, *cells])
    made = [", ".join(sorted({row[key] for row in rows})) for key in ("machine", "versions", "date")]
    return f"{table(lines)}\n\n*{'; '.join(made)}.*"
