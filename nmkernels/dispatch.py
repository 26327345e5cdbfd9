"""Choose the backend that runs an op, and explain the choice.

A backend registers a function for an op with ``@impl``. ``choose`` returns the one of highest priority that supports the call;
``verdicts`` explains why, and ``nm.explain`` does so for public functions. ``NMKERNELS_BACKEND=name`` forces a backend and raises if that
cannot run the call; without it unsupported backends are skipped, with a warning if only the compiled core is missing.

``plans`` caches the function of each kind of call (see ``ops/define.py``); ``@impl`` and ``forget`` clear it.
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
"""(whether the backend can run the call, the reason)."""


def always(*_args: Any) -> Verdict:
    """The ``supports`` of a backend that runs every valid call."""
    return True, "runs everything"


@dataclass(frozen=True)
class Impl:
    """One backend's function for one op.

    Args:
        fits: ``fits(*args)`` says whether it supports a call, from metadata alone, and why not.
        ready: ``ready(*args)`` says whether it can run a call that fits at this moment.
        search: ``search(op, *args, timer=None)`` finds, checks and stores its fastest launch or algorithm for such calls, for ``nm.tune``.
        compiles: the first call compiles for seconds.
        layout: ``layout(device)`` is the metadata layout in which its tensor cores read 2:4 operands.
    """

    op: str
    backend: str
    fn: Callable[..., Any]
    fits: Callable[..., Verdict]
    priority: int
    ready: Callable[..., Verdict] | None = None
    search: Callable[..., Any] | None = None
    compiles: bool = False
    layout: Callable[[Any], str] | None = None

    def can(self, *args: Any) -> Verdict:
        """Whether it can run ``op(*args)`` now, and why not."""
        verdict = self.fits(*args)
        return self.ready(*args) if verdict[0] and self.ready is not None else verdict

    def supports(self, *args: Any) -> Verdict:
        """Whether it can run ``op(*args)`` now and has not failed its check on this machine, and why not."""
        verdict = self.can(*args)
        wrong = known_wrong(self, args) if verdict[0] else ""
        return (False, wrong) if wrong else verdict


known_wrong: Callable[[Impl, Sequence[Any]], str] = lambda entry, args: ""  # noqa: E731
"""Why an implementation is not trusted with such calls on this machine, or empty; set by ``ops/verify.py``."""


# os.environ.get encodes the name at every call: 1 of the 9 us of a small op
environment: dict[Any, Any] = os.environ._data  # type: ignore[attr-defined]
ENV_KEY = os.environ.encodekey(ENV)

plans: dict[Hashable, Callable[..., Any]] = {}
"""The function that runs each kind of call, by its key ``ops.define.kind_of``."""

_impls: dict[str, list[Impl]] = {}
_logged: set[tuple[str, str, str]] = set()


def forget() -> None:
    """Choose again at the next call of each kind, because something that ``supports`` depends on has changed."""
    plans.clear()
    preferred_layout.cache_clear()


def impl(
    op: str, *, backend: str, priority: int, supports: Callable[..., Verdict] = always, **more: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated ``fn(*args, out=None)``, which takes the raw op's arguments, as a backend's implementation of ``op``.

    ``supports(*args)`` may depend only on metadata (shapes, strides, dtypes, devices, numbers) and on constants of the process, because its
    result is cached for all calls of the kind. ``ready`` is called at every call that ``supports`` accepts. ``more``: see ``Impl``.
    """

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        others = [i for i in _impls.get(op, []) if i.backend != backend]
        _impls[op] = sorted([*others, Impl(op, backend, fn, supports, priority, **more)], key=lambda i: -i.priority)
        forget()
        return fn

    return register


def implementations(op: str) -> list[Impl]:
    """The registered implementations of ``op``, highest priority first."""
    if op not in _impls:
        raise BackendError(f"no op is called {op!r}; ops are: {', '.join(sorted(_impls))}")
    return list(_impls[op])


def forced_backend() -> str | None:
    """The value of ``NMKERNELS_BACKEND``; None or empty if no backend is forced."""
    value = environment.get(ENV_KEY)
    return None if value is None else os.environ.decodevalue(value)


def choose(op: str, *args: Any) -> Impl:
    """The implementation that runs ``op(*args)``; ``BackendError`` if none can, or not the one that ``NMKERNELS_BACKEND`` forces."""
    return decide(op, args)[0]


@cache
def preferred_layout(op: str, device: Any) -> str:
    """The metadata layout that the first backend with tensor cores reads on a device; empty if there is no such backend."""
    layouts = (entry.layout(device) for entry in _impls[op] if entry.layout is not None)
    return next(filter(None, layouts), "")


def decide(op: str, args: Sequence[Any], prefer: str = "") -> tuple[Impl, bool]:
    """``choose``, and whether the choice may be cached for calls of the same metadata (no backend's ``ready`` was called).

    ``prefer`` names a backend that is tried before the others.
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
            reason = known_wrong(entry, args)
            can = not reason
        if can:
            if entry.backend == REFERENCE and not compiled_core().ok:
                missing = False, compiled_core().reason
                # only the CPU backend: GPU backends check for the core first, so their reason may hide others
                if any(i.backend == "cpu" and i.supports(*args) == missing for i in _impls[op]):
                    _warn_core_missing(missing[1])
            return entry, lasting
        if (op, entry.backend, reason) not in _logged:
            _logged.add((op, entry.backend, reason))
            log.debug("%s: %s declined: %s", op, entry.backend, reason)
    raise BackendError(verdicts(op, *args))


@cache
def _warn_core_missing(reason: str) -> None:
    warnings.warn(f"nmkernels runs without its compiled core, on the plain PyTorch reference, which is slow: {reason}.", stacklevel=2)


def _forced(op: str, backend: str, args: Sequence[Any]) -> Impl:
    known = {entry.backend: entry for entry in implementations(op)}
    if backend not in known:
        raise BackendError(f"{op}: {ENV}={backend!r} names no backend of this op; choose one of {', '.join(sorted(known))}.")
    can, reason = known[backend].can(*args)
    if not can:
        raise BackendError(f"{op}: backend {backend!r} is forced by {ENV} and cannot run this call: {reason}. Unset {ENV} to fall back.")
    return known[backend]


def verdicts(op: str, *args: Any) -> str:
    """Explain which backend would run the raw ``op(*args)`` and why each other one would not, one per line."""
    lines, chosen = [f"{op}:"], False
    forced = forced_backend()
    for entry in implementations(op):
        can, reason = entry.can(*args) if forced else entry.supports(*args)
        if forced and entry.backend != forced:
            state = f"skipped, {ENV}={forced}"
        elif not can:
            state = f"declined: {reason}"
        elif chosen:
            state = "can run, lower priority"
        else:
            state, chosen = "chosen", True
        lines.append(f"  {entry.backend:<10} {state}")
    if not chosen:
        lines.append("  no backend can run this call")
    return "\n".join(lines)
