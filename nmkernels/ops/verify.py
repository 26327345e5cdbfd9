"""Check each kernel once per machine, with a small call against the reference, before it is used.

A *family* is the set of calls of an op by one backend that one check covers: those with the same small call (``small``), which is the
family's name. ``trusted`` runs when the backend of a new kind of call is chosen (``define``), so known kinds cost nothing. The result is a
line of the table on disk, keyed by machine (GPU name, or CPU name with instruction set) and versions (package, core build, torch; on a GPU
driver and Triton), so later processes reuse it and a change repeats the check. A wrong family is switched off: ``known_wrong`` makes its
backend decline.

Nothing is checked during tracing, profiling or graph capture: the call runs, and the next one is checked. The reference, the emulator and
Triton's interpreter are not checked. ``NMKERNELS_VERIFY=0`` trusts everything, even kernels that failed. Each rank of a distributed run
checks its own device; if one falls back, exact ops still give the same bits, and GEMMs agree to rounding.
"""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .. import dispatch
from ..backends.shared import device_of, tensors
from ..dispatch import REFERENCE, Impl, implementations
from ..layouts import transposed
from ..pattern import BackendError
from ..timing import TABLE
from ..timing.modes import outside_modes, undisturbed
from ..timing.table import machine, versions

ENV = "NMKERNELS_VERIFY"
"""Environment variable; with 0 nothing is checked or switched off."""

SPACE = "check"
"""Prefix of the table's lines for checks."""

REMEMBERED = 4096
"""Size of the cache of families; when full it is cleared."""

ROUNDED = {"nm_linear", "nm_linear_dgrad", "nm_linear_wgrad", "nm_linear_quantized", "nm_linear_integers"}
"""Ops compared with float64, because backends may round differently."""

SUMS = {"nm_soft_threshold_scale", "nm_masked_adamw_", "nm_masked_adamw_pack_"}
"""Ops that return sums, compared to 1e-6; their in-place updates must be bit-equal."""

EIGHT_BIT_FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2)

HOST = {"nm_masked_adamw_": {5: "steps", 6: "hyper"}, "nm_masked_adamw_pack_": {15: "steps", 16: "hyper"}}
"""Arguments, by position, that may be on the CPU while the others are on a GPU."""

log = logging.getLogger("nmkernels.verify")
log.addHandler(logging.NullHandler())

_lock = threading.RLock()
_families: dict[Any, str] = {}
_warned: set[Any] = set()
_unjudged: set[str] = set()
_suspects: frozenset[tuple[str, str]] = frozenset()
_revision = -1


# ---- called by the dispatcher


def trusted(entry: Impl, args: Sequence[Any]) -> bool | None:
    """Whether ``entry`` may run such calls here, checking it if necessary; None if it cannot be checked now.

    False: it is wrong and switched off, so that the dispatcher chooses another, unless ``NMKERNELS_BACKEND`` forces it.
    """
    device = device_of(args)
    if not (enabled() and concerned(entry, device)):
        return True
    if not undisturbed(device) or (device.type == "cuda" and torch.cuda.get_sync_debug_mode()):
        return None
    name = family(entry, args)
    wrong = _verdict(name)
    if wrong is None:
        with _lock:  # another thread may have been first
            wrong = _verdict(name)
            wrong = _check(entry, args, name) if wrong is None else wrong
    if not wrong:
        return True
    _warn(entry, device, name, wrong)
    return dispatch.forced_backend() == entry.backend


def known_wrong(entry: Impl, args: Sequence[Any]) -> str:
    """Why ``entry`` declines such calls on this machine; empty unless it failed their check."""
    device = device_of(args)
    if not (any_wrong(entry.op, entry.backend) and concerned(entry, device)):
        return ""
    name = family(entry, args)
    wrong = _verdict(name)
    if not wrong:
        return ""
    _warn(entry, device, name, wrong)
    what, _, detail = wrong.partition(": ")
    return f"{what} on {machine(device)}; switched off ({detail}; {ENV}=0 runs it)"


def any_wrong(op: str, backend: str) -> bool:
    """Whether any family of an op is switched off for a backend."""
    global _suspects, _revision
    if _revision != TABLE.revision and enabled():
        wrong = [name.split("|")[-2:] for name in TABLE.lines() if name.startswith(f"{SPACE}|") and _verdict(name)]
        _suspects, _revision = frozenset((call.partition("(")[0], by) for by, call in wrong), TABLE.revision
    return (op, backend) in _suspects and enabled()


dispatch.known_wrong = known_wrong


def concerned(entry: Impl, device: torch.device) -> bool:
    """Whether it is checked at all: of negative priority are test instruments, and what compiles for a CPU is an interpreter."""
    if entry.backend == REFERENCE or entry.priority < 0 or not entry.op.startswith("nm_"):
        return False
    return device.type in ("cuda", "xpu") or (device.type == "cpu" and not entry.compiles)


def enabled() -> bool:
    return os.environ.get(ENV) != "0"


# ---- results of checks


def known(device: torch.device) -> dict[str, str]:
    """The checks of families on a device with the current versions: backend and call → error, empty if correct."""
    prefix = _prefix(device)
    verdicts = {name.removeprefix(prefix): _verdict(name) for name in TABLE.lines() if name.startswith(prefix)}
    return {name.replace("|", " "): wrong for name, wrong in verdicts.items() if wrong is not None}


def record(verdicts: Mapping[str, str]) -> None:
    """Use these results from now on, in this process and, if the table is writable, in later ones."""
    with suppress(OSError):
        TABLE.store({name: {"wrong": wrong} for name, wrong in verdicts.items()})


def _verdict(name: str) -> str | None:
    """The error of a family, empty if it is correct; None if unknown."""
    wrong = (TABLE.get(name) or {}).get("wrong")
    return wrong if isinstance(wrong, str) else "" if name in _unjudged else None


def _check(entry: Impl, args: Sequence[Any], name: str) -> str:
    from ..testing.calls import small

    try:
        wrong = examine(entry, truth(entry.op, small(entry.op, args)), device_of(args), _on_host(entry.op, args))
    except Exception as error:  # usually out of memory, which says nothing about the kernel
        log.warning("%s: not checked: %s: %s", name, type(error).__name__, error)
        _unjudged.add(name)
        return ""
    record({name: wrong})
    return wrong


def _warn(entry: Impl, device: torch.device, name: str, wrong: str) -> None:
    """Warn once per process for each op and backend, because a wrong kernel may fail in many families."""
    (what, _, detail), call = wrong.partition(": "), name.rpartition("|")[2]
    forced = dispatch.forced_backend() == entry.backend
    then = f"It runs anyway, because {dispatch.ENV} names it" if forced else "It is switched off here, and the next backend takes over"
    text = (
        f"{entry.op} by {entry.backend} {what} on {machine(device)}: {detail}, in the call {call}. {then}. Please report it with "
        f"the output of `python -m nmkernels doctor --verify`. {ENV}=0 runs kernels unchecked."
    )
    if name not in _warned:
        log.info(text)
    if (entry.op, entry.backend) not in _warned:
        warnings.warn(f"nmkernels: {text}", RuntimeWarning, stacklevel=3)
    _warned.update((name, (entry.op, entry.backend)))


# ---- families


def family(entry: Impl, args: Sequence[Any]) -> str:
    """The family of a call by a backend, which is the key of its line in the table."""
    kind = entry.op, entry.backend, *_kind(args)
    name = _families.get(kind)
    if name is None:
        from ..testing.calls import small  # imported only if something is checked

        if len(_families) >= REMEMBERED:
            _families.clear()
        where = "".join(f", {HOST[entry.op][i]} on the CPU" for i in _on_host(entry.op, args))
        name = _families[kind] = f"{_prefix(device_of(args))}{entry.backend}|{words(entry.op, small(entry.op, args))}{where}"
    return name


def _prefix(device: torch.device) -> str:
    return f"{SPACE}|{machine(device)}|{versions(device.type)}|"


def _kind(args: Sequence[Any]) -> Iterator[Any]:
    for x in args:
        if isinstance(x, Tensor):
            yield x.shape, x.dtype, x.device, transposed(x)
        else:
            yield tuple(_kind(x)) if isinstance(x, (list, tuple)) else x


def words(op: str, args: Sequence[Any]) -> str:
    """Format a call: dtypes and shapes of its tensors, and its other arguments."""
    return f"{op}({', '.join(map(_words, args))})"


def _words(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}{'.t()' if transposed(x) else ''}"
    if isinstance(x, list):
        return f"[{', '.join(map(_words, x))}]"
    return str(x).removeprefix("torch.") if isinstance(x, torch.dtype) else repr(x)


def _on_host(op: str, args: Sequence[Any]) -> list[int]:
    """The positions of arguments that are on the CPU while the first tensor is not."""
    device = device_of(args)
    return [i for i in HOST.get(op, ()) if any(x.device != device for x in tensors([args[i]]))]


def placed(args: Sequence[Any], device: torch.device, on_host: Sequence[int] = ()) -> tuple[Any, ...]:
    """Copy arguments to a device, except those at ``on_host``, which stay on the CPU."""
    places = [torch.device("cpu") if i in on_host else device for i in range(len(args))]
    return tuple(tree_map_only(Tensor, partial(Tensor.to, device=d, copy=True), x) for x, d in zip(args, places, strict=True))


# ---- the comparison


class Truth(NamedTuple):
    """A call on the CPU, the reference's result, its arguments afterwards, and for a rounded op the float64 result."""

    op: str
    args: tuple[Any, ...]
    result: Any
    written: tuple[Any, ...]
    exact: Any


def truth(op: str, args: tuple[Any, ...]) -> Truth:
    """Run the reference on the CPU."""
    plain = next(i.fn for i in implementations(op) if i.backend == REFERENCE)
    with outside_modes():
        written = tree_map_only(Tensor, Tensor.clone, args)
        result = plain(*written)
        # the last argument of a weight gradient is its result's dtype
        wide = [_wide(x, op == "nm_linear_quantized") for x in (args[:6] if op == "nm_linear_wgrad" else args)]
        exact = plain(*wide) if op in ROUNDED else None
    return Truth(op, args, result, written, exact)


def _wide(x: Any, integers: bool) -> Any:
    return x.double() if isinstance(x, Tensor) and (x.is_floating_point() or (integers and x.dtype == torch.int8)) else x


def examine(entry: Impl, true: Truth, device: torch.device, on_host: Sequence[int] = ()) -> str:
    """What is wrong with what ``entry`` makes of the call on a device; empty if nothing is, BackendError if it cannot run the call.

    ``on_host``: the positions of arguments that stay on the CPU.
    """
    from ..testing.compare import assert_equal_bits, assert_no_worse  # imported only if something is checked

    can, reason = entry.can(*placed(true.args, device, on_host))
    if not can:
        raise BackendError(f"{true.op}: {entry.backend} cannot run the call that checks it: {reason}")
    with outside_modes():
        inputs = placed(true.args, device, on_host)
        try:
            got = entry.fn(*inputs)
            if true.op in ROUNDED:
                # tensor cores keep about 14 bits of a sum of 8-bit floats, regardless of the result's dtype
                dtype = torch.bfloat16 if true.args[0].dtype in EIGHT_BIT_FLOATS else true.result.dtype
                assert_no_worse(got.to(dtype), true.result.to(dtype), true.exact)
            elif true.op in SUMS:
                near = torch.isclose(got.cpu(), true.result, rtol=1e-6, atol=1e-12, equal_nan=True)  # torch.testing takes 0.5 s to import
                if got.shape != true.result.shape or not near.all():
                    return f"differed from the reference: {got.tolist()} is not {true.result.tolist()}"
                assert_equal_bits(inputs, true.written)
            else:
                assert_equal_bits(*((inputs, true.written) if got is None else (got, true.result)))
        except AssertionError as error:
            return f"differed from the reference: {_line(error)}"
        except Exception as error:
            if isinstance(error, MemoryError) or "out of memory" in str(error):
                raise  # the next call may succeed
            return f"failed: {type(error).__name__}: {_line(error)}"
    return ""


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
