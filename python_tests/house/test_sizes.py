"""Files and functions stay short, libraries stay silent, no path of anybody's machine, nothing left half done."""

from __future__ import annotations

from pathlib import Path

import pytest

from python_tests.house import texts
from python_tests.house.tree import CSRC, ROOT, python_files, text_files


def test_files_and_functions_are_short() -> None:
    cpp = [p for p in CSRC.rglob("*") if p.suffix in texts.CPP]
    assert texts.size_violations([*python_files("nmkernels", "bench", "python_tests"), ROOT / "setup.py", *cpp], ROOT) == []


def test_the_emulator_stays_small() -> None:
    lines = [
        line.strip() for p in (CSRC / "emulator").iterdir() if p.suffix in texts.CPP for line in p.read_text(encoding="utf-8").splitlines()
    ]
    assert len([line for line in lines if line and not line.startswith("//")]) <= 600


def test_only_the_command_line_prints() -> None:
    files = [p for p in python_files("nmkernels") if p.parts[len(ROOT.parts) + 1] not in {"cli", "__main__.py"}]
    assert texts.print_violations(files, ROOT) == []


def test_no_path_of_one_machine() -> None:
    assert texts.path_violations(text_files(), ROOT) == []


def test_nothing_left_half_done() -> None:
    cpp = [p for p in CSRC.rglob("*") if p.suffix in texts.CPP]
    assert texts.unfinished_violations([*python_files("nmkernels", "bench"), *cpp], ROOT) == []


def _write(tmp_path: Path, name: str, text: str) -> list[Path]:
    path = tmp_path / name
    path.write_text(text)
    return [path]


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("a.py", "x = 1\n" * 401, "a.py: 401 lines, the hard limit is 400"),
        ("a.cpp", "int x;\n" * 501, "a.cpp: 501 lines, the limit is 500"),
        ("a.cuh", "int x;\n" * 501, "a.cuh: 501 lines, the limit is 500"),
        ("a.py", "def f():\n" + "    x = 1\n" * 50, "a.py:1: f has 51 lines, the limit is 50"),
        ("a.py", "class A:\n  async def f(self):\n" + "    x = 1\n" * 50, "a.py:2: f has 51 lines, the limit is 50"),
        ("a.py", "x = 1\n" * 301, "1 of 1 files are over 300 lines, at most 5% may be: a.py (301)"),
    ],
)
def test_too_long_is_named(tmp_path: Path, name: str, text: str, complaint: str) -> None:
    assert texts.size_violations(_write(tmp_path, name, text), tmp_path) == [complaint]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", "x = 1\n" * 300),
        ("a.cpp", "int x;\n" * 500),
        ("a.py", "def f():\n" + "    x = 1\n" * 49),
        ("a.py", 'def f():\n    """What.\n\n    ' + "why\n    " * 20 + '"""\n' + "    x = 1\n" * 49),
    ],
)
def test_short_enough_passes(tmp_path: Path, name: str, text: str) -> None:
    assert texts.size_violations(_write(tmp_path, name, text), tmp_path) == []


@pytest.mark.parametrize("text", ["print(1)", "def f():\n    print(1)", "import sys\nsys.stderr.write('x')"])
def test_print_is_named(tmp_path: Path, text: str) -> None:
    assert len(texts.print_violations(_write(tmp_path, "a.py", text), tmp_path)) == 1


def test_path_is_named(tmp_path: Path) -> None:
    lines = [
        "open('/ho" + "me/ada/x')",
        "see /ro" + "ot/x",
        "# under /wo" + "rk/main",
        "https://a.org/wo" + "rk/x",
        "a/ro" + "ot/b",
        "x/ho" + "me/",
    ]
    found = texts.path_violations(_write(tmp_path, "a.py", "\n".join(lines)), tmp_path)
    assert [f.split(":")[1] for f in found] == ["1", "2", "3"]


def test_half_done_is_named(tmp_path: Path) -> None:
    lines = ["x = 1  # TO" + "DO later", "raise NotImplemented" + "Error", "return NotImplemented", "todos = []"]
    found = texts.unfinished_violations(_write(tmp_path, "a.py", "\n".join(lines)), tmp_path)
    assert [f.split(":")[1] for f in found] == ["1", "2"]
