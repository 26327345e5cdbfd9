"""The check of built modules: what is built here passes it, and what a wheel must not have is named."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHECK = ROOT / "cmake" / "check_wheel.py"

pytestmark = [
    pytest.mark.skipif(not CHECK.exists(), reason="not a source checkout"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="wheels are built for Linux"),
]
needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler on PATH")


@pytest.fixture(scope="module")
def check() -> dict[str, Any]:
    return runpy.run_path(str(CHECK))


OFFER = '#define OFFER extern "C" __attribute__((visibility("default")))\nOFFER void* PyInit__C() { return nullptr; }\n'


def compiled(folder: Path, code: str, *flags: str) -> Path:
    """A module like the core, and ``code``; what other libraries see is marked OFFER."""
    module = folder / "_C.cpython-311-x86_64-linux-gnu.so"
    (folder / "m.cpp").write_text(OFFER + code)
    subprocess.run(["c++", "-shared", "-fPIC", "-fvisibility=hidden", folder / "m.cpp", "-o", module, *flags], check=True, timeout=60)
    return module


def test_the_core_passes(check: dict[str, Any], core: ModuleType) -> None:
    module = Path(core.__file__ or "")
    assert check["module_complaints"](module) == []
    assert check["module_complaints"](module, "off") == (
        [f"has code for {', '.join(a)}"] if (a := check["FATBIN"]["architectures"](module)) else []
    )


@needs_compiler
def test_a_symbol_that_does_not_belong_is_named(check: dict[str, Any], tmp_path: Path) -> None:
    code = """
namespace c10 { void f(); }
namespace at { void f(); }
extern "C" { int cuInit(unsigned); int cudaFree(void*); int cusparseLtInit(); }
OFFER void PyInit_g() { c10::f(); at::f(); cuInit(0); cudaFree(0); cusparseLtInit(); }
OFFER void helper() {}
"""
    asked = {f"asks for the symbol {name}" for name in ("_ZN3c101fEv", "_ZN2at1fEv", "cuInit", "cudaFree", "cusparseLtInit")}
    assert set(check["module_complaints"](compiled(tmp_path, code))) == asked | {"offers the symbol helper to other libraries"}


@needs_compiler
def test_a_library_that_does_not_belong_is_named(check: dict[str, Any], tmp_path: Path) -> None:
    libraries = ["libtorch_cpu.so", "libcudart.so.13", "libcusparseLt.so.0", "libcuda.so.1"]
    (tmp_path / "lib.cpp").write_text("void f() {}\n")
    for library in libraries:
        subprocess.run(["c++", "-shared", f"-Wl,-soname,{library}", tmp_path / "lib.cpp", "-o", tmp_path / library], check=True, timeout=60)
    module = compiled(tmp_path, "", "-Wl,--no-as-needed", *(str(tmp_path / library) for library in libraries))
    assert sorted(check["module_complaints"](module)) == sorted(f"needs {library}" for library in libraries)


@needs_compiler
def test_missing_device_code_is_named(check: dict[str, Any], tmp_path: Path) -> None:
    wanted = check["architectures"]()
    assert {"sm_80", "sm_90", "sm_90a", "sm_100", "sm_120", "compute_90"} < set(wanted)
    assert check["module_complaints"](compiled(tmp_path, ""), "on") == [f"has no code for {one}" for one in wanted]


@pytest.mark.parametrize(
    ("code", "word"),
    [
        (("sm_80", (1, 7), 0x2011), ""),
        (("sm_120", (1, 8), 0x2011), ""),  # known to newer drivers only
        (("compute_90", (8, 5), 0x2011), ""),
        (("sm_90a", (1, 8), 0x11), "machine code of CUDA 13 for sm_90a"),
        (("compute_90", (9, 0), 0x11), "PTX 9.0"),
        (("compute_90", (8, 5), 0x8011), "zstd"),
    ],
)
def test_code_that_drivers_of_cuda_12_do_not_read_is_named(
    check: dict[str, Any], code: tuple[str, tuple[int, int], int], word: str
) -> None:
    said = check["_for_drivers"](*code)
    assert word in said and bool(word) == bool(said)


@needs_compiler
def test_a_bundled_library_is_named(check: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = compiled(tmp_path, "")
    wheel = tmp_path / "nmkernels-1-cp311-cp311-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(module, f"nmkernels/{module.name}")
    assert check["wheel_complaints"](wheel) == []
    assert "no device code" in capsys.readouterr().out
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("nmkernels.libs/libcudart-1234.so.13", b"")
        archive.writestr("nmkernels/_emulated.cpython-311-x86_64-linux-gnu.so", b"")
    assert check["wheel_complaints"](wheel) == [
        "nmkernels.libs/libcudart-1234.so.13 is bundled",
        "nmkernels/_emulated.cpython-311-x86_64-linux-gnu.so is bundled",
    ]
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("nmkernels/__init__.py", "")
    assert check["wheel_complaints"](wheel) == ["0 compiled modules nmkernels/_C, there must be one"]


def test_the_core_loads_alone(core: ModuleType, tmp_path: Path) -> None:
    wheel = tmp_path / "any.whl"
    path = Path(core.__file__ or "")
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(path, f"nmkernels/{path.name}")
    command = [sys.executable, str(ROOT / "cmake" / "try_wheel.py"), "load", str(wheel)]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": ""}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"ABI {core.abi}" in done.stdout
