"""A few timings of ``nm.ops`` beside what one would write in torch: ``python -m bench.quick --device cpu``.

Every op passes a gate first: the backend that is about to be timed agrees with the reference on the very inputs. Providers
take turns, so that a machine that changes its speed changes it for all. Rows go to ``bench/results/<machine>.csv``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import nmkernels as nm
from nmkernels import _dispatch, testing

from .rows import RESULTS, Row, append, machine, row, slug

Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """One op on one input: who does it, in which dtype and shape, and the gate that must pass first."""

    op: str
    pattern: str
    dtype: torch.dtype
    shape: str
    providers: dict[str, Call]
    gate: Call


def torch_mask(w: Tensor, n: int, m: int) -> Tensor:
    """The mask as torch users write it: top-N of each group, scattered."""
    groups = w.abs().unflatten(-1, (-1, m))
    return torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, groups.topk(n, -1).indices, True).flatten(-2)


def torch_compress(w: Tensor, n: int, m: int) -> tuple[Tensor, Tensor]:
    """Values and 2-bit indices as torch users write them (2:4: one nibble a group)."""
    groups = w.unflatten(-1, (-1, m))
    kept = groups.abs().topk(n, -1).indices.sort(-1).values
    codes = (kept << torch.arange(0, 2 * n, 2, device=w.device)).sum(-1)
    packed = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
    return groups.gather(-1, kept).flatten(-2), packed


def cases(rows: int, cols: int, device: str, dtype: torch.dtype) -> list[Case]:
    """What is timed, in order; every op with pattern 2:4 on a (rows, cols) matrix of normal numbers."""
    gen = torch.Generator(device).manual_seed(0)
    w = torch.randn(rows, cols, device=device, dtype=dtype, generator=gen)
    keep, pruned, c = torch.empty_like(w, dtype=torch.bool), torch.empty_like(w), nm.ops.compress(w, "2:4")
    where = f"{rows}x{cols}"

    def streaming(op: str, ours: Call, theirs: Call) -> Case:
        return Case(op, "2:4", dtype, where, {_ours(op, w, 2, 4): ours, "torch": theirs}, lambda: _same(op, w, 2, 4))

    found = [
        streaming("nm_mask", lambda: nm.ops.mask(w, "2:4", out=keep), lambda: torch_mask(w, 2, 4)),
        streaming("nm_prune", lambda: nm.ops.prune(w, "2:4", out=pruned), lambda: w * torch_mask(w, 2, 4)),
        streaming("nm_compress", lambda: nm.ops.compress(w, "2:4", out=c), lambda: torch_compress(w, 2, 4)),
    ]
    dense = c.dense()
    for tokens in (1, 16, 256):
        x = torch.randn(tokens, cols, device=device, dtype=dtype, generator=gen)
        args = (x, c.values, c.indices, 2, 4, cols, None)
        providers: dict[str, Call] = {_ours("nm_linear", *args): partial(nm.ops.linear, x, c), "torch dense": partial(F.linear, x, dense)}
        found.append(Case("nm_linear", "2:4", dtype, f"{tokens}x{where}", providers, partial(_close, x, c, dense)))
    return [*found, Case("copy", "", dtype, where, {"torch": lambda: pruned.copy_(w)}, lambda: None)]


def _ours(op: str, *args: object) -> str:
    return f"nmkernels {_dispatch.choose(op, *args).backend}"


def _same(op: str, *args: object) -> None:
    reference = next(i.fn for i in _dispatch.implementations(op) if i.backend == "reference")
    testing.assert_equal_bits(_dispatch.choose(op, *args).fn(*args), reference(*args), op)


def _close(x: Tensor, c: nm.Compressed, dense: Tensor) -> None:
    exact = F.linear(x.double(), dense.double())
    testing.assert_no_worse(nm.ops.linear(x, c), F.linear(x, dense), exact, "nm_linear")


def measure(providers: dict[str, Call], device: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of each call of each provider; they take turns, after two calls of each that do not count."""
    seconds: dict[str, list[float]] = {name: [] for name in providers}
    for turn in range(-2, rounds):
        for name, call in providers.items():
            took = _on_cuda(call) if device.startswith("cuda") else _on_cpu(call)
            if turn >= 0:
                seconds[name].append(took)
    return seconds


def _on_cpu(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _on_cuda(call: Call) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def run(case: Case, device: str, rounds: int) -> list[Row]:
    """The rows of one case: microseconds per call, and for the copy GB/s of memory read and written."""
    label = {"pattern": case.pattern, "dtype": str(case.dtype).removeprefix("torch."), "shape": case.shape, "device": device}
    rows = []
    for provider, seconds in measure(case.providers, device, rounds).items():
        rows.append(row(case.op, provider, "us", [1e6 * s for s in seconds], **label))
        if case.op == "copy":
            r, c = map(int, case.shape.split("x"))
            rows.append(row("copy", provider, "GB/s", [2e-9 * r * c * case.dtype.itemsize / s for s in seconds], **label))
    return rows


def main(argv: list[str] | None = None) -> int:
    """Time everything that passes its gate; 1 when something does not."""
    parser = argparse.ArgumentParser(prog="python -m bench.quick", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, help="default 4096, on a CPU 1024")
    parser.add_argument("--cols", type=int, help="default 11008, on a CPU 4096; a multiple of 8")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, help="CSV to add to, default bench/results/<machine>.csv")
    args = parser.parse_args(argv)
    on_cpu = not args.device.startswith("cuda")
    rows, cols = args.rows or (1024 if on_cpu else 4096), args.cols or (4096 if on_cpu else 11008)
    out = args.out or RESULTS / f"{slug(machine(args.device))}.csv"
    wrong = 0
    for case in cases(rows, cols, args.device, torch.float32 if on_cpu else torch.bfloat16):
        try:
            case.gate()
        except AssertionError as error:
            wrong += 1
            print(f"{case.op} {case.shape}: not timed, it differs from the reference: {error}", file=sys.stderr)
            continue
        measured = run(case, args.device, args.rounds)
        append(measured, out)
        for r in measured:
            print(
                f"{r.op:<12}{r.pattern:<5}{r.dtype:<9}{r.shape:<16}{r.provider:<22}{r.p50:>11.4g} {r.metric:<5}({r.p20:.4g} to {r.p80:.4g})"
            )
    print(f"written to {out}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
