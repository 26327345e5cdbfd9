"""Cases small enough for tests, and a context manager that breaks an op."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from bench import cases
from bench.registry import Ask, Spec
from nmkernels import dispatch

STAMP = '"AMD, 2 threads",torch 2.13.0,abc1234,2026-11-21\n'
HEAD = "op,provider,pattern,dtype,shape,metric,p20,p50,p80,machine,versions,commit,date\n"


def small(spec: Spec) -> Spec:
    """The case in sizes for tests."""
    if spec.model:
        tiny = "Llama 128x1" if "Llama" in spec.model else "GPT-2 128x1" if "GPT-2" in spec.model else "GPT 64x1"
        return replace(spec, tokens=min(spec.tokens, 32), model=tiny)
    if "quantized" in spec.op:
        return replace(spec, rows=64, cols=128, tokens=16)
    return replace(spec, rows=16, cols=64, tokens=min(spec.tokens, 128 if "(cores)" in spec.op else 16))


SMALL = tuple(small(spec) for spec in {(s.op, s.dtype): s for s in cases.select(Ask(), "cuda")}.values())
"""A case of every op of the registry in each of its dtypes."""


@contextmanager
def broken(op: str, wrong: Callable[..., Any], priority: int = 99, alone: bool = False) -> Iterator[None]:
    """Inside, ``op`` runs ``wrong`` through the dispatcher, as a backend of its own; with a low priority only if asked for by name.

    ``alone``: it and the reference are the only backends.
    """
    before = {name: list(entries) for name, entries in dispatch._impls.items()}
    if alone:
        dispatch._impls[op] = [entry for entry in before[op] if entry.backend == "reference"]
    dispatch.impl(op, backend="broken", priority=priority)(wrong)
    try:
        yield
    finally:
        dispatch._impls.clear()
        dispatch._impls.update(before)


def instead(function: Callable[..., Tensor], change: Callable[[Tensor], Tensor] = Tensor.clone) -> Callable[..., Tensor]:
    """``function`` of the reference, its result changed, for ``broken``."""

    def run(*args: Any, out: Tensor | None = None) -> Tensor:
        result = change(function(*args))
        return result if out is None else out.copy_(result)

    return run


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
