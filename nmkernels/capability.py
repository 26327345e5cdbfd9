"""What this machine and this build can do: each probe answers (ok, reason), and the reason reads on its own.

Importing this module is cheap: a probe does its work when it is first asked. cuSPARSELt is neither linked nor bundled; it is opened when
somebody first asks, from ``NMKERNELS_CUSPARSELT``, else from the pip wheel, else from the system.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import struct
import subprocess
from functools import cache
from importlib import import_module, metadata, util
from pathlib import Path
from typing import Any, NamedTuple

CORE_ABI = 7
"""The value of ``_C.abi`` that this Python code was written against."""


class Probe(NamedTuple):
    """Whether something is there, and in words what was found or why it is missing."""

    ok: bool
    reason: str


@cache
def compiled_core() -> Probe:
    """The C++ core ``nmkernels._C``: built, loadable, and of this package's version."""
    remedy = _remedy()
    try:
        core = import_module("._C", __package__)
    except ImportError as error:
        missing = util.find_spec("._C", __package__) is None
        return Probe(False, f"nmkernels._C is not built; {remedy}" if missing else f"nmkernels._C does not load ({error}); {remedy}")
    abi = getattr(core, "abi", None)
    if abi != CORE_ABI:
        return Probe(False, f"nmkernels._C has ABI {abi}, this package needs {CORE_ABI}; {remedy}")
    return Probe(True, f"nmkernels._C, ABI {abi}, {_instruction_set(core)}, {_cuda_code(core)}")


def _remedy() -> str:
    """What the user runs to have the compiled core: in a source tree its own command, else pip's, for where the package came from."""
    if (Path(__file__).resolve().parents[1] / "csrc").is_dir():
        return "run `make build`, or `pip install -e .` in an environment of your own"
    # pip keeps the wheel that it has built without a compiler, and asked for that package again takes it from its cache
    flags = "--force-reinstall --no-deps --no-cache-dir --no-binary nmkernels"
    return f"install a C++ compiler, then run `NMKERNELS_REQUIRE_CORE=1 pip install {flags} {_installed_from()}`"


def _installed_from() -> str:
    """What pip was given, where that was an address or a folder (PEP 610); else the package's name."""
    try:
        origin = json.loads(metadata.distribution("nmkernels").read_text("direct_url.json") or "{}")
        url, vcs = origin.get("url", ""), origin.get("vcs_info")
    except (metadata.PackageNotFoundError, ValueError, AttributeError):
        return "nmkernels"
    if vcs:
        revision = vcs.get("requested_revision")
        return f"{vcs['vcs']}+{url}{f'@{revision}' if revision else ''}"
    return "nmkernels" if not url or url.endswith(".whl") else url  # such a wheel is without the core however often it is installed


def _cuda_code(core: Any) -> str:
    """The GPUs that the core's file has code for, read from it: what was built, not what was meant."""
    found = architectures(core.__file__)
    return f"with CUDA for {', '.join(found).replace('compute_', 'PTX compute_')}" if found else "without CUDA"


def instruction_set() -> str:
    """The instruction set that the core uses; ValueError where NMKERNELS_ISA names an impossible one."""
    return str(import_module("._C", __package__).isa()) if compiled_core().ok else "no core"


def _instruction_set(core: Any) -> str:
    """Which of the core's instruction sets is used; an impossible NMKERNELS_ISA is told here and raised by the first kernel."""
    try:
        return f"instruction set {core.isa()} of {', '.join(core.isas())}"
    except ValueError as error:
        return str(error)


@cache
def cuda_device() -> Probe:
    """An NVIDIA GPU that torch can use, with its name and compute capability."""
    import torch

    if torch.version.cuda is None:
        return Probe(False, f"torch {torch.__version__} is built without CUDA; install a CUDA build of torch")
    if not torch.cuda.is_available():
        return Probe(False, "torch sees no NVIDIA GPU; check `nvidia-smi` and CUDA_VISIBLE_DEVICES")
    major, minor = torch.cuda.get_device_capability()
    count = torch.cuda.device_count()
    return Probe(True, f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}{f', one of {count}' if count > 1 else ''}")


def compute_capability() -> tuple[int, int] | None:
    """(major, minor) of the current GPU, or None without one."""
    if not cuda_device().ok:
        return None
    import torch

    return torch.cuda.get_device_capability()


@cache
def cuda_core() -> Probe:
    """The core has CUDA kernels; no GPU is asked."""
    built = compiled_core()
    if built.ok and not hasattr(import_module("._C", __package__), "cuda"):
        return Probe(False, "nmkernels._C is built without CUDA kernels; build it where nvcc and a GPU are, or with NMKERNELS_CUDA=on")
    return built


@cache
def cuda_kernels(device: int | None = None) -> Probe:
    """The core's CUDA kernels run on a GPU, by torch's number or the current one: the driver takes them, and there is code for that GPU."""
    for needed in (cuda_core(), cuda_device()):
        if not needed.ok:
            return needed
    import torch

    index = torch.cuda.current_device() if device is None else device
    gpu = f"{torch.cuda.get_device_name(index)}, compute capability {'.'.join(map(str, torch.cuda.get_device_capability(index)))}"
    core = import_module("._C", __package__)
    driver, runtime, error = core.cuda.probe(index)
    versions = f"driver of CUDA {_cuda_version(driver)}, kernels of CUDA {_cuda_version(runtime)}"
    if not error:
        return Probe(True, f"they run on {gpu}; {versions}")
    if not driver:
        return Probe(False, f"the CUDA driver does not answer ({error}); check `nvidia-smi`")
    if driver // 1000 < runtime // 1000:
        return Probe(False, f"the driver is too old ({error}): {versions}; update the driver to one of CUDA {runtime // 1000}.0 or newer")
    return Probe(False, f"no kernel runs on {gpu} ({error}): {_cuda_code(core)}, {versions}; build nmkernels where this GPU is")


def _cuda_version(number: int) -> str:
    """As people write it: 13020 is 13.2."""
    return f"{number // 1000}.{number % 1000 // 10}"


@cache
def triton() -> Probe:
    """The Triton compiler: installed and, where there is a GPU, able to build the C code that starts its kernels.

    It is imported only where there is a GPU.
    """
    if util.find_spec("triton") is None:
        return Probe(False, "triton is not installed; `pip install triton` (CUDA builds of torch for Linux bring it)")
    import torch

    version = _version_of("triton", "triton-nightly", "pytorch-triton")
    if torch.cuda.is_available() or torch.xpu.is_available():
        try:
            _build_as_triton()
        except Exception as error:  # of any kind: no compiler, no headers, no driver, no place to write
            why = " ".join(str(error).split()) or type(error).__name__
            way_out = "install gcc or clang and Python's headers, or name a C compiler in CC"
            return Probe(False, f"triton {version} cannot build the C code that starts its kernels: {why}; {way_out}")
    return Probe(True, f"triton {version}")


def _build_as_triton() -> None:
    """Build C code as Triton does before a launch: for its driver, and for every new kind of arguments.

    What is in Triton's cache takes no compiler, and launches of new kinds would still fail. The module tried here is therefore in the
    cache only under the compiler that would be used now: it is built once for each.
    """
    runtime, build = import_module("triton.runtime"), import_module("triton.runtime.build")
    _ = runtime.driver.active  # builds, or loads, what reaches the GPU's driver
    asked = os.environ.get("CC")
    used = shutil.which(asked) if asked else shutil.which("gcc") or shutil.which("clang")
    name = "nmkernels_probe"
    build.compile_module_from_src(
        f"""// {used}
#include <Python.h>
static struct PyModuleDef module = {{PyModuleDef_HEAD_INIT, "{name}"}};
PyMODINIT_FUNC PyInit_{name}(void) {{ return PyModule_Create(&module); }}
""",
        name,
    )


@cache
def cusparselt() -> Probe:
    """The cuSPARSELt library: found, opened, of a version that is known, with every entry point."""
    library, reason = opened()
    return Probe(library is not None, reason)


@cache
def nvcc() -> Probe:
    """The CUDA compiler, on PATH or under CUDA_HOME."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    path = shutil.which("nvcc") or shutil.which("nvcc", path=str(Path(home) / "bin"))
    if path is None:
        return Probe(False, "nvcc is not on PATH nor under CUDA_HOME; only needed to build the CUDA kernels")
    return _runs(path, last_line=True)


@cache
def compiler() -> Probe:
    """The C++ compiler, from CXX or on PATH."""
    asked = os.environ.get("CXX")
    for name in [asked] if asked else ["c++", "g++", "clang++"]:
        path = shutil.which(name)
        if path:
            return _runs(path)
    what = f"CXX={asked} names no program" if asked else "none of c++, g++ and clang++ is on PATH"
    return Probe(False, f"{what}; only needed to build the compiled core")


def probes() -> dict[str, Probe]:
    """Every probe by name, in the order in which ``doctor`` shows them."""
    every = (compiled_core, cuda_device, cuda_kernels, triton, cusparselt, compiler, nvcc)
    return {probe.__name__: probe() for probe in every}


def _version_of(*distributions: str) -> str:
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "of unknown version"


def _runs(path: str, last_line: bool = False) -> Probe:
    """Whether ``path --version`` runs, and the line of its answer that names the version."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return Probe(False, f"{path} does not run: {error}")
    lines = done.stdout.strip().splitlines() or ["no version told"]
    return Probe(True, f"{path}: {lines[-1 if last_line else 0].strip()}")


# ---- cuSPARSELt

ENV = "NMKERNELS_CUSPARSELT"
"""Names the library's file, instead of the one that would be found."""

OLDEST = 800
SONAMES = ("libcusparseLt.so.0", "libcusparseLt.so")
INSTALL = "`pip install -U nvidia-cusparselt-cu13` (-cu12 for CUDA 12)"


def folders() -> list[Path]:
    """The folders of NVIDIA's pip packages."""
    spec = util.find_spec("nvidia")
    return [] if spec is None or spec.submodule_search_locations is None else [Path(p) for p in spec.submodule_search_locations]


def files() -> list[str]:
    """Files to try, the first that fits is taken; the last are names that the system's loader looks for."""
    # of 0.8 the wheel's folder is cusparselt, of 0.10 cu13
    wheels = [str(path) for base in folders() for path in sorted(base.glob("*/lib/libcusparseLt.so*"))]
    return [*wheels, *SONAMES]


def version_text(version: int) -> str:
    """A version as people write it: 801 is 0.8.1, 1000 is 0.10.0."""
    return f"{version // 1_000_000}.{version // 100 % 10_000}.{version % 100}"


def opened() -> tuple[Any, str]:
    """The library, or None, and in words what was found or why there is none."""
    core = compiled_core()
    if not core.ok:
        return None, f"it is reached through the compiled core, and {core.reason}"
    return _opened(os.environ.get(ENV) or "")


@cache
def _opened(given: str) -> tuple[Any, str]:
    refused = []
    for path in [given] if given else files():
        library, reason = _open(path)
        if library is not None:
            return library, reason
        # that the loader knows no such name is no news
        if given or path not in SONAMES or "cannot be opened" not in reason:
            refused.append(reason)
    if given:
        return None, f"{refused[0]}. {ENV} names this file; unset it, or name another."
    if refused:
        return None, f"{refused[0]}; {INSTALL}, or name another file in {ENV}"
    return None, f"libcusparseLt is neither in a pip wheel nor on the system; {INSTALL}"


def _open(path: str) -> tuple[Any, str]:
    try:
        library = import_module("._C", __package__).cusparselt.Library(path)
    except RuntimeError as error:
        return None, f"{path} is not usable: {error}"
    text = version_text(library.version)
    if library.version < OLDEST:
        return None, f"cuSPARSELt {text}, {path}, is too old: {version_text(OLDEST)} or newer is needed"
    return library, f"cuSPARSELt {text}, {path}"


# ---- the GPUs that a compiled module has code for
#
# Read from its ELF section ``.nv_fatbin``, which is what the CUDA driver chooses from: one container for each compiled .cu file, of one
# entry for each architecture. NVIDIA does not document the headers; the offsets are those that nvcc 13.0 writes, and the tests compare
# them with what cuobjdump says where there is one. Code may be compressed, headers never are.
#
#   container: uint32 magic, uint16 version, uint16 size of this header, uint64 size of the entries
#   entry:     uint16 kind, uint16 version, uint32 size of this header, uint64 size of the code, ...
#              at byte 28: uint32 architecture (80, 90, ...); at byte 40: uint64 flags

MAGIC = 0xBA55ED50
PREFIXES = {1: "compute_", 2: "sm_"}
"""Kinds of entries: 1 is PTX, which the driver compiles for its GPU; 2 is machine code. Others (link-time code) run nowhere."""
SUFFIXES = {0x100000: "a", 0x200000: "f"}
"""Flags: code for this architecture alone (``sm_90a``), and for its family (``sm_100f``)."""


def architectures(path: str | Path) -> tuple[str, ...]:
    """What the module has code for, machine code first: ``("sm_80", "sm_90a", "compute_90")``; empty without device code."""
    found = {one for container in containers(path) for one in container}
    return tuple(sorted(found, key=lambda name: (name.startswith(PREFIXES[1]), len(name.rstrip("af")), name)))


def containers(path: str | Path) -> list[tuple[str, ...]]:
    """The architectures of each container, which is to say of each source file."""
    with open(path, "rb") as file:
        if len(file.read(64)) < 64:
            return []
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as image:
            place = sections(image).get(".nv_fatbin")
            return [] if place is None else _containers(image, place.start, min(place.stop, len(image)))


def sections(image: bytes | mmap.mmap) -> dict[str, slice]:
    """Where each section of a 64-bit little-endian ELF file lies, by name; nothing for any other file.

    The file header has at byte 40 a uint64 offset of the section headers, at 58 three uint16: their size, number, which holds names. A
    section header has a uint32 offset of its name, and at byte 24 two uint64: offset and size of its content.
    """
    if image[:6] != b"\x7fELF\x02\x01":
        return {}
    (start,) = struct.unpack_from("<Q", image, 40)
    size, number, names = struct.unpack_from("<3H", image, 58)
    if start + size * number > len(image) or names >= number:
        return {}
    (text,) = struct.unpack_from("<Q", image, start + names * size + 24)
    found = {}
    for header in range(start, start + size * number, size):
        (name,) = struct.unpack_from("<I", image, header)
        offset, length = struct.unpack_from("<2Q", image, header + 24)
        found[image[text + name : image.find(b"\0", text + name)].decode("ascii", "replace")] = slice(offset, offset + length)
    return found


def _containers(image: bytes | mmap.mmap, at: int, end: int) -> list[tuple[str, ...]]:
    found = []
    while at + 16 <= end:
        magic, _, header, size = struct.unpack_from("<IHHQ", image, at)
        if magic == MAGIC:
            found.append(tuple(_entries(image, at + header, min(at + header + size, end))))
            at += header + size
        else:
            # the linker fills up to the next container's alignment
            at += 8
    return found


def _entries(image: bytes | mmap.mmap, at: int, end: int) -> list[str]:
    found = []
    while at + 48 <= end:
        kind, _, header, size = struct.unpack_from("<HHIQ", image, at)
        (number,), (flags,) = struct.unpack_from("<I", image, at + 28), struct.unpack_from("<Q", image, at + 40)
        if kind in PREFIXES:
            found.append(f"{PREFIXES[kind]}{number}" + "".join(letter for flag, letter in SUFFIXES.items() if flags & flag))
        if header < 48:
            break
        at += header + size
    return found
