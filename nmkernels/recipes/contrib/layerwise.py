"""Layer-wise N:M: every layer keeps an N of its own, and all of them together the given share."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from ...arguments import as_number
from ...pattern import NMError, Pattern, PatternLike, RecipeError
from ...train.layer_names import check_names
from ..compose import Composite, first_stage
from ..contract import About, Recipe, Setup, choice
from ..methods.step import STEP
from ..registry import recipe

SUMS = 1 << 14
"""The resolution of ``allocate``: the number of different sums of costs."""


def allocate(costs: Sequence[Sequence[int]], losses: Sequence[Sequence[float]], budget: int, fill: bool = False) -> list[int]:
    """The choice of each item: Σ loss is least where Σ cost ≤ budget (the multiple-choice knapsack problem).

    Dynamic programming over the sums of costs: exact where the budget is at most ``SUMS`` of their greatest common divisors. Where it is
    more, costs are rounded, and choices that exceed the budget become cheaper where the loss rises least per cost saved.

    Args:
        costs, losses: of each choice of each item, by rising cost.
        fill: take the largest possible sum of costs first, and the least loss among the choices that reach it.

    Example:
        >>> allocate([[1, 2, 4], [2, 4, 8]], [[9, 3, 0], [9, 5, 0]], 8)
        [2, 1]
    """
    least = sum(item[0] for item in costs)
    if least > budget:
        raise RecipeError(f"even the cheapest choices cost {least}, more than the budget of {budget}.")
    unit = math.gcd(*(cost for item in costs for cost in item)) or 1
    unit *= -(-(budget // unit + 1) // SUMS)
    in_units = [[round(cost / unit) for cost in item] for item in costs]
    limit = max(budget // unit, sum(item[0] for item in in_units))
    best = torch.full((limit + 1,), torch.inf, dtype=torch.float64)
    best[0] = 0.0
    trail = []
    for item, values in zip(in_units, losses, strict=True):
        # of equal losses the first choice is taken
        new, taken = torch.full_like(best, torch.inf), torch.zeros(limit + 1, dtype=torch.int16)
        for place, (cost, loss) in enumerate(zip(item, values, strict=True)):
            if cost > limit:
                break
            sums, best_so_far = best[: limit + 1 - cost] + loss, new[cost:]
            less = sums < best_so_far
            torch.where(less, sums, best_so_far, out=best_so_far)
            taken[cost:].masked_fill_(less, place)
        best = new
        trail.append(taken)
    at = int(best.isfinite().nonzero().max()) if fill else int(best.argmin())
    chosen = [0] * len(costs)
    for i in reversed(range(len(costs))):
        chosen[i] = int(trail[i][at])
        at -= in_units[i][chosen[i]]

    def rise(i: int) -> float:
        c = chosen[i]
        return (losses[i][c - 1] - losses[i][c]) / (costs[i][c] - costs[i][c - 1]) if c else math.inf

    # costs that were rounded can exceed the budget
    while sum(item[c] for item, c in zip(costs, chosen, strict=True)) > budget:
        chosen[min(range(len(chosen)), key=rise)] -= 1
    return chosen


@recipe("layerwise")
@dataclass(frozen=True)
class LayerWise(Composite):
    """Layer-wise N:M: layer l keeps N_l of every M weights, Σ_l N_l/M · numel_l ≤ N/M · Σ_l numel_l, and trains as the inner recipe does.

    The patterns are chosen once: from the weights as they are when the optimizer is attached; inside STEP from those of the switch.
    ``handle.report`` shows them. Dynamic programming divides the budget among the layers so that the rule's loss is minimal::

        erk        Σ_l numel_l (N_l/M − d_l)²,  d_l ∝ (out_l + in_l)/(out_l · in_l), among the choices closest to the budget
        magnitude  Σ_l Σ |w| over what M_l(W) prunes: global magnitude pruning, by layers
        energy     Σ_l numel_l · Σ w² over what M_l(W) prunes / Σ w² over the layer: the same without the layers' scales

    erk (Evci et al., "Rigging the lottery", ICML 2020, arXiv 1911.11134, section 3) needs no trained weights.

    Args:
        inner: the recipe that trains the layers, or its text: ``"srste(decay=1e-4)"``, ``MdGf("2:16", ...)``. Of ``pattern`` and
            ``total_steps`` it gets this one's.
        rule: how N_l is chosen; None: by ``given`` alone.
        given: N:M of some layers, by name or wildcard, ``{"*.attn.*": "4:16"}`` or the same as JSON; the first that fits counts. The
            others share out what is left of the budget, or with ``rule=None`` have the recipe's own pattern.
        choices: which N may be chosen: ``"powers"`` of two below M, or ``"all"`` below M.
        rows: how often a token passes through some layers, as in ``nm.flops``: the budget then is one of FLOPs, not of weights.

    Raises:
        RecipeError: the inner recipe cannot have other patterns, has a preconditioning phase (put this one inside STEP instead) or
            trains nothing sparse; at ``sparsify_``, a wildcard fits no layer or the given patterns exceed the budget.

    Example:
        >>> recipe = LayerWise("4:16", choices="all")
        >>> recipe.setup.patterns({"up": torch.empty(32, 16), "down": torch.empty(32, 32)})
        {'up': Pattern("6:16"), 'down': Pattern("3:16")}
    """

    inner: Recipe | str = "srste"
    rule: str | None = choice("erk", "magnitude", "energy", None)
    given: Mapping[str, PatternLike] | str | None = None
    choices: str = choice("powers", "all")
    rows: Mapping[str, float] | str | None = None

    about = About(
        paper="budgets as in Evci et al., ICML 2020, arXiv 1911.11134, and DominoSearch, NeurIPS 2021",
        patterns="any N:M with N above 1, as far as the inner recipe goes",
        extra_state="a pattern per layer, and the inner recipe's",
        cost="as the inner recipe, at the same density",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        fixed = {name: str(Pattern(p)) for name, p in _table("given", self.given, (str, Pattern)).items()}
        rows = {name: as_number(times) for name, times in _table("rows", self.rows).items()}
        if any(times is None or times <= 0 for times in rows.values()):
            raise RecipeError(f"LayerWise: rows={self.rows!r} must be finite numbers above 0.")
        # as text, so that the recipe has a hash
        object.__setattr__(self, "given", json.dumps(fixed) if fixed else None)
        object.__setattr__(self, "rows", json.dumps(rows) if rows else None)
        inner = self.inner
        if not isinstance(inner, Recipe):
            raise RecipeError(f"LayerWise: inner={inner!r} must be a recipe, or its name such as 'srste': it trains the layers.")
        kind = type(inner).__name__
        if isinstance(inner, (LayerWise, STEP)):
            raise RecipeError(
                f"LayerWise: {kind} cannot be inside: LayerWise would share the budget out a second time, STEP choose no patterns at its "
                'switch. Give the recipe that trains the layers, or write STEP(pattern, inner="layerwise(...)").'
            )
        if inner.final == "dense" and first_stage(inner).transform is None:
            raise RecipeError(f"LayerWise: {kind} trains nothing sparse, so there is no budget to share out.")
        for pattern in {*self._options(), *map(Pattern, fixed.values())}:
            try:
                replace(inner, pattern=pattern)
            except NMError as error:
                raise RecipeError(f"LayerWise: {kind} cannot train a layer at {pattern}: {error}") from error

    def _options(self) -> list[Pattern]:
        p = Pattern(self.pattern)
        if self.rule is None or p.n == p.m:
            return [p]
        return [Pattern(n, p.m) for n in range(1, p.m) if self.choices == "all" or n & (n - 1) == 0]

    def _matched(self, key: str, names: Iterable[str]) -> dict[str, Any]:
        """The value of each name that a wildcard of the table ``key`` fits, the first counting."""
        table = json.loads(getattr(self, key) or "{}")
        check_names(f"LayerWise: {key}", table, names, fnmatchcase, "sparse layer")
        fits = {name: [value for wildcard, value in table.items() if fnmatchcase(name, wildcard)] for name in names}
        return {name: values[0] for name, values in fits.items() if values}

    @property
    def setup(self) -> Setup:
        return replace(super().setup, patterns=self._patterns)

    def _patterns(self, weights: Mapping[str, Tensor]) -> dict[str, Pattern]:
        fixed = {name: Pattern(p) for name, p in self._matched("given", weights).items()}
        rows = self._matched("rows", weights)
        shared = [name for name in weights if name not in fixed]
        options, p = self._options(), Pattern(self.pattern)
        if len(options) == 1 or not shared:
            return {name: fixed.get(name, p) for name in weights}
        if p.n == 1 and not fixed:
            warnings.warn(
                f"LayerWise: groups of {p.m} keep at least 1, which is the whole budget, so every layer gets {p}. Write the budget with "
                f'larger groups, as LayerWise("4:{4 * p.m}").',
                stacklevel=2,
            )
        size = {name: Fraction(rows.get(name, 1)).limit_denominator(10**6) * w.numel() for name, w in weights.items()}
        costs = [[size[name] * o.n / o.m for o in options] for name in shared]
        total = sum(size.values())
        budget = Fraction(p.n, p.m) * total - sum(size[name] * q.n / q.m for name, q in fixed.items())
        least = sum(item[0] for item in costs)
        if least > budget:
            raise RecipeError(
                f"LayerWise: the given patterns leave {float(max(budget, Fraction(0)) / total):.2%} of the weights for the other layers, "
                f"which keep at least {float(least / total):.2%} at {options[0]}. Give fewer, sparser ones, or a larger budget."
            )
        if self.rule == "erk":
            losses = _erk({name: weights[name] for name in shared}, {name: float(size[name]) for name in shared}, options, float(budget))
        elif any(weights[name].is_meta for name in shared):  # which nm.flops does
            return {name: fixed.get(name, p if p in options else options[0]) for name in weights}
        else:
            losses = [_pruned(name, weights[name], options, self.rule == "energy", float(size[name])) for name in shared]
        unit = math.lcm(budget.denominator, *(c.denominator for item in costs for c in item))
        in_units = [[int(c * unit) for c in item] for item in costs]
        chosen = dict(zip(shared, allocate(in_units, losses, int(budget * unit), fill=self.rule == "erk"), strict=True))
        return {name: options[chosen[name]] if name in chosen else fixed[name] for name in weights}


def _table(key: str, table: Mapping[str, Any] | str | None, kinds: tuple[type, ...] = (object,)) -> dict[str, Any]:
    if isinstance(table, str):
        try:
            table = json.loads(table)
        except ValueError as error:
            raise RecipeError(f"LayerWise: {key}={table!r} is not JSON: {error}.") from error
    if table is not None and not (isinstance(table, Mapping) and all(isinstance(v, kinds) for v in table.values())):
        raise RecipeError(f"LayerWise: {key}={table!r} must be a table from layer names, or wildcards, to values.")
    return dict(table or {})


def _erk(weights: Mapping[str, Tensor], size: Mapping[str, float], options: list[Pattern], budget: float) -> list[list[float]]:
    """Loss of each option of each layer: size · (density − d)², d the Erdős–Rényi share of the budget within the options' bounds."""
    ratio = {name: sum(w.shape) / math.prod(w.shape) for name, w in weights.items()}
    low, high = options[0].density, options[-1].density

    def share(scale: float) -> dict[str, float]:
        return {name: min(max(scale * r, low), high) for name, r in ratio.items()}

    down, up = 0.0, high / min(ratio.values())
    for _ in range(100):
        middle = (down + up) / 2
        below = sum(size[name] * d for name, d in share(middle).items()) < budget
        down, up = (middle, up) if below else (down, middle)
    want = share(down)
    return [[size[name] * (o.density - want[name]) ** 2 for o in options] for name in weights]


def _pruned(name: str, weight: Tensor, options: list[Pattern], energy: bool, size: float) -> list[float]:
    """Loss of each option for one layer: Σ|w| that its mask prunes, or the share of Σw² times the layer's size."""
    if not bool(torch.isfinite(weight).all()):
        raise RecipeError(f"LayerWise: the weight of layer {name!r} has NaN or infinite values.")
    sizes = weight.double().abs().reshape(-1, options[0].m).sort(dim=1, descending=True).values
    by_rank = (sizes.square() if energy else sizes).sum(0)
    total = float(by_rank.sum())
    scale = (size / total if total > 0 else 0.0) if energy else 1.0
    return [scale * float(by_rank[o.n :].sum()) for o in options]
