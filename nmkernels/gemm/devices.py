"""Arithmetic and memory speeds of GPUs, with the source of each number.

NVIDIA's data sheets give peaks, memory and power (A100 80 GB SXM, H100 SXM, H200 SXM). Achieved values:

* dense 16-bit GEMMs on an H100: 740 to 790 of 989 TFLOP/s (rows of this package, 1024 to 16384 tokens), as the clock falls under load; we
  use 770, for the H200 too, which has the same processor. On an A100 250 of 312.
* 2:4 GEMMs against dense ones. The instruction has twice the rate, but draws more power, so the clock falls further. H100: 1.26 to 1.53 in
  this package's rows (1024 to 16384 tokens, `wgmma.sp`; cuSPARSELt 1.30 to 1.55); published are 1.20 to 1.22 at 8192³ with cuSPARSELt
  (NVIDIA/CUDALibrarySamples issue 203) and about 1.2 with CUTLASS's example 62 (NVIDIA/cutlass issue 2229); we use 1.4. A100: 1.3 to 1.66
  (pytorch pull request 90119, 768×3072 and larger); we use 1.4. An H20, which is not power-limited, reaches 2.0 with the same instruction.
* memory: 85 % of the peak bandwidth. On an H100 a copy reaches 89 %, this package's passes over a weight 71 to 90, and its estimate of a
  gradient 76 to 90; the best published packing kernel (xFormers on an A100) reaches 38 %.
* launch overhead of a kernel: 3 µs, assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from .problem import plain

HALVES = ("float16", "bfloat16")


@dataclass(frozen=True, eq=False)
class Device:
    """What predictions assume about a device.

    Args:
        name: full name.
        power: power limit in watts, None if unknown.
        bandwidth: memory bandwidth in bytes per second.
        share, passes, estimate: the fraction of the bandwidth that GEMMs, passes over a weight, and MVUE reach.
        dense: floating-point operations per second of dense GEMMs, by dtype.
        ratio: speed-up of a compute-bound GEMM with a sparse operand over dense, by role.
        low, high: plausible range of ``ratio``.
        launch, call: fixed seconds per dense GEMM and per call of this package's kernels.
        rows, cols: the sizes of the sparse operand must be multiples of these.
        few: by dtype, the largest number of tokens for which kernels read any N:M directly; None if there is no limit and ``ratio`` holds.
        transposed: whether dgrad can use the weight packed along its rows; otherwise it needs a copy packed along its columns.
    """

    name: str
    bandwidth: float
    dense: Mapping[str, float]
    ratio: Mapping[str, float]
    low: float
    high: float
    power: float | None = None
    share: float = 0.85
    passes: float = 0.85
    estimate: float = 0.85
    launch: float = 3e-6
    call: float = 3e-6
    rows: int = 1
    cols: int = 1
    few: Mapping[str, int] | None = field(default_factory=dict)
    transposed: bool = False

    def rate(self, dtype: torch.dtype) -> float:
        """Floating-point operations per second of dense GEMMs; for an unlisted dtype those of the slowest one."""
        return self.dense.get(plain(dtype), min(self.dense.values()))

    def at(self, ratio: float) -> Device:
        """A copy with the speed-up ``ratio`` for sparse GEMMs in every role."""
        return replace(self, ratio=dict.fromkeys(self.ratio, ratio))


def _gpu(
    name: str,
    bandwidth: float,
    half: float,
    single: float,
    ratio: tuple[float, float, float],
    power: float,
    rows: int,
) -> Device:
    low, taken, high = ratio
    return Device(
        name,
        bandwidth,
        {"float16": half, "bfloat16": half, "float32": single, "float64": single / 2},
        dict.fromkeys(("fprop", "dgrad", "wgrad"), taken),
        low,
        high,
        power,
        rows=rows,
        cols=64,
        few={"float16": 16, "bfloat16": 16, "float32": 4},
    )


DEVICES = {
    # float32 without TF32, torch's default; metadata tiles have 16 rows for mma.sp, 64 for wgmma.sp
    "A100": _gpu("A100 80 GB SXM", 2.04e12, 250e12, 19.5e12, (1.3, 1.4, 1.66), 400, 16),
    "H100": _gpu("H100 SXM", 3.35e12, 770e12, 67e12, (1.2, 1.4, 1.55), 700, 64),
    "H200": _gpu("H200 SXM", 4.8e12, 770e12, 67e12, (1.2, 1.4, 1.55), 700, 64),
}
"""The GPUs that predictions cover."""


def named(name: str) -> Device | None:
    """The entry of ``DEVICES`` for a name such as ``"H200"`` or a driver's device name; None if unknown."""
    words = name.upper().replace("-", " ").replace("_", " ").split()
    # PCIe cards of the same name have other clocks and memory
    found = [device for key, device in DEVICES.items() if key in words and "PCIE" not in words]
    return found[0] if found else None
