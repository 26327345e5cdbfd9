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
CORE_HEADERS = [p for p in SOURCES if p.parent.name == "core"]
KNOWN = {"types.h": {"cstdint", "cstring", "cuda_bf16.h", "cuda_fp16.h"}, "dispatch.h": {"stdexcept", "string"}}
"""What headers of the core include: conversions have instructions on a GPU, the choice of an instance happens on the host."""
needs_sources = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="not a source checkout")


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


@needs_sources
def test_without_a_compiler_the_package_installs_and_says_so(checkout):
    done = build(checkout, CXX="/nonexistent/c++", NMKERNELS_REQUIRE_CORE="0")
    assert done.returncode == 0, done.stderr
    assert "WITHOUT its compiled core" in done.stderr
    assert "NMKERNELS_REQUIRE_CORE=1" in done.stderr
    assert not stale(checkout).exists()


@needs_sources
def test_a_required_core_that_cannot_be_built_is_an_error(checkout):
    done = build(checkout, CXX="/nonexistent/c++", NMKERNELS_REQUIRE_CORE="1")
    assert done.returncode != 0
    assert "cannot be built" in done.stderr
    assert not stale(checkout).exists()


@needs_sources
def test_a_compile_error_is_an_error_and_leaves_no_older_module(checkout):
    for source in (checkout / "csrc" / "cpu").glob("*.cpp"):
        source.write_text("#error this does not compile\n")
    done = build(checkout, NMKERNELS_REQUIRE_CORE="0", NMKERNELS_CUDA="off", MAX_JOBS="1")
    assert done.returncode != 0
    assert "compiling the core failed" in done.stderr
    assert not stale(checkout).exists()


@needs_sources
@pytest.mark.skipif(any(p.suffix == ".cu" for p in SOURCES), reason="there are CUDA sources")
def test_cuda_on_without_cuda_sources_says_so(checkout):
    done = build(checkout, NMKERNELS_CUDA="on", NMKERNELS_REQUIRE_CORE="0")
    assert done.returncode != 0
    assert "no CUDA sources" in " ".join(done.stderr.split())


@needs_sources
def test_a_misspelt_option_is_an_error(checkout):
    done = build(checkout, NMKERNELS_CUDA="maybe")
    assert done.returncode != 0
    assert "use auto, on or off" in done.stderr


@needs_sources
@pytest.mark.parametrize("asked", ["90a-real", ""])
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


@needs_sources
def test_both_sides_name_the_same_abi(core):
    written = re.search(r"kAbi = (\d+)", (ROOT / "csrc" / "bindings.cpp").read_text())
    assert written is not None
    assert int(written[1]) == CORE_ABI == core.abi


@needs_sources
def test_no_source_includes_torch():
    for path in SOURCES:
        included = re.findall(r'#include [<"]([^>"]+)', path.read_text())
        assert not [name for name in included if name.startswith(("torch/", "ATen/", "c10/"))], path


@needs_sources
def test_the_core_knows_only_the_standard_integers():
    for path in CORE_HEADERS:
        included = re.findall(r"#include <([^>]+)>", path.read_text())
        assert set(included) <= KNOWN.get(path.name, set()), path


@needs_sources
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler on PATH")
def test_every_header_compiles_alone_and_without_warnings(tmp_path):
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only"]
    alone = [p for p in SOURCES if p.suffix == ".h" and not {"cuda", "cusparselt"} & set(p.parts) and "pybind11" not in p.read_text()]
    for path in alone:
        source = tmp_path / "alone.cpp"
        source.write_text(f'#include "{path}"\n')
        done = subprocess.run(["c++", *flags, str(source)], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
