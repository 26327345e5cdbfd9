"""What cuTensorMapEncodeTiled makes, with every limit that it has (cuda.h, PTX ISA 5.5), as 128 bytes that only this machine reads."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .order import check

ELEMENT_BYTES = {0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 9: 2}
"""By CUtensorMapDataType: UINT8, UINT16, UINT32, INT32, UINT64, INT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16."""
SPANS = {0: 0, 1: 32, 2: 64, 3: 128}
"""By CUtensorMapSwizzle: the bytes of a row that it permutes."""
_FORM = struct.Struct("<8sIIIIQ5Q4Q5I")
_MAGIC = b"nm-tmap\0"
LIMIT = "tensor map"


@dataclass(frozen=True)
class TensorMap:
    """A tensor in global memory, innermost dimension first, and the box that a copy takes of it."""

    address: int
    element: int
    """Bytes of one."""
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    """In bytes, of all dimensions but the first."""
    box: tuple[int, ...]
    span: int
    """Bytes of a row that the swizzle permutes; 0: none."""

    def pack(self) -> bytes:
        rank = len(self.sizes)
        fill = [0] * (5 - rank)
        made = _FORM.pack(
            _MAGIC, rank, self.element, self.span, 0, self.address, *self.sizes, *fill, *self.strides, *fill, *self.box, *fill
        )
        return made.ljust(128, b"\0")

    @classmethod
    def unpack(cls, data: bytes, text: str) -> TensorMap:
        magic, rank, element, span, _, address, *rest = _FORM.unpack(data[: _FORM.size])
        check(magic == _MAGIC, LIMIT, f"{text}: the address holds none")
        return cls(address, element, tuple(rest[:rank]), tuple(rest[5 : 4 + rank]), tuple(rest[9 : 9 + rank]), span)


def encode(dtype: int, address: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int], swizzle: int = 0) -> bytes:
    """The arguments of cuTensorMapEncodeTiled, enums as in cuda.h; the result may be a kernel's parameter.

    Raises:
        Hazard: one of them is beyond a limit, where the driver would answer CUDA_ERROR_INVALID_VALUE.
    """
    rank = len(sizes)
    alike = 1 <= rank <= 5 and len(strides) == rank - 1 and len(box) == rank
    check(alike, LIMIT, f"rank {rank}, {len(strides)} strides, box of {len(box)}")
    check(dtype in ELEMENT_BYTES, LIMIT, f"no rule for data type {dtype}")
    element, span = ELEMENT_BYTES[dtype], SPANS[swizzle]
    check(address % 16 == 0 and address, LIMIT, f"address {address:#x} is no multiple of 16")
    check(all(1 <= s <= 1 << 32 for s in sizes), LIMIT, f"sizes {tuple(sizes)} are not all in 1 ... 2^32")
    check(all(1 <= b <= 256 for b in box), LIMIT, f"a box of {tuple(box)}, of more than 256 one way")
    check(all(s % 16 == 0 and s < 1 << 40 for s in strides), LIMIT, f"strides {tuple(strides)} are not all multiples of 16 below 2^40")
    inner = box[0] * element
    check(inner % 16 == 0, LIMIT, f"the box's inner {inner} bytes are no multiple of 16")
    check(not span or inner <= span, LIMIT, f"the box's inner {inner} bytes are more than the {span} of the swizzle")
    below = sizes[0] * element
    for i, stride in enumerate(strides):
        check(stride >= below or sizes[i + 1] == 1, LIMIT, f"stride {stride} is less than the {below} bytes of the dimension before")
        below = stride * sizes[i + 1]
    return TensorMap(address, element, tuple(sizes), tuple(strides), tuple(box), span).pack()


def permutation(chunks: int, span: int) -> np.ndarray:
    """Where each 16 bytes of a box lie in shared memory, counted from where it begins."""
    at = 16 * np.arange(chunks)
    return (at ^ ((at >> 7 & (span // 16 - 1 if span else 0)) << 4)) // 16
