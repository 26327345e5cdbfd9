"""Tries nmkernels as users get it: a built module alone, or the installed package, with no source tree beside it.

Run by the interpreter to be tried::

    python cmake/try_wheel.py load dist/nmkernels-*.whl   # the compiled module loads, without torch and without CUDA
    python cmake/try_wheel.py lines                       # import, doctor, the ten lines of the README
    python cmake/try_wheel.py smoke                       # these, a short training run, the tests of the kernels
    python cmake/try_wheel.py all                         # these, and the CPU test suite
    python cmake/try_wheel.py lines --without-core        # of a package that was built without its core

The tests are copied to a folder without ``nmkernels/`` and ``csrc/`` and run there: in the source tree they would find
its package before the installed one.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = {
    "lines": [],
    "smoke": ["-m", "not slow", *(f"python_tests/{p}" for p in ("ops", "csrc", "test_capability.py", "backends/test_cpu.py"))],
    # what is asked of the sources is not asked of an installed package
    "all": ["python_tests", "--ignore=python_tests/house"],
}
ABSENT = ("libtorch", "libc10", "libcuda", "libcudart", "libcusparseLt")
"""Libraries that the compiled module must not bring into the process."""


def main() -> int:
    """Run what is asked for; 0 when it worked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("load", *TESTS))
    parser.add_argument("wheel", nargs="?", type=Path, help="for load")
    parser.add_argument("--jobs", default="2", help="test processes; default 2")
    parser.add_argument("--without-core", action="store_true", help="the package must be without its compiled core")
    options = parser.parse_args()
    if options.what == "load":
        load(options.wheel)
    else:
        installed(options.what, options.jobs, not options.without_core)
    return 0


def load(wheel: Path) -> None:
    """Load the wheel's compiled module by itself: the package around it would import torch."""
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as archive:
            (name,) = [n for n in archive.namelist() if n.startswith("nmkernels/_C.") and n.endswith(".so")]
            module = archive.extract(name, folder)
        spec = importlib.util.spec_from_file_location("nmkernels._C", module)
        assert spec is not None and spec.loader is not None
        core = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(core)
        # macOS has no such file
        mapped = Path("/proc/self/maps").read_text() if sys.platform.startswith("linux") else ""
        found = sorted(library for library in ABSENT if f"/{library}" in mapped)
        if found or "torch" in sys.modules:
            raise SystemExit(f"{wheel.name}: loading the compiled module loads {', '.join(found) or 'torch'} too")
        print(f"   loads alone: ABI {core.abi}, instruction set {core.isa()}")


def installed(what: str, jobs: str, core: bool) -> None:
    """The package of this environment, in a folder that holds the tests and nothing of the package."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        place = Path(run(folder, "-c", "import nmkernels; print(nmkernels.__file__)").strip())
        if not place.resolve().is_relative_to(Path(sys.prefix).resolve()):
            raise SystemExit(f"nmkernels is imported from {place}, not from the environment {sys.prefix}")
        healthy(folder, core)
        ten_lines(folder)
        if not TESTS[what]:
            return
        for part in ("python_tests", "bench", "docs", "examples"):
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        trains(folder)
        for part in ("pyproject.toml", "README.md", "CONTRIBUTING.md", "Makefile"):
            shutil.copy(ROOT / part, folder)
        start = time.monotonic()
        tests = run(folder, "-m", "pytest", "-q", "-n", jobs, "-p", "no:cacheprovider", *TESTS[what])
        print(f"   {tests.strip().splitlines()[-1].strip('= ')} ({time.monotonic() - start:.0f} s)")


def healthy(folder: Path, core: bool) -> None:
    """``doctor`` finds every op right, and the compiled core where there must be one."""
    found = json.loads(run(folder, "-m", "nmkernels", "doctor", "--json"))
    compiled = found["capabilities"]["compiled_core"]
    if not found["healthy"] or compiled["ok"] != core:
        raise SystemExit(f"doctor: {json.dumps(found, indent=2)}")
    print(f"   doctor: {compiled['reason']}")


def ten_lines(folder: Path) -> None:
    """The README's first program."""
    program = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert program is not None
    (folder / "ten_lines.py").write_text(program[1], encoding="utf-8")
    start = time.monotonic()
    run(folder, "ten_lines.py")
    print(f"   the README's ten lines run ({time.monotonic() - start:.0f} s)")


def trains(folder: Path) -> None:
    """A short run of the example train_gpt, which compresses the model, reloads it and compares."""
    sizes = shlex.split("--steps 30 --batch 4 --context 32 --width 64 --layers 2 --heads 2 --log-every 30 --threads 1")
    start = time.monotonic()
    run(folder, "examples/train_gpt/train.py", "--recipe", "srste:2:4", "--out", "run", *sizes)
    figures = json.loads((folder / "run/result.json").read_text())
    print(f"   train, compress: {len(figures)} figures ({time.monotonic() - start:.0f} s)")


def run(folder: Path, *words: str) -> str:
    """What this interpreter prints for ``words`` in the folder; no GPU is seen there, and no other package path."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "NMKERNELS_BACKEND", "TRITON_INTERPRET")}
    env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "NMKERNELS_REQUIRE_CORE": "1"}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed ({done.returncode}):\n{done.stdout[-8000:]}\n{done.stderr[-4000:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
