"""wgmma by itself: every layout of operands in shared memory and registers, metadata, selectors, types, against a plain product.

Images of shared memory are written here as the PTX ISA manual draws them (9.7.15.5.1, 9.7.15.6.2), not by the machine's own formula.
"""

from __future__ import annotations

import re
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch

from nmkernels import reference

from .machine import execute
from .order import Hazard
from .parse import Kernel, parse

N, B_AT = 16, 8192
KINDS = {"bf16": torch.bfloat16, "f16": torch.float16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "s8": torch.int8}
CODES = {128: 1, 64: 2, 32: 3, 0: 0}
"""Of a swizzle in a descriptor, by the bytes of a row."""


A, B, METADATA, FRAGMENTS = "%rd12", "%rd13", "%r17", "{%r24, %r25, %r26, %r27}"
CASES = {
    "dense_kk": ("sync.aligned.m64n16k16.f32.bf16.bf16", f"{A}, {B}, 1, 1, 1, 0, 0", "kk", 0),
    "dense_mn": ("sync.aligned.m64n16k16.f32.bf16.bf16", f"{A}, {B}, 1, 1, 1, 1, 1", "mm", 0),
    "dense_rk": ("sync.aligned.m64n16k16.f32.f16.f16", f"{FRAGMENTS}, {B}, 1, 1, 1, 0", "rk", 0),
    "dense_r8": ("sync.aligned.m64n16k32.f32.e4m3.e5m2", f"{FRAGMENTS}, {B}, 1, 1, 1", "rk", 0),
    "sparse_kk_0": ("sp.sync.aligned.m64n16k32.f32.bf16.bf16", f"{A}, {B}, {METADATA}, 0, 1, 1, 1, 0, 0", "kk", 0),
    "sparse_kk_1": ("sp.sync.aligned.m64n16k32.f32.bf16.bf16", f"{A}, {B}, {METADATA}, 1, 1, 1, 1, 0, 0", "kk", 1),
    "sparse_mn_0": ("sp.sync.aligned.m64n16k32.f32.f16.f16", f"{A}, {B}, {METADATA}, 0, 1, 1, 1, 1, 1", "mm", 0),
    "sparse_rk_1": ("sp.sync.aligned.m64n16k32.f32.bf16.bf16", f"{FRAGMENTS}, {B}, {METADATA}, 1, 1, 1, 1, 0", "rk", 1),
    "sparse_8": ("sp.sync.aligned.m64n16k64.f32.e4m3.e5m2", f"{A}, {B}, {METADATA}, 0, 1, 1, 1", "kk", 0),
    "sparse_r8": ("sp.sync.aligned.m64n16k64.f32.e5m2.e4m3", f"{FRAGMENTS}, {B}, {METADATA}, 0, 1, 1, 1", "rk", 0),
    "sparse_s8": ("sp.sync.aligned.m64n16k64.s32.s8.s8", f"{A}, {B}, {METADATA}, 0, 1", "kk", 0),
}
"""The instruction, its operands after D, the order of A and of B (K or M side by side, or registers), and the selector of metadata."""


@lru_cache(16)
def text(name: str) -> str:
    """The PTX of ``kernels/product.cu`` with this instruction."""
    instruction, operands, *_ = CASES[name]
    code = (Path(__file__).parent / "kernels" / "product.ptx").read_text()
    made, times = re.subn(r"wgmma\.mma_async\.\S+ (\{[^}]*\}), [^;]*;", rf"wgmma.mma_async.{instruction} \1, {operands};", code)
    assert times == 1
    return made.replace(".f32 \t%f", ".b32 \t%f").replace(".global.f32", ".global.u32") if ".s32." in instruction else made


@lru_cache(16)
def kernel(name: str) -> Kernel:
    return parse(text(name))


def bytes_of(x: torch.Tensor, type_: str) -> np.ndarray:
    """Whole numbers ``[rows, columns]`` as the bytes of rows."""
    made: np.ndarray = x.to(KINDS[type_]).contiguous().view(torch.uint8).numpy().reshape(len(x), -1)
    return made


def k_major(rows: np.ndarray, span: int, first: int) -> tuple[np.ndarray, int]:
    """K side by side, in rows of ``span`` bytes where the operand begins at the byte ``first``; and the descriptor but for the address."""
    image = np.zeros(8192, np.uint8)
    for r, row in enumerate(rows):
        for c in range(len(row) // 16):
            if span:
                turn = r % 8 * span // 128  # eight, four or two rows have another order of 16 bytes
                at = r // 8 * 8 * span + r % 8 * span + ((c + first // 16) ^ turn) * 16
            else:
                at = r // 8 * 128 + c * 1024 + r % 8 * 16
            image[at : at + 16] = row[16 * c : 16 * c + 16]
    lead, stride = (1024, 128) if not span else (16, 8 * span)
    return image, first // 16 * (span > 0) | lead >> 4 << 16 | stride >> 4 << 32 | CODES[span] << 62


def mn_major(rows: np.ndarray) -> tuple[np.ndarray, int]:
    """M or N side by side, 64 in a row of 128 bytes, eight of K in 1024 bytes; 16-bit numbers."""
    image = np.zeros(8192, np.uint8)
    turned = np.ascontiguousarray(rows.view(np.uint16).T).view(np.uint8)
    for k, row in enumerate(turned):
        for c in range(len(row) // 16):
            at = k // 8 * 1024 + k % 8 * 128 + (c ^ k % 8) * 16
            image[at : at + 16] = row[16 * c : 16 * c + 16]
    return image, 4096 >> 4 << 16 | 1024 >> 4 << 32 | CODES[128] << 62


def fragments(rows: np.ndarray) -> np.ndarray:
    """A ``[64, 32 bytes]`` in registers of 128 threads."""
    words = rows.view(np.uint32)  # [64, 8]
    found = np.zeros((128, 4), np.uint32)
    for lane in range(128):
        w, g, t = lane // 32, lane % 32 // 4, lane % 4
        for r in range(4):
            found[lane, r] = words[16 * w + g + 8 * (r % 2), t + 4 * (r // 2)]
    return found


def words_of(codes: np.ndarray, selector: int) -> np.ndarray:
    """Metadata of 128 threads from numbers of 4 bits ``[64, groups]``."""
    found = np.zeros(128, np.uint32)
    for lane in range(128):
        w, t = lane // 32, lane % 4
        if codes.shape[1] == 8:  # 32 of k: two of four lanes, two rows in a word
            if t // 2 == selector:
                for i in range(4):
                    low, high = (int(codes[16 * w + lane % 32 // 4 + half, 4 * (t % 2) + i]) for half in (0, 8))
                    found[lane] |= low << 4 * i | high << (16 + 4 * i)
        else:  # 64 of k: one row in a word
            for i in range(8):
                found[lane] |= int(codes[16 * w + lane % 32 // 4 + 8 * (t % 2), 8 * (t // 2) + i]) << 4 * i
    return found


def multiply(name: str, span_a=128, span_b=128, first=0, mode="latest", bad="", accumulator=0, before=0) -> bool:
    """Whether the kernel's product is the product; ``bad``: what is changed before; ``before``: D is that, and not some small numbers."""
    instruction, _, layout, selector = CASES[name]
    types = instruction.split(".")[-2:]
    g = torch.Generator().manual_seed(1)
    depth = 64 * 8 // torch.empty(0, dtype=KINDS[types[0]]).element_size() // 8
    depth = depth if name.startswith("sparse") else depth // 2
    a, b = (torch.randint(-7, 8, (size, depth), generator=g) for size in (64, N))
    old = torch.full((64, N), float(before)).double() if before else torch.randint(-9, 10, (64, N), generator=g).double()
    metadata = np.zeros(128, np.uint32)
    packed = a
    if name.startswith("sparse"):
        values, indices = reference.compress(a.float(), 2, 4)
        packed, a = values.long(), reference.decompress(values, indices, 2, 4, depth).long()
        codes = np.stack([indices.numpy() & 15, indices.numpy() >> 4], -1).reshape(64, -1)
        if bad == "nibble":
            codes[37, 5] = 0b1010
        metadata = words_of(codes, selector)
    of_a, of_b = bytes_of(packed, types[0]), bytes_of(b, types[1])
    image_a, descriptor_a = np.zeros(8192, np.uint8), 0
    if layout[0] != "r":
        image_a, descriptor_a = mn_major(of_a) if layout[0] == "m" else k_major(of_a, span_a, first)
    image_b, descriptor_b = mn_major(of_b) if layout[1] == "m" else k_major(of_b, span_b, first if len(of_b[0]) + first <= span_b else 0)
    registers = fragments(of_a) if layout[0] == "r" else np.zeros((128, 4), np.uint32)
    descriptor_a += {"base offset": 1 << 49, "row": 7, "pattern": 128 >> 4, "reserved": 1 << 15}.get(bad, 0)
    lanes = np.arange(128)
    row = (16 * (lanes // 32) + lanes % 32 // 4)[:, None] + 8 * (np.arange(8) // 2 % 2)
    col = (lanes % 4 * 2)[:, None] + 8 * (np.arange(8) // 4) + np.arange(8) % 2
    out = old[row, col].to(torch.int32 if types[0] == "s8" else torch.float32)
    given = [torch.from_numpy(x.view(np.int32)) for x in (np.concatenate([image_a, image_b]), metadata, registers)]
    args = [given[0], descriptor_a, descriptor_b + (B_AT >> 4), given[1], given[2], out]
    execute(kernel(name), 1, args, mode=mode, threads=128, accumulator=accumulator)
    terms, unit = a.double()[:, None] * b.double(), 2.0 ** (before.bit_length() - accumulator) if accumulator and before else 1.0
    return torch.equal(out.double(), (old + ((terms / unit).trunc() * unit).sum(2))[row, col])


@pytest.mark.parametrize("mode", ["earliest", pytest.param("latest", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_operands(name: str, mode: str) -> None:
    assert multiply(name, mode=mode)


@pytest.mark.parametrize("name", ["dense_r8", "sparse_8", "sparse_kk_0"])
def test_a_narrow_accumulator_truncates_small_terms(name: str) -> None:
    """Of fp8 alone: in 14 bits 65536 leaves eighths of the products' numbers, 64 all of them."""
    assert multiply(name, accumulator=14, before=64)
    assert multiply(name, accumulator=14, before=65536) == ("e4m3" in CASES[name][0])
    assert multiply(name, before=65536)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("span_a", "span_b", "first"), [(64, 64, 0), (128, 64, 32), (32, 128, 0), (64, 128, 32), (128, 128, 64), (0, 0, 0), (0, 128, 0)]
)
@pytest.mark.parametrize("name", ["dense_kk", "sparse_kk_1", "sparse_8", "sparse_s8"])
def test_swizzles(name: str, span_a: int, span_b: int, first: int) -> None:
    assert multiply(name, span_a, span_b, first)


@pytest.mark.parametrize(
    ("bad", "message"),
    [("nibble", "invalid nibble"), ("base offset",) * 2, ("pattern", "base offset"), ("row", "descriptor"), ("reserved", "descriptor")],
)
def test_what_is_not_allowed(bad: str, message: str) -> None:
    with pytest.raises(Hazard, match=f"^{message}"):
        multiply("sparse_kk_0", bad=bad)


def test_a_row_of_32_bytes_holds_no_sparse_operand() -> None:
    """B has 64 bytes of k for an instruction."""
    with pytest.raises(Hazard, match="descriptor"):
        multiply("sparse_kk_0", span_b=32)


def test_metadata_as_the_package_packs_it() -> None:
    """Of 64 columns the word of a thread serves both selectors."""
    indices = reference.compress(torch.randn(64, 64), 2, 4)[1]
    codes = np.stack([indices.numpy() & 15, indices.numpy() >> 4], -1).reshape(64, -1)
    mine = words_of(codes[:, :8], 0) | words_of(codes[:, 8:], 1)
    assert np.array_equal(reference.to_layout(indices, 64, "wgmma.sp").numpy().reshape(-1).view(np.uint32), mine)


EDITS = {
    "": ("", "", None),
    "no fence.proxy.async": (r"fence\.proxy\.async\S*;", "", "not fenced for the async proxy"),
    "no barrier": (r"bar\.sync\s+0;", "", "race"),
    "no wgmma.fence": (r"wgmma\.fence\S*;", "", "no wgmma.fence"),
    "fence before the last use": (r"(wgmma\.fence\S*;)", r"\1 add.f32 %f17, %f17, %f17;", "no wgmma.fence"),
    "no commit": (r"wgmma\.commit_group\S*;", "", "register in flight"),
    "no wait": (r"wgmma\.wait_group\S* 0;", "", "register in flight"),
    "A is written too early": (r"(wgmma\.commit_group\S*;)", r"\1 mov.u32 %r24, 0;", "register in flight"),
    "A is read too early": (r"(wgmma\.commit_group\S*;)", r"\1 mov.u32 %r1, %r24;", "register in flight"),
    "metadata is written too early": (r"(wgmma\.commit_group\S*;)", r"\1 mov.u32 %r17, 0;", "register in flight"),
    "metadata is read": (r"(wgmma\.commit_group\S*;)", r"\1 mov.u32 %r1, %r17;", None),
    "shared memory is written too early": (r"(wgmma\.commit_group\S*;)", r"\1 st.shared.u32 [1024], 0;", "overwritten under wgmma|race"),
    "descriptors that differ": (r"(wgmma\.mma_async)", r"cvt.u64.u32 %rd13, %r24; \1", "descriptors differ"),
    "another shape": (
        r"(wgmma\.mma_async\.sp\S*m64n16k32)(\S*)( \{[^}]*\}, \{[^}]*\}, %rd13)([^;]*);",
        r"\1\2\3\4; wgmma.mma_async.sync.aligned.m64n16k16\2\3, 1, 1, 1, 0;",
        "no wgmma.fence",
    ),
    "no commit and no use": (r"wgmma\.commit_group[\s\S]*?(?=\sret;)", "", "left before wait_group"),
}  # fmt: skip


@pytest.mark.parametrize("mode", [3, *(pytest.param(m, marks=pytest.mark.slow) for m in ("earliest", "latest"))])
@pytest.mark.parametrize("name", EDITS)
def test_order_around_wgmma(name: str, mode: str | int) -> None:
    """Of one product with A in registers, one edit."""
    pattern, replacement, message = EDITS[name]
    made, times = re.subn(pattern, replacement, text("sparse_rk_1"), count=1)
    assert times
    image, out = torch.zeros(4096, dtype=torch.int32), torch.zeros(1024)
    metadata = torch.full((128,), 0x44444444, dtype=torch.int32)
    stride = 1024 >> 4 << 32 | 1 << 62
    args = [image, stride, stride, metadata, torch.arange(512, dtype=torch.int32), out]
    with pytest.raises(Hazard, match=f"^({message})") if message else nullcontext():
        execute(parse(made), 1, args, mode=mode, threads=128)
