"""Reordering hidden channels before weights are pruned, so that the N:M mask keeps more of them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...nn import Chain, NMWeight, channel_parameters, find_chains, reorder_
from ..report import Report
from .permutation import Found, search_permutation

log = logging.getLogger("nmkernels.permutation")
log.addHandler(logging.NullHandler())

Optimizers = Sequence[torch.optim.Optimizer]


@dataclass(frozen=True)
class Search:
    """How a recipe wants the channel orders searched; see ``search_permutation``."""

    escapes: int = 100
    seed: int = 0


class Channels:
    """The channel permutations of one handle; long searches tell how far they are to the logger ``nmkernels.permutation``.

    Args:
        report: gets a line for every sparse layer, with the gain or why its channels stay where they are.
    """

    def __init__(self, model: nn.Module, layers: dict[str, NMWeight], search: Search, report: Report) -> None:
        self.model, self.layers, self.search, self.report = model, layers, search, report
        self.gains: dict[str, tuple[float, float]] = {}
        chains, reasons = find_chains(model)
        possible = {
            name: f"to be reordered, with the outputs of {_and(c.producers)}, when the layer is pruned" for c, name in self._of(chains)
        }
        report.channels = {name: possible.get(name) or f"left alone: {reasons[name]}" for name in layers}

    def permute_(self, score: Callable[[str], Tensor], optimizers: Optimizers = ()) -> dict[str, Found]:
        """Reorder every chain that gains by it, in place: weights, biases, their gradients and what optimizers keep for them.

        Args:
            score: what the mask ranks the elements of a layer by, ``(out, in)``, by the layer's name.
            optimizers: all that update the model; a chain with a parameter that none of them has is left alone.

        Returns:
            the permutation of each layer whose input channels were reordered.
        """
        done: dict[str, Found] = {}
        for chain, found in self._search(score, optimizers):
            for p, dim in channel_parameters(self.model, chain):
                for tensor in _everything_of(p, optimizers):
                    reorder_(tensor, dim, found.order)
            done.update({name: found for name in chain.consumers if name in self.layers})
        self._drop()
        return done

    def resume(self, kept: dict[str, list[float]]) -> None:
        """Report what ``kept`` says that an earlier run did; its weights come in their new order."""
        self.gains = {name: (before, after) for name, (before, after) in kept.items()}
        told = {
            name: f"{'reordered' if after > before else 'left alone'} earlier: {_kept(before, after)}"
            for name, (before, after) in kept.items()
        }
        self.report.channels = {name: told.get(name, "left alone") for name in self.layers}

    def kept(self) -> dict[str, list[float]]:
        """For checkpoints: of each layer that was searched, the shares of the magnitude that the mask kept before and keeps after."""
        return {name: list(gain) for name, gain in self.gains.items()}

    @contextmanager
    def permuted(self, score: Callable[[str], Tensor]) -> Iterator[dict[str, Found]]:
        """The same inside; outside, every weight has the bits and the place that it had."""
        done: list[tuple[Chain, Found]] = []
        try:
            for chain, found in self._search(score, ()):
                for p, dim in channel_parameters(self.model, chain):
                    reorder_(p.detach(), dim, found.order)
                done.append((chain, found))
            self._drop()
            yield {name: found for chain, found in done for name in chain.consumers if name in self.layers}
        finally:
            for chain, found in done:
                for p, dim in channel_parameters(self.model, chain):
                    reorder_(p.detach(), dim, found.order.argsort())
            self._drop()

    def _of(self, chains: Iterable[Chain]) -> Iterator[tuple[Chain, str]]:
        return ((chain, name) for chain in chains for name in chain.consumers if name in self.layers)

    def _drop(self) -> None:
        for module in self.model.modules():
            if isinstance(module, NMWeight):
                module.effective.drop()

    def _search(self, score: Callable[[str], Tensor], optimizers: Optimizers) -> list[tuple[Chain, Found]]:
        """Chains with orders that gain; hooks and ties may have come since ``sparsify_``, so they are looked for anew."""
        chains, reasons = find_chains(self.model)
        self.report.channels = {name: f"left alone: {reasons.get(name, '')}" for name in self.layers}
        self.gains = {}
        if not all(bool(torch.isfinite(layer.weight).all()) for layer in self.layers.values()):
            self.report.channels = dict.fromkeys(self.layers, "left alone: a weight of the model is not finite")
            return []
        todo: list[tuple[Chain, Found]] = []
        for chain in chains:
            sparse = [name for name in chain.consumers if name in self.layers]
            said = self._obstacle(chain, sparse, optimizers) if sparse else ""
            if said:
                self.report.channels.update({name: f"left alone: {said}" for name in sparse})
            elif sparse:
                scores = torch.cat([score(name) for name in sparse])
                tell = functools.partial(log.info, "%s: %s", _and(sparse))
                found = search_permutation(scores, self.layers[sparse[0]].pattern, self.search.escapes, self.search.seed, tell)
                self.report.channels.update({name: _told(found, chain) for name in sparse})
                self.gains.update({name: (found.before, found.after) for name in sparse})
                if found.after > found.before:
                    todo.append((chain, found))
        return todo

    def _obstacle(self, chain: Chain, sparse: list[str], optimizers: Optimizers) -> str:
        if len({str(self.layers[name].pattern) for name in sparse}) > 1:
            return f"{_and(sparse)} have different patterns"
        known = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
        for p, _ in channel_parameters(self.model, chain):
            if optimizers and id(p) not in known:
                return f"a parameter of {_and(chain.producers + chain.consumers)} belongs to no optimizer that attach was given"
            for key, value in _state_of(p, optimizers):
                if value.numel() > 1 and value.shape != p.shape:
                    return f"the optimizer keeps {key!r} of another shape than its weight, which cannot be reordered with it"
        return ""


def _state_of(p: nn.Parameter, optimizers: Optimizers) -> Iterator[tuple[str, Tensor]]:
    for optimizer in optimizers:
        if p in optimizer.state:
            yield from ((str(key), value) for key, value in optimizer.state[p].items() if isinstance(value, Tensor))


def _everything_of(p: nn.Parameter, optimizers: Optimizers) -> Iterator[Tensor]:
    """``p``, its gradient, and the moments that optimizers keep for it."""
    yield p.detach()
    if p.grad is not None:
        yield p.grad
    yield from (value for _, value in _state_of(p, optimizers) if value.shape == p.shape)


def _told(found: Found, chain: Chain) -> str:
    if found.after <= found.before:
        return f"left alone: no order was found that keeps more than the present one, {found.before:.4f} of the magnitude"
    way = f"{found.efficacy:.0%} of the way to {found.bound:.4f}, the best without groups"
    return f"reordered with the outputs of {_and(chain.producers)}: {_kept(found.before, found.after)} ({way})"


def _kept(before: float, after: float) -> str:
    return f"the mask keeps {after:.4f} of the magnitude instead of {before:.4f}"


def _and(names: Sequence[str]) -> str:
    return ", ".join(names)
