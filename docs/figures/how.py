"""Draw the figures of How it works from what the package computes: ``python docs/figures/how.py [NAME ...] [--check]``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from svg import Drawing, command  # noqa: E402

import nmkernels as nm  # noqa: E402
from nmkernels.reference.layouts import to_layout  # noqa: E402

FOLDER = ROOT / "docs" / "how"
WIDE = 720


def signed(value: float, digits: int = 1) -> str:
    return f"{value:.{digits}f}".replace("-", "−")


def cell(d: Drawing, x: float, y: float, text: str, kept: bool, w: float = 40, h: float = 26, colour: str = "sky") -> None:
    """One element of a matrix."""
    d.rect(x, y, w, h, colour if kept else "paper", "line")
    d.text(x + w / 2, y + h / 2 + 4, text, "ink" if kept else "soft", 11, "middle")


def compressed() -> Drawing:
    """One row, its values and the bytes of its indices."""
    torch.manual_seed(4)
    w = (torch.randn(1, 16) * 10).round() / 10
    c = nm.ops.compress(w, "2:4")
    kept = nm.ops.mask(w, "2:4")[0].tolist()
    d = Drawing(WIDE, 340, "A row of sixteen weights at 2:4, its eight values and its two bytes of indices")
    left, step = 40, 40
    d.text(left, 28, "One row of W, in = 16, in groups of four", bold=True)
    for i in range(16):
        cell(d, left + i * step, 56, signed(float(w[0, i])), kept[i])
        d.text(left + i * step + 20, 50, str(i % 4), "blue" if kept[i] else "soft", 11, "middle")
    for group in range(4):
        d.rect(left + group * 4 * step, 56, 4 * step, 26, "none", "ink")
    values = c.values[0].tolist()
    places = [i for i in range(16) if kept[i]]
    for k, (i, v) in enumerate(zip(places, values, strict=True)):
        x = left + k * step + 160
        d.path([(left + i * step + 20, 84), (x + 20, 126)], "line", 1)
        cell(d, x, 128, signed(v), True)
    d.text(left + 160, 172, "values: the kept weights in their order, [out, in · N/M]", bold=True)
    d.text(left + 160, 212, "indices: the position of each inside its group, two bits, little end first", bold=True)
    for b, byte in enumerate(c.indices[0].tolist()):
        x = left + 160 + b * 2 * step
        for half in range(2):
            position = byte >> (4 * half)
            low, high = position & 3, position >> 2 & 3
            d.text(x + 20 + half * step, 236, f"{low}, {high}", "blue", 12, "middle")
    for b, byte in enumerate(c.indices[0].tolist()):
        x = left + 160 + b * 160
        d.rect(x, 250, 150, 44, "fill", "line", 4)
        d.text(x + 75, 268, f"{byte >> 4:04b} {byte & 15:04b}", "ink", 13, "middle", mono=True)
        d.text(x + 75, 286, f"byte {b}: 0x{byte:02X}", "soft", 11, "middle")
    d.text(left + 160, 316, "one nibble for each group; the second group of a byte is its upper half", "soft", 11)
    return d


SHADES = ("sky", "sand", "fill", "line")


def metadata() -> Drawing:
    """Which lane holds the metadata of which rows and columns, computed by passing marked bytes through ``to_layout``."""
    rows, cols = 64, 64
    marks = torch.arange(rows)[:, None].repeat(1, cols // 8).to(torch.uint8)  # each byte names its row
    columns = torch.arange(cols // 8)[None].repeat(rows, 1).to(torch.uint8)
    row_of = to_layout(marks, cols, "wgmma.sp").contiguous().view(torch.uint8).reshape(128, 4)
    byte_of = to_layout(columns, cols, "wgmma.sp").contiguous().view(torch.uint8).reshape(128, 4)
    d = Drawing(WIDE, 470, "The order in which mma.sp and wgmma.sp read metadata")
    left, top, w, h = 70, 66, 78, 19
    d.text(left, 24, "mma.sp: a tile of 16 rows and 64 columns, and the lane that holds its metadata", bold=True)
    d.text(left, 41, "one cell: 16 columns of a row, four groups, 16 bits", "soft", 11)
    for part in range(4):
        d.text(left + part * w + w / 2, 60, f"{16 * part}–{16 * part + 15}", "soft", 11, "middle")
    for lane in range(32):
        for half in range(2):
            row, part = int(row_of[lane, 2 * half]), int(byte_of[lane, 2 * half]) // 2
            x, y = left + part * w, top + row * h
            d.rect(x, y, w, h, ("sky" if half == 0 else "sand") if part < 2 else "fill", "line")
            d.text(x + w / 2, y + 14, f"lane {lane}" + (" low" if half == 0 else " high"), "ink", 10, "middle")
    for row in (0, 7, 8, 15):
        d.text(left - 6, top + row * h + 14, f"row {row}", "soft", 11, "end")
    d.path([(left + 2 * w, top - 2), (left + 2 * w, top + 16 * h + 2)], "ink", 1.5)
    d.text(left + w, top + 16 * h + 17, "instruction 1, selector 0", "soft", 11, "middle")
    d.text(left + 3 * w, top + 16 * h + 17, "instruction 2, selector 1", "soft", 11, "middle")
    x = 420
    d.text(x, 60, "A word of a lane, 32 bits", bold=True)
    for i, (text, colour) in enumerate((("row g + 8, 16 columns", "sand"), ("row g, the same columns", "sky"))):
        d.rect(x + i * 140, 70, 140, 28, colour, "line")
        d.text(x + i * 140 + 70, 88, text, "ink", 10, "middle")
    d.text(x, 113, "bit 31", "soft", 10)
    d.text(x + 280, 113, "bit 0", "soft", 10, "end")
    d.lines(
        x,
        138,
        (
            "lane = 4g + t: g tells the row, t the 16 columns.",
            "So one 4-byte load of 32 lanes feeds two",
            "instructions, which cover K = 64.",
        ),
        17,
    )
    d.text(x, 206, "wgmma.sp: one such tile for each warp", bold=True)
    for warp in range(4):
        first = int(row_of[32 * warp, 0])
        y = 218 + warp * 34
        d.rect(x, y, 280, 34, SHADES[warp % 2], "line")
        d.text(x + 10, y + 21, f"warp {warp}: rows {first}–{first + 15}", "ink", 12)
        d.text(x + 270, y + 21, f"words {32 * warp}–{32 * warp + 31}", "soft", 11, "end")
    d.text(70, 432, "The bits themselves are those of the canonical indices; a layout is only an order of their bytes.", "soft", 12)
    d.text(70, 450, "In memory: int32 [rows/16, cols/64, 32] for mma.sp, [rows/64, cols/64, 128] for wgmma.sp.", "soft", 12)
    return d


def transposable() -> Drawing:
    """A tile, its mask along rows and its transposable mask."""
    torch.manual_seed(2)
    w = (torch.randn(4, 4) * 10).round() / 10
    rows, both = nm.ops.mask(w, "2:4"), nm.ops.transposable_mask(w, "2:4")
    d = Drawing(WIDE, 300, "A 4×4 tile with a 2:4 mask along rows, and with a transposable one")
    for i, (title, mask, colour) in enumerate((("2:4 along rows", rows, "sand"), ("transposable: along both", both, "sky"))):
        left, top = 60 + i * 350, 76
        total = float(w.abs()[mask].sum() / w.abs().sum())
        d.text(left, 30, title, bold=True)
        d.text(left, 48, f"keeps {total:.0%} of Σ|w|", "soft")
        for r in range(4):
            for c in range(4):
                cell(d, left + c * 48, top + r * 34, signed(float(w[r, c])), bool(mask[r, c]), 48, 34, colour)
            d.text(left + 4 * 48 + 10, top + r * 34 + 22, f"{int(mask[r].sum())} kept", "soft", 11)
        for c in range(4):
            n = int(mask[:, c].sum())
            d.text(left + c * 48 + 24, top + 4 * 34 + 18, str(n), "red" if n > 2 else "green", 12, "middle", bold=True)
        many = [int(mask[:, c].sum()) for c in range(4)]
        said = "a column with more than two: not 2:4 as Wᵀ" if max(many) > 2 else "two in every column: 2:4 as W and as Wᵀ"
        d.text(left, top + 4 * 34 + 42, said, "red" if max(many) > 2 else "green")
    d.text(60, 286, "The transposable mask is the best of the 90 that have two in every row and column.", "soft", 11)
    return d


def mvue() -> Drawing:
    """The probabilities of a group, sampling of two elements, and the mean of many samples."""
    g = torch.tensor([[0.9, -0.3, 0.5, 0.15]])
    draws = 200_000  # so many that two digits do not depend on the generator
    many = nm.ops.mvue(g.repeat(draws, 1), "2:4", seed=0)
    mean = many.double().mean(0)
    a = g[0].abs()
    level = min(float(a.sum()) / 2, float(a.sum() - a.max()))  # a / level: the probabilities, which sum to 2
    p = [min(1.0, float(v) / level) for v in a]
    d = Drawing(WIDE, 380, "The unbiased 2:4 estimate of least variance of one group")
    left, base, tall = 60, 190, 140
    d.text(left, 28, "One group of g, and the level h = 1/c", bold=True)
    for i in range(4):
        x, h = left + i * 64, float(a[i]) * tall
        d.rect(x, base - h, 40, h, "blue", opacity=0.85)
        d.text(x + 20, base + 17, signed(float(g[0, i]), 2), "ink", 12, "middle")
        d.text(x + 20, base + 34, f"p = {p[i]:.2f}", "soft", 11, "middle")
    at = base - level * tall
    d.path([(left - 8, at), (left + 246, at)], "orange", 1.5, "5 3")
    d.text(left + 250, at + 4, f"h = {level:.2f}", "orange", 12)
    d.path([(left - 8, base), (left + 246, base)], "line", 1)
    d.lines(
        390,
        56,
        (
            "p = min(1, |g| / h), and Σp = 2.",
            "At or above h: kept for certain, as it is.",
            "Below h: kept with probability p,",
            "and then with the value ±h, since p · h = |g|.",
        ),
        20,
    )
    d.lines(390, 152, (f"Mean of {draws:,} estimates:".replace(",", " "),), bold=True)
    for i in range(4):
        d.text(396 + i * 72, 174, signed(float(mean[i]), 2), "ink", 12)
    top, wide, u = 268, 600, 0.62
    d.text(left, top - 14, "One random number u draws two elements: those that contain u or 1 + u", bold=True)
    begin = 0.0
    for i in range(4):
        x, w = left + begin * wide / 2, p[i] * wide / 2
        hit = any(begin <= spot < begin + p[i] for spot in (u, 1 + u))
        d.rect(x, top, w, 34, "sky" if hit else "fill", "line")
        d.text(x + w / 2, top + 22, signed(float(g[0, i]), 2), "ink", 12, "middle", bold=hit)
        begin += p[i]
    for spot, word in ((u, "u"), (1 + u, "1 + u")):
        x = left + spot * wide / 2
        d.path([(x, top + 62), (x, top + 36)], "orange", 1.5, arrow=True)
        d.text(x, top + 78, word, "orange", 12, "middle")
    for spot in (0, 1, 2):
        d.text(left + spot * wide / 2, top + 50, str(spot), "soft", 11, "middle")
    return d


def optimizer() -> Drawing:
    """What the fused pass reads and writes, in bytes per weight."""
    d = Drawing(WIDE, 320, "One pass over memory of MaskedAdamW")
    reads = (("gradient", 4.0), ("W", 4.0), ("m", 4.0), ("v", 4.0))
    writes = (("W", 4.0), ("m", 4.0), ("v", 4.0))
    d.text(40, 28, "One pass: bytes per weight, fp32", bold=True)
    for i, (name, size) in enumerate(reads):
        y = 52 + 46 * i
        d.box(40, y, 110, 34, (f"{name}  {size:g} B",))
        d.path([(152, y + 17), (214, y + 17)], "blue", 1.4, arrow=True)
    d.rect(218, 46, 250, 186, "fill", "blue", 6)
    steps = (
        "unscale",
        "g ← g + λ (1 − M) W",
        "m, v ← moments of g",
        "W ← (1 − lr·wd) W",
        "W ← W − lr · m̂ / (√v̂ + ε)",
        "new mask M",
        "sums: flips, Σ|Δv|, …",
    )
    for i, text in enumerate(steps):
        d.text(232, 70 + 24 * i, text, "ink", 12)
    for i, (name, size) in enumerate(writes):
        y = 52 + 46 * i
        d.path([(470, y + 17), (532, y + 17)], "blue", 1.4, arrow=True)
        d.box(536, y, 150, 34, (f"{name}  {size:g} B",))
    total = sum(size for _, size in (*reads, *writes))
    d.text(343, 256, f"{total:g} B per weight: every tensor passes once", "blue", 12, "middle", bold=True)
    d.text(40, 284, "In separate passes, decay and mask would each read the weight again.", "soft", 11)
    d.text(40, 304, "A group of M weights is masked in registers, before it is written.", "soft", 11)
    return d


def effective() -> Drawing:
    """The life of the effective weight over two training steps and an evaluation."""
    d = Drawing(WIDE, 330, "When the effective weight is made, reused and dropped")
    left, step, y = 40, 80, 70
    events = ("forward", "backward", "forward", "backward", "optimizer", "forward", "eval()", "forward")
    d.text(left, 28, "Two microbatches, a step, an evaluation", bold=True)
    for i, event in enumerate(events):
        x = left + i * step
        last = event in ("optimizer", "eval()")
        d.box(x + 3, y, step - 6, 32, (event,), "sand" if last else "fill", size=11)
    d.text(left, y + 70, "the copy of W̃", bold=True)
    spans = ((0, 4, "made", "read by two microbatches"), (5, 6, "made", ""), (7, 8, "checked", ""))
    for begin, end, word, text in spans:
        d.rect(left + begin * step + 3, y + 84, (end - begin) * step - 6, 30, "sky", "line", 4)
        d.text(left + begin * step + 12, y + 103, word + (", then " + text if text else ""), "ink", 11)
    for at, word in ((4, "dropped"), (6, "check")):
        d.path([(left + at * step + step / 2, y + 34), (left + at * step + step / 2, y + 80)], "orange", 1.4, arrow=True)
        d.text(left + at * step + step / 2, y + 103, word, "orange", 11, "middle")
    d.text(left, 218, "Dropped or checked again after", bold=True)
    d.lines(
        left,
        238,
        (
            "any optimizer's step · train() and eval() · deployable() · load_state_dict · refresh() ·",
            "another version, storage or Parameter",
            "On a CPU a fingerprint of the weight is compared at every use. On a GPU the copy is reused only",
            "within one training step.",
            "Under torch.compile there is no copy: the graph computes W̃ itself.",
        ),
        18,
        size=11,
        fill="soft",
    )
    return d


def choice() -> Drawing:
    """How a GEMM is chosen."""
    d = Drawing(WIDE, 230, "How the method of a GEMM is chosen")
    d.box(20, 40, 180, 50, ("a GEMM", 'packed = "auto"'))
    d.box(260, 40, 200, 50, ("tuned here?", "nm.tune has measured it"), "sky")
    d.box(520, 40, 180, 50, ("fastest measured", "dense in doubt"), "sand")
    d.box(260, 140, 200, 66, ("estimate each method", "dense included; constants of", "this kind of machine"), "sky")
    d.box(520, 140, 180, 66, ("fastest estimated", "without rows: dense unless", "1.25 times as fast"), "sand")
    d.path([(202, 65), (256, 65)], "ink", 1.4, arrow=True)
    d.path([(462, 65), (516, 65)], "ink", 1.4, arrow=True)
    d.text(488, 58, "yes", "soft", 11, "middle")
    d.path([(360, 92), (360, 136)], "ink", 1.4, arrow=True)
    d.text(367, 118, "no", "soft", 11)
    d.path([(462, 173), (516, 173)], "ink", 1.4, arrow=True)
    d.text(20, 156, "deterministic algorithms,", "soft", 11)
    d.text(20, 172, "packed = False:", "soft", 11)
    d.text(20, 188, "always dense", "soft", 11)
    return d


FIGURES = {f.__name__: f for f in (compressed, metadata, transposable, mvue, optimizer, effective, choice)}


def main(argv: list[str] | None = None) -> int:
    return command("how.py", {FOLDER / f"{name}.svg": lambda draw=draw: str(draw()) for name, draw in FIGURES.items()}, argv)


if __name__ == "__main__":
    raise SystemExit(main())
