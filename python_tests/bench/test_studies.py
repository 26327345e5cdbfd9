"""Loss curves: rows have the results of the runs, and the compared kernels are those named."""

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
    assert studies.main([*SIZES, "--device", "cpu", *text, "--recipes", name, "--out", str(tmp_path / "rows.csv")]) == 0
    rows = read(tmp_path / "rows.csv")
    assert len(rows) == 3 + 2 * 2 and seen[PACKED] > 0 == seen[REFERENCE] == seen[NUDGED]
    farthest = [float(r["p50"]) for r in rows if r["metric"] == FARTHEST]
    assert len(farthest) == 2 and max(farthest) < 1e-3
