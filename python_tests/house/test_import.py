"""``import nmkernels`` is cheap and silent: nothing heavy comes along, no device is touched, nothing is printed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from python_tests.house.paths import ROOT

HEAVY = {"triton", "transformers", "matplotlib", "tensorboard", "tqdm", "safetensors", "pandas", "scipy", "hypothesis", "pytest"}
HEAVY |= {"torch._dynamo", "torch._inductor"}
MOST_MODULES = 20
"""How many modules besides torch's and its own the import may add; it adds none (2026-11)."""


@pytest.mark.parametrize(
    ("statement", "said"), [("import nmkernels", ""), ("from nmkernels.__main__ import main; assert main(['nonsense']) == 2", "no verb")]
)
def test_import_is_light_and_silent(statement: str, said: str) -> None:
    code = (
        "import sys, json, torch\nbefore = set(sys.modules)\n"
        f"{statement}\n"
        "assert not torch.cuda.is_initialized(), 'CUDA was initialised'\n"
        "print('', json.dumps(sorted(set(sys.modules) - before)), sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *printed, modules = done.stdout.splitlines()
    output = "".join(printed) + done.stderr
    assert said in output and bool(said) == bool(output), output
    others = [m for m in json.loads(modules) if m.split(".")[0] not in {"nmkernels", "torch"}]
    assert [m for m in json.loads(modules) if any(m == h or m.startswith(f"{h}.") for h in HEAVY)] == []
    assert len(others) <= MOST_MODULES, others
