"""Second moments under masks, compared with those of dense training."""

import pytest
import torch

from bench.accuracy import variance
from bench.accuracy.spec import RunSpec

pytest.importorskip("sklearn")


def test_the_same_run_has_the_same_moments():
    first = variance.moments(RunSpec("vit", "dense", "dense", 0, 4e-3, 4), "2:4")
    again = variance.moments(RunSpec("vit", "ste", "4:4", 0, 4e-3, 4), "2:4")
    found = list(variance.compare(again, first, split=True))
    assert {(step, part) for step, part, *_ in found} == {(step, part) for step in (1, 2, 4) for part in ("kept", "pruned")}
    for _, _, ratio, spread, correlation in found:
        assert ratio == pytest.approx(0, abs=1e-3) and spread < 1e-2 and correlation > 0.999


def test_figures_on_small_numbers():
    ours = {7: ([torch.tensor([[4.0, 1.0, 8.0, 0.0, 8.0]])], [torch.tensor([[True, True, False, False, False]])])}
    dense = {7: ([torch.tensor([[1.0, 1.0, 2.0, 5.0, 2.0]])], [])}
    (step, part, ratio, spread, _), pruned = variance.compare(ours, dense, split=True)
    assert (step, part, ratio) == (7, "kept", 1.0) and spread == pytest.approx(2**0.5)
    assert pruned[1:3] == ("pruned", 2.0), "a weight without a second moment is left out"


def test_main_writes_rows_and_the_table_reads_them(tmp_path):
    options = ["--tasks", "vit", "--methods", "srste", "--patterns", "1:8", "--seeds", "1", "--steps", "4"]
    assert variance.main([*options, "--out", str(tmp_path)], tell=lambda text: None) == 0
    lines = variance.load(tmp_path)
    assert len(lines) == 3 * 3 and set(lines[0]) == set(variance.COLUMNS)
    text = variance.summary(lines, "vit")
    assert "step 2" in text and "step 4" in text and "dense, other batches" in text and "–" not in text
    assert variance.load(tmp_path / "none") == [] and variance.summary([], "vit")
