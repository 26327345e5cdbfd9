"""The pattern of each layer: that of the recipe, or the layer's own where the recipe shares a budget out, kept in the recipe's state."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..nn import NMWeight
from ..pattern import CheckpointError, NMError, Pattern, ShapeError
from .report import Report

if TYPE_CHECKING:
    from .base import Recipe, State


class Shares:
    """The patterns of one handle's layers.

    ``state["patterns"]`` (name -> N:M) is there only for recipes that give layers patterns of their own; a resumed run takes the patterns
    from there and never shares out anew.
    """

    def __init__(self, recipe: Recipe, layers: dict[str, NMWeight], report: Report) -> None:
        self.recipe, self.layers, self.report = recipe, layers, report
        self.own: dict[str, Pattern] = {}

    def choose(self) -> None:
        """Give every layer the pattern that the recipe gives it for the present weights.

        Raises:
            ShapeError: M does not divide a layer's inputs.
        """
        self.own = self.recipe.layer_patterns({name: layer.master.detach() for name, layer in self.layers.items()}) or {}
        for name, pattern in self.own.items():
            try:
                pattern.check_divides("sparsify_", self.layers[name].master.shape[1], "in_features")
            except ShapeError as error:
                raise ShapeError(f"layer {name!r}: {error}") from error
        self._give(self.own)

    def save(self, state: State) -> None:
        """Keep the patterns in ``state``."""
        if self.own:
            state["patterns"] = {name: str(pattern) for name, pattern in self.own.items()}

    def adopt(self, state: State) -> bool:
        """Give the layers the patterns of ``state``; True if one of them has changed."""
        before = dict(self.own)
        self.own = {name: Pattern(text) for name, text in state.get("patterns", {}).items()}
        self._give(self.own)
        return self.own != before

    def _give(self, patterns: dict[str, Pattern]) -> None:
        for name, layer in self.layers.items():
            layer.pattern = patterns.get(name, Pattern(self.recipe.pattern))
        for i, entry in enumerate(self.report.entries):
            if entry.sparse and entry.name in self.layers:
                layer = self.layers[entry.name]
                self.report.entries[i] = replace(entry, reason=self.recipe.note(layer.pattern, shape_of(layer)))

    def check(self, state: State) -> None:
        """Raise ``CheckpointError`` if ``state`` has patterns of other layers than these."""
        patterns = state.get("patterns")
        if patterns is None:
            return
        odd = sorted(set(patterns) ^ set(self.layers))
        if odd:
            raise CheckpointError(
                f"the checkpoint's patterns are of other layers than this model's; only one of them has {', '.join(odd)}."
            )
        for name, text in patterns.items():
            try:
                Pattern(text).check_divides("resume", self.layers[name].master.shape[1], "in_features")
            except NMError as error:
                raise CheckpointError(f"the checkpoint's pattern of layer {name!r} does not fit: {error}") from error


def pattern_in(state: State, name: str, layer: NMWeight) -> Pattern:
    """The pattern that layer ``name`` has in ``state``."""
    text = state.get("patterns", {}).get(name)
    return layer.pattern if text is None else Pattern(text)


def shape_of(layer: NMWeight) -> tuple[int, int]:
    """``(out, in)`` of a layer's weight."""
    rows, cols = layer.master.shape
    return int(rows), int(cols)
