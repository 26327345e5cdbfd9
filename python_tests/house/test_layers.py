"""The layers of the package and of csrc: imports and includes only go down, and sideways only inside one folder."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from python_tests.house.paths import CSRC, PACKAGE, ROOT

TOP = 99
"""The layer of the package's own ``__init__`` and ``__main__``: above all others."""


def layers() -> dict[str, int]:
    """The layer of each file and folder, from the table of CONTRIBUTING.md: ``nn``, ``recipes/contract``; ``_C`` is the compiled core."""
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.MULTILINE)
    table = {
        name.rstrip("/").removesuffix(".py"): int(layer) for layer, names in rows for name in re.findall(r"`([\w/]+(?:\.py|/))`", names)
    }
    return {"_version": 0, "_C": 0, **table, "__init__": TOP, "__main__": TOP}


LAYERS = layers()
CSRC_LAYERS = {"core": 0, "cpu": 1, "cuda": 1, "cusparselt": 1, "emulator": 1, "tests": 2, "bindings": 2}
CSRC_MAY_SHARE = {("cuda", "emulator"), ("cusparselt", "cuda")}
"""Pairs within a layer that may include each other: device code uses the emulator's types, cuSPARSELt shares launch helpers."""

SOURCES = {".h", ".hpp", ".cpp", ".cu", ".cuh"}


def import_violations(package: Path) -> list[str]:
    """Every import of ``package`` that goes up, goes sideways between folders, or is not relative; one line each."""
    found = []
    for path in sorted(package.rglob("*.py")):
        where = path.relative_to(package)
        for line, target in _imports(path, package):
            if complaint := _complaint(where.with_suffix("").as_posix(), target):
                found.append(f"{where}:{line}: {complaint}")
    return found


def _complaint(own: str, target: str) -> str:
    """What is wrong with an import by the file ``own`` of the file or folder ``target``, paths without ``.py``."""
    if not target:
        return "imports the package by its absolute name; write a relative import"
    for name in (own, target):
        if _layer(name) is None:
            return f"{name!r} has no layer; give it one in CONTRIBUTING.md"
    mine, theirs = _layer(own), _layer(target)
    near = own.split("/")[0] == target.split("/")[0]
    if theirs < mine or (mine == theirs and (near or mine in (0, TOP))):
        return ""
    return f"{own} (layer {mine}) imports {'up' if theirs > mine else 'sideways'} from {target} (layer {theirs})"


def _layer(name: str) -> int | None:
    """The layer of a file or folder: its own row's, or that of the folder it is in."""
    parts = name.split("/")
    return next((LAYERS[key] for n in range(len(parts), 0, -1) if (key := "/".join(parts[:n])) in LAYERS), None)


def _imports(path: Path, package: Path) -> Iterator[tuple[int, str]]:
    """(line, file or folder of the package) of every import, inside functions too; that of an absolute import is empty."""
    for node in ast.walk(_tree(path)):
        absolute = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            absolute = [node.module or ""]
        elif isinstance(node, ast.ImportFrom):
            folder = path.parents[node.level - 1].relative_to(package) / (node.module or "").replace(".", "/")
            yield from ((node.lineno, _home(folder, a.name, package)) for a in node.names)
        yield from ((node.lineno, "") for name in absolute if name.split(".")[0] == package.name)


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _home(folder: Path, name: str, package: Path) -> str:
    """Where ``from folder import name`` finds ``name``: in a file or folder of that name, or in ``folder`` itself."""
    inside = folder / name
    if (package / inside).is_dir() or (package / inside).with_suffix(".py").exists() or (folder == Path() and name in LAYERS):
        return inside.as_posix()
    return "__init__" if folder == Path() else folder.as_posix()


def import_circle(package: Path) -> list[str]:
    """Modules that import each other, inside functions and for types too; empty if there are none."""
    modules = {_module(path, package): path for path in package.rglob("*.py")}
    graph: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = ".".join([*path.parents[node.level - 1].relative_to(package).parts, *filter(None, [node.module])])
                targets = {f"{base}.{a.name}".lstrip(".") if f"{base}.{a.name}".lstrip(".") in modules else base for a in node.names}
                graph[name] |= targets & modules.keys() - {name}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def _module(path: Path, package: Path) -> str:
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def include_violations(csrc: Path) -> list[str]:
    """Every ``#include`` under ``csrc`` that goes up or sideways or is of torch, and CUDA headers in core; one line each."""
    found = []
    for path in sorted(p for p in csrc.rglob("*") if p.suffix in SOURCES):
        where = path.relative_to(csrc)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            match = re.match(r'\s*#\s*include\s*([<"])([^>"]+)[>"]', line)
            if match and (complaint := _include_complaint(where, match[2], match[1] == '"', csrc)):
                found.append(f"{where}:{number}: includes {match[2]}: {complaint}")
    return found


def _include_complaint(where: Path, header: str, quoted: bool, csrc: Path) -> str:
    own = _csrc_folder(where)
    if header.startswith(("torch/", "ATen/", "c10/")):
        return "no torch header anywhere in csrc"
    if own == "core" and re.match(r"cuda|cub/|thrust/|nv", header) and where.name != "types.h":
        return "CUDA headers of core belong in core/types.h"
    if not quoted:
        return ""
    near = (csrc / where).parent / header
    path = near if near.exists() else csrc / header
    if not path.exists():
        return "it is neither next to the file nor under csrc"
    target = _csrc_folder(path.resolve().relative_to(csrc.resolve()))
    if own == target or (own, target) in CSRC_MAY_SHARE or CSRC_LAYERS.get(target, 99) < CSRC_LAYERS.get(own, -1):
        return ""
    return f"{own} (layer {CSRC_LAYERS.get(own)}) may not include {target} (layer {CSRC_LAYERS.get(target)})"


def _csrc_folder(where: Path) -> str:
    """The folder of a source; files next to the folders are bindings: bindings.cpp, bindings_cuda.cpp, ..."""
    return re.split(r"[._]", where.name)[0] if len(where.parts) == 1 else where.parts[0]


def test_imports_and_includes_go_down() -> None:
    assert import_violations(PACKAGE) == [] and include_violations(CSRC) == []


def test_no_module_imports_one_that_imports_it() -> None:
    assert import_circle(PACKAGE) == []
