"""audit: does N:M pay for this model? What it would gain on a device, layer by layer, predicted and measured."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn

from ..nn import CompressedLinear, NMWeight
from ..pattern import Pattern, RecipeError
from ..recipes.base import Recipe
from ..recipes.handle import Handle
from ..recipes.registry import text
from ..recipes.report import Entry, starred
from ..recipes.sparsify import DTYPES, FilterFn
from ..tuning import Seconds
from .advice import Case, notes, of_dense, of_sparse
from .devices import Device
from .flops import skeleton
from .measure import Bench, Job, Measured, Progress, find, measured
from .report import Audit, LayerAudit
from .rules import Layer, Part, Rules, at, by_name, of_recipe, parts_of

RECIPE = "sste:2:4"
"""What a dense model is audited for unless told."""

NONE = Rules(Pattern("2:4"), fprop=False, prepare="", leaves=False)
"""A layer that stays dense."""


def audit(
    model: nn.Module | Handle | Mapping[str, tuple[int, int]],
    tokens: int = 8192,
    recipe: Recipe | str | None = None,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    filter_fn: FilterFn | None = None,
    accumulate: int = 1,
    optimizer: str = "fused",
    rows: Mapping[str, float] | None = None,
    other: float = 0.0,
    measure: bool = True,
    budget: float = 60.0,
    timer: Seconds | None = None,
    progress: Progress | None = None,
) -> Audit:
    """Predict, and measure where the device is at hand, how much faster N:M makes each linear layer; nothing is changed or printed.

    Two numbers per layer, each a dense layer's time over this one's: of **inference**, y = x Wᵀ in the form that ``finish`` and
    ``compress_`` leave; and of a training **step**::

        (fprop + dgrad + wgrad of a dense layer) / (fprop + dgrad + wgrad + estimate + weight / accumulate)

    with each GEMM in the faster of its sparse and its dense form, where the recipe's masks allow a sparse one; ``estimate`` is MVUE of
    the output gradient; ``weight`` is masking and packing the weight, once per optimizer step. The optimizer's own update is in
    neither, a low-rank adapter only in inference.

    The **prediction** is a roofline (``nmkernels.audit.rules``) of a GPU of the table (``devices``, with its sources) or of this
    machine as a short measurement finds it. It is no measurement: the GPUs' clocks fall under load, and a sparse GEMM draws more
    power, so that 2:4 is 1.2 to 1.4 times as fast as dense on an H100 or H200, not twice. The **measurement** times the very GEMMs
    of each distinct shape on random numbers, in turns, medians; masking is timed as a pass of its own.

    Args:
        model: dense (also on the meta device), sparse (``sparsify_``) or compressed; a handle; or shapes ``{name: (out, in)}``.
        tokens: rows of the layers' input in one forward pass, batch times sequence.
        recipe: what a dense model would be trained with, ``"sste:2:4"`` if not given; a name gets ``packed="auto"`` and, where it has a
            schedule, 10,000 steps, unless it says otherwise. A sparse model has rules of its own, unless it is given.
        device: ``"A100"``, ``"H100"``, ``"H200"`` (there or not), ``"cpu"``, ``"cuda"``; by default the model's, this CPU for one on meta.
        dtype: of the GEMMs, by default the weights'; for models whose fp32 weights are multiplied under autocast.
        filter_fn: as for ``sparsify_``.
        accumulate: forward and backward passes per optimizer step.
        optimizer: ``"fused"``: MaskedAdamW masks and packs in its own pass over the weight, where a recipe masks by magnitude;
            ``"separate"``: any other, with a pass for it. Only for the prediction.
        rows: how often a token passes through a layer where that is not once, by name; see ``flops``.
        other: forward FLOPs per token of everything else, counted at the dense rate, and twice in backward.
        measure: whether to measure, where the device is at hand.
        budget: seconds that measuring may take, about. Large shapes are then measured on fewer tokens and scaled, or left out.
        timer: seconds of one call of a ``Task``; by default the device's clock.
        progress: called with (done, total, what) before each distinct shape that is measured.

    Returns:
        an ``Audit``; ``str`` of it is a table, ``as_dict()`` is for JSON.

    Raises:
        RecipeError: the device is unknown, a number is out of range, or the model has no linear layer.

    Example:
        >>> found = audit({"up": (16384, 4096), "down": (4096, 16384)}, 8192, "fst:2:4(end=None)", device="H200", dtype="bfloat16")
        >>> f"{found.inference:.2f} {found.step:.2f}"
        '1.25 1.22'
    """
    _check(tokens, accumulate, optimizer, other, budget)
    model, recipe, report = _subject(model, recipe)
    target, spot = find(device, _home(model))
    given = _dtype(dtype)
    if dtype is not None and given not in DTYPES:
        raise RecipeError(f"audit: dtype={dtype!r} is none that GEMMs have; choose bfloat16, float16, float32 or float64.")
    parts = parts_of(model, recipe, report, filter_fn, tokens, rows or {}, given)

    @cache
    def device_for(dtype: torch.dtype, pattern: Pattern) -> Device:
        if isinstance(target, Device):
            return target
        assert spot is not None
        return measured(target, spot, dtype, pattern, timer)

    cases = [
        Case(
            device_for(part.layer.dtype, part.pattern),
            part.layer,
            part.rules or replace(NONE, trains=part.learns),
            part.trains,
            part.kept,
            accumulate,
            optimizer == "fused",
        )
        for part in parts
    ]
    bench = Bench(spot, timer, budget) if measure and spot is not None else None
    jobs = [Job(part.layer, part.rules, case.device.transposed, part.trains) for part, case in zip(parts, cases, strict=True)]
    timed = (
        {}
        if bench is None
        else bench.run({job: case.cost() for job, case in zip(jobs, cases, strict=True) if _counts(job.layer)}, progress)
    )
    first = next((case for case, part in zip(cases, parts, strict=True) if part.rules is not None), cases[0])
    usual = of_recipe(recipe, Pattern(recipe.pattern)) if recipe is not None else first.rules
    layers = [_layer(part, case, usual, timed.get(job, Measured({}))) for part, case, job in zip(parts, cases, jobs, strict=True)]
    steps = next((part.rules.steps for part in parts if part.rules is not None), 0.0)
    words, rest = text(recipe) if recipe is not None else "", other * tokens / first.device.rate(first.layer.dtype)
    result = Audit(tuple(layers), first.device.name, words, tokens, accumulate, steps, other=rest)
    if isinstance(target, Device):
        result = replace(result, inference_range=_range(result, cases, "inference"), step_range=_range(result, cases, "step"))
    return replace(result, notes=notes(result, first, bench is not None))


def _check(tokens: int, accumulate: int, optimizer: str, other: float, budget: float) -> None:
    for name, value, least in (("tokens", tokens, 1), ("accumulate", accumulate, 1), ("other", other, 0), ("budget", budget, 0)):
        if isinstance(value, bool) or not least <= value < math.inf or (least == 1 and value != int(value)):
            what = "whole number of at least 1" if least else "finite number of at least 0"
            raise RecipeError(f"audit: {name}={value!r} must be a {what}.")
    if optimizer not in ("fused", "separate"):
        raise RecipeError(f'audit: optimizer={optimizer!r} is unknown; choose "fused" for MaskedAdamW, or "separate".')


def _subject(
    model: nn.Module | Handle | Mapping[str, tuple[int, int]], recipe: Recipe | str | None
) -> tuple[nn.Module, Recipe | None, list[Entry]]:
    """The model, the recipe where one is known, and what a handle has reported."""
    report: list[Entry] = []
    if isinstance(model, Handle):
        report, recipe, model = model.report.entries, recipe or model.recipe, model.model
    if not isinstance(model, nn.Module):
        model = skeleton(model)
    done = any(isinstance(m, (NMWeight, CompressedLinear)) for m in model.modules())
    if recipe is None and done:
        return model, None, report
    return model, recipe if isinstance(recipe, Recipe) else by_name(recipe or RECIPE), report


def _dtype(word: str | torch.dtype | None) -> torch.dtype | None:
    short = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    return getattr(torch, short.get(word, word), None) if isinstance(word, str) else word


def _home(model: nn.Module) -> torch.device:
    """Where the model's weights are; the CPU for those without memory."""
    found = Counter(t.device for t in (*model.parameters(), *model.buffers()) if t.device.type != "meta")
    return found.most_common(1)[0][0] if found else torch.device("cpu")


def _layer(part: Part, case: Case, usual: Rules, own: Measured) -> LayerAudit:
    """One layer; ``usual`` are the rules that it would have, were it not dense."""
    first, layer = part.entries[0], part.layer
    names = tuple(e.name for e in part.entries)
    experts = math.prod(first.shape[:-2])
    common = LayerAudit(
        starred(first.name) if len(names) > 1 else first.name,
        names,
        first.kind,
        first.shape,
        str(layer.dtype).removeprefix("torch."),
        str(part.pattern) if part.rules is not None else "",
        part.rules is not None,
        first.reason,
        layer.tokens,
        len(names) * experts,
    )
    if not _counts(layer):
        return replace(common, note="no token is known to pass through it; rows={...} tells how many do" if first.shape else "")
    advice = (
        of_sparse(case)
        if part.rules is not None
        else of_dense(first.reason, part.pattern, replace(case, rules=replace(usual, pattern=part.pattern), kept=True))
    )
    return replace(
        common,
        inference=case.inference(),
        step=case.step(),
        measured_inference=own.named(case.inference(own.cost)) if own.seconds else (),
        measured_step=own.named(case.step(own.cost)) if own.seconds else (),
        note=own.note,
        advice=advice,
    )


def _counts(layer: Layer) -> bool:
    """Whether tokens are known to pass through it."""
    return layer.tokens > 0 and all(layer.shape)


def _range(result: Audit, cases: list[Case], part: str) -> tuple[float, ...]:
    """The total where sparse GEMMs are as slow, and as fast, as they may be."""
    totals = []
    for bound in ("low", "high"):
        moved = [replace(case, device=at(case.device, getattr(case.device, bound))) for case in cases]
        pieces = [getattr(case, part)() if layer.tokens else () for case, layer in zip(moved, result.layers, strict=True)]
        changed: list[dict[str, Any]] = [{part: found} for found in pieces]
        layers = [replace(layer, **change) for layer, change in zip(result.layers, changed, strict=True)]
        totals.append(replace(result, layers=tuple(layers)).total(part))
    return tuple(t for t in totals if t is not None)
