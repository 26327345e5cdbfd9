"""The calls whose Triton kernels are compiled without a GPU, and what the design wants of them: one line per case.

Operands are on the meta device, so they cost nothing; their shapes only tell the compiler which sizes are multiples of 16.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nmkernels import Pattern

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
SHORT = {FP32: "fp32", BF16: "bf16", FP16: "fp16"}
COMMON = ("2:4", "1:4", "1:8", "2:8")
"""The patterns for which the memory-bound kernels are built to read 16 bytes at once, in every dtype."""
ODD = ("1:16", "4:32", "3:5", "8:256")


@dataclass(frozen=True)
class Case:
    """One call of an op. ``load`` and ``store``: the bits that its first kernel must move at once; 0 where nothing is asked."""

    op: str
    name: str
    args: tuple[Any, ...]
    load: int = 0
    store: int = 0
    matrix: bool = False
    """It must use the tensor cores: mma.sync on sm_80, wgmma on sm_90."""
    sampled: bool = False
    """The test compiles it too, not only the table."""


def meta(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    """A tensor without memory, counted by the compiler as one whose address is a multiple of 16."""
    return torch.empty(shape, dtype=dtype, device="meta")


def matrix(pattern: Pattern, dtype: torch.dtype, rows: int = 4096) -> Tensor:
    """A weight of 4096 rows, or so, and as many groups in a row as make a number divisible by 16."""
    return meta(rows, pattern.m * 512, dtype=dtype)


def values_at_once(p: Pattern, dtype: torch.dtype) -> int:
    """Bits of the values that a thread packs of its 16 elements, as many as go at once."""
    return min(128, 16 * p.n * dtype.itemsize * 8 // p.m)


def dense(op: str, *more: Any) -> Iterator[Case]:
    """Ops of (w, n, m), memory-bound: wide accesses for the common patterns, only no spills for the odd ones."""
    for text in COMMON:
        p = Pattern(text)
        for dtype in (FP32, BF16, FP16):
            store = values_at_once(p, dtype) if op == "nm_compress" else 128
            sampled = (text, dtype) in {("2:4", FP32), ("2:4", BF16), ("2:8", BF16)}
            yield Case(op, f"{text} {SHORT[dtype]}", (matrix(p, dtype), p.n, p.m, *more), 128, store, sampled=sampled)
    for text in ODD:
        p = Pattern(text)
        yield Case(op, f"{text} bf16", (matrix(p, BF16), p.n, p.m, *more), sampled=text == "4:32")
    yield Case(op, "2:4 bf16 17x20", (meta(17, 20, dtype=BF16), 2, 4, *more))


def packed(p: Pattern, dtype: torch.dtype, rows: int = 4096, cols: int = 0) -> tuple[Tensor, Tensor]:
    """values and indices of ``matrix``."""
    cols = cols or p.m * 512
    return meta(rows, p.kept(cols), dtype=dtype), meta(rows, p.index_bytes(cols), dtype=torch.uint8)


def decompress() -> Iterator[Case]:
    """The way back, whose narrow side is the load."""
    for text in (*COMMON, *ODD):
        p, common = Pattern(text), text in COMMON
        for dtype in (FP32, BF16) if common else (BF16,):
            args, load = (*packed(p, dtype), p.n, p.m, p.m * 512), values_at_once(p, dtype)
            sampled = text in ("2:4", "4:32")
            yield Case("nm_decompress", f"{text} {SHORT[dtype]}", args, load * common, 128 * common, sampled=sampled)


def cases() -> list[Case]:
    """Every case, in the order of the table."""
    return [
        *dense("nm_mask"),
        *dense("nm_prune"),
        *dense("nm_soft_threshold"),
        *dense("nm_compress", None),
        Case("nm_compress", "2:4 bf16 with a mask", (meta(4096, 2048, dtype=BF16), 2, 4, meta(4096, 2048, dtype=torch.bool)), 128, 128),
        *decompress(),
    ]
