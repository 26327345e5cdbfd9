"""A mkdocs hook that adds pages from outside docs/, orders a folder's pages, and rewrites links.

Links in the sources are paths in the repository; they become links of the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]

PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing/index.md",
    "CHANGELOG.md": "changelog.md",
    "bench/accuracy/README.md": "bench/accuracy.md",
    "bench/accuracy/rates.md": "bench/rates.md",
    "bench/results/README.md": "bench/results.md",
}
"""Documents outside docs/ → their pages. Every program in examples/ has a page too."""

LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\]\()([^)\s#]*)(#[^)\s]*)?((?:\s+\"[^\"]*\")?\))")
CELL = re.compile(r"<td[^>]*>.*?</td>", re.DOTALL)
CODE = re.compile(r"(?<=<code>).*?(?=</code>)")
BREAK = re.compile(r"(?<=[/_.:=(])(?=\w)")
FENCE = re.compile(r"^( *)(```+|~~~+).*?^\1\2 *$", re.MULTILINE | re.DOTALL)


def pages() -> dict[str, str]:
    """Path in the repository → page of the site."""
    examples = [*sorted((ROOT / "examples").glob("[!_]*.py")), ROOT / "examples/train_gpt/train.py"]
    names = [path.relative_to(ROOT).as_posix() for path in examples]
    return PAGES | {name: f"{name.removesuffix('.py')}.md" for name in names}


def read(source: str) -> str:
    """The Markdown of a document outside docs/; a program becomes a code block."""
    text = (ROOT / source).read_text(encoding="utf-8")
    if source.endswith(".py"):
        name = posixpath.basename(source)
        return f"# {name}\n\n`{source}`, run by the tests.\n\n```python\n{text}```\n"
    return text


def order(folder: Path) -> list[str]:
    """The pages of a folder of docs/ except index.md, in the order of the links in index.md."""
    names = sorted(path.name for path in folder.glob("*.md") if path.name != "index.md")
    index = folder / "index.md"
    text = index.read_text(encoding="utf-8") if index.exists() else ""
    linked = [target for _, target, _, _ in LINK.findall(text)]
    return sorted(names, key=lambda name: linked.index(name) if name in linked else len(linked))


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Expand ``folder/*`` in the navigation."""
    config.nav = expand(config.nav or [])
    return config


def expand(nav: list[Any]) -> list[Any]:
    """``nav`` with every ``folder/*`` replaced by its pages."""
    found: list[Any] = []
    for entry in nav:
        if isinstance(entry, str) and entry.endswith("/*"):
            folder = entry[:-2]
            found += [f"{folder}/{name}" for name in order(ROOT / "docs" / folder)]
        elif isinstance(entry, dict):
            ((title, value),) = entry.items()
            if value == "examples/*":
                value = [page for page in pages().values() if page.startswith("examples/")]
            found.append({title: expand(value) if isinstance(value, list) else value})
        else:
            found.append(entry)
    return found


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside docs/ and their figures."""
    for source, page in pages().items():
        text = read(source)
        files.append(File.generated(config, page, content=text))
        for _, target, _, _ in LINK.findall(text):
            add_figure(files, config, posixpath.normpath(posixpath.join(posixpath.dirname(source), target)))
    for path in sorted((ROOT / "docs").rglob("*.md")):
        for _, target, _, _ in LINK.findall(path.read_text(encoding="utf-8")):
            add_figure(files, config, posixpath.normpath(posixpath.join(path.parent.relative_to(ROOT).as_posix(), target)))
    return files


def add_figure(files: Files, config: MkDocsConfig, source: str) -> None:
    """Add a figure or CSV file from outside docs/ to the site, at its path in the repository."""
    if source.endswith((".svg", ".csv")) and not source.startswith(("docs/", "..")) and files.get_file_from_path(source) is None:
        files.append(File.generated(config, source, abs_src_path=str(ROOT / source)))


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page for the site; a link to a file that has no page becomes plain text."""
    here = page.file.src_uri
    if page.parent is None:  # a single page needs no navigation column
        page.meta.setdefault("hide", ["navigation"])
    back = {target: source for source, target in pages().items()}
    base = posixpath.dirname(back.get(here, f"docs/{here}"))

    def moved(match: re.Match[str]) -> str:
        before, target, anchor, after = match.groups()
        if not target or "://" in target or target.startswith("mailto:"):
            return match[0]
        source = posixpath.normpath(posixpath.join(base, target))
        new = pages().get(source) or (source.removeprefix("docs/") if source.startswith("docs/") else source)
        if files.get_file_from_path(new) is None:
            if not (ROOT / source).exists():
                raise PluginError(f"{here}: there is no {target}")
            if before.startswith("!"):
                raise PluginError(f"{here}: the figure {target} is not on the site")
            return before[1:-2]  # a file without a page
        return f"{before}{posixpath.relpath(new, posixpath.dirname(here) or '.')}{anchor or ''}{after}"

    # leave code as it is
    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [LINK.sub(moved, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, LINK.sub(moved, markdown[end:])])


def on_page_content(html: str, **_: Any) -> str:
    """Let code in tables break after slashes, dots, underscores and so on, so that no column is too wide."""

    def breakable(cell: re.Match[str]) -> str:
        return CODE.sub(lambda code: BREAK.sub("<wbr>", code[0]), cell[0])

    return CELL.sub(breakable, html)
