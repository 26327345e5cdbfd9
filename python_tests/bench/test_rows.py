"""Rows are tidy, replace those of an earlier run, and know the commit that they were measured at."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import rows
from python_tests.bench.samples import HEAD


def test_row_holds_quantiles_and_origin(tmp_path: Path) -> None:
    r = rows.row("nm_mask", "nmkernels cpu", "us", [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], pattern="2:4", dtype="float32", shape="8x8")
    assert (r.p20, r.p50, r.p80) == (2.0, 3.5, 5.0)
    assert "torch" in r.versions and r.machine and len(r.date) == 10
    rows.append([r], tmp_path / "a.csv")
    assert (tmp_path / "a.csv").read_text().startswith(HEAD)
    assert rows.fingerprints(tmp_path / "a.csv") == {("nm_mask", "2:4", "float32", "8x8", r.machine, r.commit)}


def test_a_machine_held_to_fewer_instructions_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NMKERNELS_ISA", raising=False)
    name = rows.machine()
    monkeypatch.setenv("NMKERNELS_ISA", "avx2")
    assert rows.machine() == " held to avx2,".join(name.rsplit(",", 1))


@pytest.mark.parametrize(("changes", "want"), [(" M csrc/x.cpp", "abc1234-dirty"), ("", "abc1234")])
def test_commit_says_whether_sources_differ(changes: str, want: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(rows, "_git", lambda *words: asked.append(words) or ("abc1234" if words[0] == "rev-parse" else changes))
    assert rows.commit.__wrapped__() == want
    # what a run writes itself does not count
    assert {":(top,exclude)bench/results", ":(top,exclude)docs/pays.md"} <= set(asked[1])
