"""What setup.py does where the core cannot be built, and what is asked of the sources."""

from __future__ import annotations

import argparse
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from nmkernels.capability import CORE_ABI

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(p for p in (ROOT / "csrc").rglob("*") if p.suffix in (".h", ".cpp", ".cu", ".cuh"))
pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="not a source checkout")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what setup.py needs, with a module left by an earlier build."""
    for name in ("csrc", "cmake"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("setup.py", "nmkernels/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    stale(tmp_path).write_bytes(b"an older build")
    return tmp_path


def stale(checkout: Path) -> Path:
    return checkout / "nmkernels" / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"


def build(checkout: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    return subprocess.run(command, cwd=checkout, env={**os.environ, **env}, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("required", ["0", "1"])
def test_install_without_a_compiler(checkout, required):
    done = build(checkout, CXX="/nonexistent/c++", NMKERNELS_REQUIRE_CORE=required)
    assert (done.returncode == 0) == (required == "0"), done.stderr
    for words in ("cannot be built",) if required == "1" else ("WITHOUT its compiled core", "NMKERNELS_REQUIRE_CORE=1"):
        assert words in done.stderr
    assert not stale(checkout).exists()


@pytest.mark.parametrize(
    ("said", "status", "expected"),
    [
        ("", 0, 0),
        ("ptxas info : 24 registers", 0, 0),
        ("error: no such file", 3, 3),
        ("ptxas info : (C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized", 0, 1),
    ],
)
def test_a_build_whose_wgmma_wait_for_each_other_fails(said: str, status: int, expected: int) -> None:
    compiler = "sh", "-c", 'echo "$0" >&2; exit "$1"', said, str(status)
    done = subprocess.run(["sh", str(ROOT / "cmake" / "wgmma_waits.sh"), *compiler], capture_output=True, text=True, timeout=60)
    assert done.returncode == expected and said in done.stderr and ("serialises" in done.stderr) == (expected == 1)


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize(
    ("tool", "missing"),
    [("", ("no aarch64-linux-gnu-g++", "no aarch64-linux-gnu-g++")), ("aarch64-linux-gnu-g++", ("neither qemu-aarch64", "no nvcc"))],
)
def test_checks_for_arm_are_skipped_without_their_tools(tmp_path: Path, tool: str, missing: tuple[str, str]) -> None:
    if tool:
        (tmp_path / tool).touch(mode=0o755)
    command = [str(shutil.which("bash")), str(ROOT / "cmake" / "arm.sh")]
    env = {"PATH": str(tmp_path), "CUDA_HOME": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    lines = done.stdout.splitlines()
    assert [line.partition(" skipped: ")[0] for line in lines] == ["C++ tests for ARM", "CUDA sources for ARM"]
    assert all(reason in line for line, reason in zip(lines, missing, strict=True))
    assert "apt-get install g++-aarch64-linux-gnu qemu-user" in lines[0]


@pytest.mark.slow
def test_a_compile_error_is_an_error_and_leaves_no_older_module(checkout):
    for source in (checkout / "csrc" / "cpu").glob("*.cpp"):
        source.write_text("#error this does not compile\n")
    done = build(checkout, NMKERNELS_REQUIRE_CORE="0", NMKERNELS_CUDA="off", MAX_JOBS="1")
    assert done.returncode != 0
    assert "compiling the core failed" in done.stderr
    assert not stale(checkout).exists()


def test_a_misspelt_option_is_an_error(checkout):
    done = build(checkout, NMKERNELS_CUDA="maybe")
    assert done.returncode != 0
    assert "use auto, on or off" in done.stderr


@pytest.mark.parametrize(
    ("files", "visible"),
    [
        ("nvidia0", True),
        ("nvidia3 nvidiactl nvidia-uvm", True),  # a container with the fourth GPU
        ("nvidia12", True),
        ("dxg", True),  # WSL
        ("nvidiactl nvidia-uvm nvidia-modeset", False),  # a driver, and none of its GPUs
        ("", False),
    ],
)
def test_gpus_are_found_by_their_device_files(tmp_path: Path, files: str, visible: bool) -> None:
    cmake = shutil.which("cmake", path=sysconfig.get_path("scripts")) or shutil.which("cmake")
    if cmake is None:
        pytest.skip("no cmake")
    for name in files.split():
        (tmp_path / name).touch()
    script = tmp_path / "script.cmake"
    script.write_text(f'include({ROOT}/cmake/devices.cmake)\nnmkernels_gpu_visible(found {tmp_path})\nmessage("found ${{found}}")\n')
    done = subprocess.run([cmake, "-P", str(script)], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.strip() == f"found {str(visible).upper()}"


@pytest.mark.parametrize("asked", ["90", ""])
def test_one_architecture_can_be_asked_for(monkeypatch, asked):
    """With no wish of the caller's CMake's default holds, and no older build's."""
    commands = []
    monkeypatch.setenv("NMKERNELS_CUDA_ARCHITECTURES", asked)
    monkeypatch.setattr(subprocess, "run", lambda words, **_: commands.append(words) or subprocess.CompletedProcess(words, 0))
    module = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")
    module["BuildCore"]._configure(argparse.Namespace(debug=False, _in_place=True))
    ((*words,),) = commands
    given = [word for word in words if word.startswith("-DNMKERNELS_CUDA_ARCHITECTURES")]
    assert given == ([f"-DNMKERNELS_CUDA_ARCHITECTURES={asked}"] if asked else []) and "NMKERNELS_*" in words


def test_both_sides_name_the_same_abi(core):
    written = re.search(r"kAbi = (\d+)", (ROOT / "csrc" / "bindings.cpp").read_text())
    assert written is not None
    assert int(written[1]) == CORE_ABI == core.abi


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler on PATH")
def test_every_header_compiles_alone_and_without_warnings(tmp_path):
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only"]
    alone = [p for p in SOURCES if p.suffix == ".h" and not {"cuda", "cusparselt"} & set(p.parts) and "pybind11" not in p.read_text()]
    for path in alone:
        source = tmp_path / "alone.cpp"
        source.write_text(f'#include "{path}"\n')
        done = subprocess.run(["c++", *flags, str(source)], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
