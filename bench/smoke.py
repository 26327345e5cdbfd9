"""Runs each family of kernels once on small tensors, compared with the reference, and 8192³ with cuBLAS: ``python -m bench.smoke``.

Prints a line for each and continues after a failure. If one loses the device, ``make gpu`` continues in another process.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nmkernels import BackendError, dispatch, ops, testing
from nmkernels.gemm.forms import layout_on
from nmkernels.ops.define import CALLS

from . import outcomes
from .cases._ours import forced, normal
from .device import lost
from .timing import median_seconds

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
BACKENDS = {"cuda": ("cuda", "cuda-mma.sp", "cuda-stream-k", "triton", "cusparselt"), "cpu": ("cpu", "cuda-emulated")}
Call = Callable[[], Any]


def calls(device: str) -> dict[str, tuple[Call, Call | None]]:
    """By op and case the call, and for a rounded result the exact one; the others must equal the reference bit for bit."""
    w, x, g = (normal(rows, 512, device=device, dtype=BF16, seed=i) for i, rows in enumerate((256, 64, 256)))
    with forced("reference"):
        packed = {pattern: ops.compress(w, pattern) for pattern in ("2:4", "1:8")}
        ordered = ops.relayout(packed["2:4"], layout_on(w.device, 256))
        x8, w8 = ops.quantize(x, E4M3, rows=True), ops.quantize_pack(w, E4M3)
        int8, int4 = (ops.quantize_values(packed["2:4"], kind) for kind in ("int8", "int4"))

    words = torch.tensor([1, 0], device=device)

    def linear(operand: Any, c: ops.Compressed, tokens: int) -> tuple[Call, Call]:
        return lambda: ops.linear(x[:tokens], operand), lambda: F.linear(x[:tokens].double(), c.dense(torch.float32).double())

    def adamw() -> tuple[Tensor, ...]:
        p, m, v, step = w.float(), w.float() / 8, w.float().square(), torch.ones((), device=device)
        hyper = torch.tensor([1e-3, 0.9, 0.999, 1e-8, 0.01, 2e-4, 0, 0, 0], dtype=torch.float64, device=device)
        ops.masked_adamw_([p], [g.float()], [m], [v], [step], hyper, "2:4")
        return p, m, v, step

    return {
        "nm_mask": (lambda: ops.mask(w, "2:4"), None),
        "nm_transposable_mask": (lambda: ops.transposable_mask(w, "2:4"), None),
        "nm_soft_threshold": (lambda: ops.soft_threshold(w, "2:4"), None),
        "nm_compress": (lambda: ops.compress(w, "2:4").dense(), None),
        "nm_pack": (lambda: ops.pack(w, "2:4", columns=True, mask="transposable").buffers(), None),
        "nm_pack rows and dense": (
            lambda: torch.ops.nmkernels.nm_pack(w.float(), 2, 4, "magnitude", None, None, BF16, True, False, "canonical", True), None,
        ),
        "nm_mvue_compress": (lambda: ops.mvue_compress(g, "2:4", dim=0, seed=1).dense(), None),
        "nm_mvue_compress as metadata": (lambda: CALLS["nm_mvue_compress"](g, 2, 4, 0, words, "exact", ordered.layout), None),
        "nm_masked_adamw_": (adamw, None),
        "nm_quantize_pack": (lambda: ops.quantize_pack(w, E4M3).values.view(torch.uint8), None),
        "nm_linear 1 token": linear(packed["2:4"], packed["2:4"], 1),
        "nm_linear 16 tokens": linear(packed["2:4"], packed["2:4"], 16),
        "nm_linear 1:8, 16 tokens": linear(packed["1:8"], packed["1:8"], 16),
        "nm_linear 64 tokens": linear(packed["2:4"], packed["2:4"], 64),
        "nm_quantize_values int4": (lambda: ops.quantize_values(packed["2:4"], "int4").values, None),
        "nm_dequantize_values int4": (lambda: int4.dense(), None),
        "nm_linear_integers int8, 1 token": linear(int8, int8, 1),
        "nm_linear_integers int4, 16 tokens": linear(int4, int4, 16),
        f"nm_linear {ordered.layout}, 64 tokens": linear(ordered, packed["2:4"], 64),
        "nm_linear_wgrad float32": (
            lambda: ops.linear_wgrad(ordered, x.t(), torch.float32),
            lambda: packed["2:4"].dense().double() @ x.t().double(),
        ),
        "nm_linear_wgrad": (lambda: ops.linear_wgrad(ordered, x.t()), lambda: packed["2:4"].dense().double() @ x.t().double()),
        "nm_linear_quantized": (
            lambda: ops.linear_quantized(x8, w8, fast_accumulate=False), lambda: ops.linear_quantized(x8, w8, dtype=torch.float32).double(),
        ),
    }  # fmt: skip


def check(call: Call, exact: Call | None, backend: str) -> str:
    """``ok``, or why the backend declines the call; ``AssertionError`` if its result is wrong."""
    with forced("reference"):
        theirs, best = call(), exact() if exact else None
    try:
        with forced(backend):
            ours = call()
    except BackendError as error:
        _, _, why = str(error).partition("cannot run this call: ")
        return f"declined: {why.removesuffix('. Unset NMKERNELS_BACKEND to fall back.') or error}"
    if best is not None:
        testing.assert_no_worse(ours, theirs, best)
    else:
        testing.assert_equal_bits(ours, theirs)
    return "ok"


def large(device: str, side: int) -> str:
    """Compare the 2:4 GEMM of the chosen backend with torch's dense one."""
    w, x = (normal(side, side, device=device, dtype=BF16, seed=i) for i in range(2))
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
    for name, (call, exact) in calls(device).items():
        entries = {entry.backend for entry in dispatch.implementations(name.split()[0])}
        for backend in (b for b in BACKENDS[device] if b in entries):
            jobs[f"{name}, {backend}"] = lambda c=call, e=exact, b=backend: check(c, e, b)  # type: ignore[misc]
    side = 8192 if device == "cuda" else 256
    jobs[f"nm_linear bf16 {side}³"] = lambda: large(device, side)
    ended = outcomes.read(path)[0] if path else {}
    failed = False
    for item in (item for item in jobs if item not in ended):
        outcomes.begin(path, item)
        try:
            said = jobs[item]()
            what = "skipped" if said.startswith("declined") else "passed"
        except Exception as error:
            said, what = f"FAILED: {type(error).__name__}: {str(error).partition(chr(10))[0]}", "failed"
        failed |= what == "failed"
        print(f"{item:<52}{said}", flush=True)
        outcomes.end(path, outcomes.Outcome(item, what, said))
        if why := lost(device):
            outcomes.tell(path, lost=why)
            return 1
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
