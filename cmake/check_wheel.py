"""Reads the compiled modules of wheels and says what is wrong with them: ``python cmake/check_wheel.py dist/*.whl [--cuda on]``.

A module may ask of the system it is loaded on no more than C and C++ do. It names nothing of torch, so that one wheel
serves every torch; nothing of CUDA, since the runtime is linked in statically and looks for the driver by itself; and
nothing of cuSPARSELt, which is opened when it is first used. None of those libraries lies in the wheel either.

Plain Python, without even the package installed: it also runs inside the images that wheels are published from.
"""

from __future__ import annotations

import argparse
import re
import runpy
import struct
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FATBIN: dict[str, Any] = runpy.run_path(str(ROOT / "cmake" / "fatbin.py"))

ALLOWED = re.compile(
    r"(libstdc\+\+\.so\.6|libgcc_s\.so\.1|libm\.so\.6|libc\.so\.6|libpthread\.so\.0|libdl\.so\.2|librt\.so\.1|ld-linux-.*)$"
)
"""Libraries that a module may be linked with: those that every Linux with a torch has."""
PTX, MACHINE_CODE, BLACKWELL = (8, 5), (1, 7), 100
"""The newest PTX and machine code that drivers from 525 on take; Blackwell (100 and later) has newer drivers and another machine code."""
FOREIGN = re.compile(r"torch|c10|caffe2|_ZNK?2at\d|^(__)?cu([A-Z]|da|sparse)")
"""Symbols that must not be asked for: of torch (``_ZN2at...`` is its namespace ``at``) and of CUDA."""


def main() -> int:
    """Check every wheel, print one line for each module, and the complaints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument("--cuda", choices=("on", "off", "any"), default="any", help="whether there must be device code; default any")
    options = parser.parse_args()
    complaints = [f"{wheel.name}: {complaint}" for wheel in options.wheels for complaint in wheel_complaints(wheel, options.cuda)]
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    return 1 if complaints else 0


def architectures() -> list[str]:
    """What ``cmake/architectures.cmake`` asks for, by nvcc's names."""
    listed = re.search(r'NMKERNELS_CUDA_ARCHITECTURES "([\w;]+)"', (ROOT / "cmake" / "architectures.cmake").read_text(encoding="utf-8"))
    if listed is None:
        raise SystemExit("cmake/architectures.cmake: no NMKERNELS_CUDA_ARCHITECTURES")
    also = {"80": ["sm_80", "sm_89"], "90": ["sm_90", "sm_90a"], "ptx": ["compute_90"]}
    return [name for one in listed[1].split(";") for name in also.get(one, [f"sm_{one}"])]


def wheel_complaints(wheel: Path, cuda: str = "any") -> list[str]:
    """What is wrong with the wheel: its libraries, and its one module."""
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        names = [name for name in archive.namelist() if ".so" in Path(name).suffixes]
        found = [f"{name} is bundled" for name in names if not re.fullmatch(r"nmkernels/_C\.[\w-]+\.so", name)]
        modules = [Path(archive.extract(name, folder)) for name in names if name.startswith("nmkernels/_C.")]
        if len(modules) != 1:
            found.append(f"{len(modules)} compiled modules nmkernels/_C, there must be one")
        for module in modules:
            print(f"{wheel.name}: {', '.join(needed(module))}; {', '.join(FATBIN['architectures'](module)) or 'no device code'}")
            found += [f"{module.name} {complaint}" for complaint in module_complaints(module, cuda)]
    return found


def module_complaints(module: Path, cuda: str = "any") -> list[str]:
    """What is wrong with a compiled module: libraries it needs, names it asks for or offers, the GPUs it has code for."""
    found = [f"needs {library}" for library in needed(module) if not ALLOWED.match(library)]
    for name, defined in symbols(module).items():
        if not defined and FOREIGN.search(name):
            found.append(f"asks for the symbol {name}")
        if defined and not name.startswith("PyInit_"):
            found.append(f"offers the symbol {name} to other libraries")
    there = FATBIN["architectures"](module)
    if cuda == "off" and there:
        found.append(f"has code for {', '.join(there)}")
    if cuda == "on":
        wanted = architectures()
        found += [f"has no code for {one}" for one in wanted if one not in there]
        found += [f"has code for {one}, which nobody asked for" for one in there if one not in wanted]
        found += [complaint for code in sorted(FATBIN["device_code"](module)) if (complaint := _for_drivers(*code))]
    return found


def _for_drivers(architecture: str, version: tuple[int, int], flags: int) -> str:
    """Why a driver of CUDA 12 that knows this GPU does not read its code; empty if it does. ``cmake/toolkit.sh`` builds what they read."""
    number = int(re.sub(r"\D", "", architecture))
    if flags & FATBIN["ZSTD"]:
        return f"has code for {architecture} that is compressed by zstd, which drivers before 550 do not read"
    if architecture.startswith("compute") and version > PTX:
        return f"has PTX {version[0]}.{version[1]} for {architecture}, and drivers of CUDA 12.5 read {PTX[0]}.{PTX[1]}"
    if architecture.startswith("sm") and number < BLACKWELL and version > MACHINE_CODE:
        return f"has machine code of CUDA 13 for {architecture}, which drivers before 580 do not run"
    return ""


def needed(module: Path) -> list[str]:
    """The libraries that the loader will look for: DT_NEEDED entries (tag 1) of the dynamic section."""
    image = module.read_bytes()
    place = sections(image)
    entries = struct.iter_unpack("<QQ", image[place[".dynamic"]])
    return [_text(image, place[".dynstr"], value) for tag, value in entries if tag == 1]


def symbols(module: Path) -> dict[str, bool]:
    """The names that the loader will see, and whether the module defines them (else it asks for them)."""
    image = module.read_bytes()
    place = sections(image)
    # name, type and binding, visibility, section (0: undefined), value, size
    entries = list(struct.iter_unpack("<IBBHQQ", image[place[".dynsym"]]))[1:]
    return {_text(image, place[".dynstr"], name): section != 0 for name, _, _, section, _, _ in entries}


def sections(image: bytes) -> dict[str, slice]:
    """Where each section of a 64-bit little-endian ELF file lies, by name; nothing for any other file.

    The file header has at byte 40 a uint64 offset of the section headers, at 58 three uint16: their size, number, which holds names. A
    section header has a uint32 offset of its name, and at byte 24 two uint64: offset and size of its content.
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


def _text(image: bytes, strings: slice, offset: int) -> str:
    start = strings.start + offset
    return image[start : image.index(b"\0", start)].decode()


if __name__ == "__main__":
    sys.exit(main())
