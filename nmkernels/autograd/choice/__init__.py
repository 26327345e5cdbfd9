"""Choice: the fastest measured way to do each product of a layer, dense among them, so that sparse is never slower.

A layer names its product (``Product``), asks ``choose`` for a candidate and hands that to ``call``. The answer comes from, in this order:

1. ``NMKERNELS_CHOICE=dense`` or ``packed``, or a backend that ``NMKERNELS_BACKEND`` forces, which means ``"auto"``;
2. the table of what ``nm.tune`` or an earlier process measured on this device, with these versions, for this role, dtype, pattern and
   (out, in), and for as many tokens up to the next power of two; ``choice.json`` in ``NMKERNELS_CACHE`` or ``~/.cache/nmkernels``;
   While torch compiles: the line with the most tokens, whatever their number, so that no token count is compiled anew;
3. measuring now, if the caller allows it (``measure=True``, or ``NMKERNELS_CHOICE=measured`` for all callers; ``table`` forbids it), and
   only then: not while a CUDA graph is captured, torch compiles, or a mode or transform is active, and not for more than ``FIRST_USE_WORK``
   multiplications on a CPU. Most shapes take some ms, the largest half a second. Triton's kernels, which would compile, are left to
   ``nm.tune``;
4. ``rule``: on a CPU ``backends/cpu/policy``, elsewhere dense.

The environment is read when a product is first seen; after a change, or after ``torch.set_num_threads``, call ``forget``. Candidates of one
product differ by rounding, and two machines may choose differently: for the same bits everywhere set ``NMKERNELS_CHOICE=dense`` or
``packed``.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ...backends.cpu.linear import packed_wins
from ...dispatch import forced_backend
from ...pattern import NMError
from ...tuning.table import Table
from . import candidates
from .candidates import AUTO, DENSE, EXPAND, Forms, call, estimate, form_of, pack_estimate
from .measure import LEAST_GAIN, Call, Measurements, Timer, measure
from .product import Product, forms, key, shape_key, token_class

ENV = "NMKERNELS_CHOICE"
SETTINGS = ("", "dense", "packed", "table", "measured")
FIRST_USE_WORK = {"cpu": 1 << 31, "cuda": 1 << 43}
"""Multiplications of the largest product that is measured on first use: about 0.05 s on two cores of a CPU, 0.03 s on a GPU."""

FIRST_USE_BUDGET = 0.02
"""Seconds of timing on first use, unless the fewest rounds take longer."""

REMEMBERED = 4096
"""Products whose choice is remembered; then all are forgotten and looked up again."""

MANY_TOKENS = 1 << 30
TOKEN_CLASSES = tuple(1 << k for k in range(30, -1, -1))

log = logging.getLogger("nmkernels.choice")
log.addHandler(logging.NullHandler())

table = Table("choice.json", 1, "products follow the rule", "run nm.tune again")
_known: dict[Product, str] = {}
_ruled: dict[Product, str] = {}
_measuring = threading.Lock()


def choose(product: Product, measure: bool = False) -> str:
    """The candidate that does ``product``: ``"dense"``, ``"auto"``, or the like of ``"cpu rows"``; give it to ``call``.

    Called again with an equal product, it is a lookup in a dict.

    Args:
        measure: whether an unknown product may be measured now; see the module's text.

    Raises:
        NMError: it is no product, or ``NMKERNELS_CHOICE`` is none of its settings.

    Example:
        >>> choose(Product("fprop", 2048, 64, 64, 3, 4, torch.float32, torch.device("cpu"), ("dense",)))
        'dense'
    """
    if torch.compiler.is_compiling():
        return _static(product.role, *product[2:])
    found = _known.get(product)
    if found is None and not measure:
        found = _ruled.get(product)
    return _find(product, measure) if found is None else found


def _static(role: str, *rest: Any) -> str:
    """The choice for a graph that serves any number of tokens: that of the most tokens in the table, else the rule for many."""
    product = Product(role, MANY_TOKENS, *rest)
    product.check()
    return _given(product) or next(filter(None, (_from_table(product._replace(tokens=t)) for t in TOKEN_CLASSES)), None) or rule(product)


# what torch.compiler.assume_constant_result does, whose import of torch._dynamo takes a second: tracing calls it, and keeps the answer
_static._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _find(product: Product, allowed: bool) -> str:
    product.check()
    for memo in (_known, _ruled):
        if len(memo) >= REMEMBERED:
            memo.clear()
    found = _given(product) or _from_table(product)
    if found is None and _may_measure(product, allowed):
        with _measuring:
            found = _from_table(product) or _measure_now(product)  # another thread may have come first
    if found is not None:
        _known[product] = found
        return found
    found = _ruled[product] = rule(product)
    return found


def setting() -> str:
    """What ``NMKERNELS_CHOICE`` says.

    Raises:
        NMError: something unknown.
    """
    given = os.environ.get(ENV, "")
    if given not in SETTINGS:
        raise NMError(f"{ENV}={given!r} is unknown; set one of {', '.join(SETTINGS[1:])}, or unset it.")
    return given


def _given(product: Product) -> str | None:
    """The candidate that the environment forces."""
    how, has_dense, has_packed = setting(), DENSE in product.forms, product.forms != (DENSE,)
    if not has_packed:
        return DENSE
    if has_dense and how == "dense":
        return DENSE
    return AUTO if forced_backend() or how == "packed" else None


def _from_table(product: Product) -> str | None:
    if product.device.type not in FIRST_USE_WORK:
        return None
    line = table.get(key(product))
    found = None if line is None else line.get("choice")
    return found if found in candidates.names(product) else None


def _may_measure(product: Product, allowed: bool) -> bool:
    how = setting()
    if how == "table" or not (allowed or how == "measured"):
        return False
    work = product.tokens * product.rows * product.cols
    return 0 < work <= FIRST_USE_WORK.get(product.device.type, 0) and _undisturbed(product.device)


def _undisturbed(device: torch.device) -> bool:
    """Whether calls made now are run now, and seen by nobody."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
        or torch.autograd.profiler._is_profiler_enabled
        or (device.type == "cuda" and torch.cuda.is_current_stream_capturing())
    )


def _measure_now(product: Product) -> str | None:
    try:
        found = measure(product, budget=FIRST_USE_BUDGET, compiling=False)
    except (RuntimeError, MemoryError) as error:  # out of memory, mostly: then it is no time for measuring
        log.warning("%s: not measured: %s", product.words(), error)
        return None
    try:
        record(found, "first use")
    except OSError as error:
        log.warning("%s: the choice holds for this process only: %s", product.words(), error)
    log.info("%s: %s", product.words(), found.best)
    return found.best


def record(found: Measurements, by: str = "nm.tune") -> Path:
    """Follow these measurements from now on, in this process and, through the table, in later ones.

    Raises:
        OSError: the table cannot be written; this process follows them all the same.
    """
    microseconds = {name: round(1e6 * t, 3) for name, t in found.seconds.items()}
    line = {"choice": found.best, "us": microseconds, "refused": found.refused, "by": by}
    try:
        return table.store({key(found.product): line})
    finally:
        _known.clear()
        _ruled.clear()


def rule(product: Product) -> str:
    """What is done where nothing was measured: on a CPU what ``backends/cpu/policy`` says, elsewhere dense where there is a dense layout.

    Example:
        >>> rule(Product("dgrad", 8, 64, 64, 2, 4, torch.float64, torch.device("cpu")))
        'dense'
    """
    p = product
    if DENSE not in p.forms:
        return AUTO
    wins = p.forms != (DENSE,) and p.device.type == "cpu" and packed_wins(p.role, p.dtype, p.tokens, p.n, p.m)
    return AUTO if wins else DENSE


@contextmanager
def using(product: Product, name: str) -> Iterator[None]:
    """Inside, ``product`` is done by candidate ``name``; afterwards it is chosen anew."""
    _known[product] = name
    try:
        yield
    finally:
        _known.pop(product, None)


def forget() -> None:
    """Read the table and the environment anew."""
    table.forget()
    _known.clear()
    _ruled.clear()


def explain(product: Product) -> str:
    """What is known of a product, for a reader: the choice, where it comes from, and what was measured.

    Example:
        >>> print(explain(Product("fprop", 8, 64, 64, 2, 4, torch.float64, torch.device("cpu"), ("dense",))))
        fprop 64x64 2:4 float64, 8 tokens: dense
          there is nothing to choose
    """
    product.check()
    chosen = choose(product)
    lines = [f"{product.words()}: {chosen}"]
    line = table.get(key(product)) if product.device.type in FIRST_USE_WORK else None
    if product.forms == (DENSE,):
        lines.append("  there is nothing to choose")
    elif _given(product):
        lines.append(f"  by {ENV} or NMKERNELS_BACKEND")
    elif line is None:
        lines.append("  by rule, nothing was measured: nm.tune(model, tokens=...)")
    else:
        lines.append(f"  measured by {line.get('by', 'nm.tune')} on {key(product).split('|')[0]}")
    for what, unit in (("us", " us"), ("refused", "")):
        given = line.get(what) if line else None
        if isinstance(given, dict):
            said = "" if what == "us" else "refused: "
            lines += [f"  {name:<24} {said}{value}{unit}" for name, value in given.items()]
    return "\n".join(lines)


__all__ = [
    "AUTO",
    "DENSE",
    "EXPAND",
    "LEAST_GAIN",
    "Call",
    "Forms",
    "Measurements",
    "Product",
    "Timer",
    "call",
    "choose",
    "estimate",
    "explain",
    "forget",
    "form_of",
    "forms",
    "key",
    "measure",
    "pack_estimate",
    "record",
    "rule",
    "setting",
    "shape_key",
    "table",
    "token_class",
    "using",
]
