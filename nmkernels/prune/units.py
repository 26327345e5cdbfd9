"""The loop over the units of a model: collect the inputs of a unit's layers, solve them, continue with the pruned unit's outputs."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from .. import ops
from ..layouts import MATRICES, as_stored
from ..nn.chains import Chain, channel_parameters, reorder_
from ..nn.weight import NMWeight
from ..pattern import Pattern
from ..recipes.methods.permutation import search_permutation
from ..train.report import Pruned
from ..train.sparsify import LayerCandidate
from .base import OneShot
from .data import arguments, padding
from .hessians import Hessians, PruningProblem, exact_gemms
from .ranks import agree, gathered, ranks, together
from .relay import Relay, Unit, log
from .results import Done, Results
from .solve import solve

Progress = Callable[[int, int, str], None]
Means = dict[str, tuple[Tensor, int]]
"""Source -> (H = XᵀX / tokens, tokens)."""


def trace(relay: Relay) -> None:
    """Find the units of ``relay``, the same on all ranks, and warn if no block can answer from a store."""
    with together():
        relay.trace()
    relay.whole = next(filter(None, gathered(relay.whole)), "")
    if relay.whole:
        warnings.warn(
            f"prune_: the blocks cannot be run one by one: {relay.whole}. So each pass runs the whole model, "
            "which takes longer and gives what the model itself computes.",
            stacklevel=3,
        )
    agree(
        "orders of layers in their first batches", [(unit.name, [(c.name, relay.source(c)) for c in unit.layers]) for unit in relay.units]
    )


def prune_units(
    relay: Relay,
    pattern: Pattern,
    method: OneShot,
    results: Results,
    chains: Sequence[Chain] = (),
    *,
    sequential: bool = True,
    integers: tuple[str, int | None] | None = None,
    progress: Progress | None = None,
) -> None:
    """Fill ``results`` for every unit of ``relay``, which is traced, and for its idle layers. The model is then as it was.

    ``chains``: whose channels may be reordered first. ``integers``: as for ``solve``, of linear layers.
    """
    results.recognise(relay.behaviour)
    begin, total = time.monotonic(), len(relay.units)
    start = next((i for i in range(total) if i not in results), total)
    with ExitStack() as live:
        for number, unit in enumerate(relay.units):
            spent = time.monotonic() - begin
            left = f", {_duration(spent / (number - start) * (total - number))} left" if number > start else ""
            if progress is not None:
                progress(number, total, unit.name)
            log.info("%s (%d of %d%s)", unit.name, number + 1, total, left)
            named = {c.name: c for c in unit.layers}
            with relay.resident(unit.block.module) if unit.block else nullcontext():
                fresh = number not in results
                if fresh:
                    results.save(number, _prune_unit(relay, unit, pattern, method, chains, integers))
                answers = unit.block is not None and not relay.whole
                if answers and sequential and unit.layers:
                    with applied(relay.model, results.load(number, list(named)), named, chains), together():
                        relay.run(unit)
                elif answers and not fresh:
                    with together():
                        relay.run(unit)
                relay.finish(unit)
            if sequential and not answers:
                live.enter_context(applied(relay.model, results.load(number, list(named)), named, chains))
        if total not in results:
            # later batches may reach these; the others are pruned by magnitude
            idle = Unit("", relay.idle)
            results.save(total, _prune_unit(relay, idle, pattern, method, (), integers) if relay.idle else Done())
    if progress is not None:
        progress(total, total, "done")


def _prune_unit(
    relay: Relay, unit: Unit, pattern: Pattern, method: OneShot, chains: Sequence[Chain], integers: tuple[str, int | None] | None
) -> Done:
    """Collect the inputs of a unit's layers, and solve them."""
    problems = [p for c in unit.layers for p in problems_of(c, relay.source(c))]
    hessians = Hessians(problems)
    with together(), hessians.collecting(lambda x: padding(arguments(relay.model, relay.batch), x), lambda: relay.number):
        relay.run(unit)
    hessians.warn()
    hessians.share()
    done = Done()
    if not problems:
        return done
    solved: dict[str, tuple[ops.Compressed, Pruned]] = {}
    count, rank = ranks()
    mine = _shares(problems, count)[rank]
    with together(), exact_gemms(unit.layers[0].module.get_parameter(unit.layers[0].key).device):
        means = {source: hessians.mean(source) for source in dict.fromkeys(p.source for p in problems)}
        _reorder(relay, unit, pattern, means, problems, chains, done)
        with applied(relay.model, Done(orders=done.orders), {}, chains):
            matrices = {c.name: c.matrix for c in unit.layers}
            for source in list(means):
                for p in problems:
                    if p.source == source and p.name in mine:
                        rounds = integers if p.candidate.layout in MATRICES else None
                        solved[p.name] = solve(method, p.part(matrices[p.candidate.name]), *means[source], pattern, rounds)
                del means[source]
    if count > 1:
        parts = gathered({name: (c.values.cpu(), c.indices.cpu(), c.shape, row) for name, (c, row) in solved.items()})
        solved = {name: (ops.Compressed(v, i, pattern, tuple(shape)), row) for part in parts for name, (v, i, shape, row) in part.items()}
    for c in unit.layers:
        results = [solved[p.name] for p in problems if p.candidate is c]
        values, indices = (torch.cat([getattr(packed, part) for packed, _ in results]).cpu() for part in ("values", "indices"))
        done.layers[c.name] = ops.Compressed(values, indices, pattern, c.matrix_shape)
    done.rows = {p.name: solved[p.name][1] for p in problems}
    return done


def _shares(problems: Sequence[PruningProblem], ranks: int) -> list[set[str]]:
    """The names of the problems that each rank solves: the largest first, each to the rank that has least to do."""
    load, shares = [0] * ranks, [set[str]() for _ in range(ranks)]
    for p in sorted(problems, key=lambda p: -p.shape[0] * p.shape[1] ** 2):
        least = load.index(min(load))
        load[least] += p.shape[0] * p.shape[1] ** 2
        shares[least].add(p.name)
    return shares


def _reorder(
    relay: Relay, unit: Unit, pattern: Pattern, means: Means, problems: Sequence[PruningProblem], chains: Sequence[Chain], done: Done
) -> None:
    """Search an order for the channels of each chain that this unit's layers read, and put the Hessians into it.

    All layers of a chain must be in this unit's block, or all outside blocks: elsewhere the stored outputs have another order.
    """
    layers = {p.candidate.name: p for p in problems if p.expert is None}
    for chain in chains:
        names = [name for name in chain.consumers if name in layers]
        homes = {relay.block_of(relay.model.get_submodule(name)) for name in (*chain.producers, *chain.consumers, *chain.between)}
        if not names or homes != {unit.block}:
            continue
        scores = []
        for name in names:
            h, _ = means[layers[name].source]
            scores.append((layers[name].candidate.matrix.to(h.dtype).abs() * h.diagonal().sqrt()).reshape(-1, chain.channels))
        search = search_permutation(torch.cat(scores), pattern, progress=partial(log.info, "%s: %s", ", ".join(names)))
        gain = f"the mask keeps {search.after:.4f} of Wanda's score instead of {search.before:.4f}"
        done.gains.update(dict.fromkeys(names, f"reordered with the outputs of {', '.join(chain.producers)}: {gain}"))
        if search.after <= search.before:
            done.gains.update(dict.fromkeys(names, "left alone: no order was found that keeps more"))
            continue
        done.orders.append((names[0], search.order.tolist()))
        for source in {layers[name].source for name in names}:
            h, tokens = means[source]
            # of a convolution the channels are innermost
            order = torch.arange(len(h), device=h.device).view(-1, chain.channels)[:, search.order.to(h.device)].flatten()
            means[source] = h[order][:, order], tokens


def problems_of(c: LayerCandidate, source: str) -> list[PruningProblem]:
    """The matrices of a layer, one for each expert of a stack."""
    if c.key == "weight":
        return [PruningProblem(c, source)]
    home, end = c.name.rpartition(".")[0], "last" if c.key == "down_proj" else "first"
    return [PruningProblem(c, f"{home}/{end}/{expert}", expert) for expert in range(c.shape[0])]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {rest} s" if minutes else f"{rest} s"


# ---- writing results into the model, for a while and for good


def write(model: nn.Module, done: Done, layers: Mapping[str, LayerCandidate], chains: Sequence[Chain] = ()) -> None:
    for reader, order in done.orders:
        chain = next(chain for chain in chains if reader in chain.consumers)
        for tensor, dim in channel_parameters(model, chain):
            reorder_(tensor.detach(), dim, torch.tensor(order))
    for name, packed in done.layers.items():
        c = layers[name]
        parameter = c.module.get_parameter(c.key)
        parameter.copy_(as_stored(packed.dense().to(parameter.device), c.layout, c.shape))
    _forget(model)


def _forget(model: nn.Module) -> None:
    """Drop what was computed from the weights as they were."""
    torch.clear_autocast_cache()
    for module in model.modules():
        if isinstance(module, NMWeight):
            module.effective.drop()


@contextmanager
def applied(model: nn.Module, done: Done, layers: Mapping[str, LayerCandidate], chains: Sequence[Chain] = ()) -> Iterator[None]:
    """The model has the results of a unit inside, and what it had before afterwards."""
    changed: list[Tensor] = [layers[name].module.get_parameter(layers[name].key) for name in done.layers]
    for reader, _ in done.orders:
        changed += [t for chain in chains if reader in chain.consumers for t, _ in channel_parameters(model, chain)]
    before = {id(t): (t, t.detach().clone()) for t in changed}
    try:
        with torch.no_grad():
            write(model, done, layers, chains)
        yield
    finally:
        with torch.no_grad():
            for tensor, values in before.values():
                tensor.copy_(values)
        _forget(model)
