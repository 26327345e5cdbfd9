"""GemmPlan: what each of a linear layer's three matrix products does, as data.

A linear layer runs three GEMMs per training step. Every method of the field differs from the others only
in which of them are sparse and by which rule, so that choice is a value here and not a class per method.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..ops import METHODS
from ..pattern import MAX_M, NMError
from .fp8 import SCHEMES

FPROP = ("dense", "packed")
DGRAD = ("dense", "packed")
WGRAD = ("dense", "mvue", "magnitude", "none")


@dataclass(frozen=True)
class GemmPlan:
    """Which rule each GEMM of ``y = x W̃ᵀ + b`` follows.

    Roles, with x ``(tokens, in)``, W̃ ``(out, in)`` the weight used and g = ∂L/∂y ``(tokens, out)``:

    * ``fprop`` (nt) y = x W̃ᵀ: ``"dense"`` multiplies W̃ in dense layout (its zeros included), ``"packed"`` its compressed form.
    * ``dgrad`` (nn) ∂L/∂x = g W̃: the same two choices.
    * ``wgrad`` (tn) ∂L/∂W̃ = gᵀ x: ``"dense"``; ``"mvue"``, with the unbiased N:M estimate of gᵀ along tokens (Chmiel et al. 2023;
      S-STE, FST); ``"magnitude"``, with the N largest of each group of gᵀ along tokens, which is biased: for comparison only, it is what
      Chmiel et al. warn of; ``"none"``, no weight gradient. What it means for the master weight is the weight transform's matter.

    Args:
        n, m: the pattern of packed operands and of the estimate; 0 where nothing is packed.
        method: how the estimate is drawn, ``"exact"`` (least variance) or ``"approx"`` (two draws, n = 2).
        fp8: round the operands of all three to emulated FP8: ``"paper"`` or ``"hybrid"`` (see ``fp8.SCHEMES``); None not to.

    Raises:
        NMError: a role is given a rule that it does not have, or a packed role has no pattern.

    Example:
        >>> GemmPlan(wgrad="mvue", n=2, m=4).wgrad
        'mvue'
    """

    fprop: str = "dense"
    dgrad: str = "dense"
    wgrad: str = "dense"
    n: int = 0
    m: int = 0
    method: str = "exact"
    fp8: str | None = None

    def __post_init__(self) -> None:
        for role, given, known in (("fprop", self.fprop, FPROP), ("dgrad", self.dgrad, DGRAD), ("wgrad", self.wgrad, WGRAD)):
            if given not in known:
                raise NMError(f"GemmPlan: {role}={given!r} is not a rule of that GEMM; choose one of {', '.join(known)}.")
        if self.fprop != self.dgrad:
            raise NMError("GemmPlan: fprop and dgrad read the same weight, so both are dense or both are packed.")
        if (self.fprop == "packed" or self.wgrad in ("mvue", "magnitude")) and not 1 <= self.n <= self.m <= MAX_M:
            raise NMError(f"GemmPlan: a packed operand needs a pattern, 1 <= n <= m <= {MAX_M}; got n={self.n}, m={self.m}.")
        if self.method not in METHODS:
            raise NMError(f"GemmPlan: method={self.method!r} is unknown; choose one of {', '.join(METHODS)}.")
        if self.wgrad == "mvue" and self.method == "approx" and self.n != 2:
            raise NMError(f'GemmPlan: method="approx" draws exactly two elements, so it needs n = 2, not {self.n}:{self.m}; use "exact".')
        if self.fp8 is not None and (self.fp8 not in SCHEMES or self.fprop == "packed"):
            raise NMError(f"GemmPlan: fp8={self.fp8!r} must be None or one of {', '.join(SCHEMES)}, and the weight in dense layout.")


STRAIGHT_THROUGH = GemmPlan()
"""STE, SR-STE and STEP: the masked weight in fprop and dgrad, the dense gradient to the master weight."""


def packed_inference(n: int, m: int) -> GemmPlan:
    """The plan of a deployed layer: compressed weight, gradients to the input only."""
    return GemmPlan(fprop="packed", dgrad="packed", wgrad="none", n=n, m=m)
