"""Writes the audits in ``docs/pays.md``: GPT-2 measured on this CPU, and GPT-2 and a Llama predicted for an H200; and whole training steps
of a feed-forward block, predicted next to the committed rows.

``python -m bench.audit_page`` measures for most of a minute and writes the tables between their markers. ``--predicted`` writes only the
predictions, which need no timing; ``--check`` only tells whether those are up to date.
"""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Iterator
from pathlib import Path

import torch

import nmkernels as nm
from nmkernels.audit import traffic
from nmkernels.audit.report import Audit
from nmkernels.audit.shapes import model_shapes
from nmkernels.audit.whole import pays
from nmkernels.gemm.devices import Device, named
from nmkernels.timing import Seconds

from . import tables
from .report import load
from .rows import RESULTS, commit, machine, versions
from .tables import Rows

PAGE = Path(__file__).parents[1] / "docs" / "pays.md"
MODEL, LARGER = "gpt2", "llama-3-8b"
MEASURED, PREDICTED, END = (f"<!-- audit {what} -->" for what in ("measured: written by python -m bench.audit_page", "predicted", "end"))
STEPS, STEPS_END = (f"<!-- whole steps: {what} -->" for what in ("written by python -m bench.audit_page", "end"))

MOVED = {"ef776ec": {"srste": 49.4, "sste": 57.4, "fst": 115.0}}
"""Bytes a weight outside of forward and backward, of the code at a commit that rows of ``ffn`` are from. There x needed no gradient."""

CPU_TOKENS, GPU_TOKENS = 1024, 65536
"""One sequence of GPT-2 on a CPU, and 64 sequences on a GPU: one pass of an accumulated step of half a million tokens."""

BUDGET = 45.0


def measured(timer: Seconds | None = None, budget: float = BUDGET) -> str:
    """The table of this CPU, with the machine, the date and the commit."""
    found = nm.audit(model_shapes(MODEL).shapes(), CPU_TOKENS, device="cpu", dtype="float32", budget=budget, timer=timer)
    stamp = f"**{machine()}** ({versions()}; {datetime.date.today().isoformat()}; commit {commit()})"
    command = f"OMP_NUM_THREADS={torch.get_num_threads()} python -m nmkernels audit --model {MODEL} --tokens {CPU_TOKENS} --device cpu"
    return f"`{command}` on {stamp}:\n\n```text\n{found}\n```"


def predicted() -> str:
    """The tables of an H200, from its roofline."""
    tables = []
    for model in (MODEL, LARGER):
        found = nm.audit(model_shapes(model).shapes(), GPU_TOKENS, device="H200", dtype="bfloat16")
        command = f"python -m nmkernels audit --model {model} --tokens {GPU_TOKENS} --device H200"
        tables.append(f"`{command}`, a prediction; no H200 has confirmed it:\n\n```text\n{found}\n```")
    return "\n\n".join(tables)


def whole_steps(rows: Rows) -> str:
    """Whole training steps of ``ffn`` on GPUs: measured, predicted for the code that was measured, and predicted for the present one."""
    parts = []
    for machine_, mine in tables.by_machine(r for r in rows if r["op"] == "ffn" and r["metric"] == "x dense").items():
        gpu = named(machine_)
        steps = [r for r in mine if r["provider"].endswith(", step") and r["dtype"] == "bfloat16"]
        if gpu is not None and steps:
            head = f"{tables.stamp(steps)}; speed-up over dense with `AdamW(fused=True)`, in brackets bytes a weight"
            parts.append(f"{head}:\n\n{tables.table(list(_compared(steps, gpu)))}")
    return "\n\n".join(parts) or "*No GPU has measured whole steps: `python -m bench.run --op ffn`.*"


def _compared(rows: Rows, gpu: Device) -> Iterator[list[str]]:
    yield ["FFN, tokens", "recipe", "measured", "predicted for that code", "predicted now", "now pays from"]
    for r in rows:
        recipe = r["provider"].removeprefix("nmkernels ").removesuffix(", step")
        tokens, out, cols = map(int, r["shape"].split("x"))
        shapes = {"up": (out, cols), "down": (cols, out)}
        found = nm.audit(shapes, tokens, f"{recipe}:2:4", device=gpu.name, dtype="bfloat16", measure=False)
        now, moved = found.whole[0], MOVED.get(r["commit"], {}).get(recipe)
        then = "" if moved is None else f"{_predicted(found, gpu, moved):.2f} × ({moved:g})"
        predicted_now = f"{now.speedup:.2f} × ({now.sparse_bytes:g})"
        yield [f"{cols}-{out}-{cols}, {tokens}", recipe, f"{float(r['p50']):.2f} ×", then, predicted_now, pays(now)]


def _predicted(found: Audit, gpu: Device, moved: float) -> float:
    """The predicted speed-up if a sparse step moves so many bytes a weight outside of forward and backward, and x needs no gradient."""
    dense = used = 0.0
    for layer in found.layers:
        for piece in layer.step:
            if piece.name != "weight" and (layer.name, piece.name) != ("up", "dgrad"):
                dense, used = dense + piece.dense, used + piece.used
    gradients, bandwidth = traffic.cast(torch.float32, torch.bfloat16), gpu.passes * gpu.bandwidth
    weights = sum(layer.shape[0] * layer.shape[1] for layer in found.layers)
    dense_bytes = found.whole[0].dense_bytes
    return (dense + weights * (dense_bytes + gradients) / bandwidth) / (used + weights * (moved + gradients) / bandwidth)


def main(argv: list[str] | None = None, page: Path = PAGE, results: Path = RESULTS) -> int:
    """Write the tables; with ``--check`` write nothing and return 1 if the prediction has changed."""
    parser = argparse.ArgumentParser(prog="python -m bench.audit_page", description=(__doc__ or "").splitlines()[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--predicted", action="store_true", help="leave the measured table as it is")
    what.add_argument("--check", action="store_true", help="write nothing, exit 1 if the predicted table is not up to date")
    args = parser.parse_args(argv)
    pieces = {(PREDICTED, END): predicted(), (STEPS, STEPS_END): whole_steps(load(results))}
    if not (args.check or args.predicted):
        pieces[MEASURED, PREDICTED] = measured()
    return tables.update(page, pieces, args.check, "bench.audit_page --predicted")


if __name__ == "__main__":
    raise SystemExit(main())
