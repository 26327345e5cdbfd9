r"""A mkdocs hook that turns equations into MathML when the site is built, so that they need neither JavaScript nor a network.

Pages use GitHub's syntax, ``$...$`` inline and ``$$...$$`` for blocks, which ``pymdownx.arithmatex`` with ``generic: true`` finds. A
command that latex2mathml does not know stops the build.
"""

from __future__ import annotations

import html
import re
from typing import Any

STARRED = re.compile(r"\\operatorname\*\{([^}]*)\}_(\{[^}]*\}|\w)")
BAR = re.compile(r"<mo[^>]*>(?:\||&#x0007C;|&#x02223;)</mo>")
FOUND = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def mathml(latex: str, block: bool) -> str:
    """Convert one equation to a ``<math>`` element.

    Raises:
        ValueError: latex2mathml does not know one of its commands.
    """
    from latex2mathml.converter import convert

    # rewrite what latex2mathml does not support
    known = STARRED.sub(lambda of: rf"\underset{{{of[2]}}}{{\text{{{of[1]}}}}}", latex.strip().replace(r"arg\,", "arg "))
    known = known.replace("{aligned}", "{align*}")
    made = convert(known, display="block" if block else "inline")
    if unknown := re.search(r"<m[ion]>(\\[A-Za-z]+|&|\*|&#x0002A;)</m[ion]>", made):
        raise ValueError(f"{unknown[1]} in ${latex.strip()}$ is not known to latex2mathml")
    made = made.replace("<mi>:</mi><mo>&#x0003D;</mo>", "<mo>&#x02254;</mo>")  # :=
    # a bar around a term is not a relation: no space next to it
    return BAR.sub('<mo stretchy="false" lspace="0" rspace="0">|</mo>', made)


def on_page_content(content: str, **_: Any) -> str:
    """Convert all equations of a page."""

    def replaced(match: re.Match[str]) -> str:
        made = mathml(html.unescape(match[3]), match[2] == "[")
        return f'<div class="equation">{made}</div>' if match[1] == "div" else made

    return FOUND.sub(replaced, content)
