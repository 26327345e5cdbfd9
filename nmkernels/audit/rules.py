"""What a recipe does to a linear layer in a sparse step, what each piece of that costs by a roofline, and which pieces a good choice runs.

The roofline: each piece of a step takes as long as its bytes or its arithmetic do, whichever is more, and the start of a kernel.

    GEMM: max(bytes / (share · bandwidth), 2 · tokens · out · in / (rate · ratio)) + launch        ratio 1 where it is dense
    pass over memory: bytes / (share · bandwidth) + launch

Bytes per element of s bytes, and p = s·N/M + index bits in packed form (1.125 for 2:4 in 16 bits): a weight of w bytes masked and packed
one way w + p (3.125 for w = s = 2), both ways with the mask w + 2p + 1/8 (4.375), MVUE to packed s + p (3.125). MaskedAdamW, which
reads the weight anyhow, only adds what is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from ..autograd import WeightTransform
from ..nn import NMWeight
from ..ops import tensor_core_pattern
from ..pattern import Pattern, RecipeError
from ..recipes.base import Recipe, Span
from ..recipes.compose import deployed, innermost, with_pattern
from ..recipes.registry import find, get, parse
from .devices import HALVES, Device, kind

TWO_FOUR = Pattern("2:4")
GEMMS = ("fprop", "dgrad", "wgrad")
STEPS = 10_000  # of the run whose sparse steps are looked for, for recipes that do not say how long they are

Pieces = tuple["Piece", ...]
Cost = Callable[[str], float | None]
"""Seconds of a piece by its name, None where there is none: ``"fprop dense"``, ``"wgrad sparse"``, ``"estimate"``, ``"weight rows"``...

``"wgrad estimated"`` is the GEMM with the estimate in the best form, and the making of that, where the two were measured as one."""


@dataclass(frozen=True)
class Rules:
    """What a recipe makes of a layer in a sparse step.

    Args:
        pattern: of the weight.
        fprop, dgrad: the weight of that GEMM is N:M along what it sums over.
        estimate: N:M of the output gradient's estimate in wgrad; None for the dense gradient.
        prepare: how the weight comes about: ``"mask"``, ``"threshold"``, ``"transposable"``, or ``""`` where it is used as it is.
        trains: the weight has a gradient.
        steps: the share of a run's steps that are such; the others are dense.
        leaves: what is deployed is N:M.
        packed: GEMMs of training may multiply the compressed weight.
        straight: the gradient is passed straight through the mask, so that no GEMM reads the master weight.
        rank: of the low-rank adapter that is deployed beside the weight.
        fp8: GEMMs of training round their operands to FP8.
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
    straight: bool = True
    rank: int = 0
    fp8: bool = False

    def ways(self, transposed: bool) -> Iterator[tuple[str, bool, bool]]:
        """The ways to prepare the weight, and whether fprop and dgrad then read it packed; a dense dgrad needs the dense layout too."""
        yield ("weight dense" if self.prepare else ""), False, False
        if not self.fprop or not self.prepare or not self.packed:
            return
        yield "weight rows+dense", True, False
        if transposed:
            yield "weight rows", True, True
        if self.dgrad:
            yield "weight both", True, True


def of_recipe(recipe: Recipe, pattern: Pattern) -> Rules:
    """The rules of the cheapest steps of ``recipe`` for a layer of ``pattern``, and the share of its run's steps that are sparse."""
    steps = recipe.total_steps or STEPS
    own = recipe if pattern == recipe.pattern else with_pattern(recipe, pattern)
    # the recipe that says what a sparse step does: the inner one of STEP and LayerWise
    inner = innermost(recipe)
    fp8 = getattr(inner, "fp8", None) is not None
    spans = [span for span in own.profile(steps) if span.steps]
    best, leaves = min(spans, key=_work), deployed(own).fprop < 1
    stages = getattr(inner, "stages", ((0, inner.stage({})),))
    straight = not (stages[-1][1].transform or own.final_transform()).traits.own_gradient
    if _work(best) == 3:
        return Rules(pattern, fprop=False, prepare="", steps=0.0, leaves=leaves, packed=False, straight=straight)
    return Rules(
        pattern,
        best.fprop < 1,
        best.dgrad < 1,
        Pattern(getattr(inner, "mvue_pattern", "2:4")) if 0 < best.wgrad < 1 else None,
        _prepare_rule(own.final_transform(), best.dgrad < 1),
        best.wgrad > 0,
        sum(span.steps for span in spans if _work(span) < 3) / steps,
        leaves,
        bool(getattr(inner, "packed", False)) and not fp8,
        straight,
        fp8=fp8,
    )


def of_layer(layer: NMWeight) -> Rules:
    """The rules by which a sparse layer is trained now; in a dense phase, those of what ``finish`` will apply."""
    transform, plan = layer.transform or layer.final, layer.plan
    columns = transform.traits.transposable or transform.traits.own_dgrad
    estimate = Pattern(plan.n, plan.m) if plan.wgrad in ("mvue", "magnitude") else None
    prepare, straight = _prepare_rule(transform, columns), not transform.traits.own_gradient
    trains, fp8 = plan.wgrad != "none", plan.fp8 is not None
    return Rules(layer.pattern, True, columns, estimate, prepare, trains, packed=plan.packs, straight=straight, fp8=fp8)


def _work(span: Span) -> float:
    return span.fprop + span.dgrad + span.wgrad


def _prepare_rule(transform: WeightTransform, columns: bool) -> str:
    # a doubly pruned weight costs what a transposable one does: two packed forms
    return "threshold" if transform.traits.threshold else "transposable" if columns else "mask"


def by_name(spec: str) -> Recipe:
    """The recipe of a text, as long as a schedule needs to be seen, unless the text says otherwise."""
    name, _, given = parse(spec)
    free = {f.name for f in fields(find(name)) if f.init} - set(given)
    steps = {"total_steps": STEPS} if "total_steps" in free else {}
    long = get(spec, **steps)
    try:
        short = get(spec)
    except RecipeError:
        return long
    return short if short.profile(STEPS) == long.profile(STEPS) else long


@dataclass(frozen=True)
class Piece:
    """One part of a step, in seconds for every forward pass: in the dense model and here, and in which form it runs here."""

    name: str
    dense: float
    used: float
    form: str


def total(pieces: Sequence[Piece]) -> tuple[float, float]:
    """Seconds in the dense model, and here."""
    return sum(p.dense for p in pieces), sum(p.used for p in pieces)


def speedup(pieces: Sequence[Piece]) -> float:
    """Times as fast as dense, all pieces together."""
    dense, used = total(pieces)
    return dense / used if used else 1.0


@dataclass(frozen=True)
class Layer:
    """A linear layer as a roofline sees it.

    Args:
        shape: of the weight, ``(out, in)``.
        tokens: rows of its input.
        dtype: of the GEMMs.
        master: of the weight.
    """

    shape: tuple[int, int]
    tokens: int
    dtype: torch.dtype
    master: torch.dtype


def packed_bytes(pattern: Pattern, dtype: torch.dtype) -> float:
    """Bytes of the compressed form per element of the dense one."""
    return pattern.density * (dtype.itemsize + pattern.index_bits / 8)


@dataclass(frozen=True)
class Case:
    """Equal layers on a device under rules: what their pieces cost, and which of them a good choice runs.

    Args:
        sparse: they follow the rules; else they stay dense, and the rules have only the pattern that they might have.
        trains: there are training steps.
        kept: a dense weight is at hand in inference, so that a GEMM is never expanded for it.
        accumulate: forward passes per optimizer step, which share one preparation of the weight.
        fused: the optimizer masks and packs in its own pass, as MaskedAdamW can.
    """

    device: Device
    layer: Layer
    rules: Rules
    sparse: bool = True
    trains: bool = True
    kept: bool = True
    accumulate: int = 1
    fused: bool = True

    def but(self, rules: dict[str, Any] | None = None, layer: dict[str, Any] | None = None, **more: Any) -> Case:
        return replace(self, rules=replace(self.rules, **rules or {}), layer=replace(self.layer, **layer or {}), **more)

    def step(self, cost: Cost | None = None) -> Pieces:
        """The pieces of a training step, at predicted costs unless given; empty where there is none, or a GEMM has no cost."""
        cost, rules = cost or self.predict, self.rules
        roles = [role for role in GEMMS if role != "wgrad" or rules.trains]
        if not self.trains or any(cost(f"{role} dense") is None for role in roles):
            return ()
        best: list[Piece] = []
        for weight, *packed in rules.ways(self.device.transposed):
            pieces = [_faster(role, cost, bool(sparse)) for role, sparse in zip(GEMMS, packed, strict=False)]
            took = cost(weight) if weight else 0.0
            if took is None or (any(packed) and all(p.form == "dense" for p in pieces)):
                continue
            if weight:
                pieces.append(Piece("weight", 0.0, took / self.accumulate, weight.removeprefix("weight ")))
            if not best or total(pieces)[1] < total(best)[1]:
                best = pieces
        if not rules.trains:
            return tuple(best)
        if rules.estimate is None:
            return (*best, _faster("wgrad", cost, False))
        # with the estimate, whatever that costs: it is what the method trains with
        if (whole := cost("wgrad estimated")) is not None:
            return (*best, Piece("wgrad", cost("wgrad dense") or 0.0, whole, f"of mvue {rules.estimate}"))
        estimate = Piece("estimate", 0.0, cost("estimate") or 0.0, f"mvue {rules.estimate}")
        return (*best, _faster("wgrad", cost, True), estimate)

    def inference(self, cost: Cost | None = None) -> Pieces:
        """The GEMM of inference, and an adapter's two; without a dense weight beside the packed one, a dense GEMM expands that."""
        cost = cost or self.predict
        if cost("fprop dense") is None:
            return ()
        piece = _faster("fprop", cost, self.rules.leaves)
        expand = None if self.kept else cost("expand")
        if piece.form == "dense" and expand is not None:
            piece = Piece("fprop", piece.dense, piece.dense + expand, "expanded")
        adapter = cost("adapter")
        return (piece,) if adapter is None else (piece, Piece("adapter", 0.0, adapter, "dense"))

    @property
    def part(self) -> str:
        """What a change is judged by: the step, or inference for a layer that is not trained."""
        return "step" if self.trains else "inference"

    def pieces(self) -> Pieces:
        return self.step() if self.trains else self.inference()

    def speedup(self) -> float:
        return speedup(self.pieces())

    def predict(self, piece: str) -> float | None:
        """Seconds of a piece by the roofline, see ``Cost``."""
        device, layer, rules = self.device, self.layer, self.rules
        role, _, form = piece.partition(" ")
        if form == "estimated" or (role == "adapter" and not rules.rank):  # here GEMM and estimate are two pieces
            return None
        if role == "weight":
            return self._prepare(form)
        if role == "estimate":
            assert rules.estimate is not None
            moved = layer.tokens * layer.shape[0] * (layer.dtype.itemsize + packed_bytes(rules.estimate, layer.dtype))
            return moved / (device.estimate * device.bandwidth) + device.call
        out, cols = layer.shape
        if role == "adapter":
            return sum(self.but(layer={"shape": shape}).gemm("fprop") for shape in ((rules.rank, cols), (out, rules.rank)))
        if role == "expand":
            moved = out * cols * (layer.dtype.itemsize + packed_bytes(rules.pattern, layer.dtype))
            return moved / (device.passes * device.bandwidth) + device.call
        pattern = None if form == "dense" else rules.estimate if role == "wgrad" else rules.pattern
        return self.gemm(role, pattern) if pattern is None or not self.refused(role, pattern) else None

    def gemm(self, role: str, pattern: Pattern | None = None) -> float:
        """Seconds of one GEMM, dense or with its N:M operand in packed form."""
        device, dtype = self.device, self.layer.dtype
        rows, cols, width = self._sizes(role)
        each, ratio, launch = float(dtype.itemsize), 1.0, device.launch
        if pattern is not None:
            few = device.few is not None and width <= device.few.get(kind(dtype), 0)
            stored = pattern if few or device.few is None or not tensor_core_pattern(pattern) else TWO_FOUR
            each, ratio, launch = packed_bytes(stored, dtype), 1.0 if few else device.ratio[role], device.call
        moved = rows * cols * each + (cols + rows) * width * dtype.itemsize
        arithmetic = 2 * rows * cols * width / (device.rate(dtype) * ratio)
        return max(moved / (device.share * device.bandwidth), arithmetic) + launch

    def refused(self, role: str, pattern: Pattern) -> str:
        """Why no kernel profits from the N:M operand of that GEMM; empty where one does."""
        device, dtype = self.device, kind(self.layer.dtype)
        rows, cols, width = self._sizes(role)
        if device.few is None or width <= device.few.get(dtype, 0):
            return ""
        if dtype not in HALVES:
            return dtype
        if not tensor_core_pattern(pattern):
            return "pattern"
        # tokens are filled up with zeros
        return "shape" if rows % device.rows or (role != "wgrad" and cols % device.cols) else ""

    def _sizes(self, role: str) -> tuple[int, int, int]:
        """``(rows, cols)`` of what is N:M in that GEMM, groups along ``cols``, and how many columns it is multiplied with."""
        (out, cols), tokens = self.layer.shape, self.layer.tokens
        return {"fprop": (out, cols, tokens), "dgrad": (cols, out, tokens), "wgrad": (out, tokens, cols)}[role]

    def _prepare(self, form: str) -> float:
        device, layer, rules = self.device, self.layer, self.rules
        packed, dense = packed_bytes(rules.pattern, layer.dtype), float(layer.dtype.itemsize)
        fused = self.fused and rules.prepare in ("mask", "transposable")
        held = 0.125 if rules.prepare == "transposable" else 0.0
        written = {"dense": dense, "rows": packed, "rows+dense": packed + dense, "both": 2 * packed + held}[form]
        moved = layer.shape[0] * layer.shape[1] * (written + (0 if fused else layer.master.itemsize))
        return moved / (device.passes * device.bandwidth) + (0.0 if fused else device.call)


def _faster(role: str, cost: Cost, sparse: bool) -> Piece:
    dense = cost(f"{role} dense") or 0.0
    took = cost(f"{role} sparse") if sparse else None
    return Piece(role, dense, dense, "dense") if took is None or took >= dense else Piece(role, dense, took, "sparse")
