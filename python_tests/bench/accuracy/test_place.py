"""GPUs and several processes: the batch is divided, the gradients are those of one process, and the first process writes."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.accuracy import place as places
from bench.accuracy import rows, worker
from bench.accuracy.place import HERE, Place
from bench.accuracy.spec import Case, RunSpec
from bench.accuracy.tasks import gpt, mlp
from python_tests.bench.accuracy.conftest import made
from python_tests.distributed.ranks import needs_gloo

ROOT = Path(__file__).resolve().parents[3]
CASES = {
    "dense": RunSpec(Case("gpt", "dense", "dense", 4), 3e-3, 1),
    "srste-2e-4": RunSpec(Case("gpt", "srste-2e-4", "2:4", 4), 3e-3, 1),
    # SGD's steps are proportional to the gradients, and clipped
    "ste": RunSpec(Case("gpt", "ste", "2:4", 4, "sgd"), 0.3, 1),
    "step-25": RunSpec(Case("gpt", "step-25", "1:8", 8), 3e-3, 1),
}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "TRAINED", tmp_path / "trained")


class Two(Place):
    """The second of two processes, without processes."""

    count = 2  # type: ignore[assignment]


def test_a_batch_is_divided_or_refused(monkeypatch):
    batch = (torch.arange(12), torch.arange(12) * 10)
    assert HERE.parts(batch) == [batch]
    halves = HERE.parts(batch, most=6)
    assert [len(part[0]) for part in halves] == [6, 6] and torch.equal(halves[1][1], 10 * torch.arange(6, 12))
    monkeypatch.setattr(places.dist, "get_rank", lambda: 1)
    two = Two(parallel="ddp")
    (mine,) = two.parts(batch)
    assert mine[0].tolist() == [1, 3, 5, 7, 9, 11]
    assert [part[0].tolist() for part in two.parts(batch, most=3)] == [[1, 3, 5], [7, 9, 11]]
    with pytest.raises(ValueError, match="a batch of 5 cannot be divided among 2 processes"):
        two.parts((torch.arange(5),))
    with pytest.raises(ValueError, match="a share of 6 rows cannot be divided into parts of 4"):
        two.parts(batch, most=4)


def test_what_is_missing_is_named(monkeypatch):
    assert Place(parallel="ddp").enter() == HERE  # without torchrun
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="say --parallel ddp or --parallel fsdp"):
        Place().enter()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="torch finds no GPU here"):
        Place("cuda").enter()


def test_the_machine_names_device_and_number_of_processes(monkeypatch):
    row = made(CASES["ste"].case, 0.3, 1, 1.0, bleu=0.0, accuracy=0.0, machine="Some CPU, 2 threads, avx2")
    assert HERE.row(row) == row
    assert Place(bf16=True).row(row).machine == "bf16, Some CPU, 2 threads, avx2"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    assert Place("cuda").row(row).machine == "NVIDIA H100"
    assert Two("cuda", True, "fsdp").row(row).machine == "2 × NVIDIA H100, fsdp, bf16"
    assert Two(parallel="ddp").row(row).machine == "ddp, 2 × Some CPU, 2 threads, avx2"


@pytest.mark.parametrize("method", ["asp", "oneshot-wanda", "oracle"])
def test_methods_that_need_the_whole_model_are_refused_before_any_step(method):
    spec = RunSpec(Case("mlp", method, "2:4", 4), 1e-2, 1)
    outcome = worker.attempt(spec, Two(parallel="fsdp"))
    assert outcome.row is None and "in one process only; run it without torchrun" in outcome.error


def test_an_error_of_one_process_alone_ends_it(monkeypatch):
    monkeypatch.setattr(worker, "run", lambda *args: (_ for _ in ()).throw(torch.OutOfMemoryError("out of memory")))
    spec = CASES["dense"]
    assert "out of memory" in worker.attempt(spec).error
    with pytest.raises(torch.OutOfMemoryError):
        worker.attempt(spec, Two(parallel="ddp"))


@pytest.mark.parametrize("method", ["srste-2e-4", "oracle", "asp-wanda"])
def test_gradients_of_parts_add_up(monkeypatch, method):
    monkeypatch.setattr(gpt.ByteGPT, "settings", replace(gpt.ByteGPT.settings, clip=None))
    spec = RunSpec(Case("gpt", method, "2:4", 6), 1e-3, 1)
    found = []
    for most in (None, 2):
        monkeypatch.setattr(gpt.ByteGPT, "most", most)
        it = worker.Training(spec)
        loss = it.step(1)
        dense = list(getattr(it.optimizer, "dense", {}).values())  # of the oracle
        found.append((loss, [*(p.grad for p in it.model.parameters()), *dense]))
    (loss, whole), (same, parts) = found
    assert same == pytest.approx(loss, rel=1e-6) and len(whole) == len(list(it.model.parameters())) * (1 + (method == "oracle"))
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-6)


def test_bf16_autocast_trains_to_nearly_the_same_loss():
    spec = RunSpec(Case("mlp", "srste-2e-4", "2:4", 20), 5e-3, 1)
    plain, rounded = (worker.run(spec, where).row for where in (HERE, Place(bf16=True)))
    assert rounded.machine.startswith("bf16, ") and rounded.val_loss != plain.val_loss
    assert rounded.val_loss == pytest.approx(plain.val_loss, rel=0.02)


def test_dense_weights_of_another_place_are_not_taken():
    spec = CASES["dense"]
    assert len({worker._file(spec, where) for where in (HERE, Place(bf16=True), Place("cuda"), Place("cuda", True))}) == 4


def ranks(folder: Path, parallel: str, *more: str) -> subprocess.CompletedProcess[str]:
    """Two processes under torchrun, which do the runs ``CASES`` (see ``main``) and then, with the command line, those that are missing."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [*torchrun, "-m", "python_tests.bench.accuracy.test_place", str(folder), parallel, *more]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_have_the_loss_of_one(tmp_path, parallel):
    ended = ranks(tmp_path, parallel)
    assert ended.returncode == 0, ended.stderr[-3000:]
    got = {row.method: row for row in rows.load(tmp_path)}
    assert got.keys() == CASES.keys()
    lines = (tmp_path / rows.RUNS).read_text().splitlines()
    assert len(lines) == 1 + len(CASES)  # the first process alone has written
    for name, spec in CASES.items():
        want = worker.run(spec).row
        assert got[name].val_loss == pytest.approx(want.val_loss, abs=2e-5), name
        assert got[name].switch_step == want.switch_step and got[name].machine.startswith(f"{parallel}, 2 × ")


@needs_gloo
@pytest.mark.slow
def test_a_search_takes_the_same_decisions_in_both_processes(tmp_path):
    (tmp_path / "mine.py").write_text("from nmkernels.recipes import STE\n\nclass Mine(STE):\n    pass\n")
    ended = ranks(tmp_path, "fsdp", "search")
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = rows.load(tmp_path)
    assert {row.seed for row in found} == {100, 0} and len({row.lr for row in found}) >= 3
    seen = [(tmp_path / f"keys-{rank}").read_text() for rank in range(2)]
    assert seen[0] == seen[1] and len(seen[0].split()) == len(found)
    assert ended.stderr.count(": ok ") == len(found) and ended.stdout.count("**`mine`, yours**") == 1
    assert all(row.machine.startswith("fsdp, bf16, 2 × ") for row in found)


def main(folder: Path, parallel: str, search: bool) -> None:
    from bench.accuracy import __main__ as command
    from bench.accuracy import runner

    torch.set_num_threads(1)
    worker.TRAINED = folder / "trained"
    if not search:
        place = Place(parallel=parallel).enter()
        for spec in CASES.values():
            outcome = worker.attempt(spec, place)
            if place.first:
                assert outcome.row is not None, outcome.error
                rows.append([outcome.row], folder)
        place.leave()
        return
    mlp.DigitsMLP.settings = replace(mlp.DigitsMLP.settings, steps=5, tuning_seeds=1, seeds=1)
    keys, attempt = list[str](), runner.attempt
    runner.attempt = lambda spec, place: keys.append(spec.key) or attempt(spec, place)
    words = ["--tasks", "mlp", "--recipe-file", str(folder / "mine.py"), "--out", str(folder), "--bf16", "--parallel", parallel]
    assert command.main(["run", *words]) == 0
    (folder / f"keys-{os.environ['RANK']}").write_text("\n".join(keys))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], "search" in sys.argv)
