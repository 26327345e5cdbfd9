"""The GPUs that a compiled module has code for.

Read from the containers that the CUDA driver chooses code from: one for each compiled .cu file, with one entry per architecture. NVIDIA
does not document the headers; the offsets are those of nvcc 13.0, and the tests compare them with cuobjdump's output if there is one.
Code may be compressed, headers never are.

  container: uint32 magic, uint16 version, uint16 size of this header, uint64 size of the entries
  entry:     uint16 kind, uint16 version, uint32 size of this header, uint64 size of the code, ...
             at byte 24: uint16 minor and uint16 major version; uint32 architecture (80, 90, ...); at byte 40: uint64 flags
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

CONTAINER = struct.pack("<IHH", 0xBA55ED50, 1, 16)
"""The first 8 bytes of a container, unique in a module."""
PREFIXES = {1: "compute_", 2: "sm_"}
"""Kinds of entries: 1 is PTX, which the driver compiles for its GPU; 2 is machine code. Other kinds (link-time code) cannot run."""
SUFFIXES = {0x100000: "a", 0x200000: "f"}
"""Flags: code for this architecture alone (``sm_90a``), and for its family (``sm_100f``)."""
ZSTD = 0x8000
"""A flag: compressed in a way that drivers before 550 do not read."""


class Code(NamedTuple):
    """Code for one architecture, ``"sm_90a"`` or for PTX ``"compute_90"``, and its flags.

    The version is that of the PTX ISA; of machine code it is 1.7 from CUDA 12 and 1.8 from CUDA 13.
    """

    architecture: str
    version: tuple[int, int]
    flags: int


def architectures(path: str | Path) -> tuple[str, ...]:
    """The architectures that a module has code for, machine code first: ``("sm_80", "sm_90a", "compute_90")``; empty without device
    code."""
    names = {code.architecture for code in device_code(path)}
    return tuple(sorted(names, key=lambda name: (name.startswith(PREFIXES[1]), len(name.rstrip("af")), name)))


def device_code(path: str | Path) -> frozenset[Code]:
    """The kinds of device code in a module."""
    if not Path(path).stat().st_size:
        return frozenset()
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as image:
        return frozenset(_entries(image))


def _entries(image: mmap.mmap) -> Iterator[Code]:
    """Each entry of each container."""
    at = image.find(CONTAINER)
    while 0 <= at <= len(image) - 16:
        entry = at + 16
        at = entry + struct.unpack_from("<Q", image, at + 8)[0]
        while entry + 48 <= min(at, len(image)):
            kind, _, header, size = struct.unpack_from("<HHIQ", image, entry)
            (minor, major, number), (flags,) = struct.unpack_from("<HHI", image, entry + 24), struct.unpack_from("<Q", image, entry + 40)
            if kind in PREFIXES:
                suffix = "".join(letter for flag, letter in SUFFIXES.items() if flags & flag)
                yield Code(f"{PREFIXES[kind]}{number}{suffix}", (major, minor), flags)
            if header < 48:
                break
            entry += header + size
        at = image.find(CONTAINER, min(at, len(image)))
