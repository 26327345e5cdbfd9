"""FST: transposable masks, so that all three products of a step are sparse, and a dense end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...autograd import STRAIGHT_THROUGH, GemmPlan, WeightTransform
from ...autograd.transforms import Kind, Traits, laid_out, masked
from ...ops import Packed, pack
from ...optim import UpdateRule
from ...pattern import NMError, Pattern, PatternLike, RecipeError
from ..base import Observed, Recipe, Stage, State
from ..cost import Span, first
from ..packing import packing
from ..registry import recipe
from ..schedule import advance, check_decay, check_same_schedule, passed, phases


@dataclass(frozen=True)
class TransposableMask(WeightTransform):
    """W̃ = M ⊙ W with M N:M along both dimensions, so that W̃ is N:M in y = x W̃ᵀ and W̃ᵀ is in ∂L/∂x = g W̃ (FST; arXiv 2404.01847).

    M is ``nm_mask``, bool ``(out, in)``: of every M×M tile the choice of largest total magnitude (``nm.ops.transposable_mask``) at the last
    renewal, held in between while the weight moves on. The gradient is passed straight through.

    Args:
        pattern: N:M, along ``in`` and along ``out``.

    Example:
        >>> transform, w = TransposableMask(Pattern("1:2")), torch.tensor([[4.0, 3.0], [3.0, 1.0]])
        >>> transform(w, transform.renew(w, [None], torch.Generator())["nm_mask"])
        tensor([[0., 3.],
                [3., 0.]])
    """

    reads: ClassVar[Mapping[str, Kind]] = {"nm_mask": "held"}

    def _traits(self) -> Traits:
        return replace(super()._traits(), transposable=True)

    def renew(self, weight: Tensor, extras: Sequence[Tensor | None], generator: torch.Generator) -> dict[str, Tensor]:
        return {"nm_mask": torch.ops.nmkernels.nm_transposable_mask(weight, self.pattern.n, self.pattern.m)}

    def kept(self, weight: Tensor, *extras: Tensor) -> Tensor:
        return extras[0]

    def __call__(self, weight: Tensor, *extras: Tensor, out: Tensor | None = None) -> Tensor:
        return masked(weight, extras[0], out)

    def packed(
        self, weight: Tensor, *extras: Tensor, dtype: torch.dtype, rows: bool = True, columns: bool = False, layout: str = "canonical"
    ) -> Packed:
        return pack(weight, laid_out(self.pattern, layout), extras[0], dtype=dtype, rows=rows, columns=columns, layout=layout, check=False)


@recipe("fst")
@dataclass(frozen=True)
class FST(Recipe):
    """Fully sparse training (Hu et al., "Accelerating transformer pre-training with 2:4 sparsity", ICML 2024, arXiv 2404.01847).

    One mask M is N:M along rows and along columns of W, so that all three products of a layer have a sparse operand::

        forward    y = x (M ⊙ W)ᵀ            groups of the weight along ``in``
        backward   ∂L/∂x = g (M ⊙ W)         groups of the weight along ``out``, the same M
                   ∂L/∂W = S(gᵀ) x           S the unbiased estimate of the output gradient, groups along tokens
        decay      ∂L/∂W ← ∂L/∂W + λ (1 − M) ⊙ W    after unscaling, accumulation and clipping

    M is the choice of largest total magnitude in every M×M tile (of the 90 for 2:4), taken from the master weight when training begins
    and after every ``refresh``-th applied step, and held in between; the values follow the weight at every step. The last steps are
    dense, and so is the model that ``finish`` then leaves. With ``fine_tune=0`` it leaves M ⊙ W with the M that is held: N:M as W and
    as Wᵀ. Works with any optimizer. The flips of a renewal count for the step after which it is made.

    **Transposable SR-STE** (or STE, with ``decay=0``), to compare with plain masks:
    ``FST(mvue=None, fine_tune=0, refresh=1, decay=...)`` against ``SRSTE(decay=...)``.

    2:4 is the paper's. For it the search of M takes 1 ns per weight on one CPU core, for other N:M 30 (1:4) to 430 (4:16)
    (AMD EPYC, 2026-11), so keep ``refresh`` large there. The paper sparsifies the feed-forward linears only (``filter_fn``).

    Args:
        refresh: applied steps between two choices of M. The authors' README has 40 for GPT-2 and BERT, their DeiT code 10.
        decay: λ. The README has 6e-5 to 2e-4 for GPT-2, 6e-6 for BERT, and contradicts the code; ``nm.recipes.search_decay`` measures it.
            It does not carry over: on a ``models.GPT`` of width 64 with learning rate 1e-3 masks flip 1.07 times as often as those of the
            dense run with λ = 0 and with 6e-5 alike, 0.90 times with 2e-3 and 0.59 times with 2e-2 (200 steps, 2026-11).
        fine_tune: the dense steps at the end, in steps or as a share of ``total_steps``; 1/6 in all the authors' runs.
        mvue: S, unbiased N:M along tokens (Chmiel et al., ICLR 2023): ``"exact"``, of least variance; ``"approx"``, the two-draw sampler
            that the authors ran; None for the dense product.
        mvue_pattern: N:M of the estimate.
        packed: multiply the compressed form of M ⊙ W, in ∂L/∂x too: on GPUs its transpose, packed along with it, on CPUs itself; "auto" in
            every product the faster by measurement (``nm.tune``). It is packed once per step, by one call of ``nm.ops.pack``. Results
            differ from the dense layout's by rounding. In fp32 on 2 CPU cores a 4096×1024 weight takes 0.40 (256 tokens) to 0.53 (2048)
            of the dense product's time in forward and 0.56 to 0.61 in backward, a 256×64 one 1.1 to 1.6 times as long, and bf16 gains
            nothing. A whole step with MaskedAdamW, 2048 tokens, takes 0.74 of the dense layer's (1.16 unpacked), with 256 tokens 1.92
            (2.48): there the held mask's passes over the weight outweigh the products (AMD EPYC, 2026-11).
        seed: of the estimates; None takes torch's initial seed. See ``SSTE``.

    Raises:
        RecipeError: ``fine_tune`` is a share without ``total_steps`` or leaves no sparse step, or an option is out of range.

    Example:
        >>> recipe = FST("2:4", total_steps=300_000)
        >>> recipe.final, recipe.bounds()
        ('dense', (250000,))
        >>> FST(mvue=None, fine_tune=0, refresh=1, decay=2e-4).final
        'nm'
    """

    refresh: int = 40
    decay: float = 6e-5
    fine_tune: float | int = 1 / 6
    mvue: str | None = "exact"
    mvue_pattern: PatternLike = "2:4"
    packed: bool | str = False
    seed: int | None = None

    paper = "Hu et al., ICML 2024, arXiv 2404.01847"
    patterns = "any N:M, with a slower mask search than for 2:4"
    extra_state = "a mask per layer"
    cost = "mask search every 40 steps; all three products sparse until the dense end"

    final = "dense"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "final", "dense" if self._dense_end else "nm")
        object.__setattr__(self, "mvue_pattern", Pattern(self.mvue_pattern))
        if isinstance(self.refresh, bool) or not isinstance(self.refresh, int) or self.refresh < 1:
            raise RecipeError(f"FST: refresh={self.refresh!r} must be a whole number of steps of at least 1.")
        check_decay("FST", self.decay)
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int)):
            raise RecipeError(f"FST: seed={self.seed!r} must be a whole number, or None for torch's initial seed.")
        packing("FST", self.packed, self.pattern)
        try:
            self.plan()
        except NMError as error:
            options = f"mvue={self.mvue!r}, mvue_pattern={self.mvue_pattern}, packed={self.packed!r}"
            raise RecipeError(f"FST: {options} do not go: {error}") from error
        self.bounds()

    @property
    def _dense_end(self) -> bool:
        return self.fine_tune != 0

    def bounds(self) -> tuple[int, ...]:
        """The applied step after which training is dense; empty where it never is."""
        return (phases("FST", self.total_steps, 0, self.fine_tune).stop,) if self._dense_end else ()

    def plan(self) -> GemmPlan:
        """The products of a sparse step."""
        p = Pattern(self.mvue_pattern)
        plan = GemmPlan() if self.mvue is None else GemmPlan(wgrad="mvue", n=p.n, m=p.m, method=self.mvue)
        return packing("FST", self.packed, self.pattern, plan)

    def obstacle(self, rows: int, cols: int) -> str:
        """M must divide the outputs too."""
        m = Pattern(self.pattern).m
        return f"out_features={rows} is not a multiple of M={m}, which a transposable mask needs" if rows % m else ""

    def final_transform(self) -> WeightTransform:
        """M ⊙ W with the held mask, what training multiplied."""
        return TransposableMask(Pattern(self.pattern))

    def start(self, group: dict[str, Any]) -> State:
        """No step taken; the run's seed, where estimates are drawn."""
        state: State = {"t": torch.zeros((), dtype=torch.float64), "stage": passed(0, self.bounds())}
        return state if self.mvue is None else {**state, "seed": torch.initial_seed() if self.seed is None else self.seed}

    def check_state(self, state: Any, group: dict[str, Any]) -> None:
        """Also refuse to go on under another schedule."""
        super().check_state(state, group)
        check_same_schedule(state["spec"], self.spec())

    def stage(self, state: State) -> Stage:
        """Phase 1 with the held mask, then phase 0, dense."""
        if state.get("stage", 0):
            return Stage(phase=0, plan=STRAIGHT_THROUGH)
        rule = UpdateRule(masked=True, decay=self.decay)
        return Stage(phase=1, transform=self.final_transform(), rule=rule, plan=self.plan(), renew=self.refresh)

    def unready(self, state: State) -> str:
        """Too early before the dense end, where there is one."""
        return "has not come to its dense end" if self._dense_end and not state.get("stage", 0) else ""

    def advance(self, state: State, observed: Observed) -> bool:
        """Count applied steps; True when the dense end begins."""
        return advance(state, observed, self.bounds())

    def profile(self, steps: int) -> list[Span]:
        """All three products at their pattern's share, then dense."""
        p, wgrad = Pattern(self.pattern).density, 1.0 if self.mvue is None else Pattern(self.mvue_pattern).density
        sparse = self.bounds()[0] if self._dense_end else steps
        return first(steps, [Span(sparse, fprop=p, dgrad=p, wgrad=wgrad), *([Span(max(steps - sparse, 0))] if self._dense_end else [])])
