"""Which of the library's algorithms does a product: what a search has stored, else the first that was checked and is right.

No algorithm is used unchecked. What a search stored was checked by it; anything else is checked at the first call of a product, outside of
graph capture: the library's default, and where that is wrong the others in order. That costs a float64 product and two runs, once in a
process for each product.
"""

from __future__ import annotations

import threading
import warnings
from typing import Any

import torch
from torch import Tensor

from ..._cusparselt import version_text
from ..._store import Table
from ...pattern import BackendError
from ._context import Here, Ready, failures, refuse_capture
from ._judge import Judge
from ._problem import Algorithm, Problem

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


__all__ = [
    "DEFAULT", "TABLE", "chosen", "first_right", "forget", "limit", "line_of", "name", "ready_for", "refusal", "remember", "stored",
]  # fmt: skip
