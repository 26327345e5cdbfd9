"""``make gpu``: its order, its exit statuses, its summary, and what each step runs; ``test_gpu_dry.py`` really runs it."""

from __future__ import annotations

import os
import re
import signal
import tarfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench import gpu, outcomes, targets
from bench.gpu import Job, Step
from bench.outcomes import Outcome
from python_tests.for_each import for_each
from python_tests.house.paths import ROOT


class Ended(Job):
    """A job with results and without a process."""

    results: dict[str, Outcome]
    left: bool = False  # type: ignore[assignment]

    def items(self, what: str) -> list[Outcome]:
        return [outcome for outcome in self.results.values() if outcome.what == what]


def ended(name: str, left: bool = False, **whats: str) -> Ended:
    """A job of which the items named passed, failed, ..."""
    job = Ended(name, ())
    job.results, job.left = {item: Outcome(item, what, "" if what == "passed" else f"why {item}") for item, what in whats.items()}, left
    return job


FINE, LEFT, FAILED = ended("fine", a="passed"), ended("left", left=True), ended("file.py", a="passed", b="failed")
ALL = ["build", "smoke", "kernels", "memcheck", "benchmarks", "tests", "racecheck", "report"]
"""What no GPU has run before comes first, then rows, then what takes longest."""


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of logs, rows and state."""
    monkeypatch.setattr(gpu, "WORK", tmp_path / "build")
    monkeypatch.setattr(gpu, "fingerprint", lambda device: "the same")
    monkeypatch.setattr("nmkernels.capability.cuda_device", lambda: (True, ""))
    return tmp_path / "build" / "gpu"


@pytest.fixture
def run(work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """``main`` with steps that have the results ``run(tests=...)`` gives, or do that; its status, its summary, and the steps that ran."""

    def call(*words: str, **does: Any) -> tuple[int, list[str], list[str]]:
        ran: list[str] = []

        def step(name: str, step: Step) -> None:
            ran.append(name)
            given = does.get(name, FINE)
            if isinstance(given, BaseException):
                raise given
            if isinstance(given, str):
                step.note = given
            elif callable(given):
                given(step)
            else:
                step.jobs += given if isinstance(given, list) else [given]

        monkeypatch.setattr(gpu, "STEPS", {name: partial(step, name) for name in gpu.STEPS})
        status = gpu.main(words)
        lines = capsys.readouterr().out.splitlines()
        return status, lines[lines.index("== summary") :], ran

    return call


AGAIN = "the same command continues with what is left$"
CASES: dict[str, tuple[dict[str, Any], int, list[str], str]] = {
    "passed": ({}, 0, ALL, "  build +ok +1 passed\n.*  all passed$"),
    "failed": (
        {"tests": FAILED},
        1,
        ALL,
        "  tests +FAILED +1 passed; 1 failed\n.*  tests: file.py\n    b: why b\n",
    ),
    "raised": (
        {"racecheck": ValueError("bad luck")},
        1,
        ALL,
        "  racecheck +FAILED .*    error: exit status 1: ValueError: bad luck\n.*  FAILED$",
    ),
    "left": ({"tests": LEFT}, 3, ALL, f"left: left\n.*nothing failed so far; {AGAIN}"),
    "left and failed": ({"tests": LEFT, "racecheck": FAILED}, 1, ALL, f"  FAILED; {AGAIN}"),
    "half a build": ({"build": LEFT}, 3, ["build"], AGAIN),
    "a failed build": ({"build": FAILED}, 1, ["build"], "    b: why b\n.*  FAILED$"),
    "interrupted": ({"smoke": KeyboardInterrupt()}, 130, ["build", "smoke"], f"  interrupted; {AGAIN}"),
    "a note": ({"memcheck": "compute-sanitizer is not installed"}, 0, ALL, "  memcheck +skipped +compute-sanitizer is not installed"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_steps_come_to(run, case: str) -> None:
    does, status, ran, said = CASES[case]
    got, lines, steps = run(**does)
    assert (got, steps) == (status, ran) and re.search(said, "\n".join(lines), re.S)


def test_steps_are_chosen_by_name(run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("report", "tests")[2] == ["tests", "report"]
    assert run("--tests", "a.py")[2] == ["build", "tests"]
    with pytest.raises(SystemExit) as stopped:
        gpu.main(["test"])
    assert stopped.value.code == 2
    assert f"unknown step test; choose from {', '.join(ALL)}" in capsys.readouterr().err


def test_each_step_gets_a_turn_before_the_deadline(run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Build and smoke take what they need, the last step what is left, every other half of it."""
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    until: dict[str, float] = {}

    def note(step: Step) -> None:
        until[step.name] = step.deadline

    for name in ALL:
        run("--deadline", str(gpu.CLOSING + 80), name, "report", **{name: note})
    assert until == {name: 1080.0 if name in ("build", "smoke", "report") else 1040.0 for name in ALL}
    run("tests", tests=note)
    assert until["tests"] == float("inf")


def test_sigterm_writes_summary_and_archive(run, tmp_path: Path) -> None:
    """With what failed before it, also in the step that it cuts short."""

    def cut_short(step: Step) -> None:
        assert (tmp_path / "out" / "gpu.tar.gz").exists(), "each step leaves it, for visits that are cut off without a signal"
        step.jobs.append(ended("cut.py", c="failed"))
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("it goes on")

    before = signal.getsignal(signal.SIGTERM)
    status, lines, ran = run("--out", str(tmp_path / "out"), kernels=[FAILED], memcheck=cut_short)
    assert status == 143 and ran == ALL[:4] and signal.getsignal(signal.SIGTERM) is before
    text = "\n".join(lines)
    assert "kernels: file.py\n    b: why b" in text and "memcheck: cut.py\n    c: why c" in text
    assert text.endswith("terminated; the same command continues with what is left")
    assert (tmp_path / "out" / "summary.txt").read_text().splitlines() == lines
    with tarfile.open(tmp_path / "out" / "gpu.tar.gz") as archive:
        assert "./summary.txt" in archive.getnames()


def test_an_archive_goes_on_elsewhere(run, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Logs, rows and state are two files of ``--out``; another checkout with the same sources knows from them what was done."""

    def once(step: Step) -> None:
        step.run(Job("one", ("sh", "-c", "echo it ran")))
        (step.work / "rows" / "h100.csv").write_text("rows")

    first, second = tmp_path / "first", tmp_path / "second"
    assert run("tests", "--out", str(first), tests=once)[0] == 0
    assert sorted(path.name for path in first.iterdir()) == ["gpu.tar.gz", "summary.txt"]
    monkeypatch.setattr(gpu, "WORK", tmp_path / "elsewhere")
    assert run("tests", "--out", str(second), "--resume", str(first / "gpu.tar.gz"), tests=once)[0] == 0
    there = tmp_path / "elsewhere" / "gpu"
    assert (there / "tests" / "one.log").read_text() == "it ran\n", "not once more"
    assert (there / "rows" / "h100.csv").read_text() == "rows"
    # with other sources rows stay, and what was done is forgotten
    monkeypatch.setattr(gpu, "fingerprint", lambda device: "another")
    (there / "rows" / "a100.csv").write_text("rows that the archive does not have")
    run("tests", "--resume", str(second / "gpu.tar.gz"), tests=lambda step: None)
    assert not (there / "tests" / "one.log").exists() and [path.name for path in (there / "rows").iterdir()] == ["h100.csv"]
    with pytest.raises(SystemExit):
        gpu.main(["--resume", str(tmp_path / "no.tar.gz")])
    assert "not an archive of an earlier call" in capsys.readouterr().err


def test_without_gpu_nothing_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("nmkernels.capability.cuda_device", lambda: (False, "torch sees no NVIDIA GPU"))
    assert gpu.main([]) == 2
    assert "torch sees no NVIDIA GPU" in capsys.readouterr().out


@for_each("sources, left", [("one", [*ALL, "core"]), ("two", ["core"])])
def test_other_sources_are_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sources: str, left: list[str]) -> None:
    """The core is known by its own sources."""
    (tmp_path / "sources.txt").write_text("one")
    for name in (*ALL, "core"):
        (tmp_path / name).mkdir(exist_ok=True)
    monkeypatch.setattr(gpu, "fingerprint", lambda device: sources)
    gpu.prepare(tmp_path, "cpu", None)
    assert [name for name in (*ALL, "core") if (tmp_path / name).exists()] == left


def test_the_fingerprint_knows_sources_and_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    seen = [gpu.fingerprint("cpu")]
    counted = ("nmkernels/a.py", "csrc/cuda/a.cu", "cmake/a.cmake", "examples/a.py", "python_tests/a.py", "bench/a.py", "setup.py")
    for name in (*counted, "bench/results/a.txt", "nmkernels/_C.so", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("1")
        seen.append(gpu.fingerprint("cpu"))
    assert len(set(seen)) == 1 + len(counted) and len(set(seen[len(counted) :])) == 1
    capability = (9, 0)
    monkeypatch.setattr("nmkernels.capability.compute_capability", lambda: capability)
    hopper = gpu.fingerprint("cuda")
    monkeypatch.setattr("bench.rows.machine", lambda device: "another")
    assert gpu.fingerprint("cpu") not in seen and gpu.fingerprint("cuda") == hopper, "of GPUs the architecture counts, not the name"
    capability = (8, 0)
    assert gpu.fingerprint("cuda") != hopper


# ---- the steps


@pytest.fixture
def all_jobs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[Job, ...], int]]:
    """The jobs that the steps run, with the number of workers; every job passes."""
    found: list[tuple[tuple[Job, ...], int]] = []

    def run(step: Step, *jobs: Job, workers: int = 1, fresh: bool = False) -> bool:
        found.append((jobs, workers))
        step.jobs += jobs
        for job in jobs:
            job.folder = step.work
            job.file.with_suffix(".log").write_text("its output\n")
        return True

    monkeypatch.setattr(Step, "run", run)
    return found


def files(monkeypatch: pytest.MonkeyPatch, *names: str, alone: tuple[str, ...] = ()) -> None:
    """What the plugin lists as the test files, whatever the paths."""
    listed = outcomes.Record({}, "", False, True, {name: name in alone for name in (*names, *alone)})
    monkeypatch.setattr(outcomes, "read", lambda path: listed)


def step(name: str, tmp_path: Path, dry: bool = False, tests: tuple[str, ...] = ()) -> Step:
    step = Step(name, tmp_path, dry, tests, time.monotonic() + 60)
    gpu.STEPS[name](step)
    return step


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout whose build leaves a core."""
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr(gpu.sysconfig, "get_config_var", lambda name: ".so")
    for folder in ("nmkernels", "csrc"):
        (tmp_path / folder).mkdir()
    (tmp_path / "nmkernels" / "_C.so").write_text("built")
    (tmp_path / "csrc" / "a.cu").write_text("one")
    return tmp_path


@pytest.mark.parametrize(
    ("capability", "built"), [((8, 0), "80"), ((8, 9), "80"), ((9, 0), "90"), ((10, 3), "100"), ((12, 0), "120"), ((11, 0), "ptx")]
)
def test_the_gpus_architecture_alone_is_built(all_jobs, checkout: Path, capability, built: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nmkernels.capability.compute_capability", lambda: capability)
    assert step("build", checkout).note == "its output"
    (compile,), (core,) = (jobs for jobs, _ in all_jobs)
    assert compile.words[1:] == ("setup.py", "build_ext", "--inplace")
    assert compile.env == {"NMKERNELS_CUDA": "on", "NMKERNELS_CUDA_ARCHITECTURES": built}
    assert re.search(rf'[";]{built}[";]', (ROOT / "cmake" / "architectures.cmake").read_text())
    # a core without CUDA kernels, or whose kernels do not run here, fails
    assert "cuda_kernels" in core.words[-1]


@pytest.mark.slow
def test_a_build_without_cuda_kernels_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the GPU or nvcc was not found, and the core was built for the CPU alone."""
    import nmkernels.capability as capability

    if capability.cuda_core().ok:
        pytest.skip("this core has CUDA kernels")
    job = Job("core", (gpu.sys.executable, "-c", gpu.CORE.format("cuda_kernels")), 60.0)
    assert not Step("build", tmp_path).run(job) and "CUDA" in job.items("failed")[0].why


def test_a_core_of_the_same_sources_is_not_built_again(all_jobs, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where an archive has brought it; kernels for another GPU, or of other sources, are built."""

    def compiles(capability: tuple[int, int] = (9, 0)) -> bool:
        all_jobs.clear()
        monkeypatch.setattr("nmkernels.capability.compute_capability", lambda: capability)
        step("build", checkout)
        return any(job.name == "compile" for jobs, _ in all_jobs for job in jobs)

    assert compiles() and not compiles()
    (checkout / "nmkernels" / "_C.so").write_text("of something else")
    assert not compiles() and (checkout / "nmkernels" / "_C.so").read_text() == "built"
    assert compiles((8, 0)) and compiles() and not compiles()
    (checkout / "csrc" / "a.cu").write_text("two")
    assert compiles()


def test_files_are_in_the_order_of_the_paths(monkeypatch: pytest.MonkeyPatch, all_jobs, tmp_path: Path) -> None:
    names = [f"{gpu.CUDA}/test_{name}.py" for name in ("a", "gemm", "wgmma", "wgmma_8bit", "z")]
    files(monkeypatch, *names)
    step("kernels", tmp_path)
    assert [job.name for job in all_jobs[-1][0]] == [names[i] for i in (2, 3, 1, 0, 4)]
    assert all((ROOT / path).exists() for path in gpu.KERNELS)


def test_tests_are_those_that_kernels_leave(all_jobs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files(monkeypatch, f"{gpu.CUDA}/b.py", "python_tests/ops/a.py", alone=("large.py",))
    step("tests", tmp_path)
    assert [[job.name for job in jobs] for jobs, _ in all_jobs] == [["collect"], ["python_tests/ops/a.py"], ["large.py"]]
    assert all_jobs[-1][1] == 1 and "NMKERNELS_TEST_THREADS" in all_jobs[-1][0][0].env
    all_jobs.clear()
    step("tests", tmp_path, tests=(f"{gpu.CUDA}/b.py",))
    assert len(all_jobs[1][0]) == 2


def test_families_of_benchmarks_are_apart(all_jobs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("bench.rows.machine", lambda device: "NVIDIA H200")
    note = step("benchmarks", tmp_path).note
    ((found, workers),) = all_jobs
    assert workers == 1, "clocks are not shared"
    ops = [word for job in found for word in job.words[job.words.index("--op") + 1 :]]
    assert sorted(ops) == sorted({spec.op for spec in targets.quick("cuda")}) and len(found) > 8
    assert all(job.words[job.words.index("--out") + 1] == str(tmp_path / "rows" / "nvidia-h200.csv") for job in found)
    assert [job.name for job in found][: len(gpu.FIRST)] == list(gpu.FIRST)
    assert "targets met" in note


def test_tables_are_made_of_the_visits_rows(all_jobs, tmp_path: Path) -> None:
    assert "writes no tables" in step("report", tmp_path, dry=True).note and not all_jobs
    step("report", tmp_path)
    assert all_jobs[0][0][0].words[1:] == ("-m", "bench.report", "--add", str(tmp_path / "rows"))


@pytest.mark.parametrize("name", ["memcheck", "racecheck"])
def test_the_sanitizer_of_the_toolkit_runs_the_tests(all_jobs, monkeypatch, tmp_path: Path, name: str) -> None:
    """Racecheck without the kernel that copies by TMA, which other tests run too where it is chosen."""
    files(monkeypatch, "a.py", "test_wgmma.py", alone=("large.py",))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    tool = tmp_path / "bin" / "compute-sanitizer"
    tool.parent.mkdir()
    tool.touch(0o755)
    step(name, tmp_path)
    found, _ = all_jobs[-1]
    assert [job.name for job in found] == ["a.py", "test_wgmma.py"][: 1 if name == "racecheck" else 2]
    job = found[0]
    assert job.words[:3] == (str(tool), "--tool", name) and "a.py" in job.words
    assert job.env["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
    assert ("kns=wgmma" in job.words) == (name == "racecheck")


QUIET = """========= COMPUTE-SANITIZER
========== 3 passed in 0.10s ===========
========= 3 passed, 12 skipped =========
========= ERROR SUMMARY: 0 errors
========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)
"""


def test_findings_of_the_sanitizer() -> None:
    found = [
        "========= Invalid __global__ write of size 4 bytes",
        "========= Error: Race reported between Write access at compress_kernel and Read access",
        "========= ERROR SUMMARY: 3 errors",
        "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)",
    ]
    assert re.findall(gpu.FINDING, QUIET + "\n".join(found), re.M) == found
