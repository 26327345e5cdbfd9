"""Draw the gains of N:M: ``docs/story.svg`` for the README, from committed rows; ``docs/pays.svg``, measured rows and the audit's
prediction.

python docs/figures/speed.py [--check]
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from svg import Drawing, command  # noqa: E402

import nmkernels as nm  # noqa: E402
from bench import front_page, tables  # noqa: E402
from bench.accuracy import page  # noqa: E402
from bench.accuracy.spec import DENSE  # noqa: E402
from bench.accuracy.stats import ENOUGH, Estimate  # noqa: E402
from bench.accuracy.studies import STUDIES  # noqa: E402
from bench.accuracy.tables import Tables  # noqa: E402
from bench.registry import FASTEST  # noqa: E402
from bench.report import load  # noqa: E402
from bench.rows import RESULTS, device_of  # noqa: E402
from bench.tables import Rows  # noqa: E402

DOCS = ROOT / "docs"
PATTERNS = {"2:4": "blue", "1:4": "orange", "1:8": "green"}
TOKENS = (1, 16, 64, 256, 2048)
GPU_TOKENS = (1, 16, 64, 256, 1024, 4096, 16384)
GPU = "H200"

GPU_STEP = {
    "S-STE": ("ffn", "nmkernels sste, step", *front_page.MANY, "x dense"),
    "FST": ("ffn", "nmkernels fst, step", *front_page.MANY, "x dense"),
}
GPU_TOKEN = {
    "16 bits": ("nm_linear", "nmkernels cuda", *front_page.ONE, "x dense"),
    "4 bits": ("nm_linear_integers", "nmkernels cuda, int4", *front_page.ONE, "x dense"),
}
CPU_STEP = ("ffn", "nmkernels sste, step", *front_page.BLOCK, "x dense")
CPU_TEXT = ("generate", "nmkernels CompressedLinear", "2:4", "float32", "16 tokens, GPT 1024x4", "x dense")

Points = dict[str, list[tuple[int, float]]]


def most_measured(rows: Rows) -> tuple[str, list[dict[str, str]]]:
    """The CPU whose GEMMs have the most rows, among them the speed-up over torch's fastest dense one, and these rows; ties by name."""
    found = [
        (len(mine), machine, list(mine))
        for machine, mine in tables.by_machine([r for r in rows if r["op"] == "nm_linear"]).items()
        if device_of(machine) == "cpu" and any(r["metric"] == FASTEST for r in mine)
    ]
    _, machine, mine = max(found)
    return machine, mine


def measured(rows: Rows) -> Points:
    """Speed-up over torch's fastest dense GEMM, 4096×4096 in float32, by the number of tokens."""
    value = {
        (r["pattern"], r["shape"]): float(r["p50"])
        for r in rows
        if r["provider"] == "nmkernels cpu" and r["dtype"] == "float32" and r["metric"] == FASTEST
    }
    keys = {pattern: [(t, (pattern, f"{t}x4096x4096")) for t in TOKENS] for pattern in PATTERNS}
    return {pattern: [(t, value[key]) for t, key in found if key in value] for pattern, found in keys.items()}


def predicted() -> Points:
    """The audit's prediction for an 8192×8192 layer in bfloat16 on a GPU."""

    def gain(pattern: str, tokens: int) -> float:
        found = nm.audit({"layer": (8192, 8192)}, tokens=tokens, recipe=f"ste:{pattern}", device=GPU, dtype="bfloat16", measure=False)
        return float(found.layers[0].speedup("inference") or 1.0)

    return {pattern: [(t, gain(pattern, t)) for t in GPU_TOKENS] for pattern in PATTERNS}


def curves(d: Drawing, box: tuple[float, float, float, float], points: Points, tokens: Sequence[int], top: float) -> None:
    """Plot speed-ups against tokens on logarithmic axes, with 1 as a dashed line."""
    x0, y0, w, h = box
    low = 0.7

    def at(t: float, s: float) -> tuple[float, float]:
        right = (math.log(t) - math.log(tokens[0])) / (math.log(tokens[-1]) - math.log(tokens[0]))
        return x0 + w * right, y0 + h * (1 - (math.log(s) - math.log(low)) / (math.log(top) - math.log(low)))

    for s in (1, 2, 4, 8):
        if low < s <= top:
            d.path([at(tokens[0], s), at(tokens[-1], s)], "soft" if s == 1 else "line", 1, dash="4 3" if s == 1 else "")
            d.text(x0 - 6, at(tokens[0], s)[1] + 4, f"{s}×", "soft", 11, "end")
    for t in tokens:
        d.text(at(t, low)[0], y0 + h + 15, f"{t:,}" if t < 4096 else f"{t // 1024}k", "soft", 11, "middle")
    d.text(x0 + w / 2, y0 + h + 32, "tokens per call", "soft", 11, "middle")
    ends = sorted((at(*line[-1])[1], pattern) for pattern, line in points.items())
    label = {pattern: y + 15 * (i - 1) if ends[-1][0] - ends[0][0] < 20 else y for i, (y, pattern) in enumerate(ends)}
    for pattern, line in points.items():
        colour = PATTERNS[pattern]
        d.path([at(t, s) for t, s in line], colour, 2)
        for t, s in line:
            x, y = at(t, s)
            d.rect(x - 2.5, y - 2.5, 5, 5, colour, r=2.5)
        d.text(at(*line[-1])[0] + 8, label[pattern] + 4, pattern, colour, 12, bold=True)


def bars(d: Drawing, x: float, y: float, w: float, h: float, values: dict[str, tuple[float, str]], most: float) -> None:
    """Draw two bars with their values above and names below; the second in colour."""
    for i, (name, (value, said)) in enumerate(values.items()):
        left, tall = x + i * w / 2 + 8, h * value / most
        d.rect(left, y + h - tall, w / 2 - 16, tall, "blue" if i else "line", r=2)
        d.text(left + w / 4 - 8, y + h - tall - 6, said, "ink", 12, "middle", bold=True)
        d.text(left + w / 4 - 8, y + h + 15, name, "soft", 11, "middle")


def intervals(d: Drawing, box: tuple[float, float, float, float], found: dict[str, Estimate], step: float = 0.05) -> None:
    """Draw a mean with its 95 % interval for each name, one below the other, 0 as a dashed line."""
    x0, y0, w, h = box
    low, high = min(0.0, *(e.mean - e.half for e in found.values())), max(0.0, *(e.mean + e.half for e in found.values()))

    def at(value: float) -> float:
        return x0 + w * (value - low) / (high - low)

    for i in range(math.ceil(low / step), math.floor(high / step) + 1):
        d.path([(at(i * step), y0), (at(i * step), y0 + h)], "line" if i else "soft", 1, dash="" if i else "4 3")
        d.text(at(i * step), y0 + h + 15, f"{i * step:+.2f}".replace("-", "−") if i else "0", "soft", 11, "middle")
    for i, (name, e) in enumerate(found.items()):
        y = y0 + h * (i + 0.5) / len(found)
        d.text(x0 - 8, y + 4, name, "ink", 12, "end")
        d.path([(at(e.mean - e.half), y), (at(e.mean + e.half), y)], "blue", 2)
        d.rect(at(e.mean) - 3, y - 3, 6, 6, "blue", r=3)


def dots(d: Drawing, box: tuple[float, float, float, float], lines: dict[str, dict[str, float]], top: float = 4.0) -> None:
    """Draw the speed-ups of each line as dots on one logarithmic axis, with 1 as a dashed line; those with a name are labelled."""
    x0, y0, w, h = box
    low = 0.5

    def at(s: float) -> float:
        return x0 + w * math.log(s / low) / math.log(top / low)

    for s in (0.5, 1, 2, 4):
        d.path([(at(s), y0), (at(s), y0 + h)], "soft" if s == 1 else "line", 1, dash="4 3" if s == 1 else "")
        d.text(at(s), y0 + h + 15, f"{s:g}×", "soft", 11, "middle")
    for i, (name, values) in enumerate(lines.items()):
        y = y0 + h * (i + 0.6) / len(lines)
        d.text(x0 - 8, y + 4, name, "ink", 12, "end")
        for label, s in values.items():
            d.rect(at(s) - 3, y - 3, 6, 6, "blue" if s >= 1 else "orange", r=3)
            if not label.startswith("AMD") and not label.startswith("Intel"):
                d.text(at(s), y - 8, label, "soft", 10, "middle")


def story(rows: Rows, accuracy: Tables) -> str:
    """Draw three panels: loss less dense's in the longest runs, bytes, and what a GPU and CPUs gain."""
    study = STUDIES["long-gpt"]
    less = {m: accuracy.less(study.tasks[0], m, "2:4", DENSE, steps=study.steps) for m in study.methods[1:]}
    names = {m: accuracy.name(m).strip("`").replace("(λ tuned)", accuracy.decay(study.tasks[0], m).strip()) for m in less}
    shown = sorted((m for m, e in less.items() if e.n >= ENOUGH), key=lambda m: less[m].mean)
    losses = {names[m].translate({ord("("): "", ord(")"): ""}): less[m] for m in shown}
    half = nm.Pattern("2:4")
    share = half.density * (32 + half.index_bits) / 32
    found = {name: front_page.medians(mine) for name, mine in tables.by_machine(rows).items()}
    gpu = next(name for name, mine in found.items() if device_of(name) == "cuda" and GPU_STEP["S-STE"] in mine)
    cpus = {name: mine for name, mine in found.items() if device_of(name) == "cpu"}
    step, text = (next(line for line in front_page.LINES if line.row == row) for row in (CPU_STEP, CPU_TEXT))
    lines = {
        "GPU, training step": {name: float(found[gpu][row]) for name, row in GPU_STEP.items()},
        "GPU, one token": {name: float(found[gpu][row]) for name, row in GPU_TOKEN.items()},
        "CPUs, training step": {name: min(float(mine[CPU_STEP]), step.allowed) for name, mine in cpus.items() if CPU_STEP in mine},
        "CPUs, generating": {name: min(float(mine[CPU_TEXT]), text.allowed) for name, mine in cpus.items() if CPU_TEXT in mine},
    }
    best = less[shown[0]]
    d = Drawing(
        880,
        318,
        f"After {study.steps:,} steps 2:4 costs {best.mean:.3f} nats at best, with {share:.2f} times the bytes; a training step on a {gpu} "
        f"takes longer than dense, a single token less time",
    )
    d.text(24, 28, f"Train it 2:4 for {study.steps:,} steps ...", bold=True, size=14)
    d.text(24, 46, "loss less dense's, nats", "soft", 11)
    intervals(d, (144, 62, 160, 186), losses)
    d.text(330, 28, "... store it ...", bold=True, size=14)
    d.text(330, 46, "bytes of the layers, fp32", "soft", 11)
    bars(d, 326, 84, 150, 150, {"dense": (1, "1"), "compressed": (share, f"{share:.2f}")}, 1)
    d.text(510, 28, "... and run it", bold=True, size=14)
    d.text(510, 46, "times as fast as dense", "soft", 11)
    dots(d, (636, 62, 220, 172), lines)
    seeds = sorted({e.n for e in losses.values()})
    notes = (
        f"Loss: a byte-level GPT of 137 thousand weights, each method at dense training's rate, 95 % intervals over {seeds[0]} seeds.",
        f"GPU: {gpu}, bfloat16, FFN 4096-14336-4096 and a layer of 14336×4096. CPUs: float32, FFN 1024-4096-1024 and a GPT of width 1024;",
        f"{len(lines['CPUs, training step'])} kinds with 2 threads, at most what bytes and FLOPs allow. Every row: bench/results.",
    )
    d.lines(24, 284, notes, 13, fill="soft", size=10)
    return str(d)


def pays(rows: Rows) -> str:
    """Draw the measured curve of a CPU and the predicted one of a GPU."""
    machine, mine = most_measured(rows)
    d = Drawing(880, 300, "Speed-up of one linear layer by the number of tokens: measured on a CPU, predicted for a GPU")
    d.text(24, 28, "Measured", bold=True, size=14)
    d.text(24, 46, f"4096×4096, float32; {machine}", "soft", 11)
    curves(d, (60, 70, 320, 180), measured(mine), TOKENS, 8.5)
    d.text(464, 28, "Predicted, not measured", bold=True, size=14)
    d.text(464, 46, f"8192×8192, bfloat16; {GPU}, by nm.audit's roofline", "soft", 11)
    curves(d, (500, 70, 320, 180), predicted(), GPU_TOKENS, 8.5)
    return str(d)


def main(argv: list[str] | None = None) -> int:
    rows = load(RESULTS)
    figures = {
        DOCS / "story.svg": lambda: story(rows, page.read(RESULTS / "accuracy")),
        DOCS / "pays.svg": lambda: pays(rows),
    }
    return command("speed.py", figures, argv)


if __name__ == "__main__":
    raise SystemExit(main())
