"""Choose the library's algorithm for a GEMM: the one that a search stored, else the first correct one.

Some of the library's algorithms give wrong results, always or sometimes, so each is checked before use (``timing.Validator``). A search
checks what it stores. Without a search, the first call of a GEMM, outside of graph capture, checks the library's default and, if that is
wrong, the others in order. This costs a float64 GEMM and two runs, once per process and GEMM.
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
from ...timing import TABLE, Candidate, Measurement, Seconds, Timer, Validator, key, measure
from .blobs import by_other_backend, compress_as
from .context import LAYOUTS, Algorithm, Matmul, Plan, Session, device_and_stream, failures, on_other_device, refuse_capture, session_on

DEFAULT = Algorithm()

SPLITS = (*((splits, mode) for splits in (2, 4, 8) for mode in (1, 2)), (1, 6))
"""(parts, mode) of splitting the sum: mode 1 uses one kernel, 2 two kernels, 6 stream-K."""


class Trial:
    """Random operands of one problem and the validator of its result. The global random state is not used."""

    def __init__(self, problem: Matmul, session: Session, like: Tensor, stream: int) -> None:
        self.problem, self.session, self.stream = problem, session, stream
        generator = torch.Generator(like.device).manual_seed(24)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=like.device, dtype=torch.float32)

        def matrix(rows: int) -> Tensor:
            return normal(*((p.width, rows) if p.by_token else (rows, p.width)))

        p = problem
        full, other = normal(p.rows, p.cols), matrix(p.cols)
        sparse, self.dense = _of_dtype(by_other_backend("nm_prune", full, 2, 4), p.dtype), _of_dtype(other, p.dtype)
        self.bias = normal(p.rows).to(p.bias_dtype) if p.bias else None
        self.residual = _of_dtype(matrix(p.rows), p.out) if p.residual else None
        self.blob = compress_as(p.layout, sparse.t() if LAYOUTS[p.layout][0] else sparse, session, stream)
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
        # the first call may be under autocast, which would change the dtype
        with torch.autocast(s.device.type, enabled=False):
            y = b @ s.t() if p.by_token else s @ b
        if self.bias is not None:
            y = y + (self.bias.to(dtype) if p.by_token else self.bias.to(dtype)[:, None])
        y = {"": lambda y: y, "relu": F.relu, "gelu": F.gelu}[p.activation](y)
        return y if self.residual is None else y + self.residual.to(dtype)

    def wrong(self, run: Callable[[Tensor], object]) -> str:
        """What is wrong with the result of ``run``; empty if it is correct."""
        library = self.session.library
        wrong = self.validator(run)
        if wrong and self.bias is not None and not library.replan:
            # a plan may keep the address of the bias that it was made with; then a new plan is needed for each bias
            library.replan = True
            wrong = self.validator(run)
            library.replan = not wrong
        return wrong

    def run(self, plan: Plan, out: Tensor, moved: bool = True) -> None:
        """Run the GEMM; if ``moved``, with the bias at a new address and NaN at the old one, to detect plans that keep the address."""
        if self.bias is not None and moved:
            before, self.bias = self.bias, self.bias.clone()
            before.fill_(torch.nan)
        self.session.run(plan, self.blob.data.data_ptr(), self.dense, out, self.bias, self.residual, self.stream, 1.0)

    def candidate(self, algorithm: Algorithm) -> Candidate:
        plan = partial(self.session.plan, self.problem, algorithm, self.dense)

        def calls() -> list[Callable[[], None]]:
            return [partial(self.run, plan(), torch.empty_like(self.validator.theirs), moved=False)]

        return Candidate(str(algorithm), lambda out: self.run(plan(), out), calls)


def _of_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    return (3 * x).round().to(dtype) if dtype == torch.int8 else x.to(dtype)


# ---- the fastest


def search_gemm(problem: Matmul, like: Tensor, timer: Seconds | None = None) -> Measurement:
    """Check and time every algorithm of a problem, on random operands on the device of ``like``; see ``search``."""
    device, stream = device_and_stream(like)
    if on_other_device(like, device):
        with torch.cuda.device(device):
            return search_gemm(problem, like, timer)
    refuse_capture(like)
    session = session_on(device)
    try:
        with torch.no_grad(), _lock:
            return _search(problem, session, like, stream, Timer(like.device, timer))
    except torch.OutOfMemoryError:
        raise BackendError(f"cuSPARSELt: no memory to search {problem.text}x{problem.width} in") from None


def _search(problem: Matmul, session: Session, like: Tensor, stream: int, timer: Timer) -> Measurement:
    by_name = {str(a): a for a in (DEFAULT, *(Algorithm(i) for i in range(limit(problem, session, like))))}
    trial, text = Trial(problem, session, like, stream), _key(problem, session, like)

    def timed(algorithms: Iterable[Algorithm]) -> Measurement:
        return measure(text, [trial.candidate(a) for a in algorithms], trial.wrong, timer)

    measured = timed(by_name.values())
    fastest = sorted(measured.seconds, key=measured.seconds.__getitem__)[:3]  # only for these splits are tried
    split = {str(a): a for name in fastest for a in (Algorithm(by_name[name].id, *way) for way in SPLITS)}
    if split:
        measured.extend(timed(split.values()))
    session.forget(problem)
    if not measured.seconds:
        measured.note = "nothing to store"
        return measured
    best = (by_name | split)[measured.best]
    remember(problem, session, best)
    # ``replan``: whether plans keep the address of their bias, as the check found
    measured.store({**best._asdict(), "width": problem.width, "replan": session.library.replan})
    return measured


# ---- the one that is used

_checked: dict[tuple[int, int, Matmul], Algorithm | str] = {}
"""The checked algorithm of each problem, or why the library cannot run it."""

_lock = threading.RLock()
"""One thread checks; the others wait for its result."""


def plan_for(problem: Matmul, session: Session, like: Tensor, stream: int) -> Plan:
    """This thread's plan for a problem; its algorithm is checked first if it was not before."""
    plan = session.routes.get(problem)
    if plan is None:
        refuse_capture(like)
        with torch.no_grad(), _lock:
            algorithm = checked_algorithm(problem, session)
            if algorithm is None:
                algorithm = _chosen(problem, session, like, stream)
                _checked[session.library.version, session.device, problem] = algorithm
        if isinstance(algorithm, str):
            raise BackendError(algorithm)
        plan = session.routes[problem] = session.plan(problem, algorithm, like)
    return plan


def checked_algorithm(problem: Matmul, session: Session) -> Algorithm | str | None:
    """The algorithm of a problem, or why the library cannot run it; None if not checked yet."""
    return _checked.get((session.library.version, session.device, problem))


def remember(problem: Matmul, session: Session, algorithm: Algorithm) -> None:
    """Use a checked algorithm for a problem from now on."""
    _checked[session.library.version, session.device, problem] = algorithm
    session.routes.clear()


def _chosen(problem: Matmul, session: Session, like: Tensor, stream: int) -> Algorithm | str:
    first, exact = stored(problem, session, like)
    if first is not None and exact:
        return first
    try:
        return first_right(problem, session, like, stream, first or DEFAULT)
    except torch.OutOfMemoryError:
        # not cached: there may be memory later; until then another backend runs this GEMM
        raise BackendError(f"cuSPARSELt: no memory to check {problem.text}x{problem.width} with") from None
    except BackendError as error:
        return str(error)


def first_right(problem: Matmul, session: Session, like: Tensor, stream: int, first: Algorithm) -> Algorithm:
    """The first correct algorithm, starting with ``first``."""
    ids = [Algorithm(i) for i in range(limit(problem, session, like))]
    trial, reasons = Trial(problem, session, like, stream), []
    for algorithm in dict.fromkeys([first, DEFAULT, *ids]):
        try:
            wrong = trial.wrong(trial.candidate(algorithm).run)
            if not wrong:
                return algorithm
            session.drop(session.plan(problem, algorithm, like))
        except BackendError as error:
            wrong = str(error).removeprefix("cuSPARSELt: ")
        reasons.append(f"{algorithm}: {wrong}")
    raise BackendError(f"cuSPARSELt: none of its algorithms computes {problem.text}x{problem.width} correctly: {'; '.join(reasons)}")


def limit(problem: Matmul, session: Session, like: Tensor) -> int:
    """The number of algorithm ids of a problem; raises if the library does not support such a GEMM."""
    plan = session.plan(problem, DEFAULT, like)
    with failures():
        return int(session.context.limit(plan.number))


def _key(problem: Matmul, session: Session, like: Tensor) -> str:
    return key("cusparselt", like.device, f"cuSPARSELt {version_text(session.library.version)}|{problem.text}", problem.width)


def stored(problem: Matmul, session: Session, like: Tensor) -> tuple[Algorithm | None, bool]:
    """The algorithm that a search stored for problems like this one, or None, and whether it was for exactly this width."""
    line = TABLE.get(_key(problem, session, like))
    if line is None:
        return None, False
    choice, end = line.get("choice"), limit(problem, session, like)
    fields = choice if isinstance(choice, dict) else {}
    numbers = [value for name in ("id", "splits", "mode", "width") if type(value := fields.get(name)) is int]
    algorithm = Algorithm(*numbers[:3])
    try:
        if len(numbers) != 4:
            raise BackendError(f"{choice} is not a valid entry")
        if not -1 <= algorithm.id < end:
            raise BackendError(f"this library has no algorithm {algorithm.id}")
        session.plan(problem, algorithm, like)
    except BackendError as error:
        text = f"nmkernels: a choice in {TABLE.path()} is ignored: {error}. Run nm.tune again."
        warnings.warn(text, RuntimeWarning, stacklevel=2)
        return None, False
    if fields.get("replan"):
        session.library.replan = True
    return algorithm, numbers[3] == problem.width
