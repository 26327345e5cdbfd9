"""GemmPlan: how each of a linear layer's three GEMMs is computed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..ops.mvue import METHODS
from ..pattern import MAX_M, NMError

FPROP = ("dense", "packed", "auto")
DGRAD = ("dense", "packed", "columns", "device", "auto")
WGRAD = ("dense", "mvue", "magnitude", "none")
FP8 = ("paper", "hybrid")
"""The schemes of ``autograd.fp8``."""


@dataclass(frozen=True)
class GemmPlan:
    """How each GEMM of y = x W̃ᵀ + b is computed.

    Roles, with x ``(tokens, in)``, W̃ ``(out, in)`` the effective weight and g = ∂L/∂y ``(tokens, out)``:

    * ``fprop`` (nt) y = x W̃ᵀ: ``"dense"`` multiplies W̃ in dense layout, ``"packed"`` its compressed form, ``"auto"`` whichever ``choose``
      selects for the call.
    * ``dgrad`` (nn) ∂L/∂x = g W̃: ``"dense"``; ``"packed"``, the compressed form of W̃, which the kernel transposes (``nm_linear_dgrad``);
      ``"columns"``, the compressed form of W̃ᵀ, for a mask that is N:M along ``out`` too; ``"device"``: ``"packed"``, except that W̃ in a
      tensor-core layout means ``"columns"`` or, without such a mask, ``"dense"``; ``"auto"``, chosen together with fprop.
    * ``wgrad`` (tn) ∂L/∂W̃ = gᵀ x: ``"dense"``; ``"mvue"``, with the unbiased N:M estimate of gᵀ along tokens (Chmiel et al. 2023);
      with fprop ``"auto"`` on a GPU it is dense where the estimate costs more than it saves; ``"magnitude"``, with the N largest of each
      group of gᵀ along tokens, which is biased, for comparison only; ``"none"``, no weight gradient.

    Args:
        n, m: the pattern of the estimate, and of a packed weight without a transform; 0 if nothing is packed.
        method: how the estimate is drawn: ``"exact"`` (least variance) or ``"approx"`` (two draws, n = 2).
        fp8: round the operands of all three GEMMs to FP8 by the scheme ``"paper"`` or ``"hybrid"`` (see ``autograd.fp8``), or None.

    Raises:
        NMError: a role has an unknown rule, the roles contradict each other, or a packed role has no pattern.

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
        rules = ("fprop", FPROP), ("dgrad", DGRAD), ("wgrad", WGRAD), ("method", METHODS)
        for name, known in rules:
            if getattr(self, name) not in known:
                raise NMError(f"GemmPlan: {name}={getattr(self, name)!r} is unknown; choose one of {', '.join(known)}.")
        if self.fprop == "dense" != self.dgrad:
            raise NMError(
                f'GemmPlan: fprop="dense" with dgrad={self.dgrad!r}; both read the same weight, so if it is packed for dgrad, fprop uses '
                'it too. Use fprop="packed", or "auto" for both.'
            )
        if "auto" in (self.fprop, self.dgrad) and self.fprop != self.dgrad:
            raise NMError(f'GemmPlan: fprop={self.fprop!r} and dgrad={self.dgrad!r}; "auto" chooses both together. Use it for both.')
        if (self.fprop != "dense" or self.wgrad in ("mvue", "magnitude")) and not 1 <= self.n <= self.m <= MAX_M:
            raise NMError(f"GemmPlan: a packed operand needs a pattern, 1 <= n <= m <= {MAX_M}; got n={self.n}, m={self.m}.")
        if self.wgrad == "mvue" and self.method == "approx" and self.n != 2:
            raise NMError(f'GemmPlan: method="approx" draws exactly two elements, so it needs n = 2, not {self.n}:{self.m}; use "exact".')
        if self.fp8 is not None and (self.fp8 not in FP8 or self.packs):
            raise NMError(f"GemmPlan: fp8={self.fp8!r} must be None or one of {', '.join(FP8)}, and the weight in dense layout.")

    @property
    def packs(self) -> bool:
        """Whether a GEMM may read a compressed form of the weight."""
        return self.fprop != "dense"

    @cached_property
    def dense_layout(self) -> GemmPlan:
        """The same plan with every GEMM in dense layout, which is bit for bit reproducible."""
        return replace(self, fprop="dense", dgrad="dense") if self.packs else self

    def check(self, transform: Any) -> None:
        """Raise ``NMError`` unless ``transform``, a ``WeightTransform``, provides the forms of W̃ that this plan reads."""
        if self.dgrad in ("packed", "columns") and transform.traits.own_dgrad:
            raise NMError(
                f"GemmPlan: dgrad={self.dgrad!r}, but {type(transform).__name__} uses another weight for that GEMM, in dense layout. "
                'Use dgrad="dense".'
            )
        if self.dgrad == "columns" and not transform.traits.transposable:
            raise NMError(
                f'GemmPlan: dgrad="columns" reads Wᵀ packed, but the mask of {type(transform).__name__} is not N:M along the outputs. Use '
                'a TransposableMask, or dgrad="dense" ("packed" transposes the rows).'
            )


STRAIGHT_THROUGH = GemmPlan()
"""STE, SR-STE and STEP: the masked weight in fprop and dgrad, and the dense gradient for the master weight."""
