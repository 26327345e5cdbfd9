"""One-shot pruning of one square layer: CPU seconds, peak memory and error of each method, and of SparseGPT as a plain loop over columns.

W is random, and so are the inputs, of which a quarter of the directions are strong, as in trained models. Memory is the process's peak of
resident memory beyond what it had before, the weight and H included, in bytes over those of the weight (W and H are equally large here).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nmkernels import Pattern
from nmkernels.prune import SparseGPT
from nmkernels.prune.base import resolve
from nmkernels.prune.solve import damped, solve, squared_error

from ..rows import RESULTS, Row, row

PATH = RESULTS / "oneshot_layers.csv"
LOOP = "sparsegpt, loop over columns"
ALONE = "sparsegpt, solver alone"
METHODS = ("matmul", "hessian", "magnitude", "wanda", "sparsegpt", ALONE, LOOP, "admm")
SECONDS, MEMORY, ERROR, RATE = "CPU seconds", "peak memory beyond W and H, over W", "error", "GFLOP/s"
TOKENS = 2048
ENOUGH = 8
"""Tokens per input of the problem."""


def problem(size: int) -> tuple[Tensor, Tensor]:
    """(W, H) of a layer ``size × size``."""
    random = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    w, strong, h = random(size, size) / size**0.5, random(size // 4, size) / size**0.5, torch.zeros(size, size)
    for _ in range(ENOUGH):
        x = random(size, size // 4) @ strong + 0.3 * random(size, size)
        h.addmm_(x.T, x)
    return w, h / (ENOUGH * size)


def columns(w: Tensor, h: Tensor, pattern: Pattern, damping: float = 0.01, block: int = 128) -> Tensor:
    """SparseGPT as its paper writes it down and its public code runs it: one column after the other, rows in lockstep."""
    w, (n, m) = w.clone(), (pattern.n, pattern.m)
    h = h.clone()
    h.diagonal().add_(damping * h.diagonal().mean())
    u = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(h)), upper=True)
    for begin in range(0, w.shape[1], block):
        end = min(begin + block, w.shape[1])
        part, own = w[:, begin:end].clone(), u[begin:end, begin:end]
        errors, drop = torch.zeros_like(part), torch.zeros_like(part, dtype=torch.bool)
        for i in range(end - begin):
            if i % m == 0:
                scores = part[:, i : i + m] ** 2 / own.diagonal()[i : i + m] ** 2
                drop.scatter_(1, i + scores.topk(m - n, largest=False).indices, True)
            left = part[:, i].masked_fill(drop[:, i], 0.0)
            errors[:, i] = (part[:, i] - left) / own[i, i]
            part[:, i:] -= errors[:, i : i + 1] @ own[i : i + 1, i:]
            part[:, i] = left
        w[:, begin:end] = part
        w[:, end:] -= errors @ u[begin:end, end:]
    return w


def measure(name: str, size: int, repeats: int = 3) -> list[Row]:
    """The rows of one method."""
    if name == "matmul":
        a = torch.randn(2048, 2048)
        a @ a
        rates = [2 * 2048**3 / 1e9 / _timed(lambda: a @ a)[0] for _ in range(max(5, repeats))]
        return [row("prune", "torch matmul", RATE, rates, dtype="float32", shape="2048x2048x2048")]
    w, h = problem(size)
    if name == "hessian":
        x, total = torch.randn(TOKENS, size), torch.zeros(size, size)
        times = [_timed(lambda: total.addmm_(x.T, x))[0] for _ in range(repeats)]
        return [row("prune", f"hessian of {TOKENS} tokens", SECONDS, times, dtype="float32", shape=f"{size}x{size}")]
    pattern, results = Pattern("2:4"), []
    calls: dict[str, Callable[[], Any]] = {
        LOOP: lambda: columns(w, h, pattern),
        ALONE: lambda: SparseGPT().solve(w.clone(), damped(h, 0.01), pattern)[0],
    }
    for _ in range(repeats):
        seconds, memory, found = _timed(calls.get(name, lambda: solve(resolve(name), w, h, ENOUGH * size, pattern)))
        z = found if name in calls else found[0].dense()
        results.append((seconds, memory / w.nbytes, float(squared_error(w, z, h) / squared_error(w, None, h))))
        del found, z
    about = {"pattern": "2:4", "dtype": "float32", "shape": f"{size}x{size}"}
    return [
        row("prune", name, metric, values, **about)
        for metric, values in zip((SECONDS, MEMORY, ERROR), zip(*results, strict=True), strict=True)
    ]


def _timed(call: Callable[[], Any]) -> tuple[float, int, Any]:
    """(CPU seconds, bytes of resident memory at the peak beyond those before, the result) of a call; 0 bytes where Linux is not."""
    refs = Path("/proc/self/clear_refs")
    if refs.exists():
        refs.write_text("5")  # resets the peak
    before, begin = _memory("VmRSS"), time.process_time()
    result = call()
    return time.process_time() - begin, max(0, _memory("VmHWM") - before), result


def _memory(field: str) -> int:
    status = Path("/proc/self/status")
    found = re.search(rf"{field}:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return 1024 * int(found[1]) if found else 0
