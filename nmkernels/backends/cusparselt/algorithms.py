"""Which of the library's algorithms does a GEMM: what a search has stored, else the first that was checked and is right.

Some of the library's algorithms are wrong, or not always right, so none is used unchecked (``tuning.Validator``). What a search stored was
checked by it; anything else is checked at the first call of a GEMM, outside of graph capture: the library's default, and where that is
wrong the others in order. That costs a float64 GEMM and two runs, once in a process for each GEMM.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...capability import version_text
from ...pattern import BackendError
from ...tuning import TABLE, Candidate, Found, Seconds, Timer, Validator, key, measure
from .blobs import by_another, compress_as
from .context import LAYOUTS, Algorithm, Here, Problem, Ready, elsewhere, failures, here, place, refuse_capture

SEED = 24
DEFAULT = Algorithm()

SPLITS = tuple((splits, mode) for splits in (2, 4, 8) for mode in (1, 2))
"""Ways to split the sum: into how many parts, in one kernel or two."""

STREAM_K = (1, 6)
SPLIT_BEST = 3
"""Of so many algorithms, the fastest ones, the split is tried."""


class Trial:
    """Random operands of one problem, and what is right for them. The caller's random numbers are not touched."""

    def __init__(self, problem: Problem, here: Here, like: Tensor, stream: int) -> None:
        self.problem, self.here, self.stream = problem, here, stream
        generator = torch.Generator(like.device).manual_seed(SEED)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=like.device, dtype=torch.float32)

        p = problem
        full, other = normal(p.rows, p.cols), normal(*((p.width, p.cols) if p.by_token else (p.cols, p.width)))
        sparse, self.dense = _of_dtype(by_another("nm_prune", full, 2, 4), p.dtype), _of_dtype(other, p.dtype)
        self.bias = normal(p.rows).to(p.bias_dtype) if p.bias else None
        self.residual = _of_dtype(normal(*((p.width, p.rows) if p.by_token else (p.rows, p.width))), p.out) if p.residual else None
        self.blob = compress_as(p.layout, sparse.t() if LAYOUTS[p.layout][0] else sparse, here, stream)
        exact = self._result(sparse, torch.float64)
        if p.out.is_floating_point:
            theirs = self._result(sparse, p.dtype if p.dtype == p.out else torch.float32).to(p.out)
        else:
            exact = exact.clamp(torch.iinfo(p.out).min, torch.iinfo(p.out).max)
            theirs = exact.to(p.out)
        self.validator = Validator(exact, theirs)

    def _result(self, sparse: Tensor, dtype: torch.dtype) -> Tensor:
        p = self.problem
        s, b = sparse.to(dtype), self.dense.to(dtype)
        # a first call may well come under autocast, which would multiply in its own dtype
        with torch.autocast(s.device.type, enabled=False):
            y = b @ s.t() if p.by_token else s @ b
        if self.bias is not None:
            y = y + (self.bias.to(dtype) if p.by_token else self.bias.to(dtype)[:, None])
        y = {"": lambda y: y, "relu": F.relu, "gelu": F.gelu}[p.activation](y)
        return y if self.residual is None else y + self.residual.to(dtype)

    def wrong(self, run: Callable[[Tensor], object]) -> str:
        """What is wrong with what ``run`` writes; empty where nothing is."""
        library = self.here.library
        wrong = self.validator(run)
        if wrong and self.bias is not None and not library.replan:
            # perhaps a plan keeps the address of the bias that it was made with: then it must be made anew for each
            library.replan = True
            wrong = self.validator(run)
            library.replan = not wrong
        return wrong

    def plan(self, algorithm: Algorithm) -> Ready:
        return self.here.plan(self.problem, algorithm, self.dense)

    def run(self, ready: Ready, out: Tensor) -> None:
        """One run, whose bias lies elsewhere than before, where no number is any more."""
        if self.bias is not None:
            before, self.bias = self.bias, self.bias.clone()
            before.fill_(torch.nan)
        self.again(ready, out)

    def again(self, ready: Ready, out: Tensor) -> None:
        """The GEMM alone, to be timed."""
        self.here.run(ready, self.blob.address, self.dense, out, self.bias, self.residual, self.stream, 1.0)

    def candidate(self, algorithm: Algorithm) -> Candidate:
        def calls() -> list[Callable[[], None]]:
            out, ready = torch.empty_like(self.validator.theirs), self.plan(algorithm)
            return [lambda: self.again(ready, out)]

        return Candidate(str(algorithm), lambda out: self.run(self.plan(algorithm), out), calls)


def _of_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    return (3 * x).round().to(dtype) if dtype == torch.int8 else x.to(dtype)


# ---- the fastest


def search(op: str, *args: Any, timer: Seconds | None = None) -> Found:
    """Find the fastest right algorithm for the GEMM of a raw op's call, and use it from now on; the arguments' numbers do not matter.

    Every algorithm that the library has is checked on random operands before it is timed. For the fastest ones, splitting the sum is tried
    too. The choice is kept in the table, by the library's version, the GPU, dtypes, layout, epilogue and sizes, with widths up to the next
    power of two as one.

    Args:
        op: ``"nm_linear"`` or ``"nm_linear_wgrad"``.
        args: those of the raw op.
        timer: seconds of a ``tuning.Task``; by the GPU's clock if None.

    Raises:
        BackendError: there is no library, or a CUDA graph is captured, or the library does no such GEMM at all.

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
            return search_gemm(problem, next(a for a in args if isinstance(a, Tensor)), timer)
        except BackendError as error:
            reasons.append(str(error))  # fused in another way, perhaps
    raise BackendError(reasons[-1])


def search_gemm(problem: Problem, like: Tensor, timer: Seconds | None = None) -> Found:
    """``search`` of a ``Problem``, on the device of ``like``."""
    device, stream = place(like)
    if elsewhere(like, device):
        with torch.cuda.device(device):
            return search_gemm(problem, like, timer)
    refuse_capture(like)
    at = here(device)
    try:
        with torch.no_grad(), _lock:
            return _search(problem, at, like, stream, Timer(like.device, timer))
    except torch.OutOfMemoryError:
        raise BackendError(f"cuSPARSELt: no memory to search {problem.text}x{problem.width} in") from None


def _search(problem: Problem, at: Here, like: Tensor, stream: int, timer: Timer) -> Found:
    by_name = {str(a): a for a in (DEFAULT, *(Algorithm(i) for i in range(limit(problem, at, like))))}
    trial, text = Trial(problem, at, like, stream), _key(problem, at, like)

    def timed(algorithms: Iterable[Algorithm]) -> Found:
        return measure(text, [trial.candidate(a) for a in algorithms], trial.wrong, timer)

    found = timed(by_name.values())
    fastest = sorted(found.seconds, key=found.seconds.__getitem__)[:SPLIT_BEST]
    split = {str(a): a for name in fastest for a in (Algorithm(by_name[name].id, *way) for way in (*SPLITS, STREAM_K))}
    if split:
        second = timed(split.values())
        found.seconds |= second.seconds
        found.refused |= second.refused
    at.forget(problem)
    if not found.seconds:
        found.note = "nothing to store"
        return found
    best = (by_name | split)[found.best]
    remember(problem, at, best)
    # ``replan`` is what checking found out about the library's biases
    found.store({text: found.line({**best._asdict(), "width": problem.width, "replan": at.library.replan})})
    return found


# ---- the one that is used

_settled: dict[tuple[int, int, Problem], Algorithm | str] = {}
"""The algorithm that was checked and is right, or why the problem is refused."""

_lock = threading.RLock()
"""One thread checks; the others wait, and take what it found."""


def ready_for(problem: Problem, here: Here, like: Tensor, stream: int) -> Ready:
    """The plan of a problem by its algorithm, in this thread."""
    found: Ready | None = here.routes.get(problem)
    if found is None:
        refuse_capture(like)
        with torch.no_grad(), _lock:
            algorithm = chosen(problem, here, like, stream)
        found = here.routes[problem] = here.plan(problem, algorithm, like)
    return found


def refusal(problem: Problem, here: Here) -> str:
    found = _settled.get(_in_process(problem, here))
    return found if isinstance(found, str) else ""


def chosen(problem: Problem, here: Here, like: Tensor, stream: int) -> Algorithm:
    """The algorithm of a problem, checked now if it was not before."""
    known = _in_process(problem, here)
    found = _settled.get(known)
    if isinstance(found, str):
        raise BackendError(found)
    if found is not None:
        return found
    first, exact = stored(problem, here, like)
    if first is None or not exact:
        try:
            first = first_right(problem, here, like, stream, first or DEFAULT)
        except torch.OutOfMemoryError:
            # later there may be room; until then this GEMM is somebody else's
            raise BackendError(f"cuSPARSELt: no memory to check {problem.text}x{problem.width} with") from None
        except BackendError as error:
            _settled[known] = str(error)
            raise
    _settled[known] = first
    return first


def first_right(problem: Problem, here: Here, like: Tensor, stream: int, first: Algorithm) -> Algorithm:
    """The first algorithm that computes what it should, beginning with a given one."""
    ids = [Algorithm(i) for i in range(limit(problem, here, like))]
    trial, reasons = Trial(problem, here, like, stream), []
    for algorithm in dict.fromkeys([first, DEFAULT, *ids]):
        try:
            ready = trial.plan(algorithm)
            wrong = trial.wrong(lambda out, ready=ready: trial.run(ready, out))  # type: ignore[misc]
            if not wrong:
                return algorithm
            here.drop(ready)
        except BackendError as error:
            wrong = str(error).removeprefix("cuSPARSELt: ")
        reasons.append(f"{algorithm}: {wrong}")
    raise BackendError(f"cuSPARSELt: none of its algorithms computes {problem.text}x{problem.width} right: {'; '.join(reasons)}")


def limit(problem: Problem, here: Here, like: Tensor) -> int:
    """Algorithms of a problem have ids below this; raises where the library does not do such a GEMM at all."""
    ready = here.plan(problem, DEFAULT, like)
    with failures():
        return int(here.context.limit(ready.number))


def remember(problem: Problem, here: Here, algorithm: Algorithm) -> None:
    """From now on a problem is done by an algorithm that was checked."""
    _settled[_in_process(problem, here)] = algorithm
    here.routes.clear()


def settled(problem: Problem, here: Here) -> Algorithm | None:
    found = _settled.get(_in_process(problem, here))
    return None if isinstance(found, str) else found


def _in_process(problem: Problem, here: Here) -> tuple[int, int, Problem]:
    return here.library.version, here.device, problem


def _key(problem: Problem, here: Here, like: Tensor) -> str:
    return key("cusparselt", like.device, f"cuSPARSELt {version_text(here.library.version)}|{problem.text}", problem.width)


def stored(problem: Problem, here: Here, like: Tensor) -> tuple[Algorithm | None, bool]:
    """What a search has stored for problems like this one, and whether it was for this very width; None where there is nothing of use."""
    line = TABLE.get(_key(problem, here, like))
    if line is None:
        return None, False
    choice = line.get("choice")
    given = choice if isinstance(choice, dict) else {}
    numbers = [value for name in ("id", "splits", "mode", "width") if type(value := given.get(name)) is int]
    if len(numbers) != 4:
        return None, _ignored(f"{choice} is no choice")
    algorithm = Algorithm(*numbers[:3])
    if not -1 <= algorithm.id < limit(problem, here, like):
        return None, _ignored(f"this library has no algorithm {algorithm.id}")
    try:
        here.plan(problem, algorithm, like)
    except BackendError as error:
        return None, _ignored(str(error))
    if given.get("replan"):
        here.library.replan = True
    return algorithm, numbers[3] == problem.width


def _ignored(why: str) -> bool:
    warnings.warn(f"nmkernels: a choice in {TABLE.path()} is ignored: {why}. Run nm.tune again.", RuntimeWarning, stacklevel=3)
    return False


def forget() -> None:
    _settled.clear()
    TABLE.forget()
