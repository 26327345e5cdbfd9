"""Draw figures of the evidence from committed rows: ``docs/methods/step-rates.svg``.

python docs/figures/evidence.py [--check]
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from svg import Drawing, command  # noqa: E402

from bench.accuracy import page  # noqa: E402
from bench.accuracy.contrasts import FROZEN, PLACES, THAWED  # noqa: E402
from bench.accuracy.stats import Estimate  # noqa: E402
from bench.accuracy.studies import case  # noqa: E402
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
        "The loss with a frozen second moment less that with one that continues, by learning rate: below zero at the lowest rates, above "
        "at the highest",
    )
    for i, (task, pattern) in enumerate(PLACES):
        best = next(iter(shown.best(case(task, FROZEN, pattern)).values())).lr
        d.text(52 + 172 * i, 26, f"{task} {pattern}", bold=True, size=13)
        panel(d, (52 + 172 * i, 44, 112, 140), shown.by_rate(task, pattern, FROZEN, THAWED), best)
    d.text(24, 222, "Nats, by learning rate; tuning seeds, 95 % intervals; filled: the best rate on the evaluation seeds.", "soft", 10)
    return str(d)


def main(argv: list[str] | None = None) -> int:
    return command("evidence.py", {METHODS / "step-rates.svg": lambda: step_rates(page.read())}, argv)


if __name__ == "__main__":
    raise SystemExit(main())
