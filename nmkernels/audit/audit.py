"""``nm.audit``: predict and measure, layer by layer, what N:M would gain for a model on a device."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..arguments import finite_number, whole_number
from ..gemm.devices import Device
from ..gemm.problem import plain
from ..layouts import EXPERTS_T
from ..nn.adapter import adapter_of
from ..nn.compressed import CompressedLinear
from ..nn.experts import CompressedStack, StackedWeight, sparse_layers, stacks_of
from ..nn.weight import NMWeight
from ..pattern import NMError, Pattern, RecipeError
from ..recipes.compose import deployed
from ..recipes.contract import Recipe, rank_for
from ..recipes.registry import resolve, text
from ..timing import Seconds
from ..train.handle import Handle
from ..train.report import Entry, starred
from ..train.sparsify import DTYPES, FilterFn
from .advice import notes, of_dense, of_sparse
from .flops import inventory, matrices_of, matrix_of, passes, skeleton
from .pieces import Progress, Timings, find_device, probe, time_layers
from .report import Audit, LayerAudit
from .rules import TWO_FOUR, Layer, LayerCosts, Rules, by_name, of_layer, of_recipe
from .whole import RECIPES, WholeStep
from .whole import predict as predict_whole

RECIPE = "sste:2:4"  # default for a dense model

Groups = list[tuple[list[Entry], LayerCosts]]
"""Equal layers of a model, with the costs that they share."""


def audit(
    model: nn.Module | Handle | Mapping[str, tuple[int, int]],
    tokens: int = 8192,
    recipe: Recipe | str | None = None,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    filter_fn: FilterFn | None = None,
    accumulate: int = 1,
    rows: Mapping[str, float] | None = None,
    other: float = 0.0,
    measure: bool = True,
    budget: float = 60.0,
    timer: Seconds | None = None,
    progress: Progress | None = None,
) -> Audit:
    """Predict, and measure if the device is available, how much faster N:M makes each linear layer; the model is not changed.

    Each layer gets two speed-ups over a dense layer: **inference**, y = x Wᵀ in the form that ``finish`` and ``compress_`` leave, and a
    training **step**::

        (fprop + dgrad + wgrad of a dense layer) / (fprop + dgrad + wgrad + estimate + weight / accumulate)

    with each GEMM in the faster form that the recipe's masks allow; ``estimate`` is MVUE of the output gradient, ``weight`` is masking and
    packing the weight. Neither includes the optimizer's update; only inference includes a low-rank adapter.

    The prediction uses a roofline of a GPU listed in ``gemm/devices.py``, or of this machine from a short measurement. For a GPU, ``whole``
    predicts the step of the whole model with the update, and from how many tokens per update sparse training pays: for the recipe and, for
    a dense model, for SR-STE, S-STE, FST and STEP.

    Args:
        model: dense (also on the meta device), sparse (``sparsify_``) or compressed; a handle; or shapes ``{name: (out, in)}``.
        tokens: rows of the layers' input in one forward pass, batch times sequence.
        recipe: for a dense model, default ``"sste:2:4"``. A recipe given by name gets ``packed="auto"`` and, if it has a schedule, 10,000
            steps, unless it says otherwise. A sparse model keeps its own recipe unless one is given.
        device: ``"A100"``, ``"H100"``, ``"H200"`` (available or not), ``"cpu"``, ``"cuda"``; default the model's device, or this CPU for a
            meta model.
        dtype: of the GEMMs, default the weights'; set it for models trained under autocast.
        filter_fn: as for ``sparsify_``.
        accumulate: forward and backward passes per optimizer step.
        rows: name → how often a token passes through a layer, if not once; see ``flops``.
        other: forward FLOPs per token of everything else, counted at the dense rate, twice that in backward.
        measure: whether to measure if the device is available.
        budget: approximate seconds for measuring. Large shapes are measured on fewer tokens and scaled, or left out.
        timer: returns the seconds of one call of a ``Task``; default the device's clock.
        progress: called as ``progress(done, total, description)`` before measuring each distinct shape.

    Returns:
        an ``Audit``; ``str(...)`` gives a table, ``as_dict()`` values for JSON.

    Raises:
        RecipeError: the device is unknown; a number is out of range; or the model has no linear layer.

    Example:
        >>> result = audit({"up": (16384, 4096), "down": (4096, 16384)}, 8192, "fst:2:4(end=None)", device="H200", dtype="bfloat16")
        >>> f"{result.inference:.2f} {result.step:.2f}"
        '1.40 1.32'
    """
    tokens, accumulate = whole_number(RecipeError, "audit: tokens", tokens), whole_number(RecipeError, "audit: accumulate", accumulate)
    other, budget = finite_number(RecipeError, "audit: other", other), finite_number(RecipeError, "audit: budget", budget)
    report: list[Entry] = []
    if isinstance(model, Handle):
        report, recipe, model = model.report.entries, recipe or model.recipe, model.model
    model = model if isinstance(model, nn.Module) else skeleton("audit", model)
    alone = bool(sparse_layers(model))  # and has its own rules
    if recipe is not None or not alone:
        recipe = by_name(recipe or RECIPE) if isinstance(recipe, str | None) else resolve(recipe)
    home = next((t.device for t in (*model.parameters(), *model.buffers()) if not t.is_meta), torch.device("cpu"))
    target, spot = find_device(device, home)
    short = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    torch_dtype = getattr(torch, short.get(dtype, dtype), None) if isinstance(dtype, str) else dtype
    if dtype is not None and torch_dtype not in DTYPES:
        raise RecipeError(f"audit: dtype={dtype!r} is not supported; choose bfloat16, float16, float32 or float64.")

    def device_for(dtype: torch.dtype, rules: Rules) -> Device:
        if isinstance(target, Device):
            return target
        assert spot is not None
        return probe(target, spot, dtype, rules.pattern, rules.values, timer, torch.get_num_threads())

    def grouped(recipe: Recipe | None) -> Groups:
        cases = _cases(model, recipe, report, filter_fn, tokens, rows or {}, torch_dtype, device_for)
        return [(entries, replace(costs, accumulate=accumulate)) for entries, costs in cases]

    groups = grouped(recipe)
    every = [costs for _, costs in groups]
    counted = (costs for costs in every if _counts(costs.layer))
    timed = time_layers(counted, spot, timer, budget, progress) if measure and spot is not None else None
    first = next((costs for costs in every if costs.sparse), every[0])
    usual = of_recipe(recipe, Pattern(recipe.pattern)) if recipe is not None else first.rules
    layers = [_layer(entries, costs, usual, (timed or {}).get(costs, Timings())) for entries, costs in groups]
    words, rest = text(recipe) if recipe is not None else "", other * tokens / first.device.rate(first.layer.dtype)
    steps = first.rules.steps if first.sparse else 0.0
    result = Audit(tuple(layers), first.device.name, words, tokens, accumulate, steps, other=rest)
    if isinstance(target, Device):
        result = replace(result, inference_range=_range(result, every, "inference"), step_range=_range(result, every, "step"))
        result = replace(result, whole=tuple(_whole(recipe, groups, grouped, alone, tokens, rest)))
    return replace(result, notes=notes(result, first, timed is not None))


def _whole(
    recipe: Recipe | None, groups: Groups, grouped: Callable[[Recipe], Groups], alone: bool, tokens: int, rest: float
) -> Iterator[WholeStep]:
    """The whole steps of the recipe and, unless ``alone``, of others with its pattern; ``rest``: seconds of everything else in a pass."""
    plans = [("" if recipe is None else text(recipe), groups)]
    specs = () if recipe is None or alone else tuple(f"{name}:{recipe.pattern}" for name in RECIPES if name != recipe.name)
    for name in specs:
        with suppress(NMError), warnings.catch_warnings():  # not every recipe takes every pattern and layer
            warnings.simplefilter("ignore")
            plans.append((name, grouped(by_name(name))))
    for words, some in plans:
        counted = [(len(entries) * matrices_of(entries[0].shape), costs) for entries, costs in some if _counts(costs.layer)]
        step = predict_whole(words, counted, tokens, rest)
        if step is not None:
            yield step


def _cases(
    model: nn.Module,
    recipe: Recipe | None,
    report: list[Entry],
    filter_fn: FilterFn | None,
    tokens: int,
    rows: Mapping[str, float],
    dtype: torch.dtype | None,
    device_for: Callable[[torch.dtype, Rules], Device],
) -> Groups:
    """Group equal layers, in the model's order."""
    found_sparse = sparse_layers(model)
    modules, done = {**dict(model.named_modules()), **found_sparse}, list(found_sparse.values())
    usual = Counter(m.pattern for m in done).most_common(1)[0][0] if done else TWO_FOUR
    # the dense layers of a compressed model are not trained either
    compressed = bool(done) and not any(isinstance(m, NMWeight) for m in done)
    entries, patterns = inventory("audit", model, recipe or Recipe(usual), filter_fn)
    reasons = {e.name: e.reason for e in report if not e.sparse}
    standard = Pattern(recipe.pattern) if recipe is not None else usual
    grouped: dict[object, tuple[list[Entry], LayerCosts]] = {}
    for e, often in zip(entries, passes("audit", entries, rows), strict=True):
        entry = e if e.sparse or e.name not in reasons else replace(e, reason=reasons[e.name])
        module, pattern = modules.get(entry.name), patterns.get(entry.name)
        weight, learns = _weight(model, module, entry.name)
        master = weight if weight in DTYPES else torch.bfloat16
        home, _, key = entry.name.rpartition(".")
        owner = modules.get(home)
        layout = module.layout if isinstance(module, CompressedStack) else stacks_of(owner).get(key) if owner is not None else None
        shape = (entry.shape[2], entry.shape[1]) if layout == EXPERTS_T else matrix_of(entry.shape)  # of one matrix
        layer = Layer(shape, round(tokens * often), dtype or master, master)
        if pattern is None:
            rules = Rules(standard, fprop=False, prepare="", deploys_nm=False, trains=learns)
        else:
            rules = _rules(module, recipe, pattern, layer.shape)
            rules = rules if learns else replace(rules, trains=False, estimate=None)
            if len(entry.shape) > 2:
                rules = replace(rules, packed=False)  # before compress_ experts and convolutions use dense GEMMs
        trains = not compressed and not isinstance(module, (CompressedLinear, CompressedStack)) and not getattr(module, "finished", False)
        has_dense = not isinstance(module, (CompressedLinear, CompressedStack)) or module.keep_dense
        costs = LayerCosts(device_for(layer.dtype, rules), layer, rules, pattern is not None, trains, has_dense)
        grouped.setdefault((starred(entry.name), entry.kind, entry.shape, entry.reason, costs), ([], costs))[0].append(entry)
    return list(grouped.values())


def _rules(module: nn.Module | None, recipe: Recipe | None, pattern: Pattern, shape: tuple[int, int]) -> Rules:
    if recipe is not None:
        return replace(of_recipe(recipe, pattern), rank=rank_for(deployed(recipe).rank, shape))
    adapter = adapter_of(module) if isinstance(module, (NMWeight, CompressedLinear)) else None
    rules = of_layer(module) if isinstance(module, NMWeight) else Rules(pattern)
    if isinstance(module, (CompressedLinear, CompressedStack)) and module.weight.step is not None:
        rules = replace(rules, values=module.weight.kind, group=module.weight.group)
    return rules if adapter is None else replace(rules, rank=int(adapter[0].shape[1]))


def _weight(model: nn.Module, module: nn.Module | None, name: str) -> tuple[torch.dtype, bool]:
    """The dtype of a layer's weight, and whether it has a gradient."""
    if isinstance(module, (CompressedLinear, CompressedStack)):
        return module.dtype, False
    module = None if isinstance(module, StackedWeight) else module  # its Parameter belongs to another module
    try:
        weight = model.get_parameter(f"{name}.weight" if module is not None and name else "weight" if module is not None else name)
    except AttributeError:  # computed from other tensors
        return torch.get_default_dtype(), True
    return weight.dtype, weight.requires_grad


def _layer(entries: list[Entry], costs: LayerCosts, usual: Rules, timings: Timings) -> LayerAudit:
    """``usual``: the rules that a dense layer would have if it were sparse."""
    first, layer = entries[0], costs.layer
    names, pattern = tuple(e.name for e in entries), str(costs.rules.pattern) if costs.sparse else ""
    name, times = starred(first.name) if len(entries) > 1 else first.name, len(entries) * matrices_of(first.shape)
    kind = first.kind, first.shape, plain(layer.dtype), pattern, costs.sparse, first.reason
    common = LayerAudit(name, names, *kind, layer.tokens, times)
    if not _counts(layer):
        return replace(common, note="its number of tokens is unknown; give it in rows={...}" if first.shape else "")
    would = replace(costs, rules=replace(usual, pattern=costs.rules.pattern), has_dense=True)
    return replace(
        common,
        inference=costs.inference(),
        step=costs.step(),
        measured_inference=timings.named(costs.inference(timings.cost)),
        measured_step=timings.named(costs.step(timings.cost)),
        note=timings.note,
        advice=of_sparse(costs) if costs.sparse else of_dense(first.reason, would),
    )


def _counts(layer: Layer) -> bool:
    """Whether its shape and number of tokens are known."""
    return layer.tokens > 0 and all(layer.shape)


def _range(result: Audit, every: list[LayerCosts], part: str) -> tuple[float, ...]:
    """The totals for the slowest and the fastest plausible sparse GEMMs."""
    totals = []
    for bound in ("low", "high"):
        pairs: list[tuple[LayerAudit, Any]] = list(zip(result.layers, [costs.at(bound) for costs in every], strict=True))
        pieces: list[dict[str, Any]] = [{part: getattr(costs, part)() if layer.tokens else ()} for layer, costs in pairs]
        layers = [replace(layer, **piece) for (layer, _), piece in zip(pairs, pieces, strict=True)]
        totals.append(replace(result, layers=tuple(layers)).total(part))
    return tuple(t for t in totals if t is not None)
