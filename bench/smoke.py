"""Runs each family of kernels once on small tensors, compared with the reference, and 8192³ with cuBLAS: ``python -m bench.smoke``.

Prints a line for each and continues after a failure. If one loses the device, ``make gpu`` continues in another process.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from nmkernels import dispatch, ops, testing
from nmkernels.gemm.forms import layout_on
from nmkernels.ops import verify
from nmkernels.testing.calls import DTYPES, small, table

from . import outcomes
from .cases._ours import normal
from .device import lost
from .timing import median_seconds

ROWS, KINDS, COMPILED = 256, 12, 2
"""Rows of the weights; kinds of calls of an op, and by a backend that compiles for seconds."""
BACKENDS = {"cuda": ("cuda", "cuda-mma.sp", "cuda-stream-k", "triton", "cusparselt"), "cpu": ("cpu", "cuda-emulated")}


def calls(device: str) -> dict[str, tuple[str, tuple[Any, ...]]]:
    """Small calls by name: some kinds of each op in ``testing.calls``, evenly spread, the first and the last included."""
    layout = layout_on(torch.device(device), ROWS)
    found = {}
    for op, kinds in table(ROWS, 512, DTYPES[1::-1], ((2, 4), (1, 8)), (1, 16, 64), (layout,)).items():
        for i in range(KINDS):
            args = small(op, kinds[round(i * (len(kinds) - 1) / (KINDS - 1))])
            found[verify.words(op, args)] = op, args
    return found


def check(entry: dispatch.Impl, args: tuple[Any, ...], device: str) -> str:
    """``ok``, or why the backend declines the call; ``AssertionError`` if its result is wrong."""
    can, why = entry.can(*verify.placed(args, torch.device(device)))
    if not can:
        return f"declined: {why}"
    wrong = verify.examine(entry, verify.truth(entry.op, args), torch.device(device))
    if wrong:
        raise AssertionError(wrong)
    return "ok"


def large(device: str, side: int) -> str:
    """Compare the 2:4 GEMM of the chosen backend with torch's dense one."""
    w, x = (normal(side, side, device=device, dtype=torch.bfloat16, seed=i) for i in range(2))
    c = ops.compress(w, "2:4")
    dense, operand = c.dense(), ops.relayout(c, layout_on(w.device, side))
    y = ops.linear(x, operand)
    testing.assert_no_worse(y[:16], F.linear(x[:16], dense), F.linear(x[:16].double(), dense.double()))
    if device == "cpu":
        return "ok"
    ours, theirs = (median_seconds(gemm, device) for gemm in (lambda: ops.linear(x, operand), lambda: F.linear(x, dense)))
    return f"ok: {1e3 * ours:.3f} ms, cuBLAS {1e3 * theirs:.3f} ms, {theirs / ours:.2f} times as fast"


def main() -> int:
    """Run what no earlier process has finished; 1 if something failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.smoke", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=BACKENDS, default="cuda")
    device, path = parser.parse_args().device, outcomes.here()
    jobs: dict[str, Callable[[], str]] = {}
    counted: Counter[tuple[str, str]] = Counter()
    for name, (op, args) in calls(device).items():
        for entry in (i for i in dispatch.implementations(op) if i.backend in BACKENDS[device]):
            counted[op, entry.backend] += 1
            if not entry.compiles or counted[op, entry.backend] <= COMPILED:
                jobs[f"{name}, {entry.backend}"] = partial(check, entry, args, device)
    side = 8192 if device == "cuda" else 256
    jobs[f"nm_linear bf16 {side}³"] = lambda: large(device, side)
    ended = outcomes.read(path).ended
    failed = False
    for item in (item for item in jobs if item not in ended):
        outcomes.tell(path, begins=item)
        try:
            said = jobs[item]()
            what = "skipped" if said.startswith("declined") else "passed"
        except Exception as error:
            said, what = f"FAILED: {type(error).__name__}: {str(error).partition(chr(10))[0]}", "failed"
        failed |= what == "failed"
        print(f"{item}: {said}", flush=True)
        outcomes.end(path, outcomes.Outcome(item, what, said))
        if why := lost(device):
            outcomes.tell(path, lost=why)
            return 1
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
