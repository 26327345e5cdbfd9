"""The share of the memory bandwidth that each memory-bound kernel can reach, and its bound: a PREDICTION, nothing here was measured.

``python -m bench.memory_account`` compiles the kernels, counts the instructions of a thread on its main path and writes
``bench/results/memory_account.csv``; ``--check`` only compares; with words, only the kernels whose names contain one are printed.

The main path is the shortest one from a thread's first instruction to its EXIT that reads and writes its share of global memory: whole
tiles and aligned rows, without the code for odd groups. Rates are per multiprocessor and clock, in warp instructions; four are issued:

* half-rate pipe 2: integer add, logic, shifts, compare, minimum, maximum, selection (CUDA C++ programming guide, throughput of native
  arithmetic instructions: 64 results), also of floats; ``PRMT``, ``F2FP`` and minima of pairs are counted here;
* float add and multiply-add: 4 on sm_90, 2 on sm_80; integer multiply-add (``IMAD``, also as a move) 2, of those with a 64-bit result 1;
* float64 2 on sm_90, 1 on sm_80; special functions, bit counts and conversions to and from 64 bits 1/2 (guide: 16 results);
* loads, stores and shuffles 1, and 128 bytes between registers and shared memory or L1; bank conflicts are ignored.

Assumptions that only hardware can confirm: the warps that fit can keep every pipe full; clocks under load are 1.41 GHz (A100) and 1.75 GHz
(H100, H200); a copy reaches nine tenths of 2.04, 3.35 and 4.8 TB/s, and ``share`` is relative to that; a read takes 800 ns under load, and
each thread has the reads of one iteration in flight.
"""

from __future__ import annotations

import argparse
import heapq
import re
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from . import cuda_resources as resources
from . import rows as tidy
from . import wgmma_account as gemms
from .rows import RESULTS

PATH = RESULTS / "memory_account.csv"
REWRITE = "python -m bench.memory_account"
LATENCY = 800e-9


@dataclass(frozen=True)
class Gpu:
    """A GPU; ``memory`` is the rate of a copy, ``shared`` the shared memory of a multiprocessor."""

    name: str
    arch: str
    processors: int
    clock: float
    memory: float
    shared: int


GPUS = (
    Gpu("A100", "sm_80", 108, 1.41e9, 0.9 * 2.04e12, 164 * 1024),
    *(Gpu(name, "sm_90", gemms.PROCESSORS, gemms.CLOCK, memory, 228 * 1024) for name, memory in gemms.MEMORY.items()),
)


@dataclass(frozen=True)
class Case:
    """A kernel and the work of one of its threads on the main path."""

    what: str
    source: str
    kernel: str
    threads: int
    """Threads of a block."""
    elements: int
    read: int
    """Bytes of global memory, without ``common``."""
    written: int
    common: int = 0
    """Bytes that all threads read (a seed, a scale), which come from the caches."""
    rounds: int = 1
    """Iterations of a loop, in each of which a thread reads ahead for the next."""


B, F = "bf16", "float"
TILES, WAYS, DENSE = "pack_tiles_kernel<{}, 2:4, {}, {}>", "true, true, false", "true, false, true"
CASES = (
    *(Case(f"mask {t}", "groups.cu", f"groups_kernel<Mask, {t}, 2:4>", 256, 64 // size, 64, 64 // size) for t, size in ((B, 2), (F, 4))),
    *(Case(f"prune {t}", "groups.cu", f"groups_kernel<Prune, {t}, 2:4>", 256, 64 // size, 64, 64) for t, size in ((B, 2), (F, 4))),
    *(
        Case(f"soft threshold {t}", "groups.cu", f"groups_kernel<SoftThreshold, {t}, 2:4>", 256, 64 // size, 64, 64)
        for t, size in ((B, 2), ("fp16", 2), (F, 4))
    ),
    Case("scale of the soft threshold bf16", "threshold.cu", "scale_sums_kernel<bf16, 2:4>", 256, 16, 32, 0),
    Case("scale of the soft threshold float", "threshold.cu", "scale_sums_kernel<float, 2:4>", 256, 16, 64, 0),
    Case("transposable mask bf16", "transposable.cu", "transposable_kernel<bf16>", 256, 32, 64, 32),
    Case("compress bf16", "compress.cu", "pack_rows_kernel<bf16, bf16, 2:4, 0>", 256, 32, 64, 36),
    Case("compress float to bf16", "compress.cu", "pack_rows_kernel<float, bf16, 2:4, 0>", 256, 16, 64, 18),
    Case("pack by soft threshold bf16", "compress.cu", "pack_rows_kernel<bf16, bf16, 2:4, 3>", 256, 32, 64, 36, 4),
    Case("pack by soft threshold fp16", "compress.cu", "pack_rows_kernel<fp16, fp16, 2:4, 3>", 256, 32, 64, 36, 4),
    Case("pack by soft threshold float to bf16", "compress.cu", "pack_rows_kernel<float, bf16, 2:4, 3>", 256, 16, 64, 18, 4),
    Case("pack by columns bf16", "pack_tiles.cu", TILES.format("bf16, bf16", 0, "false, true, false"), 256, 32, 64, 36),
    Case("pack rows and dense float to bf16", "pack_tiles.cu", TILES.format("float, bf16", 0, DENSE), 256, 16, 64, 52),
    Case("pack by soft threshold and dense float to bf16", "pack_tiles.cu", TILES.format("float, bf16", 3, DENSE), 256, 16, 64, 52, 4),
    Case("pack both ways, transposable bf16", "pack_tiles.cu", TILES.format("bf16, bf16", 1, WAYS), 256, 32, 64, 72),
    Case("pack both ways, transposable float to bf16", "pack_tiles.cu", TILES.format("float, bf16", 1, WAYS), 256, 16, 64, 40),
    Case("pack both ways, a given mask bf16", "pack_tiles.cu", TILES.format("bf16, bf16", 2, WAYS), 256, 32, 96, 72),
    Case("decompress 16 bits", "decompress.cu", "decompress_kernel<unsigned short, 2:4>", 256, 32, 36, 64),
    Case("MVUE along rows bf16", "mvue.cu", "mvue_strips_kernel<bf16>", 256, 16, 32, 18, 16),
    Case("MVUE along rows fp16", "mvue.cu", "mvue_strips_kernel<fp16>", 256, 16, 32, 18, 16),
    Case("MVUE along rows float", "mvue.cu", "mvue_strips_kernel<float>", 256, 16, 64, 34, 16),
    Case("MVUE along tokens bf16", "mvue.cu", "mvue_columns_kernel<bf16, true>", 256, 256, 512, 288, 16, 8),
    Case("MVUE along tokens fp16", "mvue.cu", "mvue_columns_kernel<fp16, true>", 256, 256, 512, 288, 16, 8),
    Case("MVUE along tokens float", "mvue.cu", "mvue_columns_kernel<float, true>", 256, 128, 512, 272, 16, 8),
)
"""The memory-bound kernels of training: 2:4, the usual dtypes."""

PIPES = {
    "half_rate": "BMSK F2FP FMNMX FMNMX3 FSEL FSET FSETP HMNMX2 HSETP2 I2IP IABS IADD IADD3 IMNMX ISETP LEA LOP3 MOV P2R PLOP3 PRMT R2P "
    "SEL SGXT SHF VHMNMX VIADD VIADDMNMX VIMNMX VIMNMX3",
    "multiplies": "IMAD",
    "floats": "FADD FFMA FMUL HADD2 HFMA2 HMUL2",
    "doubles": "DADD DFMA DMUL DSETP",
    "special": "BREV F2F F2I FLO FRND I2F MUFU POPC",
    "port": "ATOMS LD LDG LDGSTS LDS LDSM ST STG STS STSM SHFL",
}
"""The pipe of each instruction; all others (branches, barriers, uniform ones) take only an issue slot."""
PIPE_OF = {op: pipe for pipe, ops in PIPES.items() for op in ops.split()}


@dataclass(frozen=True)
class Counts:
    """Instructions of a thread by pipe; ``port`` in clocks of a warp."""

    issue: int
    half_rate: int
    multiplies: int
    floats: int
    doubles: int
    special: int
    port: int


@dataclass(frozen=True)
class Share:
    """One kernel on one GPU; counts are per element."""

    what: str
    gpu: str
    elements: int
    """Registers of a thread."""
    bytes: float
    """Bytes read and written."""
    issue: float
    half_rate: float
    multiplies: float
    floats: float
    doubles: float
    special: float
    port: float
    registers: int
    blocks: int
    """Threads that fit on a multiprocessor, of ``threads``."""
    threads: int
    busy: str
    """The utilisation of each resource that would saturate the memory."""
    binds: str
    share: float
    """The share of the rate of a copy."""
    digest: str = ""
    """``cuda_resources.digest`` of the kernel's sources."""


class NoWayError(ValueError):
    """No path through a kernel reads and writes the requested bytes."""


@dataclass(order=True, frozen=True)
class _Place:
    """The state of a path: the instruction, bytes read and written, and where diverged threads reconverge."""

    at: int
    read: int = 0
    written: int = 0
    meet: tuple[tuple[str, int], ...] = ()


def way(code: str, read: int, written: int) -> list[str]:
    """The names of the instructions on the shortest path that reads and writes this many bytes of global memory."""
    lines = [(int(at, 16), when, op, args) for at, when, op, args in resources.INSTRUCTION.findall(code)]
    index = {line[0]: i for i, line in enumerate(lines)}
    start = _Place(0)
    least, before, todo = {start: 0}, {start: start}, [(0, start)]
    while todo:
        cost, place = heapq.heappop(todo)
        if place.at == len(lines):  # past the last instruction: an EXIT was taken
            if (place.read, place.written) != (read, written):
                continue
            found = []
            while place != start:
                place = before[place]
                found.append(lines[place.at][2])
            return [op for op in reversed(found) if op != "NOP"]
        if cost > least[place]:
            continue
        for then in _next(lines, index, place):
            length = cost + (lines[place.at][2] != "NOP")
            if then.read <= read and then.written <= written and length < least.get(then, length + 1):
                least[then], before[then] = length, place
                heapq.heappush(todo, (length, then))
    raise NoWayError(f"no path through the kernel reads {read} and writes {written} bytes")


def _next(lines: list[tuple[int, str, str, str]], index: dict[int, int], place: _Place) -> list[_Place]:
    """The possible next states of a thread."""
    _, when, op, args = lines[place.at]
    kind, meet = op.split(".")[0], dict(place.meet)
    target = re.findall(r"0x([0-9a-f]+)", args)

    def to(at: int, read: int = 0, written: int = 0) -> _Place:
        return _Place(at, place.read + read, place.written + written, tuple(sorted(meet.items())))

    on = to(place.at + 1)
    taken = on
    if kind in resources.LOADS:
        taken = to(place.at + 1, read=resources._bits(op) // 8)
    elif kind in resources.STORES:
        taken = to(place.at + 1, written=resources._bits(op) // 8)
    elif kind == "EXIT":
        taken = to(len(lines))
    elif kind in ("BRA", "CALL"):  # sm_80 leaves loops by a call; a call that returns (RET) is not a path
        taken = to(index[int(target[-1], 16)])
        if taken.at == place.at:
            return []  # the end of a kernel
        if re.match(r"!?U?P\d|UR", args):
            return [taken, on]
    elif kind == "BSSY":
        meet[args.split(",")[0]] = index[int(target[-1], 16)]
        taken = on = to(place.at + 1)
    elif kind == "BSYNC":
        at = meet.pop(args.strip(), place.at + 1)
        taken = to(at)
    elif kind in ("RET", "BRX", "JMP"):
        return [on] if when else []
    return [taken, on] if when else [taken]


def counts(ops: list[str]) -> Counts:
    """Count the instructions by pipe."""
    clocks: Counter[str] = Counter()
    for op in ops:
        pipe = PIPE_OF.get(op.split(".")[0], "")
        clocks[pipe] += _port(op) if pipe == "port" else 2 if op.startswith(("IMAD.WIDE", "IMAD.HI")) else 1
    return Counts(len(ops), **{pipe: clocks[pipe] for pipe in PIPES})


def _port(op: str) -> int:
    """Clocks of a warp's access, at 128 bytes each; the last part of ``LDSM`` is the number of 8 x 8 matrices."""
    if op.startswith("LDSM"):
        return int(last) if (last := op.split(".")[-1]).isdigit() else 1
    return max(1, resources._bits(op) // 32)


def blocks(gpu: Gpu, threads: int, registers: int, shared: int) -> int:
    """How many fit on a multiprocessor: registers are allocated in units of 8 per thread, and a block has 1 KB for the system."""
    shared += 1024 if gpu.arch == "sm_80" else 0  # elsewhere the kernel's number has it
    return min(65536 // (-(-registers // 8) * 8 * threads), 2048 // threads, gpu.shared // shared if shared else 32, 32)


def share(case: Case, gpu: Gpu, of: Counts, registers: int, shared: int) -> Share:
    """The predicted share of a kernel with these counts."""
    moved = (case.read + case.written) / case.elements
    warps = gpu.memory / moved / case.elements / 32 / gpu.processors / gpu.clock  # elements per clock that saturate the memory
    resident = blocks(gpu, case.threads, registers, shared)
    hopper = gpu.arch != "sm_80"
    busy = {
        "issue": warps * of.issue / 4,
        "half-rate pipe": warps * of.half_rate / 2,
        "multiply-add": warps * max(of.multiplies / 2, (of.multiplies + of.floats) / (4 if hopper else 2)),
        "float64": warps * of.doubles / (2 if hopper else 1),
        "special": warps * of.special * 2,
        "loads and stores": warps * of.port,
        "reads under way": gpu.memory / gpu.processors * LATENCY * case.read / (case.read + case.written)
        / (resident * case.threads * case.read / case.rounds),
    }  # fmt: skip
    binds = max(busy, key=lambda name: busy[name])
    return Share(
        what=case.what,
        gpu=gpu.name,
        elements=case.elements,
        bytes=round(moved, 3),
        **{name: round(count / case.elements, 2) for name, count in asdict(of).items()},
        registers=registers,
        blocks=resident,
        threads=case.threads,
        busy=" ".join(f"{name.replace(' ', '-')}:{value:.2f}" for name, value in busy.items() if value >= 0.005),
        binds=binds if busy[binds] > 1 else "memory",
        share=round(min(1.0, 1 / busy[binds]), 2),
    )


def compiled(words: list[str] | None = None) -> list[Share]:
    """The account of every kernel, or of those whose names contain one of the words."""
    cases = [case for case in CASES if not words or any(word in case.what for word in words)]
    sources = {path.name: path for path in resources.sources()}
    jobs = sorted({(case.source, gpu.arch) for case in cases for gpu in GPUS})
    with ThreadPoolExecutor(2) as pool:
        made = dict(zip(jobs, pool.map(lambda job: resources.machine_code(sources[job[0]], job[1]), jobs), strict=True))
    found = []
    for case in cases:
        of = {
            arch: counts(way(made[case.source, arch][case.kernel], case.read + case.common, case.written))
            for arch in dict.fromkeys(gpu.arch for gpu in GPUS)
        }
        for gpu in GPUS:
            (used,) = (k for k in resources.compiled(sources[case.source], gpu.arch) if k.kernel == case.kernel)
            found.append(replace(share(case, gpu, of[gpu.arch], used.registers, used.shared_bytes), digest=used.digest))
    return found


def save(shares: Iterable[Share], path: Path = PATH) -> None:
    """Write the table."""
    tidy.save([asdict(s) for s in shares], list(Share.__dataclass_fields__), path)


def table_rows(shares: Iterable[Share]) -> list[dict[str, str]]:
    """The shares as lines of the table."""
    return [{name: str(value) for name, value in asdict(s).items()} for s in shares]


def main(argv: list[str] | None = None, path: Path = PATH) -> int:
    """Compile, count, write and print; with ``--check`` write nothing and return 1 if the table differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", help="print only the kernels whose names contain one of these; write nothing")
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if the table is not up to date")
    args = parser.parse_args(argv)
    here = resources.tools()
    if not here.ok:
        parser.error(here.reason)
    shares = compiled(args.words)
    if args.check:
        same = table_rows(shares) == tidy.load(path)
        print("up to date" if same else f"{path.name} is not up to date; run: {REWRITE}")
        return 0 if same else 1
    for s in shares:
        print(f"{s.what}, {s.gpu}: {s.issue} slots, {s.half_rate} half-rate, {s.share:.0%} of a copy, {s.binds}; {s.busy}")
    if not args.words:
        save(shares, path)
        print(f"predictions, nothing was measured: {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
