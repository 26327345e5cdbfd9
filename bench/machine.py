"""What this machine can do at most: its last-level cache, and the rate of torch's matrix product."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from statistics import median

import torch

from .device import median_seconds
from .registry import DTYPES
from .timing import on_cpu

SIDE = 2048
"""Rows and columns of the product whose rate counts as the machine's: large enough to reach it, small enough to measure in a second."""

SIDE_CUDA = 8192
"""The same on a GPU."""

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def last_level_cache(device: str, caches: Path = CACHES) -> int:
    """Bytes of the largest cache; 0 where the system does not tell."""
    if device.startswith("cuda"):
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    return max((_bytes(path.read_text()) for path in caches.glob("index*/size")), default=0)


def _bytes(text: str) -> int:
    text = text.strip()
    unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
    return int(text.rstrip("KMG")) * unit


@cache
def matmul_rate(dtype: str, device: str) -> float:
    """Floating-point operations per second of a square product in torch, the median of seven, measured once per run."""
    cuda = device.startswith("cuda")
    side = SIDE_CUDA if cuda else SIDE
    a = torch.randn(side, side, device=device).to(DTYPES[dtype])
    for _ in range(2):
        a @ a
    took = median_seconds(lambda: a @ a, device) if cuda else median(on_cpu(lambda: a @ a) for _ in range(7))
    return 2 * side**3 / took
