"""The examples in the docstrings run and print what they say."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest
import torch

from python_tests.house.paths import PACKAGE, ROOT

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
MODULES = [
    ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for p in sorted(PACKAGE.rglob("*.py"))
    if ">>>" in p.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    for test in doctest.DocTestFinder().find(importlib.import_module(name), name):
        torch.manual_seed(0)
        runner.run(test)
    failed, tried = runner.summarize(verbose=False)
    assert not failed, capsys.readouterr().out
    assert tried, f"{name} has >>> in its text but no example in a docstring"
