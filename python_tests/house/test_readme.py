"""What the documents say is so: code runs, make targets, verbs and files exist, the table is that of the rows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import nmkernels as nm
from bench import report
from nmkernels.cli import VERBS
from python_tests.house.tree import ROOT

DOCUMENTS = ("README.md", "CONTRIBUTING.md")


def code_blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def unknown_targets(text: str, makefile: str) -> set[str]:
    """Targets that the text tells to make, and that the Makefile does not have."""
    known = set(re.findall(r"^([a-z]+):(?!=)", makefile, re.MULTILINE))
    return set(re.findall(r"(?:^|`)make ([a-z]+)", text, re.MULTILINE)) - known


def unknown_verbs(text: str) -> set[str]:
    """Verbs of ``python -m nmkernels`` in the text that do not exist."""
    return set(re.findall(r"python -m nmkernels ([a-z]+)", text)) - set(VERBS)


def dead_links(text: str, folder: Path) -> set[str]:
    """Relative links that lead nowhere."""
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", text)
    return {t for t in targets if "://" not in t and not (folder / t).exists()}


def _text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_readme_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = code_blocks(_text("README.md"), "python")
    assert len(blocks) >= 3
    names: dict[str, object] = {"__name__": "readme"}
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"README.md, python block {number}", "exec"), names)
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_targets_verbs_and_links_exist(name: str) -> None:
    text = _text(name)
    assert unknown_targets(text, _text("Makefile")) == set()
    assert unknown_verbs(text) == set()
    assert dead_links(text, ROOT) == set()


def test_readme_shows_the_committed_rows() -> None:
    assert report.main(["--check"]) == 0


def test_readme_opens_with_the_two_commands() -> None:
    first = code_blocks(_text("README.md"), "sh")[0]
    assert [line.split("#")[0].strip() for line in first.splitlines()] == ["make demo", "make test"]


def test_changelog_has_its_headings() -> None:
    text = _text("CHANGELOG.md")
    assert "## [Unreleased]" in text and "### Numerics" in text


def test_files_named_in_contributing_exist() -> None:
    named = set(re.findall(r"`((?:python_tests|bench|cmake|csrc)/[\w/.]+\.(?:py|cpp|h|txt))`", _text("CONTRIBUTING.md"))) - {
        "bench/x.py",
        "bench/test_x.py",
    }
    assert named and {n for n in named if not (ROOT / n).exists()} == set()


def test_checkers_notice(tmp_path: Path) -> None:
    assert unknown_targets("make demo\nuse `make nosuch` to make sense", "demo: x\nhelp := 1\n") == {"nosuch"}
    assert unknown_verbs("python -m nmkernels doctor, python -m nmkernels nosuch") == {"nosuch"}
    assert dead_links("[a](nosuch.md) [b](https://a.org/x) [c](there.md#top)", tmp_path) == {"nosuch.md", "there.md"}
    assert code_blocks("```python\nx = 1\n```\n```sh\nls\n```\n", "python") == ["x = 1\n"]


def test_readme_names_every_recipe() -> None:
    table = _text("README.md").partition("## Methods")[2].partition("\n\n`python -m")[0]
    assert set(re.findall(r"`([a-z0-9]+)`", table)) == set(nm.recipes.names())
