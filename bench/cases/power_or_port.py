"""What keeps 2:4 GEMMs from twice the dense rate on Hopper: power, or the port of shared memory. Written without a GPU at hand.

Sparse ``wgmma`` reads 128 bytes of B a cycle, all that a multiprocessor's shared memory delivers; that bound is in cycles, so it is the
same share of the tensor cores' rate at any clock: by it a tile of 256x192 gains 1.23 over dense. Power binds at high clocks alone. So the
ratio to cuBLAS at a clock locked low tells: still about 1.2, it is the port; 1.6 and more, it was power. In between, neither alone.

As it is, the case measures at the clocks that the GPU takes by itself. ``python -m bench.run --op power_or_port --lock-clocks 900``
measures once more with the clock locked, where the owner of the GPU may do that, and says what follows.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median

import torch

from nmkernels import NMError

from .. import clocks
from ..registry import Grid, Provider, Spec, Work, family
from ..timing import take_turns
from .gemm import BF16, CUBE, CUBE_TOKENS
from .gemm import fprop as gemms

PORT, POWER = 1.3, 1.5
"""The ratio to cuBLAS at a low clock up to which it is the port, and from which it was power."""

DENSE, OURS = "torch dense", ("nmkernels cuda", "nmkernels cusparselt, canonical, searched")
HEAT, SECONDS = 2.0, 1.0
"""Seconds of load before anything is timed, so that the clock is that of a busy GPU; and of timing at the locked clock."""

QUEUED = 200
"""Calls in the queue while the clock is read: 0.3 s of the 8192³ GEMM."""

GAIN = "x dense"


@family("power_or_port", grids=(Grid((CUBE,), dtypes=BF16, tokens=(CUBE_TOKENS,), on="cuda"),))
def power_or_port(spec: Spec, device: str) -> Work:
    """The 2:4 GEMM beside the dense one, as the clocks are; after that the same at a locked clock, if that was asked for."""
    whole = gemms(spec, device)
    some = [p for p in whole.providers if p.name in (DENSE, *OURS)]
    every = some if len(some) > 1 else whole.providers  # on a CPU, in a dry run
    if device.startswith("cuda"):
        heat([p for p in every if p.name == DENSE], device)  # what was not proved yet must not cost the case
    work = Work(every, [r for r in whole.ratios if r.metric == GAIN and r.of in {p.name for p in every}])

    def finish() -> dict[tuple[str, str], float]:
        present, mhz = work.providers, clocks.asked()  # without those whose results were wrong
        found = loads(present, device, "")
        if not mhz:
            say(spec, "at the GPU's own clocks alone; --lock-clocks 900 tells power from shared memory")
            return found
        try:
            with clocks.locked(mhz, uuid(device)):
                heat(present, device)
                found |= loads(present, device, f" at {mhz} MHz")
                timed = take_turns(present, device, SECONDS)
        except NMError as error:  # it must not cost the rows so far
            say(spec, str(error))
            return found
        gains = {}
        for p in present:
            seconds, ratios = timed.of(p.name), [r[DENSE] / r[p.name] for r in timed.rounds if {DENSE, p.name} <= r.keys()]
            if seconds:
                found[p.name, f"us at {mhz} MHz"] = 1e6 * median(seconds)
            if p.name in OURS and ratios:
                gains[p.name] = found[p.name, f"{GAIN} at {mhz} MHz"] = median(ratios)
        say(spec, verdict(gains, mhz))
        return found

    work.finish = finish
    return work


def say(spec: Spec, text: str) -> None:
    """For the reader: rows have numbers alone, and standard output may be JSON."""
    print(f"{spec}: {text}", file=sys.stderr)


def verdict(gains: dict[str, float], mhz: int) -> str:
    """What the ratios at a locked clock say: those of the fastest 2:4 GEMM, since a slow one says nothing of the hardware."""
    if not gains:
        return f"nothing sparse was timed at {mhz} MHz, which says nothing"
    best = max(gains, key=gains.__getitem__)
    found = f"at {mhz} MHz {best} is {gains[best]:.2f} times as fast as cuBLAS: "
    if gains[best] <= PORT:
        return found + f"at most {PORT}, as the port of shared memory allows; power is not what binds"
    if gains[best] >= POWER:
        return found + f"at least {POWER}, more than the port of shared memory would allow; at higher clocks power binds"
    return found + f"between {PORT} and {POWER}; neither explanation alone"


def heat(providers: list[Provider], device: str) -> None:
    """Keep the device busy for a while with all of them."""
    end = time.monotonic() + HEAT
    while time.monotonic() < end:
        for p in providers:
            with p.under():
                p.call()
        torch.cuda.synchronize(device)


def loads(
    providers: list[Provider], device: str, suffix: str, read: Callable[[str], tuple[float, float]] = clocks.under_load
) -> dict[tuple[str, str], float]:
    """The clock and the power while each of them runs; nothing where nvidia-smi does not tell."""
    found = {}
    for p in providers if device.startswith("cuda") else ():
        with p.under():
            for _ in range(QUEUED):
                p.call()
            try:
                mhz, watts = read(uuid(device))
            except NMError:
                return {}
            torch.cuda.synchronize(device)
        found[p.name, f"MHz{suffix}"], found[p.name, f"W{suffix}"] = mhz, watts
    return found


def uuid(device: str) -> str:
    """What nvidia-smi calls the device."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
