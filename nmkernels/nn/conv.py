"""Convolutions: SparseConv2d trains a weight that is N:M along its input channels, CompressedConv2d is its form for inference.

A compressed convolution is computed either by torch, with the weight in dense layout (kept, or expanded at every call), or as a GEMM of the
input's patches ``(positions, kh · kw · in)`` and the compressed weight, where that is estimated to be faster.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from ..arguments import as_int, whole_number
from ..dispatch import forced_backend
from ..gemm import estimate
from ..gemm.choose import estimable, setting
from ..gemm.methods import DENSE, EXPAND
from ..gemm.problem import Problem
from ..layouts import CONV2D, as_stored
from ..pattern import DtypeError, Pattern, PatternLike, ShapeError
from ..timing import TABLE
from .compressed import SMALL_BYTES, CompressedLinear
from .linear import under_autocast
from .traces import PROXY, constant, is_tracing, leaf
from .weight import NMWeight

PATCHES = "patches"
"""The method that multiplies the compressed weight."""

CLEARLY = 1.25
"""Patches are used only if their estimate is faster than dense by this factor, because estimates are not fitted to convolutions."""
BANDWIDTH = 4e9
"""Bytes per second of gathering patches (strided reads) on a CPU."""


class SparseConv2d(NMWeight, nn.Conv2d):
    """An ``nn.Conv2d`` that uses the N:M form of its weight, y = x ∗ W̃ + b, W̃ = M(W) ⊙ W, with groups along the input channels.

    The parameter ``weight`` ``(out, in, kh, kw)`` stays dense and receives the gradient ∂L/∂W̃ by the recipe's rule. Its memory format is
    channels-last, also after loading and moving the layer, so that masks and optimizers can use a view of it as the matrix
    ``(out, kh · kw · in)``. The recipe's plan for GEMMs has no effect, since torch computes the convolution.

    Args:
        in_channels, out_channels, ...: as for ``nn.Conv2d``; ``groups`` must be 1.
        pattern: ``"N:M"`` or a ``Pattern``; M must divide ``in_channels``.

    Raises:
        PatternError: the pattern is invalid.
        ShapeError: M does not divide ``in_channels``, ``groups`` is not 1, or a size is not a whole number.

    Example:
        >>> layer = SparseConv2d(8, 4, 3, padding=1, pattern="2:4")
        >>> layer(torch.randn(1, 8, 5, 5)).shape, int((layer.effective_weight() != 0).sum())
        (torch.Size([1, 4, 5, 5]), 144)
    """

    layout = CONV2D
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
        p, groups = Pattern(pattern), whole_number(ShapeError, "SparseConv2d: groups", groups)
        in_channels = whole_number(ShapeError, "SparseConv2d: in_channels", in_channels, least=0)
        out_channels = whole_number(ShapeError, "SparseConv2d: out_channels", out_channels, least=0)
        check_groups("SparseConv2d", p, in_channels, groups)
        sizes = check_sizes("SparseConv2d", kernel_size, stride, padding, dilation)
        super().__init__(in_channels, out_channels, *sizes, groups, bias, padding_mode, device, dtype)  # type: ignore[arg-type]
        self._start(p)

    def forward(self, input: Tensor) -> Tensor:
        """y = x ∗ W̃ + b; x ``(batch, in, height, width)`` or without batch. Under autocast the mask is computed from the master weight."""
        x = input
        if isinstance(x, PROXY):
            return leaf(self, x)
        self.ran = True
        if "weight" not in self._parameters:
            self.check_computed()
        used = self.differentiable_weight(self.weight, under_autocast(x, self.weight.dtype))
        return self._conv_forward(x, as_ordered(x, used), self.bias)

    def extra_repr(self) -> str:
        return f"{nn.Conv2d.extra_repr(self)}, {self._uses()}"


class CompressedConv2d(CompressedLinear):
    """A convolution y = x ∗ W + b that stores W compressed, with groups along the input channels.

    The weight is compressed as the matrix ``(out, kh · kw · in)``: kernel positions row by row, and the input channels of each. Multiplying
    it is faster than dense for few positions and many channels, or patterns sparser than 2:4; otherwise torch convolves with the expanded
    weight. An estimate decides, unless ``NMKERNELS_CHOICE`` is set.

    Args:
        weight: the compressed weight of shape ``(out, kh · kw · in)``, a constant.
        kernel_size: ``(kh, kw)``, or one number for both.
        bias, stride, padding, dilation, padding_mode: as of ``nn.Conv2d``.
        keep_dense: as of ``CompressedLinear``.

    Raises:
        ShapeError: the weight is not a matrix of that kernel, M does not divide the input channels, or a size is not a whole number.
        DtypeError: the weight has integers as values.

    Example:
        >>> conv = torch.nn.Conv2d(8, 4, 3)
        >>> c = ops.compress(conv.weight.detach().permute(0, 2, 3, 1).reshape(4, 72), "2:4")
        >>> CompressedConv2d(c, 3, padding=1)(torch.randn(1, 8, 5, 5)).shape
        torch.Size([1, 4, 5, 5])
    """

    def __init__(
        self,
        weight: ops.Compressed,
        kernel_size: int | tuple[int, int],
        bias: Tensor | None = None,
        stride: int | tuple[int, int] = 1,
        padding: str | int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        padding_mode: str = "zeros",
        keep_dense: bool = False,
    ) -> None:
        sizes = check_sizes("CompressedConv2d", kernel_size, stride, padding, dilation)
        height, width = sizes[0]
        if len(weight.shape) != 2 or weight.shape[1] % (height * width):
            raise ShapeError(
                f"CompressedConv2d: the weight must be a matrix (out, kh*kw*in) of a kernel ({height}, {width}), got {tuple(weight.shape)}."
            )
        if weight.step is not None:
            raise DtypeError(f"CompressedConv2d: the weight has {weight.kind} values; convolutions take floating-point ones.")
        channels = weight.shape[1] // (height * width)
        weight.pattern.check_divides("CompressedConv2d", channels, "in_channels")
        super().__init__(weight, bias, CONV2D, keep_dense)
        # nn.Conv2d checks the other arguments and resolves the padding
        shell = nn.Conv2d(channels, weight.shape[0], *sizes, 1, False, padding_mode, device="meta")  # type: ignore[arg-type]
        self.__dict__.update({name: value for name, value in vars(shell).items() if name not in self.__dict__})

    layouts = (CONV2D,)
    in_channels: int
    out_channels: int
    kernel_size: tuple[int, int]
    stride: tuple[int, int]
    padding: str | tuple[int, int]
    dilation: tuple[int, int]
    padding_mode: str

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """``(out, in, kh, kw)``, that of the dense layer's weight."""
        return self.out_channels, self.in_channels, *self.kernel_size

    @property
    def pointwise(self) -> bool:
        """Whether each output depends on one position of the input, so that the layer is linear in the channels."""
        return self.kernel_size == (1, 1) and self.stride == (1, 1) and self.padding in ((0, 0), "valid", "same")

    def forward(self, input: Tensor) -> Tensor:
        """y = x ∗ W + b; x ``(batch, in, height, width)`` or without batch, in the weight's dtype, or any floating dtype under autocast."""
        x = input
        if isinstance(x, PROXY):
            return leaf(self, x)
        if is_tracing():
            stored = constant(lambda: as_stored(self.dense(), CONV2D, self.stored_shape))
            return nn.Conv2d._conv_forward(self, x, stored, self.bias)  # type: ignore[arg-type]
        if x.dim() not in (3, 4) or x.shape[-3] != self.in_channels:
            raise ShapeError(f"CompressedConv2d: x has shape {tuple(x.shape)}; it must be (batch, {self.in_channels}, height, width).")
        if x.dim() == 3:
            return self.forward(x[None])[0]
        if self.pointwise:
            y: Tensor = super().forward(x.movedim(1, -1).contiguous())
            return as_ordered(x, y.movedim(-1, 1))
        x, weight = self._operands(x)
        return self._by(self._how(x), x, weight)

    def as_op(self, x: Tensor) -> tuple[tuple[Any, ...], str]:
        batch = x[None] if x.dim() == 3 else x
        if self.pointwise:
            return super().as_op(batch.movedim(1, -1).contiguous())
        args, instead = super().as_op(self._patches(batch))
        return args, instead if self._how(batch) == PATCHES else "not called by this layer: torch convolves with the dense weight"

    def _by(self, how: str, x: Tensor, weight: ops.Compressed) -> Tensor:
        bias = self.bias if self.bias is None or self.bias.dtype == x.dtype else self.bias.to(x.dtype)
        if how == PATCHES:
            y: Tensor = self._chosen(self._patches(x), weight, bias)
            return as_ordered(x, y.movedim(-1, 1))
        matrix = weight.dense() if how == EXPAND else weight.layout("dense", ops.Compressed.dense)
        stored = as_ordered(x, as_stored(matrix, CONV2D, self.stored_shape))
        result: Tensor = nn.Conv2d._conv_forward(self, x, stored, bias)  # type: ignore[arg-type]
        return result

    def _patches(self, x: Tensor) -> Tensor:
        """The input patch of each output position, ``(batch, height, width, kh · kw · in)``."""
        sides: Any = self._reversed_padding_repeated_twice
        if any(sides):
            x = F.pad(x, sides) if self.padding_mode == "zeros" else F.pad(x, sides, self.padding_mode)
        x = x.permute(0, 2, 3, 1)
        for dim, (size, step, apart) in enumerate(zip(self.kernel_size, self.stride, self.dilation, strict=True), 1):
            x = x.unfold(dim, (size - 1) * apart + 1, step)[..., ::apart]
        return x.permute(0, 1, 2, 4, 5, 3).flatten(3)

    def _how(self, x: Tensor) -> str:
        """The method for the input x: ``PATCHES``, or by torch with the dense weight, kept or expanded."""
        if torch.compiler.is_compiling() or type(x.numel()) is not int:
            return EXPAND
        dense = self.keep_dense or (x.is_cpu and math.prod(self.stored_shape) * x.dtype.itemsize <= SMALL_BYTES)
        first, how = DENSE.name if dense else EXPAND, setting()
        if torch._C._get_deterministic_algorithms() or how == "dense":
            return first
        if how == "packed" or forced_backend():
            return PATCHES
        kind = x.shape, x.dtype, x.device, dense, TABLE.revision
        route: str | None = self._direct.get(kind)
        if route is None:
            left, right, top, bottom = self._reversed_padding_repeated_twice  # type: ignore[misc]
            sizes = zip((x.shape[2] + top + bottom, x.shape[3] + left + right), self.kernel_size, self.dilation, self.stride, strict=True)
            tokens = len(x) * math.prod(max(0, (size - (k - 1) * apart - 1) // step + 1) for size, k, apart, step in sizes)
            forms, n, m = ("dense", "rows") if dense else ("rows",), self.pattern.n, self.pattern.m
            p = Problem("fprop", tokens, self.out_features, self.in_features, n, m, x.dtype, x.device, forms)
            faster = x.is_cpu and tokens and estimable(p)
            if faster:
                gather = 2 * tokens * self.in_features * x.dtype.itemsize / BANDWIDTH
                faster = CLEARLY * (estimate.seconds("sparse", p) + gather) < estimate.seconds(first, p)
            route = self._direct.put(kind, PATCHES if faster else first)
        return route

    def problems(self, tokens: int) -> list[tuple[Problem, ...]]:
        """The GEMM of a 1×1 convolution; none for others, whose method follows from the estimate."""
        return super().problems(tokens) if self.pointwise else []

    def extra_repr(self) -> str:
        shown = nn.Conv2d.extra_repr(self)  # type: ignore[arg-type]
        return f"{shown}, pattern={self.pattern}, dtype={self.values.dtype}{', keep_dense=True' if self.keep_dense else ''}"


def as_ordered(x: Tensor, result: Tensor) -> Tensor:
    """Return ``result``, a channels-last output or weight of a convolution of x, as a contiguous copy unless x is channels-last too.

    torch's convolution returns a channels-last result if x or the weight is channels-last, and then ``result.view(batch, -1)`` fails.
    """
    last = x.stride(-3) == 1 and not x.is_contiguous()  # is_contiguous(memory_format=) does not work under torch.vmap
    # not contiguous(): for a 1x1 kernel both formats are the same memory, but torch checks the strides
    return result if last else result.clone(memory_format=torch.contiguous_format)


def check_groups(op: str, pattern: Pattern, in_channels: int, groups: int) -> None:
    """Raise ``ShapeError`` unless M divides the input channels that each output sums over, all of them (``groups=1``)."""
    if groups != 1:
        raise ShapeError(
            f"{op}: groups={groups}: each output sums over {in_channels // groups} of the {in_channels} input channels, and only "
            "convolutions with groups=1 are supported. Use nn.Conv2d."
        )
    pattern.check_divides(op, in_channels, "in_channels")


def check_sizes(op: str, kernel_size: Any, stride: Any, padding: Any, dilation: Any) -> tuple[Any, Any, Any, Any]:
    """The arguments as ``nn.Conv2d`` keeps them: two whole numbers each, or the padding's name."""
    padding = padding if isinstance(padding, str) and padding in ("valid", "same") else _pair(f"{op}: padding", padding, 0)
    return _pair(f"{op}: kernel_size", kernel_size), _pair(f"{op}: stride", stride), padding, _pair(f"{op}: dilation", dilation)


def _pair(what: str, value: Any, least: int = 1) -> tuple[int, int]:
    try:
        sizes = (value, value) if as_int(value) is not None else tuple(value)
    except TypeError:
        sizes = ()
    if len(sizes) != 2:
        raise ShapeError(f"{what}={value!r} must be a whole number of at least {least}, or two.")
    first, second = (whole_number(ShapeError, what, size, least) for size in sizes)
    return first, second
