"""What a recipe sets in MaskedAdamW: which parameters are masked, and how they are updated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..arguments import finite_number, whole_number
from ..layouts import LINEAR
from ..ops.adamw_pack import StepForms
from ..pattern import NMError, Pattern


@dataclass(frozen=True)
class UpdateRule:
    """How a ``MaskedAdamW`` updates its maskable parameters in the current phase of a recipe; the others follow plain AdamW.

    Args:
        masked: use the parameters' N:M masks (to decay pruned weights and count flips), or the bits of their targets where they have some.
        fixed: weights outside the bits of their targets are held at zero: their gradients count as 0, whatever they are. Not decayed.
        decay: λ of SR-STE: g += λ (1 − M(w)) ⊙ w, after unscaling and clipping (Zhou et al. 2021, eq. 8).
        frozen: the second moment is not updated (STEP's second phase, Lu et al. 2023).
        v_step: the step whose bias correction the frozen second moment gets, v̂* = v*/(1 − β₂^v_step); 0 uses v* raw.
        eps_inside: denominator √(v̂ + ε) instead of √v̂ + ε.
        clamp: bound on |m̂/D|; 0 for none.
        geometric: also return Σ log|v_t − v_{t−1}| (AutoSwitch option II).

    Raises:
        NMError: a number is negative or not finite, or ``v_step`` not whole.

    Example:
        >>> rule = UpdateRule(masked=True, decay=2e-4)
        >>> rule.frozen, rule.clamp
        (False, 0.0)
    """

    masked: bool = False
    decay: float = 0.0
    frozen: bool = False
    v_step: int = 0
    eps_inside: bool = False
    clamp: float = 0.0
    geometric: bool = False
    fixed: bool = False

    adds_penalty: ClassVar[bool] = False
    """Whether the optimizer itself adds the gradient of a target's penalty; else it is part of the gradient that the optimizer gets."""

    def __post_init__(self) -> None:
        for name in ("decay", "clamp"):
            object.__setattr__(self, name, finite_number(NMError, f"UpdateRule: {name}", getattr(self, name)))
        object.__setattr__(self, "v_step", whole_number(NMError, "UpdateRule: v_step", self.v_step, least=0))


PLAIN = UpdateRule()
"""Plain AdamW."""


@dataclass
class Target:
    """One maskable parameter of a ``MaskedAdamW``.

    Args:
        pattern: N:M of its groups, along the input dimension.
        layout: how it stores its matrix ``(rows, in)``; one of ``nmkernels.layouts``.
        penalty: returns the gradient of a regulariser, ``(rows, in)``, or None.
        bits: a held mask, which is used instead of the pattern's, as ``nm.ops.mask_bits`` makes it of a bool ``(rows, in)``; of the local
            shard if the parameter is a DTensor. None: the mask is that of the present weights.
        forms: what the step also writes, where a kernel does that in the same pass: ``MaskedAdamW.packed`` has its parameter then.
    """

    pattern: Pattern
    layout: str = LINEAR
    penalty: Callable[[], Tensor | None] = lambda: None
    bits: Tensor | None = None
    forms: StepForms | None = None
