"""What a recipe tells MaskedAdamW: which parameters are masked, and how the whole group of them is updated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..layouts import LINEAR
from ..pattern import NMError, Pattern

LATE = ("", "total", "gradient")


@dataclass(frozen=True)
class UpdateRule:
    """How the maskable parameters are updated in the present phase; the others follow plain AdamW.

    Args:
        masked: the parameters' N:M masks take part (decay of pruned weights, flips counted).
        decay: λ of SR-STE: g += λ (1 − M(w)) ⊙ w, after unscaling and clipping (Zhou et al. 2021, eq. 8).
        frozen: the second moment is not updated (STEP's second phase, Lu et al. 2023).
        v_step: the step whose bias correction the frozen second moment gets, v̂* = v*/(1 − β₂^v_step); 0 uses v* raw.
        eps_inside: denominator √(v̂ + ε) instead of √v̂ + ε.
        clamp: bound on |m̂/D|; 0 for none.
        geometric: also return Σ log|v_t − v_{t−1}| (AutoSwitch option II).
        late: the penalty's gradient is left to an ``AnnealedAdamW``, which adds it after the momentum and takes the second moment of
            ``"total"`` (m̂ + penalty) or of ``"gradient"`` (g + penalty); empty: it goes with the gradient.
    """

    masked: bool = False
    decay: float = 0.0
    frozen: bool = False
    v_step: int = 0
    eps_inside: bool = False
    clamp: float = 0.0
    geometric: bool = False
    late: str = ""

    def __post_init__(self) -> None:
        for name in ("decay", "clamp", "v_step"):
            if getattr(self, name) < 0:
                raise NMError(f"UpdateRule: {name}={getattr(self, name)} must not be negative.")
        if self.late not in LATE:
            raise NMError(f"UpdateRule: late={self.late!r} is unknown; choose one of {', '.join(map(repr, LATE))}.")


PLAIN = UpdateRule()
"""AdamW as everybody knows it."""


@dataclass
class Target:
    """One maskable parameter: its pattern, how it stores its matrix ``(rows, in)``, and its penalty.

    ``layout``: one of ``nmkernels.layouts``. ``penalty`` returns the gradient of a regulariser, ``(rows, in)``, or None.
    """

    pattern: Pattern
    layout: str = LINEAR
    penalty: Callable[[], Tensor | None] = lambda: None
