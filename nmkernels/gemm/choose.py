"""The one place that chooses how the GEMMs of a layer are done: by rule, or by what was measured where somebody asked for it.

The answer comes from, in this order:

1. ``torch.use_deterministic_algorithms(True)``: the dense layout where there is one;
2. ``NMKERNELS_CHOICE=dense`` or ``packed``, or a backend that ``NMKERNELS_BACKEND`` forces, which means the op;
3. the table of what ``nm.tune`` measured on this device, with these versions, for these GEMMs and as many tokens (up to a power of two);
4. with ``NMKERNELS_CHOICE=measured``, measuring now;
5. the rule: the method with the least estimate (``estimate``), dense among them, its margin and the making of W̃ counted.

Without such a setting nothing is timed: the same machine, versions and threads give the same choices, and so the same bits. GEMMs of one
layer that read one weight are chosen together. Each answer is remembered; after a change of the environment or the number of threads, call
``forget``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch

from ..capability import compiled_core
from ..dispatch import forced_backend, implementations
from ..tuning import TABLE
from ..tuning.measure import LEAST_GAIN
from ..tuning.setting import reproducible, setting, undisturbed
from . import estimate
from .methods import AS_FLOAT32, DENSE, EXPAND, OP, Method, methods, op_of
from .problem import Problem, key, plain

REMEMBERED = 4096
"""GEMMs whose choice is remembered; then all are forgotten and looked up again."""

TOKEN_CLASSES = tuple(1 << k for k in range(30, -1, -1))

ESTIMATED = {DENSE.name: "dense", OP: "sparse", EXPAND: EXPAND, AS_FLOAT32: AS_FLOAT32}
"""The methods that the rule knows, by what ``estimate`` calls them."""

log = logging.getLogger("nmkernels.choice")
log.addHandler(logging.NullHandler())

Choice = tuple[Method, ...]
"""The method of each problem."""

_chosen: dict[tuple[Problem, ...], Choice] = {}
_revision = -1
_measuring = threading.RLock()


def choose(*problems: Problem) -> Choice:
    """The methods of the GEMMs of one layer that read one weight, one for each problem.

    Called again with equal problems it is a lookup in a dict.
    """
    if torch.compiler.is_compiling() or type(problems[0].tokens) is not int:
        # torch 2.8 cannot trace a slice of a NamedTuple, and keeps of what it does not trace only plain values
        text = _for_graphs(*[(p.role, *tuple(p)[2:]) for p in problems])
        return tuple([Method(*part.split("|")) for part in text.split(", ")])
    if torch._C._get_deterministic_algorithms():
        return tuple(map(_baseline, problems))
    if _revision != TABLE.revision:
        _restart()
    found = _chosen.get(problems)
    return _find(problems) if found is None else found


def _restart() -> None:
    global _revision
    _chosen.clear()
    _revision = TABLE.revision


def _find(problems: tuple[Problem, ...]) -> Choice:
    for p in problems:
        p.check()
    found = _required(problems) or _tuned(problems)
    if found is None and setting() == "measured" and undisturbed(problems[0].device):
        with _measuring:
            found = _tuned(problems) or _measured(problems)  # another thread may have come first
    if _revision != TABLE.revision or len(_chosen) >= REMEMBERED:
        _restart()
    found = _chosen[problems] = found or rule(*problems)
    return found


def _baseline(p: Problem) -> Method:
    """The dense layout where there is one, else the op."""
    return methods(p)[0]


def _required(problems: tuple[Problem, ...]) -> Choice | None:
    """What the environment requires; None where it leaves the choice open."""
    how = setting()
    if how == "dense" or reproducible():
        return tuple(map(_baseline, problems))
    if forced_backend() or how == "packed":
        return tuple(next((m for m in methods(p) if m.name == OP), DENSE) for p in problems)
    return None


def _tuned(problems: tuple[Problem, ...]) -> Choice | None:
    """What was measured; None where the table has no such line, or one that names methods that there are not."""
    line = TABLE.get(key(*problems)) if problems[0].device.type in ("cpu", "cuda") else None
    names = str((line or {}).get("choice", "")).split(", ")
    if len(names) != len(problems):
        return None
    found = [next((m for m in methods(p) if m.name == name), None) for p, name in zip(problems, names, strict=True)]
    return None if None in found else tuple(m for m in found if m is not None)


def _measured(problems: tuple[Problem, ...]) -> Choice | None:
    from .tune import measure_and_record  # which times, and is needed only where that is asked for

    try:
        measure_and_record(*problems)
    except (RuntimeError, MemoryError) as error:  # out of memory, mostly: then it is no time for measuring
        log.warning("%s: not measured: %s", problems[0].words(), error)
    return _tuned(problems)


def rule(*problems: Problem) -> Choice:
    """The methods with the least estimated time in all.

    A method other than the baseline has to be better by its margin, and each form of a changing W̃ that is read is made once. Where
    nothing is known of a kind of machine or a dtype, it is the baseline.
    """
    # on a GPU the op's own kernels decompress where that is faster
    known = ESTIMATED if problems[0].device.type == "cpu" else (DENSE.name, OP)
    options = [[m for m in methods(p) if m.name in known] for p in problems]
    if not all(map(estimable, problems)):
        return tuple(some[0] for some in options)
    costs = {}
    for choice in product(*options):
        made = {"dense" if m == DENSE else "packed" for m in choice} if problems[0].changing else set()
        costs[choice] = sum(estimate.making(form, problems[0]) for form in sorted(made)) + sum(
            estimate.seconds(ESTIMATED[m.name], p) * (1.0 if m == some[0] else estimate.margin(ESTIMATED[m.name], p))
            for m, p, some in zip(choice, problems, options, strict=True)
        )
    return min(costs, key=costs.__getitem__)


def unmeasured(*problems: Problem) -> str:
    """In words that the choice for these problems rests on no measurement of this kind of machine; empty where it does not."""
    if setting() or forced_backend() or not all(map(estimable, problems)) or all(map(estimate.known, problems)):
        return ""
    if TABLE.get(key(*problems)) is not None:
        return ""
    kind = estimate.machine(problems[0].device)
    return f"how GEMMs are done is unmeasured on {kind} in {plain(problems[0].dtype)}: nm.tune(model, tokens=...) measures it"


def estimable(p: Problem) -> bool:
    """Whether estimates hold: they are of the compiled kernels, of which none is for float64."""
    if p.dtype == torch.float64 or p.device.type not in ("cpu", "cuda"):
        return False
    return p.device.type != "cpu" or compiled_core().ok


# ---- for graphs


def _for_graphs(*problems: tuple[Any, ...]) -> str:
    """``for_graphs`` of problems without their tokens, as text."""
    found = for_graphs(*(Problem(role, TOKEN_CLASSES[0], *rest) for role, *rest in problems))
    return ", ".join("|".join(method) for method in found)


def for_graphs(*many: Problem) -> Choice:
    """The choice for a graph that serves any number of tokens: that of the most tokens in the table, else the rule for very many."""
    for p in many:
        p.check()
    required = _required(many)
    if required is not None:
        return required
    for tokens in TOKEN_CLASSES:
        asked = tuple(p._replace(tokens=tokens) for p in many)
        found = _tuned(asked)
        if found is not None:
            return tuple(_by_op(p, m) for p, m in zip(asked, found, strict=True)) if len(found) > 1 else _in_a_graph(asked[0], found[0])
    return rule(*many)


def _by_op(p: Problem, method: Method) -> Method:
    """The method that a graph has in place of one backend's kernel: it calls the op, whose dispatcher decides when it runs."""
    return Method(OP, method.form) if method.backend else method


def _in_a_graph(p: Problem, found: Method) -> Choice:
    """``found``, or the nearest to it: of each form the dispatcher takes the kernel of highest priority."""
    took: dict[str, float] = (TABLE.get(key(p)) or {}).get("us") or {}
    can = {m.name: m for m in methods(p) if m.name in took and not m.backend}
    for form in (form for form in p.forms if op_of(p, form)):
        by_priority = [f"{entry.backend} {form}" for entry in implementations(op_of(p, form))]
        can |= {name: Method(OP, form) for name in [name for name in by_priority if name in took][:1]}
    if found.name in can or not can:
        return (can.get(found.name, found),)
    best = min(can, key=took.__getitem__)
    dense = DENSE.name in can and took[DENSE.name] < LEAST_GAIN * took[best]
    return (DENSE if dense else can[best],)


# what torch.compiler.assume_constant_result does, whose import of torch._dynamo takes a second: tracing calls it, and keeps the answer
_for_graphs._dynamo_marked_constant = True  # type: ignore[attr-defined]


# ---- for tests and benchmarks


@contextmanager
def using(*choice: tuple[Problem, Method]) -> Iterator[None]:
    """Inside, these problems are done by these methods; afterwards they are chosen again."""
    problems, chosen = tuple(p for p, _ in choice), tuple(m for _, m in choice)
    choose(*problems)  # which starts the memo again where it is out of date
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
