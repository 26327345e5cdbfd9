"""examples/train_gpt under torchrun, and examples/fsdp.py: the same run as in one process, however the ranks share the model and whichever
resume it.

A scenario is a process of its own, ``python -m python_tests.distributed.test_train_gpt SCENARIO FOLDER``, which has imported everything
before it forks the ranks: so a run costs a second, where torchrun needs ten.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import nmkernels as nm
from examples.train_gpt.data import load_corpus
from python_tests.distributed.ranks import needs_gloo
from python_tests.examples.program import model as models
from python_tests.examples.program import parallel, report, run, text_of, train
from python_tests.house.paths import ROOT

pytestmark = needs_gloo
SIZES = ["--batch=8", "--context=16", "--width=32", "--layers=1", "--heads=2", "--steps=12", "--checkpoint-every=4", "--log-every=3"]
STEP = ["--recipe", "step:2:4(switch=fixed, start=6)"]
Ends = list[tuple[int, str, str]]


def forked(count: int, folder: Path, call: Callable[[int], object], ranked: bool = True) -> Ends:
    """``call(rank)`` on ``count`` forked ranks, in the environment that torchrun gives them unless they are not ``ranked``.

    Returns for each its status, or minus the signal, its output and its errors. This process does nothing else, since threads that it had
    started would be missing in those that it forks.
    """
    # torchrun's own store outlives every rank too
    store, processes = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), []
    for rank in range(count):
        files = [folder / f"{name}-{rank}" for name in ("stdout", "stderr")]
        if process := os.fork():
            processes.append((process, files))
            continue
        status = 1
        signal.alarm(300)
        try:
            places: dict[str, Any] = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": count}
            places |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
            os.environ.update({name: str(value) for name, value in places.items() if ranked})
            with files[0].open("w") as stdout, files[1].open("w") as stderr:
                with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
                    try:
                        call(rank)
                        status = 0
                    except BaseException:
                        traceback.print_exc()
        finally:
            os._exit(status)
    ends = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process, _ in processes]
    return [(end, *(file.read_text() for file in files)) for end, (_, files) in zip(ends, processes, strict=True)]


def started(count: int, out: Path, kind: str, *words: str, before: Callable[[int], object] = lambda rank: None) -> Ends:
    """``train.py`` on so many ranks, each of which calls ``before(rank)`` first."""

    def call(rank: int) -> None:
        before(rank)
        run(out.parent / "a.txt", out, "--parallel", kind, *words, sizes=SIZES)

    return forked(count, out.parent, call, ranked=kind != "none")


def ran(count: int, out: Path, kind: str, *words: str) -> None:
    """A run to its end; only rank 0 prints."""
    ends = started(count, out, kind, *words)
    assert [end for end, _, _ in ends] == [0] * count, ends
    assert "Files in" in ends[0][1] and not any(said for _, *both in ends[1:] for said in both), ends


def outcome(out: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    rows = [{name: float(cell) for name, cell in row.items() if cell} for row in csv.DictReader((out / "log.csv").open(newline=""))]
    return {"rows": rows, "weights": load_file(out / "model-dense.safetensors"), "result": json.loads((out / "result.json").read_text())}


def assert_same(out: Path, want: dict[str, Any], exact: bool = False) -> None:
    """The rows of the log, the finished weights and the validation loss are those of ``want``, to rounding unless ``exact``."""
    got = outcome(out)
    near = 0.0 if exact else 1e-4
    assert [row["step"] for row in got["rows"]] == [row["step"] for row in want["rows"]], out
    for mine, theirs in zip(got["rows"], want["rows"], strict=True):
        for name in theirs.keys() - {"tokens_per_s"}:
            assert mine[name] == pytest.approx(theirs[name], rel=near, abs=near), (out, mine["step"], name)
    assert got["weights"].keys() == want["weights"].keys()
    for name, weight in want["weights"].items():
        assert (got["weights"][name] - weight).abs().max() <= near, (out, name)
    for part in ("sparse", "baseline"):
        if want["result"][part]:
            assert got["result"][part]["val_loss"] == pytest.approx(want["result"][part]["val_loss"], rel=near), (out, part)
    assert got["result"]["sparse"]["switch_step"] == want["result"]["sparse"]["switch_step"]


def contents(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_at(step: int, rank: int) -> Callable[[int], None]:
    """``rank`` is killed as it begins ``step``."""

    def before(mine: int) -> None:
        real = train.Trainer.step
        if mine == rank:
            train.Trainer.step = lambda self, n: kill() if n == step else real(self, n)

    return before


def killed_while_writing(step: int) -> Callable[[int], None]:
    """Rank 0 is killed when all ranks have written their parts of the checkpoint after ``step``, before it is complete."""

    def before(rank: int) -> None:
        real = json.dumps
        if rank == 0:
            parallel.json.dumps = lambda value: kill() if value.get("step") == step else real(value)

    return before


# ---- scenarios


def shared(folder: Path) -> None:
    """However the ranks share the model, and whatever the recipe; each reads its share of a batch."""
    recipes = (STEP, ["--recipe", "sste:2:4(mvue=None)"], ["--recipe", "fst:2:4(mvue=None)"], ["--recipe", "mdgf:1:8"])
    for i, recipe in enumerate(recipes):
        ran(1, folder / f"one{i}", "none", *recipe, "--baseline")
        want = outcome(folder / f"one{i}")
        for kind in ("fsdp", "tp", *(["ddp"] if i < 2 else [])):
            out = folder / f"{kind}{i}"
            ran(2, out, kind, *recipe, "--baseline")
            assert_same(out, want)
            assert outcome(out)["result"]["parallel"] == {"kind": kind, "ranks": 2}
    real = models.GPT.forward

    def forward(self: models.GPT, x: torch.Tensor, *more: Any) -> torch.Tensor:
        assert len(x) <= 4 or not torch.distributed.is_initialized()
        return real(self, x, *more)

    models.GPT.forward = forward
    ran(2, folder / "shares", "fsdp", *STEP)


def killed(folder: Path) -> None:
    """One of two ranks is killed, the other ends too; whichever ranks continue get the result of one process."""
    ran(1, folder / "one", "none", *STEP)
    ran(2, folder / "whole", "fsdp", *STEP)
    want, exact = outcome(folder / "one"), outcome(folder / "whole")
    assert_same(folder / "whole", want)
    every = ((2, "fsdp"), (4, "fsdp"), (2, "tp"), (2, "ddp"), (1, "none"))
    for name, moment, dead, those in (("between", killed_at(7, 1), 1, every), ("writing", killed_while_writing(8), 0, every[::4])):
        base = folder / name
        ends = started(2, base, "fsdp", *STEP, before=moment)
        assert ends[dead][0] == -signal.SIGKILL and ends[1 - dead][0] == 1, ends
        assert [p for p in contents(base / "checkpoints") if p[0] != "."] == ["step-00000004"]
        for count, kind in those:
            out = folder / "out"
            shutil.copytree(base, out)
            ran(count, out, kind, *STEP)
            assert_same(out, exact if (count, kind) == (2, "fsdp") else want, (count, kind) == (2, "fsdp"))
            assert contents(out / "checkpoints") == ["step-00000008", "step-00000012"]
            shutil.rmtree(out)


def refused(folder: Path) -> None:
    """What keeps a run from starting, or ends it, ends every rank with a sentence."""
    for kind, message, *words in (
        ("fsdp", "MaskLLM .* sharded", "--recipe", "maskllm:2:4"),
        ("ddp", "--batch 7 cannot be shared evenly by 2 processes; make it a multiple of that", "--batch", "7"),
        ("fsdp", "the loss is nan at step 1: training has diverged"),
    ):
        ends = started(2, folder / "out", kind, *words, before=(lambda rank: None) if words else diverge)
        assert all(end == 1 and re.search(f"SystemExit: train.py: error: .*{message}", said) for end, _, said in ends), ends


def diverge(rank: int) -> None:
    """One rank's loss is no longer finite."""
    if rank == 1:
        real = models.GPT.forward
        models.GPT.forward = lambda *args: real(*args) * float("nan")


def fsdp(folder: Path) -> None:
    """examples/fsdp.py on two ranks and, from a checkpoint on the way, on one."""
    program = str(ROOT / "examples/fsdp.py")
    words = ["--out", str(folder / "out"), "--data", str(folder / "a.txt"), "--steps", "20", "--save-every", "10"]
    sys.path.insert(0, str(ROOT / "examples"))

    def call(rank: int) -> None:
        sys.argv = [program, *words]
        runpy.run_path(program, run_name="__main__")

    def again(count: int) -> tuple[str, models.GPT]:
        ends = forked(count, folder, call)
        assert not any(end for end, _, _ in ends) and not any(out for _, out, _ in ends[1:]), ends
        model = models.GPT(models.GPTConfig(width=64, layers=2, heads=2, context=64))
        nm.load_compressed(model, folder / "out/model.safetensors")
        assert sum(isinstance(layer, nm.CompressedLinear) for layer in model.modules()) == 8
        return ends[0][1], model

    said, two = again(2)
    assert re.findall(r"step (\d+)  loss [\d.]+  phase (\d)", said) == [("10", "0"), ("20", "1")]  # T₀ is 11 at the latest
    shutil.rmtree(folder / "out/step-000020")
    said, one = again(1)
    assert said.startswith("step 20 ") and sorted(path.name for path in (folder / "out").glob("step*")) == ["step-000010", "step-000020"]
    x, y = load_corpus(folder / "a.txt").batch(0, 21, 16, 64)
    with torch.no_grad():
        assert two.loss(x, y) < 3  # 5.5 at the beginning
        torch.testing.assert_close(one(x), two(x), atol=1e-3, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("scenario, choice", [("shared", ""), ("killed", ""), ("killed", "packed"), ("refused", ""), ("fsdp", "packed")])
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked here")
def test_ranks_run_as_one_process(tmp_path: Path, scenario: str, choice: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if choice:
        environment["NMKERNELS_CHOICE"] = choice
    command = [sys.executable, "-m", "python_tests.distributed.test_train_gpt", scenario, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr


# ---- torchrun itself


def torchrun(*words: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *map(str, words)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("program", [["train_gpt/train.py", "--parallel", "ddp", *SIZES], ["fsdp.py", "--steps", "10"]])
def test_torchrun(tmp_path: Path, program: list[str]) -> None:
    process = torchrun(f"examples/{program[0]}", "--out", tmp_path / "out", "--data", text_of(tmp_path), *program[1:])
    said, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert said.count("Files in") == 1 if "train" in program[0] else said.startswith("step 10  loss ")
    assert (tmp_path / "out/model.safetensors").exists()


@pytest.mark.slow
def test_torchrun_ends_a_run_that_has_lost_a_rank(tmp_path: Path) -> None:
    """The rank that is killed is noticed by its parent, and torchrun does not wait for the other."""
    out = tmp_path / "out"
    process = torchrun(
        "examples/train_gpt/train.py", "--parallel", "fsdp", "--data", text_of(tmp_path), "--out", out, *SIZES, "--steps", "100000"
    )
    while not list(out.glob("checkpoints/step-*")) and process.poll() is None:
        time.sleep(0.1)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[1]), signal.SIGKILL)
    assert process.wait(60) == 1


def main(scenario: str, folder: Path) -> None:
    for module in (
        "_dynamo",
        "_inductor.utils",
        "distributed.checkpoint._fsspec_filesystem",
        "distributed.fsdp",
        "distributed.tensor.parallel",
    ):
        importlib.import_module(f"torch.{module}")
    torch.set_num_threads(1)
    text_of(folder)
    report.plot = lambda *_: None  # type: ignore[assignment]  # drawing takes longer than the rest
    with contextlib.redirect_stdout(io.StringIO()):
        globals()[scenario](folder)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
