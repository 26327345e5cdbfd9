"""What a product by cuSPARSELt is described by: everything that its plan, and the choice of its algorithm, depend on."""

from __future__ import annotations

from typing import NamedTuple

import torch

CODES = {
    torch.float32: 0, torch.float16: 2, torch.int8: 3, torch.int32: 10, torch.bfloat16: 14, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29,
}  # fmt: skip
"""The library's code of each dtype, a ``cudaDataType``."""

RESULTS = {
    torch.float16: (torch.float16,),
    torch.bfloat16: (torch.bfloat16,),
    torch.int8: (torch.int32, torch.int8, torch.float16, torch.bfloat16),
    torch.float8_e4m3fn: (torch.bfloat16, torch.float16, torch.float32),
    torch.float8_e5m2: (torch.bfloat16, torch.float16, torch.float32),
}
"""Dtypes of the operands, and those that their product may have, the usual one first."""

ACTIVATIONS = {"": -1, "relu": 0, "gelu": 3}
"""Epilogues that the library knows, by its code of the attribute."""

LAYOUTS = {"nt": (False, True), "nn": (True, True), "tn": (True, False), "tn.packed": (False, False)}
"""Per layout whether the sparse operand is stored transposed, ``(cols, rows)``, and whether the dense one and the result lie by tokens."""


class Problem(NamedTuple):
    """D = f(S B + bias) + residual: S ``(rows, cols)`` is sparse along ``cols``, B ``(cols, width)`` dense.

    Args:
        layout: ``"nt"`` y = x Wᵀ, S = W; ``"nn"`` dx = g W, S = Wᵀ; ``"tn"`` dW = gᵀ x, S = gᵀ;
            ``"tn.packed"`` the same with S stored as gᵀ.
        dtype, out: of the operands and of the result.
        rows, cols, width: the sizes.
        bias: whether one is added, one number per row of D. activation: f, a key of ``ACTIVATIONS``. residual: whether one is added.
    """

    layout: str
    dtype: torch.dtype
    out: torch.dtype
    rows: int
    cols: int
    width: int
    bias: bool = False
    activation: str = ""
    residual: bool = False

    @property
    def by_token(self) -> bool:
        """Whether B is stored ``(width, cols)`` and D ``(width, rows)``."""
        return LAYOUTS[self.layout][1]

    @property
    def bias_dtype(self) -> torch.dtype:
        """The dtype of the bias: the result's, float32 with int8 operands."""
        return torch.float32 if self.dtype == torch.int8 else self.out

    @property
    def text(self) -> str:
        """The problem in words, without its width."""
        follows = (("bias", self.bias), (self.activation, self.activation), ("residual", self.residual))
        epilogue = "+".join(name for name, there in follows if there)
        names = (str(self.dtype).removeprefix("torch."), str(self.out).removeprefix("torch."))
        return "|".join((self.layout, *names, epilogue or "plain", f"{self.rows}x{self.cols}"))


class Algorithm(NamedTuple):
    """One of the library's ways to do a product: its id, -1 for the library's default; into how many parts the sum is split, and how."""

    id: int = -1
    splits: int = 1
    mode: int = 0

    def __str__(self) -> str:
        name = "the default algorithm" if self.id < 0 else f"algorithm {self.id}"
        how = {0: "", 1: " in one kernel", 2: " in two kernels"}.get(self.mode, f" in mode {self.mode}")
        return f"{name}, sum split in {self.splits}{how}" if self.splits > 1 or self.mode else name


def misfit(dtype: torch.dtype, rows: int, cols: int) -> str:
    """Why a sparse operand of this size is not taken; empty if it is."""
    step = 32 if dtype.itemsize == 1 else 16
    fits = rows and cols and not rows % step and not cols % step
    return "" if fits else f"rows and columns must be multiples of {step}, not ({rows}, {cols})"


def width_step(dtype: torch.dtype) -> int:
    """What the width of the dense operand must be a multiple of."""
    return 16 // dtype.itemsize
