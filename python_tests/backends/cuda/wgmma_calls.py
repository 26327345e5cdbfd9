"""Calls of the wgmma.sp kernel without a GPU: what the host would launch, run as nvcc's PTX by ``python_tests.ptx``."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import cache, lru_cache, reduce
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from nmkernels.backends.cuda import core
from nmkernels.backends.cuda.core import DTYPES
from nmkernels.backends.cuda.linear import ACTIVATIONS
from nmkernels.backends.cuda.quantize import EIGHT_BITS
from nmkernels.backends.shared import address
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


EIGHT_TILES = {True: {"tall": (128, 192, 5, 2), "square": (128, 128, 7, 2)}, False: {"wide": (256, 192, 4, 2), "square": (128, 128, 7, 2)}}
"""The same in 8 bits: where sums are promoted, and where not."""
EIGHT_KINDS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.int8: "a"}
"""The types in the kernels' names; a is int8_t's."""


def several(shape: tuple[int, int, int, int], depth: int = 64, clusters: int = 1) -> tuple[int, int, int]:
    """m, n, k of which so many clusters have several tiles each, with rows and columns left over.

    Slabs are odd in number, and more than the stages: a tile begins at another stage than the one before it.
    """
    rows, cols, stages, cluster = shape
    down = across = math.isqrt(2 * clusters) + 1
    return rows * cluster * (down - 1) + 64, cols * across + 8, depth * (stages + 1 + stages % 2)


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
def text(tile: str, dtype: torch.dtype = torch.bfloat16, by_column: bool = False, kernel: str = "wgmma_sp_kernel") -> str:
    """The PTX of one kernel."""
    head, *kernels = re.split(r"^(?=\.entry|\.visible \.entry)", whole_text(), flags=re.M)
    shape = "".join(f"Li{n}E" for n in TILES[tile])
    name = f"{kernel}INS_4{'bf16' if dtype == torch.bfloat16 else 'fp16'}ENS1_8WideTileI{shape}EELb{int(by_column)}E"
    (one,) = (k for k in kernels if name in k.partition("(")[0])
    return head + one


@lru_cache(32)
def parsed(code: str) -> Kernel:
    return parse(code)


def workspace(tile: str, m: int, n: int, k: int, processors: int) -> Tensor:
    """Of stream-K, poisoned, with no element more than it takes: the sums of every piece of a tile."""
    rows, cols, _, cluster = TILES[tile]
    tiles, clusters, slabs = -(-m // (rows * cluster)) * -(-n // cols), max(1, processors // cluster), k // 64
    left = tiles % clusters
    if left == tiles:
        clusters = -(-left * slabs // -(-left * slabs // clusters))
    return fill_poison(torch.empty((clusters + left) * cluster * rows * cols))


def encoded(maps: Sequence[int], *kinds: tuple[int, int]) -> list[bytes]:
    """The three maps of a launch, for elements of these kinds (CUtensorMapDataType, bytes)."""
    made = []
    for i, (kind, size) in enumerate(kinds):
        to, inner, outer, *box, code = maps[6 * i : 6 * i + 6]
        made.append(encode(kind, to, (inner, outer), (size * inner,), box, swizzle=SPANS[code]))
    return made


def added(parts: Tensor) -> Tensor:
    """The sum of parts of k, in order."""
    return reduce(torch.add, parts.unbind())


def launch(
    tile: str, values: Tensor, meta: Tensor, x: Tensor, y: Tensor, by_column: bool = False, splits: int = 1, processors: int = 4,
    bias: Tensor | None = None, residual: Tensor | None = None, parts: Tensor | None = None, activation: str = "",
) -> tuple[list[bytes], bytes, Any, int, int, int]:  # fmt: skip
    """Maps, the fourth and the fifth parameter, blocks, threads and shared memory."""
    m, k, n = values.shape[0], 2 * values.shape[1], x.shape[1 if by_column else 0]
    maps, *rest = host().gemm_wgmma_launch(
        *map(address, (values, meta, x, bias, residual, y, parts)), ACTIVATIONS[activation], m, n, k, by_column, list(TILES).index(tile),
        splits, y.dtype != x.dtype, processors,
    )  # fmt: skip
    return encoded(maps, *[(TYPES[x.dtype], 2)] * 3), *rest


def multiply(
    tile: str, values: Tensor, meta: Tensor, x: Tensor, by_column: bool = False, bias: Tensor | None = None, activation: str = "",
    residual: Tensor | None = None, splits: int = 1, mode: str | int = "earliest", processors: int = 4,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """D; of several parts of k, which a kernel of its own finishes, their sum; with ``splits`` 0 by stream-K, finished in the emulator."""
    m, k, n = values.shape[0], 2 * values.shape[1], x.shape[1 if by_column else 0]
    y = fill_poison(x.new_empty((m, n) if by_column else (n, m), dtype=out_dtype or x.dtype))
    parts = workspace(tile, m, n, k, processors) if not splits else fill_poison(torch.empty(splits, *y.shape)) if splits > 1 else None
    given = {"bias": bias, "residual": residual, "parts": parts, "activation": activation}
    maps, *work, blocks, threads, shared = launch(tile, values, meta, x, y, by_column, splits, processors, **given)
    one = parsed(text(tile, x.dtype, by_column, "wgmma_sp_kernel" if splits else "wgmma_stream_k_kernel"))
    memory = [t for t in (values, meta, x, bias, residual, y, parts) if t is not None]
    execute(one, blocks, [*maps, *work], memory, mode=mode, threads=threads, cluster=TILES[tile][3], shared=shared)
    if not splits:
        host().gemm_stream_k_finish(
            *map(address, (bias, residual, y, parts)), DTYPES[x.dtype], ACTIVATIONS[activation], m, n, k, by_column,
            list(TILES).index(tile), y.dtype != x.dtype, processors, 0, 0,
        )  # fmt: skip
    return y if parts is None or not splits else added(parts).to(y.dtype)


# ---- 8 bits


@cache
def eight_texts() -> tuple[str, list[str]]:
    """The head of the module, and each kernel."""
    whole = ptx(CSRC / "cuda" / "gemm" / "wgmma_sp_8bit.cu", "sm_90a", "-DNM_SM90A")
    head, *kernels = re.split(r"^(?=\.entry|\.visible \.entry)", whole, flags=re.M)
    return head, kernels


@lru_cache(32)
def eight_text(a: torch.dtype, b: torch.dtype, tile: str, promotes: bool, by_column: bool) -> str:
    """The PTX of one kernel."""
    head, kernels = eight_texts()
    types = [k if k == "a" else rf"NS_\d{k}E" for k in (EIGHT_KINDS[a], EIGHT_KINDS[b])]
    second = r"S\d_" if a == b and a != torch.int8 else types[1]
    shape = "".join(f"Li{n}E" for n in EIGHT_TILES[promotes][tile])
    name = rf"EightBitsI{types[0]}{second}Lb{int(promotes)}EEENS\d_9EightTileI{shape}EELb{int(by_column)}E"
    (one,) = (k for k in kernels if re.search(name, k.partition("(")[0]))
    return head + one


def launch_eight(
    tensors: Sequence[Tensor | None], kinds: Sequence[Any], m: int, n: int, k: int, by_column: bool, tile: int, splits: int,
    processors: int = 4, mode: str | int = "earliest", code: str = "", accumulator: int = 0,
) -> None:  # fmt: skip
    """What the core does for the arguments of its ``gemm_wgmma_sp_8bit``, with tensors for addresses; parts of k are summed up too.

    ``accumulator``: see ``execute``.
    """
    values, _, x, _, _, _, y, parts = tensors
    assert values is not None and x is not None and y is not None
    maps, parameter, tiles, blocks, threads, shared = host().gemm_wgmma_8bit_launch(
        *map(address, tensors), *kinds, m, n, k, by_column, tile, splits, processors
    )
    promotes = kinds[-1]
    name, (*_, cluster) = list(EIGHT_TILES[promotes].items())[tile]
    one, memory = parsed(code or eight_text(values.dtype, x.dtype, name, promotes, by_column)), [t for t in tensors if t is not None]
    how = {"mode": mode, "threads": threads, "cluster": cluster, "shared": shared, "accumulator": accumulator}
    execute(one, blocks, [*encoded(maps, (0, 1), (0, 1), (9, 2)), parameter, tiles], memory, **how)  # bytes, and bf16
    if parts is not None:
        y.copy_(added(parts).reshape(y.shape))


def multiply_eight(
    tile: str, values: Tensor, meta: Tensor, step: Tensor, x: Tensor, x_step: Tensor, promotes: bool = False, by_column: bool = False,
    bias: Tensor | None = None, dtype: torch.dtype = torch.bfloat16, splits: int = 1, mode: str | int = "earliest", processors: int = 4,
    code: str = "", accumulator: int = 0,
) -> Tensor:  # fmt: skip
    """D of 8-bit operands; of several parts of k their sum."""
    m, n, k = values.shape[0], x.shape[0], x.shape[1]
    y = fill_poison(torch.empty((m, n) if by_column else (n, m), dtype=dtype))
    parts = fill_poison(torch.empty(splits, *y.shape)) if splits > 1 else None
    kinds = DTYPES[dtype], EIGHT_BITS[values.dtype], EIGHT_BITS[x.dtype], step.numel() > 1, x_step.numel() > 1, promotes
    number = list(EIGHT_TILES[promotes]).index(tile)
    tensors = values, meta, x, step, x_step, bias, y, parts
    launch_eight(tensors, kinds, m, n, k, by_column, number, splits, processors, mode, code, accumulator)
    return y
