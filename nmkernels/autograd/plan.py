"""GemmPlan: what each of a linear layer's three matrix products does, as data.

A linear layer runs three GEMMs per training step. Every method of the field differs from the others only
in which of them are sparse and by which rule, so that choice is a value here and not a class per method.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..ops import METHODS
from ..pattern import MAX_M, NMError
from .fp8 import SCHEMES
from .transforms import WeightTransform

FPROP = ("dense", "packed", "auto")
DGRAD = ("dense", "packed", "columns", "device", "auto")
WGRAD = ("dense", "mvue", "magnitude", "none")


@dataclass(frozen=True)
class GemmPlan:
    """Which rule each GEMM of ``y = x W̃ᵀ + b`` follows.

    Roles, with x ``(tokens, in)``, W̃ ``(out, in)`` the weight used and g = ∂L/∂y ``(tokens, out)``:

    * ``fprop`` (nt) y = x W̃ᵀ: ``"dense"`` multiplies W̃ in dense layout (its zeros included), ``"packed"`` its compressed form,
      ``"auto"`` at every call the one that was measured to be faster.
    * ``dgrad`` (nn) ∂L/∂x = g W̃: ``"dense"``; ``"packed"``, the compressed form of W̃, which the kernel turns (``nm_linear_dgrad``; CPUs do
      it well); ``"columns"``, that of W̃ᵀ, by the kernel of fprop, for a mask that is N:M along ``out`` too; ``"device"``, where W̃ lies in
      a tensor core's order ``"columns"`` or, for another mask, ``"dense"``, elsewhere ``"packed"``; ``"auto"``, the fastest measured.
    * ``wgrad`` (tn) ∂L/∂W̃ = gᵀ x: ``"dense"``; ``"mvue"``, with the unbiased N:M estimate of gᵀ along tokens (Chmiel et al. 2023;
      S-STE, FST); ``"magnitude"``, with the N largest of each group of gᵀ along tokens, which is biased: for comparison only, it is what
      Chmiel et al. warn of; ``"none"``, no weight gradient. What it means for the master weight is the weight transform's matter.

    Args:
        n, m: the pattern of the estimate, and of a packed weight that no transform has made; one that a transform has made has the
            transform's. 0 where nothing is packed.
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
        if self.fprop == "dense" != self.dgrad:
            raise NMError(
                f'GemmPlan: fprop="dense" beside dgrad={self.dgrad!r}; they read the same weight, so one that is packed for dgrad serves '
                'fprop too. Give fprop="packed", or "auto" for both to have each measured.'
            )
        if (self.fprop != "dense" or self.wgrad in ("mvue", "magnitude")) and not 1 <= self.n <= self.m <= MAX_M:
            raise NMError(f"GemmPlan: a packed operand needs a pattern, 1 <= n <= m <= {MAX_M}; got n={self.n}, m={self.m}.")
        if self.method not in METHODS:
            raise NMError(f"GemmPlan: method={self.method!r} is unknown; choose one of {', '.join(METHODS)}.")
        if self.wgrad == "mvue" and self.method == "approx" and self.n != 2:
            raise NMError(f'GemmPlan: method="approx" draws exactly two elements, so it needs n = 2, not {self.n}:{self.m}; use "exact".')
        if self.fp8 is not None and (self.fp8 not in SCHEMES or self.packs):
            raise NMError(f"GemmPlan: fp8={self.fp8!r} must be None or one of {', '.join(SCHEMES)}, and the weight in dense layout.")

    @property
    def packs(self) -> bool:
        """Whether a product may read a compressed form of the weight."""
        return self.fprop != "dense"

    def check(self, transform: WeightTransform) -> None:
        """Raise ``NMError`` unless the weight that ``transform`` makes has what this plan multiplies."""
        if self.dgrad in ("packed", "columns") and transform.traits.own_dgrad:
            raise NMError(
                f"GemmPlan: dgrad={self.dgrad!r}, and {type(transform).__name__} has another weight for that product, which is in dense "
                'layout. Use dgrad="dense".'
            )
        if self.dgrad == "columns" and not transform.traits.transposable:
            raise NMError(
                f'GemmPlan: dgrad="columns" reads Wᵀ packed, and the mask of {type(transform).__name__} is not N:M along the outputs. Use '
                'a TransposableMask, or dgrad="dense" ("packed" turns the rows).'
            )


STRAIGHT_THROUGH = GemmPlan()
"""STE, SR-STE and STEP: the masked weight in fprop and dgrad, the dense gradient to the master weight."""


def packed_inference(n: int, m: int) -> GemmPlan:
    """The plan of a deployed layer: compressed weight, gradients to the input only."""
    return GemmPlan(fprop="packed", dgrad="packed", wgrad="none", n=n, m=m)
