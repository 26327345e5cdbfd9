"""Draw figures of the evidence from committed rows: STEP's difference by rate, what 2:4 buys, and the difference from dense by length.

python docs/figures/evidence.py [--check]
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from svg import Drawing, command  # noqa: E402

from bench.accuracy import page, sizes  # noqa: E402
from bench.accuracy.contrasts import FROZEN, PLACES, THAWED  # noqa: E402
from bench.accuracy.spec import DENSE  # noqa: E402
from bench.accuracy.stats import FEWEST, Estimate  # noqa: E402
from bench.accuracy.studies import LENGTHS, STUDIES, case  # noqa: E402
from bench.accuracy.tables import Tables  # noqa: E402

METHODS = ROOT / "docs" / "methods"


def panel(d: Drawing, box: tuple[float, float, float, float], found: dict[float, Estimate], best: float) -> None:
    """Draw a difference with its 95 % interval at each rate; 0 is a dashed line, and the point at the best rate is filled."""
    x0, y0, w, h = box
    low, high = min(0.0, *(e.mean - e.half for e in found.values())), max(0.0, *(e.mean + e.half for e in found.values()))

    def at(lr: float, value: float) -> tuple[float, float]:
        right = math.log(lr / min(found)) / math.log(max(found) / min(found))
        return x0 + w * right, y0 + h * (high - value) / (high - low)

    for value in (low, 0.0, high):
        d.path(
            [(x0 - 8, at(min(found), value)[1]), (x0 + w + 8, at(min(found), value)[1])],
            "line" if value else "soft",
            1,
            dash="" if value else "4 3",
        )
        if value == 0 or abs(value) > 0.15 * (high - low):
            d.text(x0 - 12, at(min(found), value)[1] + 4, f"{value:+.2f}".replace("-", "−") if value else "0", "soft", 10, "end")
    for lr, e in found.items():
        x, y = at(lr, e.mean)
        d.path([at(lr, e.mean - e.half), at(lr, e.mean + e.half)], "blue", 2)
        d.rect(x - 3.5, y - 3.5, 7, 7, "blue" if lr == best else "paper", "blue", r=3.5)
        if lr in (min(found), best, max(found)):  # all would overlap
            d.text(x, y0 + h + 16, f"{lr:g}".removeprefix("0"), "soft", 10, "middle")


def step_rates(shown: Tables) -> str:
    """The loss of STEP with a frozen second moment less that with one that continues, at each rate of the search."""
    d = Drawing(
        880,
        232,
        "The loss with a frozen second moment less that with one that continues, by learning rate: in four of five places "
        "below zero at the lowest rate and above at the highest",
    )
    for i, (task, pattern) in enumerate(PLACES):
        best = next(iter(shown.best(case(task, FROZEN, pattern)).values())).lr
        d.text(52 + 172 * i, 26, f"{task} {pattern}", bold=True, size=13)
        panel(d, (52 + 172 * i, 44, 112, 140), shown.by_rate(task, pattern, FROZEN, THAWED), best)
    d.text(24, 222, "Nats, by learning rate; tuning seeds, 95 % intervals; filled: the best rate on the evaluation seeds.", "soft", 10)
    return str(d)


@dataclass(frozen=True)
class Line:
    """A line of a chart: its name, and (x, mean, half of the 95 % interval) by x."""

    name: str
    colour: str
    points: Sequence[tuple[float, float, float]]
    dash: str = ""


def chart(
    d: Drawing, box: tuple[float, float, float, float], lines: Sequence[Line], ticks: Sequence[tuple[float, str]], zero: bool
) -> None:
    """Draw lines with intervals over a logarithmic x axis with these ticks, their names at the right; ``zero``: a dashed line there."""
    x0, y0, w, h = box
    every = [p for line in lines for p in line.points]
    left, right = min(x for x, _, _ in every), max(x for x, _, _ in every)
    ends = [y + sign * half for _, y, half in every for sign in (-1, 1)] + [0.0] * zero
    low, high = min(ends), max(ends)

    def at(x: float, y: float) -> tuple[float, float]:
        return x0 + w * math.log(x / left) / math.log(right / left), y0 + h * (high - y) / (high - low)

    step = next(s for s in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1) if (high - low) / s <= 7)
    for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1):
        y = at(left, i * step)[1]
        d.path([(x0 - 6, y), (x0 + w + 6, y)], "soft" if zero and i == 0 else "line", 1, dash="4 3" if zero and i == 0 else "")
        d.text(x0 - 10, y + 4, f"{i * step:{'+' if zero and i else ''}.2f}".replace("-", "−"), "soft", 10, "end")
    for x, name in ticks:
        if left <= x <= right:
            d.text(at(x, low)[0], y0 + h + 18, name, "soft", 10, "middle")
    below = -math.inf
    for line in sorted(lines, key=lambda each: -each.points[-1][1]):
        d.path([at(x, y) for x, y, _ in line.points], line.colour, 2, line.dash)
        for x, y, half in line.points:
            d.path([at(x, y - half), at(x, y + half)], line.colour, 1)
            d.rect(at(x, y)[0] - 3, at(x, y)[1] - 3, 6, 6, line.colour, r=3)
        end = at(*line.points[-1][:2])
        if not line.name:
            continue
        below = max(end[1] + 4, below + 13)
        d.text(end[0] + 9, below, line.name, line.colour, 11)


DASHES = {"": "", "int8": "7 4", "int4": "2 3"}


def what_it_buys(shown: Tables) -> str:
    """Loss against bytes, for the sparse methods that end lowest, and against FLOPs of training; "" without rows."""
    d = Drawing(880, 384, "The loss of dense and of 2:4 models of several widths, against bytes of their layers and against training FLOPs")
    every = list(sizes.points(shown))
    widths = {p.width for p in every}
    if len(widths) < 2:
        return ""
    kinds = list(dict.fromkeys((p.method, p.pattern) for p in every))
    colours = dict(zip(kinds, ("blue", "orange", "green", "purple", "red"), strict=False))
    names = {kind: "dense" if kind[0] == DENSE else f"{shown.name(kind[0]).strip('`')} {kind[1]}" for kind in kinds}

    def line(kind: tuple[str, str], values: str, of: Callable[[sizes.Point], float], named: bool) -> Line:
        mine = [p for p in every if (p.method, p.pattern) == kind and p.values == values]
        return Line(names[kind] * named, colours[kind], [(of(p), p.loss.mean, p.loss.half) for p in mine], DASHES[values])

    d.text(24, 26, "Loss by bytes of the layers that can be sparse", bold=True, size=13)
    d.text(480, 26, "Loss by FLOPs of training", bold=True, size=13)
    # of each pattern the method of least loss: the lines of the others would cover it
    lowest = {p.pattern: (p.method, p.pattern) for p in sorted(every, key=lambda p: (p.width, -p.loss.mean)) if not p.values}
    by_bytes = [line(kind, values, sizes.blocks, False) for kind in lowest.values() for values in DASHES]
    chart(d, (66, 48, 350, 250), by_bytes, [(n * 1000, f"{n} kB") for n in (12, 25, 50, 100, 200, 400, 800)], zero=False)
    by_flops = [line(kind, "", sizes.training, True) for kind in kinds]
    chart(d, (522, 48, 214, 250), by_flops, [(n * 1e12, f"{n} T") for n in (2, 4, 8, 16, 32)], zero=False)
    x = 24
    for kind in lowest.values():
        d.text(x, 348, names[kind], colours[kind], 11, bold=True)
        x += 24 + 7 * len(names[kind])
    for values, dash in DASHES.items():
        d.path([(x, 344), (x + 26, 344)], "soft", 2, dash)
        d.text(x + 32, 348, values or "bfloat16", "soft", 11)
        x += 96
    note = f"byte GPTs of widths {min(widths)} to {max(widths)} after 20,000 steps; right: bfloat16; 95 % intervals over seeds."
    d.text(24, 372, f"Nats on held-out source code, {note}", "soft", 10)
    return str(d)


def lengths(shown: Tables) -> str:
    """The loss less dense's by the number of steps, each at its own best rate; "" without rows."""
    d = Drawing(640, 332, "The loss of 2:4 training less that of dense training, by the number of training steps")
    lines = []
    for method, colour in zip(STUDIES[f"length-{LENGTHS[0]}"].methods[1:], ("purple", "orange", "green", "red"), strict=True):
        found = {steps: shown.less(task, method, pattern, DENSE, steps=steps) for task, pattern, _, steps in shown.lengths()}
        known = [(steps, e.mean, e.half) for steps, e in found.items() if e.n >= FEWEST]
        lines += [Line(shown.name(method).strip("`"), colour, known)] if len(known) > 1 else []
    d.text(24, 26, "Loss less dense's, by length of training", bold=True, size=13)
    if not lines:
        return ""
    chart(d, (66, 48, 430, 230), lines, [(n, f"{n:,} steps") for n in LENGTHS], zero=True)
    note = "Nats on held-out source code, byte GPT of width 64, each at its own rate (20,000 steps: of two); 95 % intervals."
    d.text(24, 320, note, "soft", 10)
    return str(d)


FIGURES = {"step-rates": step_rates, "sizes": what_it_buys, "lengths": lengths}


def main(argv: list[str] | None = None) -> int:
    shown = page.read()
    drawn = {METHODS / f"{name}.svg": text for name, draw in FIGURES.items() if (text := draw(shown))}
    return command("evidence.py", {path: partial(str, text) for path, text in drawn.items()}, argv)


if __name__ == "__main__":
    raise SystemExit(main())
