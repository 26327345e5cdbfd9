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
    type_, fold = ins.types[-1], {"add": np.add, "max": np.maximum}
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


EXCHANGE: dict[str, Callable[[Threads, Instruction], None]] = {
    "ld": _ld, "st": _st, "cp": _cp, "shfl": _shfl, "redux": _redux, "bar": lambda t, ins: None, **MATRICES,
}  # fmt: skip
