"""SparseLinear: a drop-in nn.Linear that trains a dense master weight and multiplies its N:M form."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..autograd import STRAIGHT_THROUGH, GemmPlan, HardMask, WeightTransform, linear
from ..pattern import Pattern, PatternLike
from ._autocast import autocast_dtype, castable
from ._used import UsedWeight


class NMWeight(nn.Module):
    """What every layer with an N:M weight shares: pattern, transform, plan, and the kept W̃.

    ``transform`` is W -> W̃, or None where the layer uses its weight as it is (a dense phase, or after ``finish``).
    ``train()`` and ``eval()`` never change which weight is used.
    """

    weight: Tensor
    bias: Tensor | None
    pattern: Pattern
    transposed = False
    """True where the parameter is stored ``(in, out)``, as Hugging Face's Conv1D does."""

    def _start(self, pattern: Pattern) -> None:
        self.pattern = pattern
        self.transform: WeightTransform | None = HardMask(self.pattern)
        self.plan: GemmPlan = STRAIGHT_THROUGH
        self.finished = False
        self.ran = False
        self.used = UsedWeight()

    @property
    def master(self) -> Tensor:
        """The dense master weight as ``(out, in)``: the parameter itself, or its transposed view."""
        return self.weight.t() if self.transposed else self.weight

    def used_weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """W̃ ``(out, in)``, the weight that the next forward pass multiplies, detached; in the weight's dtype unless told."""
        if self.transform is None:
            return self.master.detach().to(dtype or self.weight.dtype)
        return self.used.get(self.master, self.transform, dtype or self.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """y = x W̃ᵀ + b; x ``(..., in)``. Under autocast x and W̃ are cast, the mask still comes from the master weight."""
        self.ran = True
        if self.transform is None:
            return F.linear(x, self.master, self.bias)
        dtype, cast = self.weight.dtype, autocast_dtype(x)
        if cast is not None:
            dtype = cast if castable(dtype) else dtype
            x = x.to(cast) if castable(x.dtype) else x
        return linear(x, self.master, self.used.get(self.master, self.transform, dtype), self.bias, self.plan)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.used.drop()

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        # two moves may bring the weight back to its old address with other contents and the same version
        self.used.release()
        return super()._apply(*args, **kwargs)

    def extra_repr(self) -> str:
        """What ``print(model)`` shows: shapes, pattern, and which weight is used."""
        use = "finished" if self.finished else "dense" if self.transform is None else type(self.transform).__name__
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{sizes}, pattern={self.pattern}, uses={use}"


class SparseLinear(NMWeight, nn.Linear):  # type: ignore[misc]  # torch types bias as always there
    """An ``nn.Linear`` whose forward uses the N:M form of its dense weight: y = x W̃ᵀ + b, W̃ = M(W) ⊙ W.

    The parameter ``weight`` ``(out, in)`` stays dense and receives the straight-through gradient ∂L/∂W̃. Groups run along
    ``in_features``. On its own it is STE; recipes (``sparsify_``) change the transform with the phase of training.

    Args:
        in_features, out_features, bias, device, dtype: as for ``nn.Linear``.
        pattern: ``"N:M"`` or a ``Pattern``; M must divide ``in_features``.

    Raises:
        PatternError: the pattern is not usable.
        ShapeError: M does not divide ``in_features``.

    Example:
        >>> layer = SparseLinear(8, 4, pattern="2:4")
        >>> layer(torch.randn(3, 8)).shape, int((layer.used_weight() != 0).sum())
        (torch.Size([3, 4]), 16)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        pattern: PatternLike = "2:4",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        p = Pattern(pattern)
        p.check_divides("SparseLinear", in_features, "in_features")
        super().__init__(in_features, out_features, bias, device, dtype)
        self._start(p)


OWN_ATTRIBUTES = frozenset({"pattern", "transform", "plan", "finished", "ran", "used"})
"""What ``NMWeight._start`` adds to a module, and what ``make_dense_`` takes away again."""
