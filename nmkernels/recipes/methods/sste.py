"""S-STE: a continuous projection onto N:M in place of the hard mask."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...autograd.transforms import Traits, WeightTransform, laid_out, reading
from ...gemm.plan import GemmPlan
from ...ops import Packed, pack
from ...optim.rules import UpdateRule
from ...pattern import NMError, Pattern, PatternLike, RecipeError
from ..contract import About, Recipe, Setup, Stage, State, choice, random_seed
from ..registry import recipe
from ..schedule import PACKED, packed_only, packing


@dataclass(frozen=True)
class SoftThreshold(WeightTransform):
    """W̃ = β · S(W) with ``SSTE``'s S; β is ``nm_scale``, a number per matrix. The gradient is passed straight through."""

    reads = reading(nm_scale="fixed")

    def _traits(self) -> Traits:
        return replace(super()._traits(), in_step="threshold" if type(self) is SoftThreshold else "")

    def start(self, weight: Tensor) -> dict[str, Tensor]:
        """β of the weight as it is now; raises ``NMError`` where that is 0 (S(W) is zero everywhere) or not finite."""
        scale = torch.ops.nmkernels.nm_soft_threshold_scale(weight, self.pattern.n, self.pattern.m)
        if not scale.is_meta and not 0 < float(scale) < float("inf"):
            raise NMError(
                f"the scale of its soft threshold is {float(scale)}: the weight is all zero, or of one magnitude in every group, or not "
                "finite. Initialise the weight before sparsify_, or leave the layer out with filter_fn."
            )
        return {"nm_scale": scale}

    def __call__(self, weight: Tensor, *extras: Tensor, out: Tensor | None = None) -> Tensor:
        raw, (scale,) = torch.ops.nmkernels, extras
        if out is None:
            # in place, so that a column of scales, one for each row, does not change the dtype
            return raw.nm_soft_threshold(weight, self.pattern.n, self.pattern.m).mul_(scale)
        raw.nm_soft_threshold_out(weight, self.pattern.n, self.pattern.m, out=out)
        return out.mul_(scale)

    def packed(
        self, weight: Tensor, *extras: Tensor, dtype: torch.dtype, rows: bool = True, columns: bool = False, dense: bool = False,
        layout: str = "canonical", out: Packed | None = None,
    ) -> Packed:  # fmt: skip
        """β S(W) in one read of the weight, S in its dtype as in dense layout. The transpose is not N:M: ``columns`` raises
        ``PatternError``."""
        if laid_out(self.pattern, layout) != self.pattern or extras[0].numel() > 1:  # a scale for each row, of stacked experts
            return super().packed(weight, *extras, dtype=dtype, rows=rows, columns=columns, dense=dense, layout=layout)
        scale = extras[0].to(torch.float64 if weight.dtype == torch.float64 else torch.float32)
        forms = {"rows": rows, "columns": columns, "dense": dense}
        return pack(weight, self.pattern, "threshold", scale=scale, dtype=dtype, layout=layout, **forms)


def estimating(recipe: Any, fp8: str | None = None) -> GemmPlan:
    """The GEMMs with the weight by ``recipe.packed`` and the output gradient of wgrad by its ``mvue`` and ``mvue_pattern``.

    Raises:
        RecipeError: these settings do not combine.
    """
    packed, mvue, p = recipe.packed, recipe.mvue, recipe.mvue_pattern
    try:
        if mvue is None:
            plan = GemmPlan(fp8=fp8)
        elif mvue == "magnitude":
            plan = GemmPlan(wgrad="magnitude", n=p.n, m=p.m, fp8=fp8)
        else:
            plan = GemmPlan(wgrad="mvue", n=p.n, m=p.m, method=mvue, fp8=fp8)
        return packing(packed, recipe.pattern, plan)
    except NMError as error:
        name = type(recipe).__name__
        raise RecipeError(f"{name}: mvue={mvue!r}, mvue_pattern={p}, {fp8=}, {packed=} cannot be combined: {error}") from error


@recipe("sste")
@dataclass(frozen=True)
class SSTE(Recipe):
    """S-STE (Hu, Zhu, Chen, "S-STE: continuous pruning function for efficient 2:4 sparse pre-training", NeurIPS 2024, arXiv 2409.09099).

    Forward with W̃ = β S(W), where S(w)_i = sign(w_i) max(|w_i| − t, 0) and t is the (N+1)-th largest magnitude of the group:
    continuous in W, so that a weight enters and leaves the kept ones at 0. β = ⟨W, S(W)⟩ / ‖S(W)‖² of the initial weight, one
    number per matrix (of stacked experts one for each), fixed from then on. The gradient ∂L/∂W := ∂L/∂W̃ has neither β nor a mask.
    ``finish`` leaves β S(W), what training multiplied.

    β is taken by ``sparsify_`` and again by ``attach``. It is the buffer ``nm_scale`` of each layer in the model's state dict until
    ``finish`` or ``remove``; a dense checkpoint loads strictly and renews it.

    Args:
        mvue: the output gradient g is replaced in ∂L/∂W = gᵀ x by its unbiased N:M estimate along tokens (Chmiel et al., ICLR 2023):
            ``"exact"``, of least variance; ``"approx"``, the two-draw sampler of the authors' code; None, the dense GEMM.
            ``"magnitude"`` takes the N largest, which is biased: for comparison only. With ``packed="auto"`` a GPU multiplies g itself
            where drawing takes longer than the GEMM gains; ``packed=True`` and ``False``, and CPUs, always estimate.
        mvue_pattern: N:M of the estimate, whatever the weights' pattern is.
        fp8: also round the operands of all three GEMMs to FP8 with the current largest magnitude as scale, on any device: ``"paper"``
            e4m3 forward, e5m2 for both operands in backward; ``"hybrid"`` e5m2 for gradients only. It is emulated, and saves no time,
            but for fprop and an estimated wgrad of 2:4 on GPUs of compute capability 9.0, whose 8-bit tensor cores multiply them.
        packed: as for ``STE``.
        seed: of the estimates; None takes torch's initial seed. Every layer and data-parallel rank has a stream of its own.

    Raises:
        RecipeError: an option is unknown, or ``mvue="approx"`` with an ``mvue_pattern`` whose N is not 2; at ``sparsify_``, ``attach`` or
            when loading, a weight without a scale (all zero).

    Example:
        >>> SSTE("2:4", mvue=None).stage({}).transform
        SoftThreshold(pattern=Pattern("2:4"))
    """

    mvue: str | None = "exact"
    mvue_pattern: PatternLike = "2:4"
    fp8: str | None = None
    packed: bool | str = choice(*PACKED)
    seed: int | None = random_seed()

    about = About(
        paper="Hu, Zhu, Chen, NeurIPS 2024, arXiv 2409.09099",
        patterns="any N:M; 2:4 in the paper",
        extra_state="one fixed scale per layer, and a random stream for the estimates",
        cost="fprop at N/M, wgrad at the N/M of mvue_pattern; a threshold at every step, an estimate of g in every backward",
    )
    _optional_state = ("seed",)

    def __post_init__(self) -> None:
        super().__post_init__()
        estimating(self, self.fp8)

    @property
    def setup(self) -> Setup:
        only = packed_only(self.packed)
        if self.mvue is not None:
            only = "estimates the output gradients of linear layers (with mvue=None it takes this one too)"
        elif self.fp8 is not None:
            only = "rounds what linear layers multiply (with fp8=None it takes this one too)"
        return Setup(draws=self.mvue is not None, seed=self.seed, linear_only=only)

    def final_transform(self) -> WeightTransform:
        return SoftThreshold(Pattern(self.pattern))

    def stage(self, state: State) -> Stage:
        return Stage(phase=1, transform=self.final_transform(), rule=UpdateRule(masked=True), plan=estimating(self, self.fp8))
