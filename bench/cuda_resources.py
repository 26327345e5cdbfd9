"""Resources of the compiled CUDA kernels, without a GPU: registers, spills, widths of memory accesses, tensor cores, contraction.

``python -m bench.cuda_resources`` compiles every ``.cu`` under ``csrc/cuda`` for the GPUs of the build with its flags (that of ``wgmma.sp``
only for sm_90a), reads cuobjdump's output and writes ``bench/results/cuda_resources.csv``; with words, it only prints the kernels whose
names contain one of them. Compiled kernels are cached under ``build/cuda_resources``, by a hash of sources, flags, compiler. The committed
table is of the wheels' tool chain: run ``bash cmake/toolkit.sh python3 DIR`` and put ``DIR/bin`` first in PATH.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from importlib import util
from pathlib import Path

from nmkernels.capability import Probe, nvcc

from .cuda_expected import GEMMS, LOOSE, NARROW, RULE, SPILLED, WIDTHS, expected
from .rows import RESULTS, load, typed
from .triton_resources import closing, inexact, machine_code

PATH = RESULTS / "cuda_resources.csv"
ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "csrc" / "cuda"
CACHE = ROOT / "build" / "cuda_resources"
FRONT_END = {
    "sm_80": "compute_80",
    "sm_89": "compute_89",
    "sm_90": "compute_90",
    "sm_90a": "compute_90a",
    "sm_100": "compute_90",
    "sm_120": "compute_90",
}
"""The GPUs of ``cmake/architectures.cmake``, and the architecture of the PTX that each one's machine code is made from."""
LATER_AS_PTX = re.compile(r"_any$|^linear_(expand|few_integers|mma)$|^pack_tiles$")
"""Files of which Blackwell gets PTX alone."""
ALONE = {"wgmma_sp.cu": ("sm_90a",), "wgmma_sp_8bit.cu": ("sm_90a",), "quantize.cu": ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")}
USUAL = ("sm_80", "sm_90", "sm_100", "sm_120")
"""The GPUs of a file, unless ``ALONE`` names it."""
REWRITE = "python -m bench.cuda_resources"
MATRIX = ("HMMA", "IMMA", "LDSM", "LDGSTS", "HGMMA", "QGMMA", "IGMMA", "STSM", "UBLKCP", "UTMALDG", "UTMASTG")
"""Instructions of the tensor cores, and those that load their operands and store their results."""
SERIALISED = re.compile(r"^.*\(C75\d\d\).*$", re.M)
"""ptxas's warning about serialised wgmma, which is several times slower."""

LOADS, STORES = ("LDG", "LD", "LDGSTS"), ("STG", "ST")
"""Instructions that read and write global memory."""

JUMPS = ("BRA", "BRX", "JMP", "CALL", "RET", "EXIT", "BREAK", "BSSY", "BSYNC", "WARPSYNC")
"""Branches: instructions that end a straight run of code, as their targets do."""


@dataclass(frozen=True)
class Kernel:
    """One compiled kernel: one line of the table."""

    source: str
    kernel: str
    arch: str
    registers: int
    """Per thread, of 255."""
    stack_bytes: int
    """Local memory of a thread: for spilled registers, and for arrays indexed by data."""
    spills: int
    """Instructions that read or write local memory."""
    shared_bytes: int
    """Static shared memory; from sm_90 on 1024 bytes are the system's."""
    loads: str
    """The number of instructions that read global memory, by their width in bits."""
    stores: str
    narrow: str
    """The number of stores, by bits, that could be merged with a neighbouring one of the same width into a wider store."""
    matrix: str
    """Instructions of the tensor cores, of ldmatrix and stmatrix (LDSM, STSM), of cp.async (LDGSTS) and of copies in bulk (UBLKCP, UTMALDG,
    UTMASTG)."""
    inexact: str
    """Floating-point instructions in the PTX that are not one operation rounded once; not listed for GEMMs."""
    instructions: int
    digest: str
    """``digest`` of the sources."""
    nvcc: str

    @property
    def key(self) -> tuple[str, str, str]:
        """Its key in the table."""
        return self.source, self.kernel, self.arch


def sources() -> list[Path]:
    """The files of kernels, sorted; their names are unique."""
    return sorted(SOURCES.rglob("*.cu"))


def is_gemm(source: Path) -> bool:
    """Whether a file holds GEMMs, whose operations may be contracted."""
    return source.name.startswith("linear") or source.parent.name == "gemm"


def architectures(source: Path) -> tuple[str, ...]:
    """The architectures that a file is compiled for."""
    return ALONE.get(source.name, USUAL[:2] if LATER_AS_PTX.search(source.stem) else USUAL)


def tools() -> Probe:
    """Whether the compiler and the tools that read its output are installed, and where."""
    found = nvcc()
    if not found.ok:
        return found
    for name in ("cuobjdump", "c++filt"):
        if _tool(name) is None:
            return Probe(False, f"{name} is not installed; the CUDA toolkit and Triton's wheel have cuobjdump, binutils c++filt")
    return Probe(True, found.reason)


def compiled(source: Path, arch: str) -> list[Kernel]:
    """The kernels of a file as compiled now, from the cache if nothing changed."""
    cached = CACHE / f"{source.stem}-{arch}-{_fingerprint(source, arch)}.json"
    if not cached.exists():
        rows = [asdict(k) for k in _compile(source, arch)]
        CACHE.mkdir(parents=True, exist_ok=True)
        for old in CACHE.glob(f"{source.stem}-{arch}-*.json*"):
            old.unlink(missing_ok=True)
        made = cached.with_suffix(f".{os.getpid()}")
        made.write_text(json.dumps(rows))
        made.replace(cached)
    return [Kernel(**row) for row in json.loads(cached.read_text())]


def missed(kernels: Iterable[Kernel]) -> list[str]:
    """The requirements that kernels miss, as text; empty if they meet all."""
    found = []
    for k in kernels:
        name = f"{k.source} {k.kernel}, {k.arch}"
        spilled = SPILLED.get(k.arch, 0)
        if k.stack_bytes > spilled or (k.spills and not spilled):
            found.append(f"{name} uses local memory: {k.stack_bytes} bytes, {k.spills} instructions")
        read, written = expected(WIDTHS, k.source, k.kernel, RULE)
        if widest(k.loads) < read:
            found.append(f"{name} reads {widest(k.loads)} bits at once, should read {read}")
        if widest(k.stores) < written:
            found.append(f"{name} writes {widest(k.stores)} bits at once, should write {written}")
        adjacent = sum(int(each.split(":")[1]) for each in k.narrow.split())
        if adjacent > expected(NARROW, k.source, k.kernel, 0):
            found.append(f"{name} writes adjacent data in narrow stores: {k.narrow}; st_global of csrc/cuda/ptx.h is one store")
        gemm = expected(GEMMS, k.source, k.kernel, "")
        if gemm and {word for word in k.matrix.split()[::2] if "MMA" in word} != {gemm}:
            found.append(f"{name} multiplies by {k.matrix or 'no tensor core'}, should by {gemm}")
        loose = expected(LOOSE, k.source, k.kernel, ())
        wrong = [op for op in k.inexact.split()[::2] if not op.endswith(loose)]
        if wrong:
            found.append(f"{name} is not exact: {' '.join(wrong)}")
    return found


def _flags(source: Path) -> list[str]:
    """The flags of ``cmake/cuda.cmake``: only GEMMs may contract."""
    hopper = ["-DNM_SM90A"] if source.name.startswith("wgmma") else []
    return ["-std=c++17", "-O3", *hopper, *([] if is_gemm(source) else ["-fmad=false"])]


def _fingerprint(source: Path, arch: str) -> str:
    found = hashlib.sha256(json.dumps([_flags(source), arch, _version(), str(_tool("cuobjdump"))]).encode())
    for path in [Path(__file__), *sorted(with_includes(source))]:
        found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()[:16]


def digest(source: Path) -> str:
    """A digest of a file of kernels, its includes and its flags, without comments and spaces. A row with another digest is out of date."""
    found = hashlib.sha256(" ".join(_flags(source)).encode())
    for path in sorted(with_includes(source)):
        found.update(" ".join([path.name, *re.sub(r"//.*|/\*[\s\S]*?\*/", " ", path.read_text()).split()]).encode())
    return found.hexdigest()[:10]


def with_includes(source: Path) -> set[Path]:
    """A file and all of our files that it includes, except the declarations of host functions."""
    seen, todo = set(), [source.resolve()]
    while todo:
        path = todo.pop()
        if path not in seen and path.exists() and path.name != "kernels.h":
            seen.add(path)
            todo += [(path.parent / name).resolve() for name in re.findall(r'^#include "(.+)"', path.read_text(), re.M)]
    return seen


def _compile(source: Path, arch: str) -> list[Kernel]:
    """The kernels of a file."""
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder) / f"{source.stem}.ptx", Path(folder) / f"{source.stem}.cubin"
        ptx.write_text(_front_end(source, FRONT_END[arch], " ".join(_flags(source))))
        _run(_compiler(), "-O3", f"-arch={arch}", "-cubin", "-o", str(cubin), str(ptx))
        usage, sass = (_run(str(_tool("cuobjdump")), way, str(cubin)) for way in ("-res-usage", "-sass"))
        kernels = read_back(source.name, arch, not is_gemm(source), ptx.read_text(), usage, sass)
        return [replace(k, digest=digest(source)) for k in kernels]


@lru_cache(maxsize=4)
def _front_end(source: Path, arch: str, flags: str) -> str:
    """The PTX of a file."""
    with tempfile.NamedTemporaryFile(suffix=".ptx") as ptx:
        _run(_compiler(), *flags.split(), f"-arch={arch}", "-ptx", "-o", ptx.name, str(source))
        return Path(ptx.name).read_text()


def _compiler() -> str:
    return nvcc().reason.split(":")[0]


def read_back(source: str, arch: str, exact: bool, ptx: str, usage: str, sass: str) -> list[Kernel]:
    """The kernels of a file, exact or of GEMMs, from its PTX and cuobjdump's output."""
    used = dict(re.findall(r"Function (\S+):\s*\n\s*(REG:.*)", usage))
    code = {part.split()[0]: part for part in sass.split("Function : ")[1:]}
    assert used.keys() == code.keys(), f"cuobjdump lists other kernels than it shows: {used.keys() ^ code.keys()}"
    names = short_names(sorted(code))
    assert len(set(names.values())) == len(names), f"two kernels of {source} have the same short name"
    wrong = inexact_of(ptx) if exact else {}
    rows = []
    for mangled in sorted(code, key=names.__getitem__):
        opcodes = [i.op for i in machine_code(code[mangled])]
        # HMMA.SP apart from HMMA: its first operand is 2:4
        feeding = Counter(".".join(op.split(".")[: 2 if ".SP." in op else 1]) for op in opcodes if op.split(".")[0] in MATRIX)
        numbers = {what: int(number) for what, number in re.findall(r"(\w+):(\d+)", used[mangled])}
        rows.append(
            Kernel(
                source=source,
                kernel=names[mangled],
                arch=arch,
                registers=numbers["REG"],
                stack_bytes=numbers["STACK"] + numbers["LOCAL"],
                spills=sum(op.split(".")[0] in ("LDL", "STL") for op in opcodes),
                shared_bytes=numbers["SHARED"],
                loads=widths(opcodes, *LOADS),
                stores=widths(opcodes, *STORES),
                narrow=narrow(code[mangled]),
                matrix=" ".join(f"{name} {number}" for name, number in sorted(feeding.items())),
                inexact=wrong.get(mangled, ""),
                instructions=len(opcodes),
                digest="",
                nvcc=_version(),
            )
        )
    return rows


def widths(opcodes: Iterable[str], *names: str) -> str:
    """The number of these accesses by width in bits, widest first."""
    return _by_width(Counter(_bits(op) for op in opcodes if op.split(".")[0] in names))


def _bits(op: str) -> int:
    """The width of an access in bits."""
    return next((int(part.lstrip("US")) for part in op.split(".") if re.fullmatch(r"128|64|[US]?(16|8)", part)), 32)


def _by_width(bits: Counter[int]) -> str:
    return " ".join(f"{width}:{bits[width]}" for width in sorted(bits, reverse=True))


def narrow(code: str) -> str:
    """``narrow`` of one kernel's machine code.

    Two stores can be merged if between them no other path enters or leaves and the address and condition do not change; the address is
    assumed to be aligned for a wide store.
    """
    lines = machine_code(code)
    targets = {int(to, 16) for i in lines if i.op.split(".")[0] in JUMPS for to in re.findall(r"\b0x([0-9a-f]+)", i.operands)}
    found: Counter[int] = Counter()
    open_stores: dict[tuple[str, str, int], set[int]] = {}  # by condition, address and bits: offsets

    def registers(address: str) -> set[str]:  # two for each name
        return {f"{kind}{int(number) + i}" for kind, number in re.findall(r"(U?R)(\d+)", address) for i in (0, 1)}

    def close(changed: set[str] | None = None) -> None:
        for key in [key for key in open_stores if changed is None or changed & {key[0].lstrip("!"), *registers(key[1])}]:
            width, offsets = key[2] // 8, open_stores.pop(key)
            adjacent = [o for o in offsets if (o + width if o % (2 * width) == 0 else o - width) in offsets]
            found.update({key[2]: len(adjacent)} if adjacent else {})

    before = -1
    for op, args, when, _, at in lines:
        kind = op.split(".")[0]
        if not targets.isdisjoint(range(before + 1, at + 1)):  # a target may be a NOP, which is left out
            close()
        before = at
        if kind in STORES:
            place = re.match(r"(?:desc\[\w+\])?\[(.+?)\+?(-?0x[0-9a-f]+)?\]", args)
            if place and _bits(op) < 128:
                open_stores.setdefault((when, place[1], _bits(op)), set()).add(int(place[2] or "0", 16))
        elif kind in JUMPS:
            close()
        else:
            close(_written(op, args))
    close()
    return _by_width(found)


def _written(op: str, args: str) -> set[str]:
    """The registers and predicates that an instruction may change."""
    first = re.match(r"(U?R)(\d+)", args)
    several = 4 if ".128" in op else 2 if ".64" in op or ".WIDE" in op else 1
    registers = {f"{first[1]}{int(first[2]) + i}" for i in range(several)} if first else set()
    return registers | {arg for arg in args.replace(" ", "").split(",")[:3] if re.fullmatch(r"U?P\d", arg)}


def widest(accesses: str) -> int:
    """The widest of a kernel's ``loads`` or ``stores``, in bits."""
    return max((int(each.split(":")[0]) for each in accesses.split()), default=0)


def short_names(mangled: list[str]) -> dict[str, str]:
    """Readable names: without namespaces and arguments, and with N:M for a pattern."""
    plain = _run(str(_tool("c++filt")), *mangled).splitlines() if mangled else []
    return {name: shortened(text) for name, text in zip(mangled, plain, strict=True)}


def shortened(name: str) -> str:
    """One demangled name, shortened."""
    name = re.sub(r"\(anonymous namespace\)::|\bnm::(cuda::)?(gemm::)?|^void |\((int|bool|unsigned int)\)", "", name)
    name = re.sub(r"\(.*$", "", name)
    name = re.sub(r"Fixed<(\d+), (\d+)>", r"\1:\2", name)
    return name.replace(" >", ">")


def inexact_of(ptx: str) -> dict[str, str]:
    """``inexact`` by kernel, including the functions that it calls."""
    parts = re.split(r"\.(entry|func)\s+(?:\([^)]*\)\s*)?(\w+)", ptx)
    bodies = list(zip(parts[1::3], parts[2::3], parts[3::3], strict=True))
    called = "".join(body for kind, _, body in bodies if kind == "func")
    return {name: inexact(body + called) for kind, name, body in bodies if kind == "entry"}


@cache
def _tool(name: str) -> str | None:
    """The path of a program: from the CUDA toolkit, PATH or Triton's wheel."""
    adjacent = str(Path(nvcc().reason.split(":")[0]).resolve().parent)
    triton = util.find_spec("triton")
    wheel = str(Path(triton.origin).parent / "backends" / "nvidia" / "bin") if triton and triton.origin else ""
    return shutil.which(name, path=os.pathsep.join([adjacent, os.environ.get("PATH", ""), wheel]))


@cache
def _version() -> str:
    """The versions of the compiler and, where it is another, of the assembler beside it."""
    programs = (_compiler(), str(_tool("ptxas")))
    found = [re.search(r"\bV([\d.]+)", _run(program, "--version")) for program in programs]
    return " ".join(dict.fromkeys(match[1] for match in found if match)) or "unknown"


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    serialised = SERIALISED.findall(done.stdout + done.stderr)
    if done.returncode or serialised:
        raise RuntimeError(f"{' '.join(command[:6])} failed:\n" + ("\n".join(serialised) or done.stderr[-3000:]))
    return done.stdout


def read(path: Path = PATH) -> list[Kernel]:
    """The rows of a table; empty if there is no file."""
    return typed(Kernel, load(path))


def main(argv: list[str] | None = None, path: Path = PATH) -> int:
    """Compile, write or print, and report missed requirements; 1 if there are any."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", help="print only the kernels whose file and name contain one of these; write nothing")
    words = parser.parse_args(argv).words
    here = tools()
    if not here.ok:
        parser.error(here.reason)
    with ThreadPoolExecutor(2) as pool:
        made = pool.map(lambda source: [k for arch in architectures(source) for k in compiled(source, arch)], sources())
        rows = [k for kernels in made for k in kernels]
    rows = [k for k in rows if not words or any(w in f"{k.source} {k.kernel}" for w in words)]
    return closing(rows, missed(rows), None if words else path)


if __name__ == "__main__":
    raise SystemExit(main())
