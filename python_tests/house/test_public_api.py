"""The public API changes only on purpose. It is text, one name a line with its parameters; run this module to freeze the present one.

python -m python_tests.house.test_public_api    rewrites public_api.txt

Listed are the names in ``__all__`` of the modules that users import from, and the verbs of a handle; in method_api.txt the members of the
two base classes that a new method implements. A class is one line, with its signature; its other attributes are in its docstring.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest

MOST = 120
FROZEN, OF_METHODS = (Path(__file__).with_name(name) for name in ("public_api.txt", "method_api.txt"))
MODULES = tuple(f"nmkernels{name}" for name in ("", ".ops", ".nn", ".optim", ".recipes", ".export"))
HANDLE, BASES = "nmkernels.recipes.Handle", ("nmkernels.recipes.Recipe", "nmkernels.autograd.WeightTransform")
"""The classes whose members are listed, one by one."""


def public_api() -> list[str]:
    """Every public name with parameters and defaults."""
    lines = []
    for module in MODULES:
        names = vars(importlib.import_module(module))
        lines += [_described(f"{module}.{name}", names[name]) for name in names["__all__"]]
    return sorted(lines + _members(HANDLE))


def method_api() -> list[str]:
    """What the file of a method implements."""
    return sorted(line for name in BASES for line in _members(name))


def _described(full: str, value: object) -> str:
    if inspect.ismodule(value):
        return f"{full} (module)"
    if inspect.isclass(value):
        return f"class {full}{'' if issubclass(value, BaseException) else _signature(value)}"
    return f"{full}{_signature(value)}" if callable(value) else full


def _members(full: str) -> list[str]:
    """Public methods, properties, fields and constants of the class and of its bases in the package."""
    module, _, name = full.rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    bases = [base for base in cls.__mro__ if base.__module__.startswith("nmkernels")]
    names = {name for base in bases for name in (*vars(base), *inspect.get_annotations(base))}
    values = {name: inspect.getattr_static(cls, name, None) for name in names if not name.startswith("_")}
    return [f"{full}.{name}{_signature(getattr(cls, name)) if inspect.isroutine(value) else ''}" for name, value in values.items()]


def _signature(value: object) -> str:
    """``(a, b=1, *, c)``: annotations left out, they differ between Python versions; defaults that name an address too."""
    try:
        signature = inspect.signature(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return "(...)"
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return re.sub(r"<.* at 0x\w+>|<factory>", "...", str(signature.replace(parameters=bare, return_annotation=signature.empty)))


@pytest.mark.parametrize(("file", "api"), [(FROZEN, public_api), (OF_METHODS, method_api)], ids=["users", "methods"])
def test_the_api_is_the_frozen_one(file: Path, api: Callable[[], list[str]]) -> None:
    frozen = file.read_text(encoding="utf-8").splitlines()
    changes = "\n".join(difflib.unified_diff(frozen, api(), file.name, "the package", lineterm="", n=0))
    assert not changes, (
        f"the API changed:\n{changes}\nIf that is meant: run `python -m python_tests.house.test_public_api`, and tell of it "
        "in CHANGELOG.md."
    )


def test_users_need_few_names() -> None:
    assert len(public_api()) <= MOST


if __name__ == "__main__":
    for path, lines in ((FROZEN, public_api()), (OF_METHODS, method_api())):
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"wrote {path}")
