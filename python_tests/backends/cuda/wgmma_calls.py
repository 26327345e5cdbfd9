"""Calls of the wgmma.sp kernel without a GPU: what the host would launch, run as nvcc's PTX by ``python_tests.ptx``."""

from __future__ import annotations

import re
from functools import cache, lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from nmkernels.backends.cuda import core
from nmkernels.backends.cuda.linear import ACTIVATIONS
from nmkernels.testing import fill_poison
from python_tests.ptx.machine import execute
from python_tests.ptx.nvcc import CSRC, NVCC, ptx
from python_tests.ptx.parse import Kernel, parse
from python_tests.ptx.tensor_map import encode

TILES = {
    "wide": (256, 192, 4, 2),
    "broad": (256, 128, 5, 2),
    "square": (128, 128, 7, 2),
    "narrow": (128, 64, 10, 1),
    "thin": (128, 16, 12, 1),
}
"""By their code: rows and columns of D, stages, blocks of a cluster."""
BY_COLUMN = tuple(TILES)[:4]
SPANS = {1: 3, 2: 2}
"""CUtensorMapSwizzle by a descriptor's code."""
TYPES = {torch.bfloat16: 9, torch.float16: 6}
"""CUtensorMapDataType."""


def missing() -> str:
    """What is not here to run it."""
    if NVCC is None or not CSRC.is_dir():
        return "no nvcc, or not a source checkout"
    return "" if core.emulator_built() else "the emulator, which has the host's part, is not built"


def host() -> Any:
    return import_module("nmkernels._emulated")


@cache
def whole_text() -> str:
    return ptx(CSRC / "cuda" / "gemm" / "wgmma_sp.cu", "sm_90a", "-DNM_SM90A")


@lru_cache(32)
def text(tile: str, dtype: torch.dtype = torch.bfloat16, by_column: bool = False) -> str:
    """The PTX of one kernel."""
    head, *kernels = re.split(r"^(?=\.entry|\.visible \.entry)", whole_text(), flags=re.M)
    shape = "".join(f"Li{n}E" for n in TILES[tile])
    name = f"wgmma_sp_kernelINS_4{'bf16' if dtype == torch.bfloat16 else 'fp16'}ENS1_8WideTileI{shape}EELb{int(by_column)}E"
    (one,) = (k for k in kernels if name in k.partition("(")[0])
    return head + one


@lru_cache(32)
def parsed(code: str) -> Kernel:
    return parse(code)


def launch(
    tile: str,
    values: Tensor,
    meta: Tensor,
    x: Tensor,
    y: Tensor,
    by_column: bool = False,
    splits: int = 1,
    processors: int = 4,
    **given: Any,
) -> tuple[list[bytes], bytes, int, int, int, int]:
    """Maps, the fourth parameter, tiles, blocks, threads and shared memory."""
    m, k, n = values.shape[0], 2 * values.shape[1], x.shape[1 if by_column else 0]
    at = {name: 0 if t is None else t.data_ptr() for name, t in given.items() if name != "activation"}
    maps, parameter, *grid = host().gemm_wgmma_launch(
        values.data_ptr(), meta.data_ptr(), x.data_ptr(), at.get("bias", 0), at.get("residual", 0), y.data_ptr(), at.get("parts", 0),
        ACTIVATIONS[given.get("activation", "")], m, n, k, by_column, list(TILES).index(tile), splits, processors,
    )  # fmt: skip
    told = [maps[i : i + 6] for i in (0, 6, 12)]
    encoded = [encode(TYPES[x.dtype], to, (inner, outer), (2 * inner,), box, swizzle=SPANS[code]) for to, inner, outer, *box, code in told]
    return encoded, parameter, *grid


def multiply(
    tile: str, values: Tensor, meta: Tensor, x: Tensor, by_column: bool = False, bias: Tensor | None = None, activation: str = "",
    residual: Tensor | None = None, splits: int = 1, mode: str | int = "earliest", processors: int = 4,
) -> Tensor:  # fmt: skip
    """D; of several parts of k their sum, which a kernel of its own finishes."""
    m, n = values.shape[0], x.shape[1 if by_column else 0]
    y = fill_poison(x.new_empty((m, n) if by_column else (n, m)))
    parts = fill_poison(torch.empty(splits, *y.shape)) if splits > 1 else None
    given = {"bias": bias, "residual": residual, "parts": parts}
    maps, parameter, tiles, blocks, threads, shared = launch(
        tile, values, meta, x, y, by_column, splits, processors, activation=activation, **given
    )
    memory = [t for t in (values, meta, x, y, *given.values()) if t is not None]
    one = parsed(text(tile, x.dtype, by_column))
    execute(one, blocks, [*maps, parameter, tiles], memory, mode=mode, threads=threads, cluster=TILES[tile][3], shared=shared)
    if parts is None:
        return y
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.to(x.dtype)
