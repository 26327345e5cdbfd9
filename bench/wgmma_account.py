"""The cycles of the wgmma.sp kernel for each tile, and the resulting speed: a PREDICTION, nothing here was measured.

``python -m bench.wgmma_account`` compiles the kernel, counts the instructions of its main loop and writes
``bench/results/wgmma_account.csv``.

Assumptions that only hardware can confirm:

* a tensor core multiplies 4096 pairs of 2:4 per cycle in 16 bits and 2048 dense ones, counting zeros (NVIDIA's H100 whitepaper), and in 8
  bits twice as many of either;
* shared memory moves 128 bytes per cycle, operand reads and copies **together**. B is read once for every 64 rows of D. If copies were
  free, 256 x 192 would take 912 cycles instead of 1248;
* L2 delivers 32 bytes per cycle and multiprocessor, and data shared by a cluster of two once;
* a tile ends with rows * cols / 16 cycles without multiplication; four schedulers issue one instruction per cycle;
* the clock under load is 1.75 GHz on both cards, with 132 multiprocessors, and power is not a bound. Memory delivers nine tenths of 3.35
  and 4.8 TB/s.

``dense`` is a kernel of 128 x 256 tiles that never waits, at the same clock and of the same dtype, fp8 with fast accumulation: faster than
cuBLAS. If fp8 sums are promoted, one warpgroup adds while the other multiplies, which costs no cycles here.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from . import cuda_resources as resources
from . import rows as tidy
from .rows import RESULTS

PATH = RESULTS / "wgmma_account.csv"
SOURCES = tuple(resources.SOURCES / "gemm" / name for name in ("wgmma_sp.cu", "wgmma_sp_8bit.cu"))
REWRITE = "python -m bench.wgmma_account"
SPARSE, DENSE, SHARED, FROM_L2 = 4096, 2048, 128, 32
CLOCK, PROCESSORS = 1.75e9, 132
MEMORY = {"H100": 0.9 * 3.35e12, "H200": 0.9 * 4.8e12}
DEPTH = 64
"""Elements of k in a slab in 16 bits; twice as many in 8 bits, of as many bytes."""
KINDS = {
    "bf16": "bf16",
    "EightBits<e4m3, e4m3, false>": "e4m3",
    "EightBits<e4m3, e4m3, true>": "e4m3 promoted",
    "EightBits<e5m2, e5m2, false>": "e5m2",
    "EightBits<e5m2, e5m2, true>": "e5m2 promoted",
    "EightBits<signed char, signed char, false>": "int8",
}
"""The listed kernels, by type; others cost the same as one of these. e5m2 is listed only for wgrad."""
SHAPES = ((8192, 8192, 8192), (14336, 8192, 4096), (4096, 8192, 14336), (4096, 1024, 4096), (14336, 64, 4096))
"""(out, tokens, in): a square GEMM, Llama-3-8B's FFN both ways, fewer tokens, few."""


@dataclass(frozen=True)
class Tile:
    """One tile of the kernel; cycles are of one slab: 64 of k in 16 bits, 128 in 8 bits."""

    kind: str
    """The dtype of the operands, and whether sums are promoted."""
    tile: str
    by_column: str
    rows: int
    cols: int
    cluster: int
    stages: int
    multiply: int
    """Cycles of the tensor cores."""
    reads: int
    """Cycles of shared memory for operands."""
    writes: int
    """Cycles of shared memory for copies."""
    l2: int
    """Cycles of L2 for copies."""
    issue: int
    """Instructions of a scheduler, from the machine code of the main loop: two multiplying warps."""
    cycles: int
    """The maximum of these, with those of shared memory added together."""
    share: float
    """The share of the speed of sparse tensor cores."""
    over_dense: float
    h100: str
    """Predicted TFLOP/s of the shapes, counting zeros."""
    h200: str
    digest: str = ""
    """``cuda_resources.digest`` of the kernel's sources."""


def account(rows: int, cols: int, stages: int, cluster: int, by_column: bool, loop: int, kind: str = "bf16") -> Tile:
    """The account of a tile whose main loop has this many instructions per slab."""
    size = 2 if kind == "bf16" else 1
    dense, values, words = cols * DEPTH * 2, rows * DEPTH, rows * DEPTH // 4 // size
    multiply, reads = rows * cols * DEPTH / SPARSE, (rows / 64 * dense + values + words) / SHARED
    writes, l2, issue = (dense + values + words) / SHARED, (dense / cluster + values + words) / FROM_L2, 2 * loop
    cycles = max(multiply, reads + writes, l2, issue)
    ratio = rows * cols * DEPTH / DENSE / cycles
    speeds = [
        " ".join(f"{'x'.join(map(str, shape))}:{predicted(rows, cols, cluster, cycles, *shape, memory, size):.0f}" for shape in SHAPES)
        for memory in MEMORY.values()
    ]
    return Tile(
        kind=kind, tile=f"{rows}x{cols}", by_column=str(by_column), rows=rows, cols=cols, cluster=cluster, stages=stages,
        multiply=round(multiply), reads=round(reads), writes=round(writes), l2=round(l2), issue=issue, cycles=round(cycles),
        share=round(multiply / cycles, 3), over_dense=round(ratio, 2), h100=speeds[0], h200=speeds[1],
    )  # fmt: skip


def predicted(rows: int, cols: int, cluster: int, cycles: float, out: int, tokens: int, k: int, memory: float, size: int = 2) -> float:
    """TFLOP/s of a GEMM without split k, of elements of ``size`` bytes: bound by its busiest multiprocessor, or by memory."""
    rounds = -(-(-(-out // (rows * cluster)) * -(-tokens // cols)) // (PROCESSORS // cluster))
    busy = (rounds * (k * size / 2 / DEPTH * cycles + rows * cols / 16) + 1500) / CLOCK
    delivered = (out * k * (size / 2 + 0.125) + tokens * k * size + out * tokens * 2) / memory
    return 2 * out * tokens * k / max(busy, delivered) / 1e12


def loops(sass: str) -> dict[str, int]:
    """Instructions per slab in the main loop of each kernel, by its mangled name; the loop has two slabs."""
    found = {}
    for part in sass.split("Function : ")[1:]:
        lines = [(int(at, 16), op, args) for at, _, op, args in resources.INSTRUCTION.findall(part)]
        multiplies = [at for at, op, _ in lines if op.startswith(("HGMMA", "QGMMA", "IGMMA"))]
        if not multiplies:
            continue
        back = [(int(to[1], 16), at) for at, op, args in lines if op == "BRA" and (to := re.search(r"0x([0-9a-f]+)", args))]
        around = [(to, at) for to, at in back if to < multiplies[0] and at > multiplies[-1]]
        first, last = min(around, key=lambda jump: jump[1] - jump[0])  # the outer loop is over tiles
        found[part.split()[0]] = sum(first <= at <= last for at, _, _ in lines) // 2
    return found


def compiled(sources: Sequence[Path] = SOURCES) -> list[Tile]:
    """The account of every tile of the kernels in these files."""
    made = []
    for source in sources:
        compiler = resources._compiler()
        with tempfile.TemporaryDirectory() as folder:
            cubin = Path(folder) / "made.cubin"
            resources._run(compiler, *resources._flags(source), "-arch=sm_90a", "-cubin", "-o", str(cubin), str(source))
            tiles = tiles_of(loops(resources._run(str(resources._tool("cuobjdump")), "-sass", str(cubin))))
            made += [replace(t, digest=resources.digest(source)) for t in tiles]
    kinds = list(KINDS.values())
    return sorted(made, key=lambda t: (kinds.index(t.kind), t.by_column, -t.rows * t.cols))


def tiles_of(counted: dict[str, int]) -> list[Tile]:
    """The tiles of kernels by their mangled names, with the instructions of their main loops, but for those of stream-K."""
    made = []
    for mangled, name in resources.short_names(sorted(counted)).items():
        if name.startswith("wgmma_stream_k_kernel"):
            continue
        shape = re.fullmatch(r"wgmma_sp_kernel<(.*), (?:Wide|Eight)Tile<(\d+), (\d+), (\d+), (\d+)>, (true|false)>", name)
        assert shape, name
        kind, by_column = KINDS.get(shape[1], ""), shape[6] == "true"
        if kind and (by_column or not kind.startswith("e5m2")):
            rows, cols, stages, cluster = (int(shape[i]) for i in range(2, 6))
            made.append(account(rows, cols, stages, cluster, by_column, counted[mangled], kind))
    return made


def save(tiles: Iterable[Tile], path: Path = PATH) -> None:
    """Write the table."""
    tidy.save([asdict(t) for t in tiles], list(Tile.__dataclass_fields__), path)


def main(argv: list[str] | None = None, path: Path = PATH) -> int:
    """Compile, count, write and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.parse_args(argv)
    here = resources.tools()
    if not here.ok:
        parser.error(here.reason)
    tiles = compiled()
    save(tiles, path)
    for t in tiles:
        print(*(f"{name}={value}" for name, value in asdict(t).items()), sep="  ")
    print(f"predictions, nothing was measured: {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
