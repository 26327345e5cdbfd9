"""README's lines for Hugging Face models, run by two processes as they say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from python_tests.house.paths import ROOT

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

SEES = """
import torch
with torch.no_grad():
    torch.save(llama.eval()(torch.arange(8)[None]).logits, {file!r})
"""
NOTHING = """import nmkernels_autoload
nmkernels_autoload.autoload()  # as torch does where nmkernels is installed
import torch
from transformers import AutoModelForCausalLM
"""
IMPORTS = "import torch\nimport nmkernels as nm\nfrom transformers import AutoModelForCausalLM\n"


def test_one_process_trains_and_another_one_loads(tmp_path: Path) -> None:
    blocks = re.findall(r"^```py\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    train = next(block for block in blocks if "sparse-llama" in block)
    train, reads, rest = train.partition('llama = AutoModelForCausalLM.from_pretrained("sparse-llama")')
    load = reads + rest
    for number, block in enumerate((train, load)):
        code = (IMPORTS if block is train else NOTHING) + block + SEES.format(file=f"logits{number}.pt")
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=300)
    assert torch.equal(*(torch.load(tmp_path / f"logits{number}.pt") for number in (0, 1)))
    assert {path.name for path in (tmp_path / "sparse-llama").iterdir()} >= {"config.json", "model.safetensors", "README.md"}


def test_a_pretrained_model_is_pruned_and_saved(tmp_path: Path) -> None:
    blocks = re.findall(r"^```py\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    build = next(block for block in blocks if "Trainer" in block).partition("data =")[0]
    prune = next(block for block in blocks if "prune_" in block)
    subprocess.run([sys.executable, "-c", IMPORTS + build + prune], cwd=tmp_path, check=True, timeout=300)
    assert {path.name for path in (tmp_path / "pruned-llama").iterdir()} >= {"config.json", "model.safetensors", "README.md"}
