"""The roofline of a GEMM: bytes over the bandwidth, or FMAs over their rate, whichever takes longer.

The bandwidth is the best of the same rounds, wherever the caches left the data: of a torch op that only reads as many bytes as ours, or of
a GEMM, which may reach more on a large weight. The rate of FMAs is that of torch's fastest large GEMM in the same run.
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
    """A provider that reads this many bytes on all of torch's threads; a sum is torch's fastest op that only reads."""
    data = torch.ones(max(1, int(nbytes) // 8), dtype=torch.int64)
    return Provider(READ, lambda: data.sum(), data.nbytes)


Figures = dict[tuple[str, str], list[float]]


def shares(spec: Spec, ours: list[Provider], dense: list[Provider], read: Provider) -> Callable[[Timed], Figures]:
    """``Work.derive``: our and dense's share of the roofline, and the speed-up over dense that it allows.

    That is M/N if both are compute-bound, and dense bytes over compressed bytes if both are memory-bound.
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
