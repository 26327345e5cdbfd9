"""What the machine allows a GEMM at most: bytes over the bandwidth, or FMAs over their rate, whichever takes longer.

The bandwidth is the best of the same rounds, from wherever the caches left the bytes: torch's that only reads as many as ours, or that of
a GEMM, which a large weight may give more. The rate of FMAs is that of the fastest large GEMM of torch's in the same run.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

from ..registry import ALLOWED, SHARE, Provider, Spec
from ..timing import Timed
from .machine import fma_rate

READ = "torch read"


def reader(nbytes: float) -> Provider:
    """Reads so many bytes by all of torch's threads; a sum is the fastest of torch's ops that only read."""
    data = torch.ones(max(1, int(nbytes) // 8), dtype=torch.int64)
    return Provider(READ, lambda: data.sum(), data.nbytes)


Figures = dict[tuple[str, str], list[float]]


def shares(spec: Spec, ours: list[Provider], dense: list[Provider], read: Provider) -> Callable[[Timed], Figures]:
    """``Work.derive``: the share of the roofline of ours and of dense, and how many times as fast as dense ours may be.

    That is M/N where both are bound by FMAs, and dense bytes over compressed bytes where both are bound by memory.
    """

    def derive(timed: Timed) -> Figures:
        if not timed.of(read.name):
            return {}
        everybody = (*ours, *dense)
        bandwidth = max(p.bytes / median(timed.of(p.name)) for p in (*everybody, read) if timed.of(p.name))
        rate = fma_rate(spec.dtype)
        least = {p.name: max(p.bytes / bandwidth, p.flops / rate) for p in everybody}
        found = {(name, SHARE): [seconds / took for took in timed.of(name)] for name, seconds in least.items()}
        return {**found, **{(p.name, ALLOWED): [least[dense[0].name] / least[p.name]] for p in ours if timed.of(p.name)}}

    return derive
