"""The public API changes only on purpose. It is text, one name a line with its parameters; run this module to freeze the present one.

python -m python_tests.house.test_public_api    rewrites public_api.txt

Listed are the names in ``__all__`` of the modules that users import from, the verbs of a handle, and the members of the two base classes
that a new method implements. A class is one line, with its signature; its other attributes are in its docstring.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from pathlib import Path

MOST = 220
FROZEN = Path(__file__).with_name("public_api.txt")
MODULES = tuple(f"nmkernels{name}" for name in ("", ".ops", ".nn", ".optim", ".recipes", ".export"))
OPEN = ("nmkernels.recipes.Handle", "nmkernels.recipes.Recipe", "nmkernels.autograd.WeightTransform")
"""The classes whose members are listed, one by one."""


def public_api() -> list[str]:
    """Every public name with parameters and defaults."""
    lines = []
    for module in MODULES:
        names = vars(importlib.import_module(module))
        lines += [_described(f"{module}.{name}", names[name]) for name in names["__all__"]]
    for full in OPEN:
        module, _, name = full.rpartition(".")
        lines += [f"{full}.{line}" for line in _members(getattr(importlib.import_module(module), name))]
    return sorted(lines)


def _described(full: str, value: object) -> str:
    if inspect.ismodule(value):
        return f"{full} (module)"
    if inspect.isclass(value):
        return f"class {full}{'' if issubclass(value, BaseException) else _signature(value)}"
    return f"{full}{_signature(value)}" if callable(value) else full


def _members(cls: type) -> list[str]:
    """Public methods, properties, fields and constants of the class and of its bases in the package."""
    bases = [base for base in cls.__mro__ if base.__module__.startswith("nmkernels")]
    names = {name for base in bases for name in (*vars(base), *inspect.get_annotations(base))}
    values = {name: inspect.getattr_static(cls, name, None) for name in names if not name.startswith("_")}
    return [f"{name}{_signature(getattr(cls, name))}" if inspect.isroutine(value) else name for name, value in values.items()]


def _signature(value: object) -> str:
    """``(a, b=1, *, c)``: annotations left out, they differ between Python versions; defaults that name an address too."""
    try:
        signature = inspect.signature(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return "(...)"
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return re.sub(r"<.* at 0x\w+>|<factory>", "...", str(signature.replace(parameters=bare, return_annotation=signature.empty)))


def test_public_api_is_the_frozen_one() -> None:
    frozen, present = FROZEN.read_text(encoding="utf-8").splitlines(), public_api()
    changes = "\n".join(difflib.unified_diff(frozen, present, FROZEN.name, "the package", lineterm="", n=0))
    assert not changes, (
        f"the public API changed:\n{changes}\nIf that is meant: run "
        "`python -m python_tests.house.test_public_api`, and tell of it in CHANGELOG.md."
    )
    assert len(present) <= MOST


if __name__ == "__main__":
    FROZEN.write_text("\n".join(public_api()) + "\n", encoding="utf-8")
    print(f"wrote {FROZEN}")
