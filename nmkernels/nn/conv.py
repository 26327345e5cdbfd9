"""Convolutions: SparseConv2d, whose weight is masked along its input channels."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..layouts import CONV2D
from ..pattern import Pattern, PatternLike, ShapeError
from .linear import NMWeight


class SparseConv2d(NMWeight, nn.Conv2d):
    """An ``nn.Conv2d`` that uses the N:M form of its dense weight: y = x ∗ W̃ + b, W̃ = M(W) ⊙ W, groups along the input channels.

    The parameter ``weight`` ``(out, in, kh, kw)`` stays dense and receives the gradient ∂L/∂W̃, by the recipe's rule. Its memory is
    channels-last, so that the matrix ``(out, kh · kw · in)`` is a view of it, which masks and optimizers work on; loading and moving the
    layer keep it so. What a recipe does to the GEMMs of a linear layer does not reach a convolution, which torch does by itself.

    Args:
        in_channels, out_channels, ...: as for ``nn.Conv2d``; ``groups`` must be 1.
        pattern: ``"N:M"`` or a ``Pattern``; M must divide ``in_channels``.

    Raises:
        PatternError: the pattern is not usable. ShapeError: M does not divide ``in_channels``, or ``groups`` is not 1.

    Example:
        >>> layer = SparseConv2d(8, 4, 3, padding=1, pattern="2:4")
        >>> layer(torch.randn(1, 8, 5, 5)).shape, int((layer.effective_weight() != 0).sum())
        (torch.Size([1, 4, 5, 5]), 144)
    """

    layout = CONV2D
    own_gemms = False
    dense_type = nn.Conv2d

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: str | int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        pattern: PatternLike = "2:4",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        p = Pattern(pattern)
        check_groups("SparseConv2d", p, in_channels, groups)
        super().__init__(in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype)  # type: ignore[arg-type]
        self._start(p)

    def forward(self, x: Tensor) -> Tensor:
        """y = x ∗ W̃ + b; x ``(batch, in, height, width)`` or without batch. Under autocast the mask comes from the master weight."""
        self.ran = True
        return self._conv_forward(x, self.differentiable_weight(x), self.bias)

    def extra_repr(self) -> str:
        return f"{nn.Conv2d.extra_repr(self)}, {self._uses()}"


def check_groups(op: str, pattern: Pattern, in_channels: int, groups: int) -> None:
    """Raise ``ShapeError`` unless the groups of ``pattern`` lie among the input channels that one output sums over."""
    if groups != 1:
        raise ShapeError(
            f"{op}: groups={groups}: each output sums over {in_channels // groups} of the {in_channels} input channels, and only "
            "convolutions with groups=1 are supported. Use nn.Conv2d."
        )
    pattern.check_divides(op, in_channels, "in_channels")
