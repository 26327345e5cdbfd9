"""``make gpu``: its order, its exit statuses, its summary, and what each step runs; ``test_gpu_dry.py`` really runs it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench import gpu, targets
from bench.gpu import Visit
from bench.jobs import Ended, Job, Pool
from bench.outcomes import Outcome
from python_tests.each import each
from python_tests.house.tree import ROOT


def ended(name: str, left: bool = False, **whats: str) -> Ended:
    """A job of which the items named passed, failed, ..."""
    found = {item: Outcome(item, what, "" if what == "passed" else f"why {item}") for item, what in whats.items()}
    return Ended(Job(name, ()), found, left)


FINE, LEFT, FAILED = ended("fine", a="passed"), ended("left", left=True), ended("file.py", a="passed", b="failed")
ALL = ["build", "tests", "benchmarks", "curves", "report", "sanitizer"]
"""Rows come before what takes longest."""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """``main`` with steps that come to what ``run(tests=...)`` says, or raise it; its status, its summary, and the steps that ran."""

    def call(*words: str, **does: Any) -> tuple[int, list[str], list[str]]:
        ran: list[str] = []

        def step(name: str, visit: Visit, pool: Pool) -> None:
            ran.append(name)
            given = does.get(name, FINE)
            if isinstance(given, BaseException):
                raise given
            if isinstance(given, str):
                pool.note = given
            else:
                pool.ended += given if isinstance(given, list) else [given]

        monkeypatch.setattr(gpu, "STEPS", {name: partial(step, name) for name in gpu.STEPS})
        monkeypatch.setattr(gpu, "fingerprint", lambda device: "the same")
        status = gpu.main(["--out", str(tmp_path), *words], lambda: "")
        lines = capsys.readouterr().out.splitlines()
        return status, lines[lines.index("== summary") :], ran

    return call


AGAIN = "the same command goes on with what is left$"
CASES: dict[str, tuple[dict[str, Any], int, list[str], str]] = {
    "passed": ({}, 0, ALL, "  build +0 s  ok +1 passed\n.*  all passed$"),
    "failed": (
        {"tests": FAILED},
        1,
        ALL,
        "  tests +0 s  FAILED +1 passed; 1 failed\n.*what failed\n  tests: file.py, 1 failed\n    b: why b\n",
    ),
    "raised": ({"curves": ValueError("bad luck")}, 1, ALL, "  curves +0 s  FAILED .*    curves: ValueError: bad luck\n.*  FAILED$"),
    "left": ({"tests": LEFT}, 3, ALL, f"left: left\n.*nothing failed so far; {AGAIN}"),
    "left and failed": ({"tests": LEFT, "curves": FAILED}, 1, ALL, f"  FAILED; {AGAIN}"),
    "half a build": ({"build": LEFT}, 3, ["build"], AGAIN),
    "interrupted": ({"tests": KeyboardInterrupt()}, 130, ["build", "tests"], f"  interrupted; {AGAIN}"),
    "a note": ({"sanitizer": gpu.NO_SANITIZER}, 0, ALL, "  sanitizer +0 s  skipped +compute-sanitizer is not installed"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_steps_come_to(run, case: str) -> None:
    does, status, ran, said = CASES[case]
    got, lines, steps = run(**does)
    assert (got, steps) == (status, ran) and re.search(said, "\n".join(lines), re.S)


def test_steps_are_chosen_by_name(run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("report", "tests")[2] == ["tests", "report"]
    with pytest.raises(SystemExit) as stopped:
        gpu.main(["test"])
    assert stopped.value.code == 2
    assert f"no step is called test; there are {', '.join(ALL)}" in capsys.readouterr().err


def test_the_summary_fits_a_terminal(run, tmp_path: Path) -> None:
    many = [ended(f"test_{i}.py", **{f"t{j}_{'x' * 300}": "failed" for j in range(60)}) for i in range(40)]
    text = "\n".join(run(tests=many)[1])
    assert len(text) < 12_000 and max(map(len, text.splitlines())) <= 400
    # each file is named, whatever else is left out
    assert all(f"tests: test_{i}.py, 60 failed" in text for i in range(40)) and "    and 54 more" in text
    assert (tmp_path / "failed.txt").read_text().count("why t") == 40 * 60


def test_without_gpu_nothing_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([], lambda: "torch sees no NVIDIA GPU") == 2
    assert "torch sees no NVIDIA GPU" in capsys.readouterr().out


@each("sources, again, left", [("one", False, ALL), ("one", True, [name for name in ALL if name != "tests"]), ("two", False, [])])
def test_other_sources_are_done_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sources: str, again: bool, left: list[str]) -> None:
    (tmp_path / "sources.txt").write_text("one")
    for name in ALL:
        (tmp_path / name).mkdir(exist_ok=True)
    monkeypatch.setattr(gpu, "fingerprint", lambda device: sources)
    gpu.prepare(Visit(tmp_path, tmp_path, (), 1, dry=True), ["tests"], again)
    assert [name for name in ALL if (tmp_path / name).exists()] == left


def test_the_fingerprint_knows_sources_and_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    seen = [gpu.fingerprint("cpu")]
    counted = ("nmkernels/a.py", "csrc/cuda/a.cu", "cmake/a.cmake", "python_tests/a.py", "bench/a.py", "setup.py")
    for name in (*counted, "bench/results/a.txt", "nmkernels/_C.so", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("1")
        seen.append(gpu.fingerprint("cpu"))
    assert len(set(seen)) == 1 + len(counted) and len(set(seen[len(counted) :])) == 1
    monkeypatch.setattr("bench.rows.machine", lambda device: "another")
    assert gpu.fingerprint("cpu") not in seen


def test_rows_are_where_they_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found: list[Visit] = []
    monkeypatch.setattr(gpu, "STEPS", {"tests": lambda visit, pool: found.append(visit)})
    monkeypatch.setattr(gpu, "prepare", lambda visit, *rest: visit.logs.mkdir(parents=True, exist_ok=True))
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    # a dry run leaves the measurements alone
    for words, rows in ([], "bench/results"), (["--out", str(tmp_path / "here")], "here"), (["--dry-run"], "build/gpu-dry"):
        assert gpu.main(words, lambda: "") == 0
        assert found[-1].rows == tmp_path / rows


# ---- the steps


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[Job], int]]:
    """What the steps have pools run, with how many at a time; every job passes."""
    found: list[tuple[list[Job], int]] = []

    def run(self: Pool, jobs: list[Job], workers: int = 1, fresh: bool = False) -> list[Ended]:
        found.append((list(jobs), workers))
        for job in jobs:
            (self.folder / f"{job.name}.log").write_text("its output\n")
        return [ended(job.name, x="passed") for job in jobs]

    monkeypatch.setattr(Pool, "run", run)
    return found


def step(name: str, tmp_path: Path, dry: bool = False) -> Pool:
    pool = Pool(tmp_path / name, time.monotonic() + 60, lambda text: None)
    gpu.STEPS[name](Visit(tmp_path, tmp_path, ("python_tests",), 4, dry), pool)
    return pool


@pytest.mark.parametrize(("capability", "built"), [((8, 0), "80-real"), ((8, 9), "80-real"), ((9, 0), "90a-real"), ((10, 0), "90-virtual")])
def test_the_gpus_architecture_alone_is_built(asked, capability, built: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("nmkernels.capability.compute_capability", lambda: capability)
    assert step("build", tmp_path).note == "its output"
    (compile,), (core,) = (jobs for jobs, _ in asked)
    assert compile.words[1:] == ("setup.py", "build_ext", "--inplace") and core.words[1:] == ("-c", gpu.CORE)
    assert compile.env["NMKERNELS_CUDA_ARCHITECTURES"] == built
    assert re.search(rf'[";]{built}[";]', (ROOT / "cmake" / "architectures.cmake").read_text())


def test_many_tests_of_a_file_are_shared_out() -> None:
    files = [("few.py", 3, False), ("many.py", 2 * gpu.SHARE + 1, False), ("large.py", 500, True)]
    found = gpu.test_jobs(files, "gpu", 9.0)
    shares = [(job.words[-1], job.env["NMKERNELS_SHARE"]) for job in found]
    assert shares == [("large.py", "1/1"), *(("many.py", f"{i}/3") for i in (1, 2, 3)), ("few.py", "1/1")]
    assert [job.alone for job in found] == [True] + 4 * [False] and {job.limit for job in found} == {9.0}


def test_families_of_benchmarks_are_apart(asked, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("bench.rows.machine", lambda device: "NVIDIA H200")
    pool = step("benchmarks", tmp_path)
    ((found, workers),) = asked
    assert workers == 1, "clocks are not shared"
    ops = [word for job in found for word in job.words[job.words.index("--op") + 1 :]]
    assert sorted(ops) == sorted({spec.op for spec in targets.quick("cuda")}) and len(found) > 8
    assert all(job.words[job.words.index("--out") + 1] == str(tmp_path / "nvidia-h200.csv") for job in found)
    assert "targets met" in pool.note


def test_tables_are_made_of_the_visits_rows(asked, tmp_path: Path) -> None:
    assert "writes no tables" in step("report", tmp_path, dry=True).note and not asked
    step("report", tmp_path)
    assert asked[0][0][0].words[1:] == ("-m", "bench.report", "--add", str(tmp_path))


def test_the_sanitizer_of_the_toolkit_runs_the_tests_under_each_tool(asked, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu, "collected", lambda *args: [("a.py", 3, False), ("large.py", 2, True)])
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    tool = tmp_path / "bin" / "compute-sanitizer"
    tool.parent.mkdir()
    tool.touch(0o755)
    step("sanitizer", tmp_path)
    assert [[job.name for job in found] for found, _ in asked] == [["memcheck a.py"], ["racecheck a.py"]]
    for (job,), _ in asked:
        assert job.words[0] == str(tool) and job.words[-1] == "a.py" and job.refused == gpu.FINDING
        assert job.env["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"


QUIET = """========= COMPUTE-SANITIZER
========== 3 passed in 0.10s ===========
========= 3 passed, 12 skipped =========
========= ERROR SUMMARY: 0 errors
========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)
"""


def test_findings_are_told_from_the_rest() -> None:
    found = [
        "========= Invalid __global__ write of size 4 bytes",
        "========= Error: Race reported between Write access at compress_kernel and Read access",
        "========= ERROR SUMMARY: 3 errors",
        "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)",
    ]
    assert re.findall(gpu.FINDING, QUIET + "\n".join(found), re.M) == found
