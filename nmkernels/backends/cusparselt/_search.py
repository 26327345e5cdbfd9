"""search: time the library's algorithms for one product, those that are right, and keep the fastest on disk."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ...pattern import BackendError
from ._choice import DEFAULT, TABLE, _lock, limit, line_of, name, remember
from ._context import Here, elsewhere, here, place, refuse_capture
from ._judge import Judge
from ._problem import Algorithm, Problem
from .linear import problem_of

SPLITS = tuple((splits, mode) for splits in (2, 4, 8) for mode in (1, 2))
"""Ways to split the sum: into how many parts, in one kernel or two."""

STREAM_K = (1, 6)
SPLIT_BEST = 3
"""Of so many algorithms, the fastest ones, the split is tried."""

LEAST_GAIN = 1.02
"""An algorithm replaces the default only if it is so many times as fast: less is noise."""

Timer = Callable[[Callable[[], object]], float]


@dataclass
class Found:
    """What a search found for a product.

    Args:
        problem: the product. best: its algorithm from now on; None where none is right.
        seconds, default: of the best, and of the library's default where that is right.
        refused: the other algorithms, each with the reason; they are never used.
        path: the file that the choice was written to; where it is None, ``note`` says why.

    Example:
        >>> from nmkernels.backends.cusparselt import Found, Problem
        >>> p = Problem("nt", torch.bfloat16, torch.bfloat16, 64, 64, 16)
        >>> print(Found(p, note="it is switched off"))
        nt|bfloat16|bfloat16|plain|64x64x16: none of its algorithms is right, 0 refused (it is switched off)
    """

    problem: Problem
    best: Algorithm | None = None
    seconds: float | None = None
    default: float | None = None
    refused: list[str] = field(default_factory=list)
    path: str | None = None
    note: str = ""

    def __str__(self) -> str:
        what = f"{self.problem.text}x{self.problem.width}"
        if self.best is None or self.seconds is None:
            found = "none of its algorithms is right"
        else:
            found = f"{self.best}, {1e6 * self.seconds:.1f} us"
            found += f", by default {1e6 * self.default:.1f} us" if self.default is not None else ""
        return f"{what}: {found}, {len(self.refused)} refused{f' ({self.note})' if self.note else ''}"


def search(op: str, *args: Any, timer: Timer | None = None) -> Found:
    """Find the fastest right algorithm for the product of a raw op's call, and use it from now on; the arguments' numbers do not matter.

    Every algorithm that the library has is checked on random operands before it is timed: against float64, twice, in memory where an
    unwritten element shows. For the fastest ones, splitting the sum is tried too. The choice is kept in ``cusparselt.json``, by the
    library's version, the GPU, dtypes, layout, epilogue and sizes, with widths up to the next power of two as one.

    Args:
        op: ``"nm_linear"`` or ``"nm_linear_wgrad"``.
        args: those of the raw op.
        timer: takes a call and returns its seconds; the default is a median by the GPU's clock.

    Raises:
        BackendError: there is no library, or a CUDA graph is captured, or the library does no such product at all.

    Example:
        >>> from nmkernels import BackendError
        >>> try:
        ...     search("nm_mask", torch.ones(4, 4), 2, 4)
        ... except BackendError as error:
        ...     print(error)
        nm_mask: cuSPARSELt does nm_linear and nm_linear_wgrad.
    """
    reasons = []
    for problem in problem_of(op, *args):
        try:
            return search_product(problem, next(a for a in args if isinstance(a, Tensor)), timer)
        except BackendError as error:
            reasons.append(str(error))  # fused in another way, perhaps
    raise BackendError(reasons[-1])


def search_product(problem: Problem, like: Tensor, timer: Timer | None = None) -> Found:
    """``search`` of a ``Problem``, on the device of ``like``."""
    device, stream = place(like)
    if elsewhere(like, device):
        with torch.cuda.device(device):
            return search_product(problem, like, timer)
    refuse_capture(like)
    at = here(device)
    try:
        with torch.no_grad(), _lock:
            return _search(problem, at, like, stream, timer or (lambda call: _seconds(call, like)))
    except torch.OutOfMemoryError:
        raise BackendError(f"cuSPARSELt: no memory to search {problem.text}x{problem.width} in") from None


def _search(problem: Problem, at: Here, like: Tensor, stream: int, timer: Timer) -> Found:
    found, times = Found(problem), dict[Algorithm, float]()
    ids = [DEFAULT, *(Algorithm(i) for i in range(limit(problem, at, like)))]
    judge = Judge(problem, at, like, stream)

    def examine(algorithm: Algorithm) -> None:
        wrong = judge(algorithm)
        if wrong:
            found.refused.append(f"{algorithm}: {wrong}")
            return
        ready = at.plan(problem, algorithm, like)
        times[algorithm] = timer(lambda: judge.again(ready))

    for algorithm in ids:
        examine(algorithm)
    for best in sorted(times, key=times.__getitem__)[:SPLIT_BEST]:
        for splits, mode in (*SPLITS, STREAM_K):
            examine(Algorithm(best.id, splits, mode))
    for algorithm in times:
        at.drop(at.plan(problem, algorithm, like))
    if times:
        _keep(found, times, at, like)
    else:
        found.note = "nothing to store"
    return found


def _keep(found: Found, times: dict[Algorithm, float], at: Here, like: Tensor) -> None:
    best = min(times, key=times.__getitem__)
    found.default = times.get(DEFAULT)
    if found.default is not None and found.default < LEAST_GAIN * times[best]:
        best = DEFAULT
    found.best, found.seconds = best, times[best]
    remember(found.problem, at, best)
    measured = {"us": 1e6 * times[best], "default us": found.default and 1e6 * found.default}
    line = line_of(found.problem, best, at, **measured)
    try:
        found.path = str(TABLE.store({name(found.problem, at, like): line}))
    except OSError as error:
        found.note = f"not stored: {error}"


def _seconds(call: Callable[[], object], like: Tensor) -> float:
    """The median of ten calls, by the GPU's clock if there is one."""
    for _ in range(3):
        call()
    if like.is_cpu:
        times = []
        for _ in range(3):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return median(times)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(10)]
    for start_event, end_event in events:
        start_event.record()
        call()
        end_event.record()
    torch.cuda.synchronize(like.device)
    return median(1e-3 * start_event.elapsed_time(end_event) for start_event, end_event in events)
