"""wgmma of a warpgroup: descriptors, sparse metadata, products, and what is under way between issue and wait (PTX ISA 9.7.15)."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .barriers import STAY, Wait, warpgroup
from .operands import WARP, Threads, read
from .order import Hazard, check
from .parse import SIZES, Instruction

if TYPE_CHECKING:
    from .block import Block

SWIZZLES = {0: (16, 0), 1: (128, 7), 2: (64, 3), 3: (32, 1)}
"""By the two top bits of a descriptor: bytes of a row of an atom, and which of the address bits from 7 on are added (xor) at bit 4."""

NO_FENCE = "no wgmma.fence"
IN_FLIGHT = "register in flight"
LEFT = "left before wait_group"


@lru_cache(16)
def numbers_of(type_: str) -> np.ndarray:
    """Every value of an 8- or 16-bit type by its bits, in float64."""
    kinds = {"bf16": torch.bfloat16, "f16": torch.float16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "s8": torch.int8}
    bits = torch.arange(1 << SIZES[type_], dtype=torch.int32)
    table: np.ndarray = bits.to(torch.uint16 if SIZES[type_] == 16 else torch.uint8).view(kinds[type_]).to(torch.float64).numpy()
    return table


@lru_cache(512)
def _places(start: int, lead: int, stride: int, swizzle: int, size: int, depth: int, width: int, transposed: bool) -> np.ndarray:
    """Byte offsets of a tile ``[size, depth]`` (m or n, k) of items of ``width`` bytes; ``transposed``: m or n lie side by side."""
    row_bytes, bits = SWIZZLES[swizzle]
    i, k = np.arange(size)[:, None], np.arange(depth)[None, :]
    along, across = (width * i, k) if transposed else (width * k, i)
    if transposed and bits:
        at = start + along % row_bytes + across % 8 * row_bytes + along // row_bytes * lead + across // 8 * stride
    elif transposed:
        at = start + along % row_bytes + across % 8 * row_bytes + along // row_bytes * stride + across // 8 * lead
    elif bits:
        # a swizzled row holds all of k, and the start address moves inside it
        at = start + along + across % 8 * row_bytes + across // 8 * stride
    else:
        at = start + along % row_bytes + across % 8 * row_bytes + along // row_bytes * lead + across // 8 * stride
    return at ^ ((at >> 7 & bits) << 4)


@lru_cache(512)
def _units(start: int, lead: int, stride: int, swizzle: int, size: int, depth: int, width: int, transposed: bool, unit: int) -> np.ndarray:
    return np.unique(_places(start, lead, stride, swizzle, size, depth, width, transposed) // unit)


class Tile:
    """An operand in shared memory, as a descriptor names it (9.7.15.5.1.2)."""

    def __init__(self, block: Block, descriptor: int, size: int, depth: int, type_: str, transposed: bool, text: str) -> None:
        self.block, self.type, self.width = block, type_, SIZES[type_] // 8
        start, lead, stride = ((descriptor >> low & 0x3FFF) << 4 for low in (0, 16, 32))
        swizzle = descriptor >> 62
        row_bytes, bits = SWIZZLES[swizzle]
        check(not descriptor & 0x3FF1C000C000C000, "descriptor", f"{text}: {descriptor:#018x} has reserved bits")
        aligned = not descriptor >> 49 & 7 and not start >> 7 & bits
        check(aligned, "base offset", f"{text}: {descriptor:#018x} starts inside a swizzle's pattern")
        if bits and not transposed:
            check(start % row_bytes + depth * self.width <= row_bytes, "descriptor", f"{text}: {descriptor:#018x} leaves the swizzled row")
        if transposed:
            check(self.width == 2, "majorness", f"{text}: operands of 8 bits are K-major only")
            check(not bits or start % row_bytes == 0, "descriptor", f"{text}: {descriptor:#018x} starts inside a swizzled row")
        # the pattern repeats every 1024 bytes: the offsets of a tile are cached for where it begins in one
        self.base = start // 1024 * 1024
        self.key = (start % 1024, lead, stride, swizzle, size, depth, self.width, transposed)
        units = _units(*self.key, block.shared.unit)
        self.units = units + self.base // block.shared.unit
        last = (int(units[-1]) + 1) * block.shared.unit + self.base
        check(last <= block.shared.bytes.size, "outside shared memory", f"{text}: {descriptor:#018x} reaches byte {last}")

    def numbers(self) -> np.ndarray:
        """The tile as it is now, in float64."""
        items = self.block.shared.bytes.view(np.uint16 if self.width == 2 else np.uint8)
        return numbers_of(self.type)[items[(_places(*self.key) + self.base) // self.width]]


def nibbles(words: np.ndarray, depth: int, selector: int, text: str) -> np.ndarray:
    """Metadata of 128 threads to a number of 4 bits for each row and group of four: ``[64, depth / 4]`` (9.7.15.6.2.1)."""
    by_lane = words.reshape(4, 8, 4)  # [warp, g, t]
    if depth == 32:
        check(selector in (0, 1), "selector", f"{text}: {selector}")
        mine = by_lane[:, :, 2 * selector : 2 * selector + 2]
        halves = np.stack([mine & 0xFFFF, mine >> 16], axis=1)  # [warp, g or g + 8, g, t % 2]
        found = halves[..., None] >> (4 * np.arange(4, dtype=np.uint32)) & 15
        return found.reshape(64, 8)
    check(selector == 0, "selector", f"{text}: {selector}")
    # lane T: row T / 4 + 8 (T % 2), columns from 32 (T / 2 % 2) on
    found = by_lane.reshape(4, 8, 2, 2)[..., None] >> (4 * np.arange(8, dtype=np.uint32)) & 15  # [warp, g, half of k, row + 8, nibble]
    return found.transpose(0, 3, 1, 2, 4).reshape(64, 16)


def expanded(packed: np.ndarray, codes: np.ndarray, text: str) -> tuple[np.ndarray, np.ndarray]:
    """Packed ``[.., rows, K / 2]`` as ``[.., rows, K]`` with zeros, and the column of each packed element."""
    low, high = codes & 3, codes >> 2
    check((low < high).all(), "invalid nibble", f"{text}: {int(codes[low >= high][0]) if (low >= high).any() else 0:#06b}")
    columns = np.stack([low, high], axis=-1).astype(np.int64) + 4 * np.arange(codes.shape[-1])[:, None]
    columns = columns.reshape(packed.shape)
    dense = np.zeros((*packed.shape[:-1], 4 * codes.shape[-1]))
    np.put_along_axis(dense, columns, packed, -1)
    return dense, columns


def in_registers(d: np.ndarray) -> np.ndarray:
    """D ``[64, n]`` as registers ``[n / 2, 128]``: d[4j + 2r + e] of lane 4g + c of warp w is row 16w + g + 8r, column 8j + 2c + e."""
    return d.reshape(4, 2, 8, -1, 4, 2).transpose(3, 1, 5, 0, 2, 4).reshape(-1, 128)


def cut_sum(d: np.ndarray, left: np.ndarray, right: np.ndarray, bits: int) -> np.ndarray:
    """D + A B, its terms lined up with the largest of them and cut off towards zero below ``bits`` bits of that, then added exactly."""
    terms = np.concatenate([d[:, :, None].astype(np.float64), left[:, None, :] * right[None, :, :]], axis=2)
    top = np.abs(terms).max(axis=2, keepdims=True)
    unit = np.exp2(np.floor(np.log2(np.where(top > 0, top, 1.0))) - (bits - 1))
    found: np.ndarray = (np.trunc(terms / unit) * unit).sum(axis=2)
    return found


class Product:
    """One wgmma under way."""

    def __init__(self, group: Group, time: int, left: Any, right: Tile, codes: np.ndarray | None, text: str) -> None:
        self.group, self.time, self.left, self.right, self.codes, self.text = group, time, left, right, codes, text
        self.names: tuple[str, ...] = ()
        self.keep: np.ndarray = np.zeros(())
        self.dtype: Any = np.float32
        self.done = False

    def value(self, old: np.ndarray) -> np.ndarray:
        """D + A B as registers ``[registers, 128]``, ``old`` being D."""
        left, right = (x.numbers() if isinstance(x, Tile) else x for x in (self.left, self.right))
        columns = None
        if self.codes is not None:
            left, columns = expanded(left, self.codes, self.text)
        bits = self.group.block.cluster.accumulator
        if bits and self.right.type in ("e4m3", "e5m2"):
            before = old.reshape(-1, 2, 2, 4, 8, 4).transpose(3, 1, 4, 0, 5, 2).reshape(64, -1)
            return in_registers(cut_sum(before, left, right, bits))
        gemm = left @ right.T
        if columns is not None and not np.isfinite(gemm).all():  # what is not selected is not multiplied, be it Inf or NaN
            packed = np.take_along_axis(left, columns, 1)
            gemm = np.stack([(packed[i] * right[:, columns[i]]).sum(1) for i in range(64)])
        return old + in_registers(gemm)

    def finish(self) -> None:
        """Reads the operands and writes D; those issued before go first."""
        if self.done:
            return
        group = self.group
        while group.waiting and group.waiting[0] is not self:
            group.block.cluster.complete(group.waiting[0])
        if group.waiting:
            group.waiting.pop(0)
        self.done = True
        whole = group.block.file(self.names).view(self.dtype)
        part = group.part
        old = np.where(self.keep, group.hidden.get(self.names, whole[:, part]), self.dtype(0))
        value = self.value(old)
        new = value.astype(np.float32) if self.dtype is np.float32 else value.astype(np.int64).astype(np.int32)
        if any(p.names == self.names for p in group.waiting):
            group.hidden[self.names] = new
        else:
            group.hidden.pop(self.names, None)
            whole[:, part] = new


class Group:
    """A warpgroup's wgmma: groups that are committed or open, registers under way, and what wgmma.fence orders."""

    def __init__(self, block: Block, number: int) -> None:
        self.block, self.number, self.name = block, number, f"warpgroup {number} of block {block.index}"
        self.part = slice(4 * WARP * number, 4 * WARP * (number + 1))
        self.agent = block.order.agent("wgmma", f"a wgmma of {self.name}")
        self.time = 0
        self.open: list[Product] = []
        self.groups: list[list[Product]] = []
        self.waiting: list[Product] = []
        """In order, those that have not happened yet."""
        self.hidden: dict[tuple[str, ...], np.ndarray] = {}
        """Accumulators that a later wgmma will go on with."""
        self.flying: dict[str, tuple[bool, int]] = {}
        """Registers under way: whether a read of them matters too, and of which wgmma."""
        self.fenced = False
        self.touched: set[str] = set()
        """Registers that other instructions have used since the last wgmma.fence."""
        self.shapes: dict[tuple[str, ...], str] = {}

    def use(self, words: tuple[str, ...], writes: frozenset[str], text: str) -> None:
        """An instruction that is no wgmma uses registers that some wgmma uses."""
        self.touched.update(words)
        for word in words:
            if (found := self.flying.get(word)) and (found[0] or word in writes):
                raise Hazard(IN_FLIGHT, f"{self.name}: {word} of an unfinished wgmma is used by {text}")

    def issue(self, product: Product, names: tuple[str, ...], keep: np.ndarray, inputs: tuple[str, ...], shape: str, text: str) -> None:
        check(self.fenced, NO_FENCE, f"{self.name}: before the first {text}")
        for word in (*names, *inputs):
            check(word not in self.touched, NO_FENCE, f"{self.name}: {word} was used since the last fence; {text}")
        before = self.shapes.setdefault(names, shape)
        check(before == shape, NO_FENCE, f"{self.name}: {before} and then {shape} on the same registers; {text}")
        product.names, product.keep = names, keep
        self.flying |= dict.fromkeys((*names, *inputs), (True, product.time))
        self.open.append(product)
        self.waiting.append(product)
        if not self.block.cluster.eager:
            whole = self.block.file(names).view(product.dtype)
            if names not in self.hidden:
                self.hidden[names] = whole[:, self.part].copy()
            whole[:, self.part] = np.nan if product.dtype is np.float32 else -(1 << 31)
        self.block.cluster.begin(product)

    def wait(self, left: int) -> None:
        """wgmma.wait_group."""
        while len(self.groups) > left:
            for product in self.groups.pop(0):
                self.block.cluster.complete(product)
                first = self.block.first_row + 4 * self.number
                self.block.order.seen[first : first + 4, self.agent] = product.time
                self.flying = {word: how for word, how in self.flying.items() if how[1] > product.time}

    def check_left(self) -> None:
        check(not self.groups and not self.open, LEFT, f"{self.name} ends while a wgmma of it is under way")


def wgmma(t: Threads, ins: Instruction) -> Any:
    if (state := warpgroup(t, ins)) is not None:
        return state
    for number in range(t.first // 4, t.last // 4):
        group = t.block.groups[number]
        what = ins.mods[0]
        if what == "fence":
            group.fenced = True
            group.touched.clear()
            group.shapes.clear()
        elif what == "commit_group":
            group.groups.append(group.open)
            group.open = []
        elif what == "wait_group":
            group.wait(int(str(ins.operands[0]), 0))
        else:
            _product(t, ins, group)
    return None


def _names(operand: Any) -> tuple[str, ...]:
    return operand if isinstance(operand, tuple) else (operand,)


def _registers_of_a(t: Threads, part: slice, names: tuple[str, ...], type_: str) -> np.ndarray:
    """A from registers: row g + 8 (r % 2) of the warp's 16; 32 bits of a row at column t of the lower or upper half (9.7.15.5.1.1)."""
    words = np.stack([np.broadcast_to(read(t, r, "b32"), (t.count,))[part] for r in names], axis=-1)
    items = np.ascontiguousarray(words).view(np.uint16 if SIZES[type_] == 16 else np.uint8)
    each = 32 // SIZES[type_]
    shaped = numbers_of(type_)[items].reshape(4, 8, 4, 2, 2, each)  # [warp, g, t, half of k, row + 8, e]
    return shaped.transpose(0, 4, 1, 3, 2, 5).reshape(64, 8 * each)


def _product(t: Threads, ins: Instruction, group: Group) -> None:
    shape = next(m for m in ins.mods if m.startswith("m64n"))
    found = re.fullmatch(r"m64n(\d+)k(\d+)", shape)
    assert found
    n, depth = int(found[1]), int(found[2])
    sparse = "sp" in ins.mods
    to, type_a, type_b = ins.types[:3]
    bits = SIZES[type_a]
    assert to in ("f32", "s32") and bits in (8, 16) and (to == "s32") == (type_a[1:] == "8"), f"no rule for {ins.text}"
    check(depth * bits == (512 if sparse else 256) and n % 8 == 0 and 8 <= n <= 256, "shape", ins.text)
    d, a, b, *rest = ins.operands
    names = _names(d)
    check(len(names) == n // 2, "shape", f"{ins.text}: {len(names)} accumulators")
    meta, selector = "", 0
    if sparse:
        meta, selector, *rest = str(rest[0]), int(str(rest[1]), 0), *rest[2:]
    add, *flags = rest
    turns = [int(str(x)) for x in flags[2:]]
    assert [int(str(x)) for x in flags[:2]] in ([], [1, 1]), f"no rule for {ins.text}"
    check(len(turns) == (0 if bits == 8 else 2 if isinstance(a, str) else 1), "majorness", ins.text)

    first = 4 * group.number - t.first
    part = slice(WARP * first, WARP * (first + 4))

    def descriptor(operand: Any) -> int:
        value = np.broadcast_to(read(t, operand, "b64"), (t.count,))[part]
        check((value == value[0]).all(), "descriptors differ in the warpgroup", f"{t.name}: {ins.text}")
        return int(value[0])

    block, order = t.block, t.block.order
    right = Tile(block, descriptor(b), n, depth, type_b, bool(turns and turns[-1]), ins.text)
    across = depth // 2 if sparse else depth
    left: Any
    if isinstance(a, str):
        left = Tile(block, descriptor(a), 64, across, type_a, bool(turns and turns[0]), ins.text)
    else:
        left = _registers_of_a(t, part, a, type_a)
    codes = None
    if sparse:
        codes = nibbles(np.broadcast_to(read(t, meta, "b32"), (t.count,))[part], depth, selector, ins.text)
    group.time += 1
    rows = slice(block.first_row + 4 * group.number, block.first_row + 4 * group.number + 4)
    given = order.seen[rows].min(0), order.fenced[rows].min(0)  # each of the four warps must have seen what it reads
    for tile in (left, right):
        if isinstance(tile, Tile):
            block.shared.read_async(group.agent, group.time, tile.units, given, ins.text)
    product = Product(group, group.time, left, right, codes, ins.text)
    keep = np.broadcast_to(read(t, add, "pred"), (t.count,))[part]
    product.dtype = np.float32 if to == "f32" else np.int32
    group.issue(product, names, keep, a if isinstance(a, tuple) else (), f"{shape}.{type_a}.{type_b}", ins.text)
    if sparse:
        # 9.7.15.7.1 asks for fences around accumulators and A only; a write while the instruction may still read it is a hazard
        group.flying[meta] = (False, group.time)


def setmaxnreg(t: Threads, ins: Instruction) -> Any:
    if (state := warpgroup(t, ins)) is not None:
        return state
    block, wanted = t.block, int(str(ins.operands[0]), 0)

    def pool() -> int:
        return 65536 - 128 * sum(block.registers_of)

    check(24 <= wanted <= 256 and wanted % 8 == 0, "setmaxnreg", f"{ins.text}: not 24 to 256 by 8")
    for number in range(t.first // 4, t.last // 4):
        has = block.registers_of[number]
        check((wanted >= has) == ("inc" in ins.mods) or wanted == has, "setmaxnreg", f"{t.name}: {ins.text} of {has} registers")
        more = 128 * (wanted - has)
        if more > max(pool(), 0):
            words = f"{more} registers for {ins.text}"
            t.wait = Wait(lambda more=more: more <= pool(), lambda words=words: f"{words}; {pool()} are free")  # type: ignore[misc]
            return STAY  # it runs again
        block.registers_of[number] = wanted
    return None
