"""A griffe extension that rewrites this package's docstrings to griffe's Google style.

``Example:`` becomes a section of examples, ``text::`` before indented lines a code block, and every error of ``Raises:`` gets its own line.
A recipe's keyword shows its default value, not the call that makes the field.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from typing import Any

import griffe

RAISES = re.compile(r"^( *)Raises:\n((?:\1 +.*\n?)+)", re.MULTILINE)
NEXT = re.compile(r"(?<=\.) (?=(?:[A-Z]\w*(?:Error|Interrupt|Warning)(?:, )?)+: )")


def read(docstring: str) -> str:
    """Return the docstring with the sections of griffe's Google parser."""
    text = re.sub(r"^( *)Example:$", r"\1Examples:", docstring, flags=re.MULTILINE)
    text = re.sub(r"::$", ":", text, flags=re.MULTILINE)
    return RAISES.sub(lambda found: f"{found[1]}Raises:\n{one_a_line(found[2])}", text)


def one_a_line(block: str) -> str:
    """Put each entry of ``Raises:`` on its own line."""
    margin = block[: len(block) - len(block.lstrip(" "))]
    ends = "\n" * (len(block) - len(block.rstrip("\n")))
    entries: list[str] = []
    for line in block.splitlines():
        goes_on = entries and (line.startswith(margin + " ") or not re.match(r"[\w, ]+: ", line.strip()))
        entries = [*entries[:-1], f"{entries[-1]} {line.strip()}"] if goes_on else [*entries, line.strip()]
    return "\n".join(f"{margin}{part}" for entry in entries for part in NEXT.split(entry)) + ends


class Docstrings(griffe.Extension):
    """Rewrites every docstring before it is parsed."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Show the default of a recipe's field as its value."""
        if isinstance(attr.value, griffe.ExprCall) and attr.parent is not None and attr.module.path.startswith("nmkernels.recipes"):
            owner = getattr(importlib.import_module(attr.module.path), attr.parent.name, None)
            for field in dataclasses.fields(owner) if dataclasses.is_dataclass(owner) else ():
                if field.name == attr.name and field.default is not dataclasses.MISSING:
                    attr.value = repr(field.default)

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = read(obj.docstring.value)
