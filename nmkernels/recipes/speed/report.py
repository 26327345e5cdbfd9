"""What ``audit`` returns: figures per layer and in total, and the table of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .costs import Pieces, speedup, total


@dataclass(frozen=True)
class Advice:
    """Something to change for a layer.

    Args:
        text: what, the same for every layer. detail: a number for this one, in words.
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
        name: theirs, with ``*`` for what differs. names: all of them. kind: their class.
        shape: of the weight, ``(out, in)``. dtype: of the products. pattern: N:M, empty where they stay dense.
        sparse: the recipe makes them sparse, or they are. why: as in ``handle.report``.
        tokens: that pass through one of them in a step, ``rows`` of the model's. times: how often these products are done.
        inference, step: pieces of one forward pass in inference, and of a training step for each forward pass, predicted; empty where
            there is none, as for a step of a compressed layer.
        measured_inference, measured_step: the same, measured; empty where nothing was. note: on what, or why not.
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

    def as_dict(self) -> dict[str, Any]:
        """Plain values: seconds of each piece in a dense model and here, and the speed-ups."""
        own = {key: value for key, value in vars(self).items() if key not in PARTS}
        for part in PARTS:
            pieces: Pieces = getattr(self, part)
            own[part] = {"speedup": speedup(pieces), "pieces": [dict(vars(p)) for p in pieces]} if pieces else None
        own["advice"] = [dict(vars(each)) for each in self.advice]
        return {key: list(value) if isinstance(value, tuple) else value for key, value in own.items()}


PARTS = ("inference", "step", "measured_inference", "measured_step")


@dataclass(frozen=True)
class Audit:
    """Whether N:M pays for a model, layer by layer; ``str`` of it is a table.

    Args:
        layers: all linear layers, equal ones as one; seconds are of one of them.
        device: that the prediction is for. recipe: in text, empty for compressed models. tokens: of one forward pass.
        accumulate: forward passes per optimizer step.
        steps: the share of the recipe's steps that are sparse, which those of the table are.
        inference_range, step_range: the predicted totals where sparse products are as slow, and as fast, as they may be; empty on a
            device that was measured.
        other: predicted seconds of everything else in one forward pass, where the caller told its FLOPs.
        notes: what the figures rest on, in sentences.
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
        more = {"run": self.run, "dense_share": self.dense_share}
        return {**own, **totals, **more, "layers": [{**layer.as_dict(), "share": self.share(layer)} for layer in self.layers]}

    def __str__(self) -> str:
        from .table import table

        return table(self)
