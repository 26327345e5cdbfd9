"""The result of ``audit``: numbers per layer and in total, and their table."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass
from itertools import count
from string import ascii_lowercase
from typing import Any

from .flops import aligned, shape_text
from .rules import Pieces, speedup, total
from .whole import WholeStep
from .whole import text as whole_text

WIDTH = 140
PARTS = ("inference", "step", "measured_inference", "measured_step")


def table(audit: Audit) -> str:
    """Format layers, totals, notes and advice."""
    advice = dict.fromkeys(each.text for layer in audit.layers for each in layer.advice)
    letters = (letter + (str(i) if i > 1 else "") for i in count(1) for letter in ascii_lowercase)  # a to z, a2 to z2 ...
    marks = dict(zip(advice, letters, strict=False))
    parts = PARTS if any(layer.measured_inference for layer in audit.layers) else PARTS[:2]
    rows = [("", "", "", *(("predicted", "", "measured", "")[: len(parts)]), "", "")]
    rows.append(("layer", "shape", "of dense", *(("inference", "step") * 2)[: len(parts)], "more", "why"))
    for layer in audit.layers:
        name = (layer.name or "(root)") + (f" ×{len(layer.names)}" if len(layer.names) > 1 else "")
        numbers = [_times(layer.speedup(part)) for part in parts]
        more = "".join(marks[each.text] for each in layer.advice)
        why = "; ".join(word for word in (layer.why, layer.note) if word)
        rows.append((name, shape_text(layer.shape), f"{100 * audit.share(layer):.1f} %", *numbers, more, why))
    totals = [_times(audit.total(part)) for part in parts]
    rows.append(("all linear layers" + (" and the rest" if audit.other else ""), "", "", *totals, "", ""))
    share = audit.dense_share
    most = f", so the total speed-up cannot exceed {1 / share:.1f}x" if 0.005 < share < 1 else ""
    rest = " and in the rest" if audit.other else ""
    lines = [*aligned(rows), _wrapped(f"{100 * share:.0f} % of the dense time is in layers that stay dense{rest}{most}.")]
    ranges = {word: getattr(audit, f"{word}_range") for word in PARTS[:2]}
    words = ", ".join(f"{word} {interval[0]:.2f}x to {interval[1]:.2f}x" for word, interval in ranges.items() if interval)
    lines += [_wrapped(f"Range for the slowest and fastest sparse GEMMs below: {words}.")] if words else []
    if audit.run is not None and audit.steps < 1:
        lines.append(_wrapped(f"{100 * audit.steps:.0f} % of the recipe's steps are sparse; its whole run is {audit.run:.2f}x."))
    lines += [whole_text(audit.whole)] if audit.whole else []
    lines += [_wrapped(note) for note in audit.notes]
    if advice:
        lines += ["what to change to gain more", *(_wrapped(text + _gains(audit, text), f"  {marks[text]}  ") for text in advice)]
    return "\n".join(lines)


def _gains(audit: Audit, text: str) -> str:
    """The gains of the layers by one piece of advice, if known."""
    by_part: dict[str, list[str]] = {}
    for layer in audit.layers:
        for each in layer.advice:
            if each.text == text and (each.speedup is not None or each.detail):
                gain = "" if each.speedup is None else f"{_times(layer.speedup(each.part))} to {each.speedup:.2f}x"
                words = (layer.name or "(root)", each.detail, gain)
                by_part.setdefault(each.part, []).append(" ".join(word for word in words if word))
    return "".join(f"; {part}: " + ", ".join(lines) if part else "; " + ", ".join(lines) for part, lines in by_part.items())


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _wrapped(text: str, start: str = "") -> str:
    return "\n".join(textwrap.wrap(text, WIDTH, initial_indent=start, subsequent_indent=" " * len(start), break_long_words=False))


@dataclass(frozen=True)
class Advice:
    """A suggested change for a layer.

    Args:
        text: the change, the same for all layers.
        detail: specific to this layer.
        part, speedup: predicted speed-up over dense of the ``"step"`` or ``"inference"``; None if unknown.
    """

    text: str
    part: str = ""
    speedup: float | None = None
    detail: str = ""


@dataclass(frozen=True)
class LayerAudit:
    """A group of equal layers of a model.

    Args:
        name: their name, with ``*`` for the parts that differ.
        names: all their names.
        kind: their class.
        shape: of the weight, ``(out, in)``.
        dtype: of the GEMMs.
        pattern: N:M, empty for dense layers.
        sparse: whether they are sparse or the recipe makes them so.
        why: as in ``handle.report``.
        tokens: tokens that pass through one of them in a step.
        times: number of such GEMMs.
        inference, step: predicted pieces of an inference forward pass, and of a training step per forward pass; empty if not applicable, as
            for a step of a compressed layer.
        measured_inference, measured_step: the same, measured; empty if not measured.
        note: on how it was measured, or why not.
        advice: changes that would make them faster.
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
        """Speed-up over dense of ``inference``, ``step``, ``measured_inference`` or ``measured_step``; None if it has no pieces."""
        pieces: Pieces = getattr(self, part)
        return speedup(pieces) if pieces else None

    def as_dict(self) -> dict[str, Any]:
        """Plain values: seconds of each piece in the dense and in this model, and the speed-ups."""
        record = asdict(self)
        parts = {part: {"speedup": self.speedup(part), "pieces": list(record[part])} if record[part] else None for part in PARTS}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in (record | parts).items()}


@dataclass(frozen=True)
class Audit:
    """The gains of N:M for a model, layer by layer; ``str(...)`` gives a table.

    Args:
        layers: all linear layers, grouped; seconds are those of one layer of a group.
        device: the device of the prediction.
        recipe: its text, empty for compressed models.
        tokens: tokens per forward pass.
        accumulate: forward passes per optimizer step.
        steps: the share of the recipe's steps that are sparse; the table shows sparse steps.
        inference_range, step_range: predicted totals for the slowest and fastest plausible sparse GEMMs; empty on a measured device.
        other: predicted seconds of everything else in one forward pass, from the FLOPs given by the caller.
        notes: how the numbers were obtained.
        whole: on a GPU, predicted whole steps, optimizer included: of the recipe first, and of others for a dense model.

    Example:
        >>> import nmkernels as nm
        >>> result = nm.audit({"up": (16384, 4096)}, 8192, "fst:2:4(end=None)", device="H200", dtype="bfloat16")
        >>> result.layers[0].name, f"{result.layers[0].speedup('inference'):.2f}"
        ('up', '1.40')
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
    whole: tuple[WholeStep, ...] = ()

    @property
    def inference(self) -> float | None:
        """Predicted speed-up of inference through all linear layers (and ``other``); None if nothing is predicted."""
        return self.total("inference")

    @property
    def step(self) -> float | None:
        """Predicted speed-up of a sparse training step."""
        return self.total("step")

    @property
    def measured_inference(self) -> float | None:
        """Measured speed-up of inference; None unless every layer was measured."""
        return self.total("measured_inference")

    @property
    def measured_step(self) -> float | None:
        """Measured speed-up of a sparse training step; None unless every layer was measured."""
        return self.total("measured_step")

    @property
    def run(self) -> float | None:
        """Predicted speed-up of the recipe's whole run, including its dense steps."""
        return None if self.step is None else 1 / (self.steps / self.step + 1 - self.steps)

    @property
    def dense_share(self) -> float:
        """The share of the dense model's predicted step (or inference) in layers that stay dense and in ``other``."""
        return 1 - sum(self.share(layer) for layer in self.layers if layer.sparse) if self._all else 0.0

    def share(self, layer: LayerAudit) -> float:
        """The share of the dense model's predicted step (or inference) in this group of layers."""
        return self._dense(layer) / self._all if self._all else 0.0

    @property
    def _all(self) -> float:
        """Seconds of the dense model's predicted step (or inference), with ``other``."""
        return sum(map(self._dense, self.layers)) + self.other * (3 if any(layer.step for layer in self.layers) else 1)

    @staticmethod
    def _dense(layer: LayerAudit) -> float:
        return layer.times * total(layer.step or layer.inference)[0]

    def total(self, part: str) -> float | None:
        """The speed-up of all layers together for ``inference``, ``step``, ``measured_inference`` or ``measured_step``."""
        counted = [layer for layer in self.layers if layer.tokens]
        parts = [(layer.times, getattr(layer, part)) for layer in counted]
        if not parts or any(not pieces for _, pieces in parts):
            return None
        rest = self.other * (3 if part.endswith("step") else 1)
        dense, used = (sum(times * total(pieces)[i] for times, pieces in parts) + rest for i in (0, 1))
        return dense / used if used else None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON: the totals, and every layer with its pieces."""
        settings = {key: list(value) if isinstance(value, tuple) else value for key, value in vars(self).items() if key != "layers"}
        totals = {part: self.total(part) for part in PARTS}
        more = {"run": self.run, "dense_share": self.dense_share}
        layers = [{**layer.as_dict(), "share": self.share(layer)} for layer in self.layers]
        return {**settings, **totals, **more, "whole": [step.as_dict() for step in self.whole], "layers": layers}

    def __str__(self) -> str:
        return table(self)
