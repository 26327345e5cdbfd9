"""The studies: rows have the results of the runs, and the compared kernels are those named."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest

from bench import studies
from bench.studies import APART, FARTHEST, LATE, NUDGED, PACKED, REFERENCE
from nmkernels.dispatch import forced_backend
from python_tests.bench.samples import read
from python_tests.nn.test_effective import Calls

SIZES = ["--steps", "5", "--batch", "2", "--context", "16", "--width", "32", "--layers", "1", "--heads", "2"]


@pytest.fixture
def text(tmp_path: Path) -> list[str]:
    (tmp_path / "a.txt").write_bytes(b"a line of text\n" * 100)
    return ["--data", str(tmp_path / "a.txt")]


def test_rows_of_curves_are_distances_from_the_reference():
    args = argparse.Namespace(width=32, layers=1, batch=2, context=16, steps=3, device="cpu")
    curves = {PACKED: [3.0, 2.0, 1.5], REFERENCE: [3.0, 2.25, 1.0], NUDGED: [3.0, 2.0, 1.0]}
    found = {(r.provider, r.metric): r.p50 for r in studies.rows_of_curves("x", curves, args)}
    assert found[f"x, {PACKED}", APART] == 0.25 and found[f"x, {PACKED}", FARTHEST] == 0.5 and found[f"x, {NUDGED}", FARTHEST] == 0.25
    assert found[f"x, {REFERENCE}", LATE] == pytest.approx(6.25 / 3, rel=1e-5) and (f"x, {REFERENCE}", APART) not in found


@pytest.mark.parametrize("before", [None, "cpu"])
def test_arithmetic_is_chosen_inside_only(monkeypatch: pytest.MonkeyPatch, before: str | None):
    monkeypatch.delenv("NMKERNELS_BACKEND", raising=False)
    if before:
        monkeypatch.setenv("NMKERNELS_BACKEND", before)
    for provider, inside in ((PACKED, before), (REFERENCE, "reference"), (NUDGED, "reference")):
        with pytest.raises(KeyError), studies.arithmetic(provider):
            assert forced_backend() == inside
            raise KeyError
        assert os.environ.get("NMKERNELS_BACKEND") == before


@pytest.mark.quick
@pytest.mark.parametrize("name", studies.RECIPES)
def test_curves_of_a_real_run(name: str, text: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen, real = {}, studies.curve

    def counted(recipe: str, provider: str, *rest: object) -> list[float]:
        with Calls() as calls:
            losses = real(recipe, provider, *rest)
        seen[provider] = calls.names.count("linear")
        return losses

    monkeypatch.setattr(studies, "curve", counted)
    assert studies.main(["loss_curves", *SIZES, "--device", "cpu", *text, "--recipes", name, "--out", str(tmp_path / "rows.csv")]) == 0
    rows = read(tmp_path / "rows.csv")
    assert len(rows) == 3 + 2 * 2 and seen[PACKED] > 0 == seen[REFERENCE] == seen[NUDGED]
    farthest = [float(r["p50"]) for r in rows if r["metric"] == FARTHEST]
    assert len(farthest) == 2 and max(farthest) < 1e-3


def test_rows_hold_the_seeds_quantiles_and_the_worst():
    def fake(seed: int) -> dict:
        sparse = {"val_loss": 1.5 + seed, "bytes": {"layers_compressed": 531, "layers_dense": 1000}}
        config = {"recipe": "step:2:4", "width": 128, "layers": 4, "steps": 800}
        return {"config": config, "sparse": sparse, "baseline": {"val_loss": 1.0}, "val_loss_ratio": 1.5 + seed}

    rows = {(r.provider, r.metric): r for r in studies.rows_of_runs([fake(i) for i in range(3)])}
    ratio = rows["step", studies.RATIO]
    assert (ratio.p50, ratio.pattern, ratio.shape) == (2.5, "2:4", "byte GPT 128x4, 800 steps, 3 seeds")
    assert rows["step", studies.WORST].p50 == 3.5 and rows["step", studies.BYTES].p80 == 0.531
    assert rows["dense baseline", studies.LOSS].p20 == 1.0


@pytest.mark.slow
def test_a_run_with_its_baseline(text: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["step_vs_dense", "--seeds", "1", "--out", str(tmp_path / "rows.csv"), *text, *SIZES, "--threads", "1"]
    assert studies.main(words) == 0
    rows = read(tmp_path / "rows.csv")
    ratio = next(float(r["p50"]) for r in rows if r["metric"] == studies.RATIO)
    assert len(rows) == 5 and 0.9 < ratio < 1.1 and f"step:2:4: {ratio:.4f}" in capsys.readouterr().out


def test_the_clamp_by_pattern_and_switch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(studies, "PATTERNS", ("1:16",))
    assert studies.main(["step_clamp", "--seeds", "2", "--steps", "8", "--out", str(tmp_path / "rows.csv")]) == 0
    rows = read(tmp_path / "rows.csv")
    assert len({r["provider"] for r in rows}) == 5 and len(rows) == 10 and all(0 <= float(r["p50"]) <= 100 for r in rows)
