"""What 2:4 buys: the loss of sparse models against their bytes and the FLOPs of their training, beside dense models of other widths.

A dense model *of as many bytes* is between two that were trained: its loss is interpolated linearly in the logarithm of the bytes, seed by
seed, with weights of the same kind (16 bits, int8 or int4).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from torch import Tensor, nn

from examples.train_gpt.model import GPT
from nmkernels import ops

from ..tables import table
from .rows import RunRow
from .spec import DENSE
from .stats import FEWEST, Estimate, combined, estimate
from .studies import STUDIES, cases
from .tables import Tables
from .tasks.code import IN_8_BITS, INTEGERS, STEPS, WHOLE, config

VALUES = ("", *INTEGERS)
"""Kinds of weights; empty: bfloat16."""

ANCHOR = "#does-24-beat-a-smaller-dense-model"
"""Of the section of the page."""

STUDIES_OF_SIZES = tuple(name for name in STUDIES if name.startswith("sizes"))


@dataclass(frozen=True)
class Point:
    """Runs of one model, at the best of the rates that were tried.

    Args:
        values: of the weights: ``""`` for bfloat16, ``"int8"`` or ``"int4"``.
        size: bytes of the whole model; blocks: of the linear layers that can be sparse; flops: of the linear layers in training.
        losses: seed -> nats.
    """

    width: int
    method: str
    pattern: str
    values: str
    size: int
    blocks: int
    flops: float
    losses: Mapping[int, float]

    @property
    def loss(self) -> Estimate:
        """The mean over seeds."""
        return estimate(self.losses.values())


def points(shown: Tables) -> Iterator[Point]:
    """Every model with enough seeds, in each kind of values."""
    for name in STUDIES_OF_SIZES:
        study = STUDIES[name]
        for task in study.tasks:
            for case in cases(study, task):
                runs = shown.best(case)
                for values in VALUES if len(runs) >= FEWEST else ():
                    width = int(task.removeprefix("code-"))
                    losses = {seed: _loss(row, values) for seed, row in runs.items()}
                    flops = next(iter(runs.values())).training_flops
                    yield Point(width, case.method, case.pattern, values, *sizes(width, case.pattern, values), flops, losses)


def _loss(row: RunRow, values: str) -> float:
    return float(getattr(row, values or "val_loss"))


@cache
def sizes(width: int, pattern: str, values: str) -> tuple[int, int]:
    """Bytes of a model and of its linear layers in blocks, which have that pattern and these values.

    All else has 16 bits, but beside integers the embedding and the head have 8.
    """
    model, blocks = GPT(config(width)), 0
    rest = sum(2 * p.numel() for p in model.parameters())
    for name, module in model.named_modules():
        if name.startswith("blocks.") and isinstance(module, nn.Linear):
            blocks += stored(module.weight, WHOLE if pattern == DENSE else pattern, values)
        elif values and name in IN_8_BITS:
            rest += stored(module.weight, WHOLE, INTEGERS[0])
        else:
            continue
        rest -= 2 * module.weight.numel()
    return blocks + rest, blocks


def stored(weight: Tensor, pattern: str, values: str) -> int:
    """Bytes of a compressed weight, in bfloat16 or integers; without indices if everything is kept."""
    packed = ops.compress(weight.detach().bfloat16(), pattern)
    packed = ops.quantize_values(packed, values) if values else packed
    return packed.values.nbytes + (0 if pattern == WHOLE else packed.indices.nbytes) + (0 if packed.step is None else packed.step.nbytes)


def beside(point: Point, every: list[Point], of: Callable[[Point], float]) -> Estimate:
    """The loss of a point less that of a dense model with as much of ``of``, paired by seed; empty outside of the trained widths."""
    dense = sorted((p for p in every if p.method == DENSE and p.values == point.values), key=of)
    right = bisect_left([of(p) for p in dense], of(point))
    if not 0 < right < len(dense):
        return estimate([])
    one, other = dense[right - 1 : right + 1]
    share = math.log(of(point) / of(one)) / math.log(of(other) / of(one))
    return combined([(1, point.losses), (share - 1, one.losses), (-share, other.losses)])


def whole(point: Point) -> float:
    """Bytes of the model."""
    return point.size


def blocks(point: Point) -> float:
    """Bytes of the layers that can be sparse, most of a larger model."""
    return point.blocks


def training(point: Point) -> float:
    """FLOPs of training."""
    return point.flops


def text(shown: Tables) -> str:
    """The table of the page: every sparse model beside the dense ones of as many bytes, and of as much training; "" without rows."""
    every = list(points(shown))
    heads = ["as many bytes", "as many bytes in the blocks", "as many training FLOPs"]
    lines = [["model", "width", "values", "kB", "kB in the blocks", "loss", *(f"less a dense one of {head}" for head in heads)]]
    for p in every:
        less = [""] * 3 if p.method == DENSE else [beside(p, every, of).shown(sign=True) for of in (whole, blocks, training)]
        name = shown.name(p.method) + ("" if p.method == DENSE else f" {p.pattern}")
        lines.append([name, str(p.width), p.values or "bf16", f"{p.size / 1000:.0f}", f"{p.blocks / 1000:.0f}", p.loss.shown(), *less])
    return table(lines) if every else ""


def best(every: list[Point], values: str, of: Callable[[Point], float]) -> dict[int, tuple[Point, Estimate]]:
    """Width -> the 2:4 model of least loss, and its loss less that of a dense one with as much of ``of``, where that is known."""
    found: dict[int, tuple[Point, Estimate]] = {}
    for p in every:
        less = beside(p, every, of)
        if p.pattern == "2:4" and p.values == values and less.n >= FEWEST:
            found[p.width] = min(found.get(p.width, (p, less)), (p, less), key=lambda each: each[0].loss.mean)
    return found


def summary(shown: Tables, of: Callable[[Point], float] = blocks) -> str:
    """In words, by kind of values: the best 2:4 model of each width less a dense one with as much of ``of``; "" without rows."""
    every = list(points(shown))
    found = []
    for values in VALUES:
        each = best(every, values, of).items()
        said = ", ".join(f"{less.shown(sign=True)} (width {width}, {shown.name(p.method)})" for width, (p, less) in each)
        found += [f"in {values or 'bfloat16'} {said}"] if said else []
    return "; ".join(found)


def outcome(shown: Tables) -> str:
    """The sentence of the README: the widest 2:4 model beside dense ones of as many bytes, and of as much training; "" without rows."""
    every = list(points(shown))
    by_bytes = {values or "bfloat16": best(every, values, blocks) for values in VALUES}
    by_training = best(every, "", training)
    if not (by_training and all(by_bytes.values())):
        return ""

    def said(less: Estimate) -> str:
        if abs(less.mean) <= less.half:
            return f"not known to differ ({less.shown(sign=True)})"
        return f"{Estimate(abs(less.mean), less.error, less.n).shown()} {'lower' if less.mean < 0 else 'higher'}"

    width = max(by_bytes["bfloat16"])
    sparse, (rounded,) = by_bytes["bfloat16"][width][0], (p for p in every if (p.method, p.width, p.values) == (DENSE, width, "int4"))
    *some, last = (f"{said(found[max(found)][1])} in {values}" for values, found in by_bytes.items())
    against = said(combined([(1, rounded.losses), (-1, sparse.losses)]))
    trained = said(by_training[max(by_training)][1])
    return (
        f"**Against a smaller dense model:** after {STEPS:,} steps ({sparse.loss.n} seeds) the loss of a 2:4 byte GPT of width {width}, "
        f"compared with a dense one of as many bytes (in the layers that can be sparse), is in nats {', '.join(some)} and {last}; "
        f"compared with one of as much training it is {trained}. **Against rounding:** the dense model of that width in int4 has "
        f"{rounded.blocks / sparse.blocks:.2f} of the bytes of the 2:4 one in bfloat16, and its loss is {against}. "
        f"[The curves](bench/accuracy/README.md{ANCHOR})."
    )
