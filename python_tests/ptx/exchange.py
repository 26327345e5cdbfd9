"""Instructions by which threads meet memory and each other: loads, stores, shuffles and reductions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .matrices import MATRICES
from .operands import UNSIGNED, address, kind, lanes, read, write
from .parse import SIZES, Instruction

if TYPE_CHECKING:
    from .machine import Threads


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


def _shfl(t: Threads, ins: Instruction) -> None:
    mode = next(m for m in ins.mods if m in ("up", "down", "bfly", "idx"))
    a, by = lanes(t, ins.operands[1], "b32"), lanes(t, ins.operands[2], "s32")
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
    a = lanes(t, ins.operands[1], type_)
    whole = fold[next(m for m in ins.mods if m in fold)].reduce(a, axis=1, dtype=a.dtype)
    write(t, ins.operands[0], np.repeat(whole, 32))


def _cp(t: Threads, ins: Instruction) -> None:
    """cp.async of 4, 8 or 16 bytes, at once: waiting for it changes nothing then. Bytes past the given source size are zeros."""
    if "global" not in ins.mods:
        return  # commit_group, wait_group
    size = int(str(ins.operands[2]), 0)
    to = address(t, str(ins.operands[0]), "shared")[t.active].astype(np.int64)
    of = address(t, str(ins.operands[1]), "global")[t.active]
    take = np.full(t.count, size) if len(ins.operands) < 4 else np.broadcast_to(read(t, ins.operands[3], "u32"), (t.count,))
    take = take.astype(np.int64)[t.active]
    t.shared[to[:, None] + np.arange(size)] = 0
    for source in np.unique(take[take > 0]):
        some = take == source
        assert source == size, f"{ins.text}: {source} of {size} bytes"
        parts = t.memory.load(of[some], 32, size // 4, ins.text)
        items = t.shared.view(np.uint32)
        for i, part in enumerate(parts):
            items[to[some] // 4 + i] = part


EXCHANGE: dict[str, Callable[[Threads, Instruction], None]] = {
    "ld": _ld, "st": _st, "cp": _cp, "shfl": _shfl, "redux": _redux, "bar": lambda t, ins: None, **MATRICES,
}  # fmt: skip
