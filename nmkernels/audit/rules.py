"""What a recipe does to a linear layer in a sparse step, what each piece of that costs by a roofline, and which pieces a good choice runs.

The roofline: each piece of a step takes as long as its bytes or its arithmetic do, whichever is more, and the start of a kernel.

    GEMM: max(bytes / (share · bandwidth), 2 · tokens · out · in / (rate · ratio)) + launch        ratio 1 where it is dense
    pass over memory: bytes / (share · bandwidth) + launch

Bytes per element of s bytes, and p = s·N/M + index bits in packed form (1.125 for 2:4 in 16 bits): a weight of w bytes masked and packed
one way w + p (3.125 for w = s = 2), both ways with the mask w + 2p + 1/8 (4.375), MVUE to packed s + p (3.125). MaskedAdamW, which
reads the weight anyhow, only adds what is written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from ..autograd import WeightTransform
from ..nn import CompressedLinear, NMWeight, adapter_of
from ..ops import tensor_core_pattern
from ..pattern import Pattern, RecipeError
from ..recipes.base import Recipe, Span, rank_for
from ..recipes.compose import deployed, innermost, with_pattern
from ..recipes.registry import find, get, parse
from ..recipes.report import Entry, starred
from ..recipes.sparsify import DTYPES, FilterFn
from .devices import Device
from .flops import inventory, passes

STEPS = 10_000
"""Steps of the run whose sparse steps are looked for, for recipes that do not say how long they are."""


def of_recipe(recipe: Recipe, pattern: Pattern) -> Rules:
    """The rules of the cheapest steps of ``recipe`` for a layer of ``pattern``, and the share of its run's steps that are sparse."""
    steps = recipe.total_steps or STEPS
    own = recipe if pattern == recipe.pattern else with_pattern(recipe, pattern)
    # the recipe that says what a sparse step does: the inner one of STEP and LayerWise
    inner = innermost(recipe)
    spans = [span for span in own.profile(steps) if span.steps]
    best, leaves = min(spans, key=_work), deployed(own).fprop < 1
    if _work(best) == 3:
        return Rules(pattern, fprop=False, prepare="", steps=0.0, leaves=leaves)
    return Rules(
        pattern,
        best.fprop < 1,
        best.dgrad < 1,
        Pattern(getattr(inner, "mvue_pattern", "2:4")) if 0 < best.wgrad < 1 else None,
        _prepare_rule(own.final_transform(), best.dgrad < 1),
        best.wgrad > 0,
        sum(span.steps for span in spans if _work(span) < 3) / steps,
        leaves,
        bool(getattr(inner, "packed", False)),
    )


def of_layer(layer: NMWeight) -> Rules:
    """The rules by which a sparse layer is trained now; in a dense phase, those of what ``finish`` will apply."""
    transform, plan = layer.transform or layer.final, layer.plan
    columns = transform.traits.transposable or transform.traits.own_dgrad
    estimate = Pattern(plan.n, plan.m) if plan.wgrad in ("mvue", "magnitude") else None
    return Rules(layer.pattern, True, columns, estimate, _prepare_rule(transform, columns), plan.wgrad != "none", packed=plan.packs)


def _work(span: Span) -> float:
    return span.fprop + span.dgrad + span.wgrad


def _prepare_rule(transform: WeightTransform, columns: bool) -> str:
    # a doubly pruned weight costs what a transposable one does: two packed forms
    return "threshold" if transform.traits.threshold else "transposable" if columns else "mask"


def by_name(spec: str) -> Recipe:
    """The recipe of a text, with ``packed="auto"`` and as long as a schedule needs to be seen, unless the text says otherwise."""
    name, _, given = parse(spec)
    free = {f.name for f in fields(find(name)) if f.init} - set(given)
    steps = {"total_steps": STEPS} if "total_steps" in free else {}
    auto: dict[str, Any] = {"packed": "auto"} if "packed" in free and "inner" not in given else {}
    try:
        long = get(spec, **steps, **auto)
    except RecipeError:  # emulated FP8 needs the dense layout, for instance
        auto = {}
        long = get(spec, **steps)
    try:
        short = get(spec, **auto)
    except RecipeError:
        return long
    return short if short.profile(STEPS) == long.profile(STEPS) else long


@dataclass(frozen=True)
class Part:
    """Equal layers: what the report says of them, and what their costs follow from.

    Args:
        rules: None where they stay dense. pattern: theirs, or what they would have.
        trains: there are training steps. learns: in which the weight has a gradient.
        kept: a dense weight is at hand in inference.
    """

    entries: tuple[Entry, ...]
    layer: Layer
    rules: Rules | None
    pattern: Pattern
    trains: bool
    learns: bool
    kept: bool


def parts_of(
    model: nn.Module,
    recipe: Recipe | None,
    report: list[Entry],
    filter_fn: FilterFn | None,
    tokens: int,
    rows: Mapping[str, float],
    dtype: torch.dtype | None,
) -> list[Part]:
    """Equal layers together, in the model's order."""
    modules = dict(model.named_modules())
    done = [m for m in modules.values() if isinstance(m, (NMWeight, CompressedLinear))]
    usual = Counter(m.pattern for m in done).most_common(1)[0][0] if done else None
    # of a compressed model the dense layers are not trained either
    deployed = bool(done) and all(isinstance(m, CompressedLinear) for m in done)
    entries, patterns = inventory("audit", model, recipe or Recipe(usual or "2:4"), filter_fn)
    said = {e.name: e.reason for e in report if not e.sparse}
    entries = [e if e.sparse or e.name not in said else replace(e, reason=said[e.name]) for e in entries]
    standard = Pattern(recipe.pattern) if recipe is not None else usual or Pattern("2:4")
    found: dict[object, list[Entry]] = {}
    made: dict[object, Part] = {}
    for entry, often in zip(entries, passes("audit", entries, rows), strict=True):
        module = modules.get(entry.name)
        weight, learns = _weight(model, module, entry.name)
        master = weight if weight in DTYPES else torch.bfloat16
        layer = Layer((entry.shape[-2:] or (0, 0)), round(tokens * often), dtype or master, master)  # type: ignore[arg-type]
        pattern = patterns.get(entry.name)
        rules = None if pattern is None else _rules(module, recipe, pattern, layer.shape)
        if rules is not None and not learns:
            rules = replace(rules, trains=False, estimate=None)
        trains = not deployed and not isinstance(module, CompressedLinear) and not getattr(module, "finished", False)
        kept = not isinstance(module, CompressedLinear) or module.keep_dense
        part = Part((), layer, rules, pattern or standard, trains, learns, kept)
        key = (starred(entry.name), entry.kind, entry.shape, entry.reason, part)
        found.setdefault(key, []).append(entry)
        made[key] = part
    return [replace(part, entries=tuple(found[key])) for key, part in made.items()]


def _rules(module: nn.Module | None, recipe: Recipe | None, pattern: Pattern, shape: tuple[int, int]) -> Rules:
    if recipe is not None:
        return replace(of_recipe(recipe, pattern), rank=rank_for(deployed(recipe).rank, shape))
    adapter = adapter_of(module) if isinstance(module, (NMWeight, CompressedLinear)) else None
    rules = of_layer(module) if isinstance(module, NMWeight) else Rules(pattern)
    return rules if adapter is None else replace(rules, rank=int(adapter[0].shape[1]))


def _weight(model: nn.Module, module: nn.Module | None, name: str) -> tuple[torch.dtype, bool]:
    """The dtype of a layer's weight, and whether it has a gradient."""
    if isinstance(module, CompressedLinear):
        return module.values.dtype, False
    try:
        weight = model.get_parameter(f"{name}.weight" if module is not None and name else "weight" if module is not None else name)
    except AttributeError:  # computed from other tensors
        return torch.get_default_dtype(), True
    return weight.dtype, weight.requires_grad


TWO_FOUR = Pattern("2:4")


@dataclass(frozen=True)
class Layer:
    """A linear layer as a roofline sees it.

    Args:
        shape: of the weight, ``(out, in)``. tokens: rows of its input.
        dtype: of the GEMMs. master: of the weight.
    """

    shape: tuple[int, int]
    tokens: int
    dtype: torch.dtype
    master: torch.dtype

    def sizes(self, role: str) -> tuple[int, int, int]:
        """``(rows, cols)`` of what is N:M in that GEMM, groups along ``cols``, and how many columns it is multiplied with."""
        out, cols = self.shape
        return {"fprop": (out, cols, self.tokens), "dgrad": (cols, out, self.tokens), "wgrad": (out, self.tokens, cols)}[role]


def packed_bytes(pattern: Pattern, dtype: torch.dtype) -> float:
    """Bytes of the compressed form per element of the dense one."""
    return pattern.density * (dtype.itemsize + pattern.index_bits / 8)


def predict(device: Device, layer: Layer, rules: Rules, fused: bool = True) -> Cost:
    """Seconds of each piece by the roofline of ``device``; ``fused``: the optimizer masks and packs in its own pass, as MaskedAdamW can."""

    def cost(piece: str) -> float | None:
        role, _, form = piece.partition(" ")
        if form == "estimated":  # here GEMM and estimate are two pieces
            return None
        if role == "weight":
            return _prepare(device, layer, rules, form, fused and rules.prepare in ("mask", "transposable"))
        if role == "estimate":
            assert rules.estimate is not None
            moved = layer.tokens * layer.shape[0] * (layer.dtype.itemsize + packed_bytes(rules.estimate, layer.dtype))
            return moved / (device.estimate * device.bandwidth) + device.call
        if role == "adapter":
            return _adapter(device, layer, rules.rank) if rules.rank else None
        if role == "expand":
            moved = layer.shape[0] * layer.shape[1] * (layer.dtype.itemsize + packed_bytes(rules.pattern, layer.dtype))
            return moved / (device.passes * device.bandwidth) + device.call
        pattern = None if form == "dense" else rules.estimate if role == "wgrad" else rules.pattern
        if form == "dense" or pattern is None or not refused(device, layer, role, pattern):
            return gemm(device, layer, role, pattern)
        return None

    return cost


def refused(device: Device, layer: Layer, role: str, pattern: Pattern) -> str:
    """Why no kernel profits from the N:M operand of that GEMM; empty where one does."""
    rows, cols, width = layer.sizes(role)
    # tokens are filled up with zeros; a dgrad from the weight packed along its rows has the rows of fprop
    if role == "wgrad":
        return device.refuses(rows, 0, layer.shape[1], layer.dtype, pattern)
    if role == "dgrad" and device.transposed:
        rows, cols = cols, rows
    return device.refuses(rows, cols, width, layer.dtype, pattern)


def gemm(device: Device, layer: Layer, role: str, pattern: Pattern | None = None) -> float:
    """Seconds of one GEMM, dense or with its N:M operand in packed form."""
    rows, cols, width = layer.sizes(role)
    size, dtype = layer.dtype.itemsize, str(layer.dtype).removeprefix("torch.")
    each, ratio, launch = float(size), 1.0, device.launch
    if pattern is not None:
        few = device.few is not None and width <= device.few.get(dtype, 0)
        stored = pattern if few or device.few is None or not tensor_core_pattern(pattern) else TWO_FOUR
        each, ratio, launch = packed_bytes(stored, layer.dtype), 1.0 if few else device.ratio[role], device.call
    moved = rows * cols * each + (cols + rows) * width * size
    arithmetic = 2 * rows * cols * width / (device.rate(layer.dtype) * ratio)
    return max(moved / (device.share * device.bandwidth), arithmetic) + launch


def _prepare(device: Device, layer: Layer, rules: Rules, form: str, fused: bool) -> float:
    packed, dense = packed_bytes(rules.pattern, layer.dtype), float(layer.dtype.itemsize)
    held = 0.125 if rules.prepare == "transposable" else 0.0
    written = {"dense": dense, "rows": packed, "rows+dense": packed + dense, "both": 2 * packed + held}[form]
    moved = layer.shape[0] * layer.shape[1] * (written + (0 if fused else layer.master.itemsize))
    return moved / (device.passes * device.bandwidth) + (0.0 if fused else device.call)


def _adapter(device: Device, layer: Layer, rank: int) -> float:
    out, cols = layer.shape
    return sum(gemm(device, replace(layer, shape=shape), "fprop") for shape in ((rank, cols), (out, rank)))


def at(device: Device, ratio: float) -> Device:
    return replace(device, ratio=dict.fromkeys(device.ratio, ratio))


GEMMS = ("fprop", "dgrad", "wgrad")
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
    """One part of a step, in seconds for every forward pass: in the dense model and here, and in which form it runs here."""

    name: str
    dense: float
    used: float
    form: str

    @property
    def speedup(self) -> float:
        """Times as fast as dense."""
        return self.dense / self.used if self.used else 1.0


def ways(rules: Rules, transposed: bool) -> Iterator[tuple[str, bool, bool]]:
    """The ways to prepare the weight, and whether fprop and dgrad then read it packed; a dense dgrad needs the dense layout beside that."""
    yield ("weight dense" if rules.prepare else ""), False, False
    if not rules.fprop or not rules.prepare or not rules.packed:
        return
    yield "weight rows+dense", True, False
    if transposed:
        yield "weight rows", True, True
    if rules.dgrad:
        yield "weight both", True, True


def step(cost: Cost, rules: Rules, transposed: bool = False, accumulate: int = 1) -> tuple[Piece, ...]:
    """The pieces of a training step with every choice made for the least time; empty where a GEMM has no cost.

    Args:
        transposed: see ``Device``.
        accumulate: forward passes per optimizer step, which share one preparation of the weight.
    """
    dense = {p: cost(f"{p} dense") for p in GEMMS if p != "wgrad" or rules.trains}
    if any(d is None for d in dense.values()):
        return ()
    best: list[Piece] = []
    for weight, *packed in ways(rules, transposed):
        pieces = [_gemm(p, cost, bool(sparse)) for p, sparse in zip(GEMMS, packed, strict=False)]
        took = cost(weight) if weight else 0.0
        if took is None or (any(packed) and all(p.form == "dense" for p in pieces)):
            continue
        if weight:
            pieces.append(Piece("weight", 0.0, took / accumulate, weight.removeprefix("weight ")))
        if not best or total(pieces)[1] < total(best)[1]:
            best = pieces
    if rules.trains:
        best += _wgrad(cost, rules)
    return tuple(best)


def _wgrad(cost: Cost, rules: Rules) -> list[Piece]:
    """The GEMM with the gradient, or with its estimate, whatever that costs: it is what the method trains with."""
    dense = cost("wgrad dense") or 0.0
    if rules.estimate is None:
        return [Piece("wgrad", dense, dense, "dense")]
    whole = cost("wgrad estimated")
    if whole is not None:
        return [Piece("wgrad", dense, whole, f"of mvue {rules.estimate}")]
    return [_gemm("wgrad", cost, True), Piece("estimate", 0.0, cost("estimate") or 0.0, f"mvue {rules.estimate}")]


def inference(cost: Cost, kept: bool = True) -> tuple[Piece, ...]:
    """The GEMM of inference, and an adapter's two; without a dense weight beside the packed one, a dense GEMM expands that."""
    if cost("fprop dense") is None:
        return ()
    piece = _gemm("fprop", cost, True)
    expand = None if kept else cost("expand")
    if piece.form == "dense" and expand is not None:
        piece = Piece("fprop", piece.dense, piece.dense + expand, "expanded")
    adapter = cost("adapter")
    return (piece,) if adapter is None else (piece, Piece("adapter", 0.0, adapter, "dense"))


def total(pieces: Sequence[Piece]) -> tuple[float, float]:
    """Seconds in the dense model, and here."""
    return sum(p.dense for p in pieces), sum(p.used for p in pieces)


def speedup(pieces: tuple[Piece, ...]) -> float:
    """Times as fast as dense, all pieces together."""
    dense, used = total(pieces)
    return dense / used if used else 1.0


def _gemm(role: str, cost: Cost, sparse: bool) -> Piece:
    dense = cost(f"{role} dense") or 0.0
    took = cost(f"{role} sparse") if sparse else None
    return Piece(role, dense, dense, "dense") if took is None or took >= dense else Piece(role, dense, took, "sparse")
