"""``import nmkernels`` is cheap and silent: nothing heavy comes along, no device is touched, nothing is printed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from python_tests.house.tree import ROOT

HEAVY = {
    "triton",
    "transformers",
    "matplotlib",
    "tensorboard",
    "tqdm",
    "safetensors",
    "pandas",
    "scipy",
    "hypothesis",
    "pytest",
    "torch._dynamo",
    "torch._inductor",
}
MOST_MODULES = 20
"""How many modules besides torch's and its own the import may add; it adds none (2026-11)."""


def brought_in(statement: str) -> tuple[list[str], str]:
    """The modules that ``statement`` adds to those of ``import torch``, and what it printed; CUDA must stay untouched."""
    code = (
        "import sys, json, torch\nbefore = set(sys.modules)\n"
        f"{statement}\n"
        "assert not torch.cuda.is_initialized(), 'CUDA was initialised'\n"
        "open(sys.argv[1], 'w').write(json.dumps(sorted(set(sys.modules) - before)))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, "/dev/fd/2"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        out, err = child.communicate()
    assert child.returncode == 0, err
    report = err.splitlines()[-1]
    return json.loads(report), out + err.removesuffix(report)


def heavy(modules: list[str]) -> set[str]:
    """Which of the modules are too heavy to be imported by the package itself."""
    return {h for h in HEAVY for m in modules if m == h or m.startswith(f"{h}.")}


def test_import_is_light_and_silent() -> None:
    modules, printed = brought_in("import nmkernels")
    assert printed == ""
    assert heavy(modules) == set()
    others = [m for m in modules if m.split(".")[0] not in {"nmkernels", "torch"}]
    assert len(others) <= MOST_MODULES, others


def test_command_line_is_light() -> None:
    modules, printed = brought_in("from nmkernels.cli import main\nassert main(['nonsense']) == 2")
    assert "no verb" in printed
    assert heavy(modules) == set()


@pytest.mark.parametrize("statement", ["import safetensors", "import torch._dynamo"])
def test_heavy_import_is_noticed(statement: str) -> None:
    modules, _ = brought_in(statement)
    assert heavy(modules)
