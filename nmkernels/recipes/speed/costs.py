"""What a training step does to one linear layer, as named pieces, and which of them a layer that chooses well runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ...pattern import Pattern

PRODUCTS = ("fprop", "dgrad", "wgrad")
Pieces = tuple["Piece", ...]
Cost = Callable[[str], float | None]
"""Seconds of a piece by its name, None where there is none: ``"fprop dense"``, ``"wgrad sparse"``, ``"estimate"``, ``"weight rows"``...

``"wgrad estimated"`` is the product with the estimate in the best form, and the making of that, where the two were measured as one."""


@dataclass(frozen=True)
class Rules:
    """What a recipe makes of a layer in a sparse step.

    Args:
        pattern: of the weight.
        fprop, dgrad: the weight of that product is N:M along what it sums over.
        estimate: N:M of the output gradient's estimate in wgrad; None for the dense gradient.
        prepare: how the weight comes about: ``"mask"``, ``"threshold"``, ``"transposable"``, or ``""`` where it is used as it is.
        trains: the weight has a gradient.
        steps: the share of a run's steps that are such; the others are dense.
        leaves: what is deployed is N:M.
        packed: products of training may multiply the compressed weight.
        rank: of the low-rank adapter that is deployed beside the weight.
    """

    pattern: Pattern
    fprop: bool = True
    dgrad: bool = False
    estimate: Pattern | None = None
    prepare: str = "mask"
    trains: bool = True
    steps: float = 1.0
    leaves: bool = True
    packed: bool = True
    rank: int = 0


@dataclass(frozen=True)
class Piece:
    """One part of a step, in seconds for every forward pass: in the dense model and here, and in which form it runs here.

    Example:
        >>> Piece("fprop", 2e-3, 1e-3, "sparse").speedup
        2.0
    """

    name: str
    dense: float
    used: float
    form: str

    @property
    def speedup(self) -> float:
        """Times as fast as dense."""
        return self.dense / self.used if self.used else 1.0


def ways(rules: Rules, turned: bool) -> Iterator[tuple[str, bool, bool]]:
    """How the weight can be prepared, with whether fprop and dgrad then read it packed.

    A dgrad that is dense needs the masked weight in dense layout beside the packed one.
    """
    yield ("weight dense" if rules.prepare else ""), False, False
    if not rules.fprop or not rules.prepare or not rules.packed:
        return
    yield "weight rows+dense", True, False
    if turned:
        yield "weight rows", True, True
    if rules.dgrad:
        yield "weight both", True, True


def step(cost: Cost, rules: Rules, turned: bool = False, accumulate: int = 1) -> tuple[Piece, ...]:
    """The pieces of a training step with every choice made for the least time; empty where a product has no cost.

    Args:
        turned: see ``Device``.
        accumulate: forward passes per optimizer step, which share one preparation of the weight.
    """
    dense = {p: cost(f"{p} dense") for p in PRODUCTS if p != "wgrad" or rules.trains}
    if any(d is None for d in dense.values()):
        return ()
    best: list[Piece] = []
    for weight, *packed in ways(rules, turned):
        pieces = [_product(p, cost, bool(sparse)) for p, sparse in zip(PRODUCTS, packed, strict=False)]
        took = cost(weight) if weight else 0.0
        if took is None or (any(packed) and all(p.form == "dense" for p in pieces)):
            continue
        if weight:
            pieces.append(Piece("weight", 0.0, took / accumulate, weight.removeprefix("weight ")))
        if not best or _used(pieces) < _used(best):
            best = pieces
    if rules.trains:
        best += _wgrad(cost, rules)
    return tuple(best)


def _wgrad(cost: Cost, rules: Rules) -> list[Piece]:
    """The product with the gradient, or with its estimate, whatever that costs: it is what the method trains with."""
    dense = cost("wgrad dense") or 0.0
    if rules.estimate is None:
        return [Piece("wgrad", dense, dense, "dense")]
    whole = cost("wgrad estimated")
    if whole is not None:
        return [Piece("wgrad", dense, whole, f"of mvue {rules.estimate}")]
    return [_product("wgrad", cost, True), Piece("estimate", 0.0, cost("estimate") or 0.0, f"mvue {rules.estimate}")]


def inference(cost: Cost, kept: bool = True) -> tuple[Piece, ...]:
    """The product of inference, and an adapter's two; without a dense weight beside the packed one, a dense product expands that."""
    if cost("fprop dense") is None:
        return ()
    piece = _product("fprop", cost, True)
    expand = None if kept else cost("expand")
    if piece.form == "dense" and expand is not None:
        piece = Piece("fprop", piece.dense, piece.dense + expand, "expanded")
    adapter = cost("adapter")
    return (piece,) if adapter is None else (piece, Piece("adapter", 0.0, adapter, "dense"))


def total(pieces: tuple[Piece, ...]) -> tuple[float, float]:
    """Seconds in the dense model, and here."""
    return sum(p.dense for p in pieces), _used(pieces)


def speedup(pieces: tuple[Piece, ...]) -> float:
    """Times as fast as dense.

    Example:
        >>> speedup((Piece("fprop", 3.0, 2.0, "sparse"), Piece("weight", 0.0, 1.0, "rows")))
        1.0
    """
    dense, used = total(pieces)
    return dense / used if used else 1.0


def _used(pieces: list[Piece] | tuple[Piece, ...]) -> float:
    return sum(p.used for p in pieces)


def _product(role: str, cost: Cost, sparse: bool) -> Piece:
    dense = cost(f"{role} dense") or 0.0
    took = cost(f"{role} sparse") if sparse else None
    return Piece(role, dense, dense, "dense") if took is None or took >= dense else Piece(role, dense, took, "sparse")
