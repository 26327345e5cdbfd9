"""Imports and includes only go down the floors; the checkers notice when they do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from python_tests.house.floors import import_violations, include_violations
from python_tests.house.tree import CSRC, PACKAGE


def test_imports_go_down() -> None:
    assert import_violations(PACKAGE) == []


def test_includes_go_down() -> None:
    assert include_violations(CSRC) == []


def _package(tmp_path: Path, **files: str) -> Path:
    package = tmp_path / "nmkernels"
    for name, text in {"__init__": "", "pattern": "", "ops/__init__": "", "nn/__init__": "", "optim/__init__": "", **files}.items():
        path = package / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return package


@pytest.mark.parametrize(
    ("where", "text", "complaint"),
    [
        ("ops/mask", "from ..nn import x", "ops/mask.py:1: ops (floor 3) imports up from nn (floor 5)"),
        ("ops/mask", "def f():\n    from ..nn.linear import x", "ops/mask.py:2: ops (floor 3) imports up from nn (floor 5)"),
        ("ops/mask", "from .. import nn", "ops/mask.py:1: ops (floor 3) imports up from nn (floor 5)"),
        ("ops/mask", "from .. import sparsify_", "ops/mask.py:1: ops (floor 3) imports up from __init__ (floor 9)"),
        ("nn/linear", "from ..optim import x", "nn/linear.py:1: nn (floor 5) imports sideways from optim (floor 5)"),
        ("nn/deep/linear", "from ...optim import x", "nn/deep/linear.py:1: nn (floor 5) imports sideways from optim (floor 5)"),
        ("pattern", "from .ops import x", "pattern.py:1: pattern (floor 0) imports up from ops (floor 3)"),
        ("nn/linear", "import nmkernels", "nn/linear.py:1: imports nmkernels by its absolute name; write a relative import"),
        ("nn/linear", "from nmkernels.ops import x", "nn/linear.py:1: imports nmkernels by its absolute name; write a relative import"),
        ("attic", "", "attic.py: 'attic' has no floor; give it one in python_tests/house/floors.py"),
    ],
)
def test_broken_import_is_named(tmp_path: Path, where: str, text: str, complaint: str) -> None:
    assert import_violations(_package(tmp_path, **{where: text})) == [complaint]


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("nn/linear", "import torch\nfrom . import other\nfrom .other import x\nfrom ..ops import mask\nfrom ..pattern import Pattern"),
        ("_dispatch", "from .pattern import Pattern"),
        ("__init__", "from . import ops, nn\nfrom .pattern import Pattern"),
        ("ops/mask", "from .. import _C, pattern"),
    ],
)
def test_sound_import_passes(tmp_path: Path, where: str, text: str) -> None:
    assert import_violations(_package(tmp_path, **{where: text})) == []


@pytest.mark.parametrize(
    ("where", "text", "complaint"),
    [
        ("cpu/a.cpp", "#include <torch/extension.h>", "includes <torch/extension.h>: no torch header anywhere in csrc"),
        ("bindings.cpp", "\n#include <ATen/ATen.h>", "includes <ATen/ATen.h>: no torch header anywhere in csrc"),
        ("core/a.h", '#include "../cpu/pool.h"', "core (floor 0) includes cpu (floor 1)"),
        ("core/a.h", '#include "cpu/pool.h"', "core (floor 0) includes cpu (floor 1)"),
        ("core/a.h", "#include <cuda_fp16.h>", "includes <cuda_fp16.h>: CUDA headers of core belong in core/types.h"),
        ("cuda/a.cu", '#include "cpu/pool.h"', "cuda (floor 1) includes cpu (floor 1)"),
        ("cpu/a.cpp", '#include "nowhere.h"', 'includes "nowhere.h", which is neither beside it nor under csrc'),
        ("attic/a.cpp", "#include <vector>", "'attic' has no floor; give it one in python_tests/house/floors.py"),
    ],
)
def test_broken_include_is_named(tmp_path: Path, where: str, text: str, complaint: str) -> None:
    _csrc(tmp_path, where, text)
    (violation,) = include_violations(tmp_path)
    assert violation.startswith(where) and violation.endswith(complaint)


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("cpu/a.cpp", '#include "core/rank.h"\n#include "../core/rank.h"\n#include "pool.h"\n#include <vector>'),
        ("bindings.cpp", '#include <pybind11/pybind11.h>\n#include "cpu/pool.h"'),
        ("core/types.h", "#include <cuda_fp16.h>"),
    ],
)
def test_sound_include_passes(tmp_path: Path, where: str, text: str) -> None:
    _csrc(tmp_path, where, text)
    assert include_violations(tmp_path) == []


def _csrc(root: Path, where: str, text: str) -> None:
    for name, body in {"core/rank.h": "", "cpu/pool.h": "", where: text}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(body)
