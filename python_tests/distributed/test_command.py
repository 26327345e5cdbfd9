"""``nmkernels train`` under torchrun: the same run as in one process, however the ranks share the model, whoever goes on with it.

A scenario is a process of its own, ``python -m python_tests.distributed.test_command SCENARIO FOLDER``, which has imported everything
before it forks the ranks: so a run costs a second, where torchrun needs ten.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nmkernels.cli import train as loop
from nmkernels.cli.log import read_log
from python_tests.cli.conftest import train, write_text
from python_tests.distributed.ranks import needs_gloo

pytestmark = needs_gloo
ROOT = Path(__file__).resolve().parents[2]
SIZES = ["--batch", "8", "--context", "16", "--width", "32", "--layers", "1", "--heads", "2", "--steps", "12", "--checkpoint-every", "4"]
SIZES += ["--log-every", "3"]
SET = ["--set", "switch=fixed", "--set", "start=6"]
ERROR = "python -m nmkernels train: error: "
Ends = list[tuple[int, str, str]]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def started(count: int, out: Path, *words: str, before: Callable[[int], object] = lambda rank: None, local: int = 0) -> Ends:
    """``train`` on ``count`` forked ranks, in the environment that torchrun gives; each calls ``before(rank)`` first.

    What each ended with: its status, or minus the signal, its output and its errors. ``local``: ranks of a node, if fewer.
    """
    port, processes = free_port(), []
    for rank in range(count):
        files = [out.parent / f"{name}-{rank}" for name in ("stdout", "stderr")]
        if process := os.fork():
            processes.append((process, files))
            continue
        status = 99
        try:
            each = local or count
            places = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": rank % each, "LOCAL_WORLD_SIZE": each}
            os.environ.update({name: str(value) for name, value in {**places, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items()})
            with files[0].open("w") as stdout, files[1].open("w") as stderr:
                with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
                    try:
                        before(rank)
                        status = train(out.parent / "a.txt", out, *words, sizes=[] if "--resume" in words else SIZES)
                    except BaseException:
                        traceback.print_exc()
        finally:
            os._exit(status)
    ends = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process, _ in processes]
    return [(end, *(file.read_text() for file in files)) for end, (_, files) in zip(ends, processes, strict=True)]


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
    assert train(folder / "a.txt", folder / "one", *words, sizes=SIZES) == 0
    return outcome(folder / "one")


def dies(rank: int, at: int, act: Callable[[], object]) -> Callable[[int], None]:
    """What has ``rank`` do ``act`` in the middle of step ``at``."""

    def before(mine: int) -> None:
        real = loop.Trainer.step

        def step(self: loop.Trainer, n: int) -> float:
            if n == at and mine == rank:
                act()
            return real(self, n)

        loop.Trainer.step = step  # type: ignore[method-assign]

    return before


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# ---- scenarios


def equal(folder: Path) -> None:
    """Two ranks train what one process does, and what is left of the run does not tell them apart."""
    want = one_process(folder, *SET)
    ran(2, folder / "fsdp", "--parallel", "fsdp", *SET)
    assert_same(folder / "fsdp", want)
    assert [path.name for path in sorted((folder / "fsdp/checkpoints").iterdir())] == ["step-00000008.dcp", "step-00000012.dcp"]
    assert outcome(folder / "fsdp")["result"]["parallel"] == {"kind": "fsdp", "ranks": 2, "shard_ways": 2}


def resumed(folder: Path) -> None:
    """A rank is killed, the other ends by itself, and one, two or no ranks go on to the same end."""
    want = one_process(folder, *SET)
    ran(2, folder / "whole", "--parallel", "fsdp", *SET)
    ends = started(2, folder / "killed", "--parallel", "fsdp", *SET, before=dies(1, 7, kill))
    assert ends[1] == (-signal.SIGKILL, "", "") and ends[0][0] == 1, ends
    assert ends[0][2].startswith(f"{ERROR}another process of this run has ended") and len(ends[0][2].splitlines()) == 1, ends
    for count, words, exact in ((2, ["--parallel", "fsdp"], True), (1, ["--parallel", "fsdp"], False), (0, [], False)):
        out = folder / f"resumed{count}"
        copied(folder / "killed", out)
        if count:
            ran(count, out, "--resume", *words)
        else:
            assert train(folder / "a.txt", out, "--resume", sizes=[]) == 0
        assert_same(out, outcome(folder / "whole") if exact else want, exact)


def copied(run: Path, out: Path) -> None:
    subprocess.run(["cp", "-r", str(run), str(out)], check=True)


@pytest.mark.parametrize("scenario", ["equal", pytest.param("resumed", marks=pytest.mark.slow)])
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked here")
def test_ranks_run_as_one_process(tmp_path: Path, scenario: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "python_tests.distributed.test_command", scenario, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


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
