"""Resources of the compiled Triton kernels, without a GPU: registers, spills, widths of memory accesses, tensor cores.

``python -m bench.triton_resources`` compiles every case of ``triton_cases`` for sm_80 and sm_90, through the same functions as real calls,
and writes ``bench/results/triton_resources.csv``; with words, it only prints the cases whose names contain one of them. The rows depend on
the sources and on the versions of Triton and ptxas, not on the machine.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from importlib import util
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from nmkernels.capability import Probe

from .rows import RESULTS, load, save, typed
from .triton_cases import OpCall, cases

PATH = RESULTS / "triton_resources.csv"
ARCHITECTURES = (80, 90)
REWRITE = "python -m bench.triton_resources"
SHARED = {80: 163 * 1024, 90: 227 * 1024}
"""The most shared memory, in bytes, of a block on an A100 and an H100."""


@dataclass(frozen=True)
class Kernel:
    """One compiled kernel of one case: one line of the table."""

    kernel: str
    case: str
    arch: str
    registers: int
    """Per thread, of 255."""
    spills: int
    """Instructions that move registers to and from local memory."""
    stack_bytes: int
    shared_bytes: int
    widest_load: int
    """The widest read of global memory, in bits; at most 128 before Blackwell."""
    widest_store: int
    matrix_instructions: str
    """Tensor-core instructions with their number; empty if there are none."""
    overwrites: int
    """Machine instructions that may write a register while a wgmma still reads it."""
    inexact: str
    """Floating-point instructions that are not one operation rounded once, with their number; not listed for GEMMs."""
    instructions: int
    triton: str
    ptxas: str

    @property
    def key(self) -> tuple[str, str, str]:
        """Its key in the table."""
        return self.case, self.kernel, self.arch


def compiled(case: OpCall, arch: int) -> list[Kernel]:
    """The kernels that a call would launch on an architecture, in that order."""
    from bench.triton_compiling import recording
    from nmkernels.dispatch import implementations

    run = next(i.fn for i in implementations(case.op) if i.backend == "triton")
    with recording(arch) as kernels:
        run(*case.args)
    assert kernels, f"{case.op} {case.name} launches nothing"
    rows = list(dict.fromkeys(_read(k, f"{case.op} {case.name}", arch) for k in kernels))
    rows = [replace(k, inexact="") for k in rows] if "" in case.loose else rows
    assert len({k.kernel for k in rows}) == len(rows), f"{case.op} {case.name} compiles a kernel in two ways; split it into two cases"
    return rows


def missed(case: OpCall, arch: int, kernels: list[Kernel]) -> list[str]:
    """The requirements that the kernels of a case miss, as text; empty if they meet all."""
    found = []
    for k in kernels:
        if k.spills or k.stack_bytes:
            found.append(f"{k.kernel} spills: {k.spills} instructions, {k.stack_bytes} bytes of stack")
        if k.shared_bytes > SHARED[arch]:
            found.append(f"{k.kernel} takes {k.shared_bytes} bytes of shared memory, more than {SHARED[arch]}")
        if k.overwrites:
            found.append(f"{k.kernel} overwrites registers that a wgmma still reads: {k.overwrites} instructions")
        loose = [name for name in k.inexact.split()[::2] if not name.endswith(case.loose)]
        if loose:
            found.append(f"{k.kernel} is not exact: {' '.join(loose)}")
    main = next(k for k in kernels if case.kernel in ("", k.kernel))
    if main.widest_load < case.load:
        found.append(f"{main.kernel} reads {main.widest_load} bits at once, should read {case.load}")
    if main.widest_store < case.store:
        found.append(f"{main.kernel} writes {main.widest_store} bits at once, should write {case.store}")
    if case.matrix and not any(k.matrix_instructions for k in kernels):
        found.append(f"no tensor cores in {', '.join(k.kernel for k in kernels)}")
    return found


def _read(kernel: Any, case: str, arch: int) -> Kernel:
    import triton

    ptx = kernel.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "--dump-resource-usage", file.name)
        sass = _tool("nvdisasm", "-c", file.name)
    code = machine_code(sass)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert found, f"cuobjdump lists no resources of {kernel.metadata.name}: {usage}"
    registers, stack, local = map(int, found.groups())
    return Kernel(
        kernel=kernel.metadata.name,
        case=case,
        arch=f"sm_{arch}",
        registers=registers,
        spills=sum(i.op.split(".")[0] in ("LDL", "STL") for i in code),
        stack_bytes=stack + local,
        shared_bytes=kernel.metadata.shared,
        widest_load=widest("ld", ptx),
        widest_store=widest("st", ptx),
        matrix_instructions=matrix_instructions(ptx),
        overwrites=len(overwrites(code)),
        inexact=inexact(ptx),
        instructions=len(code),
        triton=triton.__version__,
        ptxas=_ptxas_version(),
    )


class Instruction(NamedTuple):
    """One machine instruction: its predicate (``P1``, ``!P0`` or nothing), the labels before it, and its address."""

    op: str
    operands: str
    predicate: str
    labels: tuple[str, ...]
    address: int


def machine_code(sass: str) -> list[Instruction]:
    """The machine instructions of a disassembly, without the padding at its end."""
    code: list[Instruction] = []
    labels: list[str] = []
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_x_\w+):", line):
            labels.append(label[1])
        found = re.match(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P[T\d]+)\s+)?([A-Z][\w.]*)\s*([^;]*)", line)
        if found and found[3] != "NOP":
            code.append(Instruction(found[3], found[4].strip(), found[2] or "", tuple(labels), int(found[1], 16)))
            labels = []
    return code


def overwrites(code: list[Instruction]) -> list[str]:
    """The instructions that may write a register that a wgmma in flight still reads as its left operand; the result would be undefined.

    wgmma (HGMMA in machine code) reads its registers asynchronously. ``gsb0`` closes a group of them, and after
    ``WARPGROUP.DEPBAR.LE gsb0, n`` at most the newest n groups are in flight. Every path through the kernel is followed with the registers
    that may still be read, each with the number of groups closed since, until nothing new is found.
    """
    if not any(i.op.startswith("HGMMA") for i in code):
        return []
    places = {label: at for at, i in enumerate(code) for label in i.labels}
    entered: dict[int, dict[int, int]] = {}
    ahead: list[tuple[int, dict[int, int]]] = [(0, {})]
    found: set[int] = set()
    while ahead:
        at, busy = ahead.pop()
        if at in entered:
            known = entered[at]
            busy = {r: min(known.get(r, age), busy.get(r, age)) for r, age in (known | busy).items()}
            if busy == known:
                continue
        entered[at] = dict(busy)
        while at < len(code):
            op, operands, predicate, *_ = code[at]
            if not busy.keys().isdisjoint(written(op, operands)):
                found.add(at)
            if op.startswith("HGMMA"):
                if left := re.match(r"R\d+, R(\d+), gdesc", operands):
                    busy.update(dict.fromkeys(range(int(left[1]), int(left[1]) + 4), -1))
                if operands.endswith("gsb0"):
                    busy = {r: min(age + 1, MOST_GROUPS) for r, age in busy.items()}
            elif op.startswith("WARPGROUP.DEPBAR"):
                newest = int(operands.split()[-1], 0)
                busy = {r: age for r, age in busy.items() if age < newest}
            elif op.startswith(("BRX", "JMX")):
                raise ValueError(f"{op} {operands}: this jump cannot be followed, so overwrites cannot be counted")
            elif op.startswith(("BRA", "CALL")):
                label = re.search(r"\.L_x_\w+", operands)
                assert label, f"{op} {operands} has no label"
                ahead.append((places[label[0]], dict(busy)))
            if op.startswith(("BRA", "RET", "EXIT")) and not predicate and not re.match(r"!?U?P\d", operands):
                break
            at += 1
            if at < len(code) and code[at].labels:
                ahead.append((at, busy))
                break
    return [f"{code[at].op} {code[at].operands}" for at in sorted(found)]


MOST_GROUPS = 64
"""More groups than WARPGROUP.DEPBAR can leave in flight, where counting stops."""


def written(op: str, operands: str) -> range:
    """The registers that a machine instruction writes; their number follows from its name."""
    first = re.match(r"(?:!?U?P[T\d], )*R(\d+)", operands)
    if not first or "SETP" in op or op.startswith(("HGMMA", "BAR", "WARPSYNC", "NANOSLEEP")):
        return range(0)
    if re.search(r"\.128|\.MT?88\.4|^[HI]MMA", op):
        count = 4
    else:
        pairs = re.search(r"\.WIDE|\.MT?88\.2|\.[FSU]?64|^CS2R$|^D(ADD|MUL|FMA)", op) and not op.startswith("SHF.")
        count = 2 if pairs else 1
    return range(int(first[1]), int(first[1]) + count)


def widest(way: str, ptx: str) -> int:
    """The widest access of global memory, in bits; ``way`` is ld or st. Copies to shared memory count as reads."""
    bits = [0]
    for qualifiers in re.findall(rf"\b{way}\.(?:\w+\.)*?global((?:[.:]+\w+)+)", ptx):
        width = re.search(r"\.[bsuf](\d+)$", qualifiers)
        several = re.search(r"\.v(\d)\b", qualifiers)
        bits.append(int(width[1]) * (int(several[1]) if several else 1) if width else 0)
    if way == "ld":
        sizes = re.findall(r"cp\.async\.c[ag]\.shared\.global\S* +\[[^\]]*\], *\[[^\]]*\], *(0x[0-9a-f]+|\d+)", ptx)
        bits += [8 * int(size, 0) for size in sizes]
    return max(bits)


def matrix_instructions(ptx: str) -> str:
    """The kinds of tensor-core instructions and their number."""
    return _counted(re.findall(r"wgmma\.mma_async|mma\.sync", ptx))


def inexact(ptx: str) -> str:
    """Contracted, approximate and flushing instructions, and those without a rounding mode, which ptxas might contract."""
    found = re.findall(r"^\s*(?:@!?%p\d+ +)?([a-z]\w*\.[\w.:]*\b(?:f16|f16x2|bf16|bf16x2|f32|f64))\b", ptx, re.M)
    wrong = re.compile(r"^(fma|mad)\.|\.(ftz|approx|full)\b|^(add|sub|mul|div|sqrt|rcp)\.(?!rn\.)")
    return _counted([name for name in found if wrong.search(name)])


def _counted(names: list[str]) -> str:
    return " ".join(f"{name} {number}" for name, number in sorted(Counter(names).items()))


def tools() -> Probe:
    """Whether the programs that read compiled kernels are installed: Triton's wheels have them, but not every build."""
    missing = [name for name in ("ptxas", "cuobjdump", "nvdisasm") if not _path(name)]
    return Probe(not missing, f"neither Triton's wheel nor PATH has {', '.join(missing)}" if missing else f"{_path('nvdisasm')}")


@cache
def _path(name: str) -> str | None:
    """The path of a program of Triton's wheel, whose ptxas compiles the kernels, or of PATH."""
    triton = util.find_spec("triton")
    wheel = str(Path(triton.origin).parent / "backends" / "nvidia" / "bin") if triton and triton.origin else ""
    return shutil.which(name, path=os.pathsep.join([wheel, os.environ.get("PATH", "")]))


def _tool(name: str, *words: str) -> str:
    """The output of a program."""
    return subprocess.run([_path(name) or name, *words], capture_output=True, text=True, check=True).stdout


@cache
def _ptxas_version() -> str:
    found = re.search(r"\bV([\d.]+)", _tool("ptxas", "--version"))
    return found[1] if found else "unknown"


def read(path: Path = PATH) -> list[Kernel]:
    """The rows of a table; empty if there is no file."""
    return typed(Kernel, load(path))


def closing(rows: Sequence[Any], lacking: Sequence[str], path: Path | None) -> int:
    """Write the table of the rows of a dataclass, or print them without a path; then what is missed. Returns the exit status."""
    if path is None:
        for k in rows:
            print(*(f"{name}={value}" for name, value in asdict(k).items() if name not in ("nvcc", "triton", "ptxas")), sep="  ")
    else:
        save(map(asdict, rows), [f.name for f in fields(rows[0])], path)
        print(f"{len(rows)} kernels, {path}")
    print("\n".join(lacking) or "nothing missed")
    return 1 if lacking else 0


def main(argv: list[str] | None = None, path: Path = PATH) -> int:
    """Compile, write or print, and report missed requirements; 1 if there are any."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", help="print only the cases whose op and name contain one of these; write nothing")
    words = parser.parse_args(argv).words
    rows: list[Kernel] = []
    lacking: list[str] = []
    chosen = [c for c in cases() if not words or any(w in f"{c.op} {c.name}" for w in words)]
    for case in tqdm(chosen, disable=None):
        for arch in ARCHITECTURES:
            try:
                kernels = compiled(case, arch)
                found = missed(case, arch, kernels)
            except Exception as error:  # any exception: compiler passes fail in many ways, and the other cases should still run
                kernels, found = [], [f"does not compile: {type(error).__name__}: {error}"]
            rows += kernels
            lacking += [f"{case.op} {case.name}, sm_{arch}: {text}" for text in found]
    return closing(rows, lacking, None if words else path)


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)  # with it kernels are decorated for the interpreter and cannot be compiled
    raise SystemExit(main())
