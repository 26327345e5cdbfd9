r"""A mkdocs hook: equations become MathML when the site is built, so that they need no JavaScript and no network.

The pages write them as GitHub shows them, ``$...$`` in a line and ``$$...$$`` alone; ``pymdownx.arithmatex`` with ``generic: true`` finds
them. A command that latex2mathml does not know stops the build.
"""

from __future__ import annotations

import html
import re
from typing import Any

STARRED = re.compile(r"\\operatorname\*\{([^}]*)\}_(\{[^}]*\}|\w)")
BAR = re.compile(r"<mo[^>]*>(?:\||&#x0007C;|&#x02223;)</mo>")
FOUND = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def mathml(latex: str, block: bool) -> str:
    """One equation as a ``<math>`` element.

    Raises:
        ValueError: it holds a command that is not known.
    """
    from latex2mathml.converter import convert

    # what it does not know, in words that it knows
    known = STARRED.sub(lambda of: rf"\underset{{{of[2]}}}{{\text{{{of[1]}}}}}", latex.strip().replace(r"arg\,", "arg "))
    known = known.replace("{aligned}", "{align*}")
    made = convert(known, display="block" if block else "inline")
    if unknown := re.search(r"<m[ion]>(\\[A-Za-z]+|&|\*|&#x0002A;)</m[ion]>", made):
        raise ValueError(f"{unknown[1]} in ${latex.strip()}$ is not known to latex2mathml")
    made = made.replace("<mi>:</mi><mo>&#x0003D;</mo>", "<mo>&#x02254;</mo>")  # :=
    # a bar on either side of a term is no relation and has no space beside it
    return BAR.sub('<mo stretchy="false" lspace="0" rspace="0">|</mo>', made)


def on_page_content(content: str, **_: Any) -> str:
    """What mkdocs calls with the HTML of each page."""

    def replaced(match: re.Match[str]) -> str:
        made = mathml(html.unescape(match[3]), match[2] == "[")
        return f'<div class="equation">{made}</div>' if match[1] == "div" else made

    return FOUND.sub(replaced, content)
