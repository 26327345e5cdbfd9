"""The short programs in examples/ that need one process run as they stand; those of several are in distributed/."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def ran(*words: object) -> str:
    """What a program has printed that runs in a process of its own; what it registers stays there."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_own_loop_is_resumed_and_its_file_generates(tmp_path):
    text, out = tmp_path / "a.txt", tmp_path / "out"
    text.write_text("".join(f"def f{i}(x): return x + {i}\n" for i in range(2000)))
    loop = "examples/own_loop.py", "--out", out, "--data", text, "--every", 4
    assert "step 4 " in ran(*loop, "--steps", 8)
    (out / "model.safetensors").unlink()
    again = ran(*loop, "--steps", 12)
    assert "step 4 " not in again and "step 12 " in again and "'density': 0.5" in again and "compressed: " in again
    said = ran("examples/inference.py", out / "model.safetensors", "--count", 5)
    assert float(re.findall(r"of a logit: (\S+)", said)[0]) < 1e-4 and "compressed: " in said and "dense: " in said


@pytest.mark.slow
def test_own_recipe(tmp_path):
    said = ran("examples/own_recipe.py", "--steps", 12, "--out", tmp_path / "m.safetensors")
    assert "phase 0" in said and "phase 1" in said and (tmp_path / "m.safetensors").exists()


@pytest.mark.slow
def test_hf_prune_loads_what_it_has_saved(tmp_path):
    text, out = tmp_path / "a.txt", tmp_path / "out"
    text.write_text("".join(f"def f{i}(x): return x + {i}\n" for i in range(2000)))
    short = "--context", 32, "--samples", 64, "--batch", 4, "--pretraining", 30, "--steps", 10
    said = ran("examples/hf_prune.py", "--text", text, "--out", out, *short)
    losses = dict(re.findall(r"^(.+): loss (\S+)$", said, re.MULTILINE))
    assert list(losses) == ["dense", "pruned", "fine-tuned", "compressed, loaded again"] and "14 of 15 linear layers sparse" in said
    assert losses["fine-tuned"] == losses["compressed, loaded again"] and "generated: 'def " in said
