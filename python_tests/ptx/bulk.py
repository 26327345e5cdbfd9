"""Copies that a thread starts and does not wait for: cp.async, bulk copies, and boxes of tensors (PTX ISA 9.7.9.25 to 9.7.9.27)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from .barriers import Mbarrier, barrier_at
from .operands import PARAM_WINDOW, WARP, Threads, address, one, read
from .order import Hazard, check
from .parse import Instruction
from .tensor_map import TensorMap, permutation

if TYPE_CHECKING:
    from .block import Block

SLOTS = lru_cache(256)(permutation)


@dataclass(eq=False)
class Copy:
    """A bulk load under way into one block's shared memory: bytes from ``source()``, in rows of 16 at ``slots``."""

    block: Block
    offset: int
    size: int
    span: int
    source: Any
    barrier: Mbarrier
    text: str

    def finish(self) -> None:
        data = self.source()
        rows = self.block.shared.bytes.reshape(-1, 16)
        rows[self.offset // 16 + SLOTS(self.size // 16, self.span)] = data.reshape(-1, 16)
        self.block.shared.written(self.block.shared.units(self.offset, self.size), self.barrier.phase + 1)
        self.barrier.complete(self.size, self.text)


@dataclass(eq=False)
class Groups:
    """What a thread's bulk stores or a warp's cp.async copies are grouped into: the group that is open, and those under way."""

    agent: int
    time: int = 0
    open: list[Any] = field(default_factory=list)
    groups: list[tuple[int, list[Any]]] = field(default_factory=list)

    def commit(self) -> None:
        self.groups.append((self.time, self.open))
        self.open = []

    def wait(self, left: int, block: Block, row: int) -> None:
        """Till so many groups are left; the warp of that row has seen what the others did."""
        while len(self.groups) > left:
            time, copies = self.groups.pop(0)
            for copy in copies:
                block.cluster.complete(copy)
            block.order.seen[row, self.agent] = max(block.order.seen[row, self.agent], time)


@dataclass(eq=False)
class Write:
    """A bulk store, or a warp's cp.async, under way."""

    finish: Any


def cp(t: Threads, ins: Instruction) -> Any:
    if "bulk" not in ins.mods:
        return _cp_async(t, ins)
    if "commit_group" in ins.mods or "wait_group" in ins.mods:
        for thread in map(int, t.tid[t.active]):
            if thread not in t.block.stores:
                continue
            if "commit_group" in ins.mods:
                t.block.stores[thread].commit()
            else:
                t.block.stores[thread].wait(int(str(ins.operands[0]), 0), t.block, t.block.first_row + thread // WARP)
        return None
    to_shared = next(m for m in ins.mods if m.startswith(("shared", "global"))).startswith("shared")
    first, all_active = t.block.rows(t).start, t.active
    for lane in np.flatnonzero(all_active):  # each thread starts a copy of its own
        t.active = np.zeros(t.count, dtype=bool)
        t.active[lane] = True
        (_load if to_shared else _store)(t, ins, first + int(lane) // WARP, int(lane))
    t.active = all_active
    return None


def _map(t: Threads, operand: str, text: str) -> tuple[TensorMap, list[int]]:
    """A tensor map and the coordinates of a box, from ``[map, {x, y}]``."""
    found = re.fullmatch(r"\[\s*([^,]+?)\s*,\s*\{(.*)\}\s*\]", operand)
    assert found, f"no rule for {text}"
    place = int(address(t, f"[{found[1]}]", "generic")[t.active][0])
    check(place % 64 == 0, "alignment", f"{text}: the tensor map's address {place:#x} is no multiple of 64")
    if place >= PARAM_WINDOW:
        data = t.block.cluster.params[place - PARAM_WINDOW :][:128].tobytes()
    else:
        array, at = t.block.cluster.memory.region(place, 128, text)
        data = array[at : at + 128].tobytes()
    boxed = TensorMap.unpack(data, text)
    corner = [one(t, x.strip(), "s32", text) for x in found[2].split(",")]
    check(len(corner) == len(boxed.sizes), "tensor map", f"{text}: {len(corner)} coordinates, a map of rank {len(boxed.sizes)}")
    return boxed, corner


def _window(t: Threads, boxed: TensorMap, corner: list[int], text: str) -> tuple[np.ndarray, tuple[slice, ...]]:
    """What of a box lies inside its tensor, as bytes ``[.., rows, inner]``, and where in the box that is."""
    inside, size = [], []
    start = boxed.address
    for i, (x, length, full) in enumerate(zip(corner, boxed.box, boxed.sizes, strict=True)):
        low, high = min(max(-x, 0), length), max(min(full - x, length), 0)
        step = boxed.element if i == 0 else 1
        inside.append(slice(low * step, max(high, low) * step))
        size.append((max(high, low) - low) * step)
        start += (x + low) * (boxed.strides[i - 1] if i else boxed.element)
    shape = tuple(reversed(size))
    if 0 in shape:
        return np.zeros(shape, np.uint8), tuple(reversed(inside))
    strides = (*reversed(boxed.strides), 1)
    reach = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    array, at = t.block.cluster.memory.region(start, reach, text)
    return np.lib.stride_tricks.as_strided(array[at:], shape, strides), tuple(reversed(inside))


def _extent(t: Threads, ins: Instruction, places: list[str], which: int, lane: int) -> tuple[np.ndarray, Any, tuple[int, ...], int, int]:
    """What a bulk copy reads or writes of global memory, at the operand ``which``: the bytes, where in the box they are, the box's shape,
    the swizzle's span, and the alignment of the place in shared memory."""
    text = ins.text
    if "tensor" in ins.mods:
        boxed, corner = _map(t, places[which], text)
        shape, span = (*reversed(boxed.box[1:]), boxed.box[0] * boxed.element), boxed.span
        window, inside = _window(t, boxed, corner, text)
        check(not span or shape[-1] == span, "tensor map", f"{text}: no rule for rows of {shape[-1]} bytes under a swizzle of {span}")
        return window, inside, shape, span, 8 * span or 128
    place, size = int(address(t, places[which], "global")[lane]), one(t, places[2], "u32", text)
    check(place % 16 == 0 and size % 16 == 0 and size, "alignment", f"{text}: {size} bytes at {place:#x}, not multiples of 16")
    array, at = t.block.cluster.memory.region(place, size, text)
    return array[at : at + size], slice(None), (size,), 0, 16


def _staged(t: Threads, operand: str, lane: int, size: int, align: int, text: str) -> tuple[Block, int]:
    """The block and the offset of a bulk copy's place in shared memory."""
    block, offset = t.block.at(int(address(t, operand, "shared")[lane]), text)
    check(offset % align == 0, "alignment", f"{text}: {block.named(offset)} is no multiple of {align}")
    check(offset + size <= block.shared.bytes.size, "outside shared memory", f"{text}: {size} bytes at {offset}")
    return block, offset


def _load(t: Threads, ins: Instruction, row: int, lane: int) -> Any:
    cluster, text = t.block.cluster, ins.text
    places = [x for x in ins.operands if isinstance(x, str)]
    assert any(m.startswith("mbarrier") for m in ins.mods), f"no rule for {text}"
    counter, *rest = places[2 if "tensor" in ins.mods else 3 :]
    window, inside, shape, span, align = _extent(t, ins, places, 1, lane)
    size = int(np.prod(shape))

    def source() -> np.ndarray:
        box = np.zeros(shape, np.uint8)
        box[inside] = window
        return box

    block, offset = _staged(t, places[0], lane, size, align, text)
    barrier = barrier_at(t, int(address(t, counter, "shared")[lane]), text, True)
    targets = [block]
    if any(m.startswith("multicast") for m in ins.mods):
        mask = one(t, rest[0], "u16", text)
        check(0 < mask < 1 << len(cluster.blocks), "multicast mask", f"{text}: {mask:#x} in a cluster of {len(cluster.blocks)}")
        targets = [b for b in cluster.blocks if mask >> b.rank & 1]
    else:
        check(barrier.block is block, "mbarrier of another block", f"{text}: {barrier.name}, destination in block {block.index}")
    # what the thread has seen; in a multicast copy every block's part counts on its own mbarrier, at the same offset
    given = t.block.order.seen[row], t.block.order.fenced[row]
    for each in targets:
        counted = each.mbarriers.get(barrier.offset)
        check(counted, "no mbarrier", f"{text}: block {each.index} has none at {each.named(barrier.offset)}")
        assert counted
        counted.use(slice(row, row + 1), text, True)
        cluster.remote_use(row, each, t.block, text)
        units = each.shared.units(offset, size)
        for other in each.mbarriers:
            check(not offset <= other < offset + size, "mbarrier overwritten", f"{text}: {each.named(other)}")
        each.shared.write_async(counted.agent, units, given, f"{t.name}: {text}")
        each.shared.bytes[offset : offset + size] = 0xFF
        copy = Copy(each, offset, size, span, source, counted, text)
        cluster.begin(copy)
    return None


def _store(t: Threads, ins: Instruction, row: int, lane: int) -> Any:
    cluster, text = t.block.cluster, ins.text
    places = [x for x in ins.operands if isinstance(x, str)]
    assert "bulk_group" in ins.mods, f"no rule for {text}"
    window, inside, shape, span, align = _extent(t, ins, places, 0, lane)
    size = int(np.prod(shape))
    block, offset = _staged(t, places[1], lane, size, align, text)
    check(block is t.block, "bulk store", f"{text}: from another block's shared memory")
    thread = int(t.tid[lane])
    if thread not in block.stores:
        block.stores[thread] = Groups(block.order.agent("bulk store", f"a bulk store of thread {thread} of block {block.index}"))
    stores = block.stores[thread]
    stores.time += 1
    given = block.order.seen[row], block.order.fenced[row]
    block.shared.read_async(stores.agent, stores.time, block.shared.units(offset, size), given, f"{t.name}: {text}")

    def finish() -> None:
        rows = block.shared.bytes.reshape(-1, 16)
        window[...] = rows[offset // 16 + SLOTS(size // 16, span)].reshape(shape)[inside]

    stores.open.append(cluster.begin(Write(finish)))
    return None


def check_left(block: Block, threads: np.ndarray) -> None:
    """Threads end: nothing that reads the block's shared memory may be left."""
    for thread in threads:
        if (stores := block.stores.get(int(thread))) and (stores.open or stores.groups):
            raise Hazard("left before wait_group", f"thread {thread} of block {block.index} ends while a bulk store of it is under way")


def _cp_async(t: Threads, ins: Instruction) -> Any:
    """cp.async of 4, 8 or 16 bytes. Of a source of no bytes it copies zeros."""
    block = t.block
    rows = block.rows(t)
    each = [block.copies_of(row) for row in range(rows.start, rows.stop)]
    if "commit_group" in ins.mods or "wait_group" in ins.mods:
        for row, copies in zip(range(rows.start, rows.stop), each, strict=True):
            if "commit_group" in ins.mods:
                copies.commit()
            else:
                copies.wait(int(str(ins.operands[0]), 0), block, row)
        return None
    assert "global" in ins.mods and any(m.startswith("shared") for m in ins.mods), f"no rule for {ins.text}"
    size = int(str(ins.operands[2]), 0)
    to, of = (address(t, str(x), space)[t.active] for x, space in zip(ins.operands, ("shared", "global"), strict=False))
    take = np.broadcast_to(read(t, ins.operands[3], "u32") if len(ins.operands) > 3 else np.asarray(size), (t.count,))[t.active]
    assert np.isin(take, (0, size)).all(), f"{ins.text}: a part of {size} bytes"
    found = np.zeros((len(to), size // 4), np.uint32)
    if (take > 0).any():
        found[take > 0] = np.stack(block.cluster.memory.load(of[take > 0], 32, size // 4, ins.text), -1)
    lane_rows = np.repeat(np.arange(rows.start, rows.stop), WARP)[t.active]
    for row, copies in zip(range(rows.start, rows.stop), each, strict=True):
        which = lane_rows == row
        if not which.any():
            continue
        copies.time += 1
        mine, data = to[which], list(found[which].T)
        count = int(which.sum())
        units = block.shared.spread(mine.astype(np.int64), size)
        block.shared.write_by_warps(lane_rows[which], units, ins.text, np.full(count, copies.agent), np.full(count, copies.time))
        if not block.cluster.eager:
            block.view.store(mine, 32, [np.full(count, 0xFFFFFFFF, np.uint32)] * (size // 4), ins.text)
        copies.open.append(block.cluster.begin(Write(partial(block.view.store, mine, 32, data, ins.text))))
    return None
