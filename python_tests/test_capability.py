"""Probes answer (ok, reason) and never raise; importing them loads nothing heavy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nmkernels import _capability
from nmkernels._capability import Probe, probes


def test_all_answer() -> None:
    answers = probes()
    assert list(answers) == ["compiled_core", "cuda_device", "triton", "cusparselt", "compiler", "nvcc"]
    for name, answer in answers.items():
        assert isinstance(answer, Probe) and isinstance(answer.ok, bool) and answer.reason, name
        assert "\n" not in answer.reason


def test_no_gpu_says_why() -> None:
    can, reason = _capability.cuda_device()
    assert can == torch.cuda.is_available()
    assert (_capability.compute_capability() is None) == (not can)
    if not can:
        assert "CUDA" in reason


def test_import_is_light() -> None:
    path = Path(_capability.__file__)
    code = f"import runpy, sys; runpy.run_path({str(path)!r}); print([m for m in ('torch', 'numpy', 'subprocess') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['subprocess']"


def test_core_of_another_abi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_capability.importlib, "import_module", lambda *_: SimpleNamespace(abi=99))
    ok, reason = _capability.compiled_core.__wrapped__()
    assert not ok and "ABI 99" in reason and "pip install" in reason


def test_core_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ImportError("undefined symbol: nm_mask")

    monkeypatch.setattr(_capability.importlib, "import_module", broken)
    monkeypatch.setattr(_capability.util, "find_spec", lambda *_: object())
    ok, reason = _capability.compiled_core.__wrapped__()
    assert not ok and "does not load (undefined symbol: nm_mask)" in reason
    monkeypatch.setattr(_capability.util, "find_spec", lambda *_: None)
    assert "is not built" in _capability.compiled_core.__wrapped__().reason


def test_compilers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert _capability.compiler.__wrapped__() == Probe(
        False, "CXX=no-such-compiler names no program; only needed to build the compiled core"
    )
    tool = tmp_path / "nvcc"
    tool.write_text("#!/bin/sh\necho first\necho 'release 13.0'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path) + ":/bin")
    assert _capability.nvcc.__wrapped__() == Probe(True, f"{tool}: release 13.0")
    tool.write_text("#!/bin/sh\nexit 3\n")
    ok, reason = _capability.nvcc.__wrapped__()
    assert not ok and "does not run" in reason
    tool.unlink()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert not _capability.nvcc.__wrapped__().ok


@pytest.mark.skipif(not _capability.compiled_core().ok, reason="there is no core")
def test_the_core_tells_its_instruction_set() -> None:
    assert "instruction set " in _capability.compiled_core().reason
    code = "from nmkernels import _capability; print(_capability.compiled_core().reason)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "NMKERNELS_ISA": "sse9"}, capture_output=True, text=True, check=True
    )
    assert "'sse9' is unknown" in done.stdout
