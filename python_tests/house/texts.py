"""Rules on the text of the sources, as functions of a path: sizes, docstrings, no print, no machine paths."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

SOFT_LINES, HARD_LINES, FUNCTION_LINES, CPP_LINES = 300, 400, 50, 500
SOFT_SHARE = 0.05
"""At most this share of the Python files may lie between the soft and the hard limit."""

CPP = {".h", ".hpp", ".cpp", ".cu", ".cuh"}
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


def size_violations(files: list[Path], root: Path) -> list[str]:
    """Files and functions that are too long; the docstring of a function does not count."""
    found, between, python = [], [], 0
    for path in files:
        lines, where = len(path.read_text(encoding="utf-8").splitlines()), path.relative_to(root)
        if path.suffix in CPP and lines > CPP_LINES:
            found.append(f"{where}: {lines} lines, the limit is {CPP_LINES}")
        if path.suffix != ".py":
            continue
        python += 1
        if lines > HARD_LINES:
            found.append(f"{where}: {lines} lines, the hard limit is {HARD_LINES}")
        elif lines > SOFT_LINES:
            between.append(f"{where} ({lines})")
        found += _long_functions(path, where)
    if len(between) > SOFT_SHARE * python:
        found.append(f"{len(between)} of {python} files are over {SOFT_LINES} lines, at most {SOFT_SHARE:.0%} may be: {', '.join(between)}")
    return found


def _long_functions(path: Path, where: Path) -> list[str]:
    found = []
    for node in ast.walk(_tree(path)):
        if isinstance(node, FunctionNode):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1 - _docstring_lines(node)
            if lines > FUNCTION_LINES:
                found.append(f"{where}:{node.lineno}: {node.name} has {lines} lines, the limit is {FUNCTION_LINES}")
    return found


def _docstring_lines(node: FunctionNode) -> int:
    first = node.body[0]
    if ast.get_docstring(node) is None:
        return 0
    return (first.end_lineno or first.lineno) - first.lineno + 1


def docstring_violations(files: list[Path], root: Path) -> list[str]:
    """Modules and public classes, functions and methods without a docstring."""
    found = []
    for path in files:
        tree, where = _tree(path), path.relative_to(root)
        if not ast.get_docstring(tree) and tree.body:
            found.append(f"{where}: the module has no docstring")
        found += [f"{where}:{node.lineno}: {name} has no docstring" for name, node in _public(tree, "") if not ast.get_docstring(node)]
    return found


def _public(parent: ast.Module | ast.ClassDef, prefix: str) -> Iterator[tuple[str, FunctionNode | ast.ClassDef]]:
    for node in ast.iter_child_nodes(parent):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) or node.name.startswith("_"):
            continue
        if any(_last_name(d) in {"overload", "setter", "deleter"} for d in node.decorator_list):
            continue
        yield prefix + node.name, node
        if isinstance(node, ast.ClassDef):
            yield from _public(node, f"{prefix}{node.name}.")


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def print_violations(files: list[Path], root: Path) -> list[str]:
    """Calls of ``print`` and writes to the standard streams: a library logs, or stays silent."""
    found = []
    for path in files:
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {"print", "sys.stdout.write", "sys.stderr.write"}:
                found.append(f"{path.relative_to(root)}:{node.lineno}: {ast.unparse(node.func)}() outside the command line")
    return found


# pieced together, so that this file does not break its own rule
HOMES = ("wo" + "rk", "ro" + "ot", "ho" + "me/[a-z]+", "Us" + "ers")
MACHINE_PATH = re.compile(rf"(?<![\w.~])/(?:{'|'.join(HOMES)})/|[A-Z]:\\{HOMES[-1]}")


def path_violations(files: list[Path], root: Path) -> list[str]:
    """Lines that name a folder of somebody's machine."""
    found = []
    for path in files:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if match := MACHINE_PATH.search(line):
                found.append(f"{path.relative_to(root)}:{number}: {match[0]} is a path of one machine")
    return found


def unfinished_violations(files: list[Path], root: Path) -> list[str]:
    """Work left open: TODO, FIXME, XXX, and ``raise NotImplementedError`` in place of code."""
    marks = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X"]) + r")\b|raise " + "NotImplemented" + "Error")
    found = []
    for path in files:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if match := marks.search(line):
                found.append(f"{path.relative_to(root)}:{number}: {match[0]}")
    return found


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))
