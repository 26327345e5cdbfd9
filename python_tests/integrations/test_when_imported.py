"""What waits for another library's import: called once, after it, whichever comes first, and without importing it."""

from __future__ import annotations

import importlib
import inspect
import pickle
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

import nmkernels as nm
from nmkernels.integrations import _Waiting, when_imported

NAME = "nm_awaited_library"


def waiting() -> list[_Waiting]:
    return [finder for finder in sys.meta_path if isinstance(finder, _Waiting)]


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package in whose ``__init__`` tests may write, with a submodule ``part``; what waited before the test waits after it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", [finder for finder in sys.meta_path if not isinstance(finder, _Waiting)])
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / "part.py").write_text("VALUE = 2\n")
    init = tmp_path / NAME / "__init__.py"
    init.write_text("class Thing:\n    value = 1\n")
    importlib.invalidate_caches()
    yield init
    for name in [name for name in sys.modules if name.startswith(NAME)]:
        del sys.modules[name]


def test_it_is_called_once_at_the_end_of_the_import_and_nothing_stays(library: Path) -> None:
    seen: list[int] = []
    when_imported(NAME, lambda: seen.append(sys.modules[NAME].Thing.value))
    when_imported(NAME, lambda: seen.append(10))
    assert NAME not in sys.modules and seen == [] and len(waiting()) == 1
    module = importlib.import_module(NAME)
    assert seen == [1, 10] and waiting() == []
    assert "exec_module" not in vars(module.__loader__) and "class Thing" in inspect.getsource(module)
    assert pickle.loads(pickle.dumps(module.Thing)) is module.Thing
    when_imported(NAME, lambda: seen.append(100))
    assert seen == [1, 10, 100] and waiting() == [], "it is loaded: called at once"


def test_a_submodule_is_awaited_by_itself(library: Path) -> None:
    seen: list[int] = []
    when_imported(f"{NAME}.part", lambda: seen.append(sys.modules[f"{NAME}.part"].VALUE))
    importlib.import_module(NAME)
    assert seen == []
    importlib.import_module(f"{NAME}.part")
    assert seen == [2]


def test_after_a_failed_import_it_goes_on_waiting(library: Path) -> None:
    seen: list[int] = []
    when_imported(NAME, lambda: seen.append(1))
    good = library.read_text()
    library.write_text("raise ImportError('half installed')\n")
    with pytest.raises(ImportError, match="half installed"):
        importlib.import_module(NAME)
    assert seen == []
    library.write_text(good + "# another size, for the cache of compiled files\n")
    importlib.invalidate_caches()
    importlib.import_module(NAME)
    assert seen == [1]


def test_an_error_is_a_warning_that_names_the_library_and_the_others_are_called(library: Path) -> None:
    seen: list[int] = []

    def broken() -> None:
        raise AttributeError("no such class")

    when_imported(NAME, broken)
    when_imported(NAME, lambda: seen.append(1))
    with pytest.warns(RuntimeWarning, match=f"known to {NAME}: AttributeError: no such class"):
        importlib.import_module(NAME)
    assert seen == [1]


def test_imports_of_others_are_not_touched(library: Path) -> None:
    when_imported(NAME, lambda: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert importlib.util.find_spec("colorsys") is not None
        assert importlib.util.find_spec("nm_no_such_module") is None
    assert waiting()[0].find_spec("colorsys") is None


def test_adapters_are_loaded_when_asked_for() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    assert nm.integrations.peft.LoraConfig is peft.LoraConfig
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        nm.integrations.nothing  # noqa: B018
