"""FST: transposable masks, so that all three GEMMs of a step are sparse, and a dense end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ...autograd.transforms import KeptMask, Traits, WeightTransform, laid_out, reading
from ...ops import Packed, pack
from ...optim.rules import UpdateRule
from ...pattern import Pattern, PatternLike
from ..contract import About, LayerSetup, Setup, Stage, choice, count, number, random_seed
from ..registry import recipe
from ..schedule import PACKED, ScheduledRecipe, phases
from .sste import estimating


@dataclass(frozen=True)
class TransposableMask(KeptMask):
    """W̃ = M ⊙ W with M, the held ``nm_mask``, N:M along both dimensions, as ``FST`` has it; the gradient is passed straight through."""

    reads = reading(nm_mask="held")

    def _traits(self) -> Traits:
        return replace(super()._traits(), holds_mask=True, transposable=True, in_step="held")

    def renew(self, weight: Tensor, extras: Sequence[Tensor | None], generator: torch.Generator) -> dict[str, Tensor]:
        return {"nm_mask": torch.ops.nmkernels.nm_transposable_mask(weight, self.pattern.n, self.pattern.m)}

    def kept(self, weight: Tensor, *extras: Tensor) -> Tensor:
        return extras[0]

    def packed(
        self, weight: Tensor, *extras: Tensor, dtype: torch.dtype, rows: bool = True, columns: bool = False, dense: bool = False,
        layout: str = "canonical", out: Packed | None = None,
    ) -> Packed:  # fmt: skip
        pattern = laid_out(self.pattern, layout)
        return pack(weight, pattern, extras[0], dtype=dtype, rows=rows, columns=columns, dense=dense, layout=layout, check=False)


@recipe("fst")
@dataclass(frozen=True)
class FST(ScheduledRecipe):
    """Fully sparse training (Hu et al., "Accelerating transformer pre-training with 2:4 sparsity", ICML 2024, arXiv 2404.01847).

    One mask M is N:M along rows and along columns of W, so that all three GEMMs of a layer have a sparse operand::

        forward    y = x (M ⊙ W)ᵀ            groups of the weight along ``in``
        backward   ∂L/∂x = g (M ⊙ W)         groups of the weight along ``out``, the same M
                   ∂L/∂W = S(gᵀ) x           S the unbiased estimate of the output gradient, groups along tokens
        decay      ∂L/∂W ← ∂L/∂W + λ (1 − M) ⊙ W    after unscaling, accumulation and clipping

    M is the choice of largest total magnitude in every M×M tile (``nm.ops.transposable_mask``), taken when training begins and after every
    ``every``-th applied step. The last steps are dense, and so is the model that ``finish`` leaves. With ``end=None`` there are none, and
    it leaves M ⊙ W: N:M as W and as Wᵀ. So **transposable SR-STE** is ``FST(mvue=None, end=None, every=1, decay=...)``.

    Args:
        every: applied steps between two choices of M.
        decay: λ; it does not carry over between models and learning rates: ``nm.recipes.search_decay`` measures it.
        end: the step, or share of ``total_steps``, after which training is dense; None: it never is.
        mvue, mvue_pattern, seed: S, as for ``SSTE``.
        packed: as for ``STE``; in ∂L/∂x too, on GPUs by the transpose, packed along with the weight.

    Example:
        >>> recipe = FST("2:4", total_steps=300_000)
        >>> recipe.final, [begin for begin, stage in recipe.stages]
        ('dense', [0, 250000])
    """

    every: int = count(40, least=1)
    decay: float = number(6e-5)
    end: float | int | None = 5 / 6
    mvue: str | None = choice("exact", "approx", None)
    mvue_pattern: PatternLike = "2:4"
    packed: bool | str = choice(*PACKED, resume="any")
    seed: int | None = random_seed()

    about = About(
        paper="Hu et al., ICML 2024, arXiv 2404.01847",
        patterns="any N:M, with a slower mask search than for 2:4",
        extra_state="a mask per layer",
        cost="mask search every 40 steps; all three GEMMs sparse until the dense end",
    )
    final = "dense"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "final", "nm" if self.end is None else "dense")

    @property
    def setup(self) -> Setup:
        return Setup(draws=self.mvue is not None, seed=self.seed, linear_only="makes all three GEMMs of linear layers sparse")

    @cached_property
    def stages(self) -> tuple[tuple[int, Stage], ...]:
        """Phase 1 with the held mask, then phase 0, dense."""
        rule, transform = UpdateRule(masked=True, decay=self.decay), self.final_transform()
        sparse = Stage(phase=1, transform=transform, rule=rule, plan=estimating(self), every=self.every)
        if self.end is None:
            return ((0, sparse),)
        end = phases("FST", self.total_steps, 0, self.end)[1]
        return (0, replace(sparse, not_ready="has not reached its dense end")), (end, Stage(phase=0))

    def final_transform(self) -> WeightTransform:
        return TransposableMask(Pattern(self.pattern))

    def layer(self, pattern: Pattern, shape: tuple[int, int], transform: WeightTransform | None = None) -> LayerSetup:
        rows, m = shape[0], Pattern(self.pattern).m
        reason = f"out_features={rows} is not a multiple of M={m}, which a transposable mask needs" if rows % m else ""
        return replace(super().layer(pattern, shape, transform), unsupported_reason=reason)
