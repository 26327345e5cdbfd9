"""What each instruction computes for every thread by itself; names and rules as in the PTX ISA manual, chapter 9.7."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .operands import SIGNED, UNSIGNED, Threads, kind, read
from .parse import SIZES, Instruction

Rule = Callable[[Threads, Instruction], Any]


def _halves(t: Threads, operand: Any, type_: str) -> np.ndarray:
    """An operand of 16-bit floating-point numbers or pairs as float32, the low one first."""
    bits = np.ascontiguousarray(np.broadcast_to(read(t, operand, type_), (t.count,))).view(np.uint16)
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32) if type_[0] == "b" else bits.view(np.float16).astype(np.float32)


def _joined(x: np.ndarray, type_: str) -> np.ndarray:
    """Numbers rounded to such a type, as the bits of a register; NaN becomes that of the GPU."""
    with np.errstate(over="ignore"):
        bits = to_bf16(x) if type_[0] == "b" else np.where(np.isnan(x), np.uint16(0x7FFF), x.astype(np.float16).view(np.uint16))
    return bits.astype(np.uint16).view(np.uint32 if type_.endswith("x2") else np.uint16)


HALVES = ("bf16", "bf16x2", "f16x2")


def _two(fn: Callable[[Any, Any], Any]) -> Rule:
    def rule(t: Threads, ins: Instruction) -> Any:
        type_ = ins.types[-1]
        if type_ in HALVES:
            return _joined(fn(*(_halves(t, x, type_) for x in ins.operands[1:3])), type_)
        a, b = (read(t, x, type_) for x in ins.operands[1:3])
        return np.asarray(fn(a, b)).astype(kind(type_))

    return rule


def _product(t: Threads, ins: Instruction) -> Any:
    type_ = ins.types[-1]
    a, b = (read(t, x, type_) for x in ins.operands[1:3])
    if "lo" in ins.mods or type_ in ("f32", "f64"):
        return a * b
    bits = SIZES[type_]
    assert bits < 64 and type_[0] in "su", f"no rule for {ins.text}"
    to = (SIGNED if type_[0] == "s" else UNSIGNED)[2 * bits]
    whole = a.astype(to) * b.astype(to)
    return whole if "wide" in ins.mods else (whole >> to(bits)).astype(kind(type_))


def _mad(t: Threads, ins: Instruction) -> Any:
    product = _product(t, ins)
    type_ = ins.types[-1]
    if "wide" in ins.mods:
        type_ = f"{type_[0]}{2 * SIZES[type_]}"
    return product + read(t, ins.operands[3], type_)


def _fma(t: Threads, ins: Instruction) -> Any:
    type_ = ins.types[-1]
    if type_ in HALVES and not {"sat", "relu", "ftz"} & set(ins.mods):
        a, b, c = (_halves(t, x, type_).astype(np.float64) for x in ins.operands[1:4])
        return _joined(a * b + c, type_)
    assert type_ in ("f16", "f32", "f64"), f"no rule for {ins.text}"
    a, b, c = (read(t, x, type_).astype(np.longdouble) for x in ins.operands[1:4])
    exact = a * b + c
    found = np.asarray(exact).astype(kind(type_))
    if "rm" in ins.mods:
        found = np.where(found > exact, np.nextafter(found, kind(type_)(-np.inf)), found)
    assert not {"rp", "rz", "sat"} & set(ins.mods), f"no rule for {ins.text}"
    return found


def _divided(a: Any, b: Any) -> Any:
    return a / b if a.dtype.kind == "f" else np.trunc(a / b) if a.dtype.kind == "i" else a // np.where(b == 0, 1, b)


def _shift(t: Threads, ins: Instruction) -> Any:
    """shl and shr: distances past the width give 0 or the sign."""
    type_ = ins.types[-1]
    a, n = read(t, ins.operands[1], type_), read(t, ins.operands[2], "u32")
    bits = SIZES[type_]
    clamped = np.minimum(n, bits - 1).astype(a.dtype)
    if ins.name == "shr":
        shifted = a >> clamped
        return shifted if a.dtype.kind == "i" else np.where(n < bits, shifted, 0).astype(a.dtype)
    return np.where(n < bits, a << clamped, 0).astype(a.dtype)


def _bfe(t: Threads, ins: Instruction) -> Any:
    type_ = ins.types[-1]
    a = read(t, ins.operands[1], type_)
    pos, length = (read(t, x, "u32").astype(np.int64) for x in ins.operands[2:4])
    bits = SIZES[type_]
    up = np.clip(bits - pos - length, 0, bits - 1).astype(a.dtype)
    down = np.clip(bits - length, 0, bits - 1).astype(a.dtype)
    return np.where(length == 0, 0, (a << up) >> down).astype(a.dtype)


def _bfi(t: Threads, ins: Instruction) -> Any:
    a, b, pos, length = (read(t, x, "b32").astype(np.uint64) for x in ins.operands[1:5])
    field = ((np.uint64(1) << np.minimum(length, 32)) - np.uint64(1)) << pos
    return ((b & ~field) | ((a << pos) & field)).astype(np.uint32)


def _prmt(t: Threads, ins: Instruction) -> Any:
    a, b, control = (read(t, x, "b32").astype(np.uint64) for x in ins.operands[1:4])
    both, out = a | (b << np.uint64(32)), np.zeros((), np.uint64)
    for i in range(4):
        c = (control >> np.uint64(4 * i)) & np.uint64(15)
        byte = (both >> ((c & np.uint64(7)) * np.uint64(8))) & np.uint64(255)
        byte = np.where(c >= 8, np.where(byte >= 128, 255, 0), byte).astype(np.uint64)
        out = out | (byte << np.uint64(8 * i))
    return out.astype(np.uint32)


COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


def _setp(t: Threads, ins: Instruction) -> Any:
    type_, word = ins.types[-1], ins.mods[0]
    assert len(ins.operands) == 3, f"no rule for {ins.text}"
    a, b = (read(t, x, type_) for x in ins.operands[1:3])
    unordered = np.isnan(a) | np.isnan(b) if a.dtype.kind == "f" else np.zeros((), bool)
    if word in ("nan", "num"):
        return unordered if word == "nan" else ~unordered
    if word not in COMPARE:
        return COMPARE[word[:-1]](a, b) | unordered  # ltu, neu, ...: true for NaN
    return COMPARE[word](a, b) & ~unordered


def _selp(t: Threads, ins: Instruction) -> Any:
    a, b = (read(t, x, ins.types[-1]) for x in ins.operands[1:3])
    return np.where(read(t, ins.operands[3], "pred"), a, b).astype(a.dtype)


def _extreme(t: Threads, ins: Instruction) -> Any:
    """min and max: a number wins over NaN, unless that is asked for; -0.0 is below 0.0."""
    type_, low = ins.types[-1], ins.name == "min"
    if type_ in HALVES:
        a, b = (_halves(t, x, type_) for x in ins.operands[1:3])
    else:
        a, b = (np.ascontiguousarray(np.broadcast_to(read(t, x, type_), (t.count,))) for x in ins.operands[1:3])
        if type_ in ("u16x2", "s16x2"):
            a, b = (x.view(UNSIGNED[16] if type_[0] == "u" else SIGNED[16]) for x in (a, b))
    if a.dtype.kind != "f":
        return (np.minimum(a, b) if low else np.maximum(a, b)).view(kind(type_))
    sign = np.signbit(a) ^ np.signbit(b)
    if "abs" in ins.mods:
        a, b = np.abs(a), np.abs(b)
    found = np.where(a == b, np.where(np.signbit(a) == low, a, b), np.fmin(a, b) if low else np.fmax(a, b))
    if "NaN" in ins.mods:
        found = np.where(np.isnan(a) | np.isnan(b), np.nan, found)
    if "xorsign" in ins.mods:
        found = np.copysign(found, np.where(sign, -1, 1))
    found = found.astype(a.dtype)
    return _joined(found, type_) if type_ in HALVES else found


def _sign(t: Threads, ins: Instruction) -> Any:
    """abs and neg; of floating-point numbers and pairs by their sign bits."""
    type_ = ins.types[-1]
    if type_[0] == "s":
        a = read(t, ins.operands[1], type_)
        return np.abs(a) if ins.name == "abs" else -a
    bits = SIZES[type_]
    sign = UNSIGNED[bits](0x80008000 if type_.endswith("x2") else 1 << (bits - 1))
    a = read(t, ins.operands[1], f"b{bits}")
    return a & ~sign if ins.name == "abs" else a ^ sign


def to_bf16(x: np.ndarray) -> np.ndarray:
    """float32 to the bits of bfloat16, to nearest even."""
    b = np.atleast_1d(x).astype(np.float32).view(np.uint32)
    rounded = (b + np.uint32(0x7FFF) + ((b >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where((b & 0x7FFFFFFF) > 0x7F800000, 0x7FFF, rounded).astype(np.uint16)


def _pair(t: Threads, ins: Instruction) -> Any:
    """cvt of two float32 into one register."""
    to = ins.types[0]
    high, low = (read(t, x, "f32") for x in ins.operands[1:3])
    assert to in ("bf16x2", "f16x2") and "rn" in ins.mods and not {"relu", "satfinite"} & set(ins.mods), f"no rule for {ins.text}"
    halves = [to_bf16(x) if to == "bf16x2" else np.atleast_1d(x).astype(np.float16).view(np.uint16) for x in (high, low)]
    return (halves[0].astype(np.uint32) << np.uint32(16)) | halves[1]


def _cvt(t: Threads, ins: Instruction) -> Any:
    to, of = ins.types[0], ins.types[1]
    if len(ins.operands) == 3:
        return _pair(t, ins)
    assert not {"rz", "rm", "rp"} & set(ins.mods), f"no rule for {ins.text}"
    a = read(t, ins.operands[1], of)
    if of == "bf16":
        a = (a.astype(np.uint32) << np.uint32(16)).view(np.float32)
    assert not {"rni", "rmi", "rpi"} & set(ins.mods), f"no rule for {ins.text}"
    if "rzi" in ins.mods:
        a = np.trunc(a)
    if "sat" in ins.mods:
        assert to == "f32", f"no rule for {ins.text}"
        a = np.clip(np.nan_to_num(a), 0, 1)
    if to == "bf16":
        return to_bf16(a)
    if a.dtype.kind == "f" and kind(to)().dtype.kind != "f":
        assert "rzi" in ins.mods, f"no rule for {ins.text}"
        limits = np.iinfo(kind(to))
        return np.clip(np.nan_to_num(a.astype(np.longdouble)), limits.min, limits.max).astype(kind(to))
    return a.astype(kind(to))


def _brev(t: Threads, ins: Instruction) -> Any:
    a = np.atleast_1d(read(t, ins.operands[1], ins.types[-1]))
    bits = SIZES[ins.types[-1]]
    found = np.zeros_like(a)
    for i in range(bits):
        found |= ((a >> a.dtype.type(i)) & a.dtype.type(1)) << a.dtype.type(bits - 1 - i)
    return found


def _highest(t: Threads, ins: Instruction) -> Any:
    """The place of the highest one, or -1."""
    a = np.asarray(read(t, ins.operands[1], f"u{SIZES[ins.types[-1]]}"))
    return np.where(a == 0, -1, np.frexp(a.astype(np.longdouble))[1] - 1).astype(np.int64)


def _bfind(t: Threads, ins: Instruction) -> Any:
    assert "shiftamt" in ins.mods and ins.types[-1][0] == "u", f"no rule for {ins.text}"
    at = _highest(t, ins)
    return np.where(at < 0, 0xFFFFFFFF, SIZES[ins.types[-1]] - 1 - at).astype(np.uint32)


def _clz(t: Threads, ins: Instruction) -> Any:
    return (SIZES[ins.types[-1]] - 1 - _highest(t, ins)).astype(np.uint32)


def _copysign(t: Threads, ins: Instruction) -> Any:
    a, b = (read(t, x, ins.types[-1]) for x in ins.operands[1:3])
    return np.copysign(b, a)


def _mov(t: Threads, ins: Instruction) -> Any:
    type_ = ins.types[-1]
    if isinstance(ins.operands[0], tuple):
        return np.atleast_1d(read(t, ins.operands[1], f"b{SIZES[type_]}"))
    return read(t, ins.operands[1], type_)


def _one(fn: Callable[[Any], Any]) -> Rule:
    def rule(t: Threads, ins: Instruction) -> Any:
        return np.asarray(fn(read(t, ins.operands[1], ins.types[-1]))).astype(kind(ins.types[-1]))

    return rule


PLAIN: dict[str, Rule] = {
    "add": _two(lambda a, b: a + b), "sub": _two(lambda a, b: a - b), "mul": _product, "mad": _mad, "fma": _fma, "div": _two(_divided),
    "rem": _two(lambda a, b: np.fmod(a, np.where(b == 0, 1, b))),
    "and": _two(np.bitwise_and), "or": _two(np.bitwise_or), "xor": _two(np.bitwise_xor), "not": _one(np.invert),
    "shl": _shift, "shr": _shift, "bfe": _bfe, "bfi": _bfi, "prmt": _prmt, "setp": _setp, "selp": _selp, "popc": _one(np.bitwise_count),
    "min": _extreme, "max": _extreme, "abs": _sign, "neg": _sign, "cvt": _cvt, "mov": _mov,
    "sqrt": _one(np.sqrt), "rcp": _one(lambda a: 1 / a), "ex2": _one(np.exp2), "brev": _brev, "bfind": _bfind, "clz": _clz,
    "copysign": _copysign,
}  # fmt: skip
