"""Choose the method of each GEMM of a layer, by a rule or by measurements.

The choice comes from the first of these that applies:

1. ``torch.use_deterministic_algorithms(True)``: dense, if the weight is available in dense layout;
2. ``NMKERNELS_CHOICE=dense`` or ``packed``, or a backend forced by ``NMKERNELS_BACKEND``, which implies the sparse op;
3. the table of ``nm.tune``'s measurements on this device, with these versions, for these GEMMs and number of tokens (rounded up to a power
   of two);
4. with ``NMKERNELS_CHOICE=measured``, a measurement now;
5. the rule: the method with the least estimated time (``estimate``), including a margin and the time to make W̃; on a GPU it also leaves
   out the estimate of a gradient where drawing it takes longer than the GEMM gains.

Nothing is timed unless a setting asks for it, so the same machine, versions and threads give the same choices and the same bits. GEMMs of
one layer that read the same weight are chosen together. Choices are cached; after a change of the environment or the number of threads,
call ``forget``.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch

from ..capability import compiled_core
from ..dispatch import REFERENCE, forced_backend
from ..dispatch import choose as dispatched
from ..ops.integers import BITS
from ..pattern import NMError, Pattern
from ..timing import TABLE
from ..timing.compare import LEAST_GAIN
from ..timing.modes import undisturbed
from . import estimate
from .candidates import measure_and_record
from .methods import AS_FLOAT32, DENSE, EXPAND, OP, UNESTIMATED, Method, arguments, methods, optional
from .problem import Problem, key, plain

ENV = "NMKERNELS_CHOICE"
SETTINGS = ("", "dense", "packed", "measured")

REMEMBERED = 4096
"""Size of the cache of choices; when full it is cleared."""

MOST_ROUTES = 256
"""Size of a layer's cache of routes; when full it is cleared."""

FEW_AND_MANY = (1, 17)
"""Numbers of tokens that stand for all: kernels for few tokens take up to 16 at most."""

TOKEN_CLASSES = tuple(1 << k for k in range(30, -1, -1))

ESTIMATED = {DENSE.name: "dense", OP: "sparse", EXPAND: EXPAND, AS_FLOAT32: AS_FLOAT32, UNESTIMATED.name: "dense"}
"""Method name → name in ``estimate``, for the methods that the rule considers."""

log = logging.getLogger("nmkernels.choice")
log.addHandler(logging.NullHandler())

Choice = tuple[Method, ...]
"""The method of each problem."""

_chosen: dict[tuple[Problem, ...], Choice] = {}
_revision = -1
_measuring = threading.RLock()


def setting() -> str:
    """The value of ``NMKERNELS_CHOICE``; an unknown one raises ``NMError``."""
    value = os.environ.get(ENV, "")
    if value == "table":  # the default, which earlier versions had to set
        return ""
    if value not in SETTINGS:
        raise NMError(f"{ENV}={value!r} is unknown; set one of {', '.join(SETTINGS[1:])}, or unset it.")
    return value


class Routes(dict[Hashable, Any]):
    """What a layer has chosen for its calls, by kind of call, until it is out of date; not copied or saved."""

    def put(self, kind: Hashable, route: Any) -> Any:
        """Remember and return ``route``."""
        if len(self) >= MOST_ROUTES:
            self.clear()
        self[kind] = route
        return route

    def __reduce__(self) -> tuple[type[Routes], tuple[()]]:
        return Routes, ()


def choose(*problems: Problem) -> Choice:
    """Choose the method of each of ``problems``, GEMMs of one layer that read the same weight.

    Cached: for equal problems a lookup in a dict.
    """
    if torch.compiler.is_compiling() or type(problems[0].tokens) is not int:
        # functions that torch does not trace must return plain values, hence text; and torch 2.8 could not trace a slice of a NamedTuple
        text = _for_graphs(*[(p.role, *tuple(p)[2:]) for p in problems])
        return tuple([Method(*part.split("|")) for part in text.split(", ")])
    if torch._C._get_deterministic_algorithms():
        return tuple(map(_baseline, problems))
    if _revision != TABLE.revision:
        _restart()
    choice = _chosen.get(problems)
    return _find(problems) if choice is None else choice


def _restart() -> None:
    global _revision
    _chosen.clear()
    _revision = TABLE.revision


def _find(problems: tuple[Problem, ...]) -> Choice:
    choice = _required(problems) or _tuned(problems)
    if choice is None and setting() == "measured" and undisturbed(problems[0].device):
        with _measuring:
            if not _tuned(problems):  # another thread may have come first
                try:
                    measure_and_record(*problems)
                except (RuntimeError, MemoryError) as error:  # mostly out of memory
                    log.warning("%s: not measured: %s", problems[0].words(), error)
            choice = _tuned(problems)
    if _revision != TABLE.revision or len(_chosen) >= REMEMBERED:
        _restart()
    choice = _chosen[problems] = choice or rule(*problems)
    return choice


def _baseline(p: Problem) -> Method:
    """Dense if the weight is available in dense layout, else the sparse op."""
    return methods(p)[0]


def _required(problems: tuple[Problem, ...]) -> Choice | None:
    """The choice that the environment prescribes, or None."""
    how = setting()
    if how == "dense" or torch._C._get_deterministic_algorithms():
        return tuple(map(_baseline, problems))
    if forced_backend() or how == "packed":
        return tuple(next((m for m in methods(p) if m.name == OP), DENSE) for p in problems)
    return None


def _tuned(problems: tuple[Problem, ...]) -> Choice | None:
    """The measured choice; None if the table has no such line or it names unknown methods."""
    line = TABLE.get(key(*problems)) if problems[0].device.type in ("cpu", "cuda") else None
    names = str(line.get("choice", "")).split(", ") if line else []
    if len(names) != len(problems):
        return None
    chosen = [next((m for m in methods(p) if m.name == name), None) for p, name in zip(problems, names, strict=True)]
    return None if None in chosen else tuple(m for m in chosen if m is not None)


def rule(*problems: Problem) -> Choice:
    """Choose the methods with the least total estimate.

    A method other than the baseline must win by its margin. The time to make each form of a changing W̃ that is read counts once. If
    there are no estimates for the machine or dtype, the baseline is chosen.
    """
    if not all(map(estimable, problems)):
        return tuple(map(_baseline, problems))
    times: list[dict[Method, float]] = []
    for p in problems:
        compared = tuple(ESTIMATED)
        if p.device.type != "cpu":  # there the op's kernels decompress where that is faster, so "expand" is not a separate option
            compared = DENSE.name, OP if not p.integers or _has_kernel(p) else EXPAND
        names = {m: ESTIMATED[m.name] for m in methods(p, backends=False) if m.name in compared}
        times.append({m: estimate.seconds(name, p) * estimate.margin(name, p) for m, name in names.items()})
    costs: dict[Choice, float] = {}
    for choice in product(*times):
        forms = sorted({"dense" if m == DENSE else "packed" for m in choice}) if problems[0].changing else []
        making = sum([estimate.making(form, problems[0]) for form in forms])
        costs[choice] = making + sum([seconds[m] for m, seconds in zip(choice, times, strict=True)])
    least = min(costs, key=costs.__getitem__)
    best = list(least)
    for i, p in enumerate(problems):
        if optional(p):  # whether drawing the estimate of the gradient and multiplying it takes less time than multiplying the gradient
            form, name = "dense" if best[i] == DENSE else "packed", ESTIMATED[best[i].name]
            if estimate.making(form, p) + estimate.seconds(name, p) >= estimate.seconds("dense", p):
                best[i] = UNESTIMATED
    return tuple(best)


def _has_kernel(p: Problem) -> bool:
    """Whether a backend other than the reference multiplies a weight with integers in this problem."""
    pattern, steps = Pattern(p.n, p.m), p.cols // p.group if p.group else 1
    bits, stored = BITS[p.values], pattern.kept(p.cols)
    x = torch.empty(p.tokens, p.cols, dtype=p.dtype, device=p.device)
    values = x.new_empty(p.rows, stored if bits == 8 else -(-stored // 2), dtype=torch.int8 if bits == 8 else torch.uint8)
    indices = x.new_empty(p.rows, pattern.index_bytes(p.cols, True), dtype=torch.uint8)
    step = x.new_empty(p.rows, steps, dtype=torch.bfloat16)
    return dispatched("nm_linear_integers", *arguments(p, "rows", (values, indices, step), x)).backend != REFERENCE


def unmeasured(*problems: Problem) -> str:
    """A warning that the choice for these problems is an extrapolation from other kinds of machines; empty if it is not."""
    if setting() or forced_backend() or not all(map(estimable, problems)) or all(map(estimate.measured, problems)):
        return ""
    if TABLE.get(key(*problems)) is not None:
        return ""
    kind = estimate.machine(problems[0].device)
    return f"the choice of GEMMs is unmeasured on {kind} in {plain(problems[0].dtype)}: nm.tune(model, tokens=...) measures it"


def estimable(p: Problem) -> bool:
    """Whether estimates apply: only to compiled kernels, which do not support float64, and on a CPU to sparse weights.

    A CPU's op decodes dense integers for torch's GEMM itself, where that is faster.
    """
    if p.dtype == torch.float64 or p.device.type not in ("cpu", "cuda") or (p.integers and p.m == 1 and p.device.type == "cpu"):
        return False
    return p.device.type != "cpu" or compiled_core().ok


# ---- for compiled graphs


def _for_graphs(*problems: tuple[Any, ...]) -> str:
    """``for_graphs``, with problems as tuples without their tokens, and the choice as text."""
    choice = for_graphs(*(Problem(role, TOKEN_CLASSES[0], *rest) for role, *rest in problems))
    return ", ".join("|".join(method) for method in choice)


def for_graphs(*many: Problem) -> Choice:
    """The choice in a compiled graph for any number of tokens: the table's for the most tokens measured, else the rule for very many."""
    required = _required(many)
    if required is not None:
        return required
    for tokens in TOKEN_CLASSES:
        sized = tuple(p._replace(tokens=tokens) for p in many)
        choice = _tuned(sized)
        if choice is not None:
            return _in_a_graph(sized, choice)
    alone = many[0].integers and many[0].device.type != "cpu" and DENSE.form not in many[0].forms
    if alone and not all(_has_kernel(many[0]._replace(tokens=tokens)) for tokens in FEW_AND_MANY):
        return (Method(EXPAND, "rows"),)  # the op's reference multiplies in float32
    # decompressing at every call would be far slower for a few tokens, so a compressed weight is left to the op; a graph would also convert
    # indices at every call
    return rule(*many) if all(DENSE.form in p.forms for p in many) else tuple(_baseline(p._replace(tokens=FEW_AND_MANY[0])) for p in many)


def _in_a_graph(problems: tuple[Problem, ...], choice: Choice) -> Choice:
    """``choice`` if it names no backend, else the fastest measured choice that names none, since a graph calls the op."""
    if not any(m.backend for m in choice):
        return choice
    times: dict[str, float] = (TABLE.get(key(*problems)) or {}).get("us") or {}
    plans = product(*([m for m in methods(p) if not m.backend] for p in problems))
    usable = {name: plan for plan in plans if (name := ", ".join(m.name for m in plan)) in times}
    if not usable:
        return tuple(Method(OP, m.form) if m.backend else m for m in choice)
    best = min(usable, key=times.__getitem__)
    base = ", ".join(_baseline(p).name for p in problems)
    return usable[base if base in usable and times[base] < LEAST_GAIN * times[best] else best]


# like torch.compiler.assume_constant_result, which would import torch._dynamo for a second: tracing keeps the result as a constant
_for_graphs._dynamo_marked_constant = True  # type: ignore[attr-defined]


# ---- for tests and benchmarks


@contextmanager
def using(*choice: tuple[Problem, Method]) -> Iterator[None]:
    """Within this context use these methods for these problems; afterwards they are chosen again."""
    problems, chosen = tuple(p for p, _ in choice), tuple(m for _, m in choice)
    choose(*problems)  # clears an outdated cache first
    _chosen[problems] = chosen
    try:
        yield
    finally:
        _chosen.pop(problems, None)


def forget() -> None:
    """Read the table and the environment again."""
    TABLE.forget()
    estimate.forget()
    _restart()
