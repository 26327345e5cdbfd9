"""``prune_``: a pretrained model to N:M in one call, block by block."""

from __future__ import annotations

import itertools
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..layouts import CONV2D, MATRICES, as_matrix, as_stored
from ..nn.chains import Chain, channel_parameters, find_chains, reorder_
from ..nn.compress import check_values
from ..nn.experts import layer_name
from ..nn.swap import make_dense_
from ..nn.weight import NMWeight
from ..ops import Compressed, compress, is_nm
from ..pattern import Pattern, PatternError, PatternLike, RecipeError
from ..recipes.contract import Recipe
from ..recipes.contrib.layerwise import LayerWise
from ..recipes.methods.asp import ASP
from ..recipes.methods.permutation import search_permutation
from ..shards import is_sharded
from ..train.handle import Handle
from ..train.layer_names import check_names, listed, skips
from ..train.report import FILTERED, Entry, Pruned, Report
from ..train.sparsify import FilterFn, LayerCandidate, candidates, check_groups, make_handle_, select
from .base import OneShot, resolve, text
from .data import batches_of, call, size_of
from .hessians import Hessians, PruningProblem, exact_gemms, joined, problems_of
from .progress import Progress, Tell
from .ranks import agree, gathered, ranks, together
from .relay import TRIAL, Forward, Relay, Unit, log
from .results import Done, Results, digest, owned
from .rounding import round_values
from .solve import TINY, solve, squared_error

DENSE = "dense"
"""In a table of patterns, that of layers that are not pruned."""
SCARCE = 2
"""With fewer tokens per input the user is warned."""


def prune_(
    model: nn.Module,
    pattern: PatternLike | Mapping[str, PatternLike],
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
    values: str | None = None,
    group: int | None = None,
    progress: Tell | bool | None = None,
) -> Handle:
    """Prune a trained dense model to N:M on calibration data, in place, and return a handle that holds the masks.

    For each layer a Z that is N:M and minimises ‖X(W − Z)ᵀ‖², X the inputs of the layer in ``data`` and W its dense weight. The model is
    pruned block by block, and each block gets the outputs of blocks that are pruned already. ``handle.attach(optimizer)`` fine-tunes with
    the masks held; ``handle.finish(allow_unused=True)`` ends at once; then ``compress_``, which takes over the weights that were solved, if
    none was changed since. At 2:4 one-shot pruning is a start for training and not its end.

    ``print(handle.report)`` has for each layer the error before and after, tokens, damping, seconds and memory. The same data, versions,
    machine and threads give the same weights. Under ``torch.distributed`` each rank passes its own share of the data: Hessians are summed
    over ranks, layers solved on different ranks, and the results are the same on all.

    Args:
        model: any module; blocks are found in its ``ModuleList`` and ``Sequential`` attributes. A model that accelerate has dispatched
            loses its hooks, and must have its weights in memory. Layers that are N:M already, from an earlier call with another
            ``filter_fn`` for instance, stay as they are; the new handle holds their masks too, and replaces the earlier one.
        pattern: N:M of all layers; or of each, by name or shell wildcard, ``{"*.mlp.*": "2:4", "*.self_attn.*": "4:8", "*": "dense"}``.
            The first that fits counts, and a layer that none fits stays dense.
        data: batches of what the model takes: a mapping of keyword arguments, a tuple of arguments, or a tensor; a ``DataLoader``, or a
            tokenized dataset, each row of which is a batch of one. numpy arrays and lists of numbers become tensors. Read once. About 8
            tokens per input feature are enough. Padding, where ``attention_mask`` is 0, is left out.
        filter_fn: as for ``sparsify_``.
        method: ``"admm"``, ``"sparsegpt"``, ``"wanda"``, ``"magnitude"``, with settings as in ``"admm(transposable=True)"``, or a
            ``OneShot`` such as ``ADMM(transposable=True)``.
        device: where blocks are computed and solved, one at a time, for instance ``"cuda"``; default where they are. What is outside
            blocks stays where it is, and a model without blocks must be there already.
        sequential: False: all inputs come from the dense model, which saves a pass over each block and is a little worse.
        folder: results of finished blocks are kept there, and an interrupted run resumes from them; default in memory.
        forward: ``forward(model, batch)`` for a model that is called in another way.
        blocks: names of modules whose children are the blocks; [] for none.
        permute: first reorder hidden channels between layers, where that is possible without changing the model, so that more is kept.
        values, group: ``"int8"`` or ``"int4"``: kept values of linear layers and experts are also rounded to integers, which make up for
            each other's errors, and each block gets its inputs from rounded ones; the report has the error with them too. The weights
            themselves stay floating-point, and ``compress_(model)`` stores the integers if no weight was changed since. To fine-tune first,
            leave ``values`` out, and call ``compress_(model, values=..., data=...)`` afterwards.
        progress: True shows the time left, by tqdm on a terminal or in a notebook if it is installed, else as lines on stderr. Or a
            function, called with (done, total, what) before each block. The same is logged to ``nmkernels.prune``.

    Raises:
        RecipeError: no layer can be pruned, the model is sharded, offloaded or in sparse training, the data is empty, the method is
            unknown, a name in ``pattern`` fits no layer, or ``device`` cannot be used.
        OptionError: ``values`` is unknown, or ``group`` does not fit a layer.
        CheckpointError: ``folder`` holds another run, or cannot be written. In case of any error the model is as it was.

    Example:
        >>> from nmkernels import ops
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        >>> handle = prune_(model, "2:4", [torch.randn(128, 64) for _ in range(4)])
        >>> ops.is_nm(model[2].weight.detach(), "2:4"), handle.report.pruned["2"].tokens
        (True, 512)
    """
    wanted, method = patterns_from("prune_", pattern), resolve(method)
    group = check_values("prune_", values, group)
    with together():
        device = None if device is None else check_device(device)
        present = check_model(model)
        batches = batches_of(data, model)
        undispatch_(model)
        chosen, report = choose(model, wanted, filter_fn, method)
        pruning = Pruning(model, chosen, report, wanted, method, sequential, permute, values, group)
        pruning.check_groups("prune_")
        relay = Relay(model, chosen, batches, forward or call, blocks, device)
        if device is not None and not relay.blocks and any(p.device != device for p in model.parameters()):
            raise RecipeError(
                f"prune_: device={str(device)!r} is where blocks are computed one at a time, and the model has none. Move it there, by "
                f"model.to({str(device)!r}), and leave device out; or name the blocks with blocks=."
            )
    state = [*model.named_parameters(), *model.named_buffers()]
    identity = {
        **pruning.settings,
        "blocks": None if blocks is None else list(blocks),
        "layers": list(pruning.layers),
        # without a folder, some of the elements are enough to recognise a model
        "weights": digest([c.matrix.reshape(-1)[:: max(1, c.matrix.numel() // 4096)] for c in chosen] if folder is None else state),
        "configuration": digest(configuration(model)),
    }
    agree("arguments or models", identity)
    shares = gathered((digest(batches), len(batches)))
    identity["data"] = shares[0][0] if len(shares) == 1 else digest(shares)
    compressed, rounded = dict[str, Compressed](), dict[str, Compressed]()
    shown = Progress(progress if ranks()[1] == 0 or callable(progress) else None, device)
    with owned(None if folder is None else Path(folder)), shown:
        pruning.run(relay, Results(folder, identity), identity["data"], sum(count for _, count in shares), shown)
        with torch.no_grad():
            for number in range(len(pruning.units)):
                done = pruning.results.load(number)
                pruning.write(replace(done, rounded={}))
                done = pruning.as_written(number, done)
                compressed, rounded = compressed | done.layers, rounded | done.rounded
    forms = {name: (packed, pruning.integers) for name, packed in compressed.items()}
    return hold_(model, chosen, report, forms, present, rounded)


def hold_(
    model: nn.Module,
    chosen: Sequence[LayerCandidate],
    report: Report,
    forms: Mapping[str, tuple[Compressed, tuple[str, int | None] | None]],
    present: Mapping[str, NMWeight] | None = None,
    rounded: Mapping[str, Compressed] | None = None,
) -> Handle:
    """Make sparse layers of ``chosen``, whose zeros the masks of ``forms`` are, and return the handle that holds these masks.

    Args:
        forms: of each layer its compressed weight, and the integers that ``compress_`` rounds it to, if any.
        present: layers that are sparse already, which the handle takes over from the earlier one.
        rounded: of layers that have been rounded already, the weight with integers.
    """
    rounded = rounded or {}
    if present:
        forms = {**forms, **{name: (x.as_pruned() or compress(x.grouped.detach(), x.pattern), x.integers) for name, x in present.items()}}
        rounded = {**rounded, **{name: x.effective.rounded for name, x in present.items() if x.as_pruned() and x.effective.rounded}}
        for layer in present.values():
            make_dense_(layer)
        again = [c for c in candidates(model, Pattern("1:1"), None) if c.name in present]
        order = {name: i for i, (name, _) in enumerate(model.named_modules())}
        chosen = sorted([*chosen, *again], key=lambda c: order.get(c.name, len(order)))
        report.entries = [replace(e, sparse=True, reason=str(forms[e.name][0].pattern)) if e.name in present else e for e in report.entries]
    patterns = {c.name: forms[c.name][0].pattern for c in chosen}
    (base, _), *others = Counter(patterns.values()).most_common()
    recipe: Recipe = ASP(base, score="existing")
    if others:
        recipe = LayerWise(base, inner=recipe, rule=None, given={name: str(p) for name, p in patterns.items()})
    handle = make_handle_(model, recipe, chosen, report, patterns)
    for name, layer in handle.layers.items():
        packed, integers = forms[name]
        layer.effective.pruned, layer.effective.rounded = packed, rounded.get(name)
        layer.integers = None if layer.layout == CONV2D else integers
    return handle


@dataclass(eq=False)
class Pruning:
    """What ``prune_`` and ``prune_folder`` share: the ``chosen`` layers of ``model``, how they are pruned, and after ``run`` the results.

    ``results`` are those of ``units``, by number. The last unit has the layers that the first batches do not reach.
    """

    model: nn.Module
    chosen: list[LayerCandidate]
    report: Report
    pattern: Pattern | Mapping[str, Pattern | None]
    method: OneShot
    sequential: bool = True
    permute: bool = False
    values: str | None = None
    group: int | None = None
    results: Results = field(init=False)
    units: list[Unit] = field(init=False)
    orders: list[list[tuple[str, list[int]]]] = field(init=False)
    whole: str = field(init=False)

    def __post_init__(self) -> None:
        self.layers = {c.name: c for c in self.chosen}
        self.patterns = matched(self.pattern, self.chosen)
        self.chains: list[Chain] = find_chains(self.model)[0] if self.permute else []
        self.integers = None if self.values is None else (self.values, self.group)

    def check_groups(self, verb: str) -> None:
        """Raise ``OptionError`` if the groups of integers do not fit a layer."""
        for p in dict.fromkeys(self.patterns.values()):
            if self.values is not None:
                check_groups(verb, self.values, self.group, p, [c for c in self.chosen if self.patterns[c.name] == p])

    @property
    def settings(self) -> dict[str, Any]:
        """How the model is pruned, by the names of the arguments."""
        options = {name: getattr(self, name) for name in ("sequential", "permute", "values", "group")}
        pattern: Any = self.pattern
        if isinstance(pattern, Mapping):
            pattern = {name: str(p or DENSE) for name, p in pattern.items()}
        return {"pattern": pattern if isinstance(pattern, dict) else str(pattern), "method": text(self.method), **options}

    def run(
        self,
        relay: Relay,
        results: Results,
        data: str,
        batches: int,
        progress: Progress | None = None,
        around: Callable[[Relay], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Fill ``results`` and the report; the model is then as it was.

        Args:
            data, batches: the digest and the number of the batches, for the report.
            around: a context for all passes but those that find the order.
        """
        self.results, progress = results, progress or Progress()
        self.plan(relay, progress)
        with relay.running():
            with together():
                relay.trace()
            progress.did("check", trial(relay))
            self.whole = relay.whole = next(filter(None, gathered(relay.whole)), "")
            if self.whole:
                warnings.warn(
                    f"prune_: the blocks cannot be run one by one: {self.whole}. So each pass runs the whole model, "
                    "which takes longer and gives what the model itself computes.",
                    stacklevel=3,
                )
            sources = [(unit.name, [(c.name, relay.sources[c.name]) for c in unit.layers]) for unit in relay.units]
            agree("orders of layers in their first batches", sources)
            self.units = [*relay.units, Unit("", relay.idle)]
            self.plan(relay, progress)
            with around(relay):
                self._prune(relay, progress)
        rows: dict[str, Pruned] = {}
        gains: dict[str, str] = {}
        self.orders = []
        for number, unit in enumerate(self.units):  # all files are read before anything is written
            done = results.load(number, [c.name for c in unit.layers])
            rows, gains = rows | done.rows, gains | done.gains
            self.orders.append(done.orders)
        order = {name: i for i, name in enumerate(self.layers)}
        report = self.report
        report.pruned = dict(sorted(rows.items(), key=lambda row: order[row[0].partition("[")[0]]))
        if self.permute:
            report.channels = {name: gains.get(name, "left alone: nothing proves that they can be reordered") for name in order}
        report.remark = f"pruned by {text(self.method)} on {batches} batches with digest {data}"
        if self.values is not None:
            report.remark += f"; compressed values are {self.values}"
        if self.whole:
            report.remark += f"; each pass ran the whole model: {self.whole}"
        few = [name for name, row in report.pruned.items() if row.tokens < SCARCE * self.layers[name.partition("[")[0]].matrix_shape[1]]
        if few and self.method.guarded:
            warnings.warn(
                f"prune_: {listed(few)} got fewer than {SCARCE} tokens per input feature, too few to rank the weights reliably; pass more "
                "data. The report has the counts.",
                stacklevel=3,
            )

    def plan(self, relay: Relay, progress: Progress) -> None:
        """Tell ``progress`` how much work there is, about; better known once ``relay`` has its units."""
        tokens = sum(map(size_of, relay.batches))
        # before that, all layers count as one unit that each pass runs
        units = relay.units or [Unit("", self.chosen)]
        new = [unit for i, unit in enumerate(units) if not relay.units or i not in self.results]
        blocks = [unit for unit in units if (unit.block is not None or not relay.units) and not relay.whole]
        again = [unit for unit in blocks if unit not in new or (self.sequential and unit.layers)]
        progress.plan("collect", sum(relay.work(unit) * tokens for unit in new))
        progress.plan("solve", sum(self._cost(*c.matrix_shape) for unit in new for c in unit.layers))
        progress.plan("replay", sum(relay.work(unit) * tokens for unit in again))
        if "check" not in progress.planned:
            progress.plan("check", trial(relay))

    def _cost(self, rows: int, cols: int) -> float:
        """Of solving a matrix, as floating-point operations."""
        return 2.0 * (self.method.gemms + 2 * self.method.refit) * rows * cols**2

    def _prune(self, relay: Relay, progress: Progress) -> None:
        """The loop over units: collect the inputs of a unit's layers, solve them, continue with the pruned unit's outputs."""
        results = self.results
        results.recognise(relay.behaviour)
        begin, total = time.monotonic(), len(relay.units)
        start = next((i for i in range(total) if i not in results), total)
        with ExitStack() as live:
            for number, unit in enumerate(relay.units):
                seconds = (time.monotonic() - begin) / max(1, number - start) * (total - number)
                progress(number, total, unit.name)
                left = f", {timedelta(seconds=round(seconds))} left" if number > start else ""
                log.info("%s (%d of %d%s)", unit.name, number + 1, total, left)
                names = [c.name for c in unit.layers]
                with relay.resident(unit.block.module) if unit.block else nullcontext():
                    fresh = number not in results
                    if fresh:
                        results.save(number, self._prune_unit(relay, unit, progress))
                    answers = unit.block is not None and not relay.whole
                    if answers and self.sequential and names:
                        with self.applied(results.load(number, names)), together():
                            relay.run(unit, partial(progress.did, "replay"))
                    elif answers and not fresh:
                        with together():
                            relay.run(unit, partial(progress.did, "replay"))
                    relay.finish(unit)
                if self.sequential and not answers:
                    live.enter_context(self.applied(results.load(number, names)))
            if total not in results:
                # later batches may reach these; the others are pruned by magnitude
                results.save(total, self._prune_unit(relay, self.units[-1], progress) if relay.idle else Done())
        progress(total, total, "done")

    def _prune_unit(self, relay: Relay, unit: Unit, progress: Progress) -> Done:
        """Collect the inputs of a unit's layers, and solve them."""
        problems = [p for c in unit.layers for p in problems_of(c, relay.sources[c.name])]
        hessians, done = Hessians(problems), Done()
        with together(), hessians.collecting(relay.tokens):
            relay.run(unit, partial(progress.did, "collect"))
        hessians.warn()
        hessians.share()
        if not problems:
            return done
        solved: dict[str, tuple[Compressed, Compressed | None, Pruned]] = {}
        mine = shared(problems, *ranks())
        with together(), exact_gemms(unit.layers[0].module.get_parameter(unit.layers[0].key).device):
            means = {source: hessians.mean(source) for source in dict.fromkeys(p.source for p in problems)}
            self._reorder(relay, unit, means, problems, done)
            with self.applied(Done(orders=done.orders)):
                matrices = {c.name: c.matrix for c in unit.layers}
                for source in list(means):
                    for p in problems:
                        if p.source == source and p.name in mine:
                            solved[p.name] = self._solved(p, p.part(matrices[p.candidate.name]), *means[source])
                            progress.did("solve", self._cost(*p.shape))
                    del means[source]
        solved = {name: result for part in gathered(solved) for name, result in part.items()}
        progress.did("solve", sum(self._cost(*p.shape) for p in problems if p.name not in mine))  # meanwhile, by other ranks
        for c in unit.layers:
            parts = [solved[p.name] for p in problems if p.candidate is c]
            done.layers[c.name] = joined([packed for packed, _, _ in parts], c.matrix_shape)
            rounded = [weight for _, weight, _ in parts if weight is not None]
            if rounded:
                done.rounded[c.name] = joined(rounded, c.matrix_shape)
        done.rows = {p.name: solved[p.name][2] for p in problems}
        return done

    def _solved(self, p: PruningProblem, matrix: Tensor, h: Tensor, tokens: int) -> tuple[Compressed, Compressed | None, Pruned]:
        """One matrix pruned, and rounded if its layer is; on the CPU."""
        packed, row = solve(self.method, matrix, h, tokens, self.patterns[p.candidate.name])
        if self.integers is None or p.candidate.layout == CONV2D:
            return packed.to("cpu"), None, row
        begin = time.monotonic()
        rounded, error = round_values(packed, *self.integers, h, tokens), None
        if row.error is not None:
            w = matrix.to(h.dtype)
            error = float(squared_error(w, rounded.dense(h.dtype), h) / squared_error(w, None, h).clamp_min(TINY))
        return packed.to("cpu"), rounded.to("cpu"), replace(row, rounded=error, seconds=row.seconds + time.monotonic() - begin)

    def _reorder(
        self, relay: Relay, unit: Unit, means: dict[str, tuple[Tensor, int]], problems: Sequence[PruningProblem], done: Done
    ) -> None:
        """Search an order for the channels of each chain that this unit's layers read, and put the Hessians of ``means`` into it.

        All layers of a chain must be in this unit's block, or all outside blocks: elsewhere the stored outputs have another order.
        """
        layers = {p.candidate.name: p for p in problems if p.expert is None}
        for chain in self.chains:
            names = [name for name in chain.consumers if name in layers]
            homes = {relay.block_of.get(self.model.get_submodule(name)) for name in (*chain.producers, *chain.consumers, *chain.between)}
            if not names or homes != {unit.block}:
                continue
            if reason := self._fixed(chain, layers):
                done.gains.update(dict.fromkeys(names, f"left alone: {reason}"))
                continue
            if len({self.patterns[name] for name in names}) > 1:
                done.gains.update(dict.fromkeys(names, f"left alone: {', '.join(names)} have different patterns"))
                continue
            scores = []
            for name in names:
                h, _ = means[layers[name].source]
                scores.append((layers[name].candidate.matrix.to(h.dtype).abs() * h.diagonal().sqrt()).reshape(-1, chain.channels))
            search = search_permutation(torch.cat(scores), self.patterns[names[0]], progress=partial(log.info, "%s: %s", ", ".join(names)))
            if search.after <= search.before:
                done.gains.update(dict.fromkeys(names, "left alone: no order was found that keeps more"))
                continue
            gain = f"the mask keeps {search.after:.4f} of Wanda's score instead of {search.before:.4f}"
            done.gains.update(dict.fromkeys(names, f"reordered with the outputs of {', '.join(chain.producers)}: {gain}"))
            done.orders.append((names[0], search.order.tolist()))
            for source in {layers[name].source for name in names}:
                h, tokens = means[source]
                # of a convolution the channels are innermost
                order = torch.arange(len(h), device=h.device).view(-1, chain.channels)[:, search.order.to(h.device)].flatten()
                means[source] = h[order][:, order], tokens

    def _fixed(self, chain: Chain, unit: Collection[str]) -> str:
        """Why a layer of ``chain`` that is pruned outside ``unit`` keeps its channels in their order; empty if none does."""
        for name in (*chain.consumers, *chain.producers):
            layer: Any = self.model.get_submodule(name)
            present = name not in self.layers and isinstance(layer, NMWeight)
            if name in unit or not (present or name in self.layers):
                continue
            if name in chain.consumers:
                return f"{name} is {layer.pattern} already" if present else f"{name} has another input, and is pruned separately"
            if present and layer.integers:  # they belong to the weight as it is
                return f"the integers of {name} are chosen already"
            if _both_ways(layer) if present else self.method.transposable:  # any other mask stays N:M when rows move
                return f"the mask of {name} is transposable"
        return ""

    def write(self, done: Done) -> None:
        """Put the results of a unit into the model, rounded where they are."""
        for reader, order in done.orders:
            for tensor, dim in self._channels(reader):
                reorder_(tensor.detach(), dim, torch.tensor(order))
        for name, packed in {**done.layers, **done.rounded}.items():
            c = self.layers[name]
            parameter = c.module.get_parameter(c.key)
            parameter.copy_(as_stored(packed.dense().to(parameter.device), c.layout, c.shape))
        self._forget()

    def as_written(self, number: int, done: Done) -> Done:
        """The result of a unit with the rows of its layers in the order that later units have given to their outputs."""
        layers, rounded = dict(done.layers), dict(done.rounded)
        for reader, order in itertools.chain.from_iterable(self.orders[number + 1 :]):
            for name in self._chain(reader).producers:
                for weights in (layers, rounded):
                    if name in weights:
                        w = weights[name]
                        step = None if w.step is None else w.step[order]
                        weights[name] = Compressed(w.values[order], w.indices[order], w.pattern, w.shape, step)
        return replace(done, layers=layers, rounded=rounded)

    def _chain(self, reader: str) -> Chain:
        return next(chain for chain in self.chains if reader in chain.consumers)

    def _channels(self, reader: str) -> list[tuple[Tensor, int]]:
        """What is reordered with the inputs of layer ``reader``, and along which dimensions."""
        return [*channel_parameters(self.model, self._chain(reader))]

    def _forget(self) -> None:
        """Drop what was computed from the weights as they were."""
        torch.clear_autocast_cache()
        for module in self.model.modules():
            if isinstance(module, NMWeight):
                module.effective.drop()

    @contextmanager
    def applied(self, done: Done) -> Iterator[None]:
        """The model has the results of a unit inside, and what it had before afterwards."""
        layers = [self.layers[name] for name in done.layers]
        changed = [c.module.get_parameter(c.key) for c in layers] + [t for reader, _ in done.orders for t, _ in self._channels(reader)]
        before = {id(t): (t, t.detach().clone()) for t in changed}
        try:
            with torch.no_grad():
                self.write(done)
            yield
        finally:
            with torch.no_grad():
                for tensor, values in before.values():
                    tensor.copy_(values)
            self._forget()


def trial(relay: Relay) -> float:
    """The work of ``relay.trace``, which runs the first batches twice and again."""
    return 3 * relay.work(Unit("", list(relay.layers))) * sum(map(size_of, relay.batches[:TRIAL]))


def shared(problems: Sequence[PruningProblem], count: int, rank: int) -> set[str]:
    """The names of the problems that this rank solves: the largest first, each to the rank that has least to do."""
    load, mine = [0] * count, set[str]()
    for p in sorted(problems, key=lambda p: -p.shape[0] * p.shape[1] ** 2):
        least = load.index(min(load))
        load[least] += p.shape[0] * p.shape[1] ** 2
        if least == rank:
            mine.add(p.name)
    return mine


def _both_ways(layer: NMWeight) -> bool:
    """Whether a pruned layer is N:M along its outputs too, as recipes with a sparse dgrad need it."""
    columns = as_matrix(layer.weight.detach(), layer.layout).t()
    return columns.shape[1] % layer.pattern.m == 0 and is_nm(columns, layer.pattern)


def check_device(name: torch.device | str) -> torch.device:
    """A device that can be used here, with its index if it has one."""
    try:
        x = torch.zeros(1, device=name)
        x.item()  # the meta device makes tensors but cannot read them
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise RecipeError(f"device {str(name)!r} cannot be used here: {str(error).splitlines()[0].rstrip('.')}.") from error
    return x.device


def patterns_from(verb: str, pattern: PatternLike | Mapping[str, PatternLike]) -> Pattern | dict[str, Pattern | None]:
    """A pattern, or a table of patterns by name or wildcard, checked; None for "dense"."""
    if not isinstance(pattern, Mapping):
        return Pattern(pattern)
    if not pattern or not all(isinstance(name, str) for name in pattern):
        raise RecipeError(f'{verb}: pattern={dict(pattern)!r} must be N:M, or a table from layer names to it, {{"*.mlp.*": "2:4"}}.')
    table = {}
    for name, p in pattern.items():
        try:
            table[name] = None if p == DENSE else Pattern(p)
        except PatternError as error:
            raise PatternError(f'{verb}: the pattern of {name!r}: {error} Or "dense".') from error
    if not any(table.values()):
        raise RecipeError(f"{verb}: pattern={dict(pattern)!r} leaves every layer dense.")
    return table


def matched(pattern: Pattern | Mapping[str, Pattern | None], layers: Iterable[LayerCandidate]) -> dict[str, Pattern]:
    """The pattern of each layer that has one."""
    if isinstance(pattern, Pattern):
        return {c.name: pattern for c in layers}
    fits = {c.name: next((p for wildcard, p in pattern.items() if fnmatchcase(c.name, wildcard)), None) for c in layers}
    return {name: p for name, p in fits.items() if p is not None}


def choose(
    model: nn.Module,
    pattern: Pattern | Mapping[str, Pattern | None],
    filter_fn: FilterFn | None,
    method: OneShot,
    skip: Sequence[str] = (),
) -> tuple[list[LayerCandidate], Report]:
    """The layers to prune, and the report on all; ``pattern`` as ``patterns_from`` gives it, ``skip`` as for ``prune_folder``."""
    chosen, report = _select(model, pattern, filter_fn)
    patterns = matched(pattern, chosen)

    def leave(names: set[str], reason: str) -> None:
        chosen[:] = [c for c in chosen if c.name not in names]
        report.entries = [replace(e, sparse=False, reason=reason) if e.name in names else e for e in report.entries]

    if method.transposable:
        for m in dict.fromkeys(p.m for p in patterns.values()):
            misfits = {c.name for c in chosen if patterns[c.name].m == m and (c.layout not in MATRICES or c.matrix_shape[0] % m)}
            leave(misfits, f"transposable masks need out_features that are a multiple of M={m}")
    if not chosen:
        wanted = pattern if isinstance(pattern, Pattern) else "N:M"
        raise RecipeError(f"prune_: no layer of the model can be made {wanted} sparse:\n{report}")
    if skip:
        check_names("prune_folder: skip", skip, [c.name for c in chosen], skips, "layer to prune")
        leave({c.name for c in chosen if any(skips(c.name, name) for name in skip)}, "named in skip")
    if not chosen:
        raise RecipeError("prune_folder: skip leaves no layer to prune.")
    return chosen, report


def _select(
    model: nn.Module, pattern: Pattern | Mapping[str, Pattern | None], filter_fn: FilterFn | None
) -> tuple[list[LayerCandidate], Report]:
    """``select`` for one pattern, or for the pattern of each layer."""
    if isinstance(pattern, Pattern):
        return select(model, pattern, filter_fn, ASP(pattern, score="existing"))
    tables = {p: {c.name: c for c in candidates(model, p, ASP(p, score="existing"))} for p in dict.fromkeys(pattern.values()) if p}
    every = next(iter(tables.values()))
    known = {name: c for name, c in every.items() if c.linear}
    check_names("prune_: pattern", pattern, known, fnmatchcase)
    patterns, chosen, report = matched(pattern, known.values()), [], Report()
    for name, c in every.items():
        p = patterns.get(name)
        c = tables[p][name] if p else c
        why, named = c.impossible or ("" if name in pattern or filter_fn is not None else c.keep_dense), name in pattern
        if p is None and c.linear:
            why = "dense, as pattern= says" if any(fnmatchcase(name, wildcard) for wildcard in pattern) else "no name of pattern= fits it"
        elif c.linear and not why and filter_fn is not None and not filter_fn(c.module, name):
            why = FILTERED
        if c.linear and p is not None and named and c.impossible:
            raise RecipeError(
                f'prune_: pattern= names layer {name!r}, which cannot be made {p} sparse: {c.impossible}. Say "dense" for it.'
            )
        if c.linear and not why:
            chosen.append(c)
        rows = c.rows if c.linear else None
        report.entries.append(Entry(name, type(c.module).__name__, c.shape, c.linear and not why, why or str(p), c.linear, rows))
    return chosen, report


def check_model(model: nn.Module) -> dict[str, NMWeight]:
    """Raise RecipeError if the model cannot be pruned; returns the layers that are N:M already, by name."""
    if any(is_sharded(p) for p in model.parameters()) or any(type(m).__name__ == "FullyShardedDataParallel" for m in model.modules()):
        raise RecipeError(
            "prune_: the model's weights are sharded. Prune before fully_shard; on several GPUs each rank passes its share of "
            "the data, and layers are spread over ranks."
        )
    present = {layer_name(name, m): m for name, m in model.named_modules() if isinstance(m, NMWeight) and m.governed}
    attached = any(layer.effective.attached for layer in present.values())
    other = next(
        (name for name, layer in present.items() if layer.columns is not None or not is_nm(layer.grouped.detach(), layer.pattern)), None
    )
    if attached or other is not None:
        why = "an optimizer is attached to its sparse layers" if attached else f"layer {other!r} is in sparse training"
        raise RecipeError(
            f"prune_: {why}. Prune all layers before handle.attach, or get the dense model back first, with handle.remove() or "
            "densify_(model)."
        )
    return present


def undispatch_(model: nn.Module) -> None:
    """Remove the hooks by which accelerate runs a model on several devices; blocks run where their weights are."""
    hooked = [module for module in model.modules() if hasattr(module, "_hf_hook")]
    if not hooked:
        return
    offloaded = next((name for name, p in model.named_parameters() if p.is_meta), None)
    hooks = [hook for module in hooked for hook in getattr(module._hf_hook, "hooks", (module._hf_hook,))]
    if offloaded is not None and any(device.type == "meta" for hook in hooks for device in getattr(hook, "original_devices", {}).values()):
        raise RecipeError(
            f"prune_: accelerate has offloaded weights to disk ({offloaded!r}). Prune the folder itself, which needs one block in memory: "
            "python -m nmkernels prune MODEL_DIR --data FILE --out DIR, or nmkernels.prune.folder.prune_folder."
        )
    remove_hooks_(model)
    warnings.warn(
        "prune_: accelerate's hooks were removed, which sparse layers cannot have. To use the model on several devices, dispatch it "
        "again after compress_ (accelerate.dispatch_model).",
        stacklevel=3,
    )


def remove_hooks_(model: nn.Module) -> None:
    """Remove accelerate's hooks, and the class's own forward, which it leaves on each instance."""
    from accelerate.hooks import remove_hook_from_submodules

    remove_hook_from_submodules(model)
    for module in model.modules():
        if getattr(module.__dict__.get("forward"), "__func__", None) is type(module).forward:
            del module.__dict__["forward"]


def configuration(model: nn.Module) -> list[str]:
    """What its modules, and a model of transformers, say of their settings."""
    config: Any = getattr(model, "config", None)
    described = (model, config.to_dict() if hasattr(config, "to_dict") else None)
    return [re.sub(" at 0x[0-9a-f]+", "", repr(each)) for each in described]  # of a function, its place in memory
