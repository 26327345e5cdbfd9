"""flops: what training under a recipe costs, and what the deployed model costs, by one rule for every method.

``inventory``, every linear-like layer of a model with what a recipe would make of it, is shared with ``audit``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from ..autograd.transforms import read_as
from ..layouts import CONV2D, matrix_shape
from ..nn import NMWeight
from ..nn.experts import sparse_layers
from ..pattern import Pattern, RecipeError
from ..recipes.base import Recipe, Span, rank_for
from ..recipes.compose import deployed, with_pattern
from ..recipes.registry import get, resolve, suggestion
from ..recipes.report import Entry
from ..recipes.sparsify import FilterFn, select


def inventory(verb: str, model: nn.Module, recipe: Recipe, filter_fn: FilterFn | None) -> tuple[list[Entry], dict[str, Pattern]]:
    """Every linear-like layer of the model, sparse where it is, or where ``sparsify_`` would make it so; and the patterns of those."""
    done = sparse_layers(model)
    if done and filter_fn is not None:
        raise RecipeError(f"{verb}: the model is sparse already, so filter_fn has nothing to choose; leave it out.")
    chosen, report = select(model, Pattern(recipe.pattern), filter_fn, recipe)
    linear = [e for e in report.entries if e.linear]
    if not linear:
        raise RecipeError(f"{verb}: the model has no linear layer to count.")
    if done:
        patterns = {name: m.pattern for name, m in done.items()}
    else:
        choose = recipe.setup.patterns
        own = {} if choose is None else choose({c.name: c.matrix for c in chosen})
        patterns = {c.name: own.get(c.name, Pattern(recipe.pattern)) for c in chosen}
    shapes = {c.name: c.matrix_shape for c in chosen} | {name: m.shape for name, m in done.items() if isinstance(m, NMWeight)}
    entries = []
    for e in linear:
        pattern = patterns.get(e.name)
        shape = shapes.get(e.name, matrix_of(e.shape))
        reason = recipe.layer(pattern, shape).note if pattern else "left dense" if e.sparse else e.reason
        entries.append(replace(e, sparse=pattern is not None, reason=reason))
    return entries, patterns


def matrix_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """``(out, in)`` of one GEMM with a weight that a report shows as ``shape``: of one of the experts, or of a convolution's patches."""
    if len(shape) == 4:
        return matrix_shape(shape, CONV2D)
    return (shape[-2], shape[-1]) if len(shape) > 1 else (0, 0)


def matrices_of(shape: tuple[int, ...]) -> int:
    """How many such matrices there are."""
    return math.prod(shape[:-2]) if len(shape) == 3 else 1


def check_number(verb: str, name: str, value: float, least: int = 0) -> None:
    """Numbers of at least 1 are whole."""
    if isinstance(value, bool) or not least <= value < math.inf or (least and value != int(value)):
        raise RecipeError(f"{verb}: {name}={value!r} must be a {'whole' if least else 'finite'} number of at least {least}.")


def passes(verb: str, entries: list[Entry], given: Mapping[str, float]) -> list[float]:
    """How often a token passes through each layer: what ``given`` says of it or of the nearest module around it, else once."""
    for key, value in given.items():
        check_number(verb, f"rows[{key!r}]", value)
        if not any(_inside(e.name, key) for e in entries):
            names = [e.name for e in entries]
            raise RecipeError(f"{verb}: rows names {key!r}, and no linear layer is called that or lies in it{suggestion(key, names)}.")
    rows = []
    for e in entries:
        keys = [key for key in given if _inside(e.name, key)]
        # how many positions a convolution has is the image's matter, and of other 3-D weights nobody knows
        usual = e.rows if e.rows is not None else 1.0 if len(e.shape) == 2 else 0.0
        rows.append(float(given[max(keys, key=len)]) if keys else usual)
    return rows


def _inside(name: str, key: str) -> bool:
    return name == key or name.startswith(f"{key}.")


def skeleton(shapes: Mapping[str, tuple[int, int]]) -> nn.Module:
    """A model without memory that has linear layers of these names and shapes ``(out, in)``."""
    root = nn.Module()
    for name, (rows, cols) in shapes.items():
        *path, last = name.split(".")
        parent = root
        for key in path:
            if key not in parent._modules:
                parent.add_module(key, nn.Module())
            parent = parent.get_submodule(key)
        parent.add_module(last, nn.Linear(cols, rows, bias=False, device="meta"))
    return root


def shape_text(shape: tuple[int, ...]) -> str:
    return "(" + ",".join(map(str, shape)) + ")" if shape else ""


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """A table as lines: the first two columns to the left, the last as it is, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    cells = ([cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=False))] for row in rows)
    return ["  ".join([*row, last]).rstrip() for row, (*_, last) in zip(cells, rows, strict=True)]


@dataclass(frozen=True)
class LayerFlops:
    """One layer's part of ``Flops``, in the same units.

    Args:
        shape: of the weight, ``(out, in)``; empty for what is no layer.
        sparse: the recipe makes it sparse.
        why: its pattern, or why it is counted as it is.
        rows: how often a token passes through it.
    """

    name: str
    shape: tuple[int, ...]
    sparse: bool
    why: str
    rows: float
    training: float
    inference: float
    dense_training: float
    dense_inference: float


@dataclass(frozen=True)
class Flops:
    """Floating-point operations, a multiplication and an addition each counting 1; ``str`` of it is a table.

    Args:
        training: of the whole run: ``steps`` steps of ``tokens`` tokens.
        inference: of one token's forward pass through what ``finish`` leaves.
        dense_training, dense_inference: the same of the dense model, trained for as many steps.
        layers: the parts, which add up to the totals.
    """

    training: float
    inference: float
    dense_training: float
    dense_inference: float
    steps: int
    tokens: int
    layers: tuple[LayerFlops, ...]

    @property
    def training_ratio(self) -> float:
        """Training FLOPs as a share of the dense run's."""
        return self.training / self.dense_training

    @property
    def inference_ratio(self) -> float:
        """Inference FLOPs as a share of the dense model's."""
        return self.inference / self.dense_inference

    def __str__(self) -> str:
        rows = [("layer", "shape", "rows", "training", "of dense", "inference", "of dense", "why")]
        for part in self.layers:
            training = f"{part.training:.3g}", _ratio(part.training, part.dense_training)
            inference = f"{part.inference:.3g}", _ratio(part.inference, part.dense_inference)
            rows.append((part.name, shape_text(part.shape), f"{part.rows:g}", *training, *inference, part.why))
        lines = aligned(rows)
        ratios = _ratio(self.training, self.dense_training), _ratio(self.inference, self.dense_inference)
        lines.append(f"training {self.training:.4g} FLOPs, {ratios[0]} of dense, {self.steps} steps of {self.tokens} tokens")
        lines.append(f"inference {self.inference:.4g} FLOPs per token, {ratios[1]} of dense")
        return "\n".join(lines)


def flops(
    model: nn.Module | Mapping[str, tuple[int, int]],
    recipe: Recipe | str,
    steps: int,
    *,
    tokens: int = 1,
    filter_fn: FilterFn | None = None,
    rows: Mapping[str, float] | None = None,
    other: float = 0.0,
    switch_step: int | None = None,
) -> Flops:
    """Count the FLOPs of ``steps`` training steps under ``recipe``, and of inference with what it leaves; nothing is run or changed.

    The rule: a linear layer of shape ``(out, in)`` costs 2·in·out per token in each of fprop, dgrad and wgrad (inference: fprop alone),
    of which a sparse layer costs a share, by the recipe's ``profile``; so does a convolution, in = kh·kw·channels, per output position:

    * fprop: N/M while the effective weight is N:M; 1 in dense phases and while pruned weights only fade. STEP counts as dense until
      T_max, unless ``switch_step`` says when it switched.
    * dgrad: sums over ``out``, so it is N/M only where its weight is N:M along ``out`` too (transposable or double-pruned masks, or one
      of its own); a mask by rows, as in SR-STE and S-STE, leaves it dense, as in the table of the S-STE paper.
    * wgrad: N/M of the output gradient's estimate, 1/2 for MVUE at 2:4; else dense.

    Layers left dense are counted, dense. Not counted: what is no such layer (attention's scores, embeddings, norms, other convolutions;
    see ``other``), masks, estimates, and the optimizer. Of stacked experts those count that a token meets, by the model's config;
    convolutions and other 3-D expert weights only where ``rows`` has them.

    Args:
        model: dense (also on the meta device), sparse already, or the shapes ``{name: (out, in)}`` of its layers.
        recipe: a name gets ``total_steps=steps``; an instance keeps its schedule, of which the first ``steps`` steps are counted.
        tokens: tokens of one step (batch times sequence).
        filter_fn: as for ``sparsify_``.
        rows: how often a token passes through a layer where that is not once, by name or by the name of a module around it; for instance
            ``{"head": 1 / 65}`` for a classifier that sees one of 65 tokens, or ``{"conv1": 28 * 28}`` for a convolution that makes so many
            positions of an image, which is the token then.
        other: forward FLOPs per token of everything else, counted dense and twice in backward. For attention's two score GEMMs that is
            4·context·width a layer, or half of it where a causal kernel skips the upper triangle.
        switch_step: T₀ of a run whose recipe chooses it by itself, from ``handle.state["switch_step"]``.

    Raises:
        RecipeError: a number is out of range, ``rows`` names no layer, or ``switch_step`` is given for a recipe without one.
        ShapeError: as ``sparsify_`` where the filter chose an impossible layer.

    Example:
        >>> cost = flops({"up": (256, 64), "down": (64, 256)}, "sste:2:4", 1000, tokens=4096)
        >>> cost.training_ratio, cost.inference_ratio  # (1/2 + 1 + 1/2) / 3
        (0.6666666666666666, 0.5)
    """
    for name, value, least in (("steps", steps, 1), ("tokens", tokens, 1), ("other", other, 0)):
        check_number("flops", name, value, least)
    recipe = get(recipe, total_steps=steps) if isinstance(recipe, str) else resolve(recipe)
    if switch_step is not None:
        switched_at: Callable[[int], Recipe] | None = getattr(recipe, "switched_at", None)
        if switched_at is None:
            raise RecipeError(f"{recipe.name} does not choose a switching step by itself, so switch_step has no meaning.")
        recipe = switched_at(switch_step)
    model = model if isinstance(model, nn.Module) else skeleton(model)
    seen, (entries, patterns) = steps * tokens, inventory("flops", model, recipe, filter_fn)
    kinds = {p: recipe if p == recipe.pattern else with_pattern(recipe, p) for p in patterns.values()}
    costs = {p: (kind.profile(steps), deployed(kind)) for p, kind in kinds.items()}
    dense = [Span(steps)], Span(1)
    learns = bool(read_as("learned", recipe.stage({}).transform))  # then wgrad is needed whether or not the weight is trained
    frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    parts = []
    for entry, often in zip(entries, passes("flops", entries, rows or {}), strict=True):
        trained = (learns and entry.sparse) or not {entry.name, f"{entry.name}.weight"} & frozen
        spans, left = costs[patterns[entry.name]] if entry.sparse else dense
        parts.append(_layer(entry, often, spans, left, tokens, trained))
    if other:
        parts.append(LayerFlops("(other)", (), False, "as given", 1.0, 3.0 * other * seen, other, 3.0 * other * seen, other))
    teacher = sum(s.steps * s.teacher for s in recipe.profile(steps)) * tokens * sum(part.dense_inference for part in parts)
    if teacher:
        parts.append(LayerFlops("(teacher)", (), False, "dense forward passes", 1.0, teacher, 0.0, 0.0, 0.0))
    names = ("training", "inference", "dense_training", "dense_inference")
    totals = {name: float(sum(getattr(part, name) for part in parts)) for name in names}
    return Flops(**totals, steps=steps, tokens=tokens, layers=tuple(parts))


def _layer(e: Entry, rows: float, spans: list[Span], deployed: Span, tokens: int, trained: bool) -> LayerFlops:
    product = 2.0 * math.prod(e.shape) * rows
    adapter = 2.0 * sum(matrix_of(e.shape)) * rows  # of one rank; dgrad and the two gradients of an adapter cost as much as fprop each
    run = sum(s.steps * (product * (s.fprop + s.dgrad + s.wgrad * trained) + 3 * rank_for(s.rank, e.shape) * adapter) for s in spans)
    dense = sum(s.steps for s in spans) * product * (2 + trained)
    inference = product * deployed.fprop + rank_for(deployed.rank, e.shape) * adapter
    return LayerFlops(e.name, e.shape, e.sparse, e.reason, rows, run * tokens, inference, dense * tokens, product)


def _ratio(part: float, whole: float) -> str:
    return f"{part / whole:.3f}" if whole else "-"
