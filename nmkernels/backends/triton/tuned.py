"""Plans that ``nm.tune`` found faster than the heuristic's on a device: timed by ``search``, kept in the table, followed by ``choose``.

``choose`` is what the products ask instead of ``_plan.plan``; after the first call with the same sizes it is a lookup in a dict. A line of
the table counts for its operation, dtype and pattern, for the exact rows and columns of the weight, and for token counts that round up to
the same power of two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...dispatch import implementations
from ...pattern import Pattern
from ...tuning import TABLE, Candidate, Found, Seconds, Timer, Validator, cold, key, measure
from . import NAME
from ._plan import FEW_TOKENS, Plan, candidates, plan

METHODS = ("few", "gemm", "scratch")
MOST = {"rows": 1024, "width": 1024, "cols": 1024, "warps": 16, "stages": 8, "splits": 64}
"""Bounds of the numbers of a plan, so that a file that somebody has edited cannot ask for the impossible."""

REMEMBERED = 4096
"""Calls of different sizes whose plans are remembered; then all are forgotten and looked up again."""

KINDS = {"nm_linear": "fprop", "nm_linear_dgrad": "dgrad", "nm_linear_wgrad": "wgrad"}


class Product(NamedTuple):
    """A product with a compressed operand, as ``_plan.plan`` describes it, and where it runs."""

    kind: str
    dtype: torch.dtype
    rows: int
    cols: int
    width: int
    n: int
    m: int
    device: torch.device
    capability: int


_plans: dict[Product, Plan] = {}


def choose(
    kind: str, dtype: torch.dtype, rows: int, cols: int, width: int, n: int, m: int, device: torch.device, capability: int
) -> Plan:  # fmt: skip
    """How this product is done on ``device``: as measured there, else as the heuristic has it."""
    sizes = (kind, dtype, rows, cols, width, n, m, device, capability)
    found = _plans.get(sizes)  # type: ignore[call-overload]  # a Product is such a tuple
    if found is None:
        if len(_plans) >= REMEMBERED:
            _plans.clear()
        product = Product(*sizes)
        found = _plans[product] = measured(product) or plan(*sizes[:-2], capability)
    return found


def measured(product: Product) -> Plan | None:
    """The table's plan; None where it has none, or one that is no plan."""
    line = TABLE.get(name(product))
    found = None if line is None else as_plan(line.get("choice"))
    few = product.kind == "fprop" and product.width <= FEW_TOKENS and product.cols > 0
    return None if found is None or (found.method == "few" and not few) else found


def name(product: Product) -> str:
    """The line of a product in the table; along the tokens, its size, the compressed operand of wgrad runs."""
    kind, dtype, rows, cols, width, n, m = product[:7]
    fixed, tokens = (width, cols) if kind == "wgrad" else (cols, width)
    return key("triton", product.device, f"{kind}|{str(dtype).removeprefix('torch.')}|{n}:{m}|{rows}x{fixed}", tokens)


def as_plan(given: Any) -> Plan | None:
    """The plan that a table's line tells; None unless it is one."""
    if not isinstance(given, dict) or set(given) != set(Plan._fields) or given["method"] not in METHODS:
        return None
    good = all(type(given[k]) is int and 1 <= given[k] <= most for k, most in MOST.items())
    return Plan(**given) if good else None


def forget() -> None:
    """Read the file anew at the next call."""
    TABLE.forget()
    _plans.clear()


@contextmanager
def using(product: Product, given: Plan) -> Iterator[None]:
    """Inside, this product is done as ``given`` says; afterwards it is chosen anew."""
    _plans[product] = given
    try:
        yield
    finally:
        _plans.pop(product, None)


def words(p: Plan) -> str:
    """A plan in words: its method, and the numbers that matter to it."""
    numbers = {} if p.method == "scratch" else {k: v for k, v in p._asdict().items() if k != "method"}
    return " ".join([p.method, *(f"{k}={v}" for k, v in numbers.items())])


@torch.no_grad()
def search(op: str, *args: Any, timer: Seconds | None = None) -> Found:
    """Find the fastest right plan for a raw op's call, and follow it from now on; the arguments' numbers do not matter."""
    kind = KINDS[op]
    (values, _, n, m, cols), other = (args[:5], args[5]) if kind == "wgrad" else (args[1:6], args[0])
    width = other.shape[1] if kind == "wgrad" else other.numel() // other.shape[-1]
    sizes = (kind, other.dtype, values.shape[0], cols, width, n, m)
    capability = import_module(".linear", __package__).capability(other)
    product, fn = Product(*sizes, other.device, capability), next(i.fn for i in implementations(op) if i.backend == NAME)
    given, validator = _operands(product)

    def run(p: Plan, operands: tuple[Any, ...], out: Tensor | None = None) -> object:
        _plans[product] = p
        return fn(*operands, out=out)

    sets: list[tuple[Any, ...]] = []  # made when all are checked, and for all that are right

    def calls(p: Plan) -> list[Callable[[], object]]:
        if not sets:
            sets.extend(cold(given))
        return [partial(run, p, operands) for operands in sets]

    plans = {words(p): p for p in candidates(*sizes, capability)}
    some = [Candidate(text, lambda out, p=p: run(p, given, out), partial(calls, p)) for text, p in plans.items()]  # type: ignore[misc]
    try:
        found = measure(name(product), some, validator, Timer(other.device, timer))
    finally:
        _plans.clear()
    kept = found.seconds and found.best != found.baseline
    found.store({found.problem: found.line(plans[found.best]._asdict()) if kept else None})
    return found


def _operands(product: Product) -> tuple[tuple[Any, ...], Validator]:
    """Random arguments of a product's op, and what is right for them."""
    kind, dtype, rows, cols, width, n, m, device, _ = product
    pattern = Pattern(n, m)
    generator = torch.Generator(device).manual_seed(24)

    def matrix(height: int, across: int) -> Tensor:
        return torch.randn((height, across), generator=generator, dtype=dtype, device=device)

    e = matrix(rows, pattern.groups(cols) * m)
    e[:, cols:] = 0  # along tokens the last group may be partial
    values, indices = torch.ops.nmkernels.nm_compress(e, n, m, None)
    dense = torch.ops.nmkernels.nm_decompress(values, indices, n, m, cols)
    if kind == "wgrad":
        x = matrix(cols, width)
        return (values, indices, n, m, cols, x), Validator.of_product(dense, x)
    if kind == "dgrad":
        g = matrix(width, rows)
        return (g, values, indices, n, m, cols), Validator.of_product(g, dense)
    x = matrix(width, cols)
    return (x, values, indices, n, m, cols, None), Validator.of_product(x, dense.t())
