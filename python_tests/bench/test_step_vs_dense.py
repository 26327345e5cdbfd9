"""The rows of the accuracy evidence come from runs with their twins, one per seed."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from bench import step_vs_dense

SIZES = ["--steps", "8", "--batch", "2", "--context", "16", "--width", "32", "--layers", "1", "--heads", "2", "--threads", "1"]


def fake(seed: int) -> dict:
    return {
        "config": {"recipe": "step:2:4", "width": 128, "layers": 4, "steps": 800},
        "sparse": {"val_loss": 1.5 + seed, "bytes": {"layers_compressed": 531, "layers_dense": 1000}},
        "twin": {"val_loss": 1.0},
        "val_loss_ratio": 1.5 + seed,
    }


def test_rows_hold_the_seeds_quantiles_and_the_worst():
    rows = {(r.provider, r.metric): r for r in step_vs_dense.rows([fake(i) for i in range(3)])}
    ratio = rows["step", step_vs_dense.RATIO]
    assert (ratio.p50, ratio.pattern, ratio.shape) == (2.5, "2:4", "byte GPT 128x4, 800 steps, 3 seeds")
    assert rows["step", step_vs_dense.WORST].p50 == 3.5
    assert rows["dense twin", step_vs_dense.LOSS].p20 == 1.0
    assert rows["step", step_vs_dense.BYTES].p80 == 0.531


def test_one_real_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "a.txt").write_bytes(b"a line of text\n" * 100)
    assert step_vs_dense.main(["--seeds", "1", "--data", str(tmp_path / "a.txt"), *SIZES], tmp_path / "rows.csv") == 0
    with (tmp_path / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 5
    ratio = next(r for r in rows if r["metric"] == step_vs_dense.RATIO)
    assert 0.9 < float(ratio["p50"]) < 1.1
    assert f"step:2:4: {float(ratio['p50']):.4f}" in capsys.readouterr().out
