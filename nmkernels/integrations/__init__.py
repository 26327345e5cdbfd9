"""Other libraries' ways in. Each file needs its library; none is loaded by ``import nmkernels``, but by whoever uses it.

``nm.integrations.peft`` and its like are loaded when they are asked for. Where a library has to know nmkernels' classes, it is told
of them as soon as it is imported, before nmkernels or after it: see ``register``.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def __getattr__(name: str) -> ModuleType:
    if name.startswith("_") or importlib.util.find_spec(f"{__name__}.{name}") is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")


def register() -> None:
    """Make nmkernels known to the libraries that are imported, and to the others once they are."""
    when_imported("peft", _peft)
    when_imported("transformers.quantizers.auto", _hf)
    when_imported("torchao.quantization.quant_api", _torchao)


def _torchao() -> None:
    from .torchao_compat import install

    install()


def _peft() -> None:
    from . import peft  # noqa: F401  # which wraps peft's functions, at its own end where it is being imported now


def _hf() -> None:
    from . import hf  # noqa: F401  # which registers its classes


def when_imported(name: str, then: Callable[[], None]) -> None:
    """Call ``then`` once the module ``name`` is loaded: now, if it is, else at the end of its import. ``name`` is not imported by this.

    An error of ``then`` becomes a warning: it must not break the import of a library that may have nothing to do with nmkernels here.

    Example:
        >>> when_imported("tabnanny", lambda: print("loaded"))
        >>> import tabnanny
        loaded
        >>> when_imported("tabnanny", lambda: print("is loaded"))
        is loaded
    """
    if name in sys.modules:
        _call(name, then)
        return
    finder = next((f for f in sys.meta_path if isinstance(f, _Waiting)), None)
    if finder is None:
        finder = _Waiting()
        sys.meta_path.insert(0, finder)
    finder.calls.setdefault(name, []).append(then)


class _Waiting:
    """A finder of modules that finds none itself: it has what the others find for the awaited names tell when it is loaded."""

    def __init__(self) -> None:
        self.calls: dict[str, list[Callable[[], None]]] = {}

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self.calls:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                loader: Any = spec.loader
                if loader is not None and hasattr(loader, "exec_module"):
                    self._watch(loader, name)
                return spec
        return None

    def _watch(self, loader: Any, name: str) -> None:
        """Have ``loader`` call what waits for ``name`` once it has loaded that."""
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            if module.__name__ != name:  # a loader of archives is of all their modules
                execute(module)
                return
            loader.__dict__.pop("exec_module", None)
            execute(module)  # where it raises, they go on waiting
            for then in self.calls.pop(name, ()):
                _call(name, then)
            if not self.calls and self in sys.meta_path:
                sys.meta_path.remove(self)

        loader.exec_module = exec_module


def _call(name: str, then: Callable[[], None]) -> None:
    try:
        then()
    except Exception as error:  # whatever another version of the library may lead to
        warnings.warn(
            f"nmkernels could not make itself known to {name}: {type(error).__name__}: {error}. Without that, {name} treats its layers as "
            "unknown ones.",
            RuntimeWarning,
            stacklevel=2,
        )
