"""Weight transforms W -> W̃: they make the effective weight from the master weight, and the master weight's gradient from that of W̃.

A transform is a frozen dataclass. The tensors ``nm_*`` of the layer that it needs in addition to the weight are named in ``reads``, each
with its kind:

* fixed: computed once by ``start`` (S-STE's scale);
* learned: the same, but a Parameter that trains with the model (MaskLLM's logits);
* held: recomputed by ``renew`` from time to time (FST's mask);
* fed: numbers that the recipe's schedule writes before each step (the flow of mask decay).

A transform of a single recipe is defined in the recipe's file; here are the shared ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensor

from ..backends.streams import Made, capturing
from ..layouts import LINEAR, as_matrix, as_stored, ordered
from ..ops import Compressed, Packed, pack
from ..ops.compress import nm_compress
from ..ops.mask import nm_prune
from ..pattern import Pattern, PatternError
from .function import functional, once, with_functional

Kind = Literal["fixed", "learned", "held", "fed"]
WEIGHT = "weight"
"""The key of the master weight in ``penalty``."""


def reading(**kinds: Kind) -> Mapping[str, Kind]:
    """``WeightTransform.reads`` of a subclass, the kind of each tensor by name."""
    return kinds


INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def masked(x: Tensor, mask: Tensor, out: Tensor | None = None) -> Tensor:
    """``x`` where the bool ``mask`` is True, bit for bit, and +0.0 elsewhere; contiguous, or in ``out``. Not differentiable.

    On a CPU the bits are multiplied by the mask as integers, because torch's ``where`` branches for each element and takes nine times as
    long.

    Example:
        >>> masked(torch.tensor([1.0, 2.0]), torch.tensor([True, False]))
        tensor([1., 0.])
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
"""The most combinations per group. Each has a learned number: 1.5 per weight for 2:4, and already 8.75 for 4:8."""

HARDWARE = Pattern(2, 4)


@dataclass(frozen=True)
class Traits:
    """Properties of a transform that its callers depend on.

    Args:
        own_gradient: ``gradient`` is not the identity, so backward needs the weight.
        own_dgrad: ∂L/∂x uses another weight than W̃, that of ``for_dgrad``.
        own_mask: ``kept`` is not M(W), which the optimizer's kernel computes, or there is a ``penalty``.
        holds_mask: ``kept`` is a held tensor, of which the optimizer's kernel reads the bits.
        in_step: the rule by which the optimizer's kernel can make W̃ of its new weight, as ``nm.ops.masked_adamw_pack_`` has it, or empty.
        transposable: W̃ is N:M along ``out`` too, so W̃ᵀ can be packed.
        is_nm: W̃ is N:M, so fprop counts as N/M of the dense GEMM.
        columns: a function of the number of columns: the permutation, int64 ``(cols,)``, of the columns in which W̃ is N:M; None for their
            own order.
    """

    own_gradient: bool = False
    own_dgrad: bool = False
    own_mask: bool = False
    holds_mask: bool = False
    in_step: str = ""
    transposable: bool = False
    is_nm: bool = True
    columns: Callable[[int], Tensor | None] | None = None


@dataclass(frozen=True)
class WeightTransform:
    """Base of the transforms: W̃ = W, with the gradient passed straight through.

    Args:
        pattern: the N:M pattern of W̃; groups along the last dimension.
    """

    pattern: Pattern

    reads: ClassVar[Mapping[str, Kind]] = reading()
    """The layer's ``nm_*`` tensors that the methods receive as ``extras``, in this order, each with its kind."""

    # set per object, but not a field: torch traces a frozen dataclass by passing all its fields to __init__ (as of 2.8)
    traits: ClassVar[Traits]

    def __post_init__(self) -> None:
        object.__setattr__(self, "traits", self._traits())

    def _traits(self) -> Traits:
        """The traits, by default derived from the methods that a subclass overrides; with ``chain=False`` the gradient is the identity."""
        kind, learns = type(self), "learned" in self.reads.values()
        return Traits(
            own_gradient=learns or (kind.gradient is not WeightTransform.gradient and getattr(self, "chain", True)),
            own_dgrad=kind.for_dgrad is not WeightTransform.for_dgrad,
            own_mask=kind.kept is not WeightTransform.kept or kind.penalty is not WeightTransform.penalty,
            is_nm=kind.__call__ is not WeightTransform.__call__,
        )

    def start(self, weight: Tensor) -> dict[str, Tensor]:
        """The initial values of the fixed and learned tensors, by name, from the initial weight ``(out, in)``; by default none."""
        return {}

    def renew(self, weight: Tensor, extras: Sequence[Tensor | None], generator: torch.Generator) -> dict[str, Tensor]:
        """New values of the held tensors, by name, for the current weight ``(out, in)``; by default none.

        Args:
            extras: as for the other methods; None for a held tensor that has no value yet.
            generator: for random choices, on the CPU; in the same state on every data-parallel rank and after resuming a run.
        """
        return {}

    def kept(self, weight: Tensor, *extras: Tensor) -> Tensor:
        """The mask of weights that are not pruned, bool ``(out, in)``, for decay and flip counts; by default M(W)."""
        return _mask(weight, self.pattern)

    def penalty(self, weight: Tensor, *extras: Tensor) -> dict[str, Tensor]:
        """Gradients of the method's own loss term, by name (``WEIGHT``), added once per step after clipping; by default none."""
        return {}

    def __call__(self, weight: Tensor, *extras: Tensor, out: Tensor | None = None) -> Tensor:
        """W̃ of a detached master weight ``(out, in)``, contiguous and in its dtype; written to ``out`` if passed."""
        return weight.clone(memory_format=torch.contiguous_format) if out is None else out.copy_(weight)

    def for_dgrad(self, used: Tensor, *extras: Tensor) -> Tensor:
        """The weight of the GEMM ∂L/∂x = g W̃, computed from ``used``, W̃ in x's dtype; by default W̃ itself."""
        return used

    def packed(
        self, weight: Tensor, *extras: Tensor, dtype: torch.dtype, rows: bool = True, columns: bool = False, dense: bool = False,
        layout: str = "canonical", out: Packed | None = None,
    ) -> Packed:  # fmt: skip
        """W̃ of a detached master weight in the forms that GEMMs read, all of ``dtype``: see ``nm.ops.pack``, which makes them at once.

        In a tensor-core ``layout`` it is stored as 2:4, even if its pattern is sparser. ``out`` is the result of an earlier such call,
        whose memory may be reused.

        Raises:
            ShapeError: W̃ is not N:M in a requested orientation.
        """
        used, pattern = self(weight, *extras), laid_out(self.pattern, layout)
        spread = used.to(dtype) if dense else None
        if not (rows or columns):
            return Packed(None, None, spread)
        made = pack(used, pattern, used != 0, dtype=dtype, rows=rows, columns=columns, layout=layout)
        return Packed(made.rows, made.columns, spread)

    def gradient(self, g: Tensor, weight: Tensor, *extras: Tensor) -> tuple[Tensor | None, dict[str, Tensor]]:
        """The master weight's gradient from g = ∂L/∂W̃ (by default g; None if not trained), and those of the learned tensors by name."""
        return g, {}

    def watch(self, weight: Tensor, *extras: Tensor) -> dict[str, Tensor]:
        """Metrics of this layer for ``handle.metrics()``: 0-d means over its weights, by name; by default none."""
        return {}


def read_as(kind: Kind, transform: WeightTransform | None) -> list[str]:
    """The names of the tensors of one kind that ``transform`` reads; empty without a transform."""
    return [] if transform is None else [name for name, k in transform.reads.items() if k == kind]


@dataclass(frozen=True)
class KeptMask(WeightTransform):
    """Base of the transforms W̃ = W where ``kept``, bit for bit, and +0 elsewhere."""

    def __call__(self, weight: Tensor, *extras: Tensor, out: Tensor | None = None) -> Tensor:
        return masked(weight, self.kept(weight, *extras), out)


@dataclass(frozen=True)
class HardMask(WeightTransform):
    """W̃ = M(W) ⊙ W keeps the N largest magnitudes of each group (STE, SR-STE, STEP's second phase; Zhou et al. 2021, eq. 3).

    Args:
        chain: the gradient is M(W) ⊙ g, by the chain rule with M taken as a constant, instead of g.

    Example:
        >>> HardMask(Pattern("1:2"))(torch.tensor([[1.0, -2.0, 3.0, 0.0]]))
        tensor([[ 0., -2.,  3.,  0.]])
    """

    chain: bool = False

    def _traits(self) -> Traits:
        return replace(super()._traits(), in_step="magnitude" if type(self) is HardMask else "")

    def __call__(self, weight: Tensor, *extras: Tensor, out: Tensor | None = None) -> Tensor:
        return nm_prune(weight, self.pattern.n, self.pattern.m, out=out)

    def packed(
        self, weight: Tensor, *extras: Tensor, dtype: torch.dtype, rows: bool = True, columns: bool = False, dense: bool = False,
        layout: str = "canonical", out: Packed | None = None,
    ) -> Packed:  # fmt: skip
        alone = rows and not columns and not dense
        if alone and layout == "canonical" and dtype == weight.dtype and not torch.compiler.is_compiling():
            p = self.pattern
            if out is not None and isinstance(out.rows, Compressed) and out.rows.values.dtype == dtype:
                nm_compress(weight, p.n, p.m, None, out=(out.rows.values, out.rows.indices))
                return out
            values, indices = nm_compress(weight, p.n, p.m, None)
            return Packed(Compressed.trusted(values, indices, p, weight.shape), None)
        # with columns this raises PatternError: the transpose is not N:M
        pattern = laid_out(self.pattern, layout)
        mask = "magnitude" if pattern == self.pattern else _mask(weight, self.pattern)
        return pack(weight, pattern, mask, dtype=dtype, rows=rows, columns=columns, dense=dense, layout=layout, check=False)

    def gradient(self, g: Tensor, weight: Tensor, *extras: Tensor) -> tuple[Tensor | None, dict[str, Tensor]]:
        return masked(g, self.kept(weight)) if self.chain else g, {}


def combination_count(pattern: Pattern) -> int:
    """The number of combinations C(M, N) of a pattern; raises ``PatternError`` if it exceeds ``MAX_COMBINATIONS``."""
    count = math.comb(pattern.m, pattern.n)
    if count > MAX_COMBINATIONS:
        raise PatternError(
            f"pattern {pattern} has {count} combinations per group, and each would need a learned number; at most "
            f"{MAX_COMBINATIONS} are supported. Choose for instance 2:4, 4:8, 2:16 or 1:M."
        )
    return count


@dataclass(frozen=True)
class CombinationMask(KeptMask):
    """Base of the transforms that choose a combination of N weights for each group; groups along the last dimension."""

    def table(self, like: Tensor) -> Tensor:
        """The combinations as masks P ``(C, M)`` of 0 and 1, in the dtype and on the device of ``like``."""
        if torch.compiler.is_compiling() or isinstance(like, FakeTensor):
            return _combinations(self.pattern, like)
        key = self.pattern, like.dtype, like.device
        if key not in _tables:
            with torch.inference_mode(False):
                table = _combinations(self.pattern, like)
            if capturing(like.device):
                return table
            _tables[key] = Made(table, [table], like.device)
        return _tables[key].get()

    def grouped(self, tensor: Tensor) -> Tensor:
        """``tensor`` ``(out, in)`` as ``(groups, M)``."""
        return tensor.reshape(-1, self.pattern.m)

    def best(self, scores: Tensor, weight: Tensor) -> Tensor:
        """The mask, bool ``(out, in)``, of each group's combination with the largest of ``scores`` ``(groups, C)``, the first of ties."""
        return self.table(scores).bool()[scores.argmax(1)].reshape(weight.shape)


_tables: dict[tuple[Pattern, torch.dtype, torch.device], Made[Tensor]] = {}
"""Tables of combinations: a copy from the host would wait for the device in every step, and could not be captured."""


def _combinations(pattern: Pattern, like: Tensor) -> Tensor:
    members = torch.tensor(list(itertools.combinations(range(pattern.m), pattern.n)), device=like.device)
    return torch.zeros(len(members), pattern.m, dtype=like.dtype, device=like.device).scatter_(1, members, 1.0)


def wide(tensor: Tensor) -> Tensor:
    """``tensor`` detached, in at least fp32: logits times 500 have no accuracy left in 16 bits."""
    tensor = tensor.detach()
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def pruned_along_out(weight: Tensor, n: int, m: int) -> Tensor:
    """Prune ``weight`` ``(out, in)`` to the N largest of every M consecutive rows of each column; a short last group keeps N too."""
    rows = weight.shape[0]
    return torch.ops.nmkernels.nm_prune(F.pad(weight.t(), (0, -rows % m)), n, m)[:, :rows].t()


def laid_out(pattern: Pattern, layout: str) -> Pattern:
    """The pattern of the packed form: 2:4 in tensor-core layouts, for sparser patterns too (``ops.pack.tensor_core_pattern``)."""
    return pattern if layout == "canonical" else HARDWARE


def _mask(weight: Tensor, pattern: Pattern) -> Tensor:
    return torch.ops.nmkernels.nm_mask(weight, pattern.n, pattern.m)


# ---- W̃ as a node of the autograd graph, for layers that torch multiplies: convolutions and stacked experts


def _forward(functional: bool, weight: Tensor, used: Tensor, layout: str, transform: WeightTransform, *extras: Tensor) -> Tensor:
    return used.clone() if functional else used.view_as(used)  # a view, so that autograd refuses in-place writes, as to the Parameter


def _remember(
    ctx: Any, functional: bool, result: Tensor, weight: Tensor, used: Tensor, layout: str, transform: WeightTransform, *extras: Tensor
) -> tuple[Tensor, ...]:
    ctx.layout, ctx.transform, ctx.reads = layout, transform, tuple(transform.reads)
    ctx.straight, ctx.weight_dtype = not transform.traits.own_gradient, weight.dtype
    ctx.weight = None if functional else weight  # not saved: an optimizer may step between forward and backward
    return () if ctx.straight and not functional else (weight, *extras)


def _backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    with torch.no_grad():
        dw, learned = _gradients(ctx, g, *saved)
    if torch.is_grad_enabled():
        weight, extras = saved[0] if ctx.weight is None else ctx.weight, saved[1:]
        dw = once(dw, g, weight, *extras)
        learned = {name: once(d, g, weight, *extras) for name, d in learned.items()}
    return dw, None, None, None, *map(learned.get, ctx.reads)


def _gradients(ctx: Any, g: Tensor, weight: Tensor | None = None, *extras: Tensor) -> tuple[Tensor | None, dict[str, Tensor | None]]:
    g = g.to(ctx.weight_dtype)
    if ctx.straight:
        return g, {}
    assert weight is not None
    matrices = [as_matrix(ordered(t, ctx.layout), ctx.layout) for t in (g, weight)]
    matrix, learned = ctx.transform.gradient(*matrices, *extras)
    dw = None if matrix is None or not ctx.needs_input_grad[0] else as_stored(matrix, ctx.layout, g.shape)
    return dw, dict(learned)


_Transformed, _FunctionalTransformed = with_functional(_forward, _remember, _backward)


def transformed(weight: Tensor, used: Tensor, transform: WeightTransform, extras: Sequence[Tensor] = (), layout: str = LINEAR) -> Tensor:
    """Return W̃ such that its gradient reaches the master weight by the transform's rule, or unchanged if the rule is straight through.

    The result is a view of ``used``, not a copy. Works with ``torch.func``.

    Args:
        weight: the master weight, stored as ``layout`` says; it receives the gradient, in its own dtype.
        used: W̃, stored like ``weight``, in the dtype of the multiplication.
        transform: the ``WeightTransform`` that made ``used`` from ``weight``.
        extras: the tensors that ``transform`` reads.
        layout: one of ``nmkernels.layouts``.

    Raises:
        NMError: on a second derivative, and in forward mode.

    Example:
        >>> rule, w = HardMask(Pattern("1:2"), chain=True), torch.tensor([[1.0, -2.0]], requires_grad=True)
        >>> transformed(w, rule(w.detach()), rule).sum().backward()
        >>> w.grad
        tensor([[0., 1.]])
    """
    result: Tensor = (_FunctionalTransformed if functional() else _Transformed).apply(weight, used, layout, transform, *extras)
    return result
