"""Draw SVG figures from a few shapes and named colours, legible on light and dark pages; the output is deterministic."""

from __future__ import annotations

import argparse
import html
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

LIGHT = {
    "paper": "#ffffff", "ink": "#1f2328", "soft": "#59636e", "line": "#c4cad1", "fill": "#eef1f4",
    "blue": "#0b62c4", "orange": "#b75000", "green": "#1a7f37", "purple": "#8250df", "red": "#c9252d", "sky": "#b6d7ff", "sand": "#ffd8b5",
}  # fmt: skip
DARK = {
    "paper": "#16191f", "ink": "#e6edf3", "soft": "#9aa4af", "line": "#464d57", "fill": "#262c35",
    "blue": "#58a6ff", "orange": "#ff9d4d", "green": "#4cc764", "purple": "#bc8cff", "red": "#ff7b72", "sky": "#1f4a80", "sand": "#6e3d12",
}  # fmt: skip
"""The dark colours. Browsers choose by prefers-color-scheme; the figure also has its own background, so that it is legible without that."""

COLOURS = ("blue", "orange", "green", "purple", "red", "soft")


def number(value: float) -> str:
    """Format to a tenth of a pixel, as short as possible."""
    return "0" if abs(value) < 0.05 else f"{value:.1f}".removesuffix(".0")


class Drawing:
    """Shapes in pixels from the upper left corner.

    Args:
        title: what the figure shows, for readers who cannot see it.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def rect(self, x: float, y: float, w: float, h: float, fill: str = "none", stroke: str = "", r: float = 0, opacity: float = 1) -> None:
        more = f' rx="{number(r)}"' if r else ""
        more += f' fill-opacity="{opacity:g}"' if opacity != 1 else ""
        self._add("rect", f'x="{number(x)}" y="{number(y)}" width="{number(w)}" height="{number(h)}"{more}', fill, stroke)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        fill: str = "ink",
        size: int = 12,
        anchor: str = "start",
        bold: bool = False,
        mono: bool = False,
    ) -> None:
        """Draw one line of text with its baseline at ``y``; ``anchor`` is start, middle or end."""
        more = ("" if anchor == "start" else f' text-anchor="{anchor}"') + (' font-weight="600"' if bold else "")
        named = fill + (" m" if mono else "")
        size_ = "" if size == 12 else f' font-size="{size}"'
        self.parts.append(f'<text class="{named}" x="{number(x)}" y="{number(y)}"{size_}{more}>{html.escape(text, quote=False)}</text>')

    def lines(self, x: float, y: float, texts: Iterable[str], step: float = 16, **options: object) -> None:
        for i, text in enumerate(texts):
            self.text(x, y + i * step, text, **options)  # type: ignore[arg-type]

    def path(
        self,
        points: Sequence[tuple[float, float]],
        stroke: str = "ink",
        width: float = 1.2,
        dash: str = "",
        arrow: bool = False,
        opacity: float = 1,
    ) -> None:
        """Draw a line through points."""
        if not points:
            return
        d = "M" + " ".join(f"{number(x)},{number(y)}" for x, y in points)
        more = f' stroke-width="{width:g}"' + (f' stroke-dasharray="{dash}"' if dash else "")
        more += f' stroke-opacity="{opacity:g}"' if opacity != 1 else ""
        self.parts.append(f'<path class="s-{stroke}" d="{d}" fill="none"{more} stroke-linejoin="round"/>')
        if arrow:
            self._head(points[-2], points[-1], stroke)

    def _head(self, a: tuple[float, float], b: tuple[float, float], fill: str) -> None:
        dx, dy = b[0] - a[0], b[1] - a[1]
        length = max((dx * dx + dy * dy) ** 0.5, 1e-9)
        ux, uy = dx / length, dy / length
        back, wide = 7.0, 3.2
        corners = [
            b,
            (b[0] - back * ux + wide * uy, b[1] - back * uy - wide * ux),
            (b[0] - back * ux - wide * uy, b[1] - back * uy + wide * ux),
        ]
        d = "M" + " ".join(f"{number(x)},{number(y)}" for x, y in corners) + "z"
        self.parts.append(f'<path class="{fill}" d="{d}"/>')

    def box(
        self, x: float, y: float, w: float, h: float, texts: Sequence[str], fill: str = "fill", stroke: str = "line", size: int = 12
    ) -> None:
        """Draw a box with centred lines of text, the first one bold."""
        self.rect(x, y, w, h, fill, stroke, r=5)
        top = y + h / 2 - (len(texts) - 1) * 8 + 4
        for i, text in enumerate(texts):
            self.text(
                x + w / 2,
                top + 16 * i,
                text,
                size=size if i == 0 else size - 1,
                anchor="middle",
                bold=i == 0,
                fill="ink" if i == 0 else "soft",
            )

    def runs(self, cells: Sequence[int], x: float, y: float, w: float, h: float, fill: dict[int, tuple[str, float]]) -> None:
        """Draw a row of equal cells, merging neighbours of one kind; kinds missing from ``fill`` are left out."""
        begin = 0
        for i in range(1, len(cells) + 1):
            if i == len(cells) or cells[i] != cells[begin]:
                if cells[begin] in fill:
                    colour, opacity = fill[cells[begin]]
                    self.rect(x + begin * w, y, (i - begin) * w, h, colour, opacity=opacity)
                begin = i

    def _add(self, tag: str, what: str, fill: str, stroke: str) -> None:
        named = " ".join([*([fill] if fill != "none" else []), *([f"s-{stroke}"] if stroke else [])])
        self.parts.append(f'<{tag} class="{named}" {what}{"" if fill != "none" else " fill=" + chr(34) + "none" + chr(34)}/>')

    def __str__(self) -> str:
        def rules(colours: dict[str, str]) -> str:
            return "".join(f".{name}{{fill:{colour}}}.s-{name}{{stroke:{colour}}}" for name, colour in colours.items())

        style = (
            f"{rules(LIGHT)}@media(prefers-color-scheme:dark){{{rules(DARK)}}}"
            "text{font-family:system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif}"
            ".m{font-family:ui-monospace,'SF Mono',Menlo,'DejaVu Sans Mono',monospace}"
        )
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}" '
            f'font-size="12" role="img">\n<title>{html.escape(self.title)}</title>\n<style>{style}</style>'
        )
        paper = f'<rect class="paper" width="{self.width}" height="{self.height}" rx="6"/>'
        return "\n".join([head, paper, *self.parts, "</svg>"]) + "\n"


def command(
    script: str, figures: Mapping[Path, Callable[[], str]], argv: list[str] | None, same: Callable[[str, str], bool] = operator.eq
) -> int:
    """Run a script's command line: write all or the named figures; with ``--check`` write none, and return 1 if a file is not up to date.

    Args:
        script: its file name in this folder.
        figures: path -> the function that draws it.
        same: whether an old file and a new one agree.
    """
    parser = argparse.ArgumentParser(prog=script)
    parser.add_argument("names", nargs="*", metavar="NAME", help="figures; default: all")
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 when a figure is not up to date")
    args = parser.parse_args(argv)
    known, stale = {path.stem: path for path in figures}, 0
    if unknown := sorted({*args.names} - {*known}):
        parser.error(f"no figure is called {unknown[0]!r}; there are {', '.join(known)}")
    for name in args.names or known:
        path, new = known[name], figures[known[name]]()
        if not args.check:
            path.write_text(new, encoding="utf-8")
        elif not path.exists() or not same(path.read_text(encoding="utf-8"), new):
            sys.stdout.write(f"{path.name} is not up to date; run: python docs/figures/{script} {name}\n")
            stale = 1
    return stale
