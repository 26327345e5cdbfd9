"""What is timed, one file per family: the registry filled, and the cases that words and options leave of it."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from importlib import import_module
from pkgutil import iter_modules

from nmkernels import NMError

from ..registry import FAMILIES, Ask, Spec, Work

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")  # each registers its cases


def build(spec: Spec, device: str) -> Work:
    """Allocate the case and everything that takes turns in it."""
    return FAMILIES[spec.op].build(spec, device)


def matching(words: Iterable[str]) -> tuple[str, ...]:
    """The ops that the words name: whole, without ``nm_``, or with wildcards; ``NMError`` for a word that names none."""
    known, found = list(FAMILIES), []
    for word in words:
        hits = [op for op in known if fnmatchcase(op, word) or fnmatchcase(op.removeprefix("nm_"), word)]
        if not hits:
            raise NMError(f"no op to time is called {word!r}; there are: {', '.join(known)}.")
        found += hits
    return tuple(dict.fromkeys(found))


def select(ask: Ask, device: str = "cpu") -> list[Spec]:
    """Every case that ``ask`` leaves of the full run on a device, in the order of the registry."""
    return [spec for op, f in FAMILIES.items() if not ask.ops or op in ask.ops for spec in f.specs(ask, device)]


def narrow(specs: Iterable[Spec], ask: Ask) -> list[Spec]:
    """Those of the given cases that ``ask`` leaves."""

    def fits(spec: Spec) -> bool:
        matrix = f"{spec.rows}x{spec.cols}"
        wanted = ((ask.ops, spec.op), (ask.matrices, matrix), (ask.patterns, spec.pattern), (ask.dtypes, spec.dtype))
        return all(not allowed or value in allowed for allowed, value in wanted) and (not ask.tokens or spec.tokens in ask.tokens)

    return [spec for spec in specs if fits(spec)]
