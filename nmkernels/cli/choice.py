"""``doctor --choice``: time layers as they are by default against ``nn.Linear``, and say where they are slower.

A cell is one layer at 2:4 in one dtype, for so many tokens. *Inference* is a ``CompressedLinear``; *training* is forward and backward of a
layer under SR-STE, W̃ made again as after every step, without the optimizer. The dense layer has the same weights, and both alternate.
Weights beyond ``SMALL_BYTES`` are in memory, as in a model that comes back to a layer when others have been there. A report: nothing is
stored, and no choice depends on it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import product
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn

from .. import ops, recipes
from ..gemm.choose import choose
from ..nn.compressed import SMALL_BYTES, CompressedLinear
from ..pattern import Pattern
from ..recipes import sparsify_
from ..timing import Timer, cold

INFERENCE, TRAINING = "inference", "training"
SECONDS = 0.8
"""Of timing for one cell."""
LEAST, LEAST_OF_FEW, FEW = 0.95, 0.85, 512
"""The least speed relative to dense; in training for up to ``FEW`` tokens, where making W̃ is a large part of a step, the second."""
SLACK = 1e-6
"""Seconds by which a call may be slower all the same."""
PATTERN = Pattern("2:4")
GRIDS: dict[str, dict[str, tuple[tuple[tuple[int, int], ...], tuple[int, ...]]]] = {
    "some": {
        INFERENCE: (((128, 128), (256, 256), (1024, 1024), (4096, 4096)), (1, 16, 256)),
        TRAINING: (((256, 1024), (1024, 1024)), (512,)),
    },
    "all": {
        INFERENCE: (((128, 128), (256, 256), (512, 512), (1024, 1024), (4096, 1024), (4096, 4096)), (1, 16, 256, 2048)),
        TRAINING: (((256, 1024), (1024, 1024), (4096, 1024), (4096, 4096)), (512, 2048)),
    },
    "cuda": {
        INFERENCE: (((1024, 1024), (4096, 4096), (14336, 4096)), (1, 16, 256, 2048, 8192)),
        TRAINING: (((1024, 1024), (14336, 4096)), (2048, 8192)),
    },
}
"""By name and use, the layers ``(rows, cols)`` and the numbers of tokens."""


class Cell(NamedTuple):
    """What is timed: ``use`` of a layer ``(rows, cols)``."""

    use: str
    rows: int
    cols: int
    tokens: int
    dtype: torch.dtype


def cells(device: torch.device, everything: bool) -> Iterator[Cell]:
    """The cells for a device: some thirty, or 64 that take minutes where bfloat16 is slow."""
    grid = GRIDS["cuda" if device.type == "cuda" else "all" if everything else "some"]
    for dtype in (torch.float32, torch.bfloat16):
        for use, (sizes, counts) in grid.items():
            yield from (Cell(use, *size, tokens, dtype) for size, tokens in product(sizes, counts))


def compare(cell: Cell, device: torch.device) -> dict[str, Any]:
    """Time one cell; microseconds of both layers, the speed relative to dense, the methods that were chosen, and whether it is too slow."""
    dense = nn.Linear(cell.cols, cell.rows, device=device, dtype=cell.dtype)
    x = torch.randn(cell.tokens, cell.cols, device=device, dtype=cell.dtype)
    with torch.no_grad():
        dense.weight.copy_(ops.prune(dense.weight, PATTERN))
    ours, calls = (_inference if cell.use == INFERENCE else _training)(dense, x)
    some = {"dense": calls(dense), "ours": calls(ours)}
    with torch.no_grad() if cell.use == INFERENCE else nullcontext():
        turns = Timer(device).turns(some, SECONDS)
    if turns.failed:
        raise RuntimeError("; ".join(turns.failed.values()))
    took = {name: median(turns.of(name)) for name in some}
    both = [r["dense"] / r["ours"] for r in turns.rounds if len(r) == 2]
    speed = median(both) if both else took["dense"] / took["ours"]
    least = LEAST_OF_FEW if cell.use == TRAINING and cell.tokens <= FEW else LEAST
    chosen = [method.name for problems in ours.problems(cell.tokens) for method in choose(*problems)]
    return {
        **cell._asdict(),
        "dtype": str(cell.dtype).removeprefix("torch."),
        "dense_us": round(1e6 * took["dense"], 2),
        "ours_us": round(1e6 * took["ours"], 2),
        "speed": round(speed, 3),
        "choice": " + ".join(chosen),
        "slower": speed < least and took["ours"] - took["dense"] > SLACK,
    }


Calls = Callable[[nn.Module], list[Callable[[], object]]]


def _inference(dense: nn.Linear, x: torch.Tensor) -> tuple[Any, Calls]:
    """The compressed layer, and what makes the calls of a layer to time, one for each copy of it."""
    layer = CompressedLinear(ops.compress(dense.weight.detach(), PATTERN), dense.bias).eval()
    copies = 1 if dense.weight.nbytes <= SMALL_BYTES else len(cold(dense.weight.detach()))

    def call(module: nn.Module) -> Callable[[], object]:
        return lambda: module(x)

    return layer, lambda module: [call(one) for one in (module, *(copy.deepcopy(module) for _ in range(copies - 1)))]


def _training(dense: nn.Linear, x: torch.Tensor) -> tuple[Any, Calls]:
    """The layer under SR-STE, and what makes the call of a layer to time: a forward and a backward pass."""
    model, recipe = nn.Sequential(copy.deepcopy(dense)), recipes.SRSTE(PATTERN)
    handle = sparsify_(model, recipe)
    handle.attach(recipe.optimizer(model.parameters(), lr=1e-3))
    x.requires_grad_()
    g = torch.randn_like(dense(x))

    def call(module: Any) -> Callable[[], object]:
        after_a_step = getattr(module, "drop", lambda: None)

        def step() -> None:
            x.grad = module.weight.grad = module.bias.grad = None
            after_a_step()
            module(x).backward(g)

        return step

    return model[0], lambda module: [call(module)]


HEADER = f"{'':<11}{'layer':<11}{'dtype':<10}{'tokens':>6}{'dense µs':>12}{'ours µs':>12}{'x dense':>9}  choice"


def text(row: dict[str, Any]) -> str:
    """One cell as a line under ``HEADER``."""
    size, verdict = f"{row['rows']}x{row['cols']}", "   SLOWER" if row["slower"] else ""
    times = f"{row['dense_us']:>12.1f}{row['ours_us']:>12.1f}{row['speed']:>9.2f}"
    return f"{row['use']:<11}{size:<11}{row['dtype']:<10}{row['tokens']:>6}{times}  {row['choice']}{verdict}"


def verdict(rows: list[dict[str, Any]]) -> str:
    """What the cells together say."""
    slower, allowed = sum(row["slower"] for row in rows), f"5 % (in training with {FEW} tokens 15 %)"
    if not slower:
        return f"None of {len(rows)} cells is slower than nn.Linear by more than {allowed} and 1 µs."
    return (
        f"{slower} of {len(rows)} cells are SLOWER than nn.Linear by more than {allowed} and 1 µs. If nothing else ran here, please attach "
        "these lines to an issue. nm.tune(model, tokens=...) measures what is fastest for your layers."
    )
