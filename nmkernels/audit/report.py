"""What ``audit`` returns: numbers per layer and in total, and the table of them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import count
from string import ascii_lowercase
from typing import Any

from .flops import aligned, shape_text
from .rules import Pieces, speedup, total
from .world import WorldAudit
from .world import text as world_text

WIDTH = 140
PARTS = ("inference", "step", "measured_inference", "measured_step")


def table(audit: Audit) -> str:
    """Layers, totals, what the numbers rest on, and what would gain more."""
    advice = dict.fromkeys(each.text for layer in audit.layers for each in layer.advice)
    marks = dict(zip(advice, _marks(), strict=False))
    parts = PARTS if any(layer.measured_inference for layer in audit.layers) else PARTS[:2]
    rows = [("", "", "", *(("predicted", "", "measured", "")[: len(parts)]), "", "")]
    rows.append(("layer", "shape", "of dense", *(("inference", "step") * 2)[: len(parts)], "more", "why"))
    for layer in audit.layers:
        name = (layer.name or "(root)") + (f" ×{len(layer.names)}" if len(layer.names) > 1 else "")
        numbers = [_times(layer.speedup(part)) for part in parts]
        letters = "".join(marks[each.text] for each in layer.advice)
        why = "; ".join(word for word in (layer.why, layer.note) if word)
        rows.append((name, shape_text(layer.shape), f"{100 * audit.share(layer):.1f} %", *numbers, letters, why))
    totals = [_times(audit.total(part)) for part in parts]
    rows.append(("all linear layers" + (" and the rest" if audit.other else ""), "", "", *totals, "", ""))
    lines = [*aligned(rows), *(_wrapped(note) for note in (*_summary(audit), *audit.notes))]
    if audit.world is not None:
        lines.append(world_text(audit.world, WIDTH))
    if advice:
        lines += ["what to change to gain more", *(_wrapped(text + _gains(audit, text), f"  {marks[text]}  ") for text in advice)]
    return "\n".join(lines)


def _summary(audit: Audit) -> Iterator[str]:
    share = audit.dense_share
    most = f": however fast the rest, all together could be {1 / share:.1f}x at most" if 0.005 < share < 1 else ""
    yield f"{100 * share:.0f} % of the dense time is in what stays dense{most}."
    ranges = [(word, found) for word, found in (("inference", audit.inference_range), ("step", audit.step_range)) if found]
    if ranges:
        words = ", ".join(f"{word} {low:.2f}x to {high:.2f}x" for word, (low, high) in ranges)
        yield f"With sparse GEMMs as slow, and as fast, as below: {words}."
    if audit.run is not None and audit.steps < 1:
        yield f"{100 * audit.steps:.0f} % of the recipe's steps are sparse; its whole run is {audit.run:.2f}x."


def _gains(audit: Audit, text: str) -> str:
    """What the layers would gain by one piece of advice, where that is known."""
    found: dict[str, list[str]] = {}
    for layer in audit.layers:
        for each in layer.advice:
            if each.text == text and (each.speedup is not None or each.detail):
                gain = "" if each.speedup is None else f"{_times(layer.speedup(each.part))} to {each.speedup:.2f}x"
                words = (layer.name or "(root)", each.detail, gain)
                found.setdefault(each.part, []).append(" ".join(word for word in words if word))
    return "".join(f"; {part}: " + ", ".join(lines) if part else "; " + ", ".join(lines) for part, lines in found.items())


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _marks() -> Iterator[str]:
    """a to z, then a2 to z2 and so on."""
    return (letter + (str(i) if i > 1 else "") for i in count(1) for letter in ascii_lowercase)


def _wrapped(text: str, start: str = "") -> str:
    return "\n".join(textwrap.wrap(text, WIDTH, initial_indent=start, subsequent_indent=" " * len(start), break_long_words=False))


@dataclass(frozen=True)
class Advice:
    """Something to change for a layer.

    Args:
        text: what, the same for every layer.
        detail: a number for this one, in words.
        part, speedup: the ``"step"`` or the ``"inference"`` would then be so many times as fast as dense; None where that is open.
    """

    text: str
    part: str = ""
    speedup: float | None = None
    detail: str = ""


@dataclass(frozen=True)
class LayerAudit:
    """Equal layers of a model, as one.

    Args:
        name: theirs, with ``*`` for what differs.
        names: all of them.
        kind: their class.
        shape: of the weight, ``(out, in)``.
        dtype: of the GEMMs.
        pattern: N:M, empty where they stay dense.
        sparse: the recipe makes them sparse, or they are.
        why: as in ``handle.report``.
        tokens: that pass through one of them in a step, ``rows`` of the model's.
        times: how often these GEMMs are done.
        inference, step: pieces of one forward pass in inference, and of a training step for each forward pass, predicted; empty where
            there is none, as for a step of a compressed layer.
        measured_inference, measured_step: the same, measured; empty where nothing was.
        note: on what, or why not.
        advice: what would make them faster.
    """

    name: str
    names: tuple[str, ...]
    kind: str
    shape: tuple[int, ...]
    dtype: str
    pattern: str
    sparse: bool
    why: str
    tokens: int
    times: int
    inference: Pieces = ()
    step: Pieces = ()
    measured_inference: Pieces = ()
    measured_step: Pieces = ()
    note: str = ""
    advice: tuple[Advice, ...] = ()

    def speedup(self, part: str) -> float | None:
        """Of ``inference``, ``step``, ``measured_inference`` or ``measured_step``; None where it has no pieces."""
        pieces: Pieces = getattr(self, part)
        return speedup(pieces) if pieces else None

    def as_dict(self) -> dict[str, Any]:
        """Plain values: seconds of each piece in a dense model and here, and the speed-ups."""
        own = asdict(self)
        parts = {part: {"speedup": self.speedup(part), "pieces": list(own[part])} if own[part] else None for part in PARTS}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in (own | parts).items()}


@dataclass(frozen=True)
class Audit:
    """Whether N:M pays for a model, layer by layer; ``str`` of it is a table.

    Args:
        layers: all linear layers, equal ones as one; seconds are of one of them.
        device: that the prediction is for.
        recipe: in text, empty for compressed models.
        tokens: of one forward pass.
        accumulate: forward passes per optimizer step.
        steps: the share of the recipe's steps that are sparse, which those of the table are.
        inference_range, step_range: the predicted totals where sparse GEMMs are as slow, and as fast, as they may be; empty on a
            device that was measured.
        other: predicted seconds of everything else in one forward pass, where the caller told its FLOPs.
        notes: what the numbers rest on, in sentences.
        world: a step on many GPUs, predicted; None where it was not asked for.
    """

    layers: tuple[LayerAudit, ...]
    device: str
    recipe: str
    tokens: int
    accumulate: int = 1
    steps: float = 1.0
    inference_range: tuple[float, ...] = ()
    step_range: tuple[float, ...] = ()
    other: float = 0.0
    notes: tuple[str, ...] = ()
    world: WorldAudit | None = None

    @property
    def inference(self) -> float | None:
        """Predicted: how many times as fast inference through all linear layers (and ``other``) is; None where nothing is predicted."""
        return self.total("inference")

    @property
    def step(self) -> float | None:
        """Predicted: how many times as fast a sparse training step is."""
        return self.total("step")

    @property
    def measured_inference(self) -> float | None:
        """Measured: as ``inference``; None unless every layer was measured."""
        return self.total("measured_inference")

    @property
    def measured_step(self) -> float | None:
        """Measured: as ``step``."""
        return self.total("measured_step")

    @property
    def run(self) -> float | None:
        """Predicted: how many times as fast the recipe's whole run is, its dense steps included."""
        return None if self.step is None else 1 / (self.steps / self.step + 1 - self.steps)

    @property
    def dense_share(self) -> float:
        """The share of the dense model's predicted step, or of its inference, that is spent in layers that stay dense, and in ``other``."""
        seconds = [(layer.sparse, self._dense(layer)) for layer in self.layers]
        rest = self.other * (3 if any(layer.step for layer in self.layers) else 1)
        whole = sum(took for _, took in seconds) + rest
        return (sum(took for sparse, took in seconds if not sparse) + rest) / whole if whole else 0.0

    def share(self, layer: LayerAudit) -> float:
        """The share of the dense model's predicted step, or of its inference, in ``layer`` and its equals."""
        whole = sum(self._dense(each) for each in self.layers)
        return self._dense(layer) / whole if whole else 0.0

    @staticmethod
    def _dense(layer: LayerAudit) -> float:
        return layer.times * total(layer.step or layer.inference)[0]

    def total(self, part: str) -> float | None:
        """The speed-up of all layers together in one of ``inference``, ``step``, ``measured_inference``, ``measured_step``."""
        counted = [layer for layer in self.layers if layer.tokens]
        parts = [(layer.times, getattr(layer, part)) for layer in counted]
        if not parts or any(not pieces for _, pieces in parts):
            return None
        rest = self.other * (3 if part.endswith("step") else 1)
        dense, used = (sum(times * total(pieces)[i] for times, pieces in parts) + rest for i in (0, 1))
        return dense / used if used else None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON: the totals, and every layer with its pieces."""
        own = {key: list(value) if isinstance(value, tuple) else value for key, value in vars(self).items() if key != "layers"}
        totals = {part: self.total(part) for part in PARTS}
        more = {"run": self.run, "dense_share": self.dense_share, "world": None if self.world is None else self.world.as_dict()}
        return {**own, **totals, **more, "layers": [{**layer.as_dict(), "share": self.share(layer)} for layer in self.layers]}

    def __str__(self) -> str:
        return table(self)
