"""Probe what this machine and this build can do. Each probe returns (ok, reason), where the reason is a self-contained message.

A probe runs at its first call. cuSPARSELt is neither linked nor bundled; it is loaded then, from ``NMKERNELS_CUSPARSELT``, the pip wheel
or the system, in this order.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import zlib
from contextlib import suppress
from functools import cache
from importlib import import_module, metadata, util
from pathlib import Path
from typing import Any, NamedTuple

CORE_ABI = 12
"""The value of ``_C.abi`` that this Python code requires."""


class Probe(NamedTuple):
    """Whether something is available, and a description of it or the reason why not."""

    ok: bool
    reason: str


@cache
def compiled_core() -> Probe:
    """The C++ core ``nmkernels._C``: built, loadable, and matching this package's version."""
    remedy = _remedy()
    try:
        core = import_module("._C", __package__)
    except ImportError as error:
        missing = util.find_spec("._C", __package__) is None
        return Probe(False, f"nmkernels._C is not built; {remedy}" if missing else f"nmkernels._C does not load ({error}); {remedy}")
    abi = getattr(core, "abi", None)
    if abi != CORE_ABI:
        return Probe(False, f"nmkernels._C has ABI {abi}, this package needs {CORE_ABI}; {remedy}")
    try:
        isa = f"instruction set {core.isa()} of {', '.join(core.isas())}"
    except ValueError as error:  # an impossible NMKERNELS_ISA is reported here, and raised by the first kernel
        isa = str(error)
    return Probe(True, f"nmkernels._C, ABI {abi}, {isa}, {_cuda_code(core)}")


def _remedy() -> str:
    """The command that builds the core: make in a source tree, otherwise pip with the package's origin."""
    if (Path(__file__).resolve().parents[1] / "csrc").is_dir():
        return "run `make build`, or `pip install -e .` in an environment of your own"
    what = "nmkernels"
    with suppress(metadata.PackageNotFoundError, ValueError, AttributeError):
        # the address or folder that pip installed from (PEP 610)
        origin = json.loads(metadata.distribution("nmkernels").read_text("direct_url.json") or "{}")
        url, vcs = origin.get("url", ""), origin.get("vcs_info")
        if vcs:
            revision = vcs.get("requested_revision")
            what = f"{vcs['vcs']}+{url}{f'@{revision}' if revision else ''}"
        elif url and not url.endswith(".whl"):  # reinstalling the same wheel would not add the core
            what = url
    # without these flags pip would reuse the wheel in its cache, built without a compiler
    flags = "--force-reinstall --no-deps --no-cache-dir --no-binary nmkernels"
    return f"install a C++ compiler, then run `NMKERNELS_REQUIRE_CORE=1 pip install {flags} {what}`"


def _cuda_code(core: Any) -> str:
    """The GPUs that the core has code for."""
    return f"with CUDA for {core.cuda.architectures}" if hasattr(core, "cuda") else "without CUDA"


def instruction_set() -> str:
    """The instruction set that the core uses; ValueError if NMKERNELS_ISA names an impossible one."""
    return str(import_module("._C", __package__).isa()) if compiled_core().ok else "no core"


@cache
def processor() -> str:
    """Vendor and family of the CPU, ``"intel 6"``, as Linux tells them; empty elsewhere."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8", errors="replace").split("\n\n")[0] if info.exists() else ""
    told = dict(re.findall(r"^(vendor_id|cpu family)\s*: (.+)$", text, re.M))
    vendor = {"GenuineIntel": "intel", "AuthenticAMD": "amd"}.get(told.get("vendor_id", ""), "")
    return f"{vendor} {told['cpu family']}" if vendor and "cpu family" in told else ""


@cache
def core_build() -> str:
    """A checksum of the core's file, to distinguish builds of one version; empty without a core."""
    return f"{zlib.crc32(Path(str(import_module('._C', __package__).__file__)).read_bytes()):08x}" if compiled_core().ok else ""


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
def driver() -> Probe:
    """The NVIDIA driver's version from its kernel module, or else the CUDA version that it supports."""
    device = cuda_device()
    if not device.ok:
        return device
    with suppress(OSError):
        module = re.search(r"Kernel Module.*?(\d+(\.\d+)+)", Path("/proc/driver/nvidia/version").read_text(encoding="utf-8"))
        if module:
            return Probe(True, f"driver {module[1]}")
    core: Any = import_module("torch._C")
    version = core._cuda_getDriverVersion()
    return Probe(True, f"driver of CUDA {version // 1000}.{version % 1000 // 10}")


@cache
def cuda_core() -> Probe:
    """Whether the core has CUDA kernels; needs no GPU."""
    built = compiled_core()
    if built.ok and not hasattr(import_module("._C", __package__), "cuda"):
        return Probe(False, "nmkernels._C is built without CUDA kernels; build it where nvcc and a GPU are, or with NMKERNELS_CUDA=on")
    return built


@cache
def cuda_kernels(device: int | None = None) -> Probe:
    """Whether the core's CUDA kernels run on a GPU (torch's index, default the current one): driver and compiled code must fit."""
    for needed in (cuda_core(), cuda_device()):
        if not needed.ok:
            return needed
    import torch

    index = torch.cuda.current_device() if device is None else device
    gpu = f"{torch.cuda.get_device_name(index)}, compute capability {'.'.join(map(str, torch.cuda.get_device_capability(index)))}"
    core = import_module("._C", __package__)
    driver, runtime, error = core.cuda.probe(index)
    # 13020 is 13.2
    versions = ", ".join(f"{what} of CUDA {v // 1000}.{v % 1000 // 10}" for what, v in (("driver", driver), ("kernels", runtime)))
    if not error:
        return Probe(True, f"they run on {gpu}; {versions}")
    if not driver:
        return Probe(False, f"the CUDA driver does not respond ({error}); check `nvidia-smi`")
    if driver // 1000 < runtime // 1000:
        return Probe(False, f"the driver is too old ({error}): {versions}; update the driver to one of CUDA {runtime // 1000}.0 or newer")
    return Probe(False, f"no kernel runs on {gpu} ({error}): {_cuda_code(core)}, {versions}; build nmkernels where this GPU is")


@cache
def triton() -> Probe:
    """The Triton compiler: installed and, with a GPU, able to build the C code that launches its kernels."""
    if util.find_spec("triton") is None:
        return Probe(False, "triton is not installed; `pip install triton` (CUDA builds of torch for Linux bring it)")
    import torch

    version = "of unknown version"
    for name in ("pytorch-triton", "triton-nightly", "triton"):
        with suppress(metadata.PackageNotFoundError):
            version = metadata.version(name)
    if torch.cuda.is_available() or torch.xpu.is_available():
        try:
            _build_as_triton()
        except Exception as error:  # e.g. no compiler, headers, driver or writable folder
            why = " ".join(str(error).split()) or type(error).__name__
            way_out = "install gcc or clang and Python's headers, or name a C compiler in CC"
            return Probe(False, f"triton {version} cannot build the C code that starts its kernels: {why}; {way_out}")
    return Probe(True, f"triton {version}")


def _build_as_triton() -> None:
    """Build C code as Triton does before a launch; Triton caches it per compiler."""
    runtime, build = import_module("triton.runtime"), import_module("triton.runtime.build")
    _ = runtime.driver.active  # builds or loads Triton's driver module
    cc = os.environ.get("CC")
    used = shutil.which(cc) if cc else shutil.which("gcc") or shutil.which("clang")
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
    """The cuSPARSELt library: found, loaded, of a supported version, with every entry point."""
    library, reason = opened()
    return Probe(library is not None, reason)


@cache
def nvcc() -> Probe:
    """The CUDA compiler, on PATH or under CUDA_HOME."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    path = shutil.which("nvcc") or shutil.which("nvcc", path=str(Path(home) / "bin"))
    return _runs(path, -1) if path else Probe(False, "nvcc is not on PATH nor under CUDA_HOME; only needed to build the CUDA kernels")


@cache
def compiler() -> Probe:
    """The C++ compiler, from CXX or on PATH."""
    cxx = os.environ.get("CXX")
    path = next(filter(None, map(shutil.which, [cxx] if cxx else ["c++", "g++", "clang++"])), None)
    what = f"CXX={cxx} names no program" if cxx else "none of c++, g++ and clang++ is on PATH"
    return _runs(path, 0) if path else Probe(False, f"{what}; only needed to build the compiled core")


def _runs(path: str, line: int) -> Probe:
    """Whether ``path --version`` runs, and the line of its output with the version."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return Probe(False, f"{path} does not run: {error}")
    lines = done.stdout.strip().splitlines() or ["no version given"]
    return Probe(True, f"{path}: {lines[line].strip()}")


def probes() -> dict[str, Probe]:
    """All probes by name, in the order shown by ``doctor``."""
    every = (compiled_core, cuda_device, cuda_kernels, triton, cusparselt, compiler, nvcc)
    return {probe.__name__: probe() for probe in every}


# ---- cuSPARSELt

ENV = "NMKERNELS_CUSPARSELT"
"""Environment variable with the path of the library, instead of searching for it."""

OLDEST = 800
SONAMES = ("libcusparseLt.so.0", "libcusparseLt.so")
INSTALL = "`pip install -U nvidia-cusparselt-cu13` (-cu12 for CUDA 12)"


def files() -> list[str]:
    """Files to try: those of NVIDIA's pip packages, then names for the system's loader."""
    spec = util.find_spec("nvidia")
    folders = (spec.submodule_search_locations or ()) if spec is not None else ()
    # the wheel's folder is cusparselt in 0.8, cu13 in 0.10
    wheels = [str(path) for base in folders for path in sorted(Path(base).glob("*/lib/libcusparseLt.so*"))]
    return [*wheels, *SONAMES]


def version_text(version: int) -> str:
    """Format a version number: 801 is 0.8.1, 1000 is 0.10.0."""
    return f"{version // 1_000_000}.{version // 100 % 10_000}.{version % 100}"


def opened() -> tuple[Any, str]:
    """The library, or None, and a description of it or the reason why not."""
    core = compiled_core()
    if not core.ok:
        return None, f"it needs the compiled core, and {core.reason}"
    return _opened(os.environ.get(ENV) or "")


@cache
def _opened(named: str) -> tuple[Any, str]:
    refused = []
    for path in [named] if named else files():
        try:
            library = import_module("._C", __package__).cusparselt.Library(path)
        except RuntimeError as error:
            # do not report names that the loader does not find
            if named or path not in SONAMES or "cannot be opened" not in str(error):
                refused.append(f"{path} is not usable: {error}")
            continue
        label = f"cuSPARSELt {version_text(library.version)}, {path}"
        if library.version >= OLDEST:
            return library, label
        refused.append(f"{label}, is too old: {version_text(OLDEST)} or newer is needed")
    if named:
        return None, f"{refused[0]}. {ENV} names this file; unset it, or name another."
    if refused:
        return None, f"{refused[0]}; {INSTALL}, or name another file in {ENV}"
    return None, f"libcusparseLt is neither in a pip wheel nor on the system; {INSTALL}"
