"""Turns the rows of ``bench/results`` into tables and figures: ``python -m bench.report``, or ``--check`` to compare only.

``--add DIR`` first adds the rows that ``python -m bench.gpu --out DIR`` left there, perhaps on another machine. The README gets the speed
targets, ``bench/results/README.md`` every case, ``bench/results/figures`` the figures.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from . import figures, tables, targets
from .rows import RESULTS, append, device_of, from_text, slug
from .rows import load as load_csv
from .tables import Rows

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- results: written by python -m bench.report -->", "<!-- results end -->"
LEFT_OUT = {"step_clamp.csv", "loss_curves.csv", "triton_resources.csv", "cuda_resources.csv"}
"""Evidence for a default, loss curves, and what a compiler made of kernels; the README's table is for figures that a user chooses by."""

NOTHING = "No measurements are committed yet."
HEAD = """# Measurements

Written by `python -m bench.report` from the CSV files of this folder; measured by `python -m bench.run`, which first compares every
result with the reference. Medians with the 20th and 80th percentile; a ratio is the median of the ratios of single rounds, in each of
which everybody took one turn. Shapes are out × in, tokens first.

* A turn begins with calls that do not count: each provider is timed as if it were called again and again. `x dense, alternating` is the
  ratio of calls that follow one another, the other's weights in the cache and torch's threads still spinning: so it goes in a model
  larger than the cache.
* On a GPU a turn is a batch of calls after as many that do not count, timed by the device's own events while the host is ahead of it, so
  that no figure has launching in it; the last-level cache is four times too small for the data, or for the copies of it that take turns.
  `us beyond a no-op` is the host's time of a call that nobody waits for, `us beyond torch's kernels` its share of replaying a CUDA graph.
* `x dense`, `x eager`: times as fast as that. `time over ...`: share of its time.
* `share of copy`, `share of clone`: bytes that must be moved over time, against torch's `copy_` or `clone` in the same round.
* `share of matmul`: products that are not skipped over time, against torch's rate at 2048×2048×2048 (GPU: 8192) in the same run.
* `packed bytes over cache`: below 1, the packed weight fits the last-level cache."""


def load(folder: Path) -> Rows:
    """The rows of the CSVs in ``folder`` that are shown, in the order of file names and lines."""
    return [r for path in sorted(folder.glob("*.csv")) if path.name not in LEFT_OUT for r in load_csv(path)]


def front(rows: Rows, reasons: dict[str, str]) -> str:
    """What the README shows: per machine its speed targets, where it has rows of them, and what is no speed."""
    parts = []
    for mine in tables.by_machine(rows).values():
        speeds, rest = _split(mine)
        verdicts = targets.verdicts(speeds, device_of(mine[0]["machine"]), reasons)
        if any(v.measured for v in verdicts):
            parts.append(f"{tables.stamp(speeds)}\n\n{tables.targets_markdown(verdicts)}")
        if rest:
            parts.append(f"{tables.stamp(rest)}\n\n{tables.plain(rest)}")
    # tables of targets first
    parts.sort(key=lambda part: "| target |" not in part)
    return "\n\n".join([*parts, "Every case, and figures: [bench/results](bench/results/README.md)."]) if rows else NOTHING


def full(rows: Rows, drawn: list[str]) -> str:
    """``bench/results/README.md``: every speed of every machine; ``drawn`` are names of the figures there are."""
    parts = [HEAD]
    for machine, mine in tables.by_machine(rows).items():
        speeds, _ = _split(mine)
        if speeds:
            pictures = [
                f"![{figures.TITLES[name]}](figures/{slug(machine)}-{name}.svg)"
                for name in figures.TITLES
                if f"{slug(machine)}-{name}.svg" in drawn
            ]
            parts += [f"## {machine}", tables.stamp(speeds), *pictures, tables.details(speeds)]
    return "\n\n".join(parts if len(parts) > 1 else [*parts, NOTHING]) + "\n"


def _split(rows: Rows) -> tuple[Rows, Rows]:
    """Speeds, and figures of trained models."""
    return [r for r in rows if r["op"] != "train"], [r for r in rows if r["op"] == "train"]


def insert(text: str, table: str) -> str:
    """``text`` with what stands between the two markers replaced; ``ValueError`` unless it has each once, in order."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"the text must have the lines {BEGIN!r} and {END!r}, once each and in this order")
    return f"{text[: text.index(BEGIN)]}{BEGIN}\n\n{table}\n\n{text[text.index(END) :]}"


def main(argv: list[str] | None = None, readme: Path = README, results: Path = RESULTS) -> int:
    """Write tables and figures; with ``--check`` write nothing and return 1 when a table is not up to date."""
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 when a table is not up to date")
    parser.add_argument("--add", type=Path, metavar="DIR", help="first add the rows of the CSV files in DIR")
    args = parser.parse_args(argv)
    for path in sorted(args.add.glob("*.csv")) if args.add and args.add.resolve() != results.resolve() else ():
        append([from_text(r) for r in load_csv(path)], results / path.name)
    rows = load(results)
    if not args.check:
        for machine, mine in tables.by_machine(rows).items():
            figures.draw(mine, results / "figures", slug(machine))
    drawn = [path.name for path in (results / "figures").glob("*.svg")]
    new = {results / "README.md": full(rows, drawn)}
    if BEGIN in (text := readme.read_text(encoding="utf-8")):
        new[readme] = insert(text, front(rows, targets.load_reasons(results / targets.REASONS.name)))
    stale = [path for path, text in new.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if args.check:
        for path in stale:
            print(f"{path.parent.name}/{path.name} does not show the rows of {results.name}/; run: python -m bench.report")
        return int(bool(stale))
    for path in stale:
        path.write_text(new[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
