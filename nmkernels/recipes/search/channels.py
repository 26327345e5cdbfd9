"""Reordering hidden channels before weights are pruned, so that the N:M mask keeps more of them."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ...nn import Chain, NMWeight, channel_parameters, find_chains, reorder_
from ..report import Report
from .permutation import Found, search_permutation

log = logging.getLogger("nmkernels.permutation")
log.addHandler(logging.NullHandler())

Optimizers = Sequence[torch.optim.Optimizer]

OTHERS = "experts that are stacked in one tensor"
"""What ``find_chains`` does not speak of."""


class Channels:
    """The channel permutations of one handle: ``report`` has every layer's gain, or why its channels stay where they are.

    ``search`` are keywords of ``search_permutation``.
    """

    def __init__(self, model: nn.Module, layers: dict[str, NMWeight], search: Mapping[str, int], report: Report) -> None:
        self.model, self.layers, self.search, self.report = model, layers, search, report
        self.kept: dict[str, list[float]] = {}
        """For checkpoints: of each layer that was searched, the shares of the magnitude that the mask kept before and keeps after."""
        chains, reasons = find_chains(model)
        possible = {
            name: f"to be reordered, with the outputs of {', '.join(c.producers)}, when the layer is pruned"
            for c in chains
            for name in c.consumers
        }
        report.channels = {name: possible.get(name) or f"left alone: {reasons.get(name, OTHERS)}" for name in layers}

    def permute_(self, score: Callable[[str], Tensor], optimizers: Optimizers = ()) -> dict[str, Found]:
        """Reorder every chain that gains by it, in place: weights, biases, their gradients and what optimizers keep for them.

        ``score`` is what the mask ranks the elements of a layer by, from its name; ``optimizers`` are all that update the model: a chain
        with a parameter that none of them has is left alone. Returns the permutation of each layer that was reordered.
        """
        found = self._search(score, optimizers)
        for chain, it in found:
            self._reorder(chain, it.order, optimizers)
        return self._by_layer(found)

    def resume(self, kept: dict[str, list[float]]) -> None:
        """Report what ``kept`` says that an earlier run did; its weights come in their new order."""
        self.report.channels = dict.fromkeys(self.layers, "left alone")
        for name, (before, after) in kept.items():
            self.report.channels[name] = f"{'reordered' if after > before else 'left alone'} earlier: {_told(before, after)}"

    @contextmanager
    def permuted(self, score: Callable[[str], Tensor]) -> Iterator[dict[str, Found]]:
        """The same inside; outside, every weight has the bits and the place that it had."""
        done: list[tuple[Chain, Found]] = []
        try:
            for chain, found in self._search(score, ()):
                self._reorder(chain, found.order)
                done.append((chain, found))
            yield self._by_layer(done)
        finally:
            for chain, found in done:
                self._reorder(chain, found.order.argsort())

    def _by_layer(self, found: list[tuple[Chain, Found]]) -> dict[str, Found]:
        return {name: it for chain, it in found for name in chain.consumers if name in self.layers}

    def _reorder(self, chain: Chain, order: Tensor, optimizers: Optimizers = ()) -> None:
        for p, dim in channel_parameters(self.model, chain):
            moments = (value for _, value in _state_of(p, optimizers) if value.shape == p.shape)
            for tensor in itertools.chain([p.detach()], [] if p.grad is None else [p.grad], moments):
                reorder_(tensor, dim, order)
        for module in self.model.modules():
            if isinstance(module, NMWeight):
                module.effective.drop()

    def _search(self, score: Callable[[str], Tensor], optimizers: Optimizers) -> list[tuple[Chain, Found]]:
        """Chains with orders that gain; hooks and ties may have come since ``sparsify_``, so they are looked for again."""
        chains, reasons = find_chains(self.model)
        self.report.channels = {name: f"left alone: {reasons.get(name, OTHERS)}" for name in self.layers}
        self.kept = {}
        if not all(bool(torch.isfinite(layer.weight).all()) for layer in self.layers.values()):
            self.report.channels = dict.fromkeys(self.layers, "left alone: a weight of the model is not finite")
            return []
        todo: list[tuple[Chain, Found]] = []
        for chain in chains:
            sparse = [name for name in chain.consumers if name in self.layers]
            said = self._obstacle(chain, sparse, optimizers) if sparse else ""
            if said:
                self.report.channels.update(dict.fromkeys(sparse, f"left alone: {said}"))
            elif sparse:
                # of a convolution one row for each output and offset in the kernel
                scores = torch.cat([score(name).reshape(-1, chain.channels) for name in sparse])
                tell = functools.partial(log.info, "%s: %s", ", ".join(sparse))
                found = search_permutation(scores, self.layers[sparse[0]].pattern, **self.search, progress=tell)
                self.kept.update({name: [found.before, found.after] for name in sparse})
                if found.after > found.before:
                    todo.append((chain, found))
                    way = f"{found.efficacy:.0%} of the way to {found.bound:.4f}, the best without groups"
                    said = f"reordered with the outputs of {', '.join(chain.producers)}: {_told(found.before, found.after)} ({way})"
                else:
                    said = f"left alone: no order was found that keeps more than the present one, {found.before:.4f} of the magnitude"
                self.report.channels.update(dict.fromkeys(sparse, said))
        return todo

    def _obstacle(self, chain: Chain, sparse: list[str], optimizers: Optimizers) -> str:
        if len({str(self.layers[name].pattern) for name in sparse}) > 1:
            return f"{', '.join(sparse)} have different patterns"
        known = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
        for p, _ in channel_parameters(self.model, chain):
            if optimizers and isinstance(p, nn.Parameter) and id(p) not in known:
                return f"a parameter of {', '.join(chain.producers + chain.consumers)} belongs to no optimizer that attach was given"
            for key, value in _state_of(p, optimizers):
                if value.numel() > 1 and value.shape != p.shape:
                    return f"the optimizer keeps {key!r} of another shape than its weight, which cannot be reordered with it"
        return ""


def _state_of(p: Tensor, optimizers: Optimizers) -> Iterator[tuple[str, Tensor]]:
    for optimizer in optimizers:
        if p in optimizer.state:
            yield from ((str(key), value) for key, value in optimizer.state[p].items() if isinstance(value, Tensor))


def _told(before: float, after: float) -> str:
    return f"the mask keeps {after:.4f} of the magnitude instead of {before:.4f}"
