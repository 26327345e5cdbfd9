"""Norms of layers' inputs, collected over a few forward passes: what ``ASP(score="wanda")`` ranks weights by.

Under ``torch.distributed`` they are summed over all ranks, each of which may run other batches: replicas have to choose the same masks.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..nn import NMWeight
from .writes import listed


@dataclass
class LeftOut:
    """The tokens of one layer that were left out: how many of how many ``tokens``, their ``values`` that are not finite, and the ``first``
    of its ``calls`` with such a token, 0 for none. Tensors, so that a GPU is not waited for."""

    calls: int = 0
    tokens: int = 0
    left_out: Tensor | int = 0
    values: Tensor | int = 0
    first: Tensor | int = 0


class InputNorms:
    """``squares`` (name -> ``(in,)``): the sum of the squares of a layer's inputs; ``tokens``: over how many."""

    def __init__(self, layers: dict[str, NMWeight]) -> None:
        self.layers = layers
        self.squares: dict[str, Tensor] = {}
        self.tokens: dict[str, Tensor | int] = {}

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect the inputs of the forward passes run inside, on every rank.

        Tokens with a value that is not finite are left out, with a warning: of padding that attention masks altogether they mean nothing,
        and one of them would make every score of the layer NaN.
        """
        linear = {name: layer for name, layer in self.layers.items() if layer.own_gemms}
        seen = {name: LeftOut() for name in linear}
        before = dict(self.squares), dict(self.tokens)
        hooks = [
            layer.register_forward_pre_hook(partial(self._collect, name, seen[name]), with_kwargs=True) for name, layer in linear.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            for name, layer in linear.items():
                self._share(name, layer, before[0].get(name, 0), before[1].get(name, 0))
        self._report(seen)

    @torch.no_grad()
    def _collect(self, name: str, seen: LeftOut, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x: Tensor = (*args, *kwargs.values())[0]
        # in 16 bits squares overflow and sums stop growing
        squares = x.reshape(-1, x.shape[-1]).to(widest(x.device)).square()
        finite = squares.isfinite()
        kept = finite.all(1)
        self.squares[name] = self.squares.get(name, 0) + squares.masked_fill(~kept[:, None], 0.0).sum(0)
        self.tokens[name] = self.tokens.get(name, 0) + kept.sum()
        seen.calls += 1
        seen.tokens += len(squares)
        seen.left_out = seen.left_out + (~kept).sum()
        seen.values = seen.values + (~finite).sum()
        seen.first = torch.where((seen.left_out > 0) & (torch.as_tensor(seen.first, device=x.device) == 0), seen.calls, seen.first)

    def _share(self, name: str, layer: NMWeight, squares: Tensor | int, tokens: Tensor | int) -> None:
        """Add to ``squares`` and ``tokens``, which every rank has, what each of them has collected since."""
        size = layer.shape[1]
        new = torch.zeros(size + 1, dtype=widest(layer.weight.device), device=layer.weight.device)
        new[:size], new[size] = self.squares.get(name, 0) - squares, self.tokens.get(name, 0) - tokens
        torch.distributed.all_reduce(new)
        self.squares[name], self.tokens[name] = squares + new[:size], tokens + new[size].long()

    def _report(self, seen: dict[str, LeftOut]) -> None:
        left_out = [(int(found.first), name) for name, found in seen.items() if int(found.first)]
        if left_out:
            first, name = min(left_out, key=lambda pair: pair[0])
            found, others = seen[name], [other for _, other in left_out if other != name]
            also = f" So did {listed(others)}." if others else ""
            warnings.warn(
                f"calibrate: layer {name!r} got {int(found.values)} NaN or infinite input values, in {int(found.left_out)} of "
                f"{found.tokens} tokens, first in its forward pass {first} of {found.calls}.{also} Such tokens are left out. If they are "
                "not padding, calibrate in bfloat16 or float32, or without that batch.",
                stacklevel=4,
            )
        few = {name: tokens for name in seen if (tokens := int(self.tokens.get(name, 0))) < self.layers[name].pattern.m}
        if few:
            counts = ", ".join(f"{name!r} ({tokens})" for name, tokens in few.items())
            warnings.warn(
                "calibrate: these layers got fewer tokens than a group has weights, which is too few to rank them by: "
                f"{counts}. Run more batches, or leave out layers that the model does not call with filter_fn.",
                stacklevel=4,
            )

    def score(self, name: str) -> Tensor:
        """|w|·‖x‖₂ of the weights of layer ``name``."""
        weight = self.layers[name].master.detach().abs()
        wide = widest(weight.device)
        return (weight.to(wide) * self.squares[name].sqrt().to(weight.device, wide)).float()

    def missing(self) -> list[str]:
        """The layers that have seen no token."""
        return [name for name in self.layers if not int(self.tokens.get(name, 0))]


def widest(device: torch.device) -> torch.dtype:
    """float64 where ``device`` has it, else float32."""
    return torch.float32 if device.type == "mps" else torch.float64
