"""The programs in examples/ that need one process run as they stand; those of several are in distributed/."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


def run(monkeypatch, capsys, name, *words):
    """What the program has printed."""
    monkeypatch.setattr(sys, "argv", [name, *words])
    with torch.random.fork_rng():
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    return capsys.readouterr().out


@pytest.mark.slow
def test_resnet_digits(monkeypatch, capsys, tmp_path):
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    said = run(
        monkeypatch, capsys, "resnet_digits.py", "--recipe", "srste:2:4", "--epochs", "1", "--width", "16", "--out", str(tmp_path / "m")
    )
    assert "7 of 8 linear layers and convolutions sparse" in said and "step 20 " in said and "density 0.50" in said
    accuracy, deployed = re.findall(r": ([\d.]+)(?: of the test images|, \d)", said)
    assert accuracy == deployed and float(accuracy) > 0.2


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["step:2:4", "srste:1:4", "asp:2:4(start=0.5)"])
def test_resnet_digits_learns(monkeypatch, capsys, recipe):
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    said = run(monkeypatch, capsys, "resnet_digits.py", "--recipe", recipe, "--epochs", "4")
    assert float(re.findall(r": ([\d.]+) of the test images", said)[0]) > 0.95


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
