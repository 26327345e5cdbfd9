"""``prune_``: a pretrained model to N:M in one call, block by block."""

from __future__ import annotations

import inspect
import math
import resource
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ... import ops
from ...layouts import MATRICES, as_stored
from ...nn import NMWeight
from ...nn.chains import Chain, channel_parameters, find_chains, reorder_
from ...pattern import Pattern, PatternLike, RecipeError
from ...shards import is_sharded
from ..handle import Handle
from ..methods.asp import ASP
from ..methods.permutation import search_permutation
from ..report import Pruned, Report
from ..sparsify import Candidate, FilterFn, select, sparsify_
from ..writes import listed
from .base import OneShot, resolve, text
from .hessians import Hessians, Problem, exact_gemms, wide
from .reconstruct import damped, refit, squared_error
from .relay import Forward, Relay, Unit, log, moved, on_device
from .results import Done, Results, digest

Progress = Callable[[int, int, str], None]
Means = dict[str, tuple[Tensor, int]]
"""Source -> (H = XᵀX / tokens, tokens)."""
FEW, MANY = 0.1, 0.01
"""The damping below and from ``ENOUGH`` tokens per input on."""
ENOUGH, SCARCE = 4, 2
ATTEMPTS = 5
"""Factorisations that are tried, each with ten times the damping."""


def prune_(
    model: nn.Module,
    pattern: PatternLike,
    data: Iterable[Any],
    filter_fn: FilterFn | None = None,
    *,
    method: OneShot | str = "admm",
    device: torch.device | str | None = None,
    sequential: bool = True,
    folder: Any = None,
    forward: Forward | None = None,
    blocks: Sequence[str] | None = None,
    permute: bool = False,
    progress: Progress | None = None,
) -> Handle:
    """Prune a trained dense model to N:M on calibration data, in place, and return a handle that holds the masks.

    For each layer a Z that is N:M and minimises ‖X(W − Z)ᵀ‖², X the inputs of the layer in ``data`` and W its dense weight. The model is
    pruned block by block, and each block gets the outputs of blocks that are pruned already. ``handle.attach(optimizer)`` fine-tunes with
    the masks held; ``handle.finish(allow_unused=True)`` ends at once; then ``compress_``. At 2:4 one-shot pruning is a start for training
    and not its end.

    ``print(handle.report)`` has for each layer the error before and after, tokens, damping, seconds and memory. The same data, versions,
    machine and threads give the same weights. Under ``torch.distributed`` each rank passes its own share of the data: Hessians are summed
    over ranks, layers solved on different ranks, and the results are the same on all.

    Args:
        model: any module; blocks are found in its ``ModuleList`` and ``Sequential`` attributes. A model that accelerate has dispatched
            loses its hooks, and must have its weights in memory.
        data: batches of what the model takes: a mapping of keyword arguments, a tuple or list of arguments, or a tensor; a ``DataLoader``
            for instance. Read once. About 8 tokens per input feature are enough. Padding, where ``attention_mask`` is 0, is left out.
        filter_fn: as for ``sparsify_``.
        method: ``"admm"``, ``"sparsegpt"``, ``"wanda"``, ``"magnitude"``, with settings as in ``"admm(transposable=True)"``, or a
            ``OneShot`` such as ``ADMM(transposable=True)``.
        device: where blocks are computed and solved, one at a time, for instance ``"cuda"``; default where they are.
        sequential: False: all inputs come from the dense model, which saves a pass over each block and is a little worse.
        folder: results of finished blocks are kept there, and a run that was interrupted goes on from them; default in memory.
        forward: ``forward(model, batch)`` for a model that is called in another way.
        blocks: names of modules whose children are the blocks; [] for none.
        permute: first reorder hidden channels between layers, where that is possible without changing the model, so that more is kept.
        progress: called with (done, total, what) before each block; the same is logged to ``nmkernels.prune``.

    Raises:
        RecipeError: no layer can be pruned, the model is sparse, sharded or offloaded, the data is empty, or the method unknown.
        CheckpointError: ``folder`` holds another run, or cannot be written. In case of any error the model is as it was.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        >>> handle = prune_(model, "2:4", [torch.randn(128, 64) for _ in range(4)])
        >>> ops.is_nm(model[2].weight.detach(), "2:4"), handle.report.pruned["2"].tokens
        (True, 512)
    """
    pattern, method = Pattern(pattern), resolve(method)
    device = None if device is None else torch.device(device)
    _check(model)
    undispatch_(model)
    batches = [pytree.tree_map_only(Tensor, lambda t: t.detach().cpu(), batch) for batch in data]
    if not batches:
        raise RecipeError("prune_: data has no batch; pass a list of batches, or a DataLoader. A generator can be read only once.")
    chosen, report = choose(model, pattern, filter_fn, method)
    resident = Residence(device)
    relay = Relay(model, chosen, batches, forward or call, blocks, device, resident)
    identity: dict[str, Any] = {
        "pattern": str(pattern),
        "method": text(method),
        "sequential": sequential,
        "permute": permute,
        "data": digest(batches),
        "layers": [c.name for c in chosen],
        "weights": digest([sample(c.matrix) for c in chosen]),
    }
    results = Results(folder, identity)
    chains = find_chains(model)[0] if permute else []
    with relay.running():
        prune_units(relay, pattern, method, results, chains, sequential=sequential, progress=progress)
    masks: dict[str, Tensor] = {}
    rows: dict[str, Pruned] = {}
    gains: dict[str, str] = {}
    named = {c.name: c for c in chosen}
    with torch.no_grad():
        for number in range(len(relay.units) + 1):
            done = results.load(number)
            _write(model, done, named, chains)
            rows, gains = rows | done.rows, gains | done.gains
            masks |= {name: kept(c).to(named[name].module.get_parameter(named[name].key).device) for name, c in done.layers.items()}
    torch.clear_autocast_cache()
    handle = sparsify_(model, ASP(pattern, score="existing"), lambda module, name: name in named)
    handle.run.masks.chosen = masks
    handle.report.entries = report.entries
    order = {name: i for i, name in enumerate(named)}
    handle.report.pruned = dict(sorted(rows.items(), key=lambda row: order[row[0].partition("[")[0]]))
    if permute:
        handle.report.channels = {name: gains.get(name, "left alone: nothing proves that they can be reordered") for name in named}
    handle.report.remark = remark(method, identity["data"], len(batches), handle.report.pruned, named)
    return handle


def choose(model: nn.Module, pattern: Pattern, filter_fn: FilterFn | None, method: OneShot) -> tuple[list[Candidate], Report]:
    """The layers to prune, and the report on all."""
    chosen, report = select(model, pattern, filter_fn, ASP(pattern, score="existing"))
    if method.transposable:
        why = f"transposable masks need out_features that are a multiple of M={pattern.m}"
        misfits = {c.name for c in chosen if c.layout not in MATRICES or c.matrix_shape[0] % pattern.m}
        chosen = [c for c in chosen if c.name not in misfits]
        report.entries = [replace(e, sparse=False, reason=why) if e.name in misfits else e for e in report.entries]
    if not chosen:
        raise RecipeError(f"prune_: no layer of the model can be made {pattern} sparse:\n{report}")
    return chosen, report


def prune_units(
    relay: Relay,
    pattern: Pattern,
    method: OneShot,
    results: Results,
    chains: Sequence[Chain] = (),
    *,
    sequential: bool = True,
    progress: Progress | None = None,
) -> None:
    """Fill ``results`` for every unit of ``relay``, and once more for the layers that never ran; leaves the model as it was.

    ``chains``: whose channels may be reordered first.
    """
    relay.trace()
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
                    results.save(number, _pruned(relay, unit, pattern, method, chains))
                if unit.block is None:
                    if sequential:
                        live.enter_context(_applied(relay.model, results.load(number), named, chains))
                    continue
                if sequential and unit.layers:
                    with _applied(relay.model, results.load(number), named, chains):
                        relay.run(unit)
                elif not fresh:
                    relay.run(unit)
                relay.finish(unit)
        if total not in results:
            results.save(total, _unseen(relay, pattern, method))
    if progress is not None:
        progress(total, total, "done")


def _pruned(relay: Relay, unit: Unit, pattern: Pattern, method: OneShot, chains: Sequence[Chain]) -> Done:
    """Collect the inputs of a unit's layers, and solve them."""
    problems = [p for c in unit.layers for p in problems_of(c, relay.source(c))]
    hessians = Hessians(problems)
    with hessians.collecting(partial(relay_padding, relay)):
        relay.run(unit)
    hessians.warn()
    hessians.share()
    done = Done()
    if not problems:
        return done
    solved: dict[str, tuple[ops.Compressed, Pruned]] = {}
    ranks, rank = _ranks()
    mine = _shares(problems, ranks)[rank]
    with exact_gemms(unit.layers[0].module.get_parameter(unit.layers[0].key).device):
        means = {source: hessians.mean(source) for source in dict.fromkeys(p.source for p in problems)}
        _reorder(relay, unit, pattern, means, problems, chains, done)
        with _applied(relay.model, Done(orders=done.orders), {}, chains):
            matrices = {c.name: c.matrix for c in unit.layers}
            for source in list(means):
                for p in problems:
                    if p.source == source and p.name in mine:
                        solved[p.name] = solve(method, p.part(matrices[p.candidate.name]), *means[source], pattern)
                del means[source]
    if ranks > 1:
        parts: list[Any] = [None] * ranks
        torch.distributed.all_gather_object(
            parts, {name: (c.values.cpu(), c.indices.cpu(), c.shape, row) for name, (c, row) in solved.items()}
        )
        solved = {name: (ops.Compressed(v, i, pattern, tuple(shape)), row) for part in parts for name, (v, i, shape, row) in part.items()}
    for c in unit.layers:
        own = [solved[p.name] for p in problems if p.candidate is c]
        values, indices = (torch.cat([getattr(packed, part) for packed, _ in own]).cpu() for part in ("values", "indices"))
        done.layers[c.name] = ops.Compressed(values, indices, pattern, c.matrix_shape)
    done.rows = {p.name: solved[p.name][1] for p in problems}
    return done


def _shares(problems: Sequence[Problem], ranks: int) -> list[set[str]]:
    """The names of the problems that each rank solves: the largest first, each to the rank that has least to do."""
    load, shares = [0] * ranks, [set[str]() for _ in range(ranks)]
    for p in sorted(problems, key=lambda p: -p.shape[0] * p.shape[1] ** 2):
        least = load.index(min(load))
        load[least] += p.shape[0] * p.shape[1] ** 2
        shares[least].add(p.name)
    return shares


def _reorder(
    relay: Relay, unit: Unit, pattern: Pattern, means: Means, problems: Sequence[Problem], chains: Sequence[Chain], done: Done
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
        found = search_permutation(torch.cat(scores), pattern, progress=partial(log.info, "%s: %s", ", ".join(names)))
        said = f"the mask keeps {found.after:.4f} of Wanda's score instead of {found.before:.4f}"
        done.gains.update(dict.fromkeys(names, f"reordered with the outputs of {', '.join(chain.producers)}: {said}"))
        if found.after <= found.before:
            done.gains.update(dict.fromkeys(names, "left alone: no order was found that keeps more"))
            continue
        done.orders.append((names[0], found.order.tolist()))
        for source in {layers[name].source for name in names}:
            h, tokens = means[source]
            # of a convolution the channels are innermost
            order = torch.arange(len(h), device=h.device).view(-1, chain.channels)[:, found.order.to(h.device)].flatten()
            means[source] = h[order][:, order], tokens


def solve(method: OneShot, weight: Tensor, h: Tensor, tokens: int, pattern: Pattern) -> tuple[ops.Compressed, Pruned]:
    """Prune one matrix ``(out, in)`` with the Hessian H of its inputs; the new one is compressed, in the weight's dtype.

    A result whose error is larger than that of Wanda's mask is replaced by that mask, unless the method chooses by such a score itself.
    """
    begin, note, damping = time.monotonic(), "", 0.0
    w = weight.to(wide(weight.dtype), copy=True)
    h = h.to(w.device)
    error = wanda = None
    size = float(squared_error(w, None, h))
    if tokens < pattern.m or not math.isfinite(size):
        note = "magnitude: " + ("its inputs overflow" if tokens >= pattern.m else f"{tokens or 'no'} tokens reached it")
        mask = method.mask(w, pattern)
        z = w * mask
    else:
        fallback = method.mask(w * h.diagonal().sqrt(), pattern)
        wanda = float(squared_error(w, (w * fallback).to(weight.dtype).to(w.dtype), h)) / (size or 1.0)
        z, mask, damping, note = _attempt(method, w, h, tokens, pattern)
        z = z.to(weight.dtype).to(w.dtype)
        error = float(squared_error(w, z, h)) / (size or 1.0)
        if method.guarded and not error <= wanda:
            z, mask, error = w * fallback, fallback, wanda
            note = note or "Wanda's mask, which has the smaller error"
    packed = ops.compress(z.to(weight.dtype), pattern, mask)
    return packed, Pruned(error, wanda, tokens, damping, time.monotonic() - begin, _peak(w.device), note)


def _attempt(method: OneShot, w: Tensor, h: Tensor, tokens: int, pattern: Pattern) -> tuple[Tensor, Tensor, float, str]:
    """(new weights, mask, the damping that was needed, a note)."""
    damping = method.damping if method.damping is not None else FEW if tokens < ENOUGH * w.shape[1] else MANY
    dead = h.diagonal() == 0
    for attempt in range(ATTEMPTS):
        try:
            start = w.clone()
            if damping:
                start[:, dead] = 0.0
            z, mask = method.solve(start, damped(h, damping) if damping else h.clone(), pattern)
            del start
            if method.refit:
                z = refit(w, z.contiguous(), mask, damped(h, damping), method.refit)
            if bool(z.isfinite().all()):
                return z, mask, damping, f"damping raised to {damping:g}" if attempt else ""
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            pass
        damping = max(damping, 1e-3) * 10
    mask = method.mask(w * h.diagonal().sqrt(), pattern)
    return w * mask, mask, 0.0, f"Wanda's mask: the Hessian could not be factorised with damping up to {damping / 10:g}"


def _unseen(relay: Relay, pattern: Pattern, method: OneShot) -> Done:
    """Layers that never ran are pruned by magnitude."""
    done = Done()
    for c in relay.idle:
        with relay.resident(c.module):
            w = c.matrix
            done.layers[c.name] = ops.compress(w, pattern, method.mask(w, pattern))
        done.rows[c.name] = Pruned(None, None, 0, 0.0, 0.0, _peak(w.device), "magnitude: no token reached it")
    return done


def problems_of(c: Candidate, source: str) -> list[Problem]:
    """The matrices of a layer, one for each expert of a stack."""
    if c.key == "weight":
        return [Problem(c, source)]
    home, end = c.name.rpartition(".")[0], "last" if c.key == "down_proj" else "first"
    return [Problem(c, f"{home}/{end}/{expert}", expert) for expert in range(c.shape[0])]


# ---- writing results into the model, for a while and for good


def _write(model: nn.Module, done: Done, layers: Mapping[str, Candidate], chains: Sequence[Chain] = ()) -> None:
    for reader, order in done.orders:
        chain = next(chain for chain in chains if reader in chain.consumers)
        for tensor, dim in channel_parameters(model, chain):
            reorder_(tensor.detach(), dim, torch.tensor(order))
    for name, packed in done.layers.items():
        c = layers[name]
        parameter = c.module.get_parameter(c.key)
        parameter.copy_(as_stored(packed.dense().to(parameter.device), c.layout, c.shape))
    for module in model.modules():
        if isinstance(module, NMWeight):
            module.effective.drop()


@contextmanager
def _applied(model: nn.Module, done: Done, layers: Mapping[str, Candidate], chains: Sequence[Chain] = ()) -> Iterator[None]:
    """The model has the results of a unit inside, and what it had before afterwards."""
    changed: list[Tensor] = [layers[name].module.get_parameter(layers[name].key) for name in done.layers]
    for reader, _ in done.orders:
        changed += [t for chain in chains if reader in chain.consumers for t, _ in channel_parameters(model, chain)]
    before = {id(t): (t, t.detach().clone()) for t in changed}
    try:
        with torch.no_grad():
            _write(model, done, layers, chains)
        yield
    finally:
        with torch.no_grad():
            for tensor, values in before.values():
                tensor.copy_(values)


def kept(packed: ops.Compressed) -> Tensor:
    """The mask ``(out, in)`` of a compressed matrix, its stored zeros included."""
    ones = ops.Compressed(torch.ones_like(packed.values), packed.indices, packed.pattern, packed.shape)
    return ones.dense() != 0


class Residence:
    """``with residence(module)``: its weights are on ``device``, and inside such a context where they were after the outermost."""

    def __init__(self, device: torch.device | None) -> None:
        self.device, self._inside = device, set[nn.Module]()

    @contextmanager
    def __call__(self, module: nn.Module) -> Iterator[None]:
        if module in self._inside:
            yield
            return
        self._inside.add(module)
        try:
            with on_device(module, self.device):
                yield
        finally:
            self._inside.discard(module)


# ---- the model and its data


def call(model: nn.Module, batch: Any) -> Any:
    """The model's output for ``batch``: keyword arguments, arguments, or a tensor; without a cache of keys and values."""
    place = next((p.device for p in model.parameters() if not p.is_meta), None)
    batch = moved(batch, place)
    kwargs = dict(batch) if isinstance(batch, Mapping) else {}
    args = () if isinstance(batch, Mapping) else tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
    if "use_cache" in inspect.signature(model.forward).parameters:
        kwargs.setdefault("use_cache", False)
    return model(*args, **kwargs)


def relay_padding(relay: Relay, x: Tensor) -> Tensor | None:
    """Which rows of a layer's input ``x`` are tokens, from the attention masks of the present batch that have its sizes; None: all.

    Where those of an encoder and a decoder have the same sizes, only what both leave out is left out.
    """
    batch = relay.batch
    if not isinstance(batch, Mapping):
        return None
    masks = []
    for ids, name in (("input_ids", "attention_mask"), ("decoder_input_ids", "decoder_attention_mask")):
        mask, tokens = batch.get(name), batch.get(ids)
        if not isinstance(mask, Tensor) and isinstance(tokens, Tensor):
            mask = torch.ones(tokens.shape[:2])
        if isinstance(mask, Tensor) and mask.dim() == 2 and (x.shape[:2] == mask.shape or (x.dim() == 2 and len(x) == mask.numel())):
            masks.append(mask.reshape(-1) != 0)
    return torch.stack(masks).any(0).to(x.device) if masks else None


def _check(model: nn.Module) -> None:
    if any(isinstance(m, NMWeight) and m.governed for m in model.modules()):
        raise RecipeError(
            "prune_: the model has sparse layers already; get the dense model back first, with handle.remove() or densify_(model)."
        )
    if any(is_sharded(p) for p in model.parameters()):
        raise RecipeError(
            "prune_: the model's weights are sharded (DTensor). Prune before fully_shard; on several GPUs each rank passes its share of "
            "the data, and layers are spread over ranks."
        )


def undispatch_(model: nn.Module) -> None:
    """Remove the hooks by which accelerate runs a model on several devices; blocks run where their weights are."""
    hooked = [module for module in model.modules() if hasattr(module, "_hf_hook")]
    if not hooked:
        return
    from accelerate.hooks import remove_hook_from_submodules

    offloaded = next((name for name, p in model.named_parameters() if p.is_meta), None)
    hooks = [hook for module in hooked for hook in getattr(module._hf_hook, "hooks", (module._hf_hook,))]
    if offloaded is not None and any(device.type == "meta" for hook in hooks for device in getattr(hook, "original_devices", {}).values()):
        raise RecipeError(
            f"prune_: accelerate has offloaded weights to disk ({offloaded!r}). Prune the folder itself, which needs one block in memory: "
            "python -m nmkernels prune MODEL_DIR --data FILE --out DIR, or integrations.hf.prune_folder."
        )
    remove_hook_from_submodules(model)
    if getattr(model, "hf_device_map", None) is not None:
        warnings.warn(
            "prune_: accelerate's hooks were removed, which sparse layers cannot have. To use the model on several devices, dispatch it "
            "again after compress_ (accelerate.dispatch_model).",
            stacklevel=3,
        )


def sample(matrix: Tensor) -> Tensor:
    """Some of the elements of a weight, to recognise it."""
    flat = matrix.reshape(-1)
    return flat[:: max(1, len(flat) // 4096)]


def remark(method: OneShot, data: str, batches: int, rows: Mapping[str, Pruned], layers: Mapping[str, Candidate]) -> str:
    """What the report says of the whole run; warns of layers with too few tokens."""
    few = [
        name
        for name, row in rows.items()
        if row.tokens < SCARCE * layers[name.partition("[")[0]].matrix_shape[1] and type(method).__name__ != "Magnitude"
    ]
    if few:
        warnings.warn(
            f"prune_: {listed(few)} got fewer than {SCARCE} tokens per input feature, which is little to choose weights by; pass more "
            "data. The report has the counts.",
            stacklevel=3,
        )
    return f"pruned by {text(method)} on {batches} batches with digest {data}"


def _ranks() -> tuple[int, int]:
    """(how many ranks, this one)."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size(), torch.distributed.get_rank()
    return 1, 0


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {rest} s" if minutes else f"{rest} s"
