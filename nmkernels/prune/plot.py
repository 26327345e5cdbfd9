"""The errors of pruned layers as a picture."""

from __future__ import annotations

import re
from pathlib import Path

from ..pattern import RecipeError
from ..train.report import Report, starred


def check_plot() -> None:
    """Raise RecipeError where no picture can be made."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise RecipeError(f"the plot of errors needs matplotlib (pip install matplotlib): {error}.") from error


def curves(report: Report) -> dict[str, dict[int, float]]:
    """The errors in percent, as they are written, of layers whose names differ only in numbers: {name: {the first number: error}}.

    Of a layer without a number, and of the experts of a layer, it is the mean.
    """
    errors: dict[str, dict[int, list[float]]] = {}
    for name, row in report.pruned.items():
        error = row.error if row.rounded is None else row.rounded
        if error:  # a logarithm has no zero
            name = name.partition("[")[0]
            number = re.search(r"(?<![^.])\d+(?![^.])", name)
            errors.setdefault(starred(name), {}).setdefault(int(number[0]) if number else 0, []).append(100 * error)
    return {name: {at: sum(some) / len(some) for at, some in sorted(line.items())} for name, line in errors.items()}


def plot_errors(report: Report, path: Path) -> bool:
    """Draw ``curves`` over the number of the block; False where no error was measured."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    lines = curves(report)
    if not lines:
        return False
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for i, (name, line) in enumerate(lines.items()):
        axes.plot(list(line), list(line.values()), "os^vDP*X"[i % 8] + "-", markersize=4, linewidth=1, label=name)
    axes.set(yscale="log", xlabel="block", ylabel="error of the layer's output, %")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(True, which="both", alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="x-small")
    figure.savefig(path, dpi=120)
    return True
