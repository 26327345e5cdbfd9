"""What one-shot pruning loses on pretrained models: the plan, and one cell of it, from (model, pattern, method, recipe, seed) to a row.

A cell is pruned, fine-tuned if it has a recipe, and evaluated; rows are in ``bench/results/oneshot.csv``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

import nmkernels as nm

from ..rows import RESULTS, typed
from .rows import append_lines, load_lines, stamp
from .spec import DENSE
from .tasks import Settings, Task
from .tasks.pretrained import model_of
from .worker import learning_rate, param_groups

PATH = RESULTS / "oneshot.csv"
STEPS = 120
"""Optimizer steps of a recipe."""

HELD = "held"
METHODS = ("magnitude", "wanda", "sparsegpt", "admm")
PATTERNS = ("2:4", "1:4", "4:8")
SEQUENCES = {"smollm2": 32, "minilm": 240, "sentiment": 640, "gpt": 128}
"""Calibration sequences of each model, unless the cell varies them."""

PAPERS = 1024
"""Calibration sequences of SmolLM2 that have the 262,144 tokens of the papers."""

SEEDS = 3
"""Of the data order, and of a fresh classifier and dropout; the pretrained weights and the calibration data are the same."""


@dataclass(frozen=True)
class Cell:
    """One cell.

    Args:
        model: a name in ``tasks.pretrained.MODELS``; pattern: N:M, or ``dense``.
        method: of ``nm.prune_``, or ``dense`` for the weights as they are.
        recipe: ``held`` for the masks of ``prune_``, ``dense``, or a name of ``nm.recipes`` that starts from these weights; empty: none.
        sequences: of calibration data; 0 for the dense model.
    """

    model: str
    pattern: str
    method: str
    recipe: str = ""
    sequences: int = 0
    seed: int = 0

    @property
    def key(self) -> str:
        """The cell in one line: ``gpt/1:4/admm/held/128/0``, with ``-`` for no recipe."""
        return f"{self.model}/{self.pattern}/{self.method}/{self.recipe or '-'}/{self.sequences}/{self.seed}"


@dataclass(frozen=True, kw_only=True)
class CellRow(Cell):
    """The result of a cell.

    ``loss`` (nats), ``accuracy`` (percent) and ``cosine`` are on held-out data, ``nan`` if the model has no such value. ``error`` is the
    mean over layers of ‖X(W−Z)ᵀ‖² / ‖XWᵀ‖² on the calibration data of ``tokens`` tokens. ``pruning`` are the CPU seconds of ``prune_``,
    ``seconds`` those of the cell. ``data`` is a digest of weights and data.
    """

    steps: int
    tokens: int
    loss: float
    accuracy: float
    cosine: float
    error: float
    pruning: float
    seconds: float
    data: str
    machine: str
    versions: str
    commit: str
    date: str


def plan() -> Iterator[Cell]:
    """All cells, the most telling ones first."""
    for model in ("smollm2", "minilm", "gpt"):
        yield Cell(model, DENSE, DENSE)
        first = PATTERNS[:1] if model == "smollm2" else PATTERNS
        yield from (Cell(model, p, method, "", SEQUENCES[model]) for p in first for method in METHODS)
    for some in (PATTERNS[:2], PATTERNS[2:]):
        yield from (cell for model in ("gpt", "sentiment") for cell in _tuned(model, some))
    for method in METHODS[1:]:
        yield from (Cell("minilm", "2:4", method, "", count) for count in (1, 4, 16, 64))
        yield from (Cell("smollm2", "2:4", method, "", count) for count in (8, 128, PAPERS))
        yield from (Cell("smollm2-reviews", "2:4", method, "", count) for count in (8, 32, 128, PAPERS))
    yield from (Cell("smollm2", p, method, "", SEQUENCES["smollm2"]) for p in PATTERNS[1:] for method in METHODS)


def _tuned(model: str, patterns: tuple[str, ...]) -> Iterator[Cell]:
    for seed in range(SEEDS):
        if PATTERNS[0] in patterns:
            yield Cell(model, DENSE, DENSE, DENSE, seed=seed)
        for p in patterns:
            yield from (Cell(model, p, method, HELD, SEQUENCES[model], seed) for method in METHODS)
            yield from (Cell(model, p, DENSE, recipe, seed=seed) for recipe in ("srste", "mdgf"))


def run(cell: Cell, steps: int = STEPS) -> CellRow:
    """Prune, fine-tune and evaluate.

    Raises:
        RuntimeError: the data has not been fetched.
    """
    it, begin, pruning, error = model_of(cell.model), time.process_time(), 0.0, math.nan
    torch.manual_seed(cell.seed)
    model, handle = it.model().eval(), None
    if cell.method != DENSE:
        data, before = it.calibration(cell.sequences), time.process_time()
        handle = nm.prune_(model, cell.pattern, data, it.filter_fn, method=cell.method)
        pruning = time.process_time() - before
        errors = [row.error for row in handle.report.pruned.values() if row.error is not None]
        error = sum(errors) / len(errors)
    if cell.recipe not in ("", HELD, DENSE):
        if handle is not None:  # the recipe starts from pruned weights, with masks of its own
            handle.finish(allow_unused=True)
            handle.remove()
        # the settings of the committed rows: those of Bambhaniya et al.'s public code
        options = {"total_steps": steps, "gradient": "ste", "end": 1.0} if cell.recipe == "mdgf" else {}
        handle = nm.sparsify_(model, nm.recipes.get(cell.recipe, pattern=cell.pattern, **options), it.filter_fn)
    if cell.recipe:
        s = it.settings
        recipe = nm.recipes.Dense() if handle is None else handle.recipe
        optimizer = recipe.optimizer(param_groups(model), lr=s.lr, betas=s.betas, weight_decay=s.weight_decay)
        train(it, model, optimizer if handle is None else handle.attach(optimizer), s, steps, cell.seed)
    if handle is not None:
        handle.finish(allow_unused=True)
    found = it.evaluate(model)
    loss, accuracy, cosine = (round(found.get(name, math.nan), 5) for name in ("val_loss", "accuracy", "cosine"))
    made: dict[str, Any] = {**asdict(cell), **stamp()}
    return CellRow(
        steps=steps if cell.recipe else 0,
        tokens=sum(map(len, it.sequences[: cell.sequences])),
        loss=loss,
        accuracy=accuracy,
        cosine=cosine,
        error=round(error, 6),
        pruning=round(pruning, 1),
        seconds=round(time.process_time() - begin, 1),
        data=it.digest,
        **made,
    )


def train(task: Task, model: nn.Module, optimizer: torch.optim.Optimizer, settings: Settings, steps: int, seed: int) -> None:
    """``steps`` optimizer steps on the batches of ``seed``."""
    torch.manual_seed(seed)
    model.train()
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, settings.lr, step, steps)
        loss = task.loss(model, task.batch(seed, step))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()


COLUMNS = tuple(f.name for f in fields(CellRow))


def load(path: Path = PATH) -> list[CellRow]:
    """All rows, the last one of each cell."""
    return list({row.key: row for row in typed(CellRow, load_lines(path))}.values())


def append(row: CellRow, path: Path = PATH) -> None:
    """Append a row to the file; for ``load`` it replaces an earlier one of the same cell."""
    append_lines([asdict(row)], COLUMNS, path)
