"""compute-sanitizer: where it is looked for, what it is told to run, and what its exit statuses mean."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench import sanitize
from python_tests.house.tree import ROOT


def _main(statuses: dict[str, int]) -> tuple[int, list[list[str]]]:
    ran: list[list[str]] = []

    def runner(words: list[str]) -> int:
        ran.append(words)
        return statuses.get(words[2], 0)

    return sanitize.main(lambda: "/opt/compute-sanitizer", runner), ran


def test_both_tools_run_the_tests(capsys: pytest.CaptureFixture[str]) -> None:
    status, ran = _main({})
    assert status == 0 and [words[:3] for words in ran] == [
        ["/opt/compute-sanitizer", "--tool", tool] for tool in ("memcheck", "racecheck")
    ]
    for words in ran:
        assert words[words.index("--error-exitcode") + 1] == "9"
        python = words.index(sys.executable)
        assert words[python + 1 : python + 3] == ["-m", "pytest"] and (ROOT / words[-1]).is_dir()
    assert capsys.readouterr().out.splitlines()[-1] == "nothing found"


@pytest.mark.parametrize(
    ("status", "said"), [(9, "memcheck: something was found"), (1, "memcheck: the tests failed, exit status 1"), (5, "exit status 5")]
)
def test_a_finding_is_a_failure_and_the_next_tool_runs(status: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    found, ran = _main({"memcheck": status})
    assert found == 1 and len(ran) == 2
    assert said in capsys.readouterr().out
    assert _main({"racecheck": status})[0] == 1


def test_without_it_nothing_runs(capsys: pytest.CaptureFixture[str]) -> None:
    def forbidden(words: list[str]) -> int:
        raise AssertionError(words)

    assert sanitize.main(lambda: None, forbidden) == sanitize.NOT_INSTALLED
    assert "compute-sanitizer is not installed" in capsys.readouterr().out


@pytest.mark.parametrize("part", ["bin", "compute-sanitizer"])
def test_it_is_found_in_the_toolkit(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / part / "compute-sanitizer"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert sanitize.find() == str(tool)


def test_every_tensor_is_an_allocation_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}

    class Done:
        returncode = 4

    def pretend(words: list[str], cwd: Path, env: dict[str, str]) -> Done:
        seen.update(env=env, cwd=cwd, words=words)
        return Done()

    monkeypatch.setattr(sanitize.subprocess, "run", pretend)
    assert sanitize.run(["x"]) == 4
    assert seen["env"]["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1" and seen["cwd"] == ROOT
