"""``make gpu``: its order, its exit statuses, its summary, and what each step runs; ``test_gpu_dry.py`` really runs it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import cases, gpu, targets
from bench.gpu import Visit
from bench.jobs import Ended, Job, Pool
from bench.outcomes import Outcome
from nmkernels import capability as _capability
from python_tests.house.tree import ROOT

Said = list[str]


def ended(name: str, left: bool = False, **whats: str) -> Ended:
    """A job of which the items named passed, failed, ..."""
    return Ended(
        Job(name, ()), {item: Outcome(item, what, "" if what == "passed" else f"why {item}") for item, what in whats.items()}, left
    )


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, Said, Said]]:
    """``main`` with steps that do nothing, or what ``run(tests=...)`` says; its status, its output, and the steps that ran."""

    def call(*words: str, **does: Callable[[Visit, Pool], None]) -> tuple[int, Said, Said]:
        ran: Said = []

        def step(name: str) -> Callable[[Visit, Pool], None]:
            def run(visit: Visit, pool: Pool) -> None:
                ran.append(name)
                does.get(name, lambda visit, pool: pool.ended.append(ended(name, a="passed")))(visit, pool)

            return run

        monkeypatch.setattr(gpu, "STEPS", {name: step(name) for name in gpu.STEPS})
        monkeypatch.setattr(gpu, "fingerprint", lambda device: "the same")
        status = gpu.main(["--out", str(tmp_path), *words], lambda: "")
        return status, capsys.readouterr().out.splitlines(), ran

    return call


def adds(*results: Ended, note: str = "") -> Callable[[Visit, Pool], None]:
    def step(visit: Visit, pool: Pool) -> None:
        pool.ended += results
        pool.note = note

    return step


def test_all_steps_pass_in_order(run) -> None:
    status, lines, ran = run()
    assert status == 0 and lines[-1].strip() == "all passed"
    # rows come before what takes longest
    assert ran == ["build", "tests", "benchmarks", "curves", "report", "sanitizer"]
    assert re.match(r"  build +0 s  ok +1 passed$", lines[lines.index("== summary") + 1])


def test_steps_that_fail_or_raise_do_not_hide_the_rest(run) -> None:
    def raises(visit: Visit, pool: Pool) -> None:
        raise RuntimeError("out of luck")

    status, lines, ran = run(tests=adds(ended("file.py", **{"a": "passed", "b": "failed"})), benchmarks=raises)
    assert status == 1 and len(ran) == len(gpu.STEPS)
    summary = lines[lines.index("== summary") :]
    assert [line.split()[0] for line in summary if "FAILED  " in line] == ["tests", "benchmarks"]
    failed = summary[summary.index("-- what failed") :]
    assert failed[1:3] == ["  tests: file.py, 1 failed", "    b: why b"] and failed[-1].strip() == "FAILED"
    assert "    benchmarks: RuntimeError: out of luck" in failed


def test_steps_are_chosen_by_name(run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("report", "tests")[2] == ["tests", "report"]
    with pytest.raises(SystemExit) as stopped:
        gpu.main(["test"])
    assert stopped.value.code == 2
    assert "no step is called test; there are build, tests, benchmarks, curves, report, sanitizer" in capsys.readouterr().err


def test_what_is_left_is_said(run) -> None:
    names = [f"file{i}.py" for i in range(6)]
    status, lines, ran = run(tests=adds(*(ended(name, left=True) for name in names)))
    assert status == 3 and len(ran) == len(gpu.STEPS)
    assert next(line for line in lines if "left:" in line).endswith("left: file0.py, file1.py, file2.py, file3.py and 2 more")
    assert lines[-1].strip() == "nothing failed so far; the same command goes on with what is left"
    # a failure counts more
    status, lines, _ = run(tests=adds(ended("a", left=True)), curves=adds(ended("b", x="failed")))
    assert status == 1 and lines[-1].strip() == "FAILED; the same command goes on with what is left"


def test_nothing_runs_on_half_a_build(run) -> None:
    status, _, ran = run(build=adds(ended("compile", left=True)))
    assert status == 3 and ran == ["build"]


def test_an_interrupt_ends_it_with_a_summary(run) -> None:
    def stops(visit: Visit, pool: Pool) -> None:
        pool.ended.append(ended("a", x="passed"))
        raise KeyboardInterrupt

    status, lines, ran = run(tests=stops)
    assert status == 130 and ran == ["build", "tests"]
    assert lines[-1].strip() == "interrupted; the same command goes on with what is left"


def test_notes_are_told(run) -> None:
    status, lines, _ = run(sanitizer=adds(note=gpu.NO_SANITIZER))
    assert status == 0 and any(re.match(r"  sanitizer +0 s  skipped +compute-sanitizer is not installed", line) for line in lines)


def test_the_summary_fits_a_terminal(run, tmp_path: Path) -> None:
    many = [ended(f"python_tests/test_{i}.py", **{f"t{j}_{'x' * 300}": "failed" for j in range(60)}) for i in range(40)]
    status, lines, _ = run(tests=adds(*many))
    text = "\n".join(lines[lines.index("== summary") :])
    assert status == 1 and len(text) < 12_000 and max(map(len, lines)) <= 400
    # each file is named, whatever else is left out
    assert all(f"tests: python_tests/test_{i}.py, 60 failed" in text for i in range(40)) and "    and 54 more" in text
    full = (tmp_path / "failed.txt").read_text()
    assert full.count("why t") == 40 * 60


def test_without_gpu_nothing_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "STEPS", {})
    assert gpu.main([], lambda: "torch sees no NVIDIA GPU") == 2
    assert "torch sees no NVIDIA GPU" in capsys.readouterr().out


def test_other_sources_are_done_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    visit = Visit(tmp_path, tmp_path, (), 1, dry=True)
    marks = {name: tmp_path / name / "a.jsonl" for name in gpu.STEPS}

    def left(text: str, names: list[str], again: bool) -> set[str]:
        for mark in marks.values():
            mark.parent.mkdir(exist_ok=True)
            mark.touch()
        monkeypatch.setattr(gpu, "fingerprint", lambda device: text)
        gpu.prepare(visit, names, again)
        return {name for name, mark in marks.items() if mark.exists()}

    assert left("one", ["tests"], False) == left("one", ["tests"], False) == set(gpu.STEPS)
    assert left("one", ["tests"], True) == set(gpu.STEPS) - {"tests"}
    assert left("two", ["tests"], False) == set() and "is forgotten" in capsys.readouterr().out


def test_the_fingerprint_knows_sources_and_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    seen = [gpu.fingerprint("cpu")]
    for name in ("nmkernels/a.py", "csrc/cuda/a.cu", "cmake/a.cmake", "python_tests/a.py", "bench/a.py", "setup.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text("1")
        seen.append(gpu.fingerprint("cpu"))
    for name in ("bench/results/a.txt", "nmkernels/_C.so", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1")
        assert gpu.fingerprint("cpu") == seen[-1]
    monkeypatch.setattr("bench.rows.machine", lambda device: "another")
    assert len({*seen, gpu.fingerprint("cpu")}) == 8


def test_rows_and_logs_are_where_they_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found: list[Visit] = []
    monkeypatch.setattr(gpu, "STEPS", {"tests": lambda visit, pool: found.append(visit)})
    monkeypatch.setattr(gpu, "prepare", lambda visit, *rest: visit.logs.mkdir(parents=True, exist_ok=True))
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    for words in ([], ["--out", str(tmp_path / "here")], ["--dry-run"], ["--jobs", "3", "--tests", "a", "b"]):
        assert gpu.main(words, lambda: "") == 0
    where = [(visit.rows.relative_to(tmp_path), visit.logs.relative_to(tmp_path)) for visit in found]
    assert where[:2] == [(Path("bench/results"), Path("build/gpu")), (Path("here"), Path("here"))]
    assert where[2] == (Path("build/gpu-dry"),) * 2, "a dry run leaves the measurements alone"
    assert found[0].tests == ("python_tests",) and (found[3].tests, found[3].workers) == (("a", "b"), 3)
    assert 1 <= found[0].workers <= gpu.MOST_WORKERS


# ---- the steps


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[Job], int]]:
    """What the steps have pools run, with how many at a time; every job passes."""
    found: list[tuple[list[Job], int]] = []

    def run(self: Pool, jobs: list[Job], workers: int = 1, fresh: bool = False) -> list[Ended]:
        found.append((list(jobs), workers))
        for job in jobs:
            (self.folder / f"{job.name}.log").write_text("its output\n")
        results = [Ended(job, {job.name: Outcome(job.name, "passed")}, False) for job in jobs]
        self.ended += results
        return results

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
    assert compile.words[1:] == ("setup.py", "build_ext", "--inplace") and core.words[1] == "-c"
    assert compile.env["NMKERNELS_CUDA_ARCHITECTURES"] == built
    listed = ROOT / "cmake" / "architectures.cmake"  # in a source checkout
    assert not listed.exists() or built in re.findall(r"[0-9]+a?-[a-z]+", listed.read_text().split("set(")[1])


@pytest.mark.slow
def test_the_build_tells_what_it_built(tmp_path: Path) -> None:
    words = [sys.executable, "-c", gpu.CORE]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == _capability.compiled_core().reason and done.returncode == (not _capability.compiled_core().ok)


def test_many_tests_of_a_file_are_shared_out() -> None:
    files = [("few.py", 3, False), ("many.py", 2 * gpu.SHARE + 1, False), ("large.py", 500, True)]
    found = gpu.test_jobs(files, "gpu", 9.0)
    assert [(job.name, job.env["NMKERNELS_SHARE"], job.alone) for job in found] == [
        ("large.py", "1/1", True),
        ("many.py [1 of 3]", "1/3", False),
        ("many.py [2 of 3]", "2/3", False),
        ("many.py [3 of 3]", "3/3", False),
        ("few.py", "1/1", False),
    ]
    assert all(job.limit == 9.0 and job.words[-1] == job.name.split()[0] and job.fine == (0, 5) for job in found)


def test_families_of_benchmarks_are_apart(asked, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("bench.rows.machine", lambda device: "NVIDIA H200")
    pool = step("benchmarks", tmp_path)
    ((found, workers),) = asked
    assert workers == 1, "clocks are not shared"
    ops = [word for job in found for word in job.words[job.words.index("--op") + 1 :]]
    assert sorted(ops) == sorted({spec.op for spec in targets.quick("cuda")}) and len(found) > 8
    assert all(cases.matching([op]) == (op,) for op in ops)
    assert all(job.words[job.words.index("--out") + 1] == str(tmp_path / "nvidia-h200.csv") for job in found)
    assert "targets met" in pool.note


def test_tables_are_made_of_the_visits_rows(asked, tmp_path: Path) -> None:
    step("report", tmp_path)
    assert asked[0][0][0].words[1:] == ("-m", "bench.report", "--add", str(tmp_path))
    asked.clear()
    assert "writes no tables" in step("report", tmp_path, dry=True).note and not asked


def test_the_sanitizer_runs_the_tests_under_each_tool(asked, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu, "sanitizer_path", lambda: "/opt/compute-sanitizer")
    monkeypatch.setattr(gpu, "collected", lambda *args: [("a.py", 3, False), ("large.py", 2, True)])
    step("sanitizer", tmp_path)
    assert [[job.name for job in found] for found, _ in asked] == [["memcheck a.py"], ["racecheck a.py"]]
    for (job,), _ in asked:
        assert job.words[: job.words.index(sys.executable)] == gpu.sanitized("/opt/compute-sanitizer", job.name.split()[0])
        assert job.words[-3:] == ("-k", gpu.CHOSEN, "a.py") and job.env["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
        assert job.refused == gpu.FINDING
    asked.clear()
    monkeypatch.setattr(gpu, "sanitizer_path", lambda: None)
    assert step("sanitizer", tmp_path).note == gpu.NO_SANITIZER and not asked


@pytest.mark.slow
@pytest.mark.skipif(_capability.cuda_device().ok, reason="there is a GPU here")
@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_gpu_without_gpu_exits_2() -> None:
    done = subprocess.run(["make", "--no-print-directory", "gpu", f"PYTHON={sys.executable}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no NVIDIA GPU to use here" in done.stdout


@pytest.mark.parametrize("part", ["bin", "compute-sanitizer"])
def test_it_is_found_in_the_toolkit(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / part / "compute-sanitizer"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert gpu.sanitizer_path() == str(tool)


QUIET = """========= COMPUTE-SANITIZER
{}
========== 3 passed in 0.10s ===========
========= 3 passed, 12 skipped =========
========= ERROR SUMMARY: 0 errors
========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)
"""


@pytest.mark.parametrize(
    "line",
    [
        "========= Invalid __global__ write of size 4 bytes",
        "========= Error: Race reported between Write access at compress_kernel and Read access",
        '========= Program hit cudaErrorIllegalAddress (error 700) due to "an illegal memory access" on CUDA API call',
        "========= ERROR SUMMARY: 3 errors",
        "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)",
    ],
)
def test_findings_are_told_from_the_rest(line: str) -> None:
    assert re.search(gpu.FINDING, QUIET.format(""), re.M) is None
    found = re.search(gpu.FINDING, QUIET.format(line), re.M)
    assert found is not None and found[0] == line
