"""Draws two figures from the rows of one machine: the roofline of the sparse GEMM, and its speed-up against sparsity."""

from __future__ import annotations

from operator import itemgetter
from pathlib import Path
from typing import Any

from nmkernels import Pattern

from .registry import FASTEST, SHORT
from .rows import device_of
from .tables import Rows

DTYPES = {"cpu": "float32", "cuda": "bfloat16"}
"""The dtype that is drawn for each kind of device."""

AGAINST = {"cpu": FASTEST, "cuda": "x dense"}
"""The metric of the speed-up."""

MARKERS = "os^Dvph"
LIMITS = (("copy", "GB/s"), ("matmul", "GFLOP/s"))
"""Op and metric of the two parts of the roofline."""

TITLES = {"roofline": "Roofline of the sparse GEMM", "speedup": "Speed-up of the sparse GEMM against sparsity"}


def draw(rows: Rows, folder: Path, slug: str) -> list[Path]:
    """Write the figures for which there are rows, as SVG; nothing without matplotlib. The same points give the same bytes."""
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = []
    for name, paint in {"roofline": roofline, "speedup": speedup}.items():
        with matplotlib.rc_context({"svg.hashsalt": "nmkernels", "svg.fonttype": "path", "font.size": 9}):
            figure, axes = plt.subplots(figsize=(6, 4))
            if paint(rows, axes):
                axes.set_title(TITLES[name])
                axes.grid(True, which="both", linewidth=0.3)
                axes.legend(fontsize=7)
                found.append(folder / f"{slug}-{name}.svg")
                folder.mkdir(parents=True, exist_ok=True)
                figure.savefig(found[-1], metadata={"Date": None}, bbox_inches="tight")
            plt.close(figure)
    return found


def roofline(rows: Rows, axes: Any) -> bool:
    """Draw FLOP/s of every GEMM against FLOP per byte, with the measured copy bandwidth and matmul rate; False without points."""
    dtype, key = _dtype(rows), itemgetter("op", "provider", "pattern", "dtype", "shape")
    bandwidths = {key(r): float(r["p50"]) for r in rows if r["metric"] == "GB/s"}
    ours = [r for r in rows if r["op"] == "nm_linear" and r["dtype"] == dtype and _mine(r) and r["metric"] == "GFLOP/s"]
    points: dict[str, list[tuple[float, float]]] = {}
    for r in ours:
        if bandwidth := bandwidths.get(key(r)):
            points.setdefault(r["pattern"], []).append((float(r["p50"]) / bandwidth, float(r["p50"])))
    if not points:
        return False
    for marker, (pattern, found) in zip(MARKERS, sorted(points.items(), key=lambda item: -Pattern(item[0]).density), strict=False):
        axes.plot(*zip(*found, strict=True), marker, markersize=4, label=f"linear {pattern}, {SHORT[dtype]}")
    limits = {r["op"]: float(r["p50"]) for r in rows if r["dtype"] == dtype and (r["op"], r["metric"]) in LIMITS}
    if len(limits) == len(LIMITS):
        reach = [x for found in points.values() for x, _ in found]
        ridge = limits["matmul"] / limits["copy"]
        ends = [min(*reach, ridge) / 2, ridge, max(*reach, ridge) * 2]
        axes.plot(ends, [min(limits["copy"] * x, limits["matmul"]) for x in ends], "k-", label="copy bandwidth, dense matmul rate")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOPs done per byte moved, FLOP/B")
    axes.set_ylabel("GFLOP/s that are not skipped")
    return True


def speedup(rows: Rows, axes: Any) -> bool:
    """Draw the speed-up over dense against M/N, one line per shape and token count; False without points."""
    lines: dict[str, list[tuple[float, float]]] = {}
    patterns: dict[float, str] = {}
    dtype = _dtype(rows)
    metric = AGAINST[device_of(rows[0]["machine"])] if rows else ""
    for r in rows:
        if r["op"] == "nm_linear" and r["dtype"] == dtype and _mine(r) and r["metric"] == metric:
            lines.setdefault(r["shape"], []).append((1 / Pattern(r["pattern"]).density, float(r["p50"])))
            patterns.setdefault(1 / Pattern(r["pattern"]).density, r["pattern"])
    lines = {shape: sorted(found) for shape, found in lines.items() if len(found) > 1}
    if not lines:
        return False
    by_size = sorted(lines.items(), key=lambda item: [int(size) for size in item[0].split("x")])
    for marker, (shape, found) in zip(MARKERS * 9, by_size, strict=False):
        axes.plot(*zip(*found, strict=True), f"{marker}-", markersize=4, linewidth=0.8, label=shape)
    ticks = sorted({x for found in lines.values() for x, _ in found})
    axes.plot(ticks, ticks, "k--", linewidth=0.8, label="as many times as FLOPs are saved")
    axes.axhline(1, color="k", linewidth=0.8)
    for scale in (axes.set_xscale, axes.set_yscale):
        scale("log", base=2)
    axes.set_xticks(ticks, [f"{patterns[x]}\n{1 - 1 / x:.0%} absent" for x in ticks])
    axes.yaxis.set_major_formatter("{x:g}×")
    axes.set_ylabel("times as fast as dense (tokens x out x in)")
    return True


def _dtype(rows: Rows) -> str:
    return DTYPES[device_of(rows[0]["machine"])] if rows else ""


def _mine(row: dict[str, str]) -> bool:
    # providers of other instruction sets have a third word
    return row["provider"].startswith("nmkernels") and len(row["provider"].split()) == 2
