"""What instructions read and write: registers, constants, several of them as one number, and global memory."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .parse import SIZES, Kernel

UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
FLOATS = {16: np.float16, 32: np.float32, 64: np.float64}


class Memory:
    """Bytes by the address where they begin, and nothing else: what is read and written is checked against them."""

    def __init__(self, regions: dict[int, np.ndarray]) -> None:
        self.starts = sorted(regions)
        self.bytes = [regions[start] for start in self.starts]

    @classmethod
    def of(cls, tensors: list[Tensor]) -> Memory:
        """The storages of CPU tensors at their own addresses."""
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t.numel()}
        return cls({start: torch.empty(0, dtype=torch.uint8).set_(s).numpy() for start, s in storages.items()})  # type: ignore[call-overload]

    def _locate(self, address: np.ndarray, bits: int, count: int, text: str) -> tuple[np.ndarray, np.ndarray]:
        """The array that holds the addresses, as items of so many bits, and the index of each item."""
        size = bits // 8
        wrong = address % np.uint64(size * count) != 0
        assert not wrong.any(), f"{text}: address {address[wrong][0]:#x} is no multiple of {size * count}"
        region = int(np.searchsorted(np.array(self.starts, np.uint64), address[0], side="right")) - 1
        assert region >= 0, f"{text}: address {address[0]:#x} is below every tensor"
        start, data = self.starts[region], self.bytes[region]
        offset = address - np.uint64(start)
        outside = offset + np.uint64(size * count) > data.size
        assert not outside.any(), f"{text}: offset {int(offset[outside][0])} of a tensor of {data.size} bytes"
        items = data[: data.size // size * size].view(UNSIGNED[bits])
        return items, (offset // np.uint64(size)).astype(np.int64)

    def load(self, address: np.ndarray, bits: int, count: int, text: str) -> list[np.ndarray]:
        """``count`` consecutive items of ``bits`` at each address."""
        items, index = self._locate(address, bits, count, text)
        return [items[index + i] for i in range(count)]

    def store(self, address: np.ndarray, bits: int, values: list[np.ndarray], text: str) -> None:
        """The inverse of ``load``; different values for one address in one instruction are an error."""
        items, index = self._locate(address, bits, len(values), text)
        for i, value in enumerate(values):
            items[index + i] = value
            assert (items[index + i] == value).all(), f"{text}: two threads write different values to one address"


class Threads:
    """Threads that run together: their registers and where each of them is."""

    def __init__(self, kernel: Kernel, first: int, count: int, block: int, spaces: dict[str, Memory], params: dict[str, int]):
        self.kernel, self.spaces, self.params, self.shared = kernel, spaces, params, spaces["shared"].bytes[0]
        self.count, self.block = count, block
        self.tid = np.arange(first, first + count, dtype=np.uint32)
        self.registers: dict[str, np.ndarray] = {}
        self.at = np.zeros(count, dtype=np.int64)
        self.active = np.ones(count, dtype=bool)

    @property
    def done(self) -> bool:
        """Whether every thread has returned."""
        return bool((self.at >= len(self.kernel.code)).all())


def kind(name: str) -> Any:
    """The numpy type of a PTX type; bf16 and pairs stay bits."""
    bits = SIZES[name]
    if name == "pred":
        return np.bool_
    if name in ("f16", "f32", "f64"):
        return FLOATS[bits]
    return SIGNED[bits] if name[0] == "s" else UNSIGNED[bits]


def read(t: Threads, operand: Any, type_: str) -> np.ndarray:
    """An operand as an array of the type's numbers, one a thread or one for all."""
    if isinstance(operand, tuple):
        return _packed(t, operand, type_)
    want = kind(type_)
    if operand in t.registers:
        value = t.registers[operand]
        if type_ == "pred":
            return value
        bits = SIZES[type_]
        return (value if value.itemsize * 8 == bits else value.astype(UNSIGNED[bits])).view(want)
    if operand == "%tid.x":
        return t.tid.astype(want)
    if operand in ("%ctaid.x", "%laneid"):
        return np.asarray(t.block if operand == "%ctaid.x" else t.tid % 32).astype(want)
    if operand in ("%tid.y", "%tid.z", "%ctaid.y", "%ctaid.z", "global_smem"):
        return np.zeros((), want)  # shared memory starts at 0
    if operand[0] == "%":  # nobody has written it: allowed as long as nothing depends on it
        return np.asarray(0xDEADBEEFDEADBEEF & ((1 << SIZES[type_]) - 1), bool if type_ == "pred" else UNSIGNED[SIZES[type_]]).view(want)
    return _constant(operand, type_)


def _constant(text: str, type_: str) -> np.ndarray:
    if found := re.fullmatch(r"0([fd])([0-9a-fA-F]+)", text):
        return np.asarray(int(found[2], 16), UNSIGNED[32 if found[1] == "f" else 64]).view(FLOATS[32 if found[1] == "f" else 64])
    number = int(text.rstrip("U"), 0)
    if type_ == "pred":
        return np.asarray(bool(number))
    bits = SIZES[type_]
    return np.asarray(number & ((1 << bits) - 1), UNSIGNED[bits]).view(kind(type_))


def _packed(t: Threads, parts: tuple[str, ...], type_: str) -> np.ndarray:
    """``{a, b}`` read as one number, the first part lowest."""
    bits = SIZES[type_]
    each = bits // len(parts)
    whole = np.zeros((), UNSIGNED[bits])
    for i, part in enumerate(parts):
        whole = whole | (read(t, part, f"b{each}").astype(UNSIGNED[bits]) << UNSIGNED[bits](i * each))
    return whole


def write(t: Threads, register: Any, value: np.ndarray) -> None:
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
    bits = t.kernel.size(register)
    value = np.asarray(value)
    if bits > 1 and value.itemsize * 8 < bits:
        value = value.astype((SIGNED if value.dtype.kind == "i" else UNSIGNED)[bits])
    if bits > 1:
        value = value.view(UNSIGNED[value.itemsize * 8]).astype(UNSIGNED[bits])
    value = np.broadcast_to(value, (t.count,))
    old = t.registers.get(register)
    if t.active.all():
        t.registers[register] = value.copy()
    else:
        t.registers[register] = np.where(t.active, value, np.zeros_like(value) if old is None else old)


def address(t: Threads, operand: str, space: str) -> np.ndarray:
    """The addresses of ``[register + offset]``, one a thread."""
    inner = operand.strip("[] ")
    found = re.fullmatch(r"([%\w$.]+)\s*(?:([+-])\s*(-?\w+))?", inner)
    assert found, f"no address: {operand}"
    type_ = "u64" if space == "global" else "u32"
    base = np.broadcast_to(read(t, found[1], type_), (t.count,)).astype(np.int64)
    offset = int(found[3], 0) if found[3] else 0
    return (base + (-offset if found[2] == "-" else offset)).astype(np.uint64)


def lanes(t: Threads, operand: Any, type_: str) -> np.ndarray:
    """An operand as ``[warps, 32]``."""
    return np.broadcast_to(read(t, operand, type_), (t.count,)).reshape(-1, 32)
