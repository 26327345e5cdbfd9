"""Recipes as one line of text, ``name:N:M(keyword=value, ...)``, and back: for the command line, for checkpoints, and inside each other."""

from __future__ import annotations

import ast
from typing import Any

from ..pattern import RecipeError

FORM = "write it as name:N:M, or name:N:M(keyword=value, ...), for instance mdgf:1:8(fine_tune=0.25)"


def parse(spec: str) -> tuple[str, str | None, dict[str, Any]]:
    """(name, pattern or None, keywords) of a recipe's text; values are plain Python literals, and words may go without quotes.

    Raises:
        RecipeError: it is not of that form.

    Example:
        >>> parse("step:1:8(inner=mdgf(grad=ste), t_max=0.5)")
        ('step', '1:8', {'inner': 'mdgf(grad=ste)', 't_max': 0.5})
    """
    head, opened, rest = spec.partition("(")
    name, colon, pattern = head.strip().partition(":")
    options: dict[str, Any] = {}
    if opened:
        try:
            call = ast.parse(f"f({rest}", mode="eval").body
            if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
                raise ValueError("keywords only")
            options = {str(keyword.arg): _value(keyword.value) for keyword in call.keywords}
        except (SyntaxError, ValueError) as error:
            raise RecipeError(f"{spec!r} is not a recipe: {FORM}.") from error
    return name.strip(), pattern.strip() if colon else None, options


def _value(node: ast.expr) -> Any:
    # a word, or the text of another recipe
    return ast.unparse(node) if isinstance(node, (ast.Name, ast.Call)) else ast.literal_eval(node)


def text(name: str, pattern: str, options: dict[str, Any]) -> str:
    """The inverse of ``parse``.

    Example:
        >>> text("mdgf", "1:8", {"fine_tune": 0.5, "grad": "ste"})
        "mdgf:1:8(fine_tune=0.5, grad='ste')"
    """
    inside = ", ".join(f"{key}={value!r}" for key, value in options.items())
    return f"{name}:{pattern}({inside})" if inside else f"{name}:{pattern}"
