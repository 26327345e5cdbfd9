"""Every candidate of a product, checked and timed on random numbers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...backends import cusparselt
from ...dispatch import choose as dispatched
from . import candidates, clock
from .candidates import AUTO, DENSE
from .judge import Judge
from .operands import copies, dense_pair, operands
from .product import Product

LEAST_GAIN = 1.02
"""A candidate replaces the baseline only if it is so many times as fast: less is noise."""

BUDGET = 0.5
"""Seconds of timed calls for one product."""

KEEPS = ("cusparselt",)
"""Backends that keep something of their own beside the operand, by its version."""

COMPILES = ("triton",)
"""Backends whose first call compiles for seconds; they are timed by ``nm.tune`` and not on first use."""

PREPARE: dict[str, Callable[[str, tuple[Any, ...]], object]] = {"cusparselt": lambda op, args: cusparselt.search(op, *args)}
"""What a backend does once for an op's call before it is timed by ``nm.tune``: cuSPARSELt looks for its fastest right algorithm."""

Timer = Callable[["Call"], float]


@dataclass(frozen=True)
class Call:
    """A candidate with its operands, ready to be called; ``name`` for clocks that want to know."""

    name: str
    run: Callable[[], object]

    def __call__(self) -> object:
        return self.run()


@dataclass
class Measurements:
    """What was measured for one product: seconds of each candidate that came out right, and why the others did not take part.

    ``baseline`` is what a faster one replaces: ``"dense"`` where there is a dense layout, else ``"auto"``, the dispatcher's own order.
    """

    product: Product
    baseline: str
    seconds: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    declined: dict[str, str] = field(default_factory=dict)

    @property
    def best(self) -> str:
        """The fastest; the baseline unless another gains more than noise."""
        if not self.seconds:
            return self.baseline
        best = min(self.seconds, key=self.seconds.__getitem__)
        base = self.seconds.get(self.baseline)
        return self.baseline if base is not None and base < LEAST_GAIN * self.seconds[best] else best

    @property
    def gain(self) -> float | None:
        """How many times as fast as the baseline the best is; None where nothing was timed."""
        base = self.seconds.get(self.baseline)
        return None if base is None else base / self.seconds[self.best]


def measure(product: Product, *, timer: Timer | None = None, budget: float = BUDGET, compiling: bool = True) -> Measurements:
    """Check every candidate of ``product`` and time it, in turns with the others.

    Nothing of the caller's is read or written, torch's generators neither. It synchronises with the device: not for graph capture.

    Args:
        timer: seconds of a ``Call``, one after the other; in turns, by the device's clock if None.
        budget: seconds for timing. compiling: with the backends that compile at their first call, and with cuSPARSELt's search.

    Raises:
        NMError: it is no product.
    """
    product.check()
    names = candidates.names(product)
    found = Measurements(product, names[0])
    with torch.inference_mode(False), torch.no_grad(), torch._C._DisableAutocast(), _on(product.device):
        sets = [operands(product)]
        judge = Judge(*dense_pair(product, *sets[0]))
        for name in names:
            if compiling or name.partition(" ")[0] not in COMPILES:
                _admit(found, name, judge, compiling, *sets[0])
        sets += copies(sets[0])
        right = [name for name in names if name in found.seconds]
        ways = {name: [Call(name, partial(_call, name, product, *s)) for s in sets] for name in right}
        found.seconds = {n: timer(w[0]) for n, w in ways.items()} if timer else clock.seconds(ways, product.device, budget)
    return found


def _on(device: torch.device) -> AbstractContextManager[object]:
    """The clock of a GPU is that of the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _admit(found: Measurements, name: str, judge: Judge, compiling: bool, other: Tensor, operand: Any, seed: Tensor | None) -> None:
    """Put a candidate that comes out right among the timed ones, the others where it is told why they are not."""
    product = found.product
    try:
        if " " in name:
            backend, _, form = name.partition(" ")
            packed = operand[form] if isinstance(operand, dict) else candidates.pack_estimate(product, operand, seed, form)
            if isinstance(packed, str):
                found.declined[name] = packed
                return
            op, args = candidates.op_of(product, form), candidates.arguments(product, form, packed, other)
            why = candidates.declined(product, name, args)
            if not why and AUTO in found.seconds and dispatched(op, *args).backend == backend:
                why = "it is what auto takes"
            if why:
                found.declined[name] = why
                return
            if compiling and backend in PREPARE:
                PREPARE[backend](op, args)
        wrong = "" if name == DENSE else judge(lambda out: candidates.call(name, product, other, operand, seed=seed, out=out))
    except Exception as error:  # a kernel that does not fit the device, or one that checks its operands
        wrong = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    if wrong:
        found.refused[name] = wrong
    else:
        found.seconds[name] = float("nan")


def _call(name: str, product: Product, other: Tensor, operand: Any, seed: Tensor | None) -> Tensor:
    if product.changing and name.partition(" ")[0] in KEEPS and isinstance(operand, dict):
        torch.autograd.graph.increment_version(operand[candidates.form_of(name, product)][0])
    return candidates.call(name, product, other, operand, seed=seed)
