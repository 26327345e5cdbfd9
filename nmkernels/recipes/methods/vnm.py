"""V:N:M: blocks of rows that share the columns they keep, with N:M inside them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ...autograd import OBJECTIVES, BlockColumns, WeightTransform
from ...optim import UpdateRule
from ...pattern import CheckpointError, Pattern, RecipeError
from ..base import Recipe, Stage, State
from ..registry import recipe
from ..schedule import check_choice, check_count, check_decay


@recipe("vnm")
@dataclass(frozen=True)
class VNM(Recipe):
    """V:N:M (VENOM: Castro et al., SC 2023, arXiv 2310.02065; trained in "Beyond 2:4", arXiv 2410.16135).

    In each block of V rows, every group of M columns keeps 4 for all V rows, and each row N of those 4: N = 2 runs at density 2/M on the
    2:4 tensor cores. With C the kept columns and M_C(W) the N largest magnitudes inside them::

        y = x (M_C(W) ⊙ C ⊙ W)ᵀ        ∂L/∂W := gᵀ x + λ (1 − M_C ⊙ C) ⊙ W

    C is chosen anew every ``refresh`` applied steps to keep the largest Σ|w| after N:4, and held in between, also by a checkpoint: exactly,
    over all C(M, 4) sets of columns, where M ≤ 8, and greedily above (one column after the other; at 2:8, where both can be had, that
    keeps 99.8 % of the best on normal weights in blocks of 4 to 64 rows). M_C follows the weight at every step. λ = 0 is plain
    straight-through. ``finish`` leaves M_C ⊙ C ⊙ W, which is N:M and is compressed as any other; no kernel here makes use of V yet.
    Works with any optimizer.

    Where V does not divide a layer's outputs, the greatest common divisor of the two is its V, and ``handle.report`` says so; for
    an odd number of outputs that is 1, ordinary N:M.

    Args:
        v: V, rows of a block: 64 in most of both papers' results.
        decay: λ of SR-STE, at least 0.
        refresh: applied steps between two choices of C; 0 chooses once, at the beginning.
        objective: ``"retained"``, as above; ``"sums"``: the 4 columns of largest Σ|w| before N:4. At 2:8 that keeps 97.4 % (V = 4) to
            99.3 % (V = 64) of the best on normal weights, and costs a fortieth: 0.8 and 32 ms for a 1024 × 1024 layer (AMD EPYC, one
            thread, 2026-11).

    Raises:
        RecipeError: a value is out of range, or not N ≤ 4 ≤ M.

    Example:
        >>> VNM("2:8", v=16).stage({}).transform
        BlockColumns(pattern=Pattern("2:8"), v=16, objective='retained')
    """

    v: int = 64
    decay: float = 2e-4
    refresh: int = 10
    objective: str = "retained"

    paper: ClassVar[str] = "Castro et al., SC 2023, arXiv 2310.02065; arXiv 2410.16135"
    patterns: ClassVar[str] = "N:M with N ≤ 4 ≤ M"
    extra_state: ClassVar[str] = "the kept columns of each block of V rows, a bit per column"
    cost: ClassVar[str] = "fprop at N/M; a search over sets of columns every 10 steps"

    def __post_init__(self) -> None:
        super().__post_init__()
        p = Pattern(self.pattern)
        if not p.n <= 4 <= p.m:
            raise RecipeError(f"VNM: {p} keeps N of 4 columns out of M, so N ≤ 4 ≤ M must hold; 2:8 is the usual choice.")
        check_count("VNM", "v", self.v)
        if self.v == 0:
            raise RecipeError("VNM: v=0 must be at least 1.")
        check_decay("VNM", self.decay)
        check_count("VNM", "refresh", self.refresh)
        check_choice("VNM", "objective", self.objective, OBJECTIVES)

    def stage(self, state: State) -> Stage:
        """Always phase 1, masked, with the decay."""
        return Stage(phase=1, transform=self.final_transform(), rule=UpdateRule(masked=True, decay=self.decay), renew=self.refresh)

    def final_transform(self) -> WeightTransform:
        """M_C ⊙ C ⊙ W with the columns that are held."""
        return BlockColumns(Pattern(self.pattern), self.v, self.objective)

    def fit(self, transform: WeightTransform, pattern: Pattern, shape: tuple[int, int]) -> WeightTransform:
        """With a V that divides the outputs."""
        return replace(super().fit(transform, pattern, shape), v=math.gcd(shape[0], self.v))  # type: ignore[call-arg]

    def note(self, pattern: Pattern, shape: tuple[int, int]) -> str:
        """The pattern and V, and why V is not the recipe's."""
        v = math.gcd(shape[0], self.v)
        return f"{v}:{pattern}" if v == self.v else f"{v}:{pattern}, as v={self.v} does not divide {shape[0]} outputs"

    def check_state(self, state: Any, group: dict[str, Any]) -> None:
        """Also refuse to go on with blocks of another size."""
        super().check_state(state, group)
        theirs = state["spec"].get("v")
        if theirs != self.v:
            raise CheckpointError(f"the checkpoint has blocks of v={theirs} rows, this run of v={self.v}. Resume with the same.")
