"""``make gpu``: its exit status is right, every step runs, and the summary comes last."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench import gpu, sanitize
from bench.runner import running
from nmkernels import _capability
from python_tests.house.tree import ROOT


def _run(capsys: pytest.CaptureFixture[str], statuses: dict[str, int], *names: str) -> tuple[int, list[str], list[list[str]]]:
    ran: list[list[str]] = []

    def runner(words: list[str]) -> int:
        ran.append(words)
        step = next(s for s in gpu.STEPS if list(s.words) == words)
        return statuses.get(step.name, 0)

    status = gpu.main(lambda: "", runner, names)
    return status, capsys.readouterr().out.splitlines(), ran


def test_all_steps_pass(capsys: pytest.CaptureFixture[str]) -> None:
    status, lines, ran = _run(capsys, {})
    assert status == 0 and lines[-1].strip() == "all passed"
    assert ran == [list(s.words) for s in gpu.STEPS]


@pytest.mark.parametrize("step", [s.name for s in gpu.STEPS])
def test_failed_step_does_not_hide_the_rest(step: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, lines, ran = _run(capsys, {step: 3})
    assert status == 1 and len(ran) == len(gpu.STEPS)
    summary = lines[lines.index("== summary") :]
    assert next(line for line in summary if "FAILED, exit status 3" in line).split()[0] == step
    assert lines[-1].strip() == "FAILED"


def test_steps_are_chosen_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, ran = _run(capsys, {}, "report", "tests")
    assert status == 0 and ran == [list(s.words) for s in gpu.STEPS if s.name in ("tests", "report")]
    status, lines, ran = _run(capsys, {}, "test")
    assert status == 2 and not ran and "no step is called test; there are build, tests, sanitizer, benchmarks, curves, report" in lines[0]


def test_no_gpu_test_yet_is_fine(capsys: pytest.CaptureFixture[str]) -> None:
    status, lines, _ = _run(capsys, {"tests": 5})
    assert status == 0 and any("no test is marked gpu yet" in line for line in lines)
    # the same status of another step is a failure
    assert _run(capsys, {"build": 5})[0] == 1


def test_no_sanitizer_is_fine(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.NO_SANITIZER == sanitize.NOT_INSTALLED
    status, lines, _ = _run(capsys, {"sanitizer": gpu.NO_SANITIZER})
    assert status == 0 and any("skipped: compute-sanitizer is not installed" in line for line in lines)
    # a finding is not
    assert _run(capsys, {"sanitizer": 1})[0] == 1


def test_without_gpu_nothing_runs(capsys: pytest.CaptureFixture[str]) -> None:
    def forbidden(words: list[str]) -> int:
        raise AssertionError(words)

    assert gpu.main(lambda: "torch sees no NVIDIA GPU", forbidden) == 2
    assert "torch sees no NVIDIA GPU" in capsys.readouterr().out


def test_a_crash_costs_one_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran: list[list[str]] = []

    def runner(words: list[str]) -> int:
        ran.append(words)
        if len(ran) == 3:
            return gpu.NO_CASE_LEFT
        running(tmp_path / "a.csv").write_text(f"{3 * len(ran)} nm_mask 2:4")
        return -11

    words = ["-m", "bench.quick"]
    assert gpu.surviving(words, runner, tmp_path / "a.csv") == -11
    assert ran == [words, [*words, "--from", "4"], [*words, "--from", "7"]]
    assert capsys.readouterr().out.count("nm_mask 2:4: not timed, its process was ended by signal 11") == 2
    # nothing was running: the process ended by itself
    assert gpu.surviving(words, lambda words: -9, tmp_path / "a.csv") == -9
    assert gpu.surviving(words, lambda words: 0, None) == 0


@pytest.mark.skipif(_capability.cuda_device().ok, reason="there is a GPU here")
@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_gpu_without_gpu_exits_2() -> None:
    done = subprocess.run(["make", "--no-print-directory", "gpu", f"PYTHON={sys.executable}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no NVIDIA GPU to use here" in done.stdout
