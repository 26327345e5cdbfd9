"""``nmkernels train`` under torchrun: the same run as in one process, however the ranks share the model and whichever resume it.

A scenario is a process of its own, ``python -m python_tests.distributed.test_command SCENARIO FOLDER``, which has imported everything
before it forks the ranks: so a run costs a second, where torchrun needs ten.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import resource
import runpy
import shutil
import signal
import socket
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
from nmkernels.cli import folder as files
from nmkernels.cli import train as loop
from nmkernels.cli.log import read_log
from nmkernels.models import GPT, GPTConfig, load_corpus
from python_tests.cli.conftest import train, write_text
from python_tests.distributed.ranks import needs_gloo

pytestmark = needs_gloo
ROOT = Path(__file__).resolve().parents[2]
SIZES = ["--batch", "8", "--context", "16", "--width", "32", "--layers", "1", "--heads", "2", "--steps", "12"]
EVERY = ["--checkpoint-every", "4", "--log-every", "3"]
EXAMPLE = ROOT / "examples/fsdp.py"
STEP = ["--recipe", "step:2:4", "--set", "switch=fixed", "--set", "start=6"]
ERROR = "python -m nmkernels train: error: "
Ends = list[tuple[int, str, str]]


def forked(count: int, folder: Path, run: Callable[[int], int], local: int = 0) -> Ends:
    """``run(rank)`` on ``count`` forked ranks, in the environment that torchrun gives; ``local``: ranks of a node, if fewer.

    What each ended with: its status, or minus the signal, its output and its errors.
    """
    # torchrun's own store outlives every rank too
    store, processes = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), []
    for rank in range(count):
        files = [folder / f"{name}-{rank}" for name in ("stdout", "stderr")]
        if process := os.fork():
            processes.append((process, files))
            continue
        status = 99
        signal.alarm(120)
        try:
            each = local or count
            places: dict[str, Any] = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": rank % each, "LOCAL_WORLD_SIZE": each}
            places |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
            os.environ.update({name: str(value) for name, value in places.items()})
            with files[0].open("w") as stdout, files[1].open("w") as stderr:
                with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
                    try:
                        status = run(rank)
                    except BaseException:
                        traceback.print_exc()
        finally:
            os._exit(status)
    ends = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process, _ in processes]
    return [(end, *(file.read_text() for file in files)) for end, (_, files) in zip(ends, processes, strict=True)]


def started(count: int, out: Path, *words: str, before: Callable[[int], object] = lambda rank: None, local: int = 0) -> Ends:
    """``train`` on so many ranks, each of which calls ``before(rank)`` first."""

    def run(rank: int) -> int:
        before(rank)
        return train(out.parent / "a.txt", out, *words, sizes=EVERY if "--resume" in words else [*SIZES, *EVERY])

    return forked(count, out.parent, run, local)


def ran(count: int, out: Path, *words: str, **keywords: Any) -> None:
    """``started``, to its end; rank 0 alone has said anything."""
    ends = started(count, out, *words, **keywords)
    assert [end for end, _, _ in ends] == [0] * count, ends
    assert "Files in" in ends[0][1] and not any(said for _, *both in ends[1:] for said in both), ends


def outcome(out: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    result = json.loads((out / "result.json").read_text())
    return {"rows": read_log(out / "log.csv"), "weights": load_file(out / "model-dense.safetensors"), "result": result}


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


def one_process(folder: Path, *words: str) -> dict[str, Any]:
    assert train(folder / "a.txt", folder / "one", *words, sizes=[*SIZES, *EVERY]) == 0
    return outcome(folder / "one")


def at(step: int, rank: int, act: Callable[[], object]) -> Callable[[int], None]:
    """What has ``rank`` do ``act`` as it begins ``step``."""
    return instead(loop.Trainer, "step", lambda trainer, n: n == step, rank, act)


def sealing(step: int, act: Callable[[], object]) -> Callable[[int], None]:
    """What has rank 0 do ``act`` when every rank has written its part of the checkpoint after ``step``, before it is one."""
    return instead(files.Store, "_seal", lambda store, rest, *_: rest["step"] == step, 0, act)


def instead(cls: type, name: str, when: Callable[..., bool], rank: int, act: Callable[[], object]) -> Callable[[int], None]:
    def before(mine: int) -> None:
        real = getattr(cls, name)

        def method(self: Any, *args: Any) -> Any:
            if mine == rank and when(self, *args):
                act()
            return real(self, *args)

        setattr(cls, name, method)

    return before


def reads(rows: int) -> None:
    """Have every call of the model fail that reads more than a rank's share of a batch, while there are ranks."""
    real = GPT.loss

    def loss(self: GPT, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        assert len(x) == len(y) <= rows or not torch.distributed.is_initialized()
        return real(self, x, y)

    GPT.loss = loss  # type: ignore[method-assign]


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def diverge() -> None:
    real = GPT.forward
    GPT.forward = lambda *args: real(*args) * float("nan")  # type: ignore[method-assign, assignment]


def fill() -> None:
    """Let the system refuse to write files of more than 4 kB from now on."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def contents(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---- scenarios


def killed(folder: Path) -> None:
    """One of two ranks is killed, the other ends by itself, and resuming both gives the result of one process."""
    want = one_process(folder, *STEP)
    ends = started(2, folder / "out", "--parallel", "fsdp", *STEP, before=at(7, 1, kill))
    assert ends[1] == (-signal.SIGKILL, "", "") and ends[0][0] == 1, ends
    assert re.fullmatch(f"{ERROR}another process of this run has ended.*\n", ends[0][2]), ends
    assert contents(folder / "out/checkpoints") == ["step-00000004.dcp"]
    ran(2, folder / "out", "--parallel", "fsdp", "--resume", before=lambda rank: reads(4))
    assert_same(folder / "out", want)
    assert contents(folder / "out/checkpoints") == ["step-00000008.dcp", "step-00000012.dcp"]
    assert outcome(folder / "out")["result"]["parallel"] == {"kind": "fsdp", "ranks": 2, "shard_ways": 2}


def example(folder: Path) -> None:
    """The example on two ranks and, from a checkpoint on the way, on one."""
    words = ["--out", str(folder / "out"), "--data", str(folder / "a.txt"), "--steps", "20", "--save-every", "10"]

    def run(rank: int) -> int:
        sys.argv = [str(EXAMPLE), *words]
        runpy.run_path(str(EXAMPLE), run_name="__main__")
        return 0

    def ran(count: int) -> tuple[str, nm.models.GPT]:
        ends = forked(count, folder, run)
        assert not any(end for end, _, _ in ends) and not any(out for _, out, _ in ends[1:]), ends
        model = nm.load_compressed(GPT(GPTConfig(width=64, layers=2, heads=2, context=64)), folder / "out/model.safetensors")
        assert sum(isinstance(layer, nm.nn.CompressedLinear) for layer in model.modules()) == 8
        return ends[0][1], model

    said, model = ran(2)
    assert re.findall(r"step (\d+)  loss [\d.]+  phase (\d)", said) == [("10", "0"), ("20", "1")]  # T₀ is 11 at the latest
    shutil.rmtree(folder / "out/step-000020")
    said, again = ran(1)
    assert said.startswith("step 20 ") and sorted(path.name for path in (folder / "out").glob("step*")) == ["step-000010", "step-000020"]
    x, y = load_corpus(folder / "a.txt").batch(0, 21, 16, 64)
    with torch.no_grad():
        assert model.loss(x, y) < 3  # 5.5 at the beginning
        torch.testing.assert_close(again(x), model(x), atol=1e-3, rtol=1e-3)


def one(folder: Path) -> None:
    killed(folder)
    shutil.rmtree(folder / "out")
    example(folder)


def parallelisms(folder: Path) -> None:
    """However the ranks share the model, and whatever the recipe."""
    recipes = (
        STEP,
        ["--recipe", "sste:2:4", "--set", "mvue=None"],
        ["--recipe", "fst:2:4", "--set", "mvue=None"],
        ["--recipe", "mdgf:1:8"],
    )
    for i, recipe in enumerate(recipes):
        want = one_process(folder, *recipe, "--baseline", "--overwrite")
        for kind, ranks in (("fsdp", 2), ("tp", 2), *([("ddp", 2), ("hsdp", 4)] if i < 2 else ())):
            out = folder / f"{kind}{i}"
            ran(ranks, out, "--parallel", kind, *recipe, "--baseline", local=2)
            assert_same(out, want)
            shutil.rmtree(out)


def world_sizes(folder: Path) -> None:
    """Killed between and while writing checkpoints, a run goes on with another number of ranks, and leaves nothing lying about."""
    want = one_process(folder, *STEP)
    ran(2, folder / "whole", "--parallel", "fsdp", *STEP)
    fsdp, writing = ["--parallel", "fsdp"], ".step-00000008.dcp.shards.tmp"
    for name, moment in (("between", at(7, 1, kill)), ("writing", sealing(8, kill))):
        run = folder / name
        started(2, run, *fsdp, *STEP, before=moment)
        assert contents(run / "checkpoints") == [*([writing] if name == "writing" else []), "step-00000004.dcp"]
        for count, words in ((2, fsdp), (1, fsdp), (4, fsdp), (4, ["--parallel", "hsdp"]), (2, ["--parallel", "ddp"]), (1, [])):
            out = folder / "out"
            shutil.copytree(run, out)
            ran(count, out, "--resume", *words, local=2)
            exact = (count, words) == (2, fsdp)
            assert_same(out, outcome(folder / "whole") if exact else want, exact)
            kind = "dcp" if {"fsdp", "hsdp"} & {*words} else "pt"
            assert contents(out / "checkpoints") == [f"step-00000008.{kind}", f"step-00000012.{kind}"]
            shutil.rmtree(out)
    started(2, folder / "file", "--parallel", "ddp", *STEP, before=at(7, 0, kill))
    assert contents(folder / "file/checkpoints") == ["step-00000004.pt"]
    ran(2, folder / "file", "--resume", *fsdp)
    assert_same(folder / "file", want)


def messages(folder: Path) -> None:
    """What ends a run, or keeps it from starting, is said once, and every rank ends."""
    fsdp, out = ["--parallel", "fsdp"], folder / "out"

    def ended(status: int, message: str, *words: str, **keywords: Any) -> None:
        ends = started(2, out, *fsdp, *words, **keywords)
        assert all(end == status for end, _, _ in ends), ends
        assert re.fullmatch(message + "\n", "".join(said for _, _, said in ends)), ends

    ended(
        130,
        r"\nStopped after step 5; saved in \S+step-00000005.dcp.\nTo resume: torchrun --nproc-per-node 2 -m nmkernels train "
        rf"--parallel fsdp --out {out} --resume --data \S+",
        *STEP,
        before=at(5, 1, terminate),
    )
    ended(2, rf"{ERROR}{out} holds a run that was stopped. Continue it with --resume, or replace it with --overwrite.")
    ended(2, rf"{ERROR}\S+dcp is of another run: width is 32 there and 64 here. .*", "--resume", "--width", "64")
    ended(
        1,
        rf"{ERROR}\S+step-00000008.dcp could not be written: File too large.* "
        r"\S+step-00000005.dcp is complete: --resume continues from it.",
        "--resume",
        before=at(8, 1, fill),
    )
    ends = started(2, out, *fsdp, "--resume", before=at(7, 1, diverge))
    assert (
        [end for end, _, _ in ends] == [1, 1] and f"{ERROR}the loss is nan at step 7" in ends[1][2] and "another process" in ends[0][2]
    ), ends
    assert contents(out / "checkpoints") == ["step-00000004.dcp", "step-00000005.dcp"]
    (out / "checkpoints/step-00000005.dcp/__1_0.distcp").write_bytes(b"")
    ended(2, rf"{ERROR}\S+step-00000005.dcp: .*", "--resume")
    ended(2, rf"{ERROR}--batch 7 cannot be shared evenly by 2 processes; make it a multiple of that.", "--overwrite", "--batch", "7")
    assert contents(out / "checkpoints") == ["step-00000004.dcp", "step-00000005.dcp"]
    ended(2, rf"{ERROR}MaskLLM .* sharded.*", "--overwrite", "--recipe", "maskllm:2:4")

    def elsewhere(rank: int) -> None:
        """What ``rank`` reads is on another machine."""
        if rank == 1:
            real = loop.load_corpus
            loop.load_corpus = lambda path: real(out / "log.csv")  # type: ignore[assignment]

    ends = started(2, out, *fsdp, "--resume", before=elsewhere)
    assert ends[1][0] == 2 and f"{ERROR}process 1 reads another text than process 0" in ends[1][2], ends
    assert ends[0][0] == 1 and re.fullmatch(f"{ERROR}another process of this run has ended.*\n", ends[0][2]), ends
    (out / "checkpoints/step-00000005.dcp/mine").touch()
    ran(2, out, *fsdp, "--overwrite")
    assert contents(out / "checkpoints") == ["step-00000005.dcp", "step-00000008.dcp", "step-00000012.dcp"]
    assert contents(out / "checkpoints/step-00000005.dcp") == ["mine"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "scenario, choice", [(name, "") for name in ("one", "parallelisms", "world_sizes", "messages")] + [("one", "packed")]
)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked here")
def test_ranks_run_as_one_process(tmp_path: Path, scenario: str, choice: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if choice:
        environment["NMKERNELS_CHOICE"] = choice
    command = [sys.executable, "-m", "python_tests.distributed.test_command", scenario, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


# ---- torchrun itself


def torchrun(*words: str, count: int = 2, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count), *words]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    return subprocess.Popen(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(*processes: subprocess.Popen[str]) -> str:
    """What processes that end well have written to standard output."""
    said = [process.communicate(timeout=300) for process in processes]
    assert not any(process.returncode for process in processes), said
    return "".join(out for out, _ in said)


@pytest.mark.slow
def test_the_example(tmp_path: Path) -> None:
    text = write_text(tmp_path / "a.txt")
    said = ended(torchrun("examples/fsdp.py", "--out", str(tmp_path / "out"), "--data", str(text), "--steps", "10"))
    assert said.startswith("step 10  loss ") and (tmp_path / "out/model.safetensors").exists()


@pytest.mark.slow
def test_two_nodes(tmp_path: Path) -> None:
    """Two torchruns on one machine, of two ranks each: the model is sharded within a node, replicated over both."""
    text, sizes = write_text(tmp_path / "a.txt"), [*SIZES, *EVERY, *STEP]
    want = one_process(tmp_path, *STEP)
    words = ["-m", "nmkernels", "train", "--parallel", "hsdp", "--data", str(text), "--out", str(tmp_path / "out"), *sizes]
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    meet = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    said = ended(*(torchrun("--node-rank", str(node), *meet, *words) for node in range(2)))
    assert said.count("Files in") == 1
    assert_same(tmp_path / "out", want)
    assert outcome(tmp_path / "out")["result"]["parallel"] == {"kind": "hsdp", "ranks": 4, "shard_ways": 2}


@pytest.mark.slow
def test_torchrun_ends_a_run_that_has_lost_a_rank(tmp_path: Path) -> None:
    """The rank that is killed is found by its parent, and torchrun does not wait for the other."""
    text, out = write_text(tmp_path / "a.txt"), tmp_path / "out"
    sizes = [*SIZES, "--checkpoint-every", "5"]
    sizes[sizes.index("--steps") + 1] = "100000"
    process = torchrun("-m", "nmkernels", "train", "--parallel", "fsdp", "--data", str(text), "--out", str(out), *sizes)
    while not list(out.glob("checkpoints/step-*")) and process.poll() is None:
        time.sleep(0.1)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[1]), signal.SIGKILL)
    assert process.wait(60) == 1


def test_wrong_use_of_torchrun_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"

    def refused(message: str, *words: str, **environment: int) -> None:
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, str(value))
            assert train(tmp_path / "a.txt", out, *words, sizes=SIZES) == 2
        said = capsys.readouterr()
        assert said.out == "" and said.err.startswith(ERROR) and message in said.err and len(said.err.splitlines()) == 1
        assert not out.exists()

    refused("--parallel fsdp needs the processes that torchrun starts: torchrun --nproc-per-node 2", "--parallel", "fsdp")
    refused("torchrun started 2 processes, and each would train the same", RANK=0, WORLD_SIZE=2)
    refused("--shard-ways belongs to --parallel hsdp", "--shard-ways", "2")
    refused("--shard-ways 3 does not divide the 4 processes", "--parallel", "hsdp", "--shard-ways", "3", RANK=0, WORLD_SIZE=4)
    refused("Give --shard-ways", "--parallel", "hsdp", RANK=0, WORLD_SIZE=4, LOCAL_WORLD_SIZE=4)
    refused("pass --device cuda", "--parallel", "ddp", "--device", "cuda:1", RANK=0, WORLD_SIZE=2)


def main(scenario: str, folder: Path) -> None:
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel

    torch.set_num_threads(1)
    write_text(folder / "a.txt")
    sys.modules["matplotlib.figure"] = None  # type: ignore[assignment]  # drawing takes longer than the rest
    with contextlib.redirect_stdout(io.StringIO()):
        globals()[scenario](folder)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
