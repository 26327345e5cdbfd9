"""The tables of the pages, and the words that follow from them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from ..tables import table
from . import methods, tasks
from .contrasts import findings, place
from .methods import DECAYS, SRSTE
from .plan import Results, mean_loss
from .rows import RunRow
from .spec import DENSE, TUNING_SEEDS, Case
from .stats import ENOUGH, FEWEST, Estimate, combined, estimate, holm, verdict
from .stats import LEVEL as LEVEL_OF_TESTS
from .studies import LENGTHS, LONG, MATRIX, STUDIES, TASKS, case, resolve, variant_losses
from .tasks.base import settings

NONE = "–"
"""Cell without runs."""

SMALL = 0.001
"""p-values below this are shown as smaller than it."""

LEVEL = "level"

TIE = 0.001
"""Worst losses, in nats, that two λ may differ by and be as good: then the smaller one, which leaves the mask free for longer."""


LEAVES = tuple(m for m in MATRIX if m not in (DENSE, "fst"))
"""The methods that leave N:M weights."""

FAMILIES = ("ste", SRSTE, "step-auto", "sste", "mdgf-chain", "asp", "fst-nm", "slope", "oneshot-admm", "admm-held")
"""Of the methods that differ in a setting, the one that stands for all where methods are counted."""


def family(method: str) -> str:
    """The method of ``FAMILIES`` that stands for this one; itself if none does."""
    return next((one for one in FAMILIES if one.partition("-")[0] == method.partition("-")[0]), method)


@dataclass(frozen=True)
class Want:
    """A purpose, the methods that serve it, the tasks that show it, the steps of their runs if not their own, and what is named without
    rows.
    """

    what: str
    methods: tuple[str, ...]
    tasks: tuple[str, ...]
    untested: str
    steps: int | None = None


AT_LENGTH = tuple(dict.fromkeys((*LEAVES, *STUDIES["long-gpt"].methods[1:])))

TUNED = STUDIES["finetune-low"].methods[1:]

WANTS = (
    Want("train from scratch", AT_LENGTH, STUDIES["long-gpt"].tasks, "asp", STUDIES["long-gpt"].steps),
    Want("the same in a short run", LEAVES, ("gpt", "translation"), "srste"),
    Want("fine-tune a dense model, at rates far below those of its training", TUNED, STUDIES["finetune-low"].tasks, "nm.prune_"),
    Want("fine-tune it at rates as high as those", LEAVES, ("finetune",), "nm.prune_"),
    Want("prune without training", tuple(m for m in MATRIX if m.startswith("oneshot")), TASKS, "nm.prune_"),
    Want("make all three GEMMs of a step sparse", ("fst-nm",), TASKS, "fst"),
    Want("learn Adam's second moment densely first", ("step-auto",), TASKS, "step"),
)
"""What a user may want; the first row comes from the longest runs that there are."""

RECIPES = {
    "srste": "`srste` (λ tuned)",
    "step-auto": "`step`",
    "asp": "`asp`",
    "mdgf-chain": "`mdgf`",
    "mdgf-ste": '`mdgf(gradient="ste", end=1.0)`',
    **{m: f"`nm.prune_` by `{m.partition('-')[2]}` half-way, then training" for m in MATRIX if m.startswith("asp-")},
    "admm-held": "`nm.prune_` by `admm`, then training",
    "admm-srste": "`nm.prune_` by `admm`, then `srste`",
    "fst-nm": "`fst(end=None)`",
    **{m: f"`nm.prune_` by `{m.partition('-')[2]}`" for m in MATRIX if m.startswith("oneshot")},
}
"""What a user calls a method of the matrix."""

METHOD = {"step": "step-auto", "mdgf": "mdgf-chain"}
"""The method of the matrix that stands for a recipe with its defaults, where it has another name."""

COARSE = {"2:4": ("mlp", "vit")}
"""Tasks whose margin is a quarter of dense's loss and more than what this pattern costs there: "level" would say nothing."""


class Tables:
    """The tables, from the rows of one folder.

    Args:
        rows: of ``runs.csv``.
        again: of ``again.csv``, some of the same runs done again.
    """

    def __init__(self, rows: Iterable[RunRow], again: Iterable[RunRow] = ()) -> None:
        self.rows, self.again = list(rows), list(again)
        self.results = Results(self.rows)
        self.best = cache(self._best)

    def _best(self, each: Case) -> dict[int, RunRow]:
        known = resolve(each, self.results)
        return self.results.best(known) if known else {}

    def less(self, task: str, method: str, pattern: str, than: str, beta2: float | None = None, steps: int | None = None) -> Estimate:
        """The loss of a method minus that of another, paired by seed, each at its best rate."""
        ours, theirs = (self._losses(task, name, pattern, beta2, steps) for name in (method, than))
        return combined([(1, ours), (-1, theirs)])

    def _losses(self, task: str, method: str, pattern: str, beta2: float | None = None, steps: int | None = None) -> dict[int, float]:
        runs = self.best(case(task, method, pattern, beta2=beta2, steps=steps))
        return {seed: row.val_loss for seed, row in runs.items()}

    def tasks(self, pattern: str, only: Sequence[str] = (), every: bool = False) -> list[str]:
        """The tasks, of ``only`` if given, whose dense training has enough seeds, and some method at this pattern too.

        Without those that cannot tell methods apart, unless ``every``.
        """
        coarse = () if every else COARSE.get(pattern, ())
        wanted = [t for t in only or TASKS if pattern in settings(t).patterns and t not in coarse]
        return [t for t in wanted if any(self.less(t, m, pattern, DENSE).n >= FEWEST for m in MATRIX[1:])]

    def matrix(self, pattern: str) -> str:
        """Loss less dense's of every method on every task, how often it is ahead of and behind the others, and the training FLOPs."""
        names = self.tasks(pattern)
        dense = [estimate(self._losses(task, DENSE, DENSE).values()) for task in names]
        heads = [f"`{task}`, dense {e.mean:.3f}, n = {e.n}" for task, e in zip(names, dense, strict=True)]
        lines = [["method", *heads, "ahead, behind", "training FLOPs"]]
        wins = self.wins(pattern)
        for method in MATRIX[1:]:
            cells = [self._cell(task, method, pattern) for task in names]
            if any(cell != NONE for cell in cells):
                won = "{}, {}".format(*wins[method]) if method in wins else NONE
                lines.append([self.name(method), *cells, won, self._flops(names, method, pattern)])
        return table(lines) if len(lines) > 1 else MISSING

    def _cell(self, task: str, method: str, pattern: str) -> str:
        e = self.less(task, method, pattern, DENSE)
        if e.n < FEWEST:
            return NONE
        same = " ≈" if verdict(e, settings(task).margin) == LEVEL else ""
        return e.shown(sign=True) + same + _few(task, e)

    def name(self, method: str) -> str:
        """A method as the tables show it."""
        if method in DECAYS:
            return f"SR-STE (λ = {DECAYS[method]:g})"
        return "SR-STE (λ tuned)" if method == SRSTE else f"`{method}`"

    def _flops(self, names: Sequence[str], method: str, pattern: str) -> str:
        shares = []
        for task in names:
            ours, dense = self.best(case(task, method, pattern)), self.best(case(task, DENSE, DENSE))
            shares += [ours[s].training_flops / dense[s].training_flops for s in ours.keys() & dense.keys()]
        return f"{sum(shares) / len(shares):.2f}" if shares else NONE

    def wins(
        self, pattern: str, only: Sequence[str] = MATRIX[1:], names: Sequence[str] = (), steps: int | None = None
    ) -> dict[str, tuple[int, int]]:
        """Method of ``only`` -> how often it is ahead of another family of methods on a task, and how often behind.

        Of the methods that have enough seeds on some task. A mean of ranks would take noise for an order, and counting methods that differ
        in a setting would count one win several times.
        """
        names = self.tasks(pattern, names)
        some = [m for m in only if any(len(self.best(case(task, m, pattern, steps=steps))) >= ENOUGH for task in names)]
        rivals = [m for m in FAMILIES if m in some]
        said = {
            m: [self._verdict(task, m, pattern, other, steps) for task in names for other in rivals if other != family(m)] for m in some
        }
        return {m: (words.count("ahead"), words.count("behind")) for m, words in said.items()}

    def _verdict(self, task: str, method: str, pattern: str, than: str, steps: int | None = None) -> str:
        return verdict(self.less(task, method, pattern, than, steps=steps), settings(task).margin)

    def first(self, pattern: str, only: Sequence[str] = MATRIX[1:], names: Sequence[str] = (), steps: int | None = None) -> str:
        """The method of ``only`` that is behind the fewest of the others, over all tasks; "" without rows.

        Of several, the one that is ahead most often, then the one of least mean loss as it is shown, then the first of ``only``.
        """
        some = [*self.wins(pattern, only, names, steps)]
        names = self.tasks(pattern, names)

        def order(m: str) -> tuple[int, int, float]:
            said = [self._verdict(task, m, pattern, other, steps) for task in names for other in some if other != m]
            loss = [self.less(task, m, pattern, DENSE, steps=steps).mean for task in names]
            return said.count("behind"), -said.count("ahead"), round(sum(x for x in loss if math.isfinite(x)), 3)

        return min(some, key=order, default="")

    def choices(self) -> str:
        """What to take for which purpose at 2:4, with the evidence."""
        lines = [["you want to", "take", "loss less dense's, nats", "not known to be worse"]]
        for want in WANTS:
            method = self.first("2:4", want.methods, want.tasks, want.steps)
            names = self.tasks("2:4", want.tasks) if method else []
            found = {task: self.less(task, method, "2:4", DENSE, steps=want.steps) for task in names}
            evidence = ", ".join(
                f"`{task}` {e.shown(sign=True)}{self.decay(task, method)}{f' after {want.steps:,} steps' if want.steps else ''}"
                for task, e in found.items()
                if e.n >= ENOUGH
            )
            take = RECIPES.get(method, self.name(method)) if method else f"`{want.untested}`"
            lines.append([want.what, take, evidence or "untested", self._others(method, want)])
        return table(lines)

    def _others(self, method: str, want: Want) -> str:
        """The methods that are not known to be worse than ``method`` for a purpose, and how many have not been compared."""
        others = [m for m in want.methods if m != method]
        if not others:
            return "no other method does this"
        names = self.tasks("2:4", want.tasks)
        said = {m: [self.less(task, m, "2:4", method, steps=want.steps) for task in names] if method else [] for m in others}
        known = {m: [(t, e) for t, e in zip(names, found, strict=True) if e.n >= ENOUGH] for m, found in said.items() if found}
        good = [
            RECIPES.get(m, self.name(m))
            for m, found in known.items()
            if found and all(verdict(e, settings(t).margin) != "behind" for t, e in found)
        ]
        missing = sum(not known.get(m) for m in others)
        more = f"{missing} of {len(others)} not compared" if missing else ""
        none = "" if missing == len(others) else "all others are behind" if len(names) == 1 else "every other is behind on some task"
        return "; ".join(filter(None, (", ".join(good) or none, more)))

    def ends(self, task: str, pattern: str, names: Sequence[str]) -> str:
        """For which methods the lowest and the highest of a task's fixed rates was best, so that others might be better, in words."""
        tried = settings(task).rates
        best = {m: self._rate(task, m, pattern) for m in names if self._losses(task, m, pattern)}
        found = []
        for word, lr in (("lowest", tried[0]), ("highest", tried[-1])):
            at = [self.name(m) for m, rate in best.items() if rate == lr]
            found += [f"the {word} was best for {'all' if len(at) == len(best) else ', '.join(at)}"] if at else []
        rates = " and ".join(filter(None, (", ".join(f"{lr:g}" for lr in tried[:-1]), f"{tried[-1]:g}")))
        return f"Of the rates {rates} {', '.join(found)}: others may be better." if found else ""

    def decay(self, task: str, method: str) -> str:
        """The λ of a method that was chosen on a task, in brackets; "" if it has none."""
        known = resolve(case(task, method, "2:4"), self.results)
        return f" (λ = {DECAYS[known.method]:g})" if known and known.method in DECAYS else ""

    def tally(self, method: str, than: str, pattern: str) -> str:
        """On which tasks a method is ahead of, level with and behind another, in words: ``behind on `mlp` (+0.012 ± 0.006)``."""
        found = {f"`{task}`": (task, self.less(task, method, pattern, than)) for task in self.tasks(pattern)}
        return _verdicts(found, ON) or "not compared yet"

    def longer(self) -> str:
        """What is ahead of dense training in the runs of ``long-gpt``, level with it and behind, in words; "" without rows."""
        study = STUDIES["long-gpt"]
        (task,), (pattern,) = study.tasks, study.patterns
        names = {m: RECIPES.get(m, self.name(m)) for m in study.methods if m != DENSE}
        found = {name: (task, self.less(task, m, pattern, DENSE, steps=study.steps)) for m, name in names.items()}
        said = _verdicts(dict(sorted(found.items(), key=lambda each: each[1][1].mean)), OF_DENSE)
        runs = f"After {study.steps:,} steps of `{task}` instead of {settings(task).steps}, all at rates that are good for dense training"
        return f"{runs}, {said}." if said else ""

    def lengths(self) -> list[tuple[str, str, None, int]]:
        """Where the methods of ``LENGTHS`` are compared, as ``compared`` takes it: the lengths that have rows, by length.

        ``code-64`` is the same model and data after 20,000 steps, with two rates.
        """
        places = [("code-64", LONG), *((STUDIES[f"length-{steps}"].tasks[0], steps) for steps in LENGTHS)]
        known = [place for place in places if len(self._losses(place[0], DENSE, DENSE, steps=place[1])) >= FEWEST]
        return [(task, "2:4", None, steps) for task, steps in sorted(known, key=lambda place: place[1])]

    def flips(self) -> str:
        """The methods of ``LENGTHS`` whose loss is below dense's after some steps and above it after more, with both numbers, in words."""
        found = []
        for method in STUDIES[f"length-{LENGTHS[0]}"].methods[1:]:
            less = {steps: self.less(task, method, pattern, DENSE, steps=steps) for task, pattern, _, steps in self.lengths()}
            low = [steps for steps, e in less.items() if e.n >= FEWEST and e.mean + e.half < 0]
            high = [steps for steps, e in less.items() if e.n >= FEWEST and e.mean - e.half > 0 and low and steps > low[-1]]
            found += [f"{self.name(method)} ends below dense after {low[-1]:,} steps and above it after {high[0]:,}"] if high else []
        return "; ".join(found)

    def levels(self, pattern: str) -> str:
        """The methods that are level with dense, by task."""
        found = {task: map(self.name, self._said(task, pattern, LEVEL)) for task in self.tasks(pattern)}
        return "; ".join(f"on `{task}` {', '.join(names) or 'none'}" for task, names in found.items()) or "none yet"

    def ahead(self, pattern: str) -> str:
        """The methods that are ahead of dense after Holm's correction over the task's methods, each with its rate; "" if none is."""
        found = []
        for task in self.tasks(pattern):
            every = [m for m in MATRIX[1:] if self.less(task, m, pattern, DENSE).n >= FEWEST]
            p = dict(zip(every, holm([self.less(task, m, pattern, DENSE).p for m in every]), strict=True))
            names = [
                f"{self.name(m)} (at {self._rate(task, m, pattern):g})"
                for m in self._said(task, pattern, "ahead")
                if p.get(m, 1.0) < 1 - LEVEL_OF_TESTS
            ]
            if names:
                found.append(f"on `{task}` {', '.join(names)}, where dense is best at {self._rate(task, DENSE, DENSE):g}")
        return "; ".join(found)

    def _said(self, task: str, pattern: str, word: str) -> list[str]:
        return [m for m in MATRIX[1:] if self._verdict(task, m, pattern, DENSE) == word]

    def _rate(self, task: str, method: str, pattern: str) -> float:
        return next(iter(self.best(case(task, method, pattern)).values())).lr

    def rates(self, task: str, pattern: str) -> str:
        """Of each method: the rate that is best on evaluation, the others that were as good on the tuning seeds, and the losses at them."""
        has_accuracy = any(math.isfinite(row.accuracy) for row in self.rows if row.task == task)
        has_bleu = any(math.isfinite(row.bleu) for row in self.rows if row.task == task)
        extra = [*(["accuracy, %"] if has_accuracy else []), *(["BLEU"] if has_bleu else [])]
        lines = [["method", "rate", "loss", "at the other good rates", "tried", *extra, "n"]]
        for method in MATRIX:
            known = resolve(case(task, method, pattern), self.results)
            runs = self.results.best(known) if known else {}
            if known is None or len(runs) < FEWEST:
                continue
            search, mine = self.results.search(known), next(iter(runs.values())).lr
            others = {lr: mean_loss(found) for lr, found in self.results.evaluated(known).items() if lr != mine and len(found) == len(runs)}
            more = ", ".join(f"{loss:.3f} at {lr:g}" for lr, loss in others.items()) or NONE
            tried = f"{search.tried[0]:g} to {search.tried[-1]:g}" + ("" if search.closed else ", open")
            values = [estimate(row.accuracy for row in runs.values()).shown(2)] if has_accuracy else []
            values += [estimate(row.bleu for row in runs.values()).shown(1)] if has_bleu else []
            name = self.name(method) + (f" ({known.method.removeprefix('srste-')})" if method == SRSTE else "")
            loss = estimate(row.val_loss for row in runs.values()).shown()
            lines.append([name, f"{mine:g}", loss, more, tried, *values, str(len(runs))])
        return table(lines) if len(lines) > 1 else MISSING

    def decays(self) -> str:
        """SR-STE's loss with each λ less that with the best one, by task and after the steps of the longest runs, and the worst of them."""
        tasks_, lost = self._decays_lost()
        if not lost:
            return MISSING
        lines = [["λ", *tasks_, "worst"]]
        for decay, row in lost.items():
            lines.append([f"{decay:g}", *(NONE if math.isnan(x) else f"{x:.3f}" for x in row), f"{_worst(row):.3f}"])
        return table(lines)

    def best_decay(self) -> float:
        """The λ of the least worst loss over tasks and lengths; of several within ``TIE`` of it the smallest."""
        worst = {decay: _worst(row) for decay, row in self._decays_lost()[1].items()}
        return min(decay for decay, x in worst.items() if x <= min(worst.values()) + TIE)

    def _decays_lost(self) -> tuple[list[str], dict[float, list[float]]]:
        """(heads, λ -> the losses): of each task on the tuning seeds at the rate of the smallest λ, and of the long runs; nan: not run."""
        found = {task: losses for task in TASKS if (losses := variant_losses(case(task, SRSTE, "2:4"), self.results))}
        rates = [self.results.search(next(iter(losses))).best for losses in found.values()]
        heads = [f"`{task}` at {lr:g}" for task, lr in zip(found, rates, strict=True)]
        columns = [[loss - min(losses.values()) for loss in losses.values()] for losses in found.values()]
        study = STUDIES["long-gpt"]
        for task in set(study.tasks) & found.keys():
            runs = [estimate(self._losses(task, name, "2:4", steps=study.steps).values()) for name in DECAYS]
            least = min((e.mean for e in runs if e.n >= ENOUGH), default=math.nan)
            heads.append(f"`{task}`, {study.steps:,} steps")
            columns.append([e.mean - least if e.n >= ENOUGH else math.nan for e in runs])
        return heads, {decay: list(row) for decay, row in zip(DECAYS.values(), zip(*columns, strict=True), strict=False)}

    def contrasts(self, family: str) -> str:
        """The contrasts of a family with their results; of those against STE's own update also how much of STE's gap it may close.

        That is the upper end of the 95 % interval of the gain, as a share of STE's loss over dense. † marks a dense phase, a quarter of the
        run, that is shorter than one window 1 / (1 − β₂) of the second moment.
        """
        share = family != "premise"
        lines = [["where", "difference in loss", "verdict", "n", "p after Holm", *(["share of STE's gap, at most"] if share else [])]]
        for f in findings(self.results, family):
            p = NONE if math.isnan(f.p) else f"{f.p:.2g}" if f.p >= SMALL else f"< {SMALL:g}"
            shown = f.estimate.n >= FEWEST
            c = f.contrast.terms[0][1]
            short = share and "freeze" in family and c.steps / 4 < 1 / (1 - c.beta2)
            cells = [f.contrast.what + " †" * short, f.estimate.shown(sign=True), f.verdict, str(f.estimate.n), p if shown else NONE]
            lines.append([*cells, *([self._share(c, f.estimate) if shown else NONE] if share else [])])
        return table(lines)

    def _share(self, c: Case, e: Estimate) -> str:
        """How much of STE's loss over dense a gain may make up at most, in percent; words if STE has no gap there."""
        gap = self.less(c.task, "ste", c.pattern, DENSE, c.beta2, c.steps)
        if gap.n < FEWEST:
            return NONE
        if gap.mean <= gap.half:
            return "STE has none"
        return f"{max(0.0, e.half - e.mean) / gap.mean:.0%}".replace("%", " %")

    def by_rate(self, task: str, pattern: str, ours: str, theirs: str) -> dict[float, Estimate]:
        """Rate -> the loss of a method minus that of another at this same rate, paired over the tuning seeds."""
        one, other = (self.results.cases.get(case(task, m, pattern), {}) for m in (ours, theirs))

        def losses(runs: Mapping[int, RunRow]) -> dict[int, float]:
            return {k: row.val_loss for k, row in runs.items() if k in TUNING_SEEDS}

        found = {lr: combined([(1, losses(one[lr])), (-1, losses(other[lr]))]) for lr in sorted(one.keys() & other.keys())}
        return {lr: e for lr, e in found.items() if e.n >= FEWEST}

    def summary(self, family: str) -> str:
        """How many contrasts of a family came out which way: ``ahead 1, level 2, not known 2, of 5``."""
        said = [f.verdict for f in findings(self.results, family) if f.estimate.n >= ENOUGH]
        counts = [f"{word} {said.count(word)}" for word in ("ahead", "level", "behind", "not known") if word in said]
        total = len(findings(self.results, family))
        return (
            f"{', '.join(counts)}, of {len(said)}" + (f" ({total - len(said)} not run yet)" if len(said) < total else "")
            if said
            else "not run yet"
        )

    def places(self, family: str) -> list[tuple[str, str, float, int]]:
        """Where the contrasts of a family have enough seeds: task, pattern, β₂ and steps."""
        terms = [f.contrast.terms[0][1] for f in findings(self.results, family) if f.estimate.n >= FEWEST]
        return [(c.task, c.pattern, c.beta2, c.steps) for c in terms]

    def compared(self, names: Sequence[str], where: Sequence[tuple[Any, ...]], than: str) -> str:
        """The losses of methods at their best rates, and their differences to one of them.

        Args:
            where: task and pattern; also β₂ and steps, if they are not the task's own.
        """
        lines = [["method", *(place(*each) for each in where)]]
        for name in names:
            cells = []
            for task, pattern, *more in where:
                loss = estimate(self._losses(task, name, pattern, *more).values())
                e = self.less(task, name, pattern, than, *more)
                less = f" ({e.shown(sign=True)})" if name != than and e.n >= FEWEST else ""
                cells.append(loss.shown() + less + _few(task, e if less else loss) if loss.n >= FEWEST else NONE)
            lines.append([self.name(name), *cells])
        return table(lines)

    def switches(self, names: Sequence[str], where: Sequence[tuple[str, str]], fixed: Sequence[str]) -> str:
        """How the dense phase of STEP ended, over all evaluation runs, and the loss minus that of the best fixed T₀."""
        lines = [["method", "where", "T₀", "ended by", "loss minus that of the best fixed T₀"]]
        for name in names:
            for task, pattern in where:
                runs = list(self.best(case(task, name, pattern)).values())
                if len(runs) < FEWEST:
                    continue
                low, high = min(r.switch_step for r in runs), max(r.switch_step for r in runs)
                reasons = [r.switch_reason for r in runs]
                why = ", ".join(f"{reason} {reasons.count(reason)}" for reason in sorted(set(reasons)))
                others = {f: found for f in fixed if (found := self.best(case(task, f, pattern)))}
                least = min(others, key=lambda f: mean_loss(others[f]), default="")
                cost = f"{self.less(task, name, pattern, least).shown(sign=True)} (`{least}`)" if least else NONE
                lines.append([f"`{name}`", f"`{task}` {pattern}", f"{low} to {high}" if low < high else str(low), why, cost])
        return table(lines) if len(lines) > 1 else MISSING

    def decided(self, name: str) -> str:
        """How many runs of a switch were decided by its test: ``12 of 30``; at every rate, on tuning seeds too."""
        reasons = [row.switch_reason for row in self.rows if row.method == name]
        return f"{reasons.count('test')} of {len(reasons)}" if reasons else "none yet"

    def spread(self) -> str:
        """Runs that were done again, and how far the loss moved."""
        first: Mapping[str, RunRow] = {row.key: row for row in self.rows}
        lines = [["run", "first", "again", "loss", "moved by"]]
        for row in self.again:
            if a := first.get(row.key):
                moved = f"{row.val_loss - a.val_loss:+.4f}".replace("-", "−")
                lines.append([f"`{a.key}`", _machine(a), _machine(row), f"{a.val_loss:.4f}", moved])
        return table(lines) if len(lines) > 1 else MISSING

    def settings(self) -> str:
        """The settings of every task that has rows."""
        lines = [
            ["task", "steps", "AdamW's β", "weight decay", "clip", "tuning seeds", "seeds", "margin, nats", "CPU-seconds of a run, median"]
        ]
        for name in tasks.names():
            seconds = sorted(row.seconds for row in self.rows if row.task == name and row.steps == settings(name).steps)
            if seconds:
                s = settings(name)
                clip = "none" if s.clip is None else f"{s.clip:g}"
                numbers = [str(s.steps), f"{s.betas[0]:g}, {s.betas[1]:g}", f"{s.weight_decay:g}", clip, str(s.tuning_seeds), str(s.seeds)]
                lines.append([f"`{name}`", *numbers, f"{s.margin:g}", f"{seconds[len(seconds) // 2]:.0f}"])
        return table(lines)

    def spent(self) -> str:
        """Number of runs and CPU-hours."""
        return f"{len(self.rows)} runs, {sum(row.seconds for row in self.rows) / 3600:.1f} CPU-hours"

    def mixed(self) -> list[str]:
        """Tasks whose rows are of several data sets, which must not be compared."""
        found: dict[str, set[str]] = {}
        for row in self.rows:
            found.setdefault(row.task, set()).add(row.data)
        return sorted(task for task, digests in found.items() if len(digests) > 1)


def _worst(row: Sequence[float]) -> float:
    return max(x for x in row if not math.isnan(x))


ON = {word: f"{word} on" for word in ("ahead", LEVEL, "behind", "not known")}
OF_DENSE = {"ahead": "ahead of dense:", LEVEL: "level with dense:", "behind": "behind dense:", "not known": "not known:"}
"""Each verdict, before the names of which it is said."""


def _verdicts(found: Mapping[str, tuple[str, Estimate]], words: Mapping[str, str]) -> str:
    """What has enough seeds, by verdict: ``ahead on `mlp` (−0.012 ± 0.006); level on ...``; of each name, the task and the difference."""
    said: dict[str, list[str]] = {}
    for name, (task, e) in found.items():
        if e.n >= ENOUGH:
            said.setdefault(verdict(e, settings(task).margin), []).append(f"{name} ({e.shown(sign=True)})")
    return "; ".join(f"{text} {', '.join(said[word])}" for word, text in words.items() if word in said)


def _few(task: str, e: Estimate) -> str:
    return f" (n = {e.n})" if e.n < settings(task).seeds else ""


def _machine(row: RunRow) -> str:
    return f"{row.machine}, {row.commit}"


MISSING = "*No runs yet.*"
"""Replaces a table without runs."""


def notes(names: Iterable[str]) -> str:
    """The meaning of each name."""
    return table([["name", "method"], *([f"`{name}`", methods.get(name).note] for name in names)])
