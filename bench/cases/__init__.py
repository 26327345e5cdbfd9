"""The cases, one file per family, and their selection by words and options."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from importlib import import_module
from pkgutil import iter_modules

from nmkernels import NMError

from ..registry import FAMILIES, Ask, Spec, Work

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")  # importing them registers their cases


def build(spec: Spec, device: str) -> Work:
    """Allocate the case and its providers."""
    return FAMILIES[spec.op].build(spec, device)


def matching(words: Iterable[str]) -> tuple[str, ...]:
    """The ops that match the words, with or without ``nm_``, or with wildcards; ``NMError`` for a word that matches none."""
    known, found = list(FAMILIES), []
    for word in words:
        hits = [op for op in known if fnmatchcase(op, word) or fnmatchcase(op.removeprefix("nm_"), word)]
        if not hits:
            raise NMError(f"no op matches {word!r}; choose from {', '.join(known)}.")
        found += hits
    return tuple(dict.fromkeys(found))


def select(ask: Ask, device: str = "cpu") -> list[Spec]:
    """The cases of the full run on a device that ``ask`` selects, in the order of the registry."""
    return [spec for op, f in FAMILIES.items() if not ask.ops or op in ask.ops for spec in f.specs(ask, device)]


def narrow(specs: Iterable[Spec], ask: Ask) -> list[Spec]:
    """The cases among ``specs`` that ``ask`` selects."""

    def fits(spec: Spec) -> bool:
        matrix = f"{spec.rows}x{spec.cols}"
        wanted = ((ask.ops, spec.op), (ask.matrices, matrix), (ask.patterns, spec.pattern), (ask.dtypes, spec.dtype))
        return all(not allowed or value in allowed for allowed, value in wanted) and (not ask.tokens or spec.tokens in ask.tokens)

    return [spec for spec in specs if fits(spec)]
