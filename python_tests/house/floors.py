"""The rule of the floors, as functions of a source tree: imports and includes only go down.

Kept apart from the tests so that the tests can run it on trees that break the rule.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

FLOORS = {
    "pattern": 0,
    "dispatch": 0,
    "capability": 0,
    "_version": 0,
    "_C": 0,
    "reference": 1,
    "tuning": 2,
    "backends": 3,
    "testing": 3,
    "ops": 4,
    "autograd": 5,
    "nn": 6,
    "optim": 6,
    "recipes": 7,
    "audit": 8,
    "export": 8,
    "distributed": 8,
    "integrations": 9,
    "models": 9,
    "cli": 10,
    "__init__": 11,
    "__main__": 11,
}
"""Floor of each file and folder of the package's top level; ``_C`` is the compiled core."""

CSRC_FLOORS = {"core": 0, "cpu": 1, "cuda": 1, "cusparselt": 1, "emulator": 1, "tests": 2, "bindings": 2}
CSRC_MAY_SHARE = {("cuda", "emulator"), ("cusparselt", "cuda")}
"""On the floor of the kernels, who may include whom: device code speaks the emulator's language there, cuSPARSELt shares launch helpers."""

FORBIDDEN_HEADERS = ("torch/", "ATen/", "c10/")
SOURCES = {".h", ".hpp", ".cpp", ".cu", ".cuh"}


def import_violations(package: Path) -> list[str]:
    """Every import of ``package`` that goes up, goes sideways between folders, or is not relative; one line each."""
    found = []
    for path in sorted(package.rglob("*.py")):
        own = _top(path.relative_to(package))
        if own not in FLOORS:
            found.append(f"{path.relative_to(package)}: {own!r} has no floor; give it one in python_tests/house/floors.py")
            continue
        for line, target in _imports(path, package):
            if complaint := _judge(own, target, package.name):
                found.append(f"{path.relative_to(package)}:{line}: {complaint}")
    return found


def _judge(own: str, target: str, name: str) -> str:
    if target == name:
        return f"imports {name} by its absolute name; write a relative import"
    if target == own and own != "__init__":
        return ""
    if target not in FLOORS:
        return f"imports {target!r}, which has no floor"
    mine, theirs = FLOORS[own], FLOORS[target]
    if theirs < mine or (theirs == mine == 0) or (mine == 11 and theirs == 11):
        return ""
    way = "up" if theirs > mine else "sideways"
    return f"{own} (floor {mine}) imports {way} from {target} (floor {theirs})"


def _top(relative: Path) -> str:
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def _imports(path: Path, package: Path) -> Iterator[tuple[int, str]]:
    """(line, top-level name of the package) of every import, inside functions and TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, package.name) for alias in node.names if alias.name.split(".")[0] == package.name)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            if (node.module or "").split(".")[0] == package.name:
                yield node.lineno, package.name
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, target) for target in _targets(node, path, package))


def _targets(node: ast.ImportFrom, path: Path, package: Path) -> Iterator[str]:
    base = path.parent
    for _ in range(node.level - 1):
        base = base.parent
    parts = [*base.relative_to(package).parts, *((node.module or "").split(".") if node.module else [])]
    if parts:
        yield parts[0]
        return
    for alias in node.names:
        # a name that is no file or folder comes from the package's __init__, the top floor
        yield (
            alias.name if alias.name in FLOORS or (package / alias.name).is_dir() or (package / f"{alias.name}.py").exists() else "__init__"
        )


def include_violations(csrc: Path) -> list[str]:
    """Every ``#include`` under ``csrc`` that goes up or sideways, and every torch header; one line each."""
    found = []
    for path in sorted(p for p in csrc.rglob("*") if p.suffix in SOURCES):
        where = path.relative_to(csrc)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            match = re.match(r'\s*#\s*include\s*([<"])([^>"]+)[>"]', line)
            if match and (complaint := _judge_include(where, match[2], match[1] == '"', csrc)):
                found.append(f"{where}:{number}: {complaint}")
    return found


def _csrc_floor(where: Path) -> str:
    """The folder of a source; the files beside the folders are all bindings: bindings.cpp, bindings_cuda.cpp, ..."""
    return re.split(r"[._]", where.name)[0] if len(where.parts) == 1 else where.parts[0]


def _judge_include(where: Path, header: str, quoted: bool, csrc: Path) -> str:
    own = _csrc_floor(where)
    if own not in CSRC_FLOORS:
        return f"{own!r} has no floor; give it one in python_tests/house/floors.py"
    if header.startswith(FORBIDDEN_HEADERS):
        return f"includes <{header}>: no torch header anywhere in csrc"
    if own == "core" and re.match(r"cuda|cub/|thrust/|nv", header) and where.name != "types.h":
        return f"includes <{header}>: CUDA headers of core belong in core/types.h"
    if not quoted:
        return ""
    near = (csrc / where).parent / header
    path = near if near.exists() else csrc / header
    if not path.exists():
        return f'includes "{header}", which is neither beside it nor under csrc'
    target = _csrc_floor(path.resolve().relative_to(csrc.resolve()))
    if target == own or CSRC_FLOORS.get(target, 99) < CSRC_FLOORS[own] or (own, target) in CSRC_MAY_SHARE:
        return ""
    return f"{own} (floor {CSRC_FLOORS[own]}) includes {target} (floor {CSRC_FLOORS.get(target, 'none')})"
