"""The calls whose Triton kernels are compiled without a GPU, and the requirements on them: one line per case.

Operands are on the meta device and take no memory; their shapes only tell the compiler which sizes are multiples of 16.
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
"""The patterns for which the memory-bound kernels read 16 bytes at once, in every dtype."""
ODD = ("1:16", "4:32", "3:5", "8:256")


@dataclass(frozen=True)
class OpCall:
    """One call of an op. ``load`` and ``store``: the required width in bits of its main kernel's accesses; 0 for none."""

    op: str
    name: str
    args: tuple[Any, ...]
    load: int = 0
    store: int = 0
    matrix: bool = False
    """Whether it must use the tensor cores."""
    sampled: bool = False
    """Whether the test compiles it too, not only the table."""
    kernel: str = ""
    """The main kernel among several; by default the first."""
    loose: tuple[str, ...] = ()
    """Allowed suffixes of instructions that are not one operation rounded once: none in exact ops, all in GEMMs."""


def meta(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    """A tensor without memory, which the compiler treats as aligned to 16 bytes."""
    return torch.empty(shape, dtype=dtype, device="meta")


def matrix(pattern: Pattern, dtype: torch.dtype, rows: int = 4096) -> Tensor:
    """A weight of about 4096 rows, whose number of groups in a row is divisible by 16."""
    return meta(rows, pattern.m * 512, dtype=dtype)


def values_at_once(p: Pattern, dtype: torch.dtype) -> int:
    """Bits of the values that a thread packs from its 16 elements, at most the widest store."""
    return min(128, 16 * p.n * dtype.itemsize * 8 // p.m)


def dense(op: str, *more: Any) -> Iterator[OpCall]:
    """Memory-bound ops of (w, n, m): wide accesses for the common patterns, and only no spills for the odd ones."""
    for text in COMMON:
        p = Pattern(text)
        for dtype in (FP32, BF16, FP16):
            store = values_at_once(p, dtype) if op == "nm_compress" else 128
            sampled = (text, dtype) in {("2:4", FP32), ("2:4", BF16), ("2:8", BF16)}
            yield OpCall(op, f"{text} {SHORT[dtype]}", (matrix(p, dtype), p.n, p.m, *more), 128, store, sampled=sampled)
    for text in ODD:
        p = Pattern(text)
        yield OpCall(op, f"{text} bf16", (matrix(p, BF16), p.n, p.m, *more), sampled=text == "4:32")
    yield OpCall(op, "2:4 bf16 17x20", (meta(17, 20, dtype=BF16), 2, 4, *more))


def packed(p: Pattern, dtype: torch.dtype, rows: int = 4096, cols: int = 0) -> tuple[Tensor, Tensor]:
    """values and indices of ``matrix``."""
    cols = cols or p.m * 512
    return meta(rows, p.kept(cols), dtype=dtype), meta(rows, p.index_bytes(cols), dtype=torch.uint8)


def decompress() -> Iterator[OpCall]:
    """Decompression, whose narrow side is the load."""
    for text in (*COMMON, *ODD):
        p, common = Pattern(text), text in COMMON
        for dtype in (FP32, BF16) if common else (BF16,):
            args, load = (*packed(p, dtype), p.n, p.m, p.m * 512), values_at_once(p, dtype)
            sampled = text in ("2:4", "4:32")
            yield OpCall("nm_decompress", f"{text} {SHORT[dtype]}", args, load * common, 128 * common, sampled=sampled)


def mvue(op: str) -> Iterator[OpCall]:
    """Along the last dimension, and along tokens."""
    for dim, where in ((1, ""), (0, " along tokens")):
        for text in ("2:4", "4:32", "3:5"):
            p, common = Pattern(text), text == "2:4"
            for dtype in (FP32, BF16) if common else (BF16,):
                g = meta(4096, p.m * 512, dtype=dtype) if dim else meta(p.m * 512, 4096, dtype=dtype)
                args = (g, p.n, p.m, dim, meta(2, dtype=torch.int64), "exact")
                # a column of a packed estimate is written as a row, one group at a time
                transposed = not dim and op == "nm_mvue_compress"
                store = p.m * dtype.itemsize * 8 if transposed else 128
                yield OpCall(
                    op, f"{text} {SHORT[dtype]}{where}", args, 128 * common, store * common, sampled=text != "3:5" and dtype == BF16
                )
        args = (meta(4096, 4096, dtype=BF16), 2, 4, dim, meta(2, dtype=torch.int64), "approx")
        yield OpCall(op, f"2:4 bf16 approx{where}", args)


def adamw(name: str, dtype: torch.dtype, n: int = 2, m: int = 4, shape: tuple[int, ...] = (4096, 4096), **flags: Any) -> OpCall:
    """A step of one param: ``amsgrad``, ``scaled``, ``held``, ``states`` (their dtype), and the flags of the op."""
    p, state = meta(*shape, dtype=dtype), [meta(*shape, dtype=flags.pop("states", FP32))]
    masks = [meta(shape[0], -(-shape[1] // 8), dtype=torch.uint8)] if flags.pop("held", False) else None
    amsgrad, scaled = (flags.pop(k, None) for k in ("amsgrad", "scaled"))
    switches = [flags.get(k, False) for k in ("frozen", "eps_inside", "maximize", "geometric")]
    scalar = meta(1) if scaled else None
    args = (
        [p], [p], state, state, state if amsgrad else [], [meta(1)],
        meta(9, dtype=torch.float64), n, m, *switches, scalar, scalar, masks, flags.get("fixed", False), flags.get("stochastic", False), 3,
    )  # fmt: skip
    wide = 0 if m not in (0, 4, 8) or shape[-1] % 8 else 128
    # the logarithms of the geometric statistics are rounded, to float64
    loose = (".f64",) if flags.get("geometric") else ()
    return OpCall("nm_masked_adamw_", name, args, wide, wide, sampled=True, kernel="adamw_kernel", loose=loose)


def scale() -> Iterator[OpCall]:
    """A case for each dtype; the sums are in float64."""
    for text, dtype in (("2:4", FP32), ("2:4", BF16), ("1:8", BF16), ("3:5", BF16), ("8:256", FP32)):
        args = (matrix(Pattern(text), dtype), *map(int, text.split(":")))
        wide = 0 if text == "3:5" else 128
        yield OpCall("nm_soft_threshold_scale", f"{text} {SHORT[dtype]}", args, wide, sampled=text == "2:4", loose=(".f64",))


def transposable() -> Iterator[OpCall]:
    """A thread has the one or two tiles of a 16-byte read, whose rows are 4 or 8 bytes of mask."""
    for dtype in (FP32, BF16, FP16):
        args = (meta(4096, 4096, dtype=dtype), 2, 4)
        yield OpCall("nm_transposable_mask", f"2:4 {SHORT[dtype]}", args, 128, 32 * 4 // dtype.itemsize, sampled=dtype == BF16)
    yield OpCall("nm_transposable_mask", "2:4 bf16 16x20", (meta(16, 20, dtype=BF16), 2, 4))


def linear() -> Iterator[OpCall]:
    """The GEMMs of a linear layer: of few tokens, bound by the packed bytes, and of more on the tensor cores, up to where the operand is
    expanded to memory for a torch GEMM."""
    for text in ("2:4", "1:4", "2:8", "1:8", "1:32"):
        p = Pattern(text)
        for dtype in (BF16, FP32) if text == "2:4" else (BF16,):
            for tokens in (1,) if dtype == FP32 else (1, 4, 16, 64, 384) if text == "2:4" else (1, 16, 384):
                yield gemm("nm_linear", p, dtype, tokens)
        if text in ("2:4", "1:8"):
            for op in ("nm_linear_dgrad", "nm_linear_wgrad"):
                yield gemm(op, p, BF16, 384)
            yield gemm("nm_linear_wgrad", p, BF16, 32)
    yield gemm("nm_linear", Pattern("3:5"), BF16, 4)
    yield gemm("nm_linear", Pattern("2:4"), BF16, 384, meta(4096, dtype=BF16), "gelu")


def gemm(op: str, p: Pattern, dtype: torch.dtype, width: int, *more: Any) -> OpCall:
    """A GEMM of a compressed operand of 4096 rows with ``width`` tokens; of wgrad that operand is the gradient of 4096 tokens."""
    rows, cols = 4096, 4096 // p.m * p.m
    if op == "nm_linear_wgrad":
        args: tuple[Any, ...] = (*packed(p, dtype, rows, cols), p.n, p.m, cols, meta(cols, width, dtype=dtype))
    else:
        args = (meta(width, cols if op == "nm_linear" else rows, dtype=dtype), *packed(p, dtype, rows, cols), p.n, p.m, cols, *more)
    name = f"{p} {SHORT[dtype]} {width} {'inputs' if op == 'nm_linear_wgrad' else 'tokens'}{f', bias, {more[1]}' if more else ''}"
    sampled = str(p) in ("2:4", "1:8") and dtype == BF16 and width in (1, 16, 384) and not more
    return OpCall(op, name, args, 128 * (p.m != 5), matrix=dtype != FP32 and width > 4, sampled=sampled, loose=("",))


def stored(p: Pattern, bits: int, rows: int = 4096, cols: int = 4096) -> tuple[Tensor, Tensor, Tensor]:
    """Integers, indices and steps of a weight: 8 bits with a step per row, 4 bits with one per 128 columns."""
    kept = p.kept(cols)
    values = meta(rows, kept, dtype=torch.int8) if bits == 8 else meta(rows, -(-kept // 2), dtype=torch.uint8)
    steps = cols // 128 if bits == 4 and cols % (128 * p.m) == 0 else 1
    return values, meta(rows, p.index_bytes(cols), dtype=torch.uint8), meta(rows, steps, dtype=BF16)


def integers() -> Iterator[OpCall]:
    """Rounding to 8 and 4 bits, decoding, and products that read the integers: of few tokens, and of more on the tensor cores."""
    for bits in (8, 4):
        for dtype in (FP32, BF16):
            steps, short = 1 if bits == 8 else 32, SHORT[dtype]
            args: tuple[Any, ...] = (meta(4096, 2048, dtype=dtype), bits, steps)
            yield OpCall("nm_quantize_values", f"{short} int{bits}", args, sampled=dtype == BF16)
        for text in ("2:4", "1:8"):
            p = Pattern(text)
            values, _, step = stored(p, bits)
            for dtype in (FP32, BF16) if text == "2:4" else (BF16,):
                args, load = (values, step, p.kept(4096), dtype), 16 * bits * p.n * 2 // p.m
                yield OpCall("nm_dequantize_values", f"{text} int{bits} {SHORT[dtype]}", args, load, 128, sampled=dtype == BF16)
        for text in ("2:4", "1:4", "1:8", "2:8"):
            p = Pattern(text)
            for dtype in (BF16, FP32) if text == "2:4" else (BF16,):
                for tokens in (1, 4) if dtype == FP32 else (1, 4, 16):
                    args = (meta(tokens, 4096, dtype=dtype), *stored(p, bits), p.n, p.m, 4096)
                    sampled = text in ("2:4", "1:8") and dtype == BF16 and tokens != 4
                    name = f"{text} int{bits} {SHORT[dtype]} {tokens} tokens"
                    load = {1: 16 * bits, 4: 0, 16: 128}[tokens]
                    yield OpCall("nm_linear_integers", name, args, load, matrix=tokens > 4, sampled=sampled, loose=("",))
        p = Pattern("3:5")
        args = (meta(4, 4095, dtype=BF16), *stored(p, bits, cols=4095), p.n, p.m, 4095)
        yield OpCall("nm_linear_integers", f"3:5 int{bits} bf16 4 tokens", args, loose=("",))
    args = (meta(16, 4096, dtype=FP16), *stored(Pattern("2:4"), 8), 2, 4, 4096, meta(4096, dtype=FP16), "gelu")
    yield OpCall("nm_linear_integers", "2:4 int8 fp16 16 tokens, bias, gelu", args, matrix=True, loose=("",))


def cases() -> list[OpCall]:
    """Every case, in the order of the table."""
    pack = (meta(4096, 4096), 2, 4, "magnitude", None, None, BF16, True, False, "canonical")
    return [
        *dense("nm_mask"),
        *dense("nm_prune"),
        *dense("nm_soft_threshold"),
        *scale(),
        *transposable(),
        *dense("nm_compress", None),
        OpCall("nm_compress", "2:4 bf16 with a mask", (meta(4096, 2048, dtype=BF16), 2, 4, meta(4096, 2048, dtype=torch.bool)), 128, 128),
        OpCall("nm_pack", "2:4 fp32 to bf16", pack, 128, 128, sampled=True),
        *decompress(),
        *mvue("nm_mvue"),
        *mvue("nm_mvue_compress"),
        *linear(),
        *integers(),
        adamw("2:4 fp32", FP32),
        adamw("2:4 bf16, scaled", BF16, scaled=True),
        adamw("2:4 bf16, amsgrad, scaled", BF16, amsgrad=True, scaled=True),
        adamw("2:4 fp32, amsgrad, scaled", FP32, amsgrad=True, scaled=True),
        adamw("1:8 fp32, eps inside, maximize", FP32, 1, 8, eps_inside=True, maximize=True),
        adamw("2:4 fp32, frozen", FP32, frozen=True),
        adamw("2:4 fp32, geometric", FP32, geometric=True),
        adamw("unmasked fp32", FP32, 0, 0),
        adamw("4:32 bf16", BF16, 4, 32),
        adamw("3:5 fp32", FP32, 3, 5, (4095, 4095)),
        adamw("held fp32", FP32, 0, 0, held=True),
        adamw("held bf16, fixed", BF16, 0, 0, held=True, fixed=True),
        adamw("2:4 fp32, states bf16", FP32, states=BF16),
        adamw("2:4 bf16, states bf16, stochastic", BF16, states=BF16, stochastic=True),
    ]
