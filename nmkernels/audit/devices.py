"""What the arithmetic and the memory of a device do: a table of GPUs with the source of each number, and this machine, measured.

Sources of the table: NVIDIA's data sheets for peaks, memory and power (A100 80 GB SXM, H100 SXM, H200 SXM). What is reached:

* dense 16-bit GEMMs on H100 and H200: about 650 to 800 of 989 TFLOP/s, as the clock falls under load; 700 is taken. On an A100 250 of
  312.
* 2:4 GEMMs against dense ones. The instruction has twice the rate, but power follows the multiplications that are done, so the
  clock falls further. H100: 1.20 to 1.22 at 8192³ with cuSPARSELt (NVIDIA/CUDALibrarySamples issue 203), about 1.2 with CUTLASS's example
  62 (NVIDIA/cutlass issue 2229); this package aims at 1.25, at best 1.4. A100: 1.3 to 1.66 (pytorch pull request 90119, 768×3072
  and larger); 1.4 is taken. An H20, which power does not limit, reaches 2.0 with the same instruction.
* memory: 85 % of the peak bandwidth, the aim of this package's kernels on these devices; the best published packing kernel (xFormers on
  an A100) reaches 38 %.
* the beginning and end of a kernel: 3 µs, assumed.
* collectives between H100 or H200 GPUs of HGX nodes, as NCCL's "bus bandwidth" of a GPU: (S-1)/S · bytes / seconds of an all-gather or
  a reduce-scatter on S GPUs. In a node 360 GB/s of NVLink's 450 in one direction (900 both ways, NVIDIA's data sheet), what NCCL's
  maintainers expect (NVIDIA/nccl-tests issue 326; all-gather 350, reduce-scatter 360 in NVIDIA/nccl issue 1281). Between nodes with an
  InfiniBand NDR card of 400 Gb/s per GPU, of which 46 to 48 GB/s are reached (NVIDIA/nccl-tests issue 290), the eight cards of a node
  could feed the rings as fast as NVLink; 200 GB/s were seen with 256 H100 (NVIDIA/nccl issue 1218) and are taken; 50 GB/s, one card's,
  is what torch's inductor starts from (torch/_inductor/comm_analysis.py).
* a step of a ring: 3.4 µs in a node, 14 µs between nodes, and 8.4 µs once: NCCL's own constants (tuning.cc, protocol Simple).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

HALVES = ("float16", "bfloat16")


def kind(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Links:
    """What collectives between GPUs reach, bytes per second of each GPU.

    Args:
        node: rings in one node.
        across: rings over several nodes, at worst, as taken, and at best.
        nic: a GPU's own network card.
        start, hop, far: seconds of a ring beside that: once, for each step in a node, and for each step between two.
    """

    node: float
    across: tuple[float, float, float]
    nic: float
    start: float = 8.4e-6
    hop: float = 3.4e-6
    far: float = 14e-6


HGX = Links(360e9, (50e9, 200e9, 360e9), 47e9)
"""H100 and H200: NVLink 4 with NVSwitch in a node, InfiniBand NDR between nodes."""


@dataclass(frozen=True, eq=False)
class Device:
    """What a prediction takes a device to do.

    Args:
        name: in words.
        power: watts that it may draw, None where that is not told.
        bandwidth: of the memory, bytes per second.
        share, passes, estimate: the part of it that is reached by GEMMs, by passes over a weight, and by MVUE.
        dense: floating-point operations per second of dense GEMMs, by dtype.
        ratio: how many times as fast as dense a GEMM with a sparse operand is where arithmetic bounds it, by role.
        low, high: what ``ratio`` may really be.
        launch, call: seconds beside that, of a dense GEMM and of one of this package's kernels.
        rows, cols: the sparse operand must be a multiple of these; 1 for any.
        few: up to so many tokens, by dtype, kernels read any N:M as it is stored; None: for any number of tokens, with ``ratio``.
        links: to other GPUs, None where they are not known.
        capacity: bytes of the memory.
        transposed: dgrad can multiply the weight packed along its rows; else it needs another mask along its columns, packed too.
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
    links: Links | None = None
    capacity: float = math.inf

    def rate(self, dtype: torch.dtype) -> float:
        """Of dense GEMMs, operations per second; the slowest known for a dtype that is not."""
        return self.dense.get(kind(dtype), min(self.dense.values()))

    def at(self, ratio: float) -> Device:
        """The same with sparse GEMMs so many times as fast as dense ones."""
        return replace(self, ratio=dict.fromkeys(self.ratio, ratio))


def _gpu(
    name: str,
    bandwidth: float,
    half: float,
    single: float,
    ratio: tuple[float, float, float],
    power: float,
    rows: int,
    capacity: float,
    links: Links | None = None,
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
        links=links,
        capacity=capacity,
    )


DEVICES = {
    # float32 as torch multiplies it by default, without TF32; tiles of the metadata are 16 rows for mma.sp, 64 for wgmma.sp
    "A100": _gpu("A100 80 GB SXM", 2.04e12, 250e12, 19.5e12, (1.3, 1.4, 1.66), 400, 16, 80e9),
    "H100": _gpu("H100 SXM", 3.35e12, 700e12, 67e12, (1.2, 1.25, 1.4), 700, 64, 80e9, HGX),
    "H200": _gpu("H200 SXM", 4.8e12, 700e12, 67e12, (1.2, 1.25, 1.4), 700, 64, 141e9, HGX),
}
"""The GPUs that can be predicted without having one."""


def named(name: str) -> Device | None:
    """The GPU of the table that ``name`` means, ``"H200"`` or what its driver calls itself; None where none is."""
    words = name.upper().replace("-", " ").replace("_", " ").split()
    # the PCIe cards of the same names have other clocks and memories
    found = [device for key, device in DEVICES.items() if key in words and "PCIE" not in words]
    return found[0] if found else None
