"""Builds the compiled core ``nmkernels._C`` with CMake and Ninja; everything else about the package is in pyproject.toml.

Environment:
    NMKERNELS_CUDA=auto|on|off   auto (the default) builds device code where nvcc and a GPU are present
    NMKERNELS_REQUIRE_CORE=1     a core that cannot be built is an error, as a compile error in place always is; otherwise the package
                                 installs without it
    NMKERNELS_PURE=1             a package without the core, for every system: its wheel is py3-none-any
    NMKERNELS_EMULATOR=1         also build nmkernels._emulated, which runs the CUDA kernels on the CPU, for tests (in place only)
    NMKERNELS_WERROR=1           compiler warnings are errors
    NMKERNELS_CUDA_ARCHITECTURES device code for these GPUs alone, such as 90; otherwise for all of cmake/architectures.cmake
    NMKERNELS_ISAS               CPU kernels for these alone, such as "portable;avx2", or for the best of this machine: best; otherwise for
                                 all of cmake/isa.cmake
    MAX_JOBS=n                   parallel compile jobs
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
REQUIRED = os.environ.get("NMKERNELS_REQUIRE_CORE", "0") not in ("", "0")
CUDA = os.environ.get("NMKERNELS_CUDA", "auto").lower()
EMULATOR = os.environ.get("NMKERNELS_EMULATOR", "0") not in ("", "0")
PURE = os.environ.get("NMKERNELS_PURE", "0") not in ("", "0")
PASSED_ON = ("NMKERNELS_CUDA_ARCHITECTURES", "NMKERNELS_ISAS")
"""Environment variables that are CMake options of the same name; unset, CMake's defaults hold."""
ERROR = re.compile(r"\b(error|fatal)\b[ \w#-]*:|undefined reference", re.IGNORECASE)
"""A compiler's or linker's message; not a flag such as -Werror."""

if CUDA not in ("auto", "on", "off"):
    raise SystemExit(f"NMKERNELS_CUDA={CUDA} is not understood; use auto, on or off.")
if PURE and (REQUIRED or CUDA == "on"):
    raise SystemExit("NMKERNELS_PURE=1 leaves the core out; NMKERNELS_REQUIRE_CORE=1 and NMKERNELS_CUDA=on require it. Set only one.")


class CoreUnavailable(Exception):
    """This machine cannot build the core: a tool or a header is missing."""


class CompileFailed(Exception):
    """A compiler or linker failed on this package's sources."""


def find_tool(name: str) -> str:
    """Path of ``cmake`` or ``ninja``: beside this interpreter, else in PATH, else inside the pip package of that name."""
    found = shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)
    if found:
        return found
    spec = importlib.util.find_spec(name)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for candidate in (Path(folder) / "data" / "bin" / name, Path(folder).parent / "bin" / name):
            if candidate.is_file():
                return str(candidate)
    raise CoreUnavailable(f"{name} was not found; pip install {name}")


def pybind11_include() -> str:
    """Folder that holds ``pybind11/pybind11.h``: of the pip package, else of torch; empty leaves the search to CMake."""
    for package, tail in (("pybind11", "include"), ("torch", "include")):
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            if (Path(folder) / tail / "pybind11" / "pybind11.h").is_file():
                return str(Path(folder) / tail)
    return ""


class Build(build):
    """``build`` into empty folders: setuptools packs whatever is in them, so also the modules of an earlier build."""

    def run(self) -> None:
        """Empty the folders, then build; CMake's folder stays, so compiling remains incremental."""
        for folder in (self.build_lib, self.get_finalized_command("bdist").bdist_base):
            path = Path(folder).resolve()
            # any other folder was the caller's choice, and may hold the caller's files
            if path.parent == ROOT / "build":
                shutil.rmtree(path, ignore_errors=True)
        super().run()


class BuildCore(build_ext):
    """``build_ext`` that hands the one extension to CMake; incremental, in one folder for every Python.

    Only the bindings depend on Python: whoever builds for several compiles the kernels once.
    """

    def run(self) -> None:
        """Remember whether the module is copied into the source tree; setuptools hides that while it builds."""
        self._in_place = bool(self.inplace)
        super().run()

    def build_extension(self, ext: Extension) -> None:
        """Configure, compile, and put the module where setuptools expects it."""
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        try:
            folder = self._configure()
            self._compile(folder)
        except (CoreUnavailable, CompileFailed) as reason:
            self._forget(ext)
            # a developer, who builds in place, needs the error; a user needs a package that works
            if REQUIRED or CUDA == "on" or (self._in_place and isinstance(reason, CompileFailed)):
                raise SystemExit(f"nmkernels: the compiled core cannot be built: {reason}") from None
            return _warn(str(reason))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(folder / target.name, target)
        if self._in_place:
            name = target.name.replace("_C", "_emulated", 1)
            # an emulator of older sources would be taken for this one's
            (ROOT / "nmkernels" / name).unlink(missing_ok=True)
            if EMULATOR:
                shutil.copy2(folder / name, ROOT / "nmkernels" / name)

    def _forget(self, ext: Extension) -> None:
        """Delete earlier builds of the module: one of older sources must not outlive a failed build."""
        Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)
        if self._in_place:
            module = ROOT.joinpath(*self.get_ext_filename(ext.name).split(os.sep))
            for built in (module, module.with_name(module.name.replace("_C", "_emulated", 1))):
                built.unlink(missing_ok=True)

    @staticmethod
    def _compile(folder: Path) -> None:
        """Run the build, with its output passed on as it comes; where it fails, its first error is the reason."""
        command = [find_tool("cmake"), "--build", str(folder)]
        if os.environ.get("MAX_JOBS"):
            command += ["--parallel", os.environ["MAX_JOBS"]]
        error, last = "", ""
        sys.stdout.flush()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            assert process.stdout is not None
            for line in process.stdout:
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()
                last = line.decode(errors="replace").strip() or last
                error = error or (last if ERROR.search(last) else "")
        if process.returncode:
            reason = f"compiling it failed; all messages are above, this is the first error:\n  {error or last}"
            if CUDA == "auto":
                reason += "\nIf nvcc failed, NMKERNELS_CUDA=off compiles the CPU kernels alone."
            raise CompileFailed(reason)

    def _configure(self) -> Path:
        cmake, ninja = find_tool("cmake"), find_tool("ninja")
        folder = ROOT / "build" / f"cmake-{sysconfig.get_platform()}{'-debug' if self.debug else ''}"
        options = {
            "CMAKE_BUILD_TYPE": "Debug" if self.debug else "Release",
            "CMAKE_MAKE_PROGRAM": ninja,
            "Python_EXECUTABLE": sys.executable,
            "NMKERNELS_PYBIND11_INCLUDE": pybind11_include(),
            "NMKERNELS_CUDA": CUDA,
            "NMKERNELS_EMULATOR": "ON" if EMULATOR and self._in_place else "OFF",
            "NMKERNELS_WERROR": os.environ.get("NMKERNELS_WERROR", "0"),
        }
        options |= {name: os.environ[name] for name in PASSED_ON if os.environ.get(name)}
        command = [cmake, "-S", str(ROOT / "csrc"), "-B", str(folder), "-G", "Ninja"]
        # forgotten first: what was found out about another Python, and what older sources had for defaults
        command += ["-U", "*Python*", "-U", "NMKERNELS_*", *(f"-D{k}={v}" for k, v in options.items())]
        cached = (folder / "CMakeCache.txt").exists()
        if subprocess.run(command, check=False).returncode and not (cached and self._configure_afresh(command, folder)):
            raise CoreUnavailable(
                "CMake could not configure the build, its message is above (usually: no C++ compiler, or no Python headers)"
            )
        return folder

    @staticmethod
    def _configure_afresh(command: list[str], folder: Path) -> bool:
        """A cache left by another checkout, compiler or CMake makes configuring fail; once more without it."""
        shutil.rmtree(folder)
        return subprocess.run(command, check=False).returncode == 0


def _warn(reason: str) -> None:
    bar = "!" * 100
    print(
        f"{bar}\nnmkernels is being installed WITHOUT its compiled core: {reason}\n"
        "Everything works, on the plain PyTorch reference, but slowly. Set NMKERNELS_REQUIRE_CORE=1 to make this an error.\n"
        f"{bar}",
        file=sys.stderr,
    )


if __name__ == "__main__":
    inputs = [str(p.relative_to(ROOT)) for folder in ("csrc", "cmake") for p in sorted((ROOT / folder).rglob("*")) if p.is_file()]
    core = Extension("nmkernels._C", sources=[], depends=inputs, optional=not REQUIRED)
    setup(ext_modules=[] if PURE else [core], cmdclass={"build": Build, "build_ext": BuildCore})
