"""What instructions read and write: registers, constants, several of them as one number, parameters, and memory."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .parse import SIZES

if TYPE_CHECKING:
    from .block import Block

WARP = 32
UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
FLOATS = {16: np.float16, 32: np.float32, 64: np.float64}

SHARED_WINDOW = 1 << 48
"""Generic addresses of shared memory begin here, those of parameters at twice that; global memory has its own addresses."""
PARAM_WINDOW = 2 << 48


class Memory:
    """Bytes by the address where they begin, and nothing else: what is read and written is checked against them."""

    def __init__(self, regions: dict[int, np.ndarray]) -> None:
        self.starts = np.array(sorted(regions), dtype=np.uint64)
        self.bytes = [regions[int(start)] for start in self.starts]

    @classmethod
    def of(cls, tensors: list[Tensor]) -> Memory:
        """The storages of CPU tensors at their own addresses."""
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t.numel()}
        return cls({start: torch.empty(0, dtype=torch.uint8).set_(s).numpy() for start, s in storages.items()})  # type: ignore[call-overload]

    def region(self, address: int, size: int, text: str) -> tuple[np.ndarray, int]:
        """The array that holds ``size`` bytes from an address on, and where in it they begin."""
        at = int(np.searchsorted(self.starts, np.uint64(address), side="right")) - 1
        assert at >= 0, f"{text}: address {address:#x} is below every tensor"
        offset = address - int(self.starts[at])
        assert offset + size <= self.bytes[at].size, f"{text}: offset {offset} of a tensor of {self.bytes[at].size} bytes"
        return self.bytes[at], offset

    def _locate(self, address: np.ndarray, bits: int, count: int, text: str) -> list[tuple[Any, np.ndarray, np.ndarray]]:
        """For each array that holds some of the addresses: which ones, its items of so many bits, and the index of each item."""
        size = bits // 8
        wrong = address % np.uint64(size * count) != 0
        assert not wrong.any(), f"{text}: address {address[wrong][0]:#x} is no multiple of {size * count}"
        at = np.searchsorted(self.starts, address, side="right") - 1
        found = []
        for region in np.unique(at):
            which = slice(None) if (at == region).all() else np.flatnonzero(at == region)
            assert region >= 0, f"{text}: address {address[which][0]:#x} is below every tensor"
            data = self.bytes[region]
            offset = address[which] - self.starts[region]
            outside = offset + np.uint64(size * count) > data.size
            assert not outside.any(), f"{text}: offset {int(offset[outside][0])} of a tensor of {data.size} bytes"
            found.append((which, data[: data.size // size * size].view(UNSIGNED[bits]), (offset // np.uint64(size)).astype(np.int64)))
        return found

    def load(self, address: np.ndarray, bits: int, count: int, text: str) -> list[np.ndarray]:
        """``count`` consecutive items of ``bits`` at each address."""
        values = [np.empty(len(address), UNSIGNED[bits]) for _ in range(count)]
        for which, items, index in self._locate(address, bits, count, text):
            for i, value in enumerate(values):
                value[which] = items[index + i]
        return values

    def store(self, address: np.ndarray, bits: int, values: list[np.ndarray], text: str) -> None:
        """The inverse of ``load``; different values for one address in one instruction are an error."""
        for which, items, index in self._locate(address, bits, len(values), text):
            for i, value in enumerate(values):
                items[index + i] = value[which]
                assert (items[index + i] == value[which]).all(), f"{text}: two threads write different values to one address"


class Threads:
    """Whole warps of a block that are at the same place and run together, till they part."""

    def __init__(self, block: Block, first: int, last: int, pc: int) -> None:
        self.block, self.first, self.last = block, first, last  # warps
        self.part = slice(WARP * first, WARP * last)
        self.count = WARP * (last - first)
        self.pc = pc
        self.at: np.ndarray | None = None
        """Where each thread is, while they are apart; the lowest run first, which is where compiled loops and ifs meet again."""
        self.all = self.active = np.ones(self.count, dtype=bool)
        self.alone = -1
        """Where these warps were parted from others: they are not joined again before they have moved."""
        self.wait: Any = None
        """What the threads wait for: None, or an object that has ``over()``."""
        self.refused: tuple[Any, ...] = ()
        """The wait that has just been refused once: a second refusal in a row blocks."""

    @property
    def tid(self) -> np.ndarray:
        return self.block.tid[self.part]

    @property
    def warps(self) -> range:
        return range(self.first, self.last)

    @property
    def name(self) -> str:
        """Which threads, for messages."""
        warps = f"warp {self.first}" if self.last == self.first + 1 else f"warps {self.first}-{self.last - 1}"
        return f"block {self.block.index}, {warps}"


def kind(name: str) -> Any:
    """The numpy type of a PTX type; bf16 and pairs stay bits."""
    bits = SIZES[name]
    if name == "pred":
        return np.bool_
    if name in ("f16", "f32", "f64"):
        return FLOATS[bits]
    return SIGNED[bits] if name[0] == "s" else UNSIGNED[bits]


KINDS = {name: np.dtype(kind(name)) for name in SIZES if name != "b128"}


def read(t: Threads, operand: Any, type_: str) -> np.ndarray:
    """An operand as an array of the type's numbers, one a thread or one for all."""
    if isinstance(operand, tuple):
        return _packed(t, operand, type_)
    if (whole := t.block.registers.get(operand)) is not None:
        value = whole[t.part]
        want = KINDS[type_]
        if value.dtype is want or type_ == "pred":
            return value
        return (value if value.itemsize == want.itemsize else value.astype(UNSIGNED[8 * want.itemsize])).view(want)
    if operand[0] == "!":
        return ~read(t, operand[1:], type_)
    want = kind(type_)
    if operand == "%tid.x":
        return t.tid.astype(want)
    if (special := t.block.special(operand)) is not None:
        return np.asarray(special).astype(want)
    if t.block.kernel.declares(operand):  # nobody has written it: allowed as long as nothing depends on it
        return np.asarray(0xDEADBEEFDEADBEEF & ((1 << SIZES[type_]) - 1), bool if type_ == "pred" else UNSIGNED[SIZES[type_]]).view(want)
    return _constant(operand, type_)


@lru_cache(4096)
def _constant(text: str, type_: str) -> np.ndarray:
    if found := re.fullmatch(r"0([fFdD])([0-9a-fA-F]+)", text):
        single = found[1] in "fF"
        value = np.asarray(int(found[2], 16), UNSIGNED[32 if single else 64]).view(FLOATS[32 if single else 64])
    else:
        number = int(text.rstrip("U"), 0)
        if type_ == "pred":
            return np.asarray(bool(number))
        bits = SIZES[type_]
        value = np.asarray(number & ((1 << bits) - 1), UNSIGNED[bits]).view(kind(type_))
    value.flags.writeable = False
    return value


def _packed(t: Threads, parts: tuple[str, ...], type_: str) -> np.ndarray:
    """``{a, b}`` read as one number, the first part lowest."""
    bits = SIZES[type_]
    each = bits // len(parts)
    whole = np.zeros((), UNSIGNED[bits])
    for i, part in enumerate(parts):
        whole = whole | (read(t, part, f"b{each}").astype(UNSIGNED[bits]) << UNSIGNED[bits](i * each))
    return whole


def write(t: Threads, register: Any, value: Any) -> None:
    """Give the active threads' register a value; a shorter one is widened by its sign or by zeros."""
    if isinstance(register, tuple):
        each = value.itemsize * 8 // len(register)
        raw = value.view(UNSIGNED[value.itemsize * 8])
        for i, part in enumerate(register):
            if part != "_":
                write(t, part, (raw >> raw.dtype.type(i * each)).astype(UNSIGNED[each]))
        return
    if "|" in register:  # a second, predicate result, of shfl
        register = register.split("|")[0]
    if register == "_":
        return
    whole = t.block.registers.get(register)
    if whole is None:
        whole = t.block.new_register(register)
    value = np.asarray(value)
    if whole.dtype != np.bool_ and value.dtype != whole.dtype:
        if value.itemsize < whole.itemsize:
            value = value.astype((SIGNED if value.dtype.kind == "i" else UNSIGNED)[8 * whole.itemsize])
        value = value.view(UNSIGNED[8 * value.itemsize]).astype(whole.dtype)
    if t.active is t.all:
        whole[t.part] = value
    else:
        np.copyto(whole[t.part], value, where=t.active)


@lru_cache(4096)
def _address(operand: str) -> tuple[str, int]:
    found = re.fullmatch(r"([%\w$.]+)\s*(?:([+-])\s*(-?\w+))?", operand.strip("[] "))
    assert found, f"no address: {operand}"
    offset = int(found[3], 0) if found[3] else 0
    return found[1], -offset if found[2] == "-" else offset


def address(t: Threads, operand: str, space: str) -> np.ndarray:
    """The addresses of ``[register + offset]``, one a thread."""
    base, offset = _address(operand)
    bits = t.block.kernel.size(base) if base in t.block.registers else 64 if space in ("global", "generic") else 32
    value = read(t, base, "u64" if bits == 64 else "u32").astype(np.uint64)
    if offset:
        value = value + np.uint64(offset & 0xFFFFFFFFFFFFFFFF)
        value = value if bits == 64 else value & np.uint64(0xFFFFFFFF)
    return np.broadcast_to(value, (t.count,))


def one(t: Threads, operand: Any, type_: str, text: str) -> int:
    """An operand that all active threads must agree on."""
    value = np.broadcast_to(read(t, operand, type_), (t.count,))[t.active]
    assert (value == value[0]).all(), f"{text}: the threads give different values of {operand}"
    return int(value[0])


def lanes(t: Threads, operand: Any, type_: str) -> np.ndarray:
    """An operand as ``[warps, 32]``."""
    return np.broadcast_to(read(t, operand, type_), (t.count,)).reshape(-1, WARP)
