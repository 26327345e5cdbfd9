"""What keeps 2:4 GEMMs from twice the dense rate on Hopper: power, or the port of shared memory.

Sparse ``wgmma`` reads 128 bytes of B per cycle, all that a multiprocessor's shared memory delivers. That bound is in cycles, so it is the
same share of the tensor cores' rate at any clock: a tile of 256x192 gains 1.23 over dense. Power is a bound only at high clocks. The ratio
to cuBLAS at a low clock therefore decides: up to about 1.3 the port is the bound; from 1.5 on it was power.

By default the GPU chooses its clocks. With ``nvidia-smi -lgc 900,900`` before and ``-rgc`` afterwards, which usually need root, the same
case, with an ``--out`` of its own, measures at 900 MHz; its rows say the clock.
"""

from __future__ import annotations

import subprocess
import time

import torch

from ..registry import Grid, Provider, Spec, Work, family
from .gemm import BF16, CUBE, CUBE_TOKENS
from .gemm import fprop as gemms

DENSE, OURS = "torch dense", ("nmkernels cuda", "nmkernels cusparselt, canonical, searched")
HEAT = 2.0
"""Seconds of load before timing, so that the clock is that of a busy GPU."""

QUEUED = 200
"""Calls in the queue while the clock is read: 0.3 s of the 8192³ GEMM."""


@family("power_or_port", grids=(Grid((CUBE,), dtypes=BF16, tokens=(CUBE_TOKENS,), on="cuda"),))
def power_or_port(spec: Spec, device: str) -> Work:
    """The 2:4 GEMM and the dense one, with the clock and the power while each of them runs."""
    whole = gemms(spec, device)
    some = [p for p in whole.providers if p.name in (DENSE, *OURS)]
    every = some if len(some) > 1 else whole.providers  # on a CPU, in a dry run
    end = time.monotonic() + HEAT if device.startswith("cuda") else 0.0
    while time.monotonic() < end:  # by the dense GEMM: an error of another one here would lose the case
        for p in every:
            if p.name == DENSE:
                p.call()
        torch.cuda.synchronize(device)
    work = Work(every, [r for r in whole.ratios if r.metric == "x dense" and r.of in {p.name for p in every}])
    work.finish = lambda: loads(work.providers, device)  # without those whose results were wrong
    return work


def loads(providers: list[Provider], device: str) -> dict[tuple[str, str], float]:
    """MHz and watts while each of them runs; empty if nvidia-smi does not report them."""
    found = {}
    for p in providers if device.startswith("cuda") else ():
        gpu = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        words = ["nvidia-smi", "-i", gpu, "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
        with p.under():
            for _ in range(QUEUED):
                p.call()
            try:
                mhz, watts = subprocess.run(words, capture_output=True, text=True).stdout.split(",")
                found[p.name, "MHz"], found[p.name, "W"] = float(mhz), float(watts)
            except (OSError, ValueError):  # it is not installed, or does not say
                return {}
            torch.cuda.synchronize(device)
    return found
