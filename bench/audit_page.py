"""Writes the audits in ``docs/pays.md``: GPT-2 measured on this CPU, and GPT-2 and a Llama predicted for an H200.

``python -m bench.audit_page`` measures for most of a minute and writes the tables between their markers. ``--predicted`` writes only the
predictions, which need no timing; ``--check`` only tells whether those are up to date.
"""

from __future__ import annotations

import argparse
import datetime
import re
from pathlib import Path

import torch

import nmkernels as nm
from nmkernels.models import model_shapes
from nmkernels.tuning import Seconds

from .rows import commit, machine, versions

PAGE = Path(__file__).parents[1] / "docs" / "pays.md"
MODEL, LARGER = "gpt2", "llama-3-8b"
MEASURED, PREDICTED, END = (f"<!-- audit {what} -->" for what in ("measured: written by python -m bench.audit_page", "predicted", "end"))

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


def between(text: str, begin: str, end: str, new: str) -> str:
    """``text`` with the part between two markers replaced; ``ValueError`` unless it has each marker once, in order."""
    if not re.fullmatch(f"(?s).*{re.escape(begin)}.*{re.escape(end)}.*", text) or text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"the text must have the lines {begin!r} and {end!r}, once each and in this order")
    head, tail = text[: text.index(begin)], text[text.index(end) :]
    return f"{head}{begin}\n\n{new}\n\n{tail}"


def main(argv: list[str] | None = None, page: Path = PAGE) -> int:
    """Write the tables; with ``--check`` write nothing and return 1 if the prediction has changed."""
    parser = argparse.ArgumentParser(prog="python -m bench.audit_page", description=(__doc__ or "").splitlines()[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--predicted", action="store_true", help="leave the measured table as it is")
    what.add_argument("--check", action="store_true", help="write nothing, exit 1 if the predicted table is not up to date")
    args = parser.parse_args(argv)
    old = page.read_text(encoding="utf-8")
    new = between(old, PREDICTED, END, predicted())
    if args.check:
        if new != old:
            print(f"{page.name} does not show what nm.audit predicts; run: python -m bench.audit_page --predicted")
        return int(new != old)
    if not args.predicted:
        new = between(new, MEASURED, PREDICTED, measured())
    page.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
