"""Which of the library's algorithms does a GEMM: what a search has stored, else the first that was checked and is right.

Some of the library's algorithms are wrong, or not always right, so none is used unchecked (``tuning.Validator``). What a search stored was
checked by it; anything else is checked at the first call of a GEMM, outside of graph capture: the library's default, and where that is
wrong the others in order. That costs a float64 GEMM and two runs, once in a process for each GEMM.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ...capability import version_text
from ...pattern import BackendError
from ...tuning import TABLE, Candidate, Measurement, Seconds, Timer, Validator, key, measure
from .blobs import by_another, compress_as
from .context import LAYOUTS, Algorithm, Here, Problem, Ready, elsewhere, failures, here, place, refuse_capture

DEFAULT = Algorithm()

SPLITS = (*((splits, mode) for splits in (2, 4, 8) for mode in (1, 2)), (1, 6))
"""Ways to split the sum: into how many parts, in one kernel or two; and stream-K."""

SPLIT_BEST = 3
"""Of so many algorithms, the fastest ones, the split is tried."""


class Trial:
    """Random operands of one problem, and what is right for them. The caller's random numbers are not touched."""

    def __init__(self, problem: Problem, here: Here, like: Tensor, stream: int) -> None:
        self.problem, self.here, self.stream = problem, here, stream
        generator = torch.Generator(like.device).manual_seed(24)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=like.device, dtype=torch.float32)

        def matrix(rows: int) -> Tensor:
            return normal(*((p.width, rows) if p.by_token else (rows, p.width)))

        p = problem
        full, other = normal(p.rows, p.cols), matrix(p.cols)
        sparse, self.dense = _of_dtype(by_another("nm_prune", full, 2, 4), p.dtype), _of_dtype(other, p.dtype)
        self.bias = normal(p.rows).to(p.bias_dtype) if p.bias else None
        self.residual = _of_dtype(matrix(p.rows), p.out) if p.residual else None
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

    def run(self, ready: Ready, out: Tensor, moved: bool = True) -> None:
        """The GEMM; unless it is timed, its bias lies elsewhere than before, where no number is any more."""
        if self.bias is not None and moved:
            before, self.bias = self.bias, self.bias.clone()
            before.fill_(torch.nan)
        self.here.run(ready, self.blob.address, self.dense, out, self.bias, self.residual, self.stream, 1.0)

    def candidate(self, algorithm: Algorithm) -> Candidate:
        plan = partial(self.here.plan, self.problem, algorithm, self.dense)

        def calls() -> list[Callable[[], None]]:
            return [partial(self.run, plan(), torch.empty_like(self.validator.theirs), moved=False)]

        return Candidate(str(algorithm), lambda out: self.run(plan(), out), calls)


def _of_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    return (3 * x).round().to(dtype) if dtype == torch.int8 else x.to(dtype)


# ---- the fastest


def search_gemm(problem: Problem, like: Tensor, timer: Seconds | None = None) -> Measurement:
    """Check and time every algorithm of a problem, on random operands on the device of ``like``; see ``search``."""
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


def _search(problem: Problem, at: Here, like: Tensor, stream: int, timer: Timer) -> Measurement:
    by_name = {str(a): a for a in (DEFAULT, *(Algorithm(i) for i in range(limit(problem, at, like))))}
    trial, text = Trial(problem, at, like, stream), _key(problem, at, like)

    def timed(algorithms: Iterable[Algorithm]) -> Measurement:
        return measure(text, [trial.candidate(a) for a in algorithms], trial.wrong, timer)

    found = timed(by_name.values())
    fastest = sorted(found.seconds, key=found.seconds.__getitem__)[:SPLIT_BEST]
    split = {str(a): a for name in fastest for a in (Algorithm(by_name[name].id, *way) for way in SPLITS)}
    if split:
        found.extend(timed(split.values()))
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
    """The plan of a problem by its algorithm, which is checked now if it was not before, in this thread."""
    found = here.routes.get(problem)
    if found is None:
        refuse_capture(like)
        with torch.no_grad(), _lock:
            algorithm = settled(problem, here)
            if algorithm is None:
                algorithm = _chosen(problem, here, like, stream)
                _settled[here.library.version, here.device, problem] = algorithm
        if isinstance(algorithm, str):
            raise BackendError(algorithm)
        found = here.routes[problem] = here.plan(problem, algorithm, like)
    return found


def settled(problem: Problem, here: Here) -> Algorithm | str | None:
    """The algorithm of a problem, or why it is refused; None before it is checked."""
    return _settled.get((here.library.version, here.device, problem))


def remember(problem: Problem, here: Here, algorithm: Algorithm) -> None:
    """From now on a problem is done by an algorithm that was checked."""
    _settled[here.library.version, here.device, problem] = algorithm
    here.routes.clear()


def _chosen(problem: Problem, here: Here, like: Tensor, stream: int) -> Algorithm | str:
    first, exact = stored(problem, here, like)
    if first is not None and exact:
        return first
    try:
        return first_right(problem, here, like, stream, first or DEFAULT)
    except torch.OutOfMemoryError:
        # later there may be room; until then this GEMM is somebody else's
        raise BackendError(f"cuSPARSELt: no memory to check {problem.text}x{problem.width} with") from None
    except BackendError as error:
        return str(error)


def first_right(problem: Problem, here: Here, like: Tensor, stream: int, first: Algorithm) -> Algorithm:
    """The first algorithm that computes what it should, beginning with a given one."""
    ids = [Algorithm(i) for i in range(limit(problem, here, like))]
    trial, reasons = Trial(problem, here, like, stream), []
    for algorithm in dict.fromkeys([first, DEFAULT, *ids]):
        try:
            wrong = trial.wrong(trial.candidate(algorithm).run)
            if not wrong:
                return algorithm
            here.drop(here.plan(problem, algorithm, like))
        except BackendError as error:
            wrong = str(error).removeprefix("cuSPARSELt: ")
        reasons.append(f"{algorithm}: {wrong}")
    raise BackendError(f"cuSPARSELt: none of its algorithms computes {problem.text}x{problem.width} right: {'; '.join(reasons)}")


def limit(problem: Problem, here: Here, like: Tensor) -> int:
    """Algorithms of a problem have ids below this; raises where the library does not do such a GEMM at all."""
    ready = here.plan(problem, DEFAULT, like)
    with failures():
        return int(here.context.limit(ready.number))


def _key(problem: Problem, here: Here, like: Tensor) -> str:
    return key("cusparselt", like.device, f"cuSPARSELt {version_text(here.library.version)}|{problem.text}", problem.width)


def stored(problem: Problem, here: Here, like: Tensor) -> tuple[Algorithm | None, bool]:
    """What a search has stored for problems like this one, and whether it was for this very width; None where there is nothing of use."""
    line = TABLE.get(_key(problem, here, like))
    if line is None:
        return None, False
    choice, end = line.get("choice"), limit(problem, here, like)
    given = choice if isinstance(choice, dict) else {}
    numbers = [value for name in ("id", "splits", "mode", "width") if type(value := given.get(name)) is int]
    algorithm = Algorithm(*numbers[:3])
    try:
        if len(numbers) != 4:
            raise BackendError(f"{choice} is no choice")
        if not -1 <= algorithm.id < end:
            raise BackendError(f"this library has no algorithm {algorithm.id}")
        here.plan(problem, algorithm, like)
    except BackendError as error:
        text = f"nmkernels: a choice in {TABLE.path()} is ignored: {error}. Run nm.tune again."
        warnings.warn(text, RuntimeWarning, stacklevel=2)
        return None, False
    if given.get("replan"):
        here.library.replan = True
    return algorithm, numbers[3] == problem.width
