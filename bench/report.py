"""Turns the rows of ``bench/results`` into ``bench/results/README.md`` and figures: ``python -m bench.report``; ``--check`` compares only.

``--add`` first adds the rows of CSV files in a folder, or in the archive of ``python -m bench.gpu --out DIR``, perhaps of another machine.
"""

from __future__ import annotations

import argparse
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

from . import figures, tables, targets
from .rows import RESULTS, append, device_of, from_text, slug
from .rows import load as load_csv
from .tables import Rows

LEFT_OUT = {"step_clamp.csv", "loss_curves.csv"}
"""Evidence for a default, and loss curves: nothing that a user chooses by."""

NOTHING = "No measurements are committed yet."
HEAD = """# Measurements

Written by `python -m bench.report` from the CSV files of this folder; measured by `python -m bench.run`, which first compares every
result with the reference. Medians with the 20th and 80th percentile; a ratio is the median of the ratios of single rounds, in each of
which everybody took one turn. Shapes are out × in, tokens first.

* On a CPU a call is timed as a model makes it: straight after an elementwise op of torch's, in turn with the other providers, whose data
  are in the caches. Older rows, of GEMMs with `x dense` and of layers with `time over dense`, repeated a call for 6 ms before the one
  that counts, and MKL was their only opponent; no target reads them.
* On a GPU a turn is a batch of calls after as many that do not count, timed by the device's own events while the host is ahead of it, so
  that no figure has launching in it; the last-level cache is four times too small for the data, or for the copies of it that take turns.
  `us beyond a no-op` is the host's time of a call that nobody waits for, `us beyond torch's kernels` its share of replaying a CUDA graph.
* `x fastest dense`: times as fast as the fastest of torch's dense GEMMs, by MKL or oneDNN, for 16-bit weights in float32 too, `x packed
  dense` as the fastest with its weight packed once, as in a frozen graph. `x dense`, `x eager`: times as fast as that. `time over ...`:
  share of its time.
* `share of roofline`: the time that bytes over bandwidth or FLOPs over the rate of FMAs allow, whichever is longer, over the time taken.
  The bandwidth is the best of the same rounds, where torch also only reads as many bytes; the rate that of torch's fastest large GEMM in
  the same run.
  `x roofline allows`: how many times as fast as dense ours may be; a *slow opponent* is one that ours beat by more.
* `share of copy`, `share of clone`: bytes that must be moved over time, against torch's `copy_` or `clone` in the same round; for ops that
  stream it is the share of the roofline.
* `share of matmul`: GEMMs that are not skipped over time, against torch's rate at 2048×2048×2048 (GPU: 8192) in the same run.
* `packed bytes over cache`: below 1, the packed weight fits the last-level cache."""


def load(folder: Path) -> Rows:
    """The rows of the CSVs in ``folder`` that are shown, in the order of files and lines.

    Left out are what a compiler made of kernels, and the thousands of rows of single methods, of which ``bench.fit_rates`` shows the sum.
    """
    rows = [r for path in sorted(folder.glob("*.csv")) if path.name not in LEFT_OUT for r in load_csv(path) if "op" in r]
    return [r for r in rows if not r["op"].startswith("method(")]


def page(rows: Rows, drawn: list[str], reasons: Path) -> str:
    """``bench/results/README.md``: the trained models, then per machine its targets, its figures (those in ``drawn``) and every case."""
    speeds = tables.by_machine(r for r in rows if r["op"] != "train")
    trained = tables.by_machine(r for r in rows if r["op"] == "train")
    parts = [HEAD] if rows else [HEAD, NOTHING]
    if trained:
        parts += ["## Trained models", *(f"{tables.stamp(mine)}\n\n{tables.plain(mine)}" for mine in trained.values())]
    for machine, mine in speeds.items():
        parts += [f"## {machine}", tables.stamp(mine)]
        verdicts = targets.verdicts(mine, device_of(machine), targets.load_reasons(reasons, machine))
        if any(v.measured for v in verdicts):
            parts.append(tables.targets_markdown(verdicts))
        for name, title in figures.TITLES.items():
            if f"{slug(machine)}-{name}.svg" in drawn:
                parts.append(f"![{title}](figures/{slug(machine)}-{name}.svg)")
        parts.append(tables.details(mine))
    return "\n\n".join(parts) + "\n"


def add(source: Path, results: Path) -> None:
    """Add the rows of the CSV files in a folder, or in an archive that has them in ``rows``."""
    if source.is_file():
        with tarfile.open(source) as archive, TemporaryDirectory() as folder:
            archive.extractall(folder, [m for m in archive if m.isfile() and Path(m.name).match("rows/*.csv")], filter="data")
            return add(Path(folder, "rows"), results)
    for path in sorted(source.glob("*.csv")) if source.resolve() != results.resolve() else ():
        append([from_text(r) for r in load_csv(path)], results / path.name)


def main(argv: list[str] | None = None, results: Path = RESULTS) -> int:
    """Write the page and the figures; with ``--check`` write nothing and return 1 when the page is not up to date."""
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 when the page is not up to date")
    parser.add_argument("--add", type=Path, metavar="PATH", help="first add the rows of a folder's CSV files, or an archive's")
    args = parser.parse_args(argv)
    if args.add:
        add(args.add, results)
    rows = load(results)
    if not args.check:
        for machine, mine in tables.by_machine(rows).items():
            figures.draw(mine, results / "figures", slug(machine))
    drawn = [path.name for path in (results / "figures").glob("*.svg")]
    path, new = results / "README.md", page(rows, drawn, results / targets.REASONS.name)
    stale = not path.exists() or path.read_text(encoding="utf-8") != new
    if args.check:
        if stale:
            print(f"{results.name}/README.md does not show the rows of {results.name}/; run: python -m bench.report")
        return int(stale)
    path.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
