"""Masks that are chosen once and held: scoring, applying, and keeping them as packed indices in the recipe's state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import ops
from ..nn import NMWeight
from ..pattern import RecipeError

if TYPE_CHECKING:
    from .base import State

SCORES = ("magnitude", "wanda", "existing")


@dataclass(frozen=True, eq=False)
class HeldMask:
    """W̃ = M ⊙ W with a mask that does not follow the weight."""

    mask: Tensor

    def __call__(self, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """The masked weight; kept elements keep their bits, pruned ones are +0."""
        return torch.where(self.mask, weight, torch.zeros((), dtype=weight.dtype, device=weight.device), out=out)


class FixedMasks:
    """The held masks of one handle; ``masks`` (name -> bool ``(out, in)``) is empty until they are chosen.

    Args:
        score: ``"magnitude"``, ``"wanda"`` or ``"existing"``; None for recipes that hold no mask.
    """

    def __init__(self, layers: dict[str, NMWeight], score: str | None) -> None:
        self.layers, self.score = layers, score
        self.masks: dict[str, Tensor] = {}
        self._squares: dict[str, Tensor] = {}
        self._source: Any = None

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Sum the squares of every layer's inputs over the forward passes run inside."""
        removers = [layer.register_forward_pre_hook(self._collector(name)) for name, layer in self.layers.items()]
        try:
            yield
        finally:
            for remover in removers:
                remover.remove()

    def _collector(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            x = args[0].detach()
            squares = x.reshape(-1, x.shape[-1]).double().square().sum(0)
            self._squares[name] = squares if name not in self._squares else self._squares[name] + squares

        return hook

    def ensure(self, state: State) -> None:
        """Have masks that agree with ``state``: those it carries, or new ones, chosen now and applied to the weights."""
        if "masks" not in state:
            self.masks = {name: self._choose(name, layer) for name, layer in self.layers.items()}
            state["masks"] = {name: ops.compress(m.to(torch.float32), self.layers[name].pattern, mask=m).indices for name, m in self.masks.items()}
            self._source = state["masks"]
            for name, layer in self.layers.items():
                with torch.no_grad():
                    layer.master.mul_(self.masks[name])
        elif state["masks"] is not self._source:
            self._source = state["masks"]
            self.masks = {name: self._unpack(layer, state["masks"][name]) for name, layer in self.layers.items()}

    def preview(self, name: str) -> HeldMask | None:
        """The transform of the mask that is held, or would be chosen now; None where plain magnitude gives the same."""
        if name in self.masks:
            return HeldMask(self.masks[name])
        if self.score == "wanda" and self._squares:
            return HeldMask(self._choose(name, self.layers[name]))
        return None

    def ensure_scored(self) -> None:
        """Raise ``RecipeError`` if the masks can neither be had nor chosen."""
        if self.score == "wanda" and not self.masks:
            missing = [name for name in self.layers if name not in self._squares]
            if missing:
                raise RecipeError(
                    'ASP(score="wanda") ranks weights by their inputs and has seen none for '
                    f"{', '.join(missing)}. Run a few batches first: with handle.calibrate(): model(batch)."
                )

    def _choose(self, name: str, layer: NMWeight) -> Tensor:
        w = layer.master.detach()
        if self.score == "wanda":
            self.ensure_scored()
            return ops.mask((w.abs().double() * self._squares[name].sqrt()).float(), layer.pattern)
        if self.score == "existing" and not ops.is_nm(w, layer.pattern):
            raise RecipeError(
                f'ASP(score="existing"): the weight of layer {name!r} is not {layer.pattern}, so there is no mask to adopt. '
                'Use score="magnitude", another pattern, or leave the layer out with filter_fn.'
            )
        return ops.mask(w, layer.pattern)

    @staticmethod
    def _unpack(layer: NMWeight, indices: Tensor) -> Tensor:
        shape = tuple(layer.master.shape)
        values = torch.ones(shape[0], layer.pattern.kept(shape[1]), device=indices.device)
        return ops.decompress(ops.Compressed(values, indices, layer.pattern, shape)).bool().to(layer.weight.device)
