"""The public API as text, one name a line with its parameters; run this module to freeze the present one.

python -m python_tests.house.api    rewrites public_api.txt
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from pathlib import Path

FROZEN = Path(__file__).with_name("public_api.txt")


def public_api(package: str = "nmkernels") -> list[str]:
    """Every name in the ``__all__`` of the package and of its public subpackages, with parameters and defaults."""
    root = importlib.import_module(package)
    names = [package] + [
        f"{package}.{m.name}" for m in pkgutil.iter_modules(root.__path__) if m.name != "cli" and not m.name.startswith("_")
    ]
    modules = {name: importlib.import_module(name) for name in names}
    exported = {id(getattr(m, public)) for m in modules.values() for public in getattr(m, "__all__", ())}
    lines: list[str] = []
    told: set[int] = set()
    for name, module in modules.items():
        for public in getattr(module, "__all__", ()):
            value = getattr(module, public)
            lines.append(_describe(f"{name}.{public}", value))
            if inspect.isclass(value) and id(value) not in told:
                told.add(id(value))
                lines += _members(f"{name}.{public}", value, exported)
    return sorted(lines)


def _describe(full: str, value: object) -> str:
    if inspect.ismodule(value):
        return f"{full} (module)"
    if inspect.isclass(value):
        return f"class {full}{'' if issubclass(value, BaseException) else _signature(value)}"
    return f"{full}{_signature(value)}" if callable(value) else full


def _members(full: str, cls: type, exported: set[int]) -> list[str]:
    """Public methods and properties of the class and of its bases that are not public themselves; those of torch left out."""
    lines: dict[str, str] = {}
    for base in (b for b in cls.__mro__ if b is cls or (b.__module__.startswith("nmkernels") and id(b) not in exported)):
        for name, member in vars(base).items():
            if name.startswith("_") or name in lines:
                continue
            if getattr(member, "hooked", False) and not member.__qualname__.startswith(f"{base.__qualname__}."):
                continue  # torch wraps an inherited ``step`` into the class itself once an optimizer is built
            if isinstance(member, property):
                lines[name] = f"{full}.{name} (property)"
            elif isinstance(member, (staticmethod, classmethod)) or inspect.isfunction(member):
                lines[name] = f"{full}.{name}{_signature(getattr(cls, name))}"
    return list(lines.values())


def _signature(value: object) -> str:
    """``(a, b=1, *, c)``: annotations left out, they differ between Python versions; defaults that name an address too."""
    try:
        signature = inspect.signature(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return "(...)"
    bare = [p.replace(annotation=p.empty, default=_default(p)) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


class _Shown:
    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _default(parameter: inspect.Parameter) -> object:
    if parameter.default is parameter.empty:
        return parameter.empty
    text = repr(parameter.default)
    return _Shown("..." if " at 0x" in text or text == "<factory>" else text)


if __name__ == "__main__":
    FROZEN.write_text("\n".join(public_api()) + "\n", encoding="utf-8")
    print(f"wrote {FROZEN}")
