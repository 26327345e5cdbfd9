"""Norms of layers' inputs, collected over a few forward passes: what ``ASP(score="wanda")`` ranks weights by.

Under ``torch.distributed`` they are summed over all ranks, each of which may run other batches: replicas have to choose the same masks.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..nn.weight import NMWeight
from .layer_names import listed

Call = tuple[int, Tensor, Tensor]
"""Of one forward pass of a layer its tokens, those that were left out, and their values that are not finite; not waiting for a GPU."""


class InputNorms:
    """``squares`` (name -> ``(in,)``): the sum of the squares of a layer's inputs; ``tokens``: over how many."""

    def __init__(self, layers: dict[str, NMWeight]) -> None:
        self.layers = layers
        self.squares: dict[str, Tensor] = {}
        self.tokens: dict[str, Tensor | int] = {}

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect the inputs of the forward passes run inside, on every rank.

        Tokens with a value that is not finite are left out, with a warning: in padding that attention masks altogether they do no harm, and
        one of them would make every score of the layer NaN.
        """
        linear = {name: layer for name, layer in self.layers.items() if layer.own_gemms}
        calls: dict[str, list[Call]] = {name: [] for name in linear}
        before = dict(self.squares), dict(self.tokens)
        hooks = [
            layer.register_forward_pre_hook(partial(self._collect, name, calls[name]), with_kwargs=True) for name, layer in linear.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            for name, layer in linear.items():  # every rank has what there was before; what each has collected since is added up
                size, device = layer.shape[1], layer.weight.device
                squares, tokens = (values.get(name, 0) for values in before)
                new = torch.zeros(size + 1, dtype=widest(device), device=device)
                new[:size], new[size] = self.squares.get(name, 0) - squares, self.tokens.get(name, 0) - tokens
                torch.distributed.all_reduce(new)
                self.squares[name], self.tokens[name] = squares + new[:size], tokens + new[size].long()
        self._report(calls)

    @torch.no_grad()
    def _collect(self, name: str, calls: list[Call], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x: Tensor = (*args, *kwargs.values())[0]
        # in 16 bits squares overflow and sums stop growing
        squares = x.reshape(-1, x.shape[-1]).to(widest(x.device)).square()
        finite = squares.isfinite()
        usable = finite.all(1)
        self.squares[name] = self.squares.get(name, 0) + squares.masked_fill(~usable[:, None], 0.0).sum(0)
        self.tokens[name] = self.tokens.get(name, 0) + usable.sum()
        calls.append((len(squares), (~usable).sum(), (~finite).sum()))

    def _report(self, calls: dict[str, list[Call]]) -> None:
        left_out = {name: torch.stack([left for _, left, _ in seen]).tolist() for name, seen in calls.items() if seen}
        first = {name: next(i for i, left in enumerate(counts, 1) if left) for name, counts in left_out.items() if any(counts)}
        if first:
            name = min(first, key=lambda name: first[name])
            tokens, values = sum(tokens for tokens, _, _ in calls[name]), sum(int(values) for _, _, values in calls[name])
            also = f" So did {listed(other for other in first if other != name)}." if len(first) > 1 else ""
            warnings.warn(
                f"calibrate: layer {name!r} got {values} NaN or infinite input values, in {sum(left_out[name])} of {tokens} tokens, first "
                f"in its forward pass {first[name]} of {len(calls[name])}.{also} Such tokens are left out. If they are not padding, "
                "calibrate in bfloat16 or float32, or without that batch.",
                stacklevel=4,
            )
        few = {name: tokens for name in calls if (tokens := int(self.tokens.get(name, 0))) < self.layers[name].pattern.m}
        if few:
            counts = ", ".join(f"{name!r} ({tokens})" for name, tokens in few.items())
            warnings.warn(
                "calibrate: these layers got fewer tokens than a group has weights, too few to rank the weights reliably: "
                f"{counts}. Run more batches, or leave out layers that the model does not call with filter_fn.",
                stacklevel=4,
            )

    def score(self, name: str) -> Tensor:
        """|w|·‖x‖₂ of the weights of layer ``name``."""
        weight = self.layers[name].master.detach().abs().to(widest(self.layers[name].master.device))
        return (weight * self.squares[name].sqrt().to(weight)).float()


def widest(device: torch.device) -> torch.dtype:
    """float64 where ``device`` has it, else float32."""
    return torch.float32 if device.type == "mps" else torch.float64
