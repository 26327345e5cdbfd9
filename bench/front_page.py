"""Writes the tables in ``README.md`` and the documents from committed rows: ``python -m bench.front_page``; ``--check`` only compares.

The README's measurements have a column for every CPU whose calls were timed as in a model: those rows have the ratio to the fastest dense
GEMM. A second table has a column for every GPU. The page on performance has a tab for each machine, the page on what pays a table of
integers as values, and the page on recipes the matrix of ``bench/accuracy``; what to take for which purpose is in the README and there.
"""

from __future__ import annotations

import argparse
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import figures, fit_rates, tables, targets
from .accuracy import page as accuracy_page
from .accuracy import sizes
from .cases import ffn
from .registry import ALLOWED, CPU, FASTEST, NOISE
from .report import load
from .rows import RESULTS, device_of, slug
from .tables import Rows

ROOT = Path(__file__).parents[1]
README, RECIPES, PERFORMANCE = ROOT / "README.md", ROOT / "docs/methods/index.md", ROOT / "docs/performance.md"
PAYS = ROOT / "docs/pays.md"
Key = tuple[str, str, str, str, str, str]


@dataclass(frozen=True)
class Line:
    """A line of a table: what is measured, against what, the key of the row, the format of its median, and whether the README has it.

    ``allowed`` is the speed-up that bytes or FLOPs allow, where no row says it.
    """

    what: str
    against: str
    row: Key
    form: str = "{:.2f} ×"
    front: bool = True
    allowed: float = math.inf

    def cell(self, medians: Mapping[Key, str]) -> str:
        """The median, and the speed-up that is allowed if that is less: the opponent was slow then."""
        value, allowed = float(medians[self.row]), self.allowed
        if self.row[5] == FASTEST:
            allowed = float(medians.get((*self.row[:5], ALLOWED), allowed))
        return self.form.format(value) + (f" ({tables.SLOW}, {allowed:.2f} is allowed)" if value > NOISE * allowed else "")


def _linear(what: str, pattern: str, dtype: str, tokens: int, front: bool = True) -> Line:
    key = ("nm_linear", "nmkernels cpu", pattern, dtype, f"{tokens}x4096x4096", FASTEST)
    return Line(f"`nm.ops.linear`, 4096×4096, {what}", "torch's fastest dense GEMM", key, front=front)


DENSE, COPY = "dense, `AdamW(fused=True)`", "bandwidth of `copy_`"
ALONE, EAGER = "`AdamW(fused=True)`, which does neither", "`AdamW(fused=True)`, eager mask and decay"
STREAM = ("2:4", "float32", "4096x11008")
STEP = "`MaskedAdamW` step with SR-STE decay and new mask, 4096×11008"
BLOCK = ("2:4", "float32", "2048x4096x1024")
LINES = (
    _linear("1 token", "2:4", "float32", 1),
    _linear("16 tokens", "2:4", "float32", 16, front=False),
    _linear("256 tokens", "2:4", "float32", 256),
    _linear("16 tokens, 1:8", "1:8", "float32", 16),
    _linear("1 token, bf16", "2:4", "bfloat16", 1),
    _linear("256 tokens, bf16", "2:4", "bfloat16", 256),
    _linear("256 tokens, 1:8, bf16", "1:8", "bfloat16", 256, front=False),
    Line(
        "training step of an FFN 1024-4096-1024 under S-STE, 2048 tokens",
        DENSE,
        ("ffn", "nmkernels sste, step", *BLOCK, "x dense"),
        allowed=ffn.allowed("sste", 2),
    ),
    Line("the same under FST", DENSE, ("ffn", "nmkernels fst, step", *BLOCK, "x dense"), front=False, allowed=ffn.allowed("fst", 2)),
    Line(
        "generating text at batch 1, GPT of width 1024",
        "dense, as PyTorch runs it",
        ("generate", "nmkernels CompressedLinear", "2:4", "float32", "16 tokens, GPT 1024x4", "x dense"),
        allowed=4 * 32 / (2 * (32 + 2)),  # bits of a group: 4 weights, or 2 values with an index each
    ),
    Line(STEP, ALONE, ("nm_masked_adamw_", "nmkernels cpu", *STREAM, "time over fused AdamW"), "{:.2f} of its time"),
    Line("the same", EAGER, ("nm_masked_adamw_", "nmkernels cpu", *STREAM, "x AdamW + eager mask"), "{:.0f} ×", front=False),
    Line("`nm.ops.compress` of 4096×11008, `out=`", COPY, ("nm_compress", "nmkernels cpu", *STREAM, "share of copy"), "{:.2f} of it"),
)
"""On a CPU: 2:4 and float32 unless said."""

ONE, MANY, MORE, NARROW, CUBE = (
    ("2:4", "bfloat16", shape) for shape in ("1x14336x4096", "4096x14336x4096", "16384x14336x4096", "4096x4096x1024", "8192x8192x8192")
)
LLAMA = ("2:4", "bfloat16", "4096 tokens, Llama-3-8B x4")
DECODED = ("2:4", "bfloat16", "1 tokens, Llama-3-8B x4")
CAPTURED = "dense in a CUDA graph"
LINES_GPU = (
    Line("training step of an FFN 4096-14336-4096 under S-STE, 4096 tokens", DENSE, ("ffn", "nmkernels sste, step", *MANY, "x dense")),
    Line("the same under FST", DENSE, ("ffn", "nmkernels fst, step", *MANY, "x dense")),
    Line("the same under FST, 16384 tokens", DENSE, ("ffn", "nmkernels fst, step", *MORE, "x dense")),
    Line(
        "the same under FST, 1024-4096-1024, in a CUDA graph",
        CAPTURED,
        ("ffn(captured)", "nmkernels fst, step (captured)", *NARROW, "x dense"),
    ),
    Line(
        "training step of four layers of Llama-3-8B under S-STE, 4096 tokens",
        DENSE,
        ("model_step(sste)", "nmkernels sste, step", *LLAMA, "x dense"),
    ),
    Line("the same under FST", DENSE, ("model_step(fst)", "nmkernels fst, step", *LLAMA, "x dense")),
    Line("the next token of four layers of Llama-3-8B, batch 1", CAPTURED, ("decode", "nmkernels 2:4 (captured)", *DECODED, "x dense")),
    Line("the same with 4-bit values", CAPTURED, ("decode", "nmkernels 2:4 in int4 (captured)", *DECODED, "x dense")),
    Line(
        "FFN 4096-14336-4096 under S-STE, 4096 tokens, forward and backward",
        "dense",
        ("ffn", "nmkernels sste, forward+backward", *MANY, "x dense"),
    ),
    Line("GEMM by `wgmma.sp`, 14336×4096, 4096 tokens", "cuBLAS", ("nm_linear(cores)", "nmkernels cuda", *MANY, "x dense")),
    Line("GEMM by `wgmma.sp`, 8192³", "cuBLAS", ("nm_linear(cores)", "nmkernels cuda", *CUBE, "x dense"), front=False),
    Line("GEMM by `wgmma.sp`, 8192³, FP8", "cuBLAS in FP8", ("nm_linear_quantized", "nmkernels cuda", *CUBE, "x float8 dense")),
    Line("`nm.ops.linear`, 14336×4096, 1 token", "cuBLAS", ("nm_linear", "nmkernels cuda", *ONE, "x dense")),
    Line("the same at 1:8", "cuBLAS", ("nm_linear", "nmkernels cuda", "1:8", *ONE[1:], "x dense")),
    Line("the same at 2:4 with 4-bit values", "cuBLAS", ("nm_linear_integers", "nmkernels cuda, int4", *ONE, "x dense")),
    Line(f"{STEP}, fp32", ALONE, ("nm_masked_adamw_", "nmkernels cuda", *STREAM, "time over fused AdamW"), "{:.2f} of its time"),
    Line("the same", EAGER, ("nm_masked_adamw_", "nmkernels cuda", *STREAM, "x AdamW + eager mask"), "{:.0f} ×", front=False),
    Line(
        "`nm.ops.compress` of 8192×16384",
        COPY,
        ("nm_compress", "nmkernels cuda", "2:4", "bfloat16", "8192x16384", "share of copy"),
        "{:.2f} of it",
        front=False,
    ),
)
"""On a GPU: 2:4 and bfloat16 unless said."""


def page(rows: Rows) -> str:
    """The tables of CPUs and of GPUs."""
    found = tables.by_machine(rows)
    cpus = {machine: mine for machine, mine in found.items() if device_of(machine) == "cpu" and _as_in_a_model(mine)}
    gpus = {machine: mine for machine, mine in found.items() if device_of(machine) == "cuda"}
    return "\n\n".join(filter(None, (_table(LINES, cpus, "float32"), _table(LINES_GPU, gpus, "bfloat16"))))


def _table(chosen: Sequence[Line], machines: Mapping[str, Rows], dtype: str) -> str:
    """The README's lines with a column for each machine; empty without rows."""
    chosen = [line for line in chosen if line.front]
    shown = {line.row for line in chosen}
    heads = [f"{machine} ({max((r['date'] for r in mine if _key(r) in shown), default='')})" for machine, mine in machines.items()]
    lines = [[f"what, 2:4 and {dtype} unless said", "against", *heads]]
    columns = [medians(mine) for mine in machines.values()]
    for line in chosen:
        cells = [line.cell(mine) if line.row in mine else "" for mine in columns]
        if any(cells):
            lines.append([line.what, line.against, *cells])
    return tables.table(lines) if len(lines) > 1 else ""


def machines(rows: Rows, results: Path) -> str:
    """A tab for each machine: its measurements, how many targets are met, its figures, and a link to all of its rows."""
    found = tables.by_machine(rows)
    order = sorted(found, key=lambda machine: not _as_in_a_model(found[machine]))
    return "\n\n".join(f'=== "{machine}"\n\n{textwrap.indent(_machine(found[machine], results), "    ")}' for machine in order)


def _machine(rows: Rows, results: Path) -> str:
    machine, values = rows[0]["machine"], medians(rows)
    parts = [f"{tables.stamp(rows)}."]
    chosen, dtype = (LINES, "float32") if device_of(machine) == "cpu" else (LINES_GPU, "bfloat16")
    lines = [[at.what, at.against, at.cell(values)] for at in chosen if at.row in values]
    if lines and (chosen is LINES_GPU or _as_in_a_model(rows)):
        parts.append(tables.table([[f"what, 2:4 and {dtype} unless said", "against", "median"], *lines]))
    measured = [v for v in targets.verdicts(rows, device_of(machine), {}) if v.measured]
    met = sum(v.state in ("met", "stretch") for v in measured)
    score = f"{met} of the {len(measured)} measured targets are met" if measured else "A few rows, none of a target"
    link = "every row, and why targets are missed" if measured else "all of them"
    # the anchor that Markdown gives the heading
    anchor = re.sub(r"[^\w -]", "", machine.lower()).replace(" ", "-")
    parts.append(f"{score}: [{link}](../bench/results/README.md#{anchor}).")
    for name, title in reversed(figures.TITLES.items()):
        if (results / "figures" / f"{slug(machine)}-{name}.svg").exists():
            parts.append(f"![{title}](../bench/results/figures/{slug(machine)}-{name}.svg)")
    return "\n\n".join(parts)


def _as_in_a_model(rows: Rows) -> bool:
    """Whether calls were timed as in a model; older CPU rows were not, and are not comparable."""
    return any(r["metric"] == FASTEST for r in rows)


def medians(rows: Rows) -> dict[Key, str]:
    """The medians of rows by their keys."""
    return {_key(r): r["p50"] for r in rows}


def _key(row: dict[str, str]) -> Key:
    return row["op"], row["provider"], row["pattern"], row["dtype"], row["shape"], row["metric"]


def integers(rows: Rows) -> str:
    """For each CPU a table of the speed-ups of N:M weights in 8 and 4 bits."""
    parts = []
    for machine, mine in tables.by_machine(r for r in rows if r["op"] == "nm_linear_integers").items():
        if device_of(machine) == "cpu":
            parts.append(f"{tables.stamp(mine)}:\n\n{_integers(mine)}")
    return "\n\n".join(parts) or "*Not run yet: `python -m bench.run --op nm_linear_integers`.*"


AGAINST = (
    ("torch's int8", "x weight-only int8"),
    ("torch's int4", "x weight-only int4"),
    ("ours in 16 bits", "x 16 bits"),
    ("dense", "x dense"),
)
"""Heads and metrics of the table of integers."""


def _integers(rows: Rows) -> str:
    found = medians(rows)
    lines = [["weight", "tokens", "values", *(f"against {head}" for head, _ in AGAINST)]]
    for op, provider, pattern, dtype, shape in dict.fromkeys(key[:5] for key in found):
        backend, comma, kind = provider.partition(", int")
        cells = [found.get((op, provider, pattern, dtype, shape, metric)) for _, metric in AGAINST]
        if comma and any(cells):
            tokens, _, weight = shape.partition("x")
            values = f"int{kind}{backend.removeprefix(CPU)}"
            ratios = ["" if cell is None else f"{float(cell):.2f} ×" for cell in cells]
            lines.append([f"{weight.replace('x', '×')} {pattern}", tokens, values, *ratios])
    return tables.table(lines)


def markers(name: str) -> tuple[str, str]:
    """The lines before and after a table."""
    return f"<!-- {name}: written by python -m bench.front_page -->", f"<!-- {name}: end -->"


def main(argv: list[str] | None = None, results: Path = RESULTS, pages: Sequence[Path] = (README, RECIPES, PERFORMANCE, PAYS)) -> int:
    """Write each table between its markers; with ``--check`` write nothing and return 1 if one is not up to date."""
    parser = argparse.ArgumentParser(prog="python -m bench.front_page", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if a table is not up to date")
    args = parser.parse_args(argv)
    rows, accuracy = load(results), accuracy_page.read(results / "accuracy")
    pieces = {
        "measured": page(rows),
        "machines": machines(rows, results),
        "best methods": accuracy.matrix("2:4"),
        "choices": accuracy.choices(),
        "longer runs": accuracy.longer(),
        "smaller dense models": sizes.outcome(accuracy),
        "integers": integers(rows),
        "regret": fit_rates.table(fit_rates.cases(results)),
    }
    marked = {markers(name): text for name, text in pieces.items()}
    return max(tables.update(path, marked, args.check, "bench.front_page") for path in pages)


if __name__ == "__main__":
    raise SystemExit(main())
