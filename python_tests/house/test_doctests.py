"""The examples in the docstrings run and print what they say."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch

from python_tests.house.tree import PACKAGE, ROOT

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def _modules() -> list[str]:
    """Every module whose text has an example."""
    paths = [p for p in sorted(PACKAGE.rglob("*.py")) if ">>>" in p.read_text(encoding="utf-8")]
    return [".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for p in paths]


def failures(module: ModuleType) -> tuple[int, int]:
    """(examples that failed, examples tried); the seed is set before each docstring."""
    runner, parser = doctest.DocTestRunner(optionflags=FLAGS), doctest.DocTestFinder()
    for test in parser.find(module, module.__name__):
        torch.manual_seed(0)
        runner.run(test)
    return runner.summarize(verbose=False)


@pytest.mark.parametrize("name", _modules())
def test_examples(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    failed, tried = failures(importlib.import_module(name))
    assert not failed, capsys.readouterr().out
    assert tried, f"{name} has >>> in its text but no example in a docstring"


def test_wrong_example_is_noticed() -> None:
    module = ModuleType("wrong")
    module.__doc__ = ">>> 1 + 1\n3\n>>> 2 + 2\n4\n"
    assert failures(module) == (1, 2)
