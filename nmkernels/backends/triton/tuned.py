"""Plans that ``nm.tune`` found faster than the heuristic's on a device, kept on disk and read once.

``choose`` is what the products ask instead of ``_plan.plan``; after the first call with the same sizes it is a lookup in a dict. The table
is one JSON file in ``NMKERNELS_CACHE`` or ``~/.cache/nmkernels``. A line of it counts on the device and the Triton version it was measured
with, for its operation, dtype and pattern, for the exact rows and columns of the weight, and for token counts that round up to the same
power of two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...tuning.table import Table
from . import _plan
from ._few_tiles import Tile, cut, variants
from ._launch import next_power_of_2
from ._plan import FEW_TOKENS, Plan, plan

METHODS = ("few", "tile", "gemm", "scratch")
MOST = {"rows": 1024, "width": 1024, "cols": 1024, "warps": 16, "stages": 8, "splits": 64}
"""Bounds of the numbers of a plan, so that a file that somebody has edited cannot ask for the impossible."""

REMEMBERED = 4096
"""Calls of different sizes whose plans are remembered; then all are forgotten and looked up again."""


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
_table = Table("tuned.json", 1, "launches follow the heuristic", "run nm.tune again")


def choose(
    kind: str, dtype: torch.dtype, rows: int, cols: int, width: int, n: int, m: int, device: torch.device, capability: int
) -> Plan:  # fmt: skip
    """How this product is done on ``device``: as measured there, else as the heuristic has it."""
    key = (kind, dtype, rows, cols, width, n, m, device, capability)
    found = _plans.get(key)  # type: ignore[call-overload]  # a Product is such a tuple
    if found is None:
        if len(_plans) >= REMEMBERED:
            _plans.clear()
        product = Product(*key)
        found = _plans[product] = measured(product) or plan(*key[:-2], capability)
    return found


def measured(product: Product) -> Plan | None:
    """The table's plan; None where it has none, or one that is no plan."""
    where = device_name(product.device)
    if not where:
        return None
    line = _table.get(name(product, where))
    found = None if line is None else as_plan(line.get("plan"))
    few = product.kind == "fprop" and product.width <= FEW_TOKENS and product.cols > 0
    return None if found is None or (found.method in ("few", "tile") and not few) else found


def candidates(kind: str, dtype: torch.dtype, rows: int, cols: int, width: int, n: int, m: int, capability: int) -> list[Plan]:
    """Plans worth timing, the heuristic's first."""
    found = _plan.candidates(kind, dtype, rows, cols, width, n, m, capability)
    if any(p.method == "few" for p in found):
        tiles = variants(dtype.itemsize, n, m, rows, cols, width)
        found += [Plan("tile", t.rows, t.lanes, t.chunks, t.warps, 2 if t.ahead else 1, t.splits) for t in tiles]
    return found


def tile_of(p: Plan, size: int, n: int, m: int, cols: int) -> Tile:
    """The tile that a plan of method "tile" tells: its width is lanes, its cols are chunks, 2 stages read a step ahead."""
    return cut(size, n, m, cols, p.width, p.cols, p.warps, p.stages > 1, p.splits)


def device_name(device: torch.device) -> str:
    """What a device is called in the table; empty where nothing is measured."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return str(torch.xpu.get_device_name(device)) if device.type == "xpu" else ""


def triton_version() -> str:
    """Triton's version, of which its code depends."""
    for distribution in ("triton", "pytorch-triton", "triton-nightly"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def name(product: Product, where: str) -> str:
    """The key of a product in the table: token counts up to the next power of two are one."""
    kind, dtype, rows, cols, width, n, m = product[:7]
    if kind == "wgrad":
        cols = next_power_of_2(cols)  # its compressed operand runs along the tokens
    else:
        width = next_power_of_2(width)
    return "|".join((where, triton_version(), kind, str(dtype).removeprefix("torch."), f"{n}:{m}", f"{rows}x{cols}x{width}"))


def as_plan(given: Any) -> Plan | None:
    """The plan that a table's line tells; None unless it is one."""
    if not isinstance(given, dict) or set(given) != set(Plan._fields) or given["method"] not in METHODS:
        return None
    good = all(type(given[k]) is int and 1 <= given[k] <= most for k, most in MOST.items())
    return Plan(**given) if good else None


def path() -> Path:
    """The file of the table."""
    return _table.path()


def read() -> dict[str, dict[str, Any]]:
    """The lines of the file as it is now."""
    return _table.read()


def store(lines: Mapping[str, dict[str, Any] | None]) -> Path:
    """Add lines to the file, or take out those that are None, at one stroke; from now on calls follow them.

    Raises:
        OSError: the file cannot be written; this process follows the lines all the same.
    """
    try:
        return _table.store(lines)
    finally:
        _plans.clear()


def forget() -> None:
    """Read the file anew at the next call."""
    _table.forget()
    _plans.clear()


@contextmanager
def using(product: Product, given: Plan) -> Iterator[None]:
    """Inside, this product is done as ``given`` says; afterwards it is chosen anew."""
    _plans[product] = given
    try:
        yield
    finally:
        _plans.pop(product, None)
