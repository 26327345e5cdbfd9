"""Our providers of an op, one per backend and instruction set, and the checks of their results."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import nmkernels as nm
from nmkernels import NMError, dispatch
from nmkernels.backends.cpu.core import core
from nmkernels.capability import compiled_core

from ..registry import Call, Provider, Ratio

GATE_ELEMENTS = 1 << 20
"""Elements of the timed input that are compared with the reference: all 45 million would take longer than the timing."""

STREAM = ("8192x16384",)
"""On a GPU: 268 MB in 16 bits, several times any L2, so that it is read from memory each time."""

ISAS = "NMKERNELS_BENCH_ISAS"
"""Environment variable that ``--isas`` sets: instruction sets to time in addition to the default."""


def ours(op: str, args: Sequence[object], make: Callable[[], Provider]) -> list[Provider]:
    """Providers ``nmkernels BACKEND`` for ``op(*args)``: the default backend, then the others that can run it; the reference only if alone.

    ``make`` returns a provider whose name is the suffix after the backend's (mostly empty) and whose call uses the public function.
    """
    chosen = dispatch.choose(op, *args)
    found = [_named(make(), f"nmkernels {chosen.backend}", nullcontext)]
    if os.environ.get(dispatch.ENV):
        return found
    for entry in dispatch.implementations(op):
        if entry.backend == "reference":
            break  # the emulator comes after it, and is never chosen automatically
        if entry.backend != chosen.backend and entry.supports(*args)[0]:
            found.append(_named(make(), f"nmkernels {entry.backend}", lambda name=entry.backend: forced(name)))  # type: ignore[misc]
    if chosen.backend == "cpu":
        found += [_named(make(), f"nmkernels cpu {isa}", lambda name=isa: using(name)) for isa in other_isas()]  # type: ignore[misc]
    return found


def _named(p: Provider, name: str, under: Callable[[], AbstractContextManager[object]]) -> Provider:
    p.name, p.under = f"{name}{p.name}", under
    return p


def also_time(isas: Sequence[str]) -> None:
    """From now on, also time these instruction sets of the CPU kernels; ``NMError`` for one that this CPU does not have."""
    if not compiled_core().ok:
        raise NMError(f"--isas: {compiled_core().reason}.")
    if unknown := set(isas) - {"all", *core().isas()}:
        raise NMError(f"--isas: {', '.join(sorted(unknown))} cannot run here; choose all, or some of {', '.join(core().isas())}.")
    os.environ[ISAS] = ",".join(isas)


def other_isas() -> list[str]:
    """The instruction sets of ``--isas``, without the one in use."""
    names = os.environ.get(ISAS, "").split(",")
    if not any(names) or not compiled_core().ok:
        return []
    return [name for name in core().isas() if (name in names or "all" in names) and name != core().isa()]


def forced(backend: str) -> AbstractContextManager[None]:
    """Inside, every op runs on ``backend``."""
    return environment(dispatch.ENV, backend)


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Inside, the environment variable has this value."""
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
    """Inside, the CPU kernels are those of ``isa``."""
    before = core().isa()
    core().use_isa(isa)
    try:
        yield
    finally:
        core().use_isa(before)


def copying(x: Tensor, ours: Sequence[Provider]) -> tuple[Provider, list[Ratio]]:
    """``copy_`` of ``x`` into existing memory, and the share of its bandwidth that ours reach."""
    target = torch.empty_like(x)
    copy = Provider("torch copy_", lambda: target.copy_(x), 2 * x.nbytes)
    return copy, [Ratio("share of copy", p.name, (copy.name,), "rate") for p in ours]


def works(call: Call, device: str) -> bool:
    """Whether a torch call runs here; support differs by shape, compute capability and build."""
    try:
        call()
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)
    except (RuntimeError, NotImplementedError, ValueError, AttributeError, AssertionError):
        return False
    return True


def normal(*shape: int, device: str, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Standard normal numbers, the same in every call."""
    gen = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=gen, device=device, dtype=dtype)


def ends(rows: int, cols: int) -> list[slice]:
    """Slices with the first and the last rows, about ``GATE_ELEMENTS`` in all."""
    few = max(1, GATE_ELEMENTS // 2 // cols)
    return [slice(0, rows)] if rows <= 2 * few else [slice(0, few), slice(rows - few, rows)]


def reference(op: str) -> Callable[..., object]:
    """The reference's function for ``op``."""
    return next(i.fn for i in dispatch.implementations(op) if i.backend == "reference")


def same_shapes(actual: object, expected: object, what: str) -> None:
    """The check of calls whose host time is measured; their values are checked where the device time is."""
    mine, theirs = ([(x.shape, x.dtype) for x in (r if isinstance(r, tuple) else (r,))] for r in (actual, expected))
    assert mine == theirs, f"{what}: shapes and dtypes {mine}, the reference has {theirs}"


def as_dense(model: nn.Module, handle: Any) -> nn.Module:
    """A dense copy of a model in training, with the effective weights of its sparse layers."""
    baseline = nm.densify_(copy.deepcopy(model))
    with torch.no_grad():
        for name, layer in handle.layers.items():
            baseline.get_submodule(name).weight.copy_(layer.effective_weight())  # type: ignore[operator]
    return baseline


def close(mine: Tensor, theirs: Tensor, dtype: torch.dtype, eps: int = 64) -> None:
    """The check of outputs that may differ by so many eps of the largest one."""
    error, bound = (mine - theirs).abs().max(), eps * torch.finfo(dtype).eps * theirs.abs().max()
    assert error <= bound, f"outputs differ by {float(error):.3g}, more than rounding ({float(bound):.3g})"
