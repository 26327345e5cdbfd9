"""Instructions by which threads meet memory and each other: loads, stores, shuffles, reductions, and matrix instructions.

Fragments in registers, tiles in shared memory and products are as the PTX ISA manual draws them (9.7.14, 9.7.15).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from .operands import UNSIGNED, Threads, address, kind, lanes, read, write
from .parse import SIZES, Instruction


def _space(ins: Instruction) -> str:
    return next((m.split("::")[0] for m in ins.mods if m.split("::")[0] in ("global", "shared", "param")), "global")


def _ld(t: Threads, ins: Instruction) -> None:
    space, type_ = _space(ins), ins.types[-1]
    bits = SIZES[type_]
    if space == "param":
        write(t, ins.operands[0], np.asarray(t.params[str(ins.operands[1])[1:-1]] & ((1 << bits) - 1), UNSIGNED[bits]))
        return
    targets = ins.operands[0] if isinstance(ins.operands[0], tuple) else (ins.operands[0],)
    where = address(t, str(ins.operands[1]), space)[t.active]
    for target, value in zip(targets, t.spaces[space].load(where, bits, len(targets), ins.text), strict=True):
        full = np.zeros(t.count, value.dtype)
        full[t.active] = value
        if target != "_":
            write(t, target, full.view(kind(type_)) if type_[0] == "s" else full)


def _st(t: Threads, ins: Instruction) -> None:
    space, bits = _space(ins), SIZES[ins.types[-1]]
    sources = ins.operands[1] if isinstance(ins.operands[1], tuple) else (ins.operands[1],)
    values = [np.broadcast_to(read(t, s, f"b{bits}"), (t.count,))[t.active] for s in sources]
    t.spaces[space].store(address(t, str(ins.operands[0]), space)[t.active], bits, values, ins.text)


def _shfl(t: Threads, ins: Instruction) -> None:
    mode = next(m for m in ins.mods if m in ("up", "bfly", "idx"))
    a, by = lanes(t, ins.operands[1], "b32"), lanes(t, ins.operands[2], "s32")
    control = int(str(ins.operands[3]), 0)
    lane, segment = np.arange(32), (control >> 8) & 31
    first, last = lane & segment, (lane & segment) | (control & 31 & ~segment)
    source = {"up": lane - by, "bfly": lane ^ by, "idx": first | (by & ~segment)}[mode]
    valid = source >= last if mode == "up" else source <= last
    source = np.where(valid, source, lane)
    write(t, ins.operands[0], np.take_along_axis(a, source, axis=1).reshape(-1))


def _redux(t: Threads, ins: Instruction) -> None:
    type_, fold = ins.types[-1], {"add": np.add, "max": np.maximum, "min": np.minimum}
    a = lanes(t, ins.operands[1], type_)
    whole = fold[next(m for m in ins.mods if m in fold)].reduce(a, axis=1, dtype=a.dtype)
    write(t, ins.operands[0], np.repeat(whole, 32))


def _cp(t: Threads, ins: Instruction) -> None:
    """cp.async of 4, 8 or 16 bytes, at once: waiting for it changes nothing then. Of a source of no bytes it copies zeros."""
    if "global" not in ins.mods:
        return  # commit_group, wait_group
    size = int(str(ins.operands[2]), 0)
    to, of = (address(t, str(x), space)[t.active] for x, space in zip(ins.operands, ("shared", "global"), strict=False))
    take = np.broadcast_to(read(t, ins.operands[3], "u32") if len(ins.operands) > 3 else np.asarray(size), (t.count,))[t.active]
    assert np.isin(take, (0, size)).all(), f"{ins.text}: a part of {size} bytes"
    found = np.zeros((len(to), size // 4), np.uint32)
    if (take > 0).any():
        found[take > 0] = np.stack(t.spaces["global"].load(of[take > 0], 32, size // 4, ins.text), -1)
    t.spaces["shared"].store(to, 32, list(found.T), ins.text)


def _matrix_rows(t: Threads, operand: str, count: int) -> np.ndarray:
    """Byte offsets of the 8 rows of each of ``count`` 8x8 matrices of 16 bits, given by lanes 0-7, 8-15, ...: [warps, count, 8]."""
    return address(t, operand, "shared").reshape(-1, 32)[:, : 8 * count].reshape(-1, count, 8).astype(np.int64)


def _ldmatrix(t: Threads, ins: Instruction) -> None:
    targets = ins.operands[0] if isinstance(ins.operands[0], tuple) else (ins.operands[0],)
    rows = _matrix_rows(t, str(ins.operands[1]), len(targets))
    assert not (rows % 16).any(), f"{ins.text}: a row does not start at a multiple of 16 bytes"
    half = t.shared.view(np.uint16)
    matrices = half[rows[..., None] // 2 + np.arange(8)]  # [warps, count, 8 rows, 8]
    if "trans" in ins.mods:
        matrices = matrices.swapaxes(-1, -2)
    for i, target in enumerate(targets):
        # lane l holds row l / 4, elements 2 (l % 4) and the next
        pairs = matrices[:, i].reshape(-1, 32, 2).astype(np.uint32)
        write(t, target, (pairs[..., 0] | (pairs[..., 1] << np.uint32(16))).reshape(-1))


def _stmatrix(t: Threads, ins: Instruction) -> None:
    sources = ins.operands[1] if isinstance(ins.operands[1], tuple) else (ins.operands[1],)
    rows = _matrix_rows(t, str(ins.operands[0]), len(sources))
    assert not (rows % 16).any(), f"{ins.text}: a row does not start at a multiple of 16 bytes"
    half = t.shared.view(np.uint16)
    for i, source in enumerate(sources):
        matrix = np.ascontiguousarray(lanes(t, source, "b32")).view(np.uint16).reshape(-1, 8, 8)
        half[rows[:, i, :, None] // 2 + np.arange(8)] = matrix.swapaxes(-1, -2) if "trans" in ins.mods else matrix


def _half(bits: np.ndarray, type_: str) -> np.ndarray:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32) if type_ == "bf16" else bits.view(np.float16).astype(np.float32)


def _fragment(t: Threads, operands: Any, type_: str) -> np.ndarray:
    """Registers of two 16-bit numbers as ``[warps, 8 groups, 4 threads, registers, 2]`` floats."""
    regs = np.stack([np.ascontiguousarray(lanes(t, r, "b32")) for r in operands], axis=-1)
    return _half(np.ascontiguousarray(regs).view(np.uint16), type_).reshape(-1, 8, 4, len(operands), 2)


def _mma(t: Threads, ins: Instruction) -> None:
    """mma.sync.m16n8k16 of 16-bit numbers with float32 accumulators; fragments as the manual draws them (9.7.14.5.8)."""
    assert "m16n8k16" in ins.mods and ins.types[0] == "f32" and ins.types[3] == "f32", f"no rule for {ins.text}"
    a, b = _fragment(t, ins.operands[1], ins.types[1]), _fragment(t, ins.operands[2], ins.types[2])
    # a[.., g, t, r, e]: row g + 8 (r & 1), column 2 t + e + 8 (r >> 1)
    full_a = a.reshape(-1, 8, 4, 2, 2, 2).transpose(0, 4, 1, 3, 2, 5).reshape(-1, 16, 16)
    # b[.., g, t, r, e]: row 2 t + e + 8 r, column g
    full_b = b.transpose(0, 3, 2, 4, 1).reshape(-1, 16, 8)
    c = np.stack([np.broadcast_to(read(t, r, "f32"), (t.count,)) for r in ins.operands[3]], axis=-1).reshape(-1, 8, 4, 2, 2)
    # c[.., g, t, r, e]: row g + 8 r, column 2 t + e
    full = c.transpose(0, 3, 1, 2, 4).reshape(-1, 16, 8) + (full_a.astype(np.float64) @ full_b.astype(np.float64)).astype(np.float32)
    d = full.astype(np.float32).reshape(-1, 2, 8, 4, 2).transpose(0, 2, 3, 1, 4).reshape(-1, 4)
    for i, target in enumerate(ins.operands[0]):
        write(t, target, np.ascontiguousarray(d[:, i]))


SWIZZLES = {0: (16, 0), 1: (128, 7), 2: (64, 3), 3: (32, 1)}
"""By the two top bits of a descriptor: bytes of a row of an atom, and which of the address bits from 7 on are added (xor) at bit 4."""


def _shared_tile(t: Threads, descriptor: int, size: int, transposed: bool, type_: str) -> np.ndarray:
    """The tile ``[size, 16]`` (m or n, k) of 16-bit numbers that a wgmma descriptor names; ``transposed``: m or n lie side by side."""
    start, lead, stride = ((descriptor >> low & 0x3FFF) << 4 for low in (0, 16, 32))
    assert not descriptor >> 49 & 7, "a descriptor with a base offset"
    row_bytes, bits = SWIZZLES[descriptor >> 62]
    i, k = np.arange(size)[:, None], np.arange(16)[None, :]
    along, across = (2 * i, k) if transposed else (2 * k, i)
    at = start + along % row_bytes + across % 8 * row_bytes
    if transposed and bits:
        at = at + along // row_bytes * lead + across // 8 * stride
    elif transposed:
        at = at + along // row_bytes * stride + across // 8 * lead
    else:
        # a swizzled row holds all 16 of k, and the start address moves inside it
        at = at + along // row_bytes * (0 if bits else lead) + across // 8 * stride
    at = at ^ ((at >> 7 & bits) << 4)
    return _half(t.shared.view(np.uint16)[at // 2], type_)


def _wgmma(t: Threads, ins: Instruction) -> None:
    """wgmma.mma_async of 16-bit numbers in shared memory into float32, done at once: commits and waits change nothing then."""
    if ins.mods[0] != "mma_async":
        return
    n = int(re.fullmatch(r"m64n(\d+)k16", next(m for m in ins.mods if m.startswith("m64")))[1])  # type: ignore[index]
    d, a, b, add, *flags = ins.operands
    turns = [int(str(x)) for x in flags[2:]]
    assert ins.types[0] == "f32" and [int(str(x)) for x in flags[:2]] == [1, 1] and isinstance(a, str), f"no rule for {ins.text}"
    for group in range(t.count // 128):
        part = slice(128 * group, 128 * group + 128)
        assert t.active[part].all(), f"{ins.text}: some threads of the warpgroup are missing"

        def one(operand: Any, part: slice = part) -> int:
            value = np.broadcast_to(read(t, operand, "b64"), (t.count,))[part]
            assert (value == value[0]).all(), f"{ins.text}: the threads of a warpgroup give different descriptors"
            return int(value[0])

        right = _shared_tile(t, one(b), n, bool(turns[-1]), ins.types[2])
        left = _shared_tile(t, one(a), 64, bool(turns[0]), ins.types[1])
        gemm = (left.astype(np.float64) @ right.astype(np.float64).T).astype(np.float32)
        # d[4 j + 2 r + e] of lane 4 g + c of warp w: row 16 w + g + 8 r, column 8 j + 2 c + e
        mine = gemm.reshape(4, 2, 8, n // 8, 4, 2).transpose(0, 2, 4, 3, 1, 5).reshape(128, n // 2)
        keep = np.broadcast_to(read(t, add, "pred"), (t.count,))[part]
        for i, register in enumerate(d):
            old = np.broadcast_to(read(t, register, "f32"), (t.count,)).copy()
            old[part] = np.where(keep, old[part], 0) + mine[:, i]
            write(t, register, old)


EXCHANGE: dict[str, Callable[[Threads, Instruction], None]] = {
    "ld": _ld, "st": _st, "cp": _cp, "shfl": _shfl, "redux": _redux, "ldmatrix": _ldmatrix, "stmatrix": _stmatrix, "mma": _mma,
    "wgmma": _wgmma, "bar": lambda t, ins: None, "fence": lambda t, ins: None,
}  # fmt: skip
