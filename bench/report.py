"""Writes ``bench/results/README.md`` and the figures from the rows of ``bench/results``: ``python -m bench.report``; ``--check`` compares.

``--add`` first adds the rows of the CSV files in a folder, or in the archive of ``python -m bench.gpu --out DIR``.
"""

from __future__ import annotations

import argparse
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

from . import figures, tables, targets
from .rows import RESULTS, Row, append, device_of, slug, typed
from .rows import load as load_csv
from .tables import Rows

LEFT_OUT = {"step_clamp.csv", "loss_curves.csv", "oneshot_layers.csv"}
"""Evidence for a default, and loss curves, which are not shown; and what the guide on one-shot pruning shows."""

HEAD = """# Measurements

Written by `python -m bench.report` from the CSV files of this folder. They are measured by `python -m bench.run`, which first compares
every result with the reference. Values are medians with the 20th and 80th percentile; a ratio is the median of the ratios within each
round, in which every provider is timed once. Shapes are out × in, tokens first.

* On a CPU a call is timed as in a model: directly after an elementwise torch op, alternating with the other providers, whose data are in
  the caches. In older rows, of GEMMs with `x dense` and of layers with `time over dense`, a call was repeated for 6 ms before the timed
  one, and MKL was the only opponent; no target uses them.
* On a GPU a batch of calls is timed by CUDA events, after a warm-up batch of the same size and with the host ahead of the device, so that
  launching is not included. The data, or the copies of it that are used in rotation, are four times as large as the last-level cache.
  `us beyond a no-op` is the host time of an asynchronous call, `us beyond torch's kernels` its time in the replay of a CUDA graph.
* `x fastest dense`: speed-up over torch's fastest dense GEMM, with MKL or oneDNN, for 16-bit weights also in float32. `x packed dense`:
  the same with the dense weight packed once, as in a frozen graph. `x dense`, `x eager`: speed-up over those. `time over ...`: time as a
  multiple of theirs.
* `share of roofline`: the time that the roofline allows (bytes over bandwidth, or FLOPs over the rate of FMAs, whichever is longer) over
  the measured time. The bandwidth is the best of the same rounds, including a torch op that only reads as many bytes; the rate is that of
  torch's fastest large GEMM in the same run.
  `x roofline allows`: the speed-up over dense that the roofline allows; a *slow opponent* is a dense GEMM that ours beats by more.
* `share of copy`, `share of clone`: bytes that must be moved, over time, relative to torch's `copy_` or `clone` in the same round; for
  memory-bound ops this is the share of the roofline.
* `share of matmul`: FLOPs that are not skipped, over time, relative to torch's rate at 2048×2048×2048 (GPU: 8192) in the same run.
* `packed bytes over cache`: below 1, the packed weight fits in the last-level cache."""


def load(folder: Path) -> Rows:
    """The rows of the CSVs in ``folder`` that are shown, in the order of files and lines.

    Compiler reports are left out, and the thousands of rows of single methods, which ``bench.fit_rates`` summarises.
    """
    rows = [r for path in sorted(folder.glob("*.csv")) if path.name not in LEFT_OUT for r in load_csv(path) if "op" in r]
    return [r for r in rows if not r["op"].startswith("method(")]


def page(rows: Rows, drawn: list[str], reasons: Path) -> str:
    """``bench/results/README.md``: for each machine its targets, figures (those in ``drawn``) and all cases."""
    parts = [HEAD] if rows else [HEAD, "No measurements are committed yet."]
    for machine, mine in tables.by_machine(rows).items():
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
    """Add the rows of the CSV files in a folder, or in the folder ``rows`` of an archive."""
    if source.is_file():
        with tarfile.open(source) as archive, TemporaryDirectory() as folder:
            archive.extractall(folder, [m for m in archive if m.isfile() and Path(m.name).match("rows/*.csv")], filter="data")
            return add(Path(folder, "rows"), results)
    for path in sorted(source.glob("*.csv")) if source.resolve() != results.resolve() else ():
        append(typed(Row, load_csv(path)), results / path.name)


def main(argv: list[str] | None = None, results: Path = RESULTS) -> int:
    """Write the page and the figures; with ``--check`` write nothing and return 1 if the page is not up to date."""
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if the page is not up to date")
    parser.add_argument("--add", type=Path, metavar="PATH", help="first add the rows of the CSV files in a folder or archive")
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
