"""Which GPUs a compiled module has code for, read from the file itself: its ELF section ``.nv_fatbin``.

That section is what the CUDA driver chooses from: one container for each compiled ``.cu`` file, of one entry for each
architecture. Code may be compressed, headers never are, so that nothing of CUDA is needed to read them. NVIDIA does not
document the headers; the offsets below are those that nvcc 13.0 writes (2026-11), and the tests compare them with what
``cuobjdump`` says where there is one::

    container: uint32 magic, uint16 version, uint16 size of this header, uint64 size of the entries
    entry:     uint16 kind, uint16 version, uint32 size of this header, uint64 size of the code, ...
               at byte 28: uint32 architecture (80, 90, ...); at byte 40: uint64 flags
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

MAGIC = 0xBA55ED50
PREFIXES = {1: "compute_", 2: "sm_"}
"""Kinds of entries: 1 is PTX, which the driver compiles for its GPU; 2 is machine code. Others (link-time code) run nowhere."""
SUFFIXES = {0x100000: "a", 0x200000: "f"}
"""Flags: code for this architecture alone (``sm_90a``), and for its family (``sm_100f``)."""


def architectures(path: str | Path) -> tuple[str, ...]:
    """What the module has code for, machine code first: ``("sm_80", "sm_90a", "compute_90")``; empty without device code."""
    found = {one for container in containers(path) for one in container}
    return tuple(sorted(found, key=lambda name: (name.startswith(PREFIXES[1]), len(name.rstrip("af")), name)))


def containers(path: str | Path) -> list[tuple[str, ...]]:
    """The architectures of each container, which is to say of each source file."""
    with open(path, "rb") as file:
        if len(file.read(64)) < 64:
            return []
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as image:
            place = sections(image).get(".nv_fatbin")
            return [] if place is None else _containers(image, place.start, min(place.stop, len(image)))


def sections(image: bytes | mmap.mmap) -> dict[str, slice]:
    """Where each section of a 64-bit little-endian ELF file lies, by name; nothing for any other file.

    ::

        file header:    at byte 40: uint64 offset of the section headers; at byte 58: uint16 their size, their number, which holds names
        section header: uint32 offset of its name, ... at byte 24: uint64 offset of its content, uint64 size of it
    """
    if image[:6] != b"\x7fELF\x02\x01":
        return {}
    (start,) = struct.unpack_from("<Q", image, 40)
    size, number, names = struct.unpack_from("<3H", image, 58)
    if start + size * number > len(image) or names >= number:
        return {}
    (text,) = struct.unpack_from("<Q", image, start + names * size + 24)
    found = {}
    for header in range(start, start + size * number, size):
        (name,) = struct.unpack_from("<I", image, header)
        offset, length = struct.unpack_from("<2Q", image, header + 24)
        found[image[text + name : image.find(b"\0", text + name)].decode("ascii", "replace")] = slice(offset, offset + length)
    return found


def _containers(image: bytes | mmap.mmap, at: int, end: int) -> list[tuple[str, ...]]:
    found = []
    while at + 16 <= end:
        magic, _, header, size = struct.unpack_from("<IHHQ", image, at)
        if magic == MAGIC:
            found.append(tuple(_entries(image, at + header, min(at + header + size, end))))
            at += header + size
        else:
            # the linker fills up to the next container's alignment
            at += 8
    return found


def _entries(image: bytes | mmap.mmap, at: int, end: int) -> list[str]:
    found = []
    while at + 48 <= end:
        kind, _, header, size = struct.unpack_from("<HHIQ", image, at)
        (number,), (flags,) = struct.unpack_from("<I", image, at + 28), struct.unpack_from("<Q", image, at + 40)
        if kind in PREFIXES:
            found.append(f"{PREFIXES[kind]}{number}" + "".join(letter for flag, letter in SUFFIXES.items() if flags & flag))
        if header < 48:
            break
        at += header + size
    return found
