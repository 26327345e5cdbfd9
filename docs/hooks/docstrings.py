"""A griffe extension: docstrings as they are written here, read as what griffe knows.

``Example:`` is a section of examples, ``text::`` before indented lines is Markdown's code, and every error of ``Raises:`` has a line of its
own.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

RAISES = re.compile(r"^( *)Raises:\n((?:\1 +.*\n?)+)", re.MULTILINE)
NEXT = re.compile(r"(?<=\.) (?=(?:[A-Z]\w*(?:Error|Interrupt|Warning)(?:, )?)+: )")


def read(docstring: str) -> str:
    """The docstring with the sections that griffe's Google parser knows."""
    text = re.sub(r"^( *)Example:$", r"\1Examples:", docstring, flags=re.MULTILINE)
    text = re.sub(r"::$", ":", text, flags=re.MULTILINE)
    return RAISES.sub(lambda found: f"{found[1]}Raises:\n{one_a_line(found[2])}", text)


def one_a_line(block: str) -> str:
    """The entries of ``Raises:``, each on its line."""
    margin = block[: len(block) - len(block.lstrip(" "))]
    ends = "\n" * (len(block) - len(block.rstrip("\n")))
    entries: list[str] = []
    for line in block.splitlines():
        goes_on = entries and (line.startswith(margin + " ") or not re.match(r"[\w, ]+: ", line.strip()))
        entries = [*entries[:-1], f"{entries[-1]} {line.strip()}"] if goes_on else [*entries, line.strip()]
    return "\n".join(f"{margin}{part}" for entry in entries for part in NEXT.split(entry)) + ends


class Docstrings(griffe.Extension):
    """Rewrites every docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = read(obj.docstring.value)
