"""What the documents say is so: their code runs, and the make targets, verbs, files and links that they name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from python_tests.house.tree import PACKAGE, ROOT

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TARGETS = set(re.findall(r"^([a-z-]+):(?!=)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
PLACEHOLDER = re.compile(r"family|mine")
"""Names that stand for a file somebody adds."""


def exists(test: str) -> bool:
    """Whether there is such a test; ``family/test_file.py::test_name``."""
    file, _, name = test.partition("::")
    path = ROOT / "python_tests" / file
    return path.exists() and f"def {name}(" in path.read_text(encoding="utf-8")


def unknown(text: str, folder: Path) -> set[str]:
    """Targets, verbs, files and links that a text names and that there are not."""
    made = set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)) - TARGETS
    verbs = {v for v in re.findall(r"python -m nmkernels ([a-z]+[0-9]*)", text) if not (PACKAGE / "cli" / f"{v}.py").exists()}
    files = re.findall(r"`((?:nmkernels|python_tests|bench|cmake|csrc|docs)/[\w/.-]+)`", text)
    tests = [t for t in re.findall(r"`([\w/]+\.py::\w+)`", text) if not exists(t)]
    links = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in link]
    missing = {f for f in files if not (ROOT / f).exists() and not PLACEHOLDER.search(f)}
    missing |= {link for link in links if not (folder / link).exists()}
    return made | verbs | missing | set(tests)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_what_is_named_exists(path: Path) -> None:
    assert unknown(path.read_text(encoding="utf-8"), path.parent) == set()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_code_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": path.stem}
    blocks = re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"{path.name}, python block {number}", "exec"), names)
