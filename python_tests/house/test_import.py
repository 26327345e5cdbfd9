"""``import nmkernels`` is cheap and silent: nothing heavy comes along, no device is touched, nothing is printed."""

from __future__ import annotations

import json
import subprocess
import sys

from python_tests.house.paths import ROOT

HEAVY = {"triton", "transformers", "matplotlib", "tensorboard", "tqdm", "safetensors", "pandas", "scipy", "hypothesis", "pytest"}
HEAVY |= {"torch._dynamo", "torch._inductor", "peft", "torchao"}
MOST_MODULES = 20
"""How many modules besides torch's and its own the import may add; it adds none (2026-11)."""


def test_import_is_light_and_silent() -> None:
    """So it is with the command line, which complains and imports no more than it needs."""
    code = (
        "import sys, json, torch\nbefore = set(sys.modules)\n"
        # but the one that waits for transformers, which torch's entry point may have set up already
        "def hooks():\n"
        "    others = [f for f in sys.meta_path if type(f).__module__ != 'nmkernels_autoload']\n"
        "    assert len(sys.meta_path) - len(others) <= 1\n"
        "    return others, list(sys.path), list(sys.path_hooks)\n"
        "ours = hooks()\n"
        "def show(): print(json.dumps(sorted(set(sys.modules) - before)))\n"
        "import nmkernels\nnmkernels.integrations  # the package, whose adapters stay unloaded\nshow()\n"
        "assert hooks() == ours, 'an import hook was installed'\n"
        "from nmkernels.__main__ import main\nassert main(['nonsense']) == 2\nshow()\n"
        "assert not torch.cuda.is_initialized(), 'CUDA was initialised'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "no verb" in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stdout
    for modules in map(json.loads, lines):
        others = [m for m in modules if m.split(".")[0] not in {"nmkernels", "torch"}]
        assert [m for m in modules if any(m == h or m.startswith(f"{h}.") for h in HEAVY)] == []
        assert [m for m in modules if m.startswith("nmkernels.integrations.")] == []
        assert len(others) <= MOST_MODULES, others
