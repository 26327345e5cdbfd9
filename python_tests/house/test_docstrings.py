"""Every module says what it is for, and everything public what it does; an override has the words of what it overrides."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from types import ModuleType

from python_tests.house.paths import PACKAGE, ROOT
from python_tests.house.test_public_api import MODULES


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


SECTION = re.compile(r"^(?:Args|Raises|Attributes):\n((?: {4,}\S.*\n?|\n(?= {4,}))+)", re.M)
ANOTHER = re.compile(r"[.`)] (\w+)(?:, \w+)*: ")
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def names_of(node: Definition) -> set[str]:
    """The arguments of a function, or the fields of a class and the arguments of its constructor."""
    if not isinstance(node, ast.ClassDef):
        return {a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
    fields = {item.target.id for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)}
    return fields.union(*(names_of(f) for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"))


def crowded(tree: ast.Module) -> Iterator[str]:
    """What stands behind something else's description under Args or Raises, where the site does not see that it is another item."""
    for node in ast.walk(tree):
        if isinstance(node, Definition):
            names = names_of(node)
            for section in SECTION.findall(ast.get_docstring(node) or ""):
                for item in re.split(r"^ {4}(?=\S)", section, flags=re.M):
                    found = ANOTHER.findall(" ".join(item.split()))
                    yield from (f"{node.name}: {name}" for name in found if name in names or name.endswith("Error"))


def test_every_argument_and_error_has_a_line_of_its_own() -> None:
    assert list(crowded(ast.parse('def f(x, y):\n    """F.\n\n    Args:\n        x: it. y: that.\n    """\n'))) == ["f: y"]
    found = {path.name: list(crowded(ast.parse(path.read_text(encoding="utf-8")))) for path in PACKAGE.rglob("*.py")}
    assert {name: some for name, some in found.items() if some} == {}
