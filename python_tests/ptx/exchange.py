"""Instructions by which threads meet memory and each other: loads, stores, shuffles, votes, reductions, and matrix instructions of a warp.

Fragments in registers, tiles in shared memory and products are as the PTX ISA manual draws them (9.7.14).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .barriers import bar, mbarrier
from .block import RANK, Block
from .bulk import cp
from .operands import PARAM_WINDOW, SHARED_WINDOW, UNSIGNED, WARP, Threads, address, kind, lanes, read, write
from .order import check
from .parse import SIZES, Instruction
from .wgmma import expanded, numbers_of, setmaxnreg, wgmma


def space_of(ins: Instruction) -> str:
    """The state space that an instruction names."""
    return next((m.split("::")[0] for m in ins.mods if m.split("::")[0] in ("global", "shared", "param", "local", "const")), "generic")


def _places(t: Threads, operand: str, ins: Instruction) -> Iterator[tuple[str, Any, np.ndarray]]:
    """For each state space that active threads' addresses are in: its name, which of the active threads, and addresses there."""
    space = space_of(ins)
    where = address(t, operand, space)[t.active]
    if space != "generic":
        yield space, slice(None), where
        return
    window = where >> np.uint64(48)
    for found, name in ((1, "shared"), (2, "param")):
        if (window == found).any():
            which = np.flatnonzero(window == found)
            yield name, which, where[which] - np.uint64(SHARED_WINDOW if found == 1 else PARAM_WINDOW)
    if (window == 0).any():
        which = np.flatnonzero(window == 0)
        yield "global", which if len(which) < len(where) else slice(None), where[which]


def _rows(t: Threads) -> np.ndarray:
    """Of each active thread, its warp's row in the clocks."""
    first = t.block.first_row + t.first
    return np.repeat(np.arange(first, first + t.last - t.first), WARP)[t.active]


def _by_block(t: Threads, where: np.ndarray, ins: Instruction) -> Iterator[tuple[Block, Any, np.ndarray]]:
    """For each block whose shared memory is meant: which addresses, and the offsets there."""
    ranks = (where >> np.uint64(RANK)).astype(np.int64)
    for rank in [int(ranks[0])] if (ranks == ranks[0]).all() else np.unique(ranks):
        which = slice(None) if (ranks == rank).all() else np.flatnonzero(ranks == rank)
        block, _ = t.block.at(int(where[which][0]), ins.text)
        if block is not t.block:
            t.block.cluster.remote_use(t.block.first_row + t.first, block, t.block, ins.text)
        yield block, which, where[which] & np.uint64((1 << RANK) - 1)


def load(t: Threads, space: str, where: np.ndarray, rows: np.ndarray, bits: int, count: int, ins: Instruction) -> list[np.ndarray]:
    """``count`` items of ``bits`` at each address."""
    if space in ("global", "param"):
        memory = t.block.cluster.memory if space == "global" else t.block.cluster.param_memory
        return memory.load(where, bits, count, ins.text)
    assert space == "shared", f"no rule for {ins.text}"
    values = [np.empty(len(where), UNSIGNED[bits]) for _ in range(count)]
    for block, which, offsets in _by_block(t, where, ins):
        for value, found in zip(values, block.view.load(offsets, bits, count, ins.text), strict=True):
            value[which] = found
        units = block.shared.spread(offsets.astype(np.int64), bits * count // 8)
        block.shared.read_by_warps(rows[which], units, ins.text)
    return values


def store(t: Threads, space: str, where: np.ndarray, rows: np.ndarray, bits: int, values: list[np.ndarray], ins: Instruction) -> None:
    """The inverse."""
    if space == "global":
        t.block.cluster.memory.store(where, bits, values, ins.text)
        return
    assert space == "shared", f"no rule for {ins.text}"
    for block, which, offsets in _by_block(t, where, ins):
        units = block.shared.spread(offsets.astype(np.int64), bits * len(values) // 8)
        block.shared.write_by_warps(rows[which], units, ins.text)
        block.view.store(offsets, bits, [v[which] for v in values], ins.text)


def _ld(t: Threads, ins: Instruction) -> None:
    type_ = ins.types[-1]
    bits = SIZES[type_]
    targets = ins.operands[0] if isinstance(ins.operands[0], tuple) else (ins.operands[0],)
    found = [np.zeros(int(t.active.sum()), UNSIGNED[bits]) for _ in targets]
    rows = _rows(t)
    for space, which, where in _places(t, str(ins.operands[1]), ins):
        for value, part in zip(found, load(t, space, where, rows[which], bits, len(targets), ins), strict=True):
            value[which] = part
    for target, value in zip(targets, found, strict=True):
        full = value
        if t.active is not t.all:
            full = np.zeros(t.count, value.dtype)
            full[t.active] = value
        if target != "_":
            write(t, target, full.view(kind(type_)) if type_[0] == "s" else full)


def _st(t: Threads, ins: Instruction) -> None:
    bits = SIZES[ins.types[-1]]
    sources = ins.operands[1] if isinstance(ins.operands[1], tuple) else (ins.operands[1],)
    values = [np.broadcast_to(read(t, s, f"b{bits}"), (t.count,))[t.active] for s in sources]
    rows = _rows(t)
    for space, which, where in _places(t, str(ins.operands[0]), ins):
        store(t, space, where, rows[which], bits, [v[which] for v in values], ins)


def _shfl(t: Threads, ins: Instruction) -> None:
    mode = next(m for m in ins.mods if m in ("up", "down", "bfly", "idx"))
    a, by, control = lanes(t, ins.operands[1], "b32"), lanes(t, ins.operands[2], "s32"), lanes(t, ins.operands[3], "s32")
    lane, segment = np.arange(WARP), (control >> 8) & 31
    first, last = lane & segment, (lane & segment) | (control & 31 & ~segment)
    source = {"up": lane - by, "down": lane + by, "bfly": lane ^ by, "idx": first | (by & ~segment)}[mode]
    valid = source >= last if mode == "up" else source <= last
    source = np.where(valid, source, lane)
    write(t, ins.operands[0], np.take_along_axis(a, source, axis=1).reshape(-1))
    if "|" in str(ins.operands[0]):
        write(t, str(ins.operands[0]).split("|")[1], np.broadcast_to(valid, (t.count // WARP, WARP)).reshape(-1))


def _vote(t: Threads, ins: Instruction) -> None:
    assert "ballot" in ins.mods, f"no rule for {ins.text}"
    source = str(ins.operands[1])
    given = (lanes(t, source.lstrip("!"), "pred") ^ source.startswith("!")) & t.active.reshape(-1, WARP)
    write(t, ins.operands[0], np.repeat((given << np.arange(WARP, dtype=np.uint64)).sum(1).astype(np.uint32), WARP))


def _redux(t: Threads, ins: Instruction) -> None:
    type_ = ins.types[-1]
    fold = {"add": np.add, "max": np.maximum, "min": np.minimum}
    a = lanes(t, ins.operands[1], type_)
    whole = fold[next(m for m in ins.mods if m in fold)].reduce(a, axis=1, dtype=a.dtype)
    write(t, ins.operands[0], np.repeat(whole, WARP))


def _cvta(t: Threads, ins: Instruction) -> None:
    """Between generic addresses and those of a state space."""
    window = np.uint64({"shared": SHARED_WINDOW, "param": PARAM_WINDOW, "global": 0}[space_of(ins)])
    value = read(t, ins.operands[1], "u64")
    write(t, ins.operands[0], value - window if "to" in ins.mods else value + window)


def _mapa(t: Threads, ins: Instruction) -> None:
    """The same place in the shared memory of another block of the cluster."""
    assert "shared::cluster" in ins.mods, f"no rule for {ins.text}"
    type_ = ins.types[-1]
    here, rank = read(t, ins.operands[1], type_), read(t, ins.operands[2], "u32")
    there = np.broadcast_to(rank, (t.count,))[t.active]
    check((there < len(t.block.cluster.blocks)).all(), "mapa", f"{t.name}: {ins.text} beyond the cluster")
    write(t, ins.operands[0], (here & kind(type_)((1 << RANK) - 1)) | (rank.astype(kind(type_)) << kind(type_)(RANK)))


def _fence(t: Threads, ins: Instruction) -> None:
    """Fences of the async proxy and of mbarrier.init; others change nothing here."""
    if ("proxy" in ins.mods and "async" in {m.split("::")[0] for m in ins.mods}) or "mbarrier_init" in ins.mods:
        rows = t.block.rows(t)
        for barrier in t.block.mbarriers.values():
            barrier.fenced = barrier.fenced or rows.start < barrier.made[0] <= rows.stop
        if "proxy" in ins.mods:
            here = np.unique(_rows(t))
            for row in here:
                t.block.order.fence(slice(int(row), int(row) + 1))


def _matrix_rows(t: Threads, operand: str, count: int, ins: Instruction, writes: bool) -> np.ndarray:
    """Byte offsets of the 8 rows of each of ``count`` 8x8 matrices of 16 bits, given by lanes 0-7, 8-15, ...: [warps, count, 8]."""
    assert t.active.all(), f"{ins.text}: some threads are missing"
    whole, shared = address(t, operand, "shared").reshape(-1, WARP)[:, : 8 * count], t.block.shared
    block, _ = t.block.at(int(whole[0, 0]), ins.text)
    assert block is t.block, f"{ins.text}: another block's shared memory"
    rows = (whole & np.uint64((1 << RANK) - 1)).astype(np.int64)
    assert not (rows % 16).any(), f"{ins.text}: a row does not start at a multiple of 16 bytes"
    assert rows.max() + 16 <= shared.bytes.size, f"{ins.text}: outside shared memory"
    warps = np.repeat(np.arange(t.block.rows(t).start, t.block.rows(t).stop), 8 * count)
    (shared.write_by_warps if writes else shared.read_by_warps)(warps, shared.spread(rows.reshape(-1), 16), ins.text)
    return rows.reshape(-1, count, 8)


def _ldmatrix(t: Threads, ins: Instruction) -> None:
    targets = ins.operands[0] if isinstance(ins.operands[0], tuple) else (ins.operands[0],)
    rows = _matrix_rows(t, str(ins.operands[1]), len(targets), ins, False)
    half = t.block.shared.bytes.view(np.uint16)
    matrices = half[rows[..., None] // 2 + np.arange(8)]  # [warps, count, 8 rows, 8]
    if "trans" in ins.mods:
        matrices = matrices.swapaxes(-1, -2)
    for i, target in enumerate(targets):
        # lane l holds row l / 4, elements 2 (l % 4) and the next
        pairs = matrices[:, i].reshape(-1, WARP, 2).astype(np.uint32)
        write(t, target, (pairs[..., 0] | (pairs[..., 1] << np.uint32(16))).reshape(-1))


def _stmatrix(t: Threads, ins: Instruction) -> None:
    sources = ins.operands[1] if isinstance(ins.operands[1], tuple) else (ins.operands[1],)
    rows = _matrix_rows(t, str(ins.operands[0]), len(sources), ins, True)
    half = t.block.shared.bytes.view(np.uint16)
    for i, source in enumerate(sources):
        matrix = np.ascontiguousarray(lanes(t, source, "b32")).view(np.uint16).reshape(-1, 8, 8)
        half[rows[:, i, :, None] // 2 + np.arange(8)] = matrix.swapaxes(-1, -2) if "trans" in ins.mods else matrix


def _fragment(t: Threads, operands: Any, type_: str) -> np.ndarray:
    """Registers of two 16-bit numbers as ``[warps, 8 groups, 4 threads, registers, 2]`` floats."""
    regs = np.stack([np.ascontiguousarray(lanes(t, r, "b32")) for r in operands], axis=-1)
    return numbers_of(type_)[np.ascontiguousarray(regs).view(np.uint16)].reshape(-1, 8, 4, len(operands), 2)


def _mma(t: Threads, ins: Instruction) -> None:
    """mma of 16-bit numbers with float32 accumulators, dense k8 and k16 and sparse k32 (9.7.14.5.7, 9.7.14.5.8, 9.7.14.6.2)."""
    shape, sparse = next(m for m in ins.mods if m.startswith("m16n8k")), ins.mods[0].startswith("sp")
    depth = int(shape[6:])
    assert depth == 32 if sparse else depth in (8, 16), f"no rule for {ins.text}"
    assert ins.types[0] == "f32" and ins.types[3] == "f32" and SIZES[ins.types[1]] == 16, f"no rule for {ins.text}"
    a, b = _fragment(t, ins.operands[1], ins.types[1]), _fragment(t, ins.operands[2], ins.types[2])
    halves = a.shape[3] // 2
    # a[.., g, t, r, e]: row g + 8 (r & 1), column 2 t + e + 8 (r >> 1)
    full_a = a.reshape(-1, 8, 4, halves, 2, 2).transpose(0, 4, 1, 3, 2, 5).reshape(-1, 16, 8 * halves)
    if sparse:
        full_a = _sparse(t, ins, full_a)
    # b[.., g, t, r, e]: row 2 t + e + 8 r, column g
    full_b = b.transpose(0, 3, 2, 4, 1).reshape(-1, depth, 8)
    c = np.stack([np.broadcast_to(read(t, r, "f32"), (t.count,)) for r in ins.operands[3]], axis=-1).reshape(-1, 8, 4, 2, 2)
    # c[.., g, t, r, e]: row g + 8 r, column 2 t + e
    full = c.transpose(0, 3, 1, 2, 4).reshape(-1, 16, 8) + (full_a @ full_b).astype(np.float32)
    d = full.astype(np.float32).reshape(-1, 2, 8, 4, 2).transpose(0, 2, 3, 1, 4).reshape(-1, 4)
    for i, target in enumerate(ins.operands[0]):
        write(t, target, np.ascontiguousarray(d[:, i]))


def _sparse(t: Threads, ins: Instruction, packed: np.ndarray) -> np.ndarray:
    """Packed A ``[warps, 16, 16]`` as ``[warps, 16, 32]``."""
    selector = int(str(ins.operands[5]), 0)
    words = lanes(t, ins.operands[4], "b32").reshape(-1, 8, 4)[:, :, 2 * selector : 2 * selector + 2]
    halves = np.stack([words & 0xFFFF, words >> 16], axis=1)  # [warps, g or g + 8, g, t % 2]
    codes = (halves[..., None] >> (4 * np.arange(4, dtype=np.uint32)) & 15).reshape(-1, 16, 8)
    return expanded(packed, codes, f"{t.name}: {ins.text}")[0]


EXCHANGE: dict[str, Callable[[Threads, Instruction], Any]] = {
    "ld": _ld, "st": _st, "cp": cp, "shfl": _shfl, "redux": _redux, "ldmatrix": _ldmatrix, "stmatrix": _stmatrix, "mma": _mma,
    "wgmma": wgmma, "bar": bar, "barrier": bar, "fence": _fence, "mbarrier": mbarrier, "vote": _vote, "cvta": _cvta, "mapa": _mapa,
    "setmaxnreg": setmaxnreg,
}  # fmt: skip
