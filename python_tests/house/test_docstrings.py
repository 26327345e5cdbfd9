"""Every module says what it is for, and everything public what it does; an override has the words of what it overrides."""

from __future__ import annotations

import ast
import importlib
import inspect
from types import ModuleType

from python_tests.house.test_public_api import MODULES
from python_tests.house.tree import PACKAGE, ROOT


def undocumented(module: ModuleType) -> list[str]:
    """The names in the module's ``__all__``, and the public methods and properties of its classes, that have no docstring."""
    found = []
    for name in getattr(module, "__all__", ()):
        value = getattr(module, name)
        if not (inspect.isclass(value) or inspect.isroutine(value)) or not value.__module__.startswith(module.__name__.split(".")[0]):
            continue
        found += [] if inspect.getdoc(value) else [name]
        for base in inspect.getmro(value) if inspect.isclass(value) else ():
            members = vars(base) if base.__module__.startswith("nmkernels") else {}
            fields = inspect.get_annotations(base)  # the default of a field may be a function
            own = [k for k, m in members.items() if k[0] != "_" and k not in fields and (inspect.isroutine(m) or isinstance(m, property))]
            found += [f"{name}.{k}" for k in own if not (inspect.getdoc(members[k]) or inspect.getdoc(getattr(value, k)))]
    return found


def test_modules_are_documented() -> None:
    for path in (*PACKAGE.rglob("*.py"), *(ROOT / "bench").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert ast.get_docstring(tree) or not tree.body, path


def test_public_names_are_documented() -> None:
    assert [f"{name}.{found}" for name in MODULES for found in undocumented(importlib.import_module(name))] == []
