"""Tables of the page: the results of every method, with rates, seeds and costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence

from . import methods, tasks
from .cells import Case, Cells, Runs, Value, difference, mean, val_loss
from .contrasts import findings
from .plan import Search, cost, threefold
from .rows import RunRow
from .spec import DENSE, EVALUATION_SEEDS, TUNING_SEEDS, RunSpec
from .stats import Estimate, combined, estimate, interpolate
from .tasks.base import settings

BASELINE = "srste"
"""The method that the others are compared with, paired by seed."""

NONE = "–"
"""Cell without runs."""

BELOW = "†"
"""Marks a difference that is no larger than that of a repeated run."""

SMALL = 0.001
"""p-values below this are shown as smaller than it."""

FIXED = "fixed"
"""``switch_reason`` of a switch at a fixed step."""

LATE = 0.8
"""The share of a run's steps after which it counts as late."""

Find = Callable[[Case], Runs]


def sparsity(pattern: str) -> tuple[float, int]:
    """Sort key of patterns: from dense to sparse, and then by M."""
    n, m = map(int, pattern.split(":"))
    return m / n, m


def ordered(names: Iterable[str]) -> list[str]:
    """Methods in the order of the list of methods."""
    every = [*methods.METHODS, *methods.others()]
    return sorted(set(names), key=lambda name: every.index(name) if name in every else len(every))


def grid(cells: Cells, task: str, optimizer: str, beta2: float | None, only: Collection[str]) -> tuple[list[str], list[str]]:
    """The methods and the patterns for which a task has runs."""
    found = [(m, p) for m, p in cells.cases(task, optimizer, beta2) if not only or m in only]
    return ordered(m for m, _ in found), sorted({p for _, p in found if p != DENSE}, key=sparsity)


def primary(cells: Cells) -> str:
    """The table of the primary contrasts with their results."""
    lines = [["question", "answer", "difference in loss, nats", "n", "p after Holm"]]
    for finding in findings(cells).values():
        e, bold = finding.estimate, "**" if finding.significant else ""
        shown = e.shown(sign=True) + _lost(e) if e.n else NONE
        p = NONE if math.isnan(finding.p) else in_short(finding.p)
        lines.append([finding.contrast.question, f"{bold}{finding.verdict}{bold}", shown, str(e.n), p])
    return table(lines)


def in_short(p: float) -> str:
    """A p-value with two digits, or ``< 0.001``."""
    return f"{p:.2g}" if p >= SMALL else f"< {SMALL:g}"


def results(
    cells: Cells,
    task: str,
    rates: str = "tuned",
    *,
    optimizer: str = "adamw",
    beta2: float | None = None,
    lr: float | None = None,
    steps: int | None = None,
    value: Value = val_loss,
    digits: int = 3,
    only: Collection[str] = (),
) -> str:
    """Mean ± half of the 95 % interval per method and pattern, and below it the paired difference to SR-STE.

    Args:
        rates: ``"tuned"``: each case at its best rate; ``"shared"``: all at dense's.
        lr: all at this rate instead.
        steps: length of the runs; the task's own by default.
    """

    def find(case: Case) -> Runs:
        if lr is not None:
            return cells.at(case, lr, steps)
        return cells.tuned(case, steps) if rates == "tuned" else cells.shared(case)

    names, patterns = grid(cells, task, optimizer, beta2, only)
    lines = [["method", *patterns]]
    for name in names:
        cases = [Case(task, name, p, optimizer, beta2) for p in patterns]
        searches = [cells.search(case, steps) if lr is None and rates == "tuned" else None for case in cases]
        found = [_cell(cells, case, find, value, digits, search) for case, search in zip(cases, searches, strict=True)]
        if any(cell != NONE for cell in found):
            lines.append([f"`{name}`", *found])
    return table(lines) if len(lines) > 1 else MISSING


def _cell(cells: Cells, case: Case, find: Find, value: Value, digits: int, search: Search | None) -> str:
    runs = find(case)
    if not runs:
        return NONE
    e = mean(runs, value)
    parts, count = [e.shown(digits)], e.n
    if case.method not in (BASELINE, DENSE):
        delta = difference(runs, find(Case(case.task, BASELINE, case.pattern, case.optimizer, case.beta2)), value)
        if delta.n > 1:
            mark = below(cells, case.task, delta) if value is val_loss else ""
            parts.append(delta.shown(digits, sign=True) + mark)
            count = delta.n
    if value is val_loss and (switched := _switch(runs.values())):
        parts.append(f"T₀ {switched}")
    notes = [f"n = {count}" + (f" of {planned(case.task)}" if count < planned(case.task) else "")]
    if search and value is val_loss:
        notes.insert(0, f"lr {search.rate:g} ({search.below}, {search.above})" + ("" if search.closed else " open"))
    if e.lost:
        notes.append(f"{e.lost} diverged")
    return "<br>".join([*parts, ", ".join(notes)])


def below(cells: Cells, task: str, delta: Estimate) -> str:
    """The mark of a difference that is no larger than that of a repeated run of the task."""
    return BELOW if 0 < cells.spread(task) >= abs(delta.mean) else ""


def _switch(runs: Iterable[RunRow]) -> str:
    """AutoSwitch's T₀ and what ended the dense phase: ``53 to 251 (t_max 1, test 1)``; empty for other methods."""
    rows = [row for row in runs if row.switch_step and row.switch_reason != FIXED]
    if not rows:
        return ""
    low, high = min(row.switch_step for row in rows), max(row.switch_step for row in rows)
    reasons = [row.switch_reason or "unknown" for row in rows]
    why = ", ".join(f"{reason} {reasons.count(reason)}" for reason in sorted(set(reasons)))
    return (f"{low} to {high}" if low < high else str(low)) + f" ({why})"


def _lost(e: Estimate) -> str:
    return f" ({e.lost} diverged)" if e.lost else ""


def planned(task: str) -> int:
    """Number of evaluation seeds that the plan has for a task."""
    return settings(task).seeds


MISSING = "*No runs yet.*"
"""Replaces a table without runs."""


def progress(cells: Cells, task: str) -> str:
    """How much of the plan is left for a task, and its cost; empty if all is done."""
    if task not in tasks.names():
        return MISSING
    left = cells.left(task)
    more = ", more if a search is extended" if any(spec.purpose == "tune" for spec in left) else ""
    text = f"{len(left)} runs of the plan are not done, about {cost(left):.2g} CPU-hours of one core{more}"
    return f"*{text}: `python -m bench.accuracy run --tasks {task}`.*" if left else ""


def gaps(cells: Cells, task: str) -> str:
    """Loss of SR-STE minus dense under each optimizer, and the difference of the two, at the tuned rates."""
    patterns = grid(cells, task, "adamw", None, (BASELINE,))[1]
    lines = [["SR-STE over dense", *patterns]]

    def terms(pattern: str, optimizer: str, sign: int) -> list[tuple[float, dict[int, float]]]:
        both = ((sign, BASELINE), (-sign, DENSE))
        return [(s, {k: r.val_loss for k, r in cells.tuned(Case(task, m, pattern, optimizer)).items()}) for s, m in both]

    wanted = {"AdamW": (("adamw", 1),), "SGD": (("sgd", 1),), "AdamW minus SGD": (("adamw", 1), ("sgd", -1))}
    for name, signs in wanted.items():
        sums = [estimate(combined([t for o, sign in signs for t in terms(p, o, sign)]).values()) for p in patterns]
        lines.append([name, *(e.shown(sign=True) + _n(e) for e in sums)])
    return table(lines) if patterns else MISSING


def _n(e: Estimate) -> str:
    return f"<br>n = {e.n}{_lost(e)}" if e.n else ""


def by_rate(
    cells: Cells,
    task: str,
    pattern: str,
    names: Sequence[str],
    *,
    optimizer: str = "adamw",
    steps: int | None = None,
    tuning: bool = True,
    against: str = "",
) -> str:
    """A column for every rate: the loss of each method, or its paired difference to ``against`` at the same rate.

    Args:
        tuning: on the tuning seeds, otherwise on the evaluation seeds.
    """
    seeds = TUNING_SEEDS if tuning else EVALUATION_SEEDS
    cases = [Case(task, name, pattern, optimizer) for name in names]
    rates = sorted({lr for case in cases for lr in cells.rates(case, steps, seeds)})
    lines = [["method", *(f"{lr:g}" for lr in rates)]]
    for case in cases:
        found = [cells.at(case, lr, steps, seeds) for lr in rates]
        if against:
            other = [cells.at(Case(task, against, pattern, optimizer), lr, steps, seeds) for lr in rates]
            sums = [difference(a, b) for a, b in zip(found, other, strict=True)]
        else:
            sums = [mean(runs) for runs in found]
        if any(e.n for e in sums):
            lines.append([f"`{case.method}`", *(e.shown(sign=bool(against)) + _n(e) for e in sums)])
    return table(lines) if len(lines) > 1 else MISSING


def controls(cells: Cells, task: str, pattern: str, step: str = "step-25") -> str:
    """STEP and its controls, which separate the effects of the frozen moment, the dense phase, and the rate."""
    own, base, thawed = (Case(task, name, pattern) for name in (step, BASELINE, f"{step}-thawed"))
    ours, theirs = cells.search(own), cells.search(base)
    if ours is None or theirs is None:
        return MISSING
    wanted = [
        ("SR-STE at its own rate", base, theirs.rate),
        ("STEP at its own rate", own, ours.rate),
        ("the same dense phase, v not frozen, at STEP's rate", thawed, ours.rate),
        ("the same, at SR-STE's rate", thawed, theirs.rate),
        ("SR-STE at three times STEP's rate", base, threefold(ours.rate, settings(task).factor)),
    ]
    lines = [["run", "lr", "loss", "minus SR-STE at its own rate"]]
    for i, (text, case, lr) in enumerate(wanted):
        runs = cells.at(case, lr)
        delta = difference(runs, cells.at(base, theirs.rate))
        lines.append([text, f"{lr:g}", mean(runs).shown() + _n(mean(runs)), delta.shown(sign=True) + _n(delta) if i else NONE])
    return table(lines)


def rate_ratio(cells: Cells, task: str, pattern: str, method: str = BASELINE, optimizer: str = "adamw") -> str:
    """The best rate of a method relative to dense training's: ``10 times dense training's (0.1 against 0.01)``."""
    ours, dense = (cells.search(Case(task, name, pattern, optimizer)) for name in (method, DENSE))
    if ours is None or dense is None:
        return "not searched yet"
    numbers = f"({ours.rate:g} against {dense.rate:g})"
    return f"dense training's {numbers}" if ours.rate == dense.rate else f"{ours.rate / dense.rate:.2g} times dense training's {numbers}"


def smallest_and_best(cells: Cells, task: str, pattern: str, method: str = BASELINE) -> list[float]:
    """The smallest rate of a method's search, and the best one; empty before it is over."""
    search = cells.search(Case(task, method, pattern))
    return sorted({min(search.losses), search.rate}) if search else []


def curve(cells: Cells, case: Case) -> dict[int, dict[float, float]]:
    """Seed -> training FLOPs -> loss, of runs of several lengths at the rate of each length; only seeds that have all lengths."""
    found = [runs for steps in cells.lengths(case) if (runs := cells.tuned(case, steps))]
    seeds = set.intersection(*map(set, found)) if len(found) > 1 else set()
    every = {seed: {runs[seed].training_flops: runs[seed].val_loss for runs in found} for seed in sorted(seeds)}
    return {seed: points for seed, points in every.items() if all(map(math.isfinite, points.values())) and 0.0 not in points}


def at_flops(points: dict[int, dict[float, float]], budget: float) -> dict[int, float]:
    """Seed -> loss at a budget of training FLOPs, interpolated in log FLOPs; seeds without runs on both sides are left out."""
    found = {}
    for seed, mine in points.items():
        if min(mine) <= budget <= max(mine):
            found[seed] = interpolate(mine, budget)
    return found


def less_at(ours: dict[int, dict[float, float]], theirs: dict[int, dict[float, float]], budget: float) -> Estimate:
    """The loss of one curve minus another's at a budget of training FLOPs, paired by seed."""
    return estimate(combined([(1, at_flops(ours, budget)), (-1, at_flops(theirs, budget))]).values())


def equal_flops(cells: Cells, task: str, pattern: str, only: Collection[str] = ()) -> str:
    """Loss minus dense's at the same training FLOPs, at budgets with runs of both on both sides."""
    dense = curve(cells, Case(task, DENSE, DENSE))
    if not dense:
        return MISSING
    budgets = sorted({flops for points in dense.values() for flops in points})
    lines = [["method", *(f"{budget / budgets[0]:g} × dense's FLOPs" for budget in budgets)]]
    for name in grid(cells, task, "adamw", None, only)[0]:
        points = curve(cells, Case(task, name, pattern))
        if points and name != DENSE:
            sums = [less_at(points, dense, budget) for budget in budgets]
            lines.append([f"`{name}`", *(e.shown(sign=True) + _n(e) for e in sums)])
    return table(lines) if len(lines) > 1 else MISSING


def by_length(cells: Cells, task: str, pattern: str) -> str:
    """Loss minus dense's after the same number of steps, for runs of several lengths, below dense's own loss."""
    baseline = Case(task, DENSE, DENSE)
    lengths = cells.lengths(baseline)
    dense = [cells.tuned(baseline, steps) for steps in lengths]
    lines = [["method", *(f"{steps} steps" for steps in lengths)], [f"`{DENSE}`", *((e := mean(runs)).shown() + _n(e) for runs in dense)]]
    for name in grid(cells, task, "adamw", None, ())[0]:
        case = Case(task, name, pattern)
        if name != DENSE and len(cells.lengths(case)) > 1:
            sums = [difference(cells.tuned(case, steps), runs) for steps, runs in zip(lengths, dense, strict=True)]
            lines.append([f"`{name}`", *(e.shown(sign=True) + _n(e) for e in sums)])
    return table(lines) if len(lines) > 2 else MISSING


def ablation(cells: Cells, task: str, beta2: float, only: Collection[str] = ()) -> str:
    """Runs with another β₂, all at the rate at which most methods have runs."""
    cases = [Case(task, name, pattern, beta2=beta2) for name, pattern in cells.cases(task, beta2=beta2)]
    found = [lr for case in cases for lr in cells.rates(case)]
    if not found:
        return MISSING
    lr = max(sorted(set(found)), key=found.count)
    return f"all at lr {lr:g}:\n\n{results(cells, task, beta2=beta2, lr=lr, only=only)}"


def betas(cells: Cells, task: str, beta2: float) -> str:
    """Loss with another β₂ minus that with the task's own, at dense training's rate."""
    names, patterns = grid(cells, task, "adamw", beta2, ())
    rows = []
    for name in names:
        ours = [cells.shared(Case(task, name, pattern)) for pattern in patterns]
        others = [cells.like(Case(task, name, pattern, beta2=beta2), runs) for pattern, runs in zip(patterns, ours, strict=True)]
        sums = [difference(a, b) for a, b in zip(others, ours, strict=True)]
        if any(e.n for e in sums):
            rows.append([f"`{name}`", *(e.shown(sign=True) + _n(e) for e in sums)])
    return table([["method", *patterns], *rows]) if rows else MISSING


def autoswitch(cells: Cells, beta2: float) -> str:
    """How often the paper's AutoSwitch ended the dense phase by its test, and how often at its bounds."""
    rows = [row for row in cells.rows if row.method == "step" and row.switch_reason and row.beta2 == beta2]
    if not rows:
        return "not run yet"
    words = {"test": "by its test", "t_min": "at T_min", "t_max": "at T_max"}
    counts = {text: sum(row.switch_reason == reason for row in rows) for reason, text in words.items()}
    return ", ".join(f"{text} {count}" for text, count in counts.items()) + f", of {len(rows)} runs"


def task_table(cells: Cells) -> str:
    """The settings of every task that has runs."""
    lines = [["task", "steps", "patterns", "AdamW's β", "weight decay", "clip", "seeds", "CPU-seconds of a run"]]
    for name in tasks.names():
        if name in cells.tasks:
            s = settings(name)
            decay, clip = f"{s.weight_decay:g}", "none" if s.clip is None else f"{s.clip:g}"
            patterns = ", ".join(s.patterns)
            numbers = [str(s.steps), patterns, f"{s.betas[0]:g}, {s.betas[1]:g}", decay, clip, str(s.seeds), f"{s.seconds:g}"]
            lines.append([f"`{name}`", *numbers])
    return table(lines)


def switches(cells: Cells, task: str) -> str:
    """When AutoSwitch and its variants froze the second moment, and what ended the dense phase, at every rate, with the task's own β₂."""
    found: dict[tuple[str, str, int, float], list[RunRow]] = {}
    for row in cells.rows:
        if row.task == task and row.beta2 == settings(task).betas[1] and row.switch_step and row.switch_reason != FIXED:
            found.setdefault((row.method, row.pattern, row.steps, row.lr), []).append(row)
    if not found:
        return MISSING
    lines = [["method", "pattern", "of steps", "lr", "T₀", "runs"]]
    for key in sorted(found, key=lambda key: (key[0], sparsity(key[1]), key[2:])):
        (name, pattern, length, lr), group = key, found[key]
        lines.append([f"`{name}`", pattern, str(length), f"{lr:g}", _switch(group), str(len(group))])
    return table(lines)


def repeats(cells: Cells) -> str:
    """Repeated runs, with the change of the validation loss."""
    lines = [["run", "first", "again", "loss", "again", "moved by"]]
    for a, b in cells.repeated:
        moved = NONE if math.isnan(b.val_loss - a.val_loss) else f"{b.val_loss - a.val_loss:+.2g}".replace("-", "−")
        lines.append([f"`{a.spec.key}`", a.machine, b.machine, f"{a.val_loss:.4f}", f"{b.val_loss:.4f}", moved])
    return table(lines) if len(lines) > 1 else "*No run has been repeated yet: `python -m bench.accuracy run --stages repeat`.*"


def late(lines: Sequence[dict[str, str]], task: str, column: str, beta2: float, only: Collection[str] = ()) -> str:
    """The mean of a column of the traces after ``LATE`` of the steps, per method and pattern, over runs and steps."""
    found: dict[tuple[str, str], list[float]] = {}
    for line in lines:
        run = RunSpec.from_key(line["run"])
        usual = (run.beta2, run.steps, run.tuning) == (beta2, settings(task).steps, False) and run.pattern != DENSE
        if usual and line[column] and int(line["step"]) > LATE * run.steps and (not only or run.method in only):
            found.setdefault((run.method, run.pattern), []).append(float(line[column]))
    patterns = sorted({p for _, p in found}, key=sparsity)
    cell = {key: f"{estimate(values).mean:.2g}" for key, values in found.items()}
    body = [[f"`{name}`", *(cell.get((name, p), NONE) for p in patterns)] for name in ordered(m for m, _ in found)]
    return table([["method", *patterns], *body]) if body else MISSING


def flops(cells: Cells, task: str, only: Collection[str] = ()) -> str:
    """Training and inference FLOPs of the model's linear layers, as a share of dense's, at the task's length."""
    shares: dict[tuple[str, str], list[tuple[float, float]]] = {}
    steps = settings(task).steps
    mine = [row for row in cells.rows if (row.task, row.steps, row.status) == (task, steps, "ok") and row.training_flops]
    dense = next((row for row in mine if row.method == DENSE), None)
    for row in mine if dense else ():
        share = row.training_flops / dense.training_flops, row.inference_flops / dense.inference_flops  # type: ignore[union-attr]
        shares.setdefault((row.method, row.pattern), []).append(share)
    patterns = sorted({p for m, p in shares if m != DENSE}, key=sparsity)
    lines = [["method", *(f"{p} training" for p in patterns), *(f"{p} inference" for p in patterns)]]
    for name in ordered(m for m, _ in shares if m != DENSE and (not only or m in only)):
        found = [[share[i] for share in shares.get((name, p), [])] for i in (0, 1) for p in patterns]
        lines.append([f"`{name}`", *(f"{sum(cell) / len(cell):.2f}" if cell else NONE for cell in found)])
    return table(lines) if len(lines) > 1 else MISSING


def notes(cells: Cells, only: Collection[str] = ()) -> str:
    """The meaning of each name in the tables."""
    names = ordered(row.method for row in cells.rows if not only or row.method in only)
    return table([["name", "method"], *([f"`{name}`", methods.get(name).note] for name in names)])


def table(lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first line is the header.

    Example:
        >>> print(table([["a", "b"], ["1", "2"]]))
        | a | b |
        | --- | --- |
        | 1 | 2 |
    """
    head, *body = lines
    rows = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
