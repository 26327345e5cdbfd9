"""What keeps 2:4 GEMMs from twice the dense rate on Hopper: power, or the port of shared memory.

Sparse ``wgmma`` reads 128 bytes of B per cycle, all that a multiprocessor's shared memory delivers. That bound is in cycles, so it is the
same share of the tensor cores' rate at any clock: a tile of 256x192 gains 1.23 over dense. Power is a bound only at high clocks. The ratio
to cuBLAS at a low locked clock therefore decides: if it is still about 1.2, the port is the bound; at 1.6 and more, it was power.

By default the GPU chooses its clocks. ``python -m bench.run --op power_or_port --lock-clocks 900`` measures again with the clock locked,
if the user may do that, and prints the conclusion.
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
"""Ratios to cuBLAS at a low clock: up to ``PORT`` the port is the bound, from ``POWER`` on it was power."""

DENSE, OURS = "torch dense", ("nmkernels cuda", "nmkernels cusparselt, canonical, searched")
HEAT, SECONDS = 2.0, 1.0
"""Seconds of load before timing, so that the clock is that of a busy GPU; and of timing at the locked clock."""

QUEUED = 200
"""Calls in the queue while the clock is read: 0.3 s of the 8192³ GEMM."""

GAIN = "x dense"


@family("power_or_port", grids=(Grid((CUBE,), dtypes=BF16, tokens=(CUBE_TOKENS,), on="cuda"),))
def power_or_port(spec: Spec, device: str) -> Work:
    """The 2:4 GEMM and the dense one at the GPU's own clocks; then again at a locked clock, if requested."""
    whole = gemms(spec, device)
    some = [p for p in whole.providers if p.name in (DENSE, *OURS)]
    every = some if len(some) > 1 else whole.providers  # on a CPU, in a dry run
    if device.startswith("cuda"):
        heat([p for p in every if p.name == DENSE], device)  # an error here must not lose the case
    work = Work(every, [r for r in whole.ratios if r.metric == GAIN and r.of in {p.name for p in every}])

    def finish() -> dict[tuple[str, str], float]:
        present, mhz = work.providers, clocks.requested()  # without those whose results were wrong
        found = loads(present, device, "")
        if not mhz:
            say(spec, "at the GPU's own clocks only; --lock-clocks 900 distinguishes power from shared memory")
            return found
        try:
            with clocks.locked(mhz, uuid(device)):
                heat(present, device)
                found |= loads(present, device, f" at {mhz} MHz")
                timed = take_turns(present, device, SECONDS)
        except NMError as error:  # an error must not lose the rows so far
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
    """Print to standard error: rows hold only numbers."""
    print(f"{spec}: {text}", file=sys.stderr)


def verdict(gains: dict[str, float], mhz: int) -> str:
    """The conclusion from the ratio of the fastest 2:4 GEMM at a locked clock; a slow one says nothing about the hardware."""
    if not gains:
        return f"no sparse GEMM was timed at {mhz} MHz, so nothing can be concluded"
    best = max(gains, key=gains.__getitem__)
    found = f"at {mhz} MHz {best} is {gains[best]:.2f} times as fast as cuBLAS: "
    if gains[best] <= PORT:
        return found + f"at most {PORT}, which the port of shared memory allows; power is not the bound"
    if gains[best] >= POWER:
        return found + f"at least {POWER}, more than the port of shared memory allows; at higher clocks power is the bound"
    return found + f"between {PORT} and {POWER}; neither explains it alone"


def heat(providers: list[Provider], device: str) -> None:
    """Keep the device busy for a while with all providers."""
    end = time.monotonic() + HEAT
    while time.monotonic() < end:
        for p in providers:
            with p.under():
                p.call()
        torch.cuda.synchronize(device)


def loads(
    providers: list[Provider], device: str, suffix: str, read: Callable[[str], tuple[float, float]] = clocks.under_load
) -> dict[tuple[str, str], float]:
    """The clock and the power while each of them runs; empty if nvidia-smi does not report them."""
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
    """The device's UUID, as used by nvidia-smi."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
