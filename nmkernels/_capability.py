"""What this machine and this build can do: each probe answers (ok, reason), and the reason reads on its own.

Importing this module is cheap; a probe does its work when it is first asked.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
from functools import cache
from importlib import metadata, util
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
        core = importlib.import_module("._C", __package__)
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
    from . import _fatbin

    found = _fatbin.architectures(core.__file__)
    return f"with CUDA for {', '.join(found).replace('compute_', 'PTX compute_')}" if found else "without CUDA"


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
    if built.ok and not hasattr(importlib.import_module("._C", __package__), "cuda"):
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
    core = importlib.import_module("._C", __package__)
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
    runtime, build = importlib.import_module("triton.runtime"), importlib.import_module("triton.runtime.build")
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
    from . import _cusparselt

    library, reason = _cusparselt.opened()
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
