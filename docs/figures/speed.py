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
from bench import tables  # noqa: E402
from bench.accuracy import page  # noqa: E402
from bench.accuracy.spec import DENSE  # noqa: E402
from bench.accuracy.stats import Estimate  # noqa: E402
from bench.accuracy.studies import SRSTE  # noqa: E402
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

Points = dict[str, list[tuple[int, float]]]


def newest(rows: Rows) -> tuple[str, list[dict[str, str]]]:
    """The CPU with the newest rows against torch's fastest dense GEMM, and these rows; ties by name."""
    found = [
        (max(r["date"] for r in mine), machine, list(mine))
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
    low, high = min(e.mean - e.half for e in found.values()), max(e.mean + e.half for e in found.values())

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


def story(rows: Rows, accuracy: Tables) -> str:
    """Draw three panels: loss of SR-STE less dense's, bytes, speed."""
    losses = {task: accuracy.less(task, SRSTE, "2:4", DENSE) for task in accuracy.tasks("2:4")}
    share = next(float(r["p50"]) for r in rows if r["metric"] == "compressed bytes over dense, sparse layers")
    machine, mine = newest(rows)
    points = measured(mine)
    top, pattern = max((s, pattern) for pattern, line in points.items() for _, s in line)
    least, most = (f"{f(e.mean for e in losses.values()):+.3f}".replace("-", "−") for f in (min, max))
    d = Drawing(
        880,
        304,
        f"SR-STE at 2:4 ends {least} to {most} nats from the dense loss, with {share:.2f} times the bytes, and a compressed linear layer "
        f"at {pattern} is up to {top:.1f} times as fast as the fastest dense one on a CPU",
    )
    d.text(24, 28, "Train it 2:4 ...", bold=True, size=14)
    d.text(24, 46, "loss less dense's, nats, by task", "soft", 11)
    intervals(d, (100, 68, 120, 166), losses)
    d.text(250, 28, "... store it compressed ...", bold=True, size=14)
    d.text(250, 46, "bytes of the sparse layers", "soft", 11)
    bars(d, 250, 84, 190, 150, {"dense": (1, "1"), "compressed": (share, f"{share:.2f}")}, 1)
    d.text(476, 28, "... and run it", bold=True, size=14)
    d.text(476, 46, "times as fast as the fastest dense GEMM", "soft", 11)
    curves(d, (510, 68, 310, 166), points, TOKENS, max(6.0, top * 1.1))
    seeds = sorted({e.n for e in losses.values()})
    notes = (
        f"Loss: SR-STE with λ tuned, small tasks, 95 % intervals over {seeds[0]} to {seeds[-1]} seeds.",
        f"GEMM: 4096×4096, float32; {machine}, {max(r['date'] for r in mine)}.",
    )
    d.lines(24, 280, notes, 14, fill="soft", size=10)
    return str(d)


def pays(rows: Rows) -> str:
    """Draw the measured curve of a CPU and the predicted one of a GPU."""
    machine, mine = newest(rows)
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
