"""The options of ``python -m bench.run``: which cases they leave, what is printed, and the exit status."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from bench import run, runner, targets
from nmkernels import reference
from nmkernels.capability import compiled_core
from python_tests.bench.samples import broken, instead, read

TINY = ["--device", "cpu", "--op", "mask", "linear", "--shapes", "16x32", "--pattern", "2:4", "--dtype", "fp32", "--seconds", "0.001"]


@pytest.fixture(autouse=True)
def rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.runner.matmul_rate", lambda dtype, device: 1e9)
    monkeypatch.setattr("bench.cases.machine.fma_rate", lambda dtype: 1e9)


def _listed(capsys: pytest.CaptureFixture[str], *options: str) -> list[str]:
    assert run.main(["--list", *options]) == 0
    return capsys.readouterr().out.splitlines()


def test_cases_are_listed_and_narrowed(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(_listed(capsys)) > 100
    assert _listed(capsys, "--targets") == [str(s) for s in targets.specs()]
    assert _listed(capsys, "--quick", "--device", "cpu") == [str(s) for s in targets.quick("cpu")]
    # 12 columns are no whole groups of 8
    asked = _listed(capsys, "--op", "linear", "--shapes", "gpt2:fc", "4x12", "--dtype", "bf16", "--pattern", "4:8", "--tokens", "3")
    assert asked == ["nm_linear 4:8 bfloat16 3x3072x768"]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--op", "nosuch"], "no op matches 'nosuch'"),
        (["--shapes", "nosuch"], "unknown shape 'nosuch'"),
        (["--dtype", "fp8"], "--dtype takes fp32"),
        (["--pattern", "5:4"], "pattern 5:4 is not usable"),
        (["--device", "nosuch"], "torch cannot use it here"),
        (["--targets", "--shapes", "3x3"], "no case matches"),
        (["--isas", "sse9"], "sse9 cannot run here" if compiled_core().ok else "not built"),
    ],
)
def test_wrong_usage_is_one_line(options: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main([*options, "--list"] if "--device" not in options else options) == 2
    error = capsys.readouterr().err
    assert complaint in error and len(error.splitlines()) == 1


def test_rows_are_written_and_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a.csv"
    with monkeypatch.context() as patch:
        patch.setattr(runner, "measure", Mock(side_effect=KeyboardInterrupt))
        assert run.main([*TINY, "--out", str(out)]) == 130
    assert "--resume continues from here" in capsys.readouterr().out
    assert run.main([*TINY, "--out", str(out), "--tokens", "2"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == f"written to {out}"
    assert len(printed) == len(read(out)) + 1
    assert run.main([*TINY, "--out", str(out), "--tokens", "2", "--resume"]) == 0
    assert "2 of 2 cases were already done" in capsys.readouterr().out


def test_a_wrong_result_is_printed_and_costs_only_its_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with broken("nm_mask", instead(reference.mask, torch.logical_not), alone=True):
        assert run.main([*TINY, "--out", str(tmp_path / "a.csv"), "--tokens", "2"]) == 1
    wrong = [text for text in capsys.readouterr().out.splitlines() if text.startswith("nm_mask 2:4 float32 16x32: ")]
    assert len(wrong) == 1 and "its result is wrong" in wrong[0] and read(tmp_path / "a.csv")[0]["op"] == "nm_linear"


def test_another_process_goes_on_after_a_lost_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words: list[list[str]] = []
    monkeypatch.setattr(runner, "run", lambda specs, *args, **kwargs: runner.Measured(wrong=[(specs[1], "broke")], next=2))
    monkeypatch.setattr(run.subprocess, "run", lambda command, cwd: words.append(command) or SimpleNamespace(returncode=0))
    out = tmp_path / "a.csv"
    assert run.main(["--quick", "--device", "cpu", "--dtype", "fp32", "--out", str(out), "--from", "3"]) == 1
    again = words[0][words[0].index("bench.run") + 1 :]
    assert again == ["--quick", "--dtype", "fp32", "--device", "cpu", "--out", str(out), "--from", "5"]
