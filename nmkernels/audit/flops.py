"""``nm.flops``: count the FLOPs of training under a recipe and of the deployed model, in the same way for every method.

``audit`` shares ``inventory``, which lists the linear layers of a model and their patterns under a recipe.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from ..arguments import as_int, finite_number, whole_number
from ..autograd.transforms import read_as
from ..layouts import CONV2D, matrix_shape
from ..nn.experts import sparse_layers
from ..nn.weight import NMWeight
from ..pattern import Pattern, RecipeError, ShapeError
from ..recipes.compose import deployed, with_pattern
from ..recipes.contract import Recipe, Span, rank_for
from ..recipes.registry import get, resolve
from ..train.layer_names import check_names, listed
from ..train.report import Entry
from ..train.sparsify import FilterFn, select


def inventory(verb: str, model: nn.Module, recipe: Recipe, filter_fn: FilterFn | None) -> tuple[list[Entry], dict[str, Pattern]]:
    """All linear-like layers of the model, sparse if they are or ``sparsify_`` would make them so, and the patterns of the sparse ones."""
    done = sparse_layers(model)
    if done and filter_fn is not None:
        raise RecipeError(f"{verb}: the model is sparse already, so filter_fn has no effect; omit it.")
    chosen, report = select(model, Pattern(recipe.pattern), filter_fn, recipe)
    linear = [e for e in report.entries if e.linear]
    if not linear:
        raise RecipeError(f"{verb}: the model has no linear layer to count.")
    if filter_fn is not None and not chosen:
        warnings.warn(f"{verb}: filter_fn chooses none of {listed(e.name for e in linear)}, so all are counted as dense.", stacklevel=3)
    if done:
        patterns = {name: m.pattern for name, m in done.items()}
    else:
        choose = recipe.setup.patterns
        chosen_patterns = {} if choose is None else choose({c.name: c.matrix for c in chosen})
        patterns = {c.name: chosen_patterns.get(c.name, Pattern(recipe.pattern)) for c in chosen}
    shapes = {c.name: c.matrix_shape for c in chosen} | {name: m.shape for name, m in done.items() if isinstance(m, NMWeight)}
    entries = []
    for e in linear:
        pattern = patterns.get(e.name)
        shape = shapes.get(e.name, matrix_of(e.shape))
        reason = recipe.layer(pattern, shape).note if pattern else "left dense" if e.sparse else e.reason
        entries.append(replace(e, sparse=pattern is not None, reason=reason))
    return entries, patterns


def matrix_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """``(out, in)`` of one GEMM with a weight of ``shape``: of one expert, or of a convolution's patches."""
    if len(shape) == 4:
        return matrix_shape(shape, CONV2D)
    return (shape[-2], shape[-1]) if len(shape) > 1 else (0, 0)


def matrices_of(shape: tuple[int, ...]) -> int:
    """The number of such matrices."""
    return math.prod(shape[:-2]) if len(shape) == 3 else 1


def passes(verb: str, entries: list[Entry], rows_by_name: Mapping[str, float]) -> list[float]:
    """How often a token passes through each layer: as often as ``rows_by_name`` says of it or its innermost enclosing module, else once."""
    check_names(f"{verb}: rows", rows_by_name, [e.name for e in entries], _inside)
    rows_by_name = {key: finite_number(RecipeError, f"{verb}: rows[{key!r}]", value) for key, value in rows_by_name.items()}
    rows = []
    for e in entries:
        keys = [key for key in rows_by_name if _inside(e.name, key)]
        # unknown for convolutions, where it depends on the image, and for other 3-D weights
        usual = e.rows if e.rows is not None else 1.0 if len(e.shape) == 2 else 0.0
        rows.append(float(rows_by_name[max(keys, key=len)]) if keys else usual)
    return rows


def _inside(name: str, key: str) -> bool:
    return name == key or name.startswith(f"{key}.")


def skeleton(verb: str, shapes: Mapping[str, tuple[int, int]]) -> nn.Module:
    """A model with linear layers of these names and shapes ``(out, in)`` on the meta device."""
    if not isinstance(shapes, Mapping):
        raise RecipeError(f"{verb}: expected a model, or the shapes of its layers {{name: (out, in)}}; got {type(shapes).__name__}.")
    root = nn.Module()
    for name, shape in shapes.items():
        if not isinstance(name, str) or "" in name.split("."):
            raise RecipeError(f"{verb}: {name!r} is not a layer's name, such as 'blocks.0.fc'.")
        sizes = [as_int(size) or 0 for size in shape] if isinstance(shape, Sequence) else []
        if len(sizes) != 2 or min(sizes) < 1:
            raise ShapeError(f"{verb}: the shape of layer {name!r} is {shape!r}; it must be (out, in), two whole numbers of at least 1.")
        (rows, cols), (*path, last) = sizes, name.split(".")
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
    """Format a table: the first two columns left-aligned, the last as it is, the others right-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    cells = ([cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=False))] for row in rows)
    return ["  ".join([*row, last]).rstrip() for row, (*_, last) in zip(cells, rows, strict=True)]


@dataclass(frozen=True)
class LayerFlops:
    """One layer's share of ``Flops``, in the same units.

    Args:
        shape: of the weight, ``(out, in)``; empty for entries that are not layers.
        sparse: whether the recipe makes it sparse.
        why: its pattern, or the reason why it is dense.
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
    """Floating-point operations, counting multiplications and additions; ``str(...)`` gives a table.

    Args:
        training: FLOPs of the whole run, ``steps`` steps of ``tokens`` tokens.
        inference: FLOPs of one token's forward pass through the finished model.
        dense_training, dense_inference: the same for the dense model.
        layers: per layer; they add up to the totals.
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
    """Count the FLOPs of ``steps`` training steps under ``recipe``, and of inference with the finished model; nothing is run.

    A linear layer of shape ``(out, in)`` costs 2·in·out per token in each of fprop, dgrad and wgrad (inference: only fprop). A convolution
    costs the same per output position, with in = kh·kw·channels. A sparse layer costs a share of that, by the recipe's ``profile``:

    * fprop: N/M while the effective weight is N:M; 1 in dense phases and while pruned weights fade. STEP counts as dense until T_max unless
      ``switch_step`` is given.
    * dgrad sums over ``out``, so it costs N/M only if its weight is also N:M along ``out`` (transposable or double-pruned masks, or its own
      mask); with row masks, as in SR-STE and S-STE, it is dense, as in the S-STE paper's table.
    * wgrad: N/M of the output gradient's estimate, 1/2 for MVUE at 2:4; else dense.

    Dense layers are counted too. Not counted are other operations (attention scores, embeddings, norms, other convolutions; see ``other``),
    masks, estimates and the optimizer. Of stacked experts only those count that a token is routed to, by the model's config; convolutions
    and other 3-D expert weights only if listed in ``rows``.

    Args:
        model: dense (also on the meta device) or sparse, or the shapes ``{name: (out, in)}`` of its layers.
        recipe: a name gets ``total_steps=steps``; an instance keeps its schedule, and its first ``steps`` steps are counted.
        tokens: tokens of one step (batch times sequence).
        filter_fn: as for ``sparsify_``.
        rows: name of a layer or enclosing module → how often a token passes through it, if not once; for instance ``{"head": 1 / 65}`` for
            a classifier that sees one of 65 tokens, or ``{"conv1": 28 * 28}`` for a convolution with that many output positions, if a token
            is an image.
        other: forward FLOPs per token of everything else, counted dense, twice that in backward. Attention's two score GEMMs cost
            4·context·width per layer, or half of it if a causal kernel skips the upper triangle.
        switch_step: T₀ of a run whose recipe chose it, from ``handle.state["switch_step"]``.

    Raises:
        RecipeError: a number is out of range, ``rows`` names no layer, or ``switch_step`` is given for a recipe without one.
        ShapeError: the filter chose an unsupported layer, as in ``sparsify_``, or a given shape is not ``(out, in)``.

    Example:
        >>> cost = flops({"up": (256, 64), "down": (64, 256)}, "sste:2:4", 1000, tokens=4096)
        >>> cost.training_ratio, cost.inference_ratio  # (1/2 + 1 + 1/2) / 3
        (0.6666666666666666, 0.5)
    """
    steps, tokens = whole_number(RecipeError, "flops: steps", steps), whole_number(RecipeError, "flops: tokens", tokens)
    other = finite_number(RecipeError, "flops: other", other)
    recipe = get(recipe, total_steps=steps) if isinstance(recipe, str) else resolve(recipe)
    if switch_step is not None:
        switched_at: Callable[[int], Recipe] | None = getattr(recipe, "switched_at", None)
        if switched_at is None:
            raise RecipeError(f"{recipe.name} does not choose a switching step, so switch_step does not apply.")
        recipe = switched_at(whole_number(RecipeError, "flops: switch_step", switch_step))
    model = model if isinstance(model, nn.Module) else skeleton("flops", model)
    seen, (entries, patterns) = steps * tokens, inventory("flops", model, recipe, filter_fn)
    kinds = {p: recipe if p == recipe.pattern else with_pattern(recipe, p) for p in patterns.values()}
    costs = {p: (kind.profile(steps), deployed(kind)) for p, kind in kinds.items()}
    dense = [Span(steps)], Span(1)
    learns = bool(read_as("learned", recipe.stage({}).transform))  # learned parameters need wgrad even if the weight is not trained
    frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    parts = []
    for entry, often in zip(entries, passes("flops", entries, rows or {}), strict=True):
        trained, shape = (learns and entry.sparse) or not {entry.name, f"{entry.name}.weight".lstrip(".")} & frozen, entry.shape
        spans, left = costs[patterns[entry.name]] if entry.sparse else dense
        gemm = 2.0 * math.prod(shape) * often
        adapter = 2.0 * sum(matrix_of(shape)) * often  # per rank; dgrad and the two weight gradients of an adapter cost as much as fprop
        run = sum(s.steps * (gemm * (s.fprop + s.dgrad + s.wgrad * trained) + 3 * rank_for(s.rank, shape) * adapter) for s in spans)
        whole, finished = sum(s.steps for s in spans) * gemm * (2 + trained), gemm * left.fprop + rank_for(left.rank, shape) * adapter
        counts = run * tokens, finished, whole * tokens, gemm
        parts.append(LayerFlops(entry.name, shape, entry.sparse, entry.reason, often, *counts))
    if other:
        parts.append(LayerFlops("(other)", (), False, "as given", 1.0, 3.0 * other * seen, other, 3.0 * other * seen, other))
    teacher = sum(s.steps * s.teacher for s in recipe.profile(steps)) * tokens * sum(part.dense_inference for part in parts)
    if teacher:
        parts.append(LayerFlops("(teacher)", (), False, "dense forward passes", 1.0, teacher, 0.0, 0.0, 0.0))
    names = ("training", "inference", "dense_training", "dense_inference")
    totals = {name: float(sum(getattr(part, name) for part in parts)) for name in names}
    return Flops(**totals, steps=steps, tokens=tokens, layers=tuple(parts))


def _ratio(part: float, total: float) -> str:
    return f"{part / total:.3f}" if total else "-"
