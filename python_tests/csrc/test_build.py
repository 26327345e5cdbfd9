"""What setup.py does where the core cannot be built, and what is asked of the sources."""

from __future__ import annotations

import argparse
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import zipfile
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


ERROR = "m.cpp:3:1: fatal error: no_such_header.h: No such file"
FAILS = f"""#!/bin/sh
case " $* " in *" --build "*) ;; *) exit 0 ;; esac
echo "[1/2] c++ -Werror -c m.cpp"; echo "FAILED: m.cpp.o"; echo "{ERROR}"; echo "m.cpp:9:1: error: a later one"; echo "ninja: build stopped"
exit 1
"""
"""A cmake that finds a compiler, which then fails."""
WORKS = """#!/bin/sh
case " $* " in *" --build "*) echo new >"$2/$MODULE" ;; *) mkdir -p "$4" ;; esac
"""
"""A cmake that builds a module."""
WITH_TOOLS = """
import runpy, sys, sysconfig
tools, get_path = sys.argv.pop(1), sysconfig.get_path
sysconfig.get_path = lambda name, *rest, **more: tools if name == "scripts" else get_path(name, *rest, **more)
del sys.argv[0]
runpy.run_path("setup.py", run_name="__main__")
"""
"""Runs setup.py with other tools than those in the environment's own folder, which it looks in first."""


def setup(checkout: Path, cmake: str, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """setup.py with stand-ins for CMake and Ninja."""
    tools = checkout / "tools"
    tools.mkdir(exist_ok=True)
    for name, text in (("cmake", cmake), ("ninja", "#!/bin/sh\n")):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    (checkout / "pyproject.toml").write_text('[project]\nname = "nmkernels"\nversion = "0"\n[tool.setuptools]\npackages = ["nmkernels"]\n')
    env = {**os.environ, "NMKERNELS_REQUIRE_CORE": "0", "NMKERNELS_CUDA": "auto", "MODULE": stale(checkout).name} | env
    command = [sys.executable, "-c", WITH_TOOLS, str(tools), "setup.py", *words]
    return subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True, timeout=60, check=False)


def wheel(checkout: Path) -> tuple[str, set[str]]:
    """Name and modules of the one wheel in dist/."""
    (path,) = (checkout / "dist").glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return path.name, {name for name in archive.namelist() if not name.startswith("nmkernels-")}


def test_a_compiler_that_fails_gives_a_package_without_its_core(checkout: Path) -> None:
    done = setup(checkout, FAILS, "bdist_wheel")
    assert done.returncode == 0, done.stderr
    for words in ("WITHOUT its compiled core", ERROR, "NMKERNELS_REQUIRE_CORE=1", "NMKERNELS_CUDA=off"):
        assert words in done.stderr
    assert "a later one" in done.stdout and "a later one" not in done.stderr
    assert wheel(checkout)[1] == {"nmkernels/__init__.py"}


@pytest.mark.parametrize(
    ("words", "env"),
    [
        ("build_ext --inplace", {}),
        ("editable_wheel", {}),
        ("bdist_wheel", {"NMKERNELS_REQUIRE_CORE": "1"}),
        ("bdist_wheel", {"NMKERNELS_CUDA": "on"}),
    ],
)
def test_a_compiler_that_fails_is_an_error_to_who_needs_the_core(checkout: Path, words: str, env: dict[str, str]) -> None:
    done = setup(checkout, FAILS, *words.split(), **env)
    assert done.returncode != 0 and ERROR in done.stderr
    assert not list((checkout / "dist").glob("*.whl")) and (words == "bdist_wheel" or not stale(checkout).exists())


def test_a_wheel_has_nothing_of_an_earlier_build(checkout: Path) -> None:
    folders = [f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}", f"bdist.{sysconfig.get_platform()}/wheel"]
    for folder in folders:
        older = checkout / "build" / folder / "nmkernels" / "_C.of_an_older_python.so"
        older.parent.mkdir(parents=True)
        older.write_bytes(b"")
    objects = checkout / "build" / f"cmake-{sysconfig.get_platform()}" / "m.o"
    objects.parent.mkdir()
    objects.write_bytes(b"")
    done = setup(checkout, WORKS, "bdist_wheel")
    assert done.returncode == 0, done.stderr
    assert wheel(checkout)[1] == {"nmkernels/__init__.py", f"nmkernels/{stale(checkout).name}"}
    assert objects.exists(), "compiling is incremental no more"


def test_a_folder_that_the_caller_names_is_not_emptied(checkout: Path) -> None:
    theirs = checkout / "theirs" / "file"
    theirs.parent.mkdir()
    theirs.write_bytes(b"")
    done = setup(checkout, WORKS, "build", "--build-lib", "theirs")
    assert done.returncode == 0 and theirs.exists(), done.stderr


def test_a_pure_wheel_is_for_every_system(checkout: Path) -> None:
    done = setup(checkout, FAILS, "bdist_wheel", NMKERNELS_PURE="1")
    assert done.returncode == 0, done.stderr
    assert wheel(checkout) == ("nmkernels-0-py3-none-any.whl", {"nmkernels/__init__.py"})
    done = setup(checkout, FAILS, "bdist_wheel", NMKERNELS_PURE="1", NMKERNELS_REQUIRE_CORE="1")
    assert done.returncode != 0 and "Set only one" in done.stderr


def test_a_misspelt_option_is_an_error(checkout):
    done = build(checkout, NMKERNELS_CUDA="maybe")
    assert done.returncode != 0
    assert "use auto, on or off" in done.stderr


def by_cmake(folder: Path, script: str, *options: str) -> str:
    """What a script of CMake says."""
    cmake = shutil.which("cmake", path=sysconfig.get_path("scripts")) or shutil.which("cmake")
    if cmake is None:
        pytest.skip("no cmake")
    (folder / "script.cmake").write_text(script)
    command = [cmake, *options, "-P", str(folder / "script.cmake")]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stderr.strip()


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
    for name in files.split():
        (tmp_path / name).touch()
    script = f'include({ROOT}/cmake/devices.cmake)\nnmkernels_gpu_visible(found {tmp_path})\nmessage("found ${{found}}")\n'
    assert by_cmake(tmp_path, script) == f"found {str(visible).upper()}"


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not Path("/proc/cpuinfo").exists(), reason="needs Linux's list of what an x86-64 processor has"
)
@pytest.mark.parametrize("wanted", ["best", "native"])
def test_instruction_sets_for_this_machine_alone(core, wanted, tmp_path):
    """``make demo`` compiles the best one, ``make sanitize`` those that this processor has."""
    script = f'include({ROOT}/cmake/isa.cmake)\nmessage("${{NMKERNELS_ISAS}}")\n'
    built = by_cmake(tmp_path, script, "-DCMAKE_SYSTEM_PROCESSOR=x86_64", f"-DNMKERNELS_ISAS={wanted}").split(";")
    # of amx, which has few kernels of its own, a system may refuse the state
    if wanted == "native":
        assert [name for name in built if name != "amx"] == [name for name in core.isas() if name != "amx"]
    else:
        assert built in ([core.isas()[-1]], ["avx512_bf16", "amx"])


@pytest.mark.parametrize(("option", "asked"), [("CUDA_ARCHITECTURES", "90"), ("CUDA_ARCHITECTURES", ""), ("ISAS", "portable;avx2")])
def test_less_can_be_compiled(monkeypatch, option, asked):
    """Unset, CMake's default holds, and not the value of an older build."""
    commands = []
    monkeypatch.setenv(f"NMKERNELS_{option}", asked)
    monkeypatch.setattr(subprocess, "run", lambda words, **_: commands.append(words) or subprocess.CompletedProcess(words, 0))
    module = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")
    module["BuildCore"]._configure(argparse.Namespace(debug=False, _in_place=True))
    ((*words,),) = commands
    given = [word for word in words if word.startswith(f"-DNMKERNELS_{option}=")]
    assert given == ([f"-DNMKERNELS_{option}={asked}"] if asked else []) and "NMKERNELS_*" in words


def test_both_sides_name_the_same_abi(core):
    written = re.search(r"kAbi = (\d+)", (ROOT / "csrc" / "bindings.cpp").read_text())
    assert written is not None
    assert int(written[1]) == CORE_ABI == core.abi


HEADERS = [p for p in SOURCES if p.suffix == ".h" and not {"cuda", "cusparselt"} & set(p.parts) and p.name != "bindings.h"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler on PATH")
@pytest.mark.parametrize("path", HEADERS, ids=lambda path: path.name)
def test_every_header_compiles_alone_and_without_warnings(path, tmp_path):
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only"]
    (tmp_path / "alone.cpp").write_text(f'#include "{path}"\n')
    done = subprocess.run(["c++", *flags, str(tmp_path / "alone.cpp")], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
