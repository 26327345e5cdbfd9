"""Weight transforms W -> W̃: the weight that the GEMMs use, and what its gradient means for the master weight.

A transform is a frozen value. What it needs beside the weight it names in ``reads``, tensors ``nm_*`` of the layer, each with its kind:

* fixed: given once by ``start`` (S-STE's scale);
* learned: the same, but a Parameter that trains with the model (MaskLLM's logits);
* held: chosen by ``renew`` now and then and kept in between (FST's mask);
* fed: numbers that the recipe's schedule writes before each step (the flow of mask decay).

A transform that one recipe uses stands beside that recipe; here are those of several.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import Compressed, Packed, pack
from ..ops.compress import nm_compress
from ..ops.mask import nm_prune
from ..pattern import Pattern, PatternError

Kind = Literal["fixed", "learned", "held", "fed"]
WEIGHT = "weight"
"""The name of the master weight's own among a transform's penalties."""


def reading(**kinds: Kind) -> Mapping[str, Kind]:
    """``WeightTransform.reads`` of a subclass: the kind of each tensor, by name."""
    return kinds


INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def masked(x: Tensor, mask: Tensor, out: Tensor | None = None) -> Tensor:
    """``x`` where ``mask`` is True, every bit as it is, and +0.0 elsewhere; contiguous, or in ``out``. Nothing is differentiated through.

    On a CPU the bits are multiplied by the mask, as integers: torch's ``where`` branches for each element there, and takes nine times as
    long.
    """
    if torch.compiler.is_compiling() or not x.is_cpu or x.is_neg() or x.requires_grad or torch._C._are_functorch_transforms_active():
        zero = torch.zeros((), dtype=x.dtype, device=x.device)
        return torch.where(mask, x, zero).contiguous() if out is None else torch.where(mask, x, zero, out=out)
    kind = INTEGERS[x.element_size()]
    if out is None:
        return torch.mul(x.view(kind), mask).view(x.dtype).contiguous()
    torch.mul(x.view(kind), mask, out=out.view(kind))
    return out


MAX_COMBINATIONS = 256
"""Most combinations of a group: each has a learned number of its own, so 2:4 stores 1.5 of them per weight and 4:8 already 8.75."""

HARDWARE = Pattern(2, 4)


@dataclass(frozen=True)
class Traits:
    """What callers must know of a transform before they use it.

    Args:
        own_gradient: ``gradient`` is not the identity, so that backward needs the weight.
        own_dgrad: ∂L/∂x multiplies another weight than W̃, that of ``for_dgrad``.
        own_mask: ``kept`` is not M(W), which the optimizer's own pass chooses, or there is a ``penalty``.
        transposable: W̃ is N:M along ``out`` too, so that W̃ᵀ can be packed.
        is_nm: W̃ is N:M, so that fprop counts as N/M of the dense GEMM.
        threshold: W̃ is made by the soft threshold instead of a mask.
        columns: the order, int64 ``(cols,)``, of so many columns in which W̃ is N:M; None for the one that they have.
    """

    own_gradient: bool = False
    own_dgrad: bool = False
    own_mask: bool = False
    transposable: bool = False
    is_nm: bool = True
    threshold: bool = False
    columns: Callable[[int], Tensor | None] | None = None


@dataclass(frozen=True)
class WeightTransform:
    """Base of the transforms: W̃ = W, the gradient passed straight through.

    Args:
        pattern: the N:M pattern whose mask the transform follows; groups along the last dimension.
    """

    pattern: Pattern

    reads: ClassVar[Mapping[str, Kind]] = reading()
    """Names of the layer's ``nm_*`` tensors that are passed on after the weight, as ``extras`` in this order, each with its kind."""

    # each object has its own; a field it is not, since torch 2.8 traces a frozen dataclass by giving all its fields to __init__
    traits: ClassVar[Traits]

    def __post_init__(self) -> None:
        object.__setattr__(self, "traits", self._traits())

    def _traits(self) -> Traits:
        """By default what follows from the methods that a subclass overrides; ``chain=False`` makes its gradient the identity."""
        kind, learns = type(self), "learned" in self.reads.values()
        return Traits(
            own_gradient=learns or (kind.gradient is not WeightTransform.gradient and getattr(self, "chain", True)),
            own_dgrad=kind.for_dgrad is not WeightTransform.for_dgrad,
            own_mask=kind.kept is not WeightTransform.kept or kind.penalty is not WeightTransform.penalty,
            is_nm=kind.__call__ is not WeightTransform.__call__,
        )

    def start(self, weight: Tensor) -> dict[str, Tensor]:
        """What is taken once from the initial weight ``(out, in)`` fixed or learned from then on, by name."""
        return {}

    def renew(self, weight: Tensor, extras: Sequence[Tensor | None], generator: torch.Generator) -> dict[str, Tensor]:
        """The held tensors, by name, as they are chosen for the present weight ``(out, in)``.

        Args:
            extras: as for the other methods, None for what has never been chosen.
            generator: of random choices, on the CPU; the same on every data-parallel rank, and again when a run is resumed.
        """
        return {}

    def kept(self, weight: Tensor, *extras: Tensor) -> Tensor:
        """Which weights count as not pruned, bool ``(out, in)``: for the decay of the others and for flips; by default M(W)."""
        return _mask(weight, self.pattern)

    def penalty(self, weight: Tensor, *extras: Tensor) -> dict[str, Tensor]:
        """Gradients of the method's own loss term, by name (``WEIGHT``), added once per step, after clipping; by default none."""
        return {}

    def __call__(self, weight: Tensor, *extras: Tensor, out: Tensor | None = None) -> Tensor:
        """W̃ of a detached master weight ``(out, in)`` in its dtype, contiguous, written to ``out`` where given."""
        return weight.clone(memory_format=torch.contiguous_format) if out is None else out.copy_(weight)

    def for_dgrad(self, used: Tensor, *extras: Tensor) -> Tensor:
        """The weight of the GEMM ∂L/∂x = g W̃, from ``used``, W̃ in x's dtype; by default W̃ itself."""
        return used

    def packed(
        self, weight: Tensor, *extras: Tensor, dtype: torch.dtype, rows: bool = True, columns: bool = False, layout: str = "canonical",
        out: Packed | None = None,
    ) -> Packed:  # fmt: skip
        """W̃ of a detached master weight compressed in ``dtype``, its transpose too with ``columns``, by one call of ``nm.ops.pack``.

        In the order of tensor cores (``layout``) it is 2:4, whatever sparser pattern it has. ``out``: what an earlier such call returned,
        whose memory may be used.

        Raises:
            ShapeError: W̃ is not N:M in an orientation that is wanted.
        """
        used, pattern = self(weight, *extras), laid_out(self.pattern, layout)
        return pack(used, pattern, used != 0, dtype=dtype, rows=rows, columns=columns, layout=layout)

    def gradient(self, g: Tensor, weight: Tensor, *extras: Tensor) -> tuple[Tensor | None, dict[str, Tensor]]:
        """The master weight's gradient from g = ∂L/∂W̃, by default g, None if it is not trained; and those of what is learned, by name."""
        return g, {}

    def watch(self, weight: Tensor, *extras: Tensor) -> dict[str, Tensor]:
        """Figures of this layer for ``handle.metrics()``, 0-d means over its weights; by default none."""
        return {}


def read_as(kind: Kind, transform: WeightTransform | None) -> list[str]:
    """The names that ``transform`` reads of one kind; none without a transform."""
    return [] if transform is None else [name for name, its in transform.reads.items() if its == kind]


@dataclass(frozen=True)
class KeptMask(WeightTransform):
    """Base of the transforms that use the weights they keep, bit for bit, and +0 for the others."""

    def __call__(self, weight: Tensor, *extras: Tensor, out: Tensor | None = None) -> Tensor:
        return masked(weight, self.kept(weight, *extras), out)


@dataclass(frozen=True)
class HardMask(WeightTransform):
    """W̃ = M(W) ⊙ W, the N largest magnitudes of each group kept (STE, SR-STE, STEP's second phase; Zhou et al. 2021, eq. 3).

    Args:
        chain: the gradient is M(W) ⊙ g, by the chain rule with M taken as a constant, instead of g.

    Example:
        >>> HardMask(Pattern("1:2"))(torch.tensor([[1.0, -2.0, 3.0, 0.0]]))
        tensor([[ 0., -2.,  3.,  0.]])
    """

    chain: bool = False

    def __call__(self, weight: Tensor, *extras: Tensor, out: Tensor | None = None) -> Tensor:
        return nm_prune(weight, self.pattern.n, self.pattern.m, out=out)

    def packed(
        self, weight: Tensor, *extras: Tensor, dtype: torch.dtype, rows: bool = True, columns: bool = False, layout: str = "canonical",
        out: Packed | None = None,
    ) -> Packed:  # fmt: skip
        if not columns and layout == "canonical" and dtype == weight.dtype and not torch.compiler.is_compiling():
            p = self.pattern
            if out is not None and isinstance(out.rows, Compressed) and out.rows.values.dtype == dtype:
                nm_compress(weight, p.n, p.m, None, out=(out.rows.values, out.rows.indices))
                return out
            values, indices = nm_compress(weight, p.n, p.m, None)
            return Packed(Compressed.trusted(values, indices, p, weight.shape), None)
        # its transpose is not N:M: columns raises PatternError
        pattern = laid_out(self.pattern, layout)
        kept = "magnitude" if pattern == self.pattern else _mask(weight, self.pattern)
        return pack(weight, pattern, kept, dtype=dtype, rows=rows, columns=columns, layout=layout, check=False)

    def gradient(self, g: Tensor, weight: Tensor, *extras: Tensor) -> tuple[Tensor | None, dict[str, Tensor]]:
        return masked(g, self.kept(weight)) if self.chain else g, {}


def combination_count(pattern: Pattern) -> int:
    """C(M, N), the ways to keep N of M; ``PatternError`` where there are more than ``MAX_COMBINATIONS``."""
    count = math.comb(pattern.m, pattern.n)
    if count > MAX_COMBINATIONS:
        raise PatternError(
            f"pattern {pattern} has {count} combinations in each group, and every one would need a learned number; at most "
            f"{MAX_COMBINATIONS} are supported. Choose for instance 2:4, 4:8, 2:16 or 1:M."
        )
    return count


@dataclass(frozen=True)
class CombinationMask(KeptMask):
    """Base of the transforms that choose among combinations; groups along the last dimension."""

    def table(self, like: Tensor) -> Tensor:
        """P ``(C, M)``, 0 or 1: the combinations as masks, in the dtype and on the device of ``like``."""
        members = torch.tensor(list(itertools.combinations(range(self.pattern.m), self.pattern.n)), device=like.device)
        return torch.zeros(len(members), self.pattern.m, dtype=like.dtype, device=like.device).scatter_(1, members, 1.0)

    def grouped(self, tensor: Tensor) -> Tensor:
        """``tensor`` ``(out, in)`` as ``(groups, M)``."""
        return tensor.reshape(-1, self.pattern.m)

    def best(self, scores: Tensor, weight: Tensor) -> Tensor:
        """The combination of the largest of ``scores`` ``(groups, C)`` in each group, the first of equal ones, as bool ``(out, in)``."""
        return self.table(scores).bool()[scores.argmax(1)].reshape(weight.shape)


def wide(tensor: Tensor) -> Tensor:
    """``tensor`` detached, in at least fp32: logits times 500 leave nothing of 16 bits."""
    tensor = tensor.detach()
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def pruned_along_out(weight: Tensor, n: int, m: int) -> Tensor:
    """``weight`` ``(out, in)`` with at most N non-zeros in every M consecutive rows of a column; N also of a short last group."""
    rows = weight.shape[0]
    return torch.ops.nmkernels.nm_prune(F.pad(weight.t(), (0, -rows % m)), n, m)[:, :rows].t()


def laid_out(pattern: Pattern, layout: str) -> Pattern:
    """The pattern of what is packed: tensor cores read 2:4, which sparser ones are too (``nm.ops.tensor_core_pattern``)."""
    return pattern if layout == "canonical" else HARDWARE


def _mask(weight: Tensor, pattern: Pattern) -> Tensor:
    return torch.ops.nmkernels.nm_mask(weight, pattern.n, pattern.m)
