"""Loss curves: rows tell how far apart they are, and the kernels compared are what they are called."""

from __future__ import annotations

import argparse
import csv
import os
from pathlib import Path

import pytest

from bench import loss_curves
from bench.loss_curves import APART, FARTHEST, LATE, NUDGED, PACKED, REFERENCE
from nmkernels.dispatch import forced_backend
from python_tests.nn.test_effective_packed import Calls

SIZES = ["--steps", "5", "--batch", "2", "--context", "16", "--width", "32", "--layers", "1", "--heads", "2", "--device", "cpu"]


@pytest.fixture
def text(tmp_path: Path) -> list[str]:
    (tmp_path / "a.txt").write_bytes(b"a line of text\n" * 100)
    return ["--data", str(tmp_path / "a.txt")]


def test_rows_are_distances_from_the_reference():
    args = argparse.Namespace(width=32, layers=1, batch=2, context=16, steps=3, device="cpu")
    curves = {PACKED: [3.0, 2.0, 1.5], REFERENCE: [3.0, 2.25, 1.0], NUDGED: [3.0, 2.0, 1.0]}
    found = {(r.provider, r.metric): r.p50 for r in loss_curves.rows("x", curves, args)}
    assert found[f"x, {PACKED}", APART] == 0.25 and found[f"x, {PACKED}", FARTHEST] == 0.5 and found[f"x, {NUDGED}", FARTHEST] == 0.25
    assert found[f"x, {REFERENCE}", LATE] == pytest.approx(6.25 / 3, rel=1e-5) and (f"x, {REFERENCE}", APART) not in found


@pytest.mark.parametrize("before", [None, "cpu"])
def test_arithmetic_is_chosen_inside_only(monkeypatch: pytest.MonkeyPatch, before: str | None):
    monkeypatch.delenv("NMKERNELS_BACKEND", raising=False)
    if before:
        monkeypatch.setenv("NMKERNELS_BACKEND", before)
    for provider, inside in ((PACKED, before), (REFERENCE, "reference"), (NUDGED, "reference")):
        with pytest.raises(KeyError), loss_curves.arithmetic(provider):
            assert forced_backend() == inside
            raise KeyError
        assert os.environ.get("NMKERNELS_BACKEND") == before


@pytest.mark.parametrize("name", loss_curves.RECIPES)
def test_one_real_run(name: str, text: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    seen: dict[str, int] = {}
    real = loss_curves.curve

    def counted(recipe: str, provider: str, *rest: object) -> list[float]:
        with Calls() as calls:
            losses = real(recipe, provider, *rest)
        seen[provider] = calls.names.count("linear")
        return losses

    monkeypatch.setattr(loss_curves, "curve", counted)
    assert loss_curves.main([*SIZES, *text, "--recipes", name, "--out", str(tmp_path / "rows.csv")], tmp_path / "not_asked.csv") == 0
    with (tmp_path / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 + 2 * 2 and seen[PACKED] > 0 == seen[REFERENCE] == seen[NUDGED]
    farthest = [float(r["p50"]) for r in rows if r["metric"] == FARTHEST]
    assert len(farthest) == 2 and max(farthest) < 1e-3
    assert f"{name}: last loss packed kernels" in capsys.readouterr().out
