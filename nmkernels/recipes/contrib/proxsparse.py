"""ProxSparse: the mask is learned by a regulariser that is zero for 2:4 groups alone; and that regulariser's proximal operator."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ...arguments import finite_number
from ...autograd.transforms import WEIGHT, HardMask, WeightTransform, masked, reading
from ...nn.weight import NMWeight
from ...optim.rules import UpdateRule
from ...pattern import Pattern, RecipeError
from ..contract import About, Hooks, Recipe, Setup, Stage, State, choice, flag, number
from ..registry import recipe

PATH, LAST = 16, 8
"""Steps along the path of the dense minimum from no regulariser to the whole one, and Newton's at its end and for the 3-sparse one."""

BLOCK = 1 << 14
"""Groups computed together on a CPU, so that what lies between two operations stays in its cache."""

NEAR_1 = 0.999
"""The largest λ w₃ that the search for the 3-sparse minimum starts from; beyond it there is no such minimum."""


@dataclass(frozen=True)
class Anchored(WeightTransform):
    """W̃ = W, with ``ProxSparse``'s weight regulariser, λ₂ = ``strength``, as its penalty; W₀ is ``nm_initial``, the weight at the start."""

    strength: float = 0.0
    epsilon: float = 0.1

    reads = reading(nm_initial="fixed")

    def start(self, weight: Tensor) -> dict[str, Tensor]:
        return {"nm_initial": weight.clone(memory_format=torch.contiguous_format)}

    def penalty(self, weight: Tensor, *extras: Tensor) -> dict[str, Tensor]:
        """2 λ W (W − W₀) (2W − W₀) / (W₀ + ε sgn W₀)², with sgn 0 = 1."""
        (initial,) = extras
        epsilon = torch.full_like(initial, self.epsilon)
        scale = initial + torch.where(initial < 0, -epsilon, epsilon)
        return {WEIGHT: 2 * self.strength * weight * (weight - initial) * (2 * weight - initial) / scale.square()}


@dataclass(frozen=True)
class AnchoredMask(WeightTransform):
    """W̃ = M(W) ⊙ W₀: the mask of the present weight over the weight as it was at the start, ``nm_initial``, bit for bit."""

    reads, start = Anchored.reads, Anchored.start

    def __call__(self, weight: Tensor, *extras: Tensor, out: Tensor | None = None) -> Tensor:
        return masked(extras[0], self.kept(weight), out)


@torch.no_grad()
def prox(weight: Tensor, decay: float | Tensor) -> Tensor:
    """argmin over w of ½ ‖w − weight‖² + λ Σ |w_i w_j w_k|, the sum over the four triples of each group of four.

    w keeps the signs and the order of the magnitudes z₁ ≥ … ≥ z₄. Of three candidates the one of least objective is taken, the first
    where none beats it strictly: 2-sparse, (z₁, z₂, 0, 0), bit for bit; 3-sparse, w_i = z_i − λ w_j w_k; dense, w_i = z_i − λ e₂(the
    other three).

    Args:
        weight: ``(..., cols)`` with cols a multiple of 4; 16-bit ones are computed in fp32.
        decay: λ ≥ 0, a number or a 0-d tensor; 0 gives the weight itself.

    Raises:
        RecipeError: λ is negative or not a number.

    Source: Liu et al., ICML 2025, arXiv 2502.00258; how the candidates are found, ours.

    Example:
        >>> prox(torch.tensor([[3.0, -0.1, 2.0, 0.2]]), 1.0)
        tensor([[3., 0., 2., 0.]])
    """
    if not isinstance(decay, Tensor) and not (isinstance(decay, float) and decay == math.inf):
        decay = finite_number(RecipeError, "prox: decay", decay)
    groups = weight.reshape(-1, 4)
    if groups.device.type == "cpu" and len(groups) > BLOCK:
        return torch.cat([_prox(part, decay) for part in groups.split(BLOCK)]).reshape(weight.shape)
    return _prox(groups, decay).reshape(weight.shape)


def _prox(groups: Tensor, decay: float | Tensor) -> Tensor:
    z, order = groups.abs().to(torch.promote_types(groups.dtype, torch.float32)).sort(dim=1, descending=True, stable=True)
    # λ only sets the scale: with y = λ z and u = λ w the objective times λ² is ½‖u − y‖² + e₃(u)
    y = (z.t().contiguous() * decay).unbind(0)
    best = torch.stack([z[:, 0], z[:, 1], torch.zeros_like(z[:, 2]), torch.zeros_like(z[:, 3])], 1)
    least = ((y[2] / y[0]).square() + (y[3] / y[0]).square()) / 2
    for u in (_three(y), _four(y)):
        objective = _objective(u, y)
        better = objective < least
        best = torch.where(better[:, None], torch.stack(u, 1) / decay, best)
        least = torch.where(better, objective, least)
    # equal magnitudes must not come out in another order by rounding: the mask would change
    best = best.cummin(1).values
    w = torch.empty_like(best).scatter_(1, order, best).to(groups.dtype)
    # without a regulariser u / λ is 0 / 0
    if isinstance(decay, Tensor):
        w = torch.where((decay > 0).to(w.device), w, groups.abs())
    elif not decay > 0:
        w = groups.abs()
    return torch.where(w == 0, 0.0, w.copysign(groups))


def _objective(u: tuple[Tensor, ...], y: tuple[Tensor, ...]) -> Tensor:
    """(½‖u − y‖² + e₃(u)) / y₁², by quotients whose squares cannot vanish; NaN where y₁ is 0."""
    a, b, c, d = (v / y[0] for v in u)
    distance = sum((((p - q) / y[0]).square() for p, q in zip(u, y, strict=True)), torch.zeros_like(a))
    return distance / 2 + y[0] * (a * b * (c + d) + c * d * (a + b))


def _three(y: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The 3-sparse candidate; where none exists some other point, which is not better.

    For a given w₃ the other two are linear, and Newton's method from the largest derivative of what is left cannot pass the minimum.
    """
    s, d = y[0] + y[1], y[0] - y[1]
    ratio = (d / s).sqrt()
    # at 1 itself, where y₁ = y₂, the quotients below are 0 / 0
    t = ((1 - ratio) / (1 + ratio)).clamp_max(NEAR_1)
    for _ in range(LAST):
        slope = t - y[2] + (s.square() / (1 + t).square() - d.square() / (1 - t).square()) / 4
        curve = 1 - (s.square() / (1 + t) ** 3 + d.square() / (1 - t) ** 3) / 2
        t = torch.where(curve > 0, t - slope / curve, t)
    s, d = s / (1 + t), d / (1 - t)
    return tuple(v.clamp_min(0) for v in ((s + d) / 2, (s - d) / 2, t, torch.zeros_like(t)))


def _four(y: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The dense candidate; where none exists some other point, which is not better.

    The one minimum is followed from λ = 0, where it is z, in w₁ + w₂ and w₃ + w₄.
    """
    a, b, c, d = y[0] + y[1], y[2] + y[3], (y[0] - y[1]).square(), (y[2] - y[3]).square()
    p = q = torch.zeros_like(a)
    for i in range(1, PATH + LAST):
        part = min(i / PATH, 1.0)
        # half the derivatives of ½(p − a)² + … after w₁ − w₂ and w₃ − w₄ are minimised over
        up, uq = 1 / (1 - p), 1 / (1 - q)
        dp, cq, both = d * part**2 * up.square(), c * part**2 * uq.square(), p * q
        slope_p, slope_q = p - a * part + both + (q.square() - dp) / 2, q - b * part + both + (p.square() - cq) / 2
        pp, qq, pq = 1 + q - dp * up, 1 + p - cq * uq, p + q
        scale = 1 / (pp * qq - pq.square())
        p, q = p - (qq * slope_p - pq * slope_q) * scale, q - (pp * slope_q - pq * slope_p) * scale
    d1, d2 = (y[0] - y[1]) / (1 - q), (y[2] - y[3]) / (1 - p)
    return tuple(v.clamp_min(0) for v in ((p + d1) / 2, (p - d1) / 2, (q + d2) / 2, (q - d2) / 2))


class ProximalStep(Hooks):
    """Applies ``prox`` to every weight after each step."""

    def after_step(self, updated: Iterable[tuple[NMWeight, float | Tensor]], found_inf: Tensor | None) -> None:
        for layer, lr in updated:
            w, decay = layer.master, self.recipe.decay
            new = prox(w.detach(), decay * lr if self.recipe.scale_by_lr else decay)
            w.copy_(new if found_inf is None else torch.where(found_inf.reshape(()).to(w.device) == 0, new, w))


@recipe("proxsparse")
@dataclass(frozen=True)
class ProxSparse(Recipe):
    """ProxSparse (Liu et al., "ProxSparse: regularized learning of semi-structured sparsity masks for pretrained LLMs", ICML 2025).

    Dense forward passes. After each optimizer step every group of four becomes argmin ½‖w − W‖² + λ₁ Σ |w_i w_j w_k| over its four
    triples (``nm.recipes.prox``), which is zero for any two non-zeros. ``finish`` leaves M(W) ⊙ W₀, W₀ the initial weights: training
    learns the mask and nothing else, for which a few hundred steps on a trained model are meant. 2:4 only.

    W₀ is taken by ``sparsify_`` and again by ``attach``, and is the buffer ``nm_initial`` of each layer in the model's state dict until
    ``finish`` or ``remove``; a dense checkpoint loads strictly and renews it.

    Args:
        decay: λ₁. It acts relative to 1/|w|² and does not carry over between models: watch ``density`` fall from 1 towards 1/2.
        scale_by_lr: λ₁ · lr instead of λ₁ in each step, as a proximal gradient method would have it; not the authors'.
        anchor, epsilon: λ₂ and ε; adds the gradient of λ₂ ‖W / (W₀ + ε sgn W₀) ⊙ (W − W₀)‖², which pulls each weight to W₀ or 0, once
            per step, after unscaling and clipping (the authors: before it).
        final_values: ``"initial"`` leaves M(W) ⊙ W₀ in the end, as the authors do; ``"trained"`` M(W) ⊙ W.

    Example:
        >>> ProxSparse(anchor=0.5).stage({}).transform
        Anchored(pattern=Pattern("2:4"), strength=0.5, epsilon=0.1)
    """

    decay: float = number(0.25)
    scale_by_lr: bool = flag(False)
    anchor: float = number(0.0, resume="same")  # with it and final_values the layers keep W₀, or do not
    epsilon: float = number(0.1)
    final_values: str = choice("initial", "trained", resume="same")

    about = About(
        paper="Liu et al., ICML 2025, arXiv 2502.00258",
        patterns="2:4",
        extra_state="the initial weights",
        cost="dense GEMMs, a proximal step of every group",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if Pattern(self.pattern) != Pattern("2:4"):
            raise RecipeError(f"ProxSparse: its regulariser and proximal operator are for 2:4, not {self.pattern}; use another recipe.")
        if self.anchor and not self.epsilon:
            raise RecipeError("ProxSparse: epsilon=0 divides by initial weights that are zero; give a positive one.")

    @property
    def setup(self) -> Setup:
        reason, only = "keeps the initial weights, whole", "keeps the initial weights of linear layers"
        return Setup(hooks=partial(ProximalStep, self), needs_whole=reason, linear_only=only)

    def stage(self, state: State) -> Stage:
        p = Pattern(self.pattern)
        transform = Anchored(p, self.anchor, self.epsilon) if self.anchor else WeightTransform(p)
        return Stage(phase=1, transform=transform, rule=UpdateRule(masked=True))

    def final_transform(self) -> WeightTransform:
        return (AnchoredMask if self.final_values == "initial" else HardMask)(Pattern(self.pattern))
