"""Squared ReLU with N:M sparse activations, and linear layers around it with weight gradients from operands that are sparse along tokens.

Haziza et al., "Accelerating transformer inference and training with 2:4 activation sparsity", arXiv 2503.16672.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..arguments import finite_number, whole_number
from ..pattern import NMError, Pattern
from .function import functional, once, with_functional
from .linear import as_multiplied

GRADS = ("chain", "ste")


@dataclass(frozen=True)
class SplitRule:
    """How to sparsify a feature matrix ``(tokens, features)`` along tokens: a few features stay dense, the others become N:M.

    Args:
        pattern: N:M of the sparse features.
        dense: share of the features that stay dense, those with the most non-zeros.
        multiple: the number of dense features is rounded up to a multiple of this (or to all features).
        shuffle: permute the tokens first, by a fixed pseudo-random order, so that neighbours, which tend to be non-zero together, fall into
            different groups.

    Raises:
        NMError: ``dense`` is not between 0 and 1, or ``multiple`` is not a positive integer.

    Example:
        >>> SplitRule(Pattern("2:4"), dense=0.05, multiple=128).dense_features(1024)
        128
    """

    pattern: Pattern
    dense: float = 0.05
    multiple: int = 128
    shuffle: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "dense", finite_number(NMError, "SplitRule: dense", self.dense, 0, 1))
        object.__setattr__(self, "multiple", whole_number(NMError, "SplitRule: multiple", self.multiple))

    def dense_features(self, features: int) -> int:
        """The number of dense ones among ``features`` features."""
        # - 1e-9: 0.05 * 2560 is slightly more than 128 in binary
        return min(features, math.ceil(self.dense * features / self.multiple - 1e-9) * self.multiple)


def split(z: Tensor, rule: SplitRule) -> Tensor:
    """Keep, in each sparse feature of ``z`` ``(tokens, features)``, only the N largest magnitudes of every M tokens; dense layout.

    The tokens are padded with zeros to a multiple of M. Of features with equally many non-zeros the lower index stays dense.

    Example:
        >>> split(torch.tensor([[1.0, 1.0], [2.0, 0.0]]), SplitRule(Pattern("1:2"), dense=0.5, multiple=1, shuffle=False))
        tensor([[1., 1.],
                [2., 0.]])
    """
    tokens, features = z.shape
    dense, m = rule.dense_features(features), rule.pattern.m
    if dense == features:
        return z
    order = _shuffled(tokens, z.device) if rule.shuffle else None
    rows = (z if order is None else z[order]).t()
    pruned = torch.ops.nmkernels.nm_prune(F.pad(rows, (0, -tokens % m)), rule.pattern.n, m)[:, :tokens].t()
    if order is not None:
        pruned = torch.empty_like(pruned).index_copy(0, order, pruned)
    if not dense:
        return pruned
    busiest = z.ne(0).sum(0).argsort(descending=True, stable=True)[:dense]
    return pruned.index_copy(1, busiest, z[:, busiest])


def _shuffled(tokens: int, device: torch.device) -> Tensor:
    """A fixed pseudo-random permutation of the tokens: a hash of the index, which CUDA graphs and compiled steps can compute."""
    h = torch.arange(tokens, device=device)
    for factor in (0x9E3779B1, 0x85EBCA6B):  # odd constants of common integer hashes
        h = h * factor & 0xFFFFFFFF
        h = h ^ (h >> 15)
    return h.argsort(stable=True)


def _relu2(functional: bool, y: Tensor, n: int, m: int, grad: str) -> tuple[Tensor, Tensor]:
    positive = y.relu()
    # among positive values the largest are the largest magnitudes, and the others contribute nothing
    pruned = torch.ops.nmkernels.nm_prune(positive, n, m)
    return pruned.square(), pruned if grad == "chain" else positive


def _relu2_remember(ctx: Any, functional: bool, output: tuple[Tensor, Tensor], y: Tensor, *settings: Any) -> tuple[Tensor, ...]:
    ctx.mark_non_differentiable(output[1])
    return (output[1], y) if functional else output[1:]


def _relu2_backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    root, *y = ctx.saved_tensors
    with torch.no_grad():
        dy = 2 * root * g
    return once(dy, g, *y), None, None, None


_SparseReLU2, _FunctionalSparseReLU2 = with_functional(_relu2, _relu2_remember, _relu2_backward)


def sparse_relu2(y: Tensor, pattern: Pattern, grad: str = "chain") -> Tensor:
    """Squared ReLU of the N largest values of every M consecutive features: a = relu(sp(y))² (Haziza et al. 2025).

    Args:
        y: ``(..., features)``.
        pattern: N:M, with M dividing ``features``.
        grad: ``"chain"``: ∂L/∂y = 2 relu(sp(y)) ⊙ ∂L/∂a, the derivative; ``"ste"``: 2 relu(y) ⊙ ∂L/∂a, which ignores the pruning.

    Raises:
        NMError: ``grad`` is unknown.
        ShapeError: M does not divide the features.

    Example:
        >>> sparse_relu2(torch.tensor([3.0, -1.0, 2.0, 1.0]), Pattern("2:4"))
        tensor([9., 0., 4., 0.])
    """
    if grad not in GRADS:
        raise NMError(f"sparse_relu2: grad={grad!r} is unknown; choose one of {', '.join(GRADS)}.")
    return (_FunctionalSparseReLU2 if functional() else _SparseReLU2).apply(y, pattern.n, pattern.m, grad)[0]


def _fprop(functional: bool, x: Tensor, weight: Tensor, bias: Tensor | None, rule: SplitRule, side: str) -> Tensor:
    return F.linear(x, weight, bias).detach()  # not a view: autograd refuses in-place writes to views


def _remember(
    ctx: Any, functional: bool, y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, rule: SplitRule, side: str
) -> tuple[Tensor | None, ...]:
    ctx.rule, ctx.side = rule, side
    need_x, need_w = ctx.needs_input_grad[:2]
    return x if need_w else None, weight if need_x else None


def _backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    (x, weight), rule, output = ctx.saved_tensors, ctx.rule, ctx.side == "output"
    dx = dw = db = None
    with torch.no_grad():
        rows = g.reshape(-1, g.shape[-1])
        if ctx.needs_input_grad[0]:
            dx = (torch.ops.nmkernels.nm_prune(g, rule.pattern.n, rule.pattern.m) if output else g) @ weight
        if ctx.needs_input_grad[1]:
            inputs = x.reshape(-1, x.shape[-1])
            dw = split(rows, rule).t() @ inputs if output else rows.t() @ split(inputs, rule)
        if ctx.needs_input_grad[2]:
            db = rows.sum(0)
    return once(dx, g, weight), once(dw, g, x), once(db, g), None, None


_SplitLinear, _FunctionalSplitLinear = with_functional(_fprop, _remember, _backward)


def split_linear(x: Tensor, weight: Tensor, bias: Tensor | None, rule: SplitRule, side: str) -> Tensor:
    """A linear layer next to a sparse activation, whose weight gradient uses an operand that is sparse along tokens (Haziza et al. 2025).

    y = x Wᵀ + b and ∂L/∂b = Σ g as usual. With S the ``split`` by ``rule`` and sp the N largest magnitudes of every M features::

        side="output"   ∂L/∂W = S(g)ᵀ x    ∂L/∂x = sp(g) W     the layer before the activation
        side="input"    ∂L/∂W = gᵀ S(x)    ∂L/∂x = g W         the layer after it

    Args:
        x: ``(..., in)``.
        weight: ``(out, in)``.
        bias: ``(out,)`` or None.
        rule: which features of the operand become sparse.
        side: ``"output"`` or ``"input"``.

    Raises:
        NMError: ``side`` is unknown.
        ShapeError: ``side="output"`` and M does not divide ``out``.

    Example:
        >>> x, w = torch.ones(4, 2), torch.ones(4, 2, requires_grad=True)
        >>> split_linear(x, w, None, SplitRule(Pattern("1:2"), dense=0.0, shuffle=False), "output").sum().backward()
        >>> w.grad[0]
        tensor([2., 2.])
    """
    if side not in ("input", "output"):
        raise NMError(f"split_linear: side={side!r} is unknown; choose one of input, output.")
    if side == "output":
        rule.pattern.check_divides("split_linear", weight.shape[0], "out_features")
    return (_FunctionalSplitLinear if functional() else _SplitLinear).apply(as_multiplied(x), weight, bias, rule, side)
