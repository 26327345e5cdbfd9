"""Probes answer (ok, reason) and never raise; importing them loads nothing heavy."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from nmkernels import capability
from nmkernels.capability import Probe, probes
from python_tests.for_each import for_each


def printed(code: str, **env: str) -> str:
    """What another process prints."""
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_all_answer() -> None:
    answers = probes()
    assert list(answers) == ["compiled_core", "cuda_device", "cuda_kernels", "triton", "cusparselt", "compiler", "nvcc"]
    for name, answer in answers.items():
        assert isinstance(answer, Probe) and isinstance(answer.ok, bool) and answer.reason and "\n" not in answer.reason, name
    can, reason = capability.cuda_device()
    assert can == torch.cuda.is_available() == (capability.compute_capability() is not None)
    assert can or "CUDA" in reason


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Probe]:
    """``gpu(driver, runtime, error)``: what is said of GPU 1 of this machine, whose core answers so."""
    monkeypatch.setattr(capability, "cuda_core", lambda: Probe(True, "built"))
    monkeypatch.setattr(capability, "cuda_device", lambda: Probe(True, "there"))
    monkeypatch.setattr(capability, "_cuda_code", lambda _: "with CUDA for sm_80, sm_90a")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)

    def ask(driver: int, runtime: int, error: str, device: int | None = 1) -> Probe:
        answers = {1: (driver, runtime, error)}
        core = SimpleNamespace(cuda=SimpleNamespace(probe=answers.__getitem__))
        monkeypatch.setattr(capability, "import_module", lambda *_: core)
        return capability.cuda_kernels.__wrapped__(device)

    return ask


def test_whether_cuda_kernels_run_and_why_not(gpu: Callable[..., Probe], monkeypatch: pytest.MonkeyPatch) -> None:
    found = Probe(True, "they run on GPU 1, compute capability 7.5; driver of CUDA 13.2, kernels of CUDA 13.0")
    assert gpu(13020, 13000, "") == gpu(13020, 13000, "", device=None) == found
    assert gpu(13000, 13010, "").ok, "of one series any driver does"
    for driver, error, *words in (
        (12080, "cudaErrorInsufficientDriver", "driver of CUDA 12.8, kernels of CUDA 13.0", "update the driver to one of CUDA 13.0"),
        (13000, "cudaErrorNoKernelImageForDevice", "compute capability 7.5 (", "with CUDA for sm_80, sm_90a", "where this GPU is"),
        (0, "cudaErrorNoDevice", "driver does not respond", "nvidia-smi"),
    ):
        can, reason = gpu(driver, 13000, f"probe: ({error})")
        assert not can and all(word in reason for word in (error, *words)), reason
    # the first requirement of kernels is reported first
    for name, why in (("cuda_device", "torch sees no NVIDIA GPU"), ("cuda_core", "without CUDA kernels")):
        monkeypatch.setattr(capability, name, lambda why=why: Probe(False, why))
        assert gpu(13000, 13000, "") == Probe(False, why)


def test_the_driver_s_version(gpu: Callable[..., Probe], monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\nGCC version: gcc 12.2.0": "driver 535.104.05",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build": "driver 550.54.15",
        "": "driver of CUDA 12.4",
    }
    monkeypatch.setattr(capability, "import_module", lambda name: SimpleNamespace(_cuda_getDriverVersion=lambda: 12040))
    for text, expected in texts.items():
        monkeypatch.setattr(Path, "read_text", lambda path, encoding, text=text: text)
        assert capability.driver.__wrapped__() == Probe(True, expected)
    monkeypatch.setattr(Path, "read_text", Mock(side_effect=FileNotFoundError))
    assert capability.driver.__wrapped__().reason == "driver of CUDA 12.4"
    monkeypatch.setattr(capability, "cuda_device", lambda: Probe(False, "none"))
    assert not capability.driver.__wrapped__().ok


def test_import_is_light() -> None:
    path = Path(capability.__file__)
    code = f"import runpy, sys; runpy.run_path({str(path)!r}); print([m for m in ('torch', 'numpy', 'subprocess') if m in sys.modules])"
    assert printed(code) == "['subprocess']"


def test_a_core_of_another_abi_or_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = capability.compiled_core.__wrapped__
    monkeypatch.setattr(capability, "import_module", lambda *_: SimpleNamespace(abi=99))
    ok, reason = probe()
    assert not ok and "ABI 99" in reason and reason.endswith(capability._remedy())
    monkeypatch.setattr(capability, "import_module", Mock(side_effect=ImportError("undefined symbol: nm_mask")))
    monkeypatch.setattr(capability.util, "find_spec", lambda *_: object())
    ok, reason = probe()
    assert not ok and "does not load (undefined symbol: nm_mask)" in reason
    monkeypatch.setattr(capability.util, "find_spec", lambda *_: None)
    assert "is not built" in probe().reason


def test_compilers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    missing = "CXX=no-such-compiler names no program; only needed to build the compiled core"
    assert capability.compiler.__wrapped__() == Probe(False, missing)
    tool = tmp_path / "nvcc"
    tool.write_text("#!/bin/sh\necho first\necho 'release 13.0'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path) + ":/bin")
    assert capability.nvcc.__wrapped__() == Probe(True, f"{tool}: release 13.0")
    tool.write_text("#!/bin/sh\nexit 3\n")
    ok, reason = capability.nvcc.__wrapped__()
    assert not ok and "does not run" in reason
    tool.unlink()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert not capability.nvcc.__wrapped__().ok


PIP = "NMKERNELS_REQUIRE_CORE=1 pip install --force-reinstall --no-deps --no-cache-dir --no-binary nmkernels"
VCS = {"url": "https://x.org/n.git", "vcs_info": {"vcs": "git", "commit_id": "1" * 40}}
TAG = {**VCS, "vcs_info": {**VCS["vcs_info"], "requested_revision": "v1"}}


@for_each(
    "origin, what",
    [
        (None, "nmkernels"),
        (VCS, "git+https://x.org/n.git"),
        (TAG, "git+https://x.org/n.git@v1"),
        ({"url": "file:///src/n", "dir_info": {}}, "file:///src/n"),
        ({"url": "file:///n-1.tar.gz", "archive_info": {}}, "file:///n-1.tar.gz"),
        ({"url": "file:///n-1-py3-none-any.whl", "archive_info": {}}, "nmkernels"),
    ],
)
def test_the_remedy_of_an_installed_package_is_pip_s(origin: object, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capability, "__file__", str(tmp_path / "nmkernels" / "capability.py"))
    record = SimpleNamespace(read_text=lambda name: json.dumps(origin) if name == "direct_url.json" and origin else None)
    monkeypatch.setattr(capability.metadata, "distribution", lambda name: record)
    assert capability._remedy() == f"install a C++ compiler, then run `{PIP} {what}`"


@pytest.mark.slow
def test_a_missing_core_warns_at_the_first_slow_op(tmp_path: Path) -> None:
    """Not at import, once, with what to do; and ``doctor`` has it among its findings."""
    shutil.copytree(Path(capability.__file__).parent, tmp_path / "nmkernels", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    info = tmp_path / "nmkernels-0.1.dist-info"  # as pip leaves it where no compiler is
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nmkernels\nVersion: 0.1\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    code = (
        "import torch, nmkernels as nm\n"
        "w = torch.randn(8, 8)\n"
        "nm.ops.mask(w.double(), '2:4')\n"
        "print('before', file=sys.stderr)\n"
        "nm.nn.SparseLinear(8, 8)(w)\n"
        "nm.ops.compress(w, '2:4')\n"
    )
    nowhere = "import sys; sys.modules['nmkernels._C'] = None\n"  # an editable install of the sources has one
    run = partial(subprocess.run, capture_output=True, text=True, env=env, cwd=tmp_path)
    done = run([sys.executable, "-W", "always", "-c", nowhere + code], check=True)
    before, after = done.stderr.split("before\n")
    assert "compiled core" not in before and after.count("nmkernels runs without its compiled core") == 1
    assert f"run `{PIP} nmkernels`" in after
    doctor = run([sys.executable, "-c", f"{nowhere}from nmkernels.cli import main; sys.exit(main(['doctor']))"])
    assert doctor.returncode == 0 and "compiled core" not in doctor.stderr
    assert "no  compiled_core" in doctor.stdout and f"run `{PIP} nmkernels`" in doctor.stdout


def test_triton_needs_a_c_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a GPU it builds what starts its kernels: what it would build is built, and the reason is in words, on one line."""
    runtime = pytest.importorskip("triton.runtime")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(runtime.driver, "_active", object())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    find = getattr(importlib.import_module("triton.runtime.build"), "_find_compiler", None)  # Triton 3.8 looks for it once a process

    def probe() -> Probe:
        if find is not None:
            find.cache_clear()
        return capability.triton.__wrapped__()

    compilers = [path for path in (shutil.which("gcc"), shutil.which("clang")) if path]
    if compilers:
        for _again in range(2):
            assert probe().ok and re.fullmatch(r"triton \d\S*", probe().reason)
    built = list((tmp_path / "cache").rglob("nmkernels_probe*.so"))
    assert len(built) == len(compilers[:1])

    monkeypatch.setenv("PATH", str(tmp_path))  # what is in the cache helps no new kernel
    ok, reason = probe()
    assert not ok and "cannot build" in reason and "install gcc" in reason and "\n" not in reason
    monkeypatch.setenv("CC", "no-such-compiler")
    ok, reason = probe()
    assert not ok and "no-such-compiler" in reason
    broken = tmp_path / "gcc"
    broken.write_text("#!/bin/sh\nexit 1\n")  # as where Python's headers are missing
    broken.chmod(0o755)
    monkeypatch.delenv("CC")
    ok, reason = probe()
    assert not ok and "returned non-zero exit status 1" in reason and "Python's headers" in reason and "\n" not in reason


def test_triton_needs_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = pytest.importorskip("triton.runtime")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(runtime.driver, "_active", None)
    monkeypatch.setattr(runtime.driver, "_default", None)
    missing = Mock(side_effect=AssertionError("libcuda.so cannot found!\nPlease run ldconfig"))
    monkeypatch.setattr(sys.modules["triton.runtime.driver"], "_create_driver", missing)
    ok, reason = capability.triton.__wrapped__()
    assert not ok and "libcuda.so cannot found! Please run ldconfig" in reason


def test_triton_is_not_imported_without_a_gpu() -> None:
    code = """
import sys, torch
torch.cuda.is_available = torch.xpu.is_available = lambda: False
from nmkernels import capability
print(capability.triton(), "triton" in sys.modules)
"""
    assert printed(code).endswith("False")


@pytest.mark.skipif(not capability.compiled_core().ok, reason="there is no core")
def test_the_core_tells_its_instruction_set() -> None:
    assert "instruction set " in capability.compiled_core().reason
    code = "from nmkernels import capability; print(capability.compiled_core().reason)"
    assert "'sse9' is unknown" in printed(code, NMKERNELS_ISA="sse9")


def test_the_processor_has_a_vendor_and_a_family(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "processor\t: 0\nvendor_id\t: {}\ncpu family\t: 26\n\nprocessor\t: 1\nvendor_id\t: GenuineIntel\n"
    for vendor, named in [("AuthenticAMD", "amd 26"), ("GenuineIntel", "intel 26"), ("another", "")]:
        monkeypatch.setattr(Path, "read_text", lambda path, vendor=vendor, **how: text.format(vendor))
        capability.processor.cache_clear()
        assert capability.processor() == named
    monkeypatch.undo()
    capability.processor.cache_clear()


def test_builds_of_the_core_are_distinguished(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file, build = tmp_path / "_C.so", capability.core_build.__wrapped__
    monkeypatch.setattr(capability, "compiled_core", lambda: Probe(True, "built"))
    monkeypatch.setattr(capability, "import_module", lambda *_: SimpleNamespace(__file__=file))
    names = [build() for content in (b"one", b"two", b"one") if file.write_bytes(content)]
    assert names[0] == names[2] != names[1] and all(re.fullmatch("[0-9a-f]{8}", name) for name in names)
    monkeypatch.setattr(capability, "compiled_core", lambda: Probe(False, "not built"))
    assert build() == ""
