"""Which of the library's algorithms does a product: what a search has stored, else the first that was checked and is right.

No algorithm is used unchecked. What a search stored was checked by it; anything else is checked at the first call of a product, outside of
graph capture: the library's default, and where that is wrong the others in order. That costs a float64 product and two runs, once in a
process for each product.

Whether a plan computes what it should. Some of the library's algorithms do not, or not always, so none is used unchecked.

The rule is that of every rounded result: the largest error against float64 is at most twice torch's own in the same dtype, plus 4 eps of
the largest result. Besides, two runs must agree in every bit, and no element may be left unwritten.

search: time the library's algorithms for one product, those that are right, and keep the fastest on disk.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...capability import version_text
from ...pattern import BackendError
from ...reference import distance
from ...tuning.table import Table
from .compress import by_another, compress_as
from .context import LAYOUTS, Algorithm, Here, Problem, Ready, elsewhere, failures, here, place, refuse_capture

__all__ = ["DEFAULT", "TABLE", "chosen", "first_right", "forget", "limit", "line_of", "name", "ready_for", "refusal", "remember", "stored"]


SEED = 24


class Judge:
    """Random operands of one problem, and what is right for them. The caller's random numbers are not touched.

    Args:
        like: a tensor on the device.
    """

    def __init__(self, problem: Problem, here: Here, like: Tensor, stream: int) -> None:
        self.problem, self.here, self.stream = problem, here, stream
        generator = torch.Generator(like.device).manual_seed(SEED)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=like.device, dtype=torch.float32)

        p = problem
        full, other = normal(p.rows, p.cols), normal(*((p.width, p.cols) if p.by_token else (p.cols, p.width)))
        sparse, dense = _of_dtype(by_another("nm_prune", full, 2, 4), p.dtype), _of_dtype(other, p.dtype)
        self.bias = normal(p.rows).to(p.bias_dtype) if p.bias else None
        self.residual = _of_dtype(normal(*self._shape), p.out) if p.residual else None
        self.dense = dense
        self.blob = compress_as(p.layout, sparse.t() if LAYOUTS[p.layout][0] else sparse, here, stream)
        self.exact = self._result(sparse, dense, torch.float64)
        self.bound = self._bound(sparse, dense)

    @property
    def _shape(self) -> tuple[int, int]:
        p = self.problem
        return (p.width, p.rows) if p.by_token else (p.rows, p.width)

    def _result(self, sparse: Tensor, dense: Tensor, dtype: torch.dtype) -> Tensor:
        p = self.problem
        s, b = sparse.to(dtype), dense.to(dtype)
        # a first call may well come under autocast, which would multiply in its own dtype
        with torch.autocast(s.device.type, enabled=False):
            y = b @ s.t() if p.by_token else s @ b
        if self.bias is not None:
            y = y + (self.bias.to(dtype) if p.by_token else self.bias.to(dtype)[:, None])
        y = {"": lambda y: y, "relu": F.relu, "gelu": F.gelu}[p.activation](y)
        return y if self.residual is None else y + self.residual.to(dtype)

    def _bound(self, sparse: Tensor, dense: Tensor) -> float:
        p = self.problem
        if not p.out.is_floating_point:
            self.exact = self.exact.clamp(torch.iinfo(p.out).min, torch.iinfo(p.out).max)
            return 0.0
        computed = p.dtype if p.dtype == p.out else torch.float32
        own = self.error(self._result(sparse, dense, computed).to(p.out))
        return 2 * own + 4 * torch.finfo(p.out).eps * float(self.exact.abs().max())

    def error(self, y: Tensor) -> float:
        """The largest distance from float64; NaN where there is one."""
        return distance(y, self.exact)

    def __call__(self, algorithm: Algorithm) -> str:
        """What is wrong with a plan by this algorithm; empty where nothing is."""
        try:
            ready = self.here.plan(self.problem, algorithm, self.dense)
            wrong = self._two_runs(ready)
            library = self.here.library
            if wrong and self.bias is not None and not library.replan:
                # perhaps a plan keeps the address of the bias that it was made with: then it must be made anew for each
                library.replan = True
                wrong = self._two_runs(ready)
                library.replan = not wrong
        except BackendError as error:
            return str(error).removeprefix("cuSPARSELt: ")
        if wrong:
            self.here.drop(ready)
        return wrong

    def _two_runs(self, ready: Ready) -> str:
        """The second run has its bias elsewhere, and in the first one's memory is no number by then."""
        first = None if self.bias is None else self.bias.clone()
        one = self.run(ready, first, -1)
        second = None if first is None else first.clone()
        if first is not None:
            first.fill_(torch.nan)
        other = self.run(ready, second, 0x55)
        error = self.error(one)
        if not error <= self.bound:  # false for NaN
            return f"max error {error:.3g} against float64 is above {self.bound:.3g}"
        return "" if torch.equal(one, other) else "two runs differ"

    def run(self, ready: Ready, bias: Tensor | None, before: int) -> Tensor:
        """The result of one run in memory whose every byte was ``before``: -1 makes NaN of floats."""
        self.out = torch.empty(self._shape, dtype=self.problem.out, device=self.dense.device)
        self.out.view(torch.int8).fill_(before)
        self.again(ready, bias)
        return self.out

    def again(self, ready: Ready, bias: Tensor | None = None) -> None:
        """The product alone, to be timed; into the memory of the last run."""
        bias = self.bias if bias is None else bias
        self.here.run(ready, self.blob.address, self.dense, self.out, bias, self.residual, self.stream, 1.0)


def _of_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    return (3 * x).round().to(dtype) if dtype == torch.int8 else x.to(dtype)


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
    from .linear import problem_of  # it routes by what is chosen here

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


TABLE = Table("cusparselt.json", 1, "cuSPARSELt's default algorithms are checked and used", "run nm.tune again")
DEFAULT = Algorithm()

_checked: dict[tuple[int, int, Problem], Algorithm] = {}
_refused: dict[tuple[int, int, Problem], str] = {}
_lock = threading.RLock()
"""One thread checks; the others wait, and take what it found."""


def ready_for(problem: Problem, here: Here, like: Tensor, stream: int) -> Ready:
    """The plan of a problem by its algorithm, in this thread.

    Raises:
        BackendError: a graph is captured and there is none yet; the library does not do this product; or no algorithm is right.
    """
    found: Ready | None = here.routes.get(problem)
    if found is None:
        refuse_capture(like)
        with torch.no_grad(), _lock:
            algorithm = chosen(problem, here, like, stream)
        found = here.routes[problem] = here.plan(problem, algorithm, like)
    return found


def refusal(problem: Problem, here: Here) -> str:
    """Why a problem was refused before; empty where it was not."""
    return _refused.get(_key(problem, here), "")


def chosen(problem: Problem, here: Here, like: Tensor, stream: int) -> Algorithm:
    """The algorithm of a problem, checked now if it was not before."""
    key = _key(problem, here)
    found = _checked.get(key)
    if found is not None:
        return found
    if key in _refused:
        raise BackendError(_refused[key])
    first, exact = stored(problem, here, like)
    if first is None or not exact:
        try:
            first = first_right(problem, here, like, stream, first or DEFAULT)
        except torch.OutOfMemoryError:
            # later there may be room; until then this product is somebody else's
            raise BackendError(f"cuSPARSELt: no memory to check {problem.text}x{problem.width} with") from None
        except BackendError as error:
            _refused[key] = str(error)
            raise
    _checked[key] = first
    return first


def first_right(problem: Problem, here: Here, like: Tensor, stream: int, first: Algorithm) -> Algorithm:
    """The first algorithm that computes what it should, beginning with a given one."""
    ids = [Algorithm(i) for i in range(limit(problem, here, like))]
    judge, reasons = Judge(problem, here, like, stream), []
    for algorithm in dict.fromkeys([first, DEFAULT, *ids]):
        wrong = judge(algorithm)
        if not wrong:
            return algorithm
        reasons.append(f"{algorithm}: {wrong}")
    raise BackendError(f"cuSPARSELt: none of its algorithms computes {problem.text}x{problem.width} right: {'; '.join(reasons)}")


def limit(problem: Problem, here: Here, like: Tensor) -> int:
    """Algorithms of a problem have ids below this; raises where the library does not do such a product at all."""
    ready = here.plan(problem, DEFAULT, like)
    with failures():
        return int(here.context.limit(ready.number))


def remember(problem: Problem, here: Here, algorithm: Algorithm) -> None:
    """From now on a problem is done by an algorithm that was checked."""
    key = _key(problem, here)
    _checked[key] = algorithm
    _refused.pop(key, None)
    here.routes.clear()


def _key(problem: Problem, here: Here) -> tuple[int, int, Problem]:
    return here.library.version, here.device, problem


# ---- on disk


def name(problem: Problem, here: Here, like: Tensor) -> str:
    """The key of a problem in the table: widths up to the next power of two are one."""
    device = torch.cuda.get_device_name(like.device) if like.is_cuda else "host"
    return "|".join((device, f"cuSPARSELt {version_text(here.library.version)}", f"{problem.text}x{1 << (problem.width - 1).bit_length()}"))


def line_of(problem: Problem, algorithm: Algorithm, here: Here, **measured: Any) -> dict[str, Any]:
    """What the table says of a choice; ``replan`` is what checking found out about the library's biases."""
    return {**algorithm._asdict(), "width": problem.width, "replan": here.library.replan, **measured}


def stored(problem: Problem, here: Here, like: Tensor) -> tuple[Algorithm | None, bool]:
    """What a search has stored for problems like this one, and whether it was for this very width; None where there is nothing of use."""
    line = TABLE.get(name(problem, here, like))
    if line is None:
        return None, False
    numbers = [value for key in ("id", "splits", "mode", "width") if type(value := line.get(key)) is int]
    if len(numbers) != 4:
        return None, _ignored(f"{line} is no choice")
    algorithm = Algorithm(*numbers[:3])
    if not -1 <= algorithm.id < limit(problem, here, like):
        return None, _ignored(f"this library has no algorithm {algorithm.id}")
    try:
        here.plan(problem, algorithm, like)
    except BackendError as error:
        return None, _ignored(str(error))
    if line.get("replan"):
        here.library.replan = True
    return algorithm, numbers[3] == problem.width


def _ignored(why: str) -> bool:
    warnings.warn(f"nmkernels: a choice in {TABLE.path()} is ignored: {why}. Run nm.tune again.", RuntimeWarning, stacklevel=3)
    return False


def forget() -> None:
    """Check everything anew, and read the table anew."""
    _checked.clear()
    _refused.clear()
    TABLE.forget()


# fmt: skip
