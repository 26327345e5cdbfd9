"""Instructions by which threads meet memory and each other: loads, stores, shuffles, reductions and matrix fragments."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .memory import UNSIGNED
from .operands import kind, read, write
from .parse import SIZES, Instruction

if TYPE_CHECKING:
    from .machine import Threads


def address(t: Threads, operand: str, space: str) -> np.ndarray:
    """The addresses of ``[register + offset]``, one a thread."""
    inner = operand.strip("[] ")
    found = re.fullmatch(r"([%\w$.]+)\s*(?:([+-])\s*(-?\w+))?", inner)
    assert found, f"no address: {operand}"
    type_ = "u64" if space == "global" else "u32"
    base = np.broadcast_to(read(t, found[1], type_), (t.count,)).astype(np.int64)
    offset = int(found[3], 0) if found[3] else 0
    return (base + (-offset if found[2] == "-" else offset)).astype(np.uint64)


def _space(ins: Instruction) -> str:
    return next((m.split("::")[0] for m in ins.mods if m.split("::")[0] in ("global", "shared", "param")), "global")


def _load_shared(t: Threads, where: np.ndarray, bits: int, count: int, text: str) -> list[np.ndarray]:
    size = bits // 8
    assert not (where % np.uint64(size * count)).any(), f"{text}: a shared address is no multiple of {size * count}"
    items = t.shared.view(UNSIGNED[bits])
    return [items[(where // np.uint64(size)).astype(np.int64) + i] for i in range(count)]


def _ld(t: Threads, ins: Instruction) -> None:
    space = _space(ins)
    if space == "param":
        bits = SIZES[ins.types[-1]]
        write(t, ins.operands[0], np.asarray(t.params[str(ins.operands[1])[1:-1]] & ((1 << bits) - 1), UNSIGNED[bits]))
        return
    targets = ins.operands[0] if isinstance(ins.operands[0], tuple) else (ins.operands[0],)
    type_ = ins.types[-1]
    where = address(t, str(ins.operands[1]), space)[t.active]
    load = t.memory.load if space == "global" else lambda *args: _load_shared(t, *args)
    for target, value in zip(targets, load(where, SIZES[type_], len(targets), ins.text), strict=True):
        full = np.zeros(t.count, value.dtype)
        full[t.active] = value
        if target != "_":
            write(t, target, full.view(kind(type_)) if type_[0] == "s" else full)


def _st(t: Threads, ins: Instruction) -> None:
    space = _space(ins)
    sources = ins.operands[1] if isinstance(ins.operands[1], tuple) else (ins.operands[1],)
    bits = SIZES[ins.types[-1]]
    where = address(t, str(ins.operands[0]), space)[t.active]
    values = [np.broadcast_to(read(t, s, f"b{bits}"), (t.count,))[t.active] for s in sources]
    if space == "global":
        t.memory.store(where, bits, values, ins.text)
        return
    assert not (where % np.uint64(bits // 8 * len(values))).any(), f"{ins.text}: a shared address is not aligned"
    items = t.shared.view(UNSIGNED[bits])
    for i, value in enumerate(values):
        items[(where // np.uint64(bits // 8)).astype(np.int64) + i] = value


def _lanes(t: Threads, operand: Any, type_: str) -> np.ndarray:
    """An operand as ``[warps, 32]``."""
    return np.broadcast_to(read(t, operand, type_), (t.count,)).reshape(-1, 32)


def _shfl(t: Threads, ins: Instruction) -> None:
    mode = next(m for m in ins.mods if m in ("up", "down", "bfly", "idx"))
    a, by = _lanes(t, ins.operands[1], "b32"), _lanes(t, ins.operands[2], "s32")
    control = int(str(ins.operands[3]), 0)
    lane, segment = np.arange(32), (control >> 8) & 31
    first, last = lane & segment, (lane & segment) | (control & 31 & ~segment)
    source = {"up": lane - by, "down": lane + by, "bfly": lane ^ by, "idx": first | (by & ~segment)}[mode]
    valid = source >= last if mode == "up" else source <= last
    source = np.where(valid, source, lane)
    write(t, ins.operands[0], np.take_along_axis(a, source, axis=1).reshape(-1))


def _redux(t: Threads, ins: Instruction) -> None:
    type_ = ins.types[-1]
    fold = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
    a = _lanes(t, ins.operands[1], type_)
    whole = fold[next(m for m in ins.mods if m in fold)].reduce(a, axis=1, dtype=a.dtype)
    write(t, ins.operands[0], np.repeat(whole, 32))


def _vote(t: Threads, ins: Instruction) -> None:
    p = _lanes(t, ins.operands[1], "pred") & t.active.reshape(-1, 32)
    if "ballot" in ins.mods:
        write(t, ins.operands[0], np.repeat((p.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(1).astype(np.uint32), 32))
    else:
        write(t, ins.operands[0], np.repeat(p.any(1) if "any" in ins.mods else p.all(1), 32))


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
        matrix = np.ascontiguousarray(_lanes(t, source, "b32")).view(np.uint16).reshape(-1, 8, 8)
        half[rows[:, i, :, None] // 2 + np.arange(8)] = matrix.swapaxes(-1, -2) if "trans" in ins.mods else matrix


def _cp(t: Threads, ins: Instruction) -> None:
    """cp.async of 4, 8 or 16 bytes, at once: waiting for it changes nothing then. Bytes past the given source size are zeros."""
    if "global" not in ins.mods:
        return  # commit_group, wait_group
    size = int(str(ins.operands[2]), 0)
    to = address(t, str(ins.operands[0]), "shared")[t.active].astype(np.int64)
    of = address(t, str(ins.operands[1]), "global")[t.active]
    take = (
        np.full(t.count, size, np.int64)
        if len(ins.operands) < 4
        else np.broadcast_to(read(t, ins.operands[3], "u32"), (t.count,)).astype(np.int64)
    )
    take = take[t.active]
    t.shared[to[:, None] + np.arange(size)] = 0
    for source in np.unique(take[take > 0]):
        some = take == source
        assert source == size, f"{ins.text}: {source} of {size} bytes"
        parts = t.memory.load(of[some], 32, size // 4, ins.text)
        items = t.shared.view(np.uint32)
        for i, part in enumerate(parts):
            items[to[some] // 4 + i] = part


def _half(bits: np.ndarray, type_: str) -> np.ndarray:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32) if type_ == "bf16" else bits.view(np.float16).astype(np.float32)


def _fragment(t: Threads, operands: Any, type_: str) -> np.ndarray:
    """Registers of two 16-bit numbers as ``[warps, 8 groups, 4 threads, registers, 2]`` floats."""
    regs = np.stack([np.ascontiguousarray(_lanes(t, r, "b32")) for r in operands], axis=-1)
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


EXCHANGE: dict[str, Callable[[Threads, Instruction], None]] = {
    "ld": _ld, "st": _st, "cp": _cp, "shfl": _shfl, "redux": _redux, "vote": _vote, "ldmatrix": _ldmatrix, "stmatrix": _stmatrix,
    "mma": _mma, "bar": lambda t, ins: None,
}  # fmt: skip
