"""Taking over the zeros of a model that was pruned elsewhere."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn

from .. import ops
from ..nn.weight import NMWeight
from ..pattern import Pattern, PatternLike, RecipeError
from ..train.handle import Handle
from ..train.report import FILTERED
from ..train.sparsify import FilterFn, candidates, sparsify_
from .methods.asp import ASP

LOOKED_FOR = "N ≤ M/2, M = 4, 8, 16, 32"
"""What ``existing_pattern`` finds, for messages."""
PIECE = 1 << 20
"""Weights that are looked at together."""


def existing_pattern(weight: Tensor) -> Pattern | None:
    """The sparsest N:M, M one of 4, 8, 16 and 32 and N at most M/2, that the zeros of ``weight`` ``(..., in)`` are; None if none.

    Example:
        >>> existing_pattern(torch.tensor([[3.0, 0.0, 0.0, 1.0, 0.0, 2.0, 4.0, 0.0]]))
        Pattern("2:4")
    """
    sparsest: Pattern | None = None
    for m in (4, 8, 16, 32):
        if weight.shape[-1] % m or not weight.numel():
            continue
        # in pieces, since counts take eight bytes
        pieces = weight.reshape(-1, weight.shape[-1]).split(max(1, PIECE // weight.shape[-1]))
        most = max(1, *(int(piece.unflatten(-1, (-1, m)).ne(0).sum(-1).max()) for piece in pieces))
        if 2 * most <= m and (sparsest is None or most * sparsest.m < sparsest.n * m):
            sparsest = Pattern(most, m)
    return sparsest


def _is(weight: Tensor, pattern: Pattern) -> bool:
    return not weight.shape[-1] % pattern.m and ops.is_nm(weight, pattern)


@torch.no_grad()
def adopt(model: nn.Module, pattern: PatternLike | None = None, filter_fn: FilterFn | None = None) -> Handle:
    """Make sparse layers of those whose weights are N:M already, and hold their zeros: for models pruned by SparseGPT, Wanda, torch.ao or
    torchao.

    It is ``sparsify_(model, ASP(pattern, score="existing"))`` on the pruned layers alone. Attach an optimizer to train on with these masks,
    or call ``handle.finish(allow_unused=True)`` at once; then ``compress_``. ``handle.report`` says why each other layer was left out. In a
    group with fewer than N non-zeros the zeros of lowest index are kept too, and train.

    Args:
        pattern: of the zeros; None: found in the weights (N at most M/2; M one of 4, 8, 16, 32), the same for all layers.
        filter_fn: ``filter_fn(module, name) -> bool``, to leave some of them out.

    Raises:
        RecipeError: no weight has such zeros, those of several layers are of different patterns, layers are sparse already, or weights are
            on the meta device.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        >>> _ = model[0].weight.data.mul_(ops.mask(model[0].weight, "2:4"))
        >>> handle = adopt(model)
        >>> handle.recipe.pattern, list(handle.layers)
        (Pattern("2:4"), ['0'])
    """
    wanted = None if pattern is None else Pattern(pattern)
    weights, left = {}, {}
    for c in candidates(model, wanted or Pattern("1:1"), None):
        if c.linear and (c.impossible or (filter_fn is not None and not filter_fn(c.module, c.name))):
            left[c.name] = c.impossible or FILTERED
        elif c.linear:
            weights[c.name] = c.matrix
    if any(isinstance(module, NMWeight) and module.governed for module in model.modules()):
        raise RecipeError(
            "adopt: the model has sparse layers already. After handle.finish(), handle.remove() gives dense layers with the same zeros, "
            "which adopt takes over."
        )
    away = next((name for name, w in weights.items() if w.is_meta), None)
    if away is not None:
        raise RecipeError(f"adopt: the weight of layer {away!r} is on the meta device, or offloaded; load it into memory first.")
    if wanted is None:
        patterns = {name: p for name, w in weights.items() if (p := existing_pattern(w)) is not None}
        if patterns:
            wanted = Counter(patterns.values()).most_common(1)[0][0]
        different = [f"{name} is {p}" for name, p in patterns.items() if not _is(weights[name], wanted or p)]
        if different:
            names = ", ".join(different[:3])
            raise RecipeError(
                f"adopt: most pruned layers are {wanted}, but {names}. Give the pattern, and adopt the others separately by filter_fn."
            )
    pruned = {name for name, w in weights.items() if wanted is not None and _is(w, wanted)}
    zeros = {name: 100 * float(w.eq(0).double().mean()) for name, w in weights.items() if name not in pruned}
    misfit = f"not {wanted}" if wanted else "in no pattern that is looked for"
    left |= {name: f"its weight is {misfit}, with {share:.0f} % zeros" for name, share in zeros.items()}
    if wanted is None or not pruned:
        reasons = "; ".join(f"{name}: {why}" for name, why in sorted(left.items(), key=lambda item: item[0] not in weights)[:3])
        another = "" if wanted else f' Looked for: {LOOKED_FOR}; give another pattern: adopt(model, "3:4").'
        raise RecipeError(
            f"adopt: no weight has {wanted or 'N:M'} zeros along its inputs ({reasons or 'no layer'}).{another} Other zeros do not make a "
            'mask: prune by ASP("2:4"), or with the scores of its inputs by ASP("2:4", score="wanda").'
        )
    handle = sparsify_(model, ASP(wanted, score="existing"), lambda module, name: name in pruned)
    handle.report.explain(left)
    return handle
