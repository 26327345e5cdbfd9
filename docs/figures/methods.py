"""Draw one figure per recipe, ``docs/methods/<name>.svg``: weights and masks while it trains a small network.

    python docs/figures/methods.py [NAME ...] [--check]

The network is 16 → 24 → 4 with a tanh between, trained in float64 on the outputs of another one with random weights, plus noise; its first
layer is sparse. All recipes share initial weights, batches and a cosine learning-rate schedule. A run takes seconds.
"""

from __future__ import annotations

import math
import re
import sys
import warnings
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from svg import COLOURS, Drawing, command  # noqa: E402

import nmkernels as nm  # noqa: E402

FOLDER = ROOT / "docs" / "methods"
STEPS, WARM, BATCH, SEED = 240, 200, 32, 1
IN, HIDDEN, OUT = 16, 24, 4
GROUPS = 8
"""Number of groups in the picture of the masks."""
LEAST = 1.0
"""Pixels by which a number of an up-to-date figure may be off, because processors round differently."""


@dataclass(frozen=True)
class Shown:
    """The settings of one figure.

    Args:
        recipe: its text, without total_steps.
        metric, label: the curve at the bottom, from ``handle.metrics()``, and its label.
        marks: labels of vertical lines, at shares of the run.
        trained: whether the network was first trained densely, for methods that prune a finished model.
        backward: whether the gradient of the input has its own mask.
        betas: of Adam.
    """

    recipe: str
    metric: str = "flip_rate"
    label: str = "flip rate: share of mask bits that the step changed"
    marks: dict[float, str] = field(default_factory=dict)
    trained: bool = False
    backward: bool = False
    betas: tuple[float, float] = (0.9, 0.999)


DENSITY = "density: share of weights that are used"

FIGURES = {
    "ste": Shown("ste:2:4"),
    "srste": Shown("srste:2:4(decay=0.02)"),
    # β₂ as STEP.optimizer chooses it
    "step": Shown("step:2:4(threshold=0.3)", "z_bar", "relative change of v̂'s mean: switches below 0.3", betas=(0.9, 1 - 1 / 24)),
    "sste": Shown("sste:2:4"),
    "mdgf": Shown("mdgf:1:4", "flow", "D(t): share of a pruned weight that still passes", {0.75: "binary"}),
    "sdgf": Shown("sdgf:1:4(end=0.9)", "density", DENSITY, {0: "3:4", 0.3: "2:4", 0.6: "1:4"}),
    "asp": Shown("asp:2:4(start=0.5)", "density", DENSITY, {0.5: "pruned"}),
    "fst": Shown("fst:2:4(every=20, end=0.8, decay=0.02)", marks={0.8: "dense"}),
    "slope": Shown("slope:2:4(start=0.8, rank=2, every=20)", "density", DENSITY, {0.8: "adapters"}, backward=True),
    "bimask": Shown("bimask:2:4(every=20, decay=0.02)", backward=True),
    "ast": Shown("ast:2:4(decay=0.02)", "decay", "λₜ, the strength of the decay", trained=True),
    "maxq": Shown(
        "maxq:2:4(tau=0.05, end=0.5, decay=0.02)", "dense_groups", "D(t): share of groups that are still dense", {0.5: "all N:M"}
    ),
    "lbc": Shown("lbc:2:4(end=0.6)", "combinations", "combinations left in each group", {0.6: "one left"}),
    "maskllm": Shown("maskllm:2:4(lr_multiplier=0.05)", "sharpness", "largest probability in a group, mean", trained=True),
    "proxsparse": Shown("proxsparse:2:4(decay=0.08)", "density", "density: share of weights that are not zero", trained=True),
    "vnm": Shown("vnm:2:8(v=8, every=20, decay=0.02)"),
    "complementary": Shown("complementary:2:4(decay=0.02)"),
    "layerwise": Shown("layerwise:2:8(choices='all', inner='srste(decay=0.02)')"),
    "act24": Shown("act24:2:4(start=0.25)", "phase", "phase: 0 dense, 1 with sparse activations", {0.25: "2:4"}),
    "dense": Shown("dense:2:4", "density", DENSITY),
}


@dataclass
class Trace:
    """The groups of weights after each step, ``(steps, groups, M)``: as stored, as used in the forward pass, and as used for the gradient
    of the input; and the metric."""

    weights: Tensor
    used: Tensor
    backward: Tensor
    metric: list[float]
    pattern: nm.Pattern
    switched: int = 0


def network(activations: bool) -> nn.Sequential:
    torch.manual_seed(SEED)
    middle: nn.Module = nm.nn.SquaredReLU() if activations else nn.Tanh()
    return nn.Sequential(nn.Linear(IN, HIDDEN), middle, nn.Linear(HIDDEN, OUT)).double()


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(SEED + 1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    first, second = normal(HIDDEN, IN) * 0.35, normal(OUT, HIDDEN) * 0.4
    inputs = [normal(BATCH, IN) for _ in range(WARM + STEPS)]
    return [(x, (x @ first.t()).tanh() @ second.t() + 0.3 * normal(BATCH, OUT)) for x in inputs]


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, share: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("peak", group["lr"]) * 0.5 * (1 + math.cos(math.pi * share))
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()


def train(name: str, shown: Shown) -> Trace:
    """Train the network of one figure."""
    acts = name == "act24"
    model, data = network(acts), batches()
    if shown.trained:
        before = torch.optim.AdamW(model.parameters(), lr=0.03)
        for i, (x, y) in enumerate(data[:WARM]):
            fit(model, before, x, y, i / WARM)
    recipe = nm.recipes.get(shown.recipe, total_steps=STEPS)
    torch.manual_seed(SEED)
    handle = nm.sparsify_(model, recipe, filter_fn=lambda module, fqn: name == "layerwise" or fqn == "0")
    optimizer = handle.attach(recipe.optimizer(model.parameters(), lr=0.01 if shown.trained else 0.03, betas=shown.betas))
    weights, used, backward, metric, m = [], [], [], [], recipe.pattern.m
    probe = data[0][0][:1]
    pattern = model[0].transform.pattern if name == "layerwise" else recipe.pattern
    switched = 0
    for step, (x, y) in enumerate(data[WARM:]):
        fit(model, optimizer, x, y, step / STEPS)
        metrics = handle.metrics()
        metric.append(float(metrics[shown.metric]) if shown.metric in metrics else math.nan)
        switched = switched or (step if float(metrics.get("switch_step", 0)) else 0)
        with torch.no_grad():
            layer = model[0]
            if acts:
                hidden = layer(probe)
                seen = [hidden, model[1](hidden)]
            else:
                seen = [layer.weight, layer.effective_weight() if isinstance(layer, nm.SparseLinear) else layer.weight]
            back = layer.transform.for_dgrad(seen[1], *layer._extras(layer.transform)) if shown.backward else seen[1]
            order = layer.transform.traits.columns(IN) if name == "complementary" else None
            for kept, value in zip((weights, used, backward), (*seen, back), strict=True):
                value = value if order is None else value[:, order]  # so that a group's weights are neighbours
                kept.append(value.detach().reshape(-1, m).clone())
    return Trace(torch.stack(weights), torch.stack(used), torch.stack(backward), metric, pattern, switched)


def kinds(used: Tensor, n: int) -> Tensor:
    """0 for an unused weight, 2 for one among the ``n`` largest of its group, 1 for another used one; ``(steps, groups, M)``."""
    rank = used.abs().argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    return torch.where(used == 0, 0, torch.where(rank < n, 2, 1))


LEFT, TOP, WIDE, TALL = 46, 46, 300, 250
RIGHT, MASKS = 404, 150


def draw(name: str, shown: Shown, trace: Trace) -> str:
    """Draw the figure as SVG."""
    pattern, drawn = trace.pattern, name == "maskllm"
    n, m = pattern.n, pattern.m
    kind = kinds(trace.used, n)
    thin = 2 if drawn else 1
    if drawn:
        share = trace.used.abs() / trace.weights.abs()
        kind = torch.where(share > 0.5, 2, torch.where(share > 0.02, 1, 0))
    changes = (kind[1:] != kind[:-1]).sum((0, 2))
    group = int(changes.argmax())
    if shown.backward:
        kind = torch.where(trace.backward != 0, 2, torch.where(trace.used != 0, 1, 0))
    what = "activations" if name == "act24" else "weights"
    d = Drawing(720, 330, f"{what.capitalize()} and masks in a run of {shown.recipe}")
    ours, theirs = trace.used[:, group], trace.weights[:, group]
    low, high = float(min(ours.min(), theirs.min(), 0)), float(max(ours.max(), theirs.max(), 0))
    margin = 0.05 * (high - low)
    low, high = low - margin, high + margin

    def x(step: float, left: float = LEFT) -> float:
        return left + WIDE * step / (STEPS - 1)

    def y(value: float) -> float:
        return TOP + TALL * (high - value) / (high - low)

    d.text(LEFT, 22, "One group " + ("of activations" if name == "act24" else "of weights") + f" ({pattern})", bold=True)
    solid, dotted = ("after", "before the activation") if name == "act24" else ("effective, W̃", "trained, W")
    d.text(LEFT, 37, f"{solid} (solid) and {dotted} (dotted)", "soft", 11)
    d.text(RIGHT, 22, f"Masks of {GROUPS} groups", bold=True)
    if drawn:
        legend = "share above one half; light: above 2 %"
    else:
        legend = "forward and backward; light: forward only" if shown.backward else f"one of the {n} largest; light: other used weights"
    d.text(RIGHT, 37, f"dark: {legend}", "soft", 11)
    marks = dict(shown.marks)
    if trace.switched:
        marks[trace.switched / STEPS] = "T₀"
    for share in marks:
        for left, tall in ((LEFT, TALL), (RIGHT, MASKS)):
            at = x(share * (STEPS - 1), left)
            d.path([(at, TOP), (at, TOP + tall)], "soft", 1, "3 3")
    d.path([(LEFT, TOP), (LEFT, TOP + TALL), (LEFT + WIDE, TOP + TALL)], "line", 1)
    d.path([(LEFT, y(0)), (LEFT + WIDE, y(0))], "line", 1)
    d.text(LEFT - 5, y(0) + 4, "0", "soft", 11, "end")
    tick = next(t for t in (2.0, 1.0, 0.5, 0.2, 0.1, 0.05, 0.02) if t < 0.9 * max(high, -low))
    for value in (tick, -tick):
        if low < value < high:
            d.text(LEFT - 5, y(value) + 4, f"{value:g}".replace("-", "−"), "soft", 11, "end")
    ever = [i for i in range(m) if int(kind[-1, group, i]) == 2 or m <= len(COLOURS) - 1]
    for i in range(m):
        colour = COLOURS[ever.index(i) % (len(COLOURS) - 1)] if i in ever else "soft"
        d.path([(x(s), y(float(theirs[s, i]))) for s in range(0, STEPS, 2)], colour, 1, "1.5 2.5", opacity=0.85)
    for i in range(m):
        colour = COLOURS[ever.index(i) % (len(COLOURS) - 1)] if i in ever else "soft"
        d.path(stepwise([(x(s), y(float(ours[s, i]))) for s in range(0, STEPS, thin)]), colour, 1.3 if drawn else 1.7)
    for share, word in marks.items():
        at = x(share * (STEPS - 1))
        d.rect(at + 2, TOP, 7 * len(word) + 4, 14, "paper", opacity=0.85)
        d.text(at + 4, TOP + 11, word, "ink", 11)
    gap = 4
    tall = (MASKS - gap * (GROUPS - 1)) / (GROUPS * m)
    rows = [group, *[g for g in range(kind.shape[1]) if g != group]][:GROUPS]
    for place, g in enumerate(rows):
        for i in range(m):
            top = TOP + place * (m * tall + gap) + i * tall
            d.runs(kind[::thin, g, i].tolist(), RIGHT, top, WIDE / STEPS * thin, tall, {1: ("sky", 1), 2: ("blue", 1)})
    top, base = TOP + MASKS + 32, TOP + TALL
    d.text(RIGHT, top - 8, shown.label, "soft", 11)
    until = trace.switched or STEPS  # what is tested stands still then
    seen = [(s, v) for s, v in enumerate(trace.metric[:until]) if math.isfinite(v)]
    most = max((v for _, v in seen), default=1.0) or 1.0
    points = [(x(s, RIGHT), base - (base - top) * v / most) for s, v in seen]
    d.path([(RIGHT, top), (RIGHT, base), (RIGHT + WIDE, base)], "line", 1)
    d.path(points, "ink", 1.3)
    d.text(RIGHT - 5, top + 8, short(most), "soft", 11, "end")
    d.text(RIGHT - 5, base, "0", "soft", 11, "end")
    for left in (LEFT, RIGHT):
        d.text(left, base + 16, "0", "soft", 11, "middle")
        d.text(left + WIDE, base + 16, f"{STEPS} steps", "soft", 11, "end")
    d.text(720 - 16, 330 - 8, shown.recipe, "soft", 10, "end", mono=True)
    return str(d)


def short(value: float) -> str:
    return f"{value:.2g}"


def stepwise(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Remove points that lie on a straight line between their neighbours."""
    kept = points[:1]
    for before, here, after in zip(points, points[1:], points[2:], strict=False):
        if abs((before[1] + after[1]) / 2 - here[1]) > 0.04:
            kept.append(here)
    return [*kept, points[-1]]


def figure(name: str) -> str:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return draw(name, FIGURES[name], train(name, FIGURES[name]))
    finally:
        torch.set_num_threads(threads)


def same(old: str, new: str) -> bool:
    """Whether two figures are equal up to rounding."""
    numbers = re.compile(r"-?\d+(?:\.\d+)?")
    if numbers.sub("#", old) != numbers.sub("#", new):
        return False
    pairs = zip(numbers.findall(old), numbers.findall(new), strict=True)
    return all(abs(float(a) - float(b)) <= LEAST for a, b in pairs)


def main(argv: list[str] | None = None) -> int:
    return command("methods.py", {FOLDER / f"{name}.svg": partial(figure, name) for name in FIGURES}, argv, same)


if __name__ == "__main__":
    raise SystemExit(main())
