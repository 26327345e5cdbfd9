"""Rows as tables, for ``bench/results/README.md`` and the terminal: the speed targets, and every case in full."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from . import shapes
from .registry import ALLOWED, FASTEST, NOISE, SHORT, Spec, Verdict

Rows = list[dict[str, str]]
OURS = "nmkernels"
SLOW = "slow opponent"
"""Marks a speed-up that is more than the roofline allows: the dense GEMM is further from its roofline than ours."""

LISTED = 4
"""Up to this many cases of a target are listed; more are summarised by their range and the worst."""


def stamp(rows: Rows) -> str:
    """Machine, versions, dates and commits of rows of one machine."""
    versions, dates, commits = (", ".join(sorted({r[k] for r in rows})) for k in ("versions", "date", "commit"))
    return f"**{rows[0]['machine']}** ({versions}; {dates}; commit {commits})"


def by_machine(rows: Iterable[dict[str, str]]) -> dict[str, Rows]:
    """The rows of each machine, in the order in which the machines first appear."""
    found: dict[str, Rows] = {}
    for r in rows:
        found.setdefault(r["machine"], []).append(r)
    return found


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


def between(text: str, begin: str, end: str, new: str) -> str:
    """``text`` with the part between two markers replaced; ``ValueError`` unless it has the first one once, and the other one after it."""
    head, _, tail = text.partition(begin)
    if begin in tail or end not in tail:
        raise ValueError(f"the text must have {begin!r} once, followed by {end!r}")
    return f"{head}{begin}\n\n{new}\n\n{tail[tail.index(end) :]}"


def update(page: Path, pieces: Mapping[tuple[str, str], str], check: bool, command: str) -> int:
    """Write each piece between its markers, where the page has them; with ``check`` write nothing and return 1 if one is not up to date."""
    old = new = page.read_text(encoding="utf-8")
    for (begin, end), text in pieces.items():
        new = between(new, begin, end, text) if begin in new else new
    if check and new != old:
        print(f"{page.name} does not show the rows; run: python -m {command}")
        return 1
    page.write_text(new, encoding="utf-8")
    return 0


# ---- targets


def targets_markdown(verdicts: Iterable[Verdict]) -> str:
    """The table of the speed targets; missed ones are bold, with their reason."""
    head = ["what", "against", "target", "measured", "share of roofline", ""]
    cells = ((v.target.what, v.target.against, _goal(v), _measured(v, "**"), _roofline(v), _state(v, "**")) for v in verdicts)
    return table([head, *cells])


def targets_text(verdicts: Iterable[Verdict]) -> str:
    """The same as plain text."""
    lines = [f"{_state(v, ''):<24} {v.target.what}: {_measured(v, '!')}; {_goal(v)}" for v in verdicts if v.measured]
    met = sum(v.state in ("met", "stretch") for v in verdicts)
    return "\n".join([*lines, f"{met} of {len(list(verdicts))} targets met"])


def _goal(v: Verdict) -> str:
    t = v.target
    sign = "≥" if t.higher else "≤"
    stretch = f" ({t.stretch:g})" if t.stretch is not None else ""
    return f"{sign} {t.bound:g}{stretch}"


def _measured(v: Verdict, mark: str) -> str:
    if not v.measured:
        return ""
    label = _labels(v.target.specs)

    def cell(spec: Spec) -> str:
        value = v.measured[spec]
        number = f"{value:.2f}" if v.target.meets(value) else f"{mark}{value:.2f}{mark}"
        slow = f" ({SLOW}, {v.allowed[spec]:.2f} is allowed)" if v.slow_opponent(spec) else ""
        return f"{label[spec]} {number}{slow}".strip()

    if len(v.measured) <= LISTED:
        return ", ".join(cell(spec) for spec in v.measured)
    worst = (min if v.target.higher else max)(v.measured, key=lambda spec: v.measured[spec])
    values = v.measured.values()
    return f"{min(values):.2f} to {max(values):.2f}; worst {cell(worst)}"


def _roofline(v: Verdict) -> str:
    """The share of the roofline of each case, or their range."""
    shares = [v.roofline[spec] for spec in v.measured if spec in v.roofline]
    if len(shares) > 2:
        return f"{min(shares):.2f} to {max(shares):.2f}"
    return ", ".join(f"{share:.2f}" for share in shares)


def _labels(specs: tuple[Spec, ...]) -> dict[Spec, str]:
    """A short label of each case: the properties in which the cases differ."""
    parts = {
        "op": lambda s: s.op.replace("nm_", ""),
        "dtype": lambda s: SHORT[s.dtype],
        "matrix": lambda s: f"{s.rows}×{s.cols}",
        "tokens": lambda s: f"{s.tokens} token{'s' if s.tokens != 1 else ''}",
    }
    differ = [part for part in parts.values() if len({part(s) for s in specs}) > 1]
    return {s: " ".join(part(s) for part in differ) for s in specs}


def _state(v: Verdict, mark: str) -> str:
    if v.state == "missed":
        return f"{mark}missed{mark}" + (f": {v.reason}" if v.reason and mark else "")
    if v.state == "unmeasured":
        return "met where measured" if v.measured else "unmeasured"
    return "met, stretch goal too" if v.state == "stretch" else "met"


# ---- every row


def details(rows: Rows) -> str:
    """One table per op: a line for each case and provider of ours, with the times of the others in further columns."""
    parts = []
    for op, group in groupby(sorted(rows, key=lambda r: r["op"]), key=lambda r: r["op"]):
        parts.append(f"### {op}\n\n{_table(list(group))}")
    return "\n\n".join(parts)


def _table(rows: Rows) -> str:
    metrics = list(dict.fromkeys(r["metric"] for r in rows if r["metric"] != "us"))
    mine = any(r["provider"].startswith(OURS) for r in rows)
    others = list(dict.fromkeys(r["provider"] for r in rows if mine and not r["provider"].startswith(OURS)))
    found = {(_case(r), r["provider"], r["metric"]): r for r in rows}
    head = ["case", "provider", "µs (p20 to p80)", *metrics, *(f"{name}, µs" for name in others)]
    lines = [head]
    for case, provider in dict.fromkeys((_case(r), r["provider"]) for r in rows if r["provider"] not in others):
        time = found.get((case, provider, "us"))
        cells = [_title(case), provider, spread(time) if time else ""]
        cells += [_value(found.get((case, provider, metric))) for metric in metrics]
        if FASTEST in metrics and slow(found.get((case, provider, FASTEST)), found.get((case, provider, ALLOWED))):
            cells[3 + metrics.index(FASTEST)] += f" ({SLOW})"
        cells += [_value(found.get((case, name, "us"))) for name in others]
        lines.append(cells)
    # the dense baseline too has rows for the parts of a step
    for case, provider in dict.fromkeys((_case(r), r["provider"]) for r in rows if r["provider"] in others and r["metric"] != "us"):
        values = [_value(found.get((case, provider, metric))) for metric in ("us", *metrics)]
        lines.append([_title(case), provider, *values, *[""] * len(others)])
    return table(lines)


def slow(speed: dict[str, str] | None, allowed: dict[str, str] | None) -> bool:
    """Whether a speed-up is more than the roofline allows."""
    return bool(speed and allowed and float(speed["p50"]) > NOISE * float(allowed["p50"]))


def _case(row: dict[str, str]) -> tuple[str, str, str]:
    return row["pattern"], row["dtype"], row["shape"]


def _title(case: tuple[str, str, str]) -> str:
    pattern, dtype, shape = case
    layers = shapes.names("x".join(shape.split("x")[-2:]))
    named = f" ({', '.join(layers)})" if layers else ""
    return " ".join(part for part in (pattern, SHORT.get(dtype, dtype), shape) if part) + named


def _value(row: dict[str, str] | None) -> str:
    return number(row["p50"]) if row else ""


def spread(row: dict[str, str]) -> str:
    """The median, with the 20th and 80th percentile if they differ."""
    return number(row["p50"]) + (f" ({number(row['p20'])} to {number(row['p80'])})" if row["p20"] != row["p80"] else "")


def number(text: str) -> str:
    """Three or four digits, never with an exponent."""
    value = float(text)
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 1 else f"{value:.4g}"
