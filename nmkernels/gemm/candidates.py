"""Measuring the methods of a GEMM: each is checked against float64 before it is timed, and a verdict counts only if it repeats.

fprop and dgrad of one layer in training are timed together, as its forward and backward passes do them: making W̃ in the forms that are
read, then both. All methods alternate; in doubt the baseline stays, which is dense where there is a dense layout.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from .. import timing
from ..dispatch import choose as dispatched
from ..dispatch import implementations
from ..ops.define import CALLS, plainly
from ..pattern import BackendError
from ..timing import BUDGET, Candidate, Measurement, Seconds, Timer, Validator, cold
from .methods import DENSE, OP, UNESTIMATED, Drawn, Method, arguments, dense_estimate, methods, op_of, pack_estimate, random_operands, run
from .problem import Problem, key

log = logging.getLogger("nmkernels.choice")

QUICK = 0.05
"""Seconds of timing for one layer's GEMMs that are measured when they are met."""


def measure(*problems: Problem, timer: Seconds | None = None, budget: float = BUDGET, prepare: bool = True) -> Measurement:
    """Check every method of one GEMM, or of those of one layer in training, and time the correct ones for ``budget`` seconds.

    Operands are random; torch's generators are not used. Synchronises with the device, so it cannot run during graph capture.

    Args:
        timer: returns the seconds of a call; the device's clock if None.
        prepare: first let backends search for their fastest launch or algorithm.
    """
    with torch.inference_mode(False), torch.no_grad(), torch._C._DisableAutocast():
        if not problems[0].changing:
            return _measure_one(problems[0], timer, budget, prepare)
        each = [_measure_one(p._replace(changing=False), timer, budget / 4, prepare) for p in problems]
        return _measure_layer(problems, each, timer, budget / 2)


def _measure_one(p: Problem, timer: Seconds | None, budget: float, prepare: bool) -> Measurement:
    drawn = random_operands(p)
    sets: list[Drawn] = []  # made after all checks, and shared by the methods that passed
    candidates = [_candidate(p, method, drawn, sets, prepare, timer) for method in methods(p)]
    other, operand, seed = drawn
    if p.role == "wgrad":
        validator = Validator.of_gemm(dense_estimate(p, operand, seed), other)
    else:
        validator = Validator.of_gemm(other, operand["dense"].t() if p.role == "fprop" else operand["dense"])
    return timing.measure(key(p), candidates, validator, Timer(p.device, timer), budget)


def _candidate(p: Problem, method: Method, drawn: Drawn, sets: list[Drawn], prepare: bool, timer: Seconds | None) -> Candidate:
    other, operand, seed = drawn
    op = op_of(p, method.form)
    entry = next((i for i in implementations(op) if i.backend == method.backend), None) if method.backend else None

    def declines() -> str:
        if not op:
            return ""
        packed = operand[method.form] if isinstance(operand, dict) else pack_estimate(p, operand, seed, method.form)
        if isinstance(packed, str):
            return packed
        if method.name != OP and entry is None:
            return ""
        args = arguments(p, method.form, packed, other)
        taken = dispatched(op, *args)
        if entry is not None:
            can, reason = entry.supports(*args)
            if not can or entry is taken:
                return reason if not can else "it is the op's own choice"
        searching = entry or taken
        if prepare and searching.search is not None:
            searching.search(op, *args, timer=timer)
        return ""

    def check(out: Tensor) -> Tensor:
        packed = operand[method.form] if isinstance(operand, dict) and method != DENSE else None
        if entry is not None and packed is not None:  # write to out directly, so that elements that the backend skips are detected
            result: Tensor = plainly(entry.fn, *arguments(p, method.form, packed, other), out=out)
            return result
        checked = DENSE if method == UNESTIMATED else method  # torch's GEMM in both, but of g and not of its estimate
        return out.copy_(run(checked, p, other, operand, seed=seed))

    def calls() -> list[Callable[[], Tensor]]:
        if not sets:
            sets.extend([drawn] if p.cached else cold(drawn))
        return [partial(run, method, p, other, operand, seed=seed) for other, operand, seed in sets]

    return Candidate(method.name, check, calls, declines)


def _measure_layer(problems: tuple[Problem, ...], each: list[Measurement], timer: Seconds | None, budget: float) -> Measurement:
    """Time making W̃ and the GEMMs of a layer together, each GEMM dense, by the op, or by its fastest compressed method."""
    options = []
    for p, one in zip(problems, each, strict=True):
        right = [m for m in methods(p) if m.name in one.seconds]
        fastest = min((m for m in right if m != DENSE), key=lambda m: one.seconds[m.name], default=None)
        options.append([m for m in right if m in (DENSE, fastest) or m.name == OP] or [methods(p)[0]])
    drawn = [random_operands(p) for p in problems]
    weight = drawn[-1][1]["dense"]
    # a transposable mask is held between steps and not recomputed at every step
    mask = weight != 0 if any(form.startswith("columns") for form in problems[-1].forms) else None
    plans = {", ".join(m.name for m in plan): plan for plan in product(*options)}
    baseline = ", ".join(some[0].name for some in options)

    def step(plan: tuple[Method, ...], w: Tensor, others: Sequence[Tensor]) -> None:
        made = {form: _made(problems[0], form, w, mask) for form in {method.form for method in plan}}
        for p, method, other in zip(problems, plan, others, strict=True):
            run(method, p, other, made)

    measured = Measurement(key(*problems), baseline)
    sets = cold((weight, [other for other, _, _ in drawn]))
    calls = {name: [partial(step, plan, *some) for some in sets] for name, plan in plans.items()}
    measured.time(Timer(problems[0].device, timer), calls, budget)
    for p, one in zip(problems, each, strict=True):
        measured.refused |= {f"{p.role} {name}": why for name, why in one.refused.items()}
    return measured


def _made(p: Problem, form: str, w: Tensor, mask: Tensor | None) -> Any:
    """One form of W̃, made from the master weight as in the first forward pass of a step."""
    kind, _, layout = form.partition(":")
    if kind == "dense":
        return CALLS["nm_prune"](w, p.n, p.m)
    pattern, columns = (2, 4) if layout else (p.n, p.m), kind == "columns"
    select = "magnitude" if mask is None else "held"
    packed = CALLS["nm_pack"](w, *pattern, select, mask, None, p.dtype, not columns, columns, layout or "canonical")
    return packed[2:4] if columns else packed[:2]


def search(p: Problem, timer: Seconds | None = None) -> Measurement | None:
    """Have the backend that runs the op find its fastest launch or algorithm for ``p``; None if it has no choice or cannot run it."""
    form = next((form for form in p.forms if op_of(p, form)), None)
    other, operand, seed = random_operands(p)
    packed = pack_estimate(p, operand, seed, form or "rows") if p.role == "wgrad" else operand.get(form)
    if form is None or isinstance(packed, str):
        return None
    op, args = op_of(p, form), arguments(p, form, packed, other)
    try:
        searching = dispatched(op, *args).search
    except BackendError:
        return None
    result: Measurement | None = None if searching is None else searching(op, *args, timer=timer)
    return result


def measure_and_record(*problems: Problem) -> None:
    """``measure`` quickly and store the result, for ``NMKERNELS_CHOICE=measured``."""
    measured = measure(*problems, budget=QUICK, prepare=False)
    measured.store(measured.best, "NMKERNELS_CHOICE")
    log.info("%s: %s%s", problems[0].words(), measured.best, f" ({measured.note})" if measured.note else "")
