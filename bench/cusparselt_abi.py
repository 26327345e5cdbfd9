"""Compares our declarations of cuSPARSELt's interface with the library's own headers and symbols.

    python -m bench.cusparselt_abi                                      # checks the installed version, if there is one
    python -m bench.cusparselt_abi --header include --library lib.so    # another version; the result is added to the table

The package is built without the library's header: ``csrc/cusparselt/abi.h`` declares what it needs. The table
``csrc/tests/cusparselt/abi.csv`` has the results for each version, so that a test can compare without the library.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import io
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from importlib import util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REPORT = ROOT / "csrc" / "tests" / "cusparselt" / "abi_report.cpp"
TABLE = REPORT.with_name("abi.csv")

Findings = dict[str, str]
"""The values of a header, by the name of the constant, struct or call."""


def report(*options: str) -> Findings:
    """Compile and run ``abi_report.cpp``.

    Raises:
        RuntimeError: it does not compile.
    """
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise RuntimeError("no C++ compiler is on PATH")
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "report")
        done = subprocess.run([compiler, "-std=c++17", str(REPORT), "-o", program, *options], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr)
        text = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    return dict(line.split(",", 1) for line in text.splitlines())


@cache
def ours() -> Findings:
    """The values of ``csrc/cusparselt/abi.h``."""
    return report()


def theirs(header: Path, toolkit: Path) -> Findings:
    """The values of the header in a folder, with the CUDA headers of another; its version is under ``version``."""
    stand_in = REPORT.parent / "stand_in"
    return report("-DNM_HEADER", f"-I{header}", f"-I{toolkit}", "-idirafter", str(stand_in), "-Wno-deprecated-declarations")


def missing_symbols(library: Path) -> list[str]:
    """The calls of ours that a library does not have."""
    loaded = ctypes.CDLL(str(library))
    return [name for name in ours() if name.startswith("cusparseLt") and not name.endswith("_t") and not hasattr(loaded, name)]


def installed() -> Path | None:
    """The folder of the header installed by pip."""
    spec = util.find_spec("nvidia")
    for base in (spec.submodule_search_locations or []) if spec else []:
        for found in sorted(Path(base).glob("*/include/cusparseLt.h")):
            return found.parent
    return None


def toolkit() -> Path | None:
    """The folder of the CUDA headers that the library's header includes."""
    candidates = [Path(path) / "include" for path in ("/usr/local/cuda",)]
    for package, tail in (("nvidia", "cu13/include"), ("nvidia", "cuda_runtime/include"), ("triton", "backends/nvidia/include")):
        spec = util.find_spec(package)
        candidates += [Path(base) / tail for base in (spec.submodule_search_locations or [])] if spec else []
    return next((path for path in candidates if (path / "library_types.h").is_file()), None)


def read() -> dict[str, Findings]:
    """The table, by version."""
    with TABLE.open(newline="") as file:
        rows = list(csv.reader(file))
    return {version: {row[0]: row[i] for row in rows[1:]} for i, version in enumerate(rows[0]) if i}


def write(table: dict[str, Findings]) -> None:
    """Write the table, with a column for each version."""
    versions = sorted(table, key=lambda v: [int(part) for part in v.split(".")])
    names = list(dict.fromkeys(name for version in versions for name in table[version]))
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["what", *versions])
    lines.writerows([name, *(table[v].get(name, "") for v in versions)] for name in names)
    TABLE.write_text(text.getvalue())


def main(argv: Sequence[str] | None = None) -> int:
    """Compare a header with ours, print the differences, and add it to the table if a library was given too; 1 if something differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--header", type=Path, help="folder that holds cusparseLt.h")
    parser.add_argument("--library", type=Path, help="libcusparseLt.so.0 of the same version")
    parser.add_argument("--toolkit", type=Path, default=toolkit(), help="folder of the CUDA headers")
    args = parser.parse_args(argv)
    header = args.header or installed()
    if header is None or args.toolkit is None:
        print("cusparseLt.h or the CUDA headers are not installed; name their folders with --header and --toolkit", file=sys.stderr)
        return 2
    found, mine = theirs(header, args.toolkit), ours()
    version = found.pop("version")
    wrong = [f"{name}: {mine[name]} here, {found[name]} in {version}" for name in mine if mine[name] != found[name]]
    wrong += [f"{name} is not in {args.library}" for name in (missing_symbols(args.library) if args.library else [])]
    print("\n".join(wrong) or f"cuSPARSELt {version}: {len(mine)} constants, structs and calls agree with csrc/cusparselt/abi.h")
    if args.library and not wrong:
        write({**(read() if TABLE.exists() else {}), version: found})
        print(f"added to {TABLE.relative_to(ROOT)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
