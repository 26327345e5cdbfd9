"""The reader of device code's headers: on files put together here, and on what nvcc makes."""

from __future__ import annotations

import runpy
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from python_tests.for_each import for_each

FILE = Path(__file__).resolve().parents[2] / "cmake" / "fatbin.py"
if not FILE.exists():
    pytest.skip("not a source checkout", allow_module_level=True)
FATBIN = runpy.run_path(str(FILE))
CONTAINER, ZSTD, architectures, device_code = (FATBIN[name] for name in ("CONTAINER", "ZSTD", "architectures", "device_code"))

PTX, CUBIN, LTO = 1, 2, 8
ONLY, FAMILY = 0x100000, 0x200000


def entry(kind: int, number: int, flags: int = 0, code: bytes = b"code" * 4) -> bytes:
    header = struct.pack("<HHIQIIHHIIIQQQ", kind, 0x101, 64, len(code), 0, 0, 8, 1, number, 0, 0, 0x11 | flags, 0, 0)
    return header + code


def container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return CONTAINER + struct.pack("<Q", len(body)) + body


@for_each(
    "image, found",
    [
        # in order
        (b"code" + container(entry(PTX, 90), entry(CUBIN, 100, FAMILY), entry(CUBIN, 90, ONLY), entry(CUBIN, 80)),
         ("sm_80", "sm_90a", "sm_100f", "compute_90")),
        # of every container; gaps are skipped, and what an entry without code is for counts
        (container(entry(CUBIN, 80)) + b"padding!" * 3 + container(entry(CUBIN, 90, ONLY, b""), entry(PTX, 90)) + bytes(8),
         ("sm_80", "sm_90a", "compute_90")),
        # code for the linker runs nowhere
        (container(entry(LTO, 80), entry(CUBIN, 90)), ("sm_90",)),
        # a container that promises more than the file holds
        (CONTAINER + struct.pack("<Q", 1 << 40) + entry(CUBIN, 80)[:-4], ("sm_80",)),
        # an entry that is nothing but zeros, which leads nowhere
        (container(entry(CUBIN, 80) + bytes(64)), ("sm_80",)),
        # files of another kind: empty, short, text, without device code
        *((image, ()) for image in (b"", b"\x7fELF", b"not a module at all" * 9, b"\x7fELF" + bytes(200))),
    ],
)  # fmt: skip
def test_architectures(tmp_path: Path, image: bytes, found: tuple[str, ...]) -> None:
    (tmp_path / "m.so").write_bytes(image)
    assert architectures(tmp_path / "m.so") == found


def test_versions_and_flags(tmp_path: Path) -> None:
    (tmp_path / "m.so").write_bytes(container(entry(CUBIN, 90, ONLY | ZSTD)))
    assert device_code(tmp_path / "m.so") == {("sm_90a", (1, 8), ONLY | ZSTD | 0x11)}


def test_a_cut_off_file_does_not_raise(tmp_path: Path) -> None:
    image = container(entry(CUBIN, 80), entry(PTX, 90))
    for length in range(len(image)):
        (tmp_path / "m.so").write_bytes(image[:length])
        assert set(architectures(tmp_path / "m.so")) <= {"sm_80", "compute_90"}


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on PATH")
def test_what_nvcc_writes(tmp_path: Path) -> None:
    source, module = tmp_path / "k.cu", tmp_path / "k.o"
    source.write_text("__global__ void twice(float* x) { x[threadIdx.x] *= 2; }\n")
    wanted = ["arch=compute_80,code=sm_80", "arch=compute_90a,code=sm_90a", "arch=compute_90,code=compute_90"]
    codes = [word for one in wanted for word in ("-gencode", one)]
    subprocess.run(["nvcc", "-c", *codes, source, "-o", module], check=True, capture_output=True, timeout=120)
    assert architectures(module) == ("sm_80", "sm_90a", "compute_90")
