"""The limits of this machine: its last-level cache, the rates of a copy and of torch's GEMM, also as cases for the figures; the roofline.

The roofline of a GEMM is bytes over the bandwidth, or FMAs over their rate, whichever takes longer. The bandwidth is the best of the same
rounds, wherever the caches left the data: of a torch op that only reads as many bytes as ours, or of a GEMM, which may reach more on a
large weight. The rate of FMAs is that of torch's fastest large GEMM in the same run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F

from ..registry import ALLOWED, DTYPES, SHARE, Grid, Provider, Spec, Work, family
from ..timing import Timed, median_seconds, on_cpu
from . import _ours
from .dense import HOPELESS, onednn

SIDE = 2048
"""Size of the square GEMM whose rate counts as the machine's: large enough to reach it, small enough to take a second."""

SIDE_CUDA = 8192
"""The same on a GPU."""

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def last_level_cache(device: str, caches: Path = CACHES) -> int:
    """Bytes of the largest cache; 0 if the system does not report it."""
    if device.startswith("cuda"):
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    return max((_bytes(path.read_text()) for path in caches.glob("index*/size")), default=0)


def _bytes(text: str) -> int:
    text = text.strip()
    unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
    return int(text.rstrip("KMG")) * unit


def has_amx() -> float:
    """1 if the CPU multiplies bf16 tiles (AMX) and torch may use them, else 0; recorded since bounds depend on it."""
    known = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return float(bool(known and known()))


@cache
def matmul_rate(dtype: str, device: str) -> float:
    """FLOP/s of a square GEMM in torch: the median of seven, measured once per run."""
    cuda = device.startswith("cuda")
    side = SIDE_CUDA if cuda else SIDE
    a = torch.randn(side, side, device=device).to(DTYPES[dtype])
    for _ in range(2):
        a @ a
    took = median_seconds(lambda: a @ a, device) if cuda else median(on_cpu(lambda: a @ a) for _ in range(7))
    return 2 * side**3 / took


FMA_SIDES = (1024, 1536)
"""Sizes of the square GEMMs of which the fastest counts as the rate of the CPU's FMAs."""


@cache
def fma_rate(dtype: str) -> float:
    """FLOP/s of torch's fastest large GEMM on the CPU, with MKL or oneDNN; in 16 bits float32's if that is faster; measured once per run.

    A well-written dense GEMM reaches 75 to 90 % of the FMA peak, so a share of this rate may exceed 1 accordingly.
    """
    best = fma_rate("float32") if dtype != "float32" else 0.0
    for side in FMA_SIDES:
        a = torch.randn(side, side).to(DTYPES[dtype])
        for call in (lambda a=a: F.linear(a, a), lambda a=a: onednn(a, a)):
            if not _ours.works(call, "cpu"):
                continue
            took = on_cpu(call)
            if took < HOPELESS * 2 * side**3 / max(best, 1.0):
                took = median(on_cpu(call) for _ in range(5))
            best = max(best, 2 * side**3 / took)
    return best


@family(
    "copy",
    grids=(
        Grid(("4096x11008",), ("",), ("float32", "bfloat16")),
        Grid(_ours.STREAM, ("",), ("bfloat16",), on="cuda"),
    ),
)
def copy(spec: Spec, device: str) -> Work:
    """``copy_`` of a matrix, counted as one read and one write."""
    a = _ours.normal(spec.rows, spec.cols, device=device, dtype=spec.torch_dtype)
    b = torch.empty_like(a)
    return Work([Provider("torch", lambda: b.copy_(a), 2 * a.nbytes)])


@family(
    "matmul",
    grids=(
        Grid(("2048x2048",), ("",), ("float32", "bfloat16"), (2048,)),
        Grid(("8192x8192",), ("",), ("bfloat16",), (8192,), on="cuda"),
    ),
)
def matmul(spec: Spec, device: str) -> Work:
    """``x @ w`` with tokens x rows and rows x cols."""
    x = _ours.normal(spec.tokens, spec.rows, device=device, dtype=spec.torch_dtype)
    w = _ours.normal(spec.rows, spec.cols, device=device, dtype=spec.torch_dtype)
    moved = (x.numel() + w.numel() + spec.tokens * spec.cols) * x.element_size()
    return Work([Provider("torch", lambda: x @ w, moved, 2 * spec.tokens * spec.rows * spec.cols)])


# ---- the roofline

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
