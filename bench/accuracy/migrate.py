"""``python -m bench.accuracy.migrate [FOLDER]``: rows from before β₂ was a column, to the present schema; once per folder.

Those runs were AdamW's with β₂ = 0.99. Their ``mdgf`` was Kao et al.'s variant. The task ``opcodes`` is gone.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from nmkernels.recipes import STEP, Recipe

from .. import rows as machine_rows
from . import methods, rows, traces, variance
from .rows import RESULTS, RunRow
from .spec import RunSpec

BETA2 = 0.99
RENAMED = {"mdgf": "mdgf-kao"}
GONE = "opcodes"


def switch_reason(recipe: Recipe, switch_step: int) -> str:
    """What ended STEP's dense phase at ``switch_step``: its ``test``, a bound, or that it was ``fixed``; empty where there was no switch.

    AutoSwitch's test is first read one step after T_min, and is not needed any more one step after T_max.
    """
    if not switch_step or not isinstance(recipe, STEP):
        return ""
    low, high = recipe.bounds()
    if recipe.switch == "fixed":
        return "fixed"
    if switch_step == (low or 0) + 1:
        return "t_min"
    return "t_max" if high is not None and switch_step == high + 1 else "test"


def migrated(line: Mapping[str, str]) -> RunRow | None:
    """The row of an old line; None for one whose task is gone."""
    if line["task"] == GONE:
        return None
    method = RENAMED.get(line["method"], line["method"])
    steps, switch_step = int(line["steps"]), int(line["switch_step"])
    reason = switch_reason(methods.get(method).build(line["pattern"], steps), switch_step) if switch_step else ""
    new = {"method": method, "optimizer": "adamw", "beta2": str(BETA2), "other_loss": "nan", "bleu": "nan", "switch_reason": reason}
    return rows.from_text({**line, **new})


def migrated_key(key: str) -> str:
    """The key of a trace's run, from one without optimizer and β₂."""
    task, method, pattern, lr, steps, seed = key.split("/")
    return RunSpec(task, RENAMED.get(method, method), pattern, int(seed), float(lr), int(steps), "adamw", BETA2).key


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite ``runs.csv``, the traces and ``variance.csv`` of a folder."""
    given = sys.argv[1:] if argv is None else argv
    folder = Path(given[0]) if given else RESULTS
    lines = rows.load_lines(folder / rows.RUNS)
    if not lines or "beta2" in lines[0]:
        print(f"{folder}: nothing to migrate")
        return 0
    rows.save([row for row in map(migrated, lines) if row is not None], folder)
    traces.path(folder, GONE).unlink(missing_ok=True)
    for path in folder.glob("trace-*.csv"):
        old = rows.load_lines(path)
        machine_rows.save([{**line, "run": migrated_key(line["run"])} for line in old], traces.COLUMNS, path)
        traces.tidy(folder, path.stem.removeprefix("trace-"))
    moments = [{**line, "method": RENAMED.get(line["method"], line["method"]), "beta2": str(BETA2)} for line in variance.load(folder)]
    if moments:
        machine_rows.save(moments, variance.COLUMNS, folder / variance.FILE)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
