"""What a recipe does to a linear layer in a sparse step, the cost of each piece by a roofline, and the fastest choice of pieces.

Each piece takes the time of its bytes or its arithmetic, whichever is longer, plus the launch of a kernel:

    GEMM: max(bytes / (share · bandwidth), 2 · tokens · out · in / (rate · ratio)) + launch        ratio 1 for dense
    pass over memory: bytes / (share · bandwidth) + launch

Bytes per element of s bytes, and p = s·N/M + index bits in packed form (1.125 for 2:4 in 16 bits): a weight of w bytes masked and packed
one way w + p (3.125 for w = s = 2), both ways with the mask w + 2p + 1 (5.25), MVUE to packed s + p (3.125). ``traffic`` has what a step
moves outside of its GEMMs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from ..autograd.transforms import WeightTransform
from ..gemm.devices import HALVES, Device
from ..gemm.estimate import copying, roofline
from ..gemm.problem import ROLES, Problem, packed_bytes, plain
from ..nn.weight import NMWeight
from ..ops.pack import tensor_core_pattern
from ..pattern import Pattern, RecipeError
from ..recipes.compose import deployed, first_stage, innermost, with_pattern
from ..recipes.contract import Recipe, Span
from ..recipes.registry import find, get, parse
from ..recipes.schedule import ScheduledRecipe
from . import traffic

TWO_FOUR = Pattern("2:4")
META = torch.device("meta")
STEPS = 10_000  # length of the run for recipes without total_steps

Pieces = tuple["Piece", ...]
Cost = Callable[[str], float | None]
"""Seconds of a piece by name, or None: ``"fprop dense"``, ``"wgrad sparse"``, ``"estimate"``, ``"weight rows"``...

``"wgrad estimated"`` is the GEMM and the making of its estimate, if they were measured together."""


@dataclass(frozen=True)
class Rules:
    """How a recipe treats a layer in a sparse step.

    Args:
        pattern: of the weight.
        fprop, dgrad: whether the weight of that GEMM is N:M along the dimension that it sums over.
        estimate: pattern of the output gradient's estimate in wgrad; None for the dense gradient.
        prepare: how the weight is made: ``"mask"``, ``"threshold"``, ``"transposable"``, or ``""`` if it is used unchanged.
        trains: whether the weight has a gradient.
        steps: the share of a run's steps that are sparse; the others are dense.
        deploys_nm: whether the deployed weight is N:M.
        packed: whether training may multiply the compressed weight.
        rank: of the deployed low-rank adapter.
        fp8: whether training rounds the operands of GEMMs to FP8.
        values, group: what the deployed values are and the columns that share a step, as in ``gemm.problem.Problem``.
        frozen: whether Adam's second moment is only read, as in STEP's second phase.
    """

    pattern: Pattern
    fprop: bool = True
    dgrad: bool = False
    estimate: Pattern | None = None
    prepare: str = "mask"
    trains: bool = True
    steps: float = 1.0
    deploys_nm: bool = True
    packed: bool = True
    rank: int = 0
    fp8: bool = False
    values: str = "float"
    group: int = 0
    frozen: bool = False

    @property
    def held(self) -> bool:
        """Whether the mask is held in memory and not computed from the present weight."""
        return self.prepare == "transposable" or (self.fprop and not self.prepare)

    def preparations(self, transposed: bool) -> Iterator[tuple[str, bool, bool]]:
        """Options to prepare the weight: (piece, whether fprop reads it packed, whether dgrad does). A dense dgrad also needs the dense
        layout."""
        yield ("weight dense" if self.prepare else ""), False, False
        if not self.fprop or not self.prepare or not self.packed:
            return
        yield "weight rows+dense", True, False
        if transposed:
            yield "weight rows", True, True
        if self.dgrad:
            yield "weight both", True, True


def of_recipe(recipe: Recipe, pattern: Pattern) -> Rules:
    """The rules of the cheapest steps of ``recipe`` for a layer with ``pattern``."""
    steps = recipe.total_steps or STEPS
    adapted = recipe if pattern == recipe.pattern else with_pattern(recipe, pattern)
    # sparse steps follow the inner recipe of STEP and LayerWise
    inner = innermost(recipe)
    fp8 = getattr(inner, "fp8", None) is not None
    spans = [span for span in adapted.profile(steps) if span.steps]
    best, deploys_nm = min(spans, key=_work), deployed(adapted).fprop < 1
    if _work(best) == 3:
        return Rules(pattern, fprop=False, prepare="", steps=0.0, deploys_nm=deploys_nm, packed=False)
    stages = [stage for _, stage in inner.stages] if isinstance(inner, ScheduledRecipe) else [first_stage(inner)]
    used = adapted.final_transform() if any(stage.transform is not None for stage in stages) else None
    return Rules(
        pattern,
        best.fprop < 1,
        best.dgrad < 1,
        Pattern(getattr(inner, "mvue_pattern", "2:4")) if 0 < best.wgrad < 1 else None,
        _prepare_rule(used, best.dgrad < 1),
        best.wgrad > 0,
        sum(span.steps for span in spans if _work(span) < 3) / steps,
        deploys_nm,
        bool(getattr(inner, "packed", False)) and not fp8,
        fp8=fp8,
        frozen=recipe.name == "step",
    )


def of_layer(layer: NMWeight) -> Rules:
    """The rules of a sparse layer in its present phase; in a dense phase, those of its final transform."""
    transform, plan = layer.transform or (layer.final if layer.starts else None), layer.plan
    columns = transform is not None and (transform.traits.transposable or transform.traits.own_dgrad)
    estimate = Pattern(plan.n, plan.m) if plan.wgrad in ("mvue", "magnitude") else None
    prepare, trains = _prepare_rule(transform, columns), plan.wgrad != "none"
    return Rules(layer.pattern, True, columns, estimate, prepare, trains, packed=plan.packs, fp8=plan.fp8 is not None)


def _work(span: Span) -> float:
    return span.fprop + span.dgrad + span.wgrad


def _prepare_rule(transform: WeightTransform | None, columns: bool) -> str:
    # without a transform the optimizer keeps the weight N:M by a held mask; a doubly pruned weight costs the same as a transposable one:
    # two packed forms
    if transform is None:
        return ""
    return "threshold" if transform.traits.in_step == "threshold" else "transposable" if columns else "mask"


def by_name(spec: str) -> Recipe:
    """Parse a recipe; if its profile depends on its length, which the text does not give, use ``STEPS`` steps."""
    name, _, config = parse(spec)
    free = {f.name for f in fields(find(name)) if f.init} - set(config)
    steps = {"total_steps": STEPS} if "total_steps" in free else {}
    long = get(spec, **steps)
    try:
        short = get(spec)
    except RecipeError:
        return long
    return short if short.profile(STEPS) == long.profile(STEPS) else long


@dataclass(frozen=True)
class Piece:
    """One part of a step: seconds per forward pass in the dense model and here, and the form in which it runs here."""

    name: str
    dense: float
    used: float
    form: str


def total(pieces: Sequence[Piece]) -> tuple[float, float]:
    """Seconds in the dense model, and here."""
    return sum(p.dense for p in pieces), sum(p.used for p in pieces)


def speedup(pieces: Sequence[Piece]) -> float:
    """Speed-up over dense of all pieces together."""
    dense, used = total(pieces)
    return dense / used if used else 1.0


@dataclass(frozen=True)
class Layer:
    """The properties of a linear layer that the roofline uses.

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


@dataclass(frozen=True)
class LayerCosts:
    """A layer on a device under rules: the cost of its pieces, and the fastest choice of pieces.

    Args:
        sparse: whether it follows the rules; otherwise it stays dense, and only the rules' pattern is meaningful.
        trains: whether there are training steps.
        has_dense: whether inference has a dense copy of the weight, so that a dense GEMM need not expand it.
        accumulate: forward passes per optimizer step, which share one preparation of the weight.
    """

    device: Device
    layer: Layer
    rules: Rules
    sparse: bool = True
    trains: bool = True
    has_dense: bool = True
    accumulate: int = 1

    def at(self, bound: str) -> LayerCosts:
        """The same for the slowest (``"low"``) or the fastest (``"high"``) plausible sparse GEMMs of the device."""
        return replace(self, device=self.device.at(getattr(self.device, bound)))

    def but(self, rules: dict[str, Any] | None = None, layer: dict[str, Any] | None = None, **more: Any) -> LayerCosts:
        return replace(self, rules=replace(self.rules, **rules or {}), layer=replace(self.layer, **layer or {}), **more)

    def step(self, cost: Cost | None = None) -> Pieces:
        """The pieces of a training step, by default at predicted costs; empty if there is none, or a GEMM has no cost."""
        cost, rules = cost or self.predict, self.rules
        roles = [role for role in ROLES if role != "wgrad" or rules.trains]
        if not self.trains or any(cost(f"{role} dense") is None for role in roles):
            return ()
        best: list[Piece] = []
        for weight, *packed in rules.preparations(self.device.transposed):
            pieces = [_faster(role, cost, bool(sparse)) for role, sparse in zip(ROLES, packed, strict=False)]
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
        # the method trains with the estimate, even if that is slower
        if (estimated := cost("wgrad estimated")) is not None:
            return (*best, Piece("wgrad", cost("wgrad dense") or 0.0, estimated, f"of mvue {rules.estimate}"))
        estimate = Piece("estimate", 0.0, cost("estimate") or 0.0, f"mvue {rules.estimate}")
        return (*best, _faster("wgrad", cost, True), estimate)

    def whole(self) -> Pieces:
        """The pieces of a training step with the optimizer's update, per forward pass, by the roofline and the bytes of ``traffic``.

        In addition to ``step``: the dense weight is cast in each pass, the gradient of the weight too, and AdamW runs once per update.
        """
        pieces = self.step()
        if not pieces:
            return ()
        layer = self.layer
        made = next((p for p in pieces if p.name == "weight"), None)
        each = traffic.cast(layer.master, layer.dtype)
        cast = self._copying(each) + self.device.launch if each else 0.0
        weight = Piece("weight", cast, cast, "cast") if made is None else Piece("weight", cast, made.used, made.form)
        back = cast * self.rules.trains
        dense, used = (self._copying(moved / self.accumulate) for moved in self.update)
        rest = weight, Piece("gradient", back, back, "cast"), Piece("update", dense, used, "AdamW")
        return (*(p for p in pieces if p is not made), *rest)

    @property
    def update(self) -> tuple[float, float]:
        """Bytes a weight of the optimizer's update, with torch's AdamW in the dense model and with ``MaskedAdamW`` here."""
        if not self.rules.trains:
            return 0.0, 0.0
        held, frozen = self.sparse and self.rules.held, self.sparse and self.rules.frozen
        return traffic.update(self.layer.master, ours=False), traffic.update(self.layer.master, ours=True, held=held, frozen=frozen)

    def outside(self) -> tuple[float, float]:
        """Bytes a weight outside of forward and backward, in the dense model and here, with one pass per update."""
        form = next((p.form for p in self.step() if p.name == "weight"), None)
        cast = traffic.cast(self.layer.master, self.layer.dtype)
        return self.update[0] + cast, self.update[1] + (cast if form is None else self._forms(form))

    def inference(self, cost: Cost | None = None) -> Pieces:
        """The GEMM of inference, and those of an adapter; without a dense copy, a dense GEMM first expands the packed weight."""
        cost = cost or self.predict
        if cost("fprop dense") is None:
            return ()
        piece = _faster("fprop", cost, self.rules.deploys_nm)
        expand = None if self.has_dense else cost("expand")
        if piece.form == "dense" and expand is not None:
            piece = Piece("fprop", piece.dense, piece.dense + expand, "expanded")
        adapter = cost("adapter")
        return (piece,) if adapter is None else (piece, Piece("adapter", 0.0, adapter, "dense"))

    @property
    def part(self) -> str:
        """The part that advice is about: the step, or inference if the layer is not trained."""
        return "step" if self.trains else "inference"

    def speedup(self) -> float:
        return speedup(self.step() if self.trains else self.inference())

    def problem(self, role: str, device: torch.device = META) -> Problem:
        """One of its GEMMs, for kernels that read compressed operands."""
        (out, cols), rules = self.layer.shape, self.rules
        pattern = rules.estimate if role == "wgrad" and rules.estimate is not None else rules.pattern
        problem = Problem(role, self.layer.tokens, out, cols, pattern.n, pattern.m, self.layer.dtype, device)
        return problem._replace(values=rules.values, group=rules.group) if role == "fprop" else problem

    def predict(self, piece: str) -> float | None:
        """Seconds of a piece by the roofline, see ``Cost``."""
        device, layer, rules = self.device, self.layer, self.rules
        role, _, form = piece.partition(" ")
        if form == "estimated" or (role == "adapter" and not rules.rank):  # the roofline has GEMM and estimate as two pieces
            return None
        if role == "weight":
            return self._copying(self._forms(form)) + device.call
        if role == "estimate":
            assert rules.estimate is not None
            each = layer.dtype.itemsize + packed_bytes(rules.estimate, layer.dtype)
            return copying(device, layer.tokens * layer.shape[0], each, device.estimate)
        if role == "adapter":
            x = self.problem("fprop")
            return roofline(device, x._replace(rows=rules.rank)) + roofline(device, x._replace(cols=rules.rank))
        if role == "expand":
            size = layer.dtype.itemsize
            expand = self._copying(size + packed_bytes(rules.pattern, layer.dtype, rules.values, rules.group)) + device.call
            if rules.values == "float":
                return expand
            return expand + self._copying(2 * rules.pattern.density * size) + device.call  # decoded values are written, and read again
        p = self.problem(role)
        if form == "dense":
            return roofline(device, p)
        if self.refused(role):
            return None
        pattern, few = Pattern(p.n, p.m), self._few(role)
        if not few and tensor_core_pattern(pattern):  # which is stored as 2:4 for the tensor cores
            pattern = TWO_FOUR
        ratio = 1.0 if few and device.few is not None else device.ratio[role]
        return roofline(device, p, packed_bytes(pattern, p.dtype, p.values, p.group), ratio)

    def refused(self, role: str) -> str:
        """Why no kernel benefits from the N:M operand of that GEMM; empty if one does."""
        device, p = self.device, self.problem(role)
        if self._few(role):
            return ""
        if p.integers:
            return "integers"
        if plain(p.dtype) not in HALVES:
            return plain(p.dtype)
        if not tensor_core_pattern(Pattern(p.n, p.m)):
            return "pattern"
        rows, cols = (p.cols, p.rows) if role == "dgrad" else (p.rows, p.cols if role == "fprop" else 0)  # tokens are padded with zeros
        return "shape" if rows % device.rows or cols % device.cols else ""

    def _few(self, role: str) -> bool:
        """Whether kernels read any N:M operand directly, for so few columns of the other one."""
        few, (_, cols) = self.device.few, self.layer.shape
        return few is None or (cols if role == "wgrad" else self.layer.tokens) <= few.get(plain(self.layer.dtype), 0)

    def _forms(self, form: str) -> float:
        """Bytes a weight of making W̃."""
        return traffic.forms(form, self.rules.pattern, self.layer.master, self.layer.dtype, self.rules.held)

    def _copying(self, each: float) -> float:
        """Seconds of a pass over the weight that moves so many bytes for each element."""
        return self.layer.shape[0] * self.layer.shape[1] * each / (self.device.passes * self.device.bandwidth)


def _faster(role: str, cost: Cost, sparse: bool) -> Piece:
    dense = cost(f"{role} dense") or 0.0
    took = cost(f"{role} sparse") if sparse else None
    return Piece(role, dense, dense, "dense") if took is None or took >= dense else Piece(role, dense, took, "sparse")
