"""Fits the constants of ``nmkernels/gemm/estimate.py`` to committed rows: ``python -m bench.fit_rates``; ``--check`` only compares.

Rows of ``bench.cases.method`` say how long each method of a GEMM took; where a kind of machine has none, those of ``nm_linear`` say it for
fprop. Each line of constants is the least-squares fit of relative errors with constants that are not negative, single wrong rows having
little weight. ``bench.front_page`` shows the regret: how much longer the chosen method took than the fastest that was measured.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from scipy.optimize import nnls

from nmkernels import Pattern
from nmkernels.gemm import estimate
from nmkernels.gemm.estimate import DENSE, EXPAND, FLOAT32, SPARSE, Line
from nmkernels.gemm.problem import ROLES, Problem
from nmkernels.ops.compress import group_of
from nmkernels.ops.integers import BITS

from . import tables
from .cases.dense import LINEAR
from .registry import CPU, DTYPES
from .rows import RESULTS, load

RATES = Path(estimate.__file__).with_name("rates.json")

KINDS = {
    "AMD EPYC (family 23, model 1), 2 threads": "avx2 amd 23",
    "AMD EPYC (family 25, model 1), 2 threads": "avx2 amd 25",
    "AMD EPYC (family 25, model 17), 2 threads": "avx512_bf16 amd 25",
    "AMD EPYC (family 26, model 2), 2 threads": "avx512_bf16 amd 26",
    "Intel(R) Xeon(R) Processor (family 6, model 167), 2 threads": "amx intel 6",
    # this machine again, and MKL, oneDNN and torch held to the same instruction set
    **{
        f"Intel(R) Xeon(R) Processor (family 6, model 167) held to {isa}, 2 threads": f"{isa} intel 6"
        for isa in ("avx512_bf16", "avx512", "avx2")
    },
}
"""The kind of each machine whose rows are used; rows of others are of older kernels, or do not tell which machine it was."""

METHODS = tuple(f"method({role})" for role in ROLES)
"""Ops with rows of every method for floating-point values; for a kind of machine with such rows, those of ``nm_linear`` are not used."""

NEAR = 4
"""A line is used for weights of at least the smallest measured number of elements over this, where another kind knows smaller ones."""

HALF_WEIGHT = 0.1
"""The relative error beyond which a row counts for less."""

Lines = dict[str, Line]
Rates = Mapping[str, Lines]


@dataclass
class Observation:
    """One problem on one kind of machine, and the seconds of what was measured: ``"dense"``, a kernel, ``"expand"``, ``"make dense"``..."""

    kind: str
    problem: Problem
    seconds: dict[str, float] = field(default_factory=dict)

    def methods(self, dense: bool) -> dict[str, float]:
        """The seconds of each method that the package compares, with a dense layout or without; NaN of one that has no row."""
        names = [DENSE] if dense else [EXPAND, FLOAT32] if self.problem.dtype.itemsize == 2 else [EXPAND]
        found = {name: self.seconds.get(name, math.nan) for name in names}
        return {**found, SPARSE: self.seconds.get(estimate.kernel(self.problem, self.kind), math.nan)}


def cases(results: Path = RESULTS) -> list[Observation]:
    """What the committed rows say, in the order of files and rows."""
    found: dict[tuple[str, Problem], Observation] = {}
    rows = [r for path in sorted(results.glob("*.csv")) for r in load(path) if r.get("machine") in KINDS and r.get("metric") == "us"]
    measured = {KINDS[r["machine"]] for r in rows if r["op"] in METHODS}
    for r in rows:
        kind, what = KINDS[r["machine"]], _what(r)
        if not what or (kind in measured and not r["op"].startswith("method(")):
            continue
        role, _, cached = (r["op"].partition("(")[2].rstrip(")") or "fprop").partition(", ")
        values = role if role in BITS else "float"
        sizes = [int(size) for size in r["shape"].split("x")]
        tokens, rows_, cols = sizes if len(sizes) == 3 else (1, *sizes)
        pattern, rule = Pattern(r["pattern"]), "exact" if role == "wgrad" else ""
        p = Problem(
            role, tokens, rows_, cols, pattern.n, pattern.m, DTYPES[r["dtype"]], torch.device("cpu"), rule=rule, cached=bool(cached)
        )
        if values in BITS:
            p = p._replace(role="fprop", values=values, group=group_of(r["op"], values, None, pattern, cols))
        name = estimate.kernel(p, kind) if what == SPARSE else what
        found.setdefault((kind, p), Observation(kind, p)).seconds[name] = 1e-6 * float(r["p50"])
    return list(found.values())


def _what(row: Mapping[str, str]) -> str:
    """What a row measures, as a line of constants names it; empty for what is not used."""
    if row["op"].startswith("method("):
        name = row["provider"].removeprefix("nmkernels ")
        return DENSE if name == LINEAR else name if name.startswith(("make", EXPAND + " ")) or name == EXPAND else SPARSE
    others = {
        ("nm_linear", LINEAR): DENSE,
        ("nm_linear", CPU): SPARSE,
        ("nm_prune", CPU): "make dense",
        ("nm_compress", CPU): "make packed",
    }
    return others.get((row["op"], row["provider"]), "")


# ---- the fit


class Sample(NamedTuple):
    """A problem, the seconds that it took, and those of them that are another line's."""

    problem: Problem
    seconds: float
    apart: float = 0.0


def fit(some: Sequence[Sample], dense: bool = False) -> Line:
    """The line of constants of one method."""
    problems = [s.problem for s in some]
    knots = tuple(sorted({p.tokens for p in problems}))
    x = np.array([estimate.features(knots, p) for p in problems])
    if dense:
        x = x[:, : -len(knots) - 1]
    if len({(p.rows, p.cols) for p in problems}) == 1:  # then nobody knows which part of the time does not grow with the elements
        n = len(knots)  # of the features those of the elements by tokens stay: n, and n that depend on density
        x[:, [0, *range(n + 1, n + 5), *range(2 * n + 5, x.shape[1])]] = 0.0
    x *= 1e-9 / np.array([[s.seconds] for s in some])
    wanted = np.array([(s.seconds - s.apart) / s.seconds for s in some])
    scale = np.maximum(np.linalg.norm(x, axis=0), 1e-30)
    weight = np.ones(len(some))
    for _ in range(8):
        found, _ = nnls(weight[:, None] * x / scale, weight * wanted, maxiter=1000)
        errors = x @ (found / scale) - wanted
        weight = (1 + (errors / HALF_WEIGHT) ** 2) ** -0.25
    ns = tuple(float(f"{v:.3g}") for v in found / scale)
    densities, least = [p.n / p.m for p in problems], min(p.rows * p.cols for p in problems) // NEAR
    return Line(knots, ns, min(densities), max(densities), len(some), least)


def lines(some: Iterable[Observation]) -> dict[str, Lines]:
    """The constants of every kind.

    They are fitted twice. Methods of a case take turns, so what made all of them slower or faster than their lines, such as a core that
    another process took, is no property of the methods: the second fit is of times without it. Of weights still smaller than the smallest
    that any kind has timed, the line with these says what there is to say.
    """
    some = list(some)
    first = _lines(some)
    found = _lines([replace(c, seconds={what: took / _slower(c, first) for what, took in c.seconds.items()}) for c in some])
    least = {name: min(own[name].least for own in found.values() if name in own) for own in found.values() for name in own}
    return {
        kind: {name: line._replace(least=0) if line.least == least[name] else line for name, line in own.items()}
        for kind, own in found.items()
    }


def _slower(case: Observation, rates: Rates) -> float:
    """How many times as long as their lines say the GEMMs of a case took: the geometric mean; 1 where only one was timed."""
    took = {what: seconds for what, seconds in case.seconds.items() if not what.startswith("make")}
    if len(took) < 2:
        return 1.0
    own, p = rates[case.kind], case.problem
    errors = (math.log(seconds / (own[estimate.named_line(p, what)].seconds(p) + _making(own, p, what))) for what, seconds in took.items())
    return math.exp(sum(errors) / len(took))


def _making(own: Lines, p: Problem, what: str) -> float:
    """Seconds to make ĝ in wgrad, by the lines of one kind."""
    made = own.get(estimate.named_line(p, f"make {'dense' if what == DENSE else 'packed'}")) if p.role == "wgrad" else None
    return made.seconds(estimate.of_making(p)) if made else 0.0


def _lines(some: Sequence[Observation]) -> dict[str, Lines]:
    making: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    gemms: dict[tuple[str, str], list[tuple[Problem, float, str]]] = defaultdict(list)
    for c in some:
        for what, seconds in c.seconds.items():
            key = c.kind, estimate.named_line(c.problem, what)
            if what.startswith("make"):
                making[key].append(Sample(estimate.of_making(c.problem), seconds))
            else:
                gemms[key].append((c.problem, seconds, what))
    found: dict[str, Lines] = defaultdict(dict)
    for (kind, name), samples in making.items():
        found[kind][name] = fit(samples)
    for (kind, name), group in gemms.items():
        samples = [Sample(p, seconds, min(seconds, _making(found[kind], p, what))) for p, seconds, what in group]
        found[kind][name] = fit(samples, group[0][2] == DENSE)
    return {kind: dict(sorted(found[kind].items())) for kind in sorted(found)}


def text(rates: Rates) -> str:
    """The file of constants."""
    kinds = (
        f"{json.dumps(kind)}: {{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(line)}" for name, line in some.items()) + "\n}"
        for kind, some in rates.items()
    )
    return "{\n" + ",\n".join(kinds) + "\n}\n"


def differing(rates: Rates, some: Iterable[Observation]) -> list[str]:
    """The lines of ``estimate.rates`` that are not those of ``rates``: missing or more, of other bounds, or over 2 % off somewhere.

    Constants themselves may differ: with fewer rows than constants many fit equally well, and rounding, so the CPU, decides among them.
    """
    old = {(kind, name): line for kind, own in estimate.rates().items() for name, line in own.items()}
    new = {(kind, name): line for kind, own in rates.items() for name, line in own.items()}
    found = {
        key for key in old.keys() | new.keys() if key not in old or key not in new or old[key]._replace(ns=()) != new[key]._replace(ns=())
    }
    for c in some:
        for what in c.seconds:
            key = c.kind, estimate.named_line(c.problem, what)
            p = estimate.of_making(c.problem) if what.startswith("make") else c.problem
            if key not in found and not math.isclose(old[key].seconds(p), new[key].seconds(p), rel_tol=0.02, abs_tol=1e-9):
                found.add(key)
    return sorted(map(" ".join, found))


# ---- the regret


@contextmanager
def on(kind: str, rates: Rates | None = None) -> Iterator[None]:
    """Inside, the estimate is that of a kind of machine, with these constants."""
    constants = rates or estimate.rates()
    estimate.nearest.cache_clear()
    with patch.object(estimate, "machine", lambda device: kind), patch.object(estimate, "rates", lambda: constants):
        yield
    estimate.nearest.cache_clear()


def choice(p: Problem, methods: Iterable[str]) -> str:
    """The method that the estimate takes."""
    return min(methods, key=lambda method: estimate.seconds(method, p) * estimate.margin(method, p))


class Regret(NamedTuple):
    """What the choice cost in one case: the chosen method's time over that of the fastest with a row, and over dense's; NaN if the chosen
    method has no row."""

    case: Observation
    chosen: str
    over_best: float
    over_dense: float


def regrets(some: Sequence[Observation], rates: Rates | None = None, dense: bool = True) -> list[Regret]:
    """The regret of each case of which the sparse kernel was timed, by a choice among all methods, with a dense layout or without."""
    found = []
    for c in some:
        methods = c.methods(dense)
        if math.isnan(methods[SPARSE]) or DENSE not in c.seconds:
            continue
        with on(c.kind, rates):
            chosen = choice(c.problem._replace(forms=("dense", "rows") if dense else ("rows",)), methods)
        took, best = methods[chosen], min(seconds for seconds in methods.values() if not math.isnan(seconds))
        found.append(Regret(c, chosen, took / best, took / c.seconds[DENSE]))
    return found


class Summary(NamedTuple):
    """The regret of many cases, and how many of them chose a method without a row, whose regret nobody knows."""

    cases: int
    median: float
    p95: float
    most: float
    slower: int
    unknown: int


def summary(some: Sequence[Regret]) -> Summary:
    """Median, 95th percentile and largest regret, and how many cases were slower than dense by more than 5 %."""
    each = sorted(r.over_best for r in some if not math.isnan(r.over_best)) or [math.nan]
    slower, unknown = sum(r.over_dense > 1.05 for r in some), sum(math.isnan(r.over_best) for r in some)
    return Summary(len(some), each[len(each) // 2], each[int(0.95 * (len(each) - 1))], each[-1], slower, unknown)


def table(some: Sequence[Observation]) -> str:
    """The regret as a table, a line for each kind of machine, with a dense layout, and for fprop without, as in a ``CompressedLinear``."""
    groups: dict[tuple[str, bool], list[Regret]] = defaultdict(list)
    for dense in (True, False):
        for r in regrets([c for c in some if dense or c.problem.role == "fprop"], dense=dense):
            groups[r.case.kind, dense].append(r)
    rows = [["", "weight", "GEMMs", "median", "95th percentile", "largest", "slower than dense by over 5 %", "chosen without a row"]]
    for (name, dense), group in sorted(groups.items(), key=lambda item: (item[0][0], not item[0][1])):
        s = summary(group)
        known = (f"{value:.2f}" if not math.isnan(value) else "" for value in s[1:4])
        kept = "dense and compressed" if dense else "compressed"
        rows.append([name, kept, str(s.cases), *known, str(s.slower), str(s.unknown)])
    return tables.table(rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the constants; with ``--check`` write nothing, name the lines that are not those of the rows, and return 1 if there are any."""
    parser = argparse.ArgumentParser(prog="python -m bench.fit_rates", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 where rates.json is not what the rows give")
    args = parser.parse_args(argv)
    rows = cases()
    new = lines(rows)
    if args.check:
        wrong = differing(new, rows)
        print(*wrong, sep="\n", end="\n" if wrong else "")
        return int(bool(wrong))
    RATES.write_text(text(new), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
