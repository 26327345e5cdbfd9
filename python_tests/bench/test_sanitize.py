"""compute-sanitizer: where it is looked for, what it is told, and which lines of its output are findings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench import sanitize
from python_tests.house.tree import ROOT


def test_a_finding_has_an_exit_status_of_its_own() -> None:
    words = sanitize.command("/opt/compute-sanitizer", "racecheck")
    assert words[:3] == ("/opt/compute-sanitizer", "--tool", "racecheck")
    assert words[words.index("--error-exitcode") + 1] == "9"
    assert all((ROOT / path).is_dir() for path in sanitize.TESTS)


@pytest.mark.parametrize("part", ["bin", "compute-sanitizer"])
def test_it_is_found_in_the_toolkit(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / part / "compute-sanitizer"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert sanitize.find() == str(tool)


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
    assert re.search(sanitize.FINDING, QUIET.format(""), re.M) is None
    found = re.search(sanitize.FINDING, QUIET.format(line), re.M)
    assert found is not None and found[0] == line
