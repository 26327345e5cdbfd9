"""The file of rows: added to by several processes, whole after a kill, and brought from the old schema to the new one."""

from __future__ import annotations

import math
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import pytest

from bench.accuracy import methods, migrate, rows, traces
from bench.accuracy.spec import RunSpec

OLD = (
    "task,pattern,method,purpose,seed,lr,steps,val_loss,accuracy,train_loss,switch_step,status,done,seconds,"
    "training_flops,inference_flops,data,machine,versions,commit,date\n"
    'gpt,1:8,step,shared,0,0.004,1000,2.1,nan,2.0,501,ok,1000,30.0,1.0,1.0,d,"CPU, 1 threads",v,c,2026-11-20\n'
    'gpt,1:8,mdgf,shared,1,0.004,1000,2.2,nan,2.0,0,ok,1000,30.0,1.0,1.0,d,"CPU, 1 threads",v,c,2026-11-20\n'
    'opcodes,1:8,ste,shared,1,0.004,1000,2.2,nan,2.0,0,ok,1000,30.0,1.0,1.0,d,"CPU, 1 threads",v,c,2026-11-20\n'
)


def made(seed: int, loss: float = 1.0):
    return rows.bare(RunSpec("tiny", "ste", "2:4", seed, 1e-2, 50), loss)


def add(folder, first):
    for seed in range(first, first + 50):
        rows.append([made(seed)], folder)


def test_rows_of_two_processes_are_all_kept(tmp_path):
    with ProcessPoolExecutor(2, mp_context=get_context("fork")) as pool:
        assert list(pool.map(add, [tmp_path] * 2, [0, 50])) == [None, None]
    assert sorted(r.seed for r in rows.load(tmp_path)) == list(range(100))
    rows.tidy(tmp_path)
    assert [r.seed for r in rows.load(tmp_path)] == list(range(100)) and [p.name for p in tmp_path.iterdir()] == [rows.RUNS]


def test_a_line_cut_off_by_a_kill_is_dropped_and_a_later_row_counts(tmp_path):
    rows.append([made(0), made(1)], tmp_path)
    whole = (tmp_path / rows.RUNS).read_text()
    (tmp_path / rows.RUNS).write_text(whole + whole.splitlines()[-1][:-7])
    assert len(rows.load(tmp_path)) == 2
    rows.append([made(1, 2.0)], tmp_path)
    assert [r.val_loss for r in rows.load(tmp_path)] == [1.0, 2.0]
    rows.tidy(tmp_path)
    assert len((tmp_path / rows.RUNS).read_text().splitlines()) == 3
    assert math.isnan(rows.load(tmp_path)[0].bleu)


def test_repeats_keep_a_row_for_each_machine(tmp_path):
    rows.append([replace(made(0), machine=m) for m in ("one", "two", "one")], tmp_path, rows.REPEATS)
    assert [r.machine for r in rows.load(tmp_path, rows.REPEATS)] == ["one", "two"]


def test_old_rows_are_migrated_once(tmp_path):
    (tmp_path / rows.RUNS).write_text(OLD)
    blank = dict.fromkeys(traces.COLUMNS, "")
    traces.append([{**blank, "run": "gpt/mdgf/1:8/0.004/1000/1", "step": "25", "loss": "3"}], tmp_path, "gpt")
    traces.append([{**blank, "run": "opcodes/ste/1:8/0.004/1000/1", "step": "25"}], tmp_path, "opcodes")
    assert migrate.main([str(tmp_path)]) == 0
    kao, step = rows.load(tmp_path)
    assert (kao.method, kao.beta2, kao.optimizer, kao.purpose, kao.switch_reason) == ("mdgf-kao", 0.99, "adamw", "shared", "")
    assert (step.spec.key, step.switch_reason) == ("gpt/step/1:8/adamw/0.99/0.004/1000/0", "t_max")
    assert [line["run"] for line in traces.load(tmp_path, "gpt")] == [kao.spec.key]
    assert not traces.path(tmp_path, "opcodes").exists()
    before = (tmp_path / rows.RUNS).read_text()
    assert migrate.main([str(tmp_path)]) == 0 and (tmp_path / rows.RUNS).read_text() == before


@pytest.mark.parametrize("name", [rows.RUNS, rows.REPEATS])
def test_no_file_has_no_rows(tmp_path, name):
    assert rows.load(tmp_path / "none", name) == []
    rows.tidy(tmp_path / "none", name)


def test_what_ended_the_dense_phase_of_old_rows():
    step = methods.get("step").build("2:4", 50)
    assert [migrate.switch_reason(step, at) for at in (0, 6, 7, 25, 26)] == ["", "t_min", "test", "test", "t_max"]
    assert migrate.switch_reason(methods.get("step-10").build("2:4", 50), 5) == "fixed"
    assert migrate.switch_reason(methods.get("srste").build("2:4", 50), 0) == ""
