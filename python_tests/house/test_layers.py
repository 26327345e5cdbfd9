"""Imports and includes only go down the layers."""

from __future__ import annotations

from pathlib import Path

from python_tests.house.layers import import_violations, include_violations
from python_tests.house.tree import CSRC, PACKAGE


def test_imports_go_down() -> None:
    assert import_violations(PACKAGE) == []


def test_includes_go_down() -> None:
    assert include_violations(CSRC) == []


def test_what_goes_up_is_found(tmp_path: Path) -> None:
    files = {
        "nmkernels/__init__.py": "from . import ops",
        "nmkernels/ops/mask.py": "from ..pattern import Pattern\ndef f():\n    from ..nn.linear import x\nfrom .. import sparsify_",
        "nmkernels/nn/linear.py": "import nmkernels.ops\nfrom ..optim import x\nfrom .other import y",
        "nmkernels/attic.py": "from .pattern import Pattern",
        "csrc/core/rank.h": "#include <cstdint>\n#include <cuda_fp16.h>",
        "csrc/cpu/a.cpp": '#include "core/rank.h"\n#include "../core/rank.h"\n#include <torch/extension.h>',
        "csrc/cuda/a.cu": '#include "cpu/a.cpp"',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = {line.split(": ")[0] for line in import_violations(tmp_path / "nmkernels") + include_violations(tmp_path / "csrc")}
    imports = {"attic.py:1", "nn/linear.py:1", "nn/linear.py:2", "ops/mask.py:3", "ops/mask.py:4"}
    assert found == imports | {"core/rank.h:2", "cpu/a.cpp:3", "cuda/a.cu:1"}
