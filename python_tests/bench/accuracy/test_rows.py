"""The file of rows: added to by several processes, and whole after a kill."""

from __future__ import annotations

import math
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import pytest

from bench.accuracy import rows
from bench.accuracy.spec import Case
from python_tests.bench.accuracy import conftest


def made(seed: int, loss: float = 1.0):
    return conftest.made(Case("tiny", "ste", "2:4", 50), 1e-2, seed, loss)


def add(folder, first):
    for seed in range(first, first + 50):
        rows.append([made(seed)], folder)


def test_rows_of_two_processes_are_all_kept(tmp_path):
    with ProcessPoolExecutor(2, mp_context=get_context("fork")) as pool:
        assert list(pool.map(add, [tmp_path] * 2, [0, 50])) == [None, None]
    assert sorted(r.seed for r in rows.load(tmp_path)) == list(range(100))
    rows.tidy(tmp_path)
    assert [r.seed for r in rows.load(tmp_path)] == list(range(100)) and [p.name for p in tmp_path.iterdir()] == [rows.RUNS]


def test_truncated_lines_are_dropped(tmp_path):
    rows.append([made(0), made(1)], tmp_path)
    whole = (tmp_path / rows.RUNS).read_text()
    (tmp_path / rows.RUNS).write_text(whole + whole.splitlines()[-1][:-7])
    assert len(rows.load(tmp_path)) == 2
    rows.append([made(1, 2.0)], tmp_path)
    assert [r.val_loss for r in rows.load(tmp_path)] == [1.0, 2.0]
    rows.tidy(tmp_path)
    assert len((tmp_path / rows.RUNS).read_text().splitlines()) == 3
    assert math.isnan(rows.load(tmp_path)[0].bleu)


def test_runs_done_again_have_a_row_for_each_machine(tmp_path):
    rows.append([replace(made(0), machine=m) for m in ("one", "two", "one")], tmp_path, rows.AGAIN)
    assert [r.machine for r in rows.load(tmp_path, rows.AGAIN)] == ["one", "two"]


@pytest.mark.parametrize("name", [rows.RUNS, rows.AGAIN])
def test_no_file_has_no_rows(tmp_path, name):
    assert rows.load(tmp_path / "none", name) == []
    rows.tidy(tmp_path / "none", name)


def test_a_file_of_an_earlier_version_is_brought_up_to_date(tmp_path):
    rows.append([made(0)], tmp_path)
    old = [",".join(cell for name, cell in zip(rows.COLUMNS, line.split(","), strict=True) if name not in rows.LATER)
           for line in (tmp_path / rows.RUNS).read_text().splitlines()]  # fmt: skip
    (tmp_path / rows.RUNS).write_text("\n".join(old) + "\n")
    assert len(rows.load(tmp_path)) == 1
    rows.append([replace(made(1), int8=1.5)], tmp_path)
    first, second = rows.load(tmp_path)
    assert math.isnan(first.int8) and second.int8 == 1.5 and second.data == first.data == "x"
