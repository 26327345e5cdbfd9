"""What the documents say is so: their code runs, their commands are understood, what they name exists, and the site is whole.

A ```python block runs among the quick tests; a ```py block (it needs a library that is slow to import, or a process group) in a slow test,
after all other blocks of its page, in a process like one of torchrun's. A ```python3 block needs a GPU, or a library that CI
lacks, and runs in no test. Tabs indent their blocks.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import nmkernels as nm
from nmkernels import dispatch
from nmkernels.recipes import registry
from python_tests.examples.program import train
from python_tests.house.paths import PACKAGE, ROOT
from python_tests.house.test_public_api import MODULES

PAGES = sorted((ROOT / "docs").rglob("*.md"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]
TARGETS = set(re.findall(r"^([a-z-]+):(?!=)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
PLACEHOLDER = re.compile(r"family|mine|verb|_x\b|/x\.")
"""Names that stand for a file somebody adds."""

ADDRESS = re.compile(r"https://([a-z0-9-]+\.)+[a-z]+(/[\w.~%+/#?=&-]*[\w/])?")
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
TRAIN = "examples/train_gpt/train.py"
ONE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
"""What torchrun sets, for the blocks that begin a process group; others would begin one by themselves."""


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix().removeprefix("docs/")


def blocks(path: Path, *languages: str) -> list[str]:
    """The code blocks of a document in these languages."""
    found = FENCE.findall(path.read_text(encoding="utf-8"))
    return [textwrap.dedent(code) for _, language, code in found if language in languages]


def exists(test: str) -> bool:
    """Whether there is such a test; ``family/test_file.py::test_name``."""
    file, _, name = test.partition("::")
    path = ROOT / "python_tests" / file
    return path.exists() and f"def {name}(" in path.read_text(encoding="utf-8")


def unknown(text: str, folder: Path) -> set[str]:
    """Targets, verbs, files and links that a text names and that there are not."""
    made = set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)) - TARGETS
    verbs = {v for v in re.findall(r"python -m nmkernels ([a-z]+[0-9]*)", text) if not (PACKAGE / "cli" / f"{v}.py").exists()}
    files = re.findall(r"`((?:nmkernels|python_tests|bench|cmake|csrc|docs|examples)/[\w/.-]+)`", text)
    tests = [t for t in re.findall(r"`([\w/]+\.py::\w+)`", text) if not exists(t)]
    prose = FENCE.sub("", text)
    links = [link for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", prose) if "://" not in link]
    missing = {f for f in files if not (ROOT / f).exists() and not PLACEHOLDER.search(f)}
    missing |= {link for link in links if not (folder / link).exists()}
    return made | verbs | missing | set(tests)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_what_is_named_exists(path: Path) -> None:
    assert unknown(path.read_text(encoding="utf-8"), path.parent) == set()


DOTTED = re.compile(r"(?<![\w.'/-])nm(?:\.[A-Za-z_]\w*)+")
FILES = re.compile(r"\b(?:nmkernels|python_tests|bench|cmake|csrc|docs|examples)/[\w/.-]+\.(?:py|md|cpp|cu|cuh|h)\b")


def resolves(dotted: str) -> bool:
    """Whether ``nm.a.b`` exists. Adapters to other libraries are not imported: their file has to have the name."""
    value, names = nm, dotted.split(".")[1:]
    adapter = PACKAGE.joinpath(*names[:2]).with_suffix(".py")
    if names[0] == "integrations" and adapter.exists():
        return all(re.search(rf"\b{name}\b", adapter.read_text(encoding="utf-8")) for name in names[2:3])
    for name in names:
        if not hasattr(value, name):
            return isinstance(value, type) and any(name in vars(kind).get("__annotations__", {}) for kind in value.__mro__)
        value = getattr(value, name)
    return True


def test_names_and_files_in_texts_exist() -> None:
    """Those that docstrings, comments, messages and documents write as ``nm.a.b`` or as a path from the root."""
    folders = [(PACKAGE, "py"), (ROOT / "examples", "py"), (ROOT / "docs", "md"), (ROOT / "bench", "md")]
    folders += [(ROOT / "csrc", ending) for ending in ("md", "h", "cpp", "cu", "cuh")]
    paths = [path for folder, ending in folders for path in folder.rglob(f"*.{ending}")]
    paths += [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile", ".pre-commit-config.yaml", "pyproject.toml")]
    # an address on the web may have the package's name in it
    texts = {path: re.sub(r"https://\S+", "", path.read_text(encoding="utf-8")) for path in paths}
    names = {(name_of(path), name) for path, text in texts.items() for name in DOTTED.findall(text)}
    files = {(name_of(path), name) for path, text in texts.items() for name in FILES.findall(text) if not PLACEHOLDER.search(name)}
    assert sorted(pair for pair in names if not resolves(pair[1])) == []
    assert sorted(pair for pair in files if not (ROOT / pair[1]).exists()) == []


def anchors(path: Path) -> set[str]:
    """What ``#...`` may follow the path of a document: its headings as GitHub writes them, and the names that its API shows."""
    text = path.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    names = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings} | set(names)


@pytest.mark.parametrize("path", [*DOCUMENTS, ROOT / "bench/accuracy/README.md", ROOT / "bench/results/README.md"], ids=name_of)
def test_links_have_their_anchors_and_addresses_their_form(path: Path) -> None:
    """That the site's own anchors are there too is for the strict build; no network is asked whether an address is."""
    prose = FENCE.sub("", path.read_text(encoding="utf-8"))
    links = re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", prose)
    assert [f"{to}#{anchor}" for to, anchor in links if "://" not in to and anchor not in anchors(path.parent / to if to else path)] == []
    assert [address for address in re.findall(r"\w+://[^\s)>\]`|]+", prose) if not ADDRESS.fullmatch(address)] == []


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if blocks(path, "python")], ids=name_of)
def test_code_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # what a page adds to the package, it adds for itself
    monkeypatch.setattr(registry, "_recipes", dict(registry._recipes))
    monkeypatch.setattr(dispatch, "_impls", dict(dispatch._impls))
    names: dict[str, object] = {"__name__": path.stem}
    for number, block in enumerate(blocks(path, "python"), 1):
        exec(compile(block, f"{name_of(path)}, python block {number}", "exec", dont_inherit=True), names)


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in DOCUMENTS if blocks(path, "py")], ids=name_of)
def test_slow_code_runs(path: Path, tmp_path: Path) -> None:
    code = blocks(path, "python") + blocks(path, "py")
    ranked = [f"import os; os.environ.update({ONE_RANK})\n{block}" if "init_process_group" in block else block for block in code]
    (tmp_path / "page.py").write_text("\n".join(ranked), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "page.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if blocks(path, "sh")], ids=name_of)
def test_commands_are_understood(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``python -m nmkernels VERB ...`` and train_gpt have the options that they are given; other programs in examples/ are there."""
    lines = [line.partition(" #")[0].strip() for block in blocks(path, "sh") for line in block.splitlines()]
    for line in lines:
        words = shlex.split(line)
        if "nmkernels" in words and words[words.index("nmkernels") - 1] == "-m":
            verb, *rest = words[words.index("nmkernels") + 1 :]
            parser = argparse.ArgumentParser(prog=line, exit_on_error=False)
            importlib.import_module(f"nmkernels.cli.{verb}").add_arguments(parser)
            parser.parse_args(rest)
        if TRAIN in words:
            with monkeypatch.context() as patch:
                if "torchrun" in words:
                    patch.setenv("RANK", "0")
                train.arguments(words[words.index(TRAIN) + 1 :])
        assert all((ROOT / word).exists() for word in words if word.startswith("examples/")), line


def test_every_page_is_in_the_navigation() -> None:
    pytest.importorskip("mkdocs", reason="the site is built by the extra docs")
    yaml = pytest.importorskip("yaml")
    hook = importlib.import_module("docs.hooks.pages")
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))

    def flat(nav: object) -> list[str]:
        if isinstance(nav, dict):
            return [page for value in nav.values() for page in flat(value)]
        return [page for entry in nav for page in flat(entry)] if isinstance(nav, list) else [str(nav)]

    listed = flat(hook.expand(settings["nav"]))
    assert sorted(listed) == sorted({path.relative_to(ROOT / "docs").as_posix() for path in PAGES} | set(hook.pages().values()))


def test_every_public_name_has_its_place_in_the_api() -> None:
    """By the module that defines it, since some names are found under several."""
    written = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs/api").glob("*.md"))
    shown = set(re.findall(r"^::: [\w.]*?(\w+)$", written, re.MULTILINE))
    listed = {
        name: value
        for module in MODULES
        for name, value in vars(importlib.import_module(module)).items()
        if name in importlib.import_module(module).__all__ and callable(value)
    }
    assert set(listed) - shown == set()


@pytest.mark.slow
def test_the_site_is_built_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the site is built by the extra docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr[-3000:]
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > len(PAGES)
    for page in pages:  # nothing is downloaded: what a page loads is in the same folder
        loaded = re.findall(r'<(?:script|img|link)\b[^>]*\b(?:src|href)="([^"]+)"', page.read_text(encoding="utf-8"))
        assert not [address for address in loaded if "://" in address], page


@pytest.mark.slow
@pytest.mark.parametrize("figures", ["speed.py", "evidence.py"])
def test_the_figures_show_the_committed_rows(figures: str) -> None:
    done = subprocess.run([sys.executable, f"docs/figures/{figures}", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
