"""Our providers of an op, one per backend and instruction set, and the gates that they have to pass."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from nmkernels import NMError, dispatch, testing
from nmkernels.backends.cpu.core import core
from nmkernels.capability import compiled_core

from ..registry import Call, Provider

GATE_ELEMENTS = 1 << 20
"""So many elements of the timed input are compared with the reference: all of 45 million would take longer than the timing."""

STREAM = ("8192x16384",)
"""On a GPU: 268 MB in 16 bits, several times any L2, so that reading it again reads memory."""

ISAS = "NMKERNELS_BENCH_ISAS"
"""Environment variable that ``--isas`` sets: the instruction sets to time beside the chosen one."""


def ours(op: str, args: Sequence[object], make: Callable[[], Provider]) -> list[Provider]:
    """Providers ``nmkernels BACKEND`` for ``op(*args)``: the backend that users get, then the others that can; the reference only alone.

    ``make`` returns a provider whose name is what follows the backend's (mostly nothing); its call goes through the public function.
    """
    chosen = dispatch.choose(op, *args)
    found = [_named(make(), f"nmkernels {chosen.backend}", nullcontext)]
    if os.environ.get(dispatch.ENV):
        return found
    for entry in dispatch.implementations(op):
        if entry.backend == "reference":
            break  # what comes after it, the emulator, is never chosen by itself
        if entry.backend != chosen.backend and entry.supports(*args)[0]:
            found.append(_named(make(), f"nmkernels {entry.backend}", lambda name=entry.backend: forced(name)))  # type: ignore[misc]
    if chosen.backend == "cpu":
        found += [_named(make(), f"nmkernels cpu {isa}", lambda name=isa: using(name)) for isa in other_isas()]  # type: ignore[misc]
    return found


def _named(p: Provider, name: str, under: Callable[[], AbstractContextManager[object]]) -> Provider:
    p.name, p.under = f"{name}{p.name}", under
    return p


def also_time(isas: Sequence[str]) -> None:
    """Time these instruction sets of the CPU kernels beside the one in use, from now on; ``NMError`` for one that is not here."""
    if not compiled_core().ok:
        raise NMError(f"--isas: {compiled_core().reason}.")
    if unknown := set(isas) - {"all", *core().isas()}:
        raise NMError(f"--isas: {', '.join(sorted(unknown))} cannot run here; all, or some of {', '.join(core().isas())}.")
    os.environ[ISAS] = ",".join(isas)


def other_isas() -> list[str]:
    """The instruction sets that ``--isas`` asked for, without the one in use."""
    asked = os.environ.get(ISAS, "").split(",")
    if not any(asked) or not compiled_core().ok:
        return []
    return [name for name in core().isas() if (name in asked or "all" in asked) and name != core().isa()]


def forced(backend: str) -> AbstractContextManager[None]:
    """Every op inside runs on ``backend``."""
    return environment(dispatch.ENV, backend)


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """The environment variable has that value inside."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextmanager
def using(isa: str) -> Iterator[None]:
    """The CPU kernels inside are those of ``isa``."""
    before = core().isa()
    core().use_isa(isa)
    try:
        yield
    finally:
        core().use_isa(before)


def works(call: Call, device: str) -> bool:
    """Whether a call of torch's does its work here; shapes, compute capabilities and builds differ in what they serve."""
    try:
        call()
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)
    except (RuntimeError, NotImplementedError, ValueError, AttributeError, AssertionError):
        return False
    return True


def normal(*shape: int, device: str, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Standard normal numbers, the same at every call."""
    gen = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=gen, device=device, dtype=dtype)


def ends(rows: int, cols: int) -> list[slice]:
    """Slices of rows, the first and the last ones, about ``GATE_ELEMENTS`` in all."""
    few = max(1, GATE_ELEMENTS // 2 // cols)
    return [slice(0, rows)] if rows <= 2 * few else [slice(0, few), slice(rows - few, rows)]


def reference(op: str) -> Callable[..., object]:
    """The reference's function for ``op``."""
    return next(i.fn for i in dispatch.implementations(op) if i.backend == "reference")


def same_shapes(actual: object, expected: object, what: str) -> None:
    """The gate of calls that are timed for what they cost the host: results are proved where the device's time is taken."""
    mine, theirs = ([(x.shape, x.dtype) for x in (r if isinstance(r, tuple) else (r,))] for r in (actual, expected))
    assert mine == theirs, f"{what}: shapes and dtypes {mine}, the reference has {theirs}"


def same_bits(actual: object, expected: object, what: str) -> None:
    """The gate of exact ops."""
    testing.assert_equal_bits(actual, expected, what)
