"""Runs cases one by one: build, check, time, write the rows. An interruption loses only the current case."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from . import cases, outcomes
from .cases.machine import matmul_rate
from .device import lost
from .registry import Provider, Spec, Work
from .rows import Row, append, commit, fingerprints, row
from .rows import machine as machine_name
from .timing import Timed, take_turns

LIMITS = ("copy", "matmul")
"""Ops that measure the limits of the machine."""


@dataclass
class Measured:
    """The result of a run: its rows, the cases that were not timed and why, and how many were skipped because they were already done.

    ``next`` is the index of the case to continue with in a new process, if a case left the device unusable for this one.
    """

    rows: list[Row] = field(default_factory=list)
    wrong: list[tuple[Spec, str]] = field(default_factory=list)
    skipped: int = 0
    interrupted: bool = False
    next: int | None = None

    @property
    def status(self) -> int:
        """The exit status: 130 interrupted, 1 a case was wrong or failed, 0 otherwise."""
        return 130 if self.interrupted else int(bool(self.wrong))


class Partly(Exception):
    """Some providers of a case failed or were wrong; ``rows`` are the rows of the others."""

    def __init__(self, rows: list[Row], why: str) -> None:
        super().__init__(why)
        self.rows = rows


def run(
    specs: Sequence[Spec],
    device: str,
    out: Path,
    seconds: float,
    *,
    resume: bool = False,
    show: Callable[[Row], None] = lambda row: None,
    complain: Callable[[str], None] = lambda text: None,
) -> Measured:
    """Measure ``specs`` with about ``seconds`` of timing each, and add their rows to the CSV ``out`` case by case.

    If ``NMKERNELS_OUTCOMES`` names a file, each case is recorded there, and the cases that it records as ended are skipped.
    """
    outcome, record = Measured(), outcomes.here()
    out.parent.mkdir(parents=True, exist_ok=True)
    done = fingerprints(out) if resume else set()
    ended = outcomes.read(record).ended
    where = machine_name(device), commit()  # cached now, since the tree may change before the last row is written
    todo = [
        (index, spec)
        for index, spec in enumerate(specs)
        if str(spec) not in ended and (spec.op, spec.pattern, spec.dtype, spec.shape, *where) not in done
    ]
    outcome.skipped, start = len(specs) - len(todo), time.monotonic()
    try:
        for number, (index, spec) in enumerate(todo):
            left = (time.monotonic() - start) / number * (len(todo) - number) if number else 0.0
            _progress(f"[{number + 1}/{len(todo)}] {spec}" + (f", {left / 60:.1f} min left" if left else ""))
            outcomes.tell(record, begins=str(spec))
            found, why = _attempt(spec, device, seconds)
            _progress()
            if found:
                append(found, out)
                outcome.rows += found
                for r in found:
                    show(r)
            outcomes.end(record, outcomes.Outcome(str(spec), "failed" if why else "passed", why))
            if why:
                outcome.wrong.append((spec, why))
                complain(f"{spec}: {why}")
                if reason := lost(device):
                    complain(f"{spec}: afterwards this process can no longer use {device}: {reason}")
                    outcome.next = index + 1
                    break
    except KeyboardInterrupt:
        outcome.interrupted = True
    finally:
        _progress()
    return outcome


def _progress(text: str = "") -> None:
    """Show this line in place of the last one on a terminal; nothing before other output is written."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _attempt(spec: Spec, device: str, seconds: float) -> tuple[list[Row], str]:
    """The rows of one case, and what went wrong; a failure must not stop the other cases."""
    try:
        return measure(spec, device, seconds), ""
    except Partly as partly:
        return partly.rows, str(partly)
    except AssertionError as error:
        return [], f"not timed, its result is wrong: {error}"
    except Exception as error:
        return [], f"not timed, it failed: {type(error).__name__}: {error}"


def measure(spec: Spec, device: str, seconds: float) -> list[Row]:
    """The rows of one case.

    Raises:
        AssertionError: none of our providers gave the right result.
        Partly: it was timed without some providers.
    """
    try:
        work = cases.build(spec, device)
        failed = gate(work)
        timed = take_turns(work.providers, device, seconds)
        failed.update(timed.failed)
        if len(failed) == len(work.providers):
            raise RuntimeError("; ".join(failed.values()))
        work.facts.update(work.finish())
        found = rows_of(spec, device, work, timed)
        if failed:
            raise Partly(found, "; ".join(f"timed without {name}: {why}" for name, why in failed.items()))
        return found
    finally:
        work = None  # type: ignore[assignment]
        gc.collect()
        if device.startswith("cuda") and not lost(device):
            torch.cuda.empty_cache()


def gate(work: Work) -> dict[str, str]:
    """Check the result of each of our providers; those that fail are removed from ``work`` and returned with the reason.

    Raises:
        AssertionError, or whatever the check raised: none of ours is left.
    """
    failed: dict[str, str] = {}
    errors: list[Exception] = []
    for p in work.providers:
        if p.check is None:
            continue
        try:
            with p.under():
                p.check()
        except Exception as error:
            errors.append(error)
            wrong = isinstance(error, AssertionError)
            failed[p.name] = f"its result is wrong: {error}" if wrong else f"{type(error).__name__}: {error}"
    checked = [p.name for p in work.providers if p.check is not None]
    if errors and len(failed) == len(checked):
        raise errors[0]
    work.providers = [p for p in work.providers if p.name not in failed]
    return failed


def rows_of(spec: Spec, device: str, work: Work, timed: Timed) -> list[Row]:
    """Times of all providers; rates of ours and of the machine's limits; ratios; then figures that are not timings."""
    label = {"pattern": spec.pattern, "dtype": spec.dtype, "shape": spec.shape, "device": device}
    found = []
    for p in work.providers:
        seconds = timed.of(p.name)
        if not seconds:
            continue
        found.append(row(spec.op, p.name, "us", [1e6 * s for s in seconds], **label))
        if p.name.startswith("nmkernels") or spec.op in LIMITS:
            found += [row(spec.op, p.name, metric, values, **label) for metric, values in _rates(spec, device, p, seconds)]
        for part, samples in p.parts.items():
            found.append(row(spec.op, p.name, f"us {part}", [1e6 * s for s in samples[-len(seconds) :]], **label))
    bytes_of = {p.name: p.bytes for p in work.providers}
    found += [row(spec.op, r.of, r.metric, values, **label) for r in dict.fromkeys(work.ratios) if (values := timed.ratio(r, bytes_of))]
    found += [row(spec.op, name, metric, values, **label) for (name, metric), values in work.derive(timed).items() if values]
    facts = ((name, metric, value) for (name, metric), value in work.facts.items() if name not in timed.failed)
    return found + [row(spec.op, name, metric, [value], **label) for name, metric, value in facts]


def _rates(spec: Spec, device: str, p: Provider, seconds: list[float]) -> list[tuple[str, list[float]]]:
    found = []
    if p.bytes:
        found.append(("GB/s", [1e-9 * p.bytes / s for s in seconds]))
    if p.flops:
        found.append(("GFLOP/s", [1e-9 * p.flops / s for s in seconds]))
        if spec.op not in LIMITS and device.startswith("cuda"):
            found.append(("share of matmul", [p.flops / s / matmul_rate(spec.dtype, device) for s in seconds]))
    if p.tokens:
        found.append(("tokens/s", [p.tokens / s for s in seconds]))
    return found
