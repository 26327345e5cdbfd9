"""The table of an ``Audit``."""

from __future__ import annotations

import textwrap
from string import ascii_lowercase

from .costs import Piece, speedup
from .report import PARTS, Audit

WIDTH = 140


def table(audit: Audit) -> str:
    """Layers, totals, what the figures rest on, and what would gain more."""
    advice = dict.fromkeys(each.text for layer in audit.layers for each in layer.advice)
    marks = {text: _mark(i) for i, text in enumerate(advice)}
    measured = any(layer.measured_inference for layer in audit.layers)
    parts = PARTS if measured else PARTS[:2]
    rows = [("", "", "", *(("predicted", "", "measured", "")[: len(parts)]), "", "")]
    rows.append(("layer", "shape", "of dense", *(("inference", "step") * 2)[: len(parts)], "more", "why"))
    for layer in audit.layers:
        name = f"{layer.name or '(root)'} ×{len(layer.names)}" if len(layer.names) > 1 else layer.name or "(root)"
        shape = "(" + ",".join(map(str, layer.shape)) + ")" if layer.shape else ""
        figures = [_times(getattr(layer, part)) for part in parts]
        letters = "".join(marks[each.text] for each in layer.advice)
        why = "; ".join(word for word in (layer.why, layer.note) if word)
        rows.append((name, shape, f"{100 * audit.share(layer):.1f} %", *figures, letters, why))
    totals = [_of(audit.total(part)) for part in parts]
    rows.append(("all linear layers" + (" and the rest" if audit.other else ""), "", "", *totals, "", ""))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = [_line(row, widths) for row in rows]
    lines += [*_summary(audit), *(_wrapped(note) for note in audit.notes)]
    if advice:
        lines += ["what to change to gain more", *(_wrapped(text + _gains(audit, text), f"  {marks[text]}  ") for text in advice)]
    return "\n".join(lines)


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    cells = [cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row[:-1], widths, strict=True))]
    return "  ".join([*cells, row[-1]]).rstrip()


def _summary(audit: Audit) -> list[str]:
    share = audit.dense_share
    most = f": however fast the rest, all together could be {1 / share:.1f}x at most" if 0.005 < share < 1 else ""
    lines = [_wrapped(f"{100 * share:.0f} % of the dense time is in what stays dense{most}.")]
    ranges = [(word, found) for word, found in (("inference", audit.inference_range), ("step", audit.step_range)) if found]
    if ranges:
        lines.append(
            _wrapped(
                "With sparse products as slow, and as fast, as below: "
                + ", ".join(f"{word} {low:.2f}x to {high:.2f}x" for word, (low, high) in ranges)
                + "."
            )
        )
    if audit.run is not None and audit.steps < 1:
        lines.append(_wrapped(f"{100 * audit.steps:.0f} % of the recipe's steps are sparse; its whole run is {audit.run:.2f}x."))
    return lines


def _gains(audit: Audit, text: str) -> str:
    """What the layers would gain by one piece of advice, where that is known."""
    found: dict[str, list[str]] = {}
    for layer in audit.layers:
        for each in layer.advice:
            if each.text == text and (each.speedup is not None or each.detail):
                gain = "" if each.speedup is None else f"{_times(getattr(layer, each.part))} to {each.speedup:.2f}x"
                words = (layer.name or "(root)", each.detail, gain)
                found.setdefault(each.part, []).append(" ".join(word for word in words if word))
    return "".join(f"; {part}: " + ", ".join(lines) if part else "; " + ", ".join(lines) for part, lines in found.items())


def _times(pieces: tuple[Piece, ...]) -> str:
    return _of(speedup(pieces) if pieces else None)


def _of(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _mark(index: int) -> str:
    more, letter = divmod(index, len(ascii_lowercase))
    return ascii_lowercase[letter] + (str(more + 1) if more else "")


def _wrapped(text: str, start: str = "") -> str:
    return "\n".join(textwrap.wrap(text, WIDTH, initial_indent=start, subsequent_indent=" " * len(start), break_long_words=False))
