"""The programs in examples/ that need one process run as they stand; those of several are in distributed/."""

import re
import runpy
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
