"""Every recipe has its page with its own keywords and facts, and the figures are what their scripts draw."""

from __future__ import annotations

import importlib
import re
from dataclasses import fields
from types import ModuleType

import pytest

from nmkernels.recipes import names
from nmkernels.recipes.registry import find
from python_tests.house.paths import ROOT

METHODS, HOW = ROOT / "docs" / "methods", ROOT / "docs" / "how"
LARGEST = 60_000
"""Bytes of a figure."""


def script(name: str) -> ModuleType:
    return importlib.import_module(f"docs.figures.{name}")


def test_every_recipe_has_a_page() -> None:
    assert {path.stem for path in METHODS.glob("*.md")} == {*names(), "index", "step-evidence"}
    index = (METHODS / "index.md").read_text(encoding="utf-8")
    assert all(f"]({name}.md)" in index for name in names())
    assert sorted(name for group in script("facts").GROUPS.values() for name in group) == names()


@pytest.mark.parametrize("name", names())
def test_page(name: str) -> None:
    text, cls = (METHODS / f"{name}.md").read_text(encoding="utf-8"), find(name)
    assert f"\n::: {cls.__module__}.{cls.__qualname__}\n" in text and f"]({name}.svg)" in text
    for heading in ("Equations", "What happens in a run", "When it fails", "Use", "Keywords"):
        assert f"\n## {heading}\n" in text
    known = {f.name for other in names() for f in fields(find(other))}
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    assert {word for code in re.findall(r"`([^`\n]+)`", prose) for word in re.findall(r"\b(\w+)=", code)} <= known


def test_facts_are_those_of_the_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    assert script("facts").main(["--check"]) == 0, capsys.readouterr().out


@pytest.mark.slow
def test_figures_of_how_it_works(capsys: pytest.CaptureFixture[str]) -> None:
    assert script("how").main(["--check"]) == 0, capsys.readouterr().out
    assert {path.stem for path in HOW.glob("*.svg")} == set(script("how").FIGURES) == {path.stem for path in HOW.glob("*.md")} - {"index"}


def test_every_recipe_has_a_figure() -> None:
    assert set(script("methods").FIGURES) == set(names())
    sizes = {path.name: path.stat().st_size for folder in (METHODS, HOW) for path in folder.glob("*.svg")}
    assert {name: size for name, size in sizes.items() if size > LARGEST} == {}


def test_a_figure_is_what_its_run_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shortest piece of it: the first 12 of 240 steps of one recipe, with and without a change."""
    methods = script("methods")
    monkeypatch.setattr(methods, "STEPS", 12)
    first = methods.figure("srste")
    assert methods.same(first, methods.figure("srste"))
    monkeypatch.setattr(methods, "SEED", 3)
    assert not methods.same(first, methods.figure("srste"))


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_figures_of_methods(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert script("methods").main(["--check", name]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("latex", [r"\widetilde W \odot M", r"\operatorname*{arg\,min}_w \lVert w \rVert^2"])
def test_equations_become_mathml(latex: str) -> None:
    pytest.importorskip("latex2mathml", reason="the site is built by the extra docs")
    made = importlib.import_module("docs.hooks.mathml")
    page = made.on_page_content(f'<p><span class="arithmatex">\\({latex}\\)</span></p>')
    assert page.startswith("<p><math") and "arithmatex" not in page
    for unknown in (r"\nosuchcommand x", "a & b", r"\operatorname*{a\,b} x"):
        with pytest.raises(ValueError, match="not known"):
            made.mathml(unknown, False)
    assert "<munder>" in made.mathml(r"\operatorname*{arg\,min}_w w^2", True)
    rows = made.mathml(r"\begin{aligned} a &= b \\ c &= d \end{aligned}", True)
    assert rows.count("<mtr>") == 2 and "&</" not in rows


def test_code_in_a_table_is_broken_where_a_reader_would() -> None:
    pytest.importorskip("mkdocs", reason="the site is built by the extra docs")
    made = importlib.import_module("docs.hooks.pages").on_page_content("<td><code>a/b_c.py::d()</code> e/f</td><p><code>a/b</code></p>")
    assert made == "<td><code>a/<wbr>b_<wbr>c.<wbr>py::<wbr>d()</code> e/f</td><p><code>a/b</code></p>"


def test_how_pages_have_their_figures() -> None:
    for path in HOW.glob("*.md"):
        assert path.stem == "index" or f"]({path.stem}.svg)" in path.read_text(encoding="utf-8")
