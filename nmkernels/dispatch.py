"""Which backend runs an op, why the others declined, and how to force one.

A backend registers a function for an op with ``@impl``. ``choose`` takes the willing one of highest
priority; ``verdicts`` tells the same story in words, and ``nm.explain`` for what a user calls. ``NMKERNELS_BACKEND=name`` forces a backend:
a forced backend that cannot run raises, an automatic one falls back; to the reference for want of the compiled core with a warning.

``plans`` remembers which function each kind of call came to; see ``ops/define.py``. A registration and ``forget`` clear it.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from .capability import compiled_core
from .pattern import BackendError

ENV = "NMKERNELS_BACKEND"
REFERENCE = "reference"
log = logging.getLogger("nmkernels.dispatch")
log.addHandler(logging.NullHandler())

Verdict = tuple[bool, str]
"""(can it run this call, the reason in words)."""


def always(*_args: Any) -> Verdict:
    """A ``supports`` for backends that run every valid call."""
    return True, "runs everything"


@dataclass(frozen=True)
class Impl:
    """One backend's function for one op.

    Args:
        fits: ``fits(*args)``: whether it can run a call, by metadata alone, and why not.
        ready: ``ready(*args)``, called where that says yes: whether it can now.
        search: ``search(op, *args, timer=None)``: finds, checks and stores the fastest of its launches or algorithms for such calls, for
            ``nm.tune``.
        compiles: its first call compiles for seconds.
        keeps: it keeps something of its own for each operand, by its version.
        layout: ``layout(device)``: the order of metadata in which its tensor cores read 2:4 operands there.
    """

    op: str
    backend: str
    fn: Callable[..., Any]
    fits: Callable[..., Verdict]
    priority: int
    ready: Callable[..., Verdict] | None = None
    search: Callable[..., Any] | None = None
    compiles: bool = False
    keeps: bool = False
    layout: Callable[[Any], str] | None = None

    def can(self, *args: Any) -> Verdict:
        """Whether it can run ``op(*args)`` now, and why not."""
        found = self.fits(*args)
        return self.ready(*args) if found[0] and self.ready is not None else found

    def supports(self, *args: Any) -> Verdict:
        """Whether it can, and is not known to be wrong on this machine."""
        found = self.can(*args)
        wrong = doubt(self, args) if found[0] else ""
        return (False, wrong) if wrong else found


def _no_doubt(entry: Impl, args: Sequence[Any]) -> str:
    return ""


doubt: Callable[[Impl, Sequence[Any]], str] = _no_doubt
"""Why an implementation is not trusted with such calls on this machine, empty where it is; ``ops/verify.py`` puts its own here."""


# os.environ.get encodes the name at every call, 1 us of the 9 that a small op takes
environment: dict[Any, Any] = os.environ._data  # type: ignore[attr-defined]
ENV_KEY = os.environ.encodekey(ENV)

plans: dict[Hashable, Callable[..., Any]] = {}
"""The function that runs each kind of call, by what ``ops.define.kind_of`` says of it."""

_impls: dict[str, list[Impl]] = {}
_said: set[tuple[str, str, str]] = set()


def forget() -> None:
    """Ask every backend again at the next call of each kind: what ``supports`` looks at has changed behind the arguments."""
    plans.clear()


def impl(
    op: str,
    *,
    backend: str,
    priority: int,
    supports: Callable[..., Verdict] = always,
    ready: Callable[..., Verdict] | None = None,
    search: Callable[..., Any] | None = None,
    compiles: bool = False,
    keeps: bool = False,
    layout: Callable[[Any], str] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated ``fn(*args, out=None)``, which takes the raw op's arguments; higher ``priority`` is asked first.

    ``supports(*args)`` may look at nothing but metadata (shapes, strides, dtypes, devices, numbers) and what lasts as long as the process:
    its answer is remembered for all calls of the kind. ``ready`` is asked at every call where that says yes. The others: see ``Impl``.
    """

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        entry = Impl(op, backend, fn, supports, priority, ready, search, compiles, keeps, layout)
        others = [i for i in _impls.get(op, []) if i.backend != backend]
        _impls[op] = sorted([*others, entry], key=lambda i: -i.priority)
        forget()
        return fn

    return register


def implementations(op: str) -> list[Impl]:
    """Every registered implementation of ``op``, the one asked first first."""
    if op not in _impls:
        raise BackendError(f"no op is called {op!r}; ops are: {', '.join(sorted(_impls))}")
    return list(_impls[op])


def forced_backend() -> str | None:
    """The backend that ``NMKERNELS_BACKEND`` names; None or empty if it names none."""
    value = environment.get(ENV_KEY)
    return None if value is None else os.environ.decodevalue(value)


def choose(op: str, *args: Any) -> Impl:
    """The implementation that runs ``op(*args)``; ``BackendError`` where the one that ``NMKERNELS_BACKEND`` forces cannot."""
    return decide(op, args)[0]


def preferred_layout(op: str, device: Any) -> str:
    """The order of metadata that the first backend with tensor cores prefers on a device; empty where no backend says."""
    found = (entry.layout(device) for entry in _impls[op] if entry.layout is not None)
    return next(filter(None, found), "")


def decide(op: str, args: Sequence[Any], prefer: str = "") -> tuple[Impl, bool]:
    """``choose``, and whether the choice may be cached for calls of the same metadata: no backend was asked if it is ready.

    ``prefer``: the backend that is asked first.
    """
    forced = forced_backend()
    if forced:
        entry = _forced(op, forced, args)
        return entry, entry.ready is None
    lasting = True
    entries = sorted(_impls[op], key=lambda entry: entry.backend != prefer) if prefer else _impls[op]
    for entry in entries:
        can, reason = entry.fits(*args)
        if can and entry.ready is not None:
            lasting = False
            can, reason = entry.ready(*args)
        if can:
            reason = doubt(entry, args)
            can = not reason
        if can:
            if entry.backend == REFERENCE:
                _warn_if_core_missing(op, args)
            return entry, lasting
        if (op, entry.backend, reason) not in _said:
            _said.add((op, entry.backend, reason))
            log.debug("%s: %s declined: %s", op, entry.backend, reason)
    raise BackendError(verdicts(op, *args))


def _warn_if_core_missing(op: str, args: Sequence[Any]) -> None:
    """Warn, once in a process, where the reference runs what the compiled core would run if it were there."""
    core = compiled_core()
    # what runs on GPUs asks for the core before anything else
    if not core.ok and any(i.backend == "cpu" and i.supports(*args) == (False, core.reason) for i in _impls[op]):
        _warn_core_missing(core.reason)


@cache
def _warn_core_missing(reason: str) -> None:
    warnings.warn(f"nmkernels runs without its compiled core, on the plain PyTorch reference, which is slow: {reason}.", stacklevel=2)


def _forced(op: str, backend: str, args: Sequence[Any]) -> Impl:
    known = {entry.backend: entry for entry in implementations(op)}
    if backend not in known:
        raise BackendError(f"{op}: {ENV}={backend!r} names no backend of this op; it has {', '.join(sorted(known))}.")
    can, reason = known[backend].can(*args)
    if not can:
        raise BackendError(
            f"{op}: backend {backend!r} was asked for by {ENV} and cannot run this call: {reason}. Unset {ENV} to fall back."
        )
    return known[backend]


def verdicts(op: str, *args: Any) -> str:
    """Which backend would run the raw ``op(*args)``, and why each other one would not, one line each."""
    lines, taken = [f"{op}:"], False
    forced = forced_backend()
    for entry in implementations(op):
        can, reason = entry.can(*args) if forced else entry.supports(*args)
        if forced and entry.backend != forced:
            state = f"not asked, {ENV}={forced}"
        elif not can:
            state = f"declined: {reason}"
        elif taken:
            state = "can run, lower priority"
        else:
            state, taken = "chosen", True
        lines.append(f"  {entry.backend:<10} {state}")
    if not taken:
        lines.append("  no backend can run this call")
    return "\n".join(lines)
