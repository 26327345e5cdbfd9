"""``pytest bench`` collects a benchmark per case; ``make test`` does not."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bench import targets, test_cases
from python_tests.house.paths import ROOT


@pytest.mark.slow
def test_cases_are_collected_for_pytest_benchmark() -> None:
    pytest.importorskip("pytest_benchmark")
    words = [sys.executable, "-m", "pytest", "bench", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.count("bench/test_cases.py::test_case[") == 2 * len(targets.quick(test_cases.DEVICE)), done.stdout + done.stderr


def test_unknown_suite_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NMKERNELS_BENCH", "nosuch")
    with pytest.raises(pytest.UsageError, match="choose quick, targets or all"):
        test_cases.chosen()
    monkeypatch.setenv("NMKERNELS_BENCH", "targets")
    assert len(test_cases.chosen()) > 50
