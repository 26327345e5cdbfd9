"""``prune_``: a pretrained model to N:M in one call, block by block."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..layouts import MATRICES
from ..nn.chains import Chain, find_chains
from ..nn.compress import check_values
from ..nn.weight import NMWeight
from ..ops import Compressed
from ..pattern import Pattern, PatternLike, RecipeError
from ..recipes.methods.asp import ASP
from ..shards import is_sharded
from ..train.handle import Handle
from ..train.layer_names import check_names, listed, skips
from ..train.report import Pruned, Report
from ..train.sparsify import FilterFn, LayerCandidate, check_groups, make_handle_, select
from .base import OneShot, resolve, text
from .data import batches_of, call
from .ranks import agree, gathered, together
from .relay import Forward, Relay, Unit
from .results import Results, digest, owned
from .units import Progress, prune_units, trace, write

SCARCE = 2
"""With fewer tokens per input the user is warned."""


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
    values: str | None = None,
    group: int | None = None,
    progress: Progress | None = None,
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
            loses its hooks, and must have its weights in memory.
        data: batches of what the model takes: a mapping of keyword arguments, a tuple of arguments, or a tensor; a ``DataLoader``, or a
            tokenized dataset, each row of which is a batch of one. numpy arrays and lists of numbers become tensors. Read once. About 8
            tokens per input feature are enough. Padding, where ``attention_mask`` is 0, is left out.
        filter_fn: as for ``sparsify_``.
        method: ``"admm"``, ``"sparsegpt"``, ``"wanda"``, ``"magnitude"``, with settings as in ``"admm(transposable=True)"``, or a
            ``OneShot`` such as ``ADMM(transposable=True)``.
        device: where blocks are computed and solved, one at a time, for instance ``"cuda"``; default where they are.
        sequential: False: all inputs come from the dense model, which saves a pass over each block and is a little worse.
        folder: results of finished blocks are kept there, and an interrupted run resumes from them; default in memory.
        forward: ``forward(model, batch)`` for a model that is called in another way.
        blocks: names of modules whose children are the blocks; [] for none.
        permute: first reorder hidden channels between layers, where that is possible without changing the model, so that more is kept.
        values, group: the integers that ``compress_(model)`` rounds the kept values of linear layers to, ``"int8"`` or ``"int4"``; the
            report has the error with them too. Until then weights stay floating-point, so that they can be fine-tuned.
        progress: called with (done, total, what) before each block; the same is logged to ``nmkernels.prune``.

    Raises:
        RecipeError: no layer can be pruned, the model is sparse, sharded or offloaded, the data is empty, or the method unknown.
        OptionError: ``values`` is unknown, or ``group`` does not fit a layer.
        CheckpointError: ``folder`` holds another run, or cannot be written. In case of any error the model is as it was.

    Example:
        >>> from nmkernels import ops
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        >>> handle = prune_(model, "2:4", [torch.randn(128, 64) for _ in range(4)])
        >>> ops.is_nm(model[2].weight.detach(), "2:4"), handle.report.pruned["2"].tokens
        (True, 512)
    """
    pattern, method = Pattern(pattern), resolve(method)
    device = None if device is None else torch.device(device)
    group = check_values("prune_", values, group)
    with together():
        check_model(model)
        batches = batches_of(data, model)
        undispatch_(model)
        chosen, report = choose(model, pattern, filter_fn, method)
        if values is not None:
            check_groups("prune_", values, group, pattern, chosen)
        pruning = Pruning(model, chosen, report, pattern, method, sequential, permute, values, group)
        relay = Relay(model, chosen, batches, forward or call, blocks, device)
    identity = {
        **pruning.settings,
        "blocks": None if blocks is None else list(blocks),
        "layers": list(pruning.layers),
        "weights": digest([sample(c.matrix) for c in chosen] if folder is None else [*tensors_of(model)]),
        "configuration": digest(configuration(model)),
    }
    agree("arguments or models", identity)
    shares = gathered((digest(batches), len(batches)))
    identity["data"] = shares[0][0] if len(shares) == 1 else digest(shares)
    compressed: dict[str, Compressed] = {}
    with owned(None if folder is None else Path(folder), "another folder"):
        pruning.run(relay, Results(folder, identity), identity["data"], sum(count for _, count in shares), progress)
        with torch.no_grad():
            for number in range(len(pruning.units)):
                done = pruning.results.load(number)
                write(model, done, pruning.layers, pruning.chains)
                compressed |= done.layers
    handle = make_handle_(model, ASP(pattern, score="existing"), chosen, report)
    for name, layer in handle.layers.items():
        layer.effective.pruned = compressed[name]
        layer.integers = pruning.integers if layer.layout in MATRICES else None
    return handle


@dataclass(eq=False)
class Pruning:
    """What ``prune_`` and ``prune_folder`` share: the ``chosen`` layers of ``model``, how they are pruned, and after ``run`` what has come
    of it.

    Attributes:
        report: on all layers; complete after ``run``.
        results: those of ``units``, by number. The last unit has the layers that the first batches do not reach.
        whole: as in ``Relay``.
    """

    model: nn.Module
    chosen: list[LayerCandidate]
    report: Report
    pattern: Pattern
    method: OneShot
    sequential: bool
    permute: bool
    values: str | None
    group: int | None
    results: Results = field(init=False)
    units: list[Unit] = field(init=False)
    whole: str = field(init=False)

    def __post_init__(self) -> None:
        self.layers = {c.name: c for c in self.chosen}
        self.chains: list[Chain] = find_chains(self.model)[0] if self.permute else []
        self.integers = None if self.values is None else (self.values, self.group)

    @property
    def settings(self) -> dict[str, Any]:
        """How the model is pruned, by the names of the arguments."""
        options = {name: getattr(self, name) for name in ("sequential", "permute", "values", "group")}
        return {"pattern": str(self.pattern), "method": text(self.method), **options}

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
            around: a context for all passes but those of ``trace``.
        """
        with relay.running():
            trace(relay)
            with around(relay):
                prune_units(
                    relay, self.pattern, self.method, results, self.chains, sequential=self.sequential, integers=self.integers,
                    progress=progress,
                )  # fmt: skip
        self.results, self.units, self.whole = results, [*relay.units, Unit("", relay.idle)], relay.whole
        rows: dict[str, Pruned] = {}
        gains: dict[str, str] = {}
        for number, unit in enumerate(self.units):  # all files are read before anything is written
            done = results.load(number, [c.name for c in unit.layers])
            rows, gains = rows | done.rows, gains | done.gains
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


def choose(
    model: nn.Module, pattern: Pattern, filter_fn: FilterFn | None, method: OneShot, skip: Sequence[str] = ()
) -> tuple[list[LayerCandidate], Report]:
    """The layers to prune, and the report on all; ``skip`` as for ``prune_folder``."""
    chosen, report = select(model, pattern, filter_fn, ASP(pattern, score="existing"))
    if method.transposable:
        why = f"transposable masks need out_features that are a multiple of M={pattern.m}"
        misfits = {c.name for c in chosen if c.layout not in MATRICES or c.matrix_shape[0] % pattern.m}
        chosen = [c for c in chosen if c.name not in misfits]
        report.entries = [replace(e, sparse=False, reason=why) if e.name in misfits else e for e in report.entries]
    if not chosen:
        raise RecipeError(f"prune_: no layer of the model can be made {pattern} sparse:\n{report}")
    if skip:
        check_names("prune_folder: skip", skip, [c.name for c in chosen], skips, "layer to prune")
        skipped = {c.name for c in chosen if any(skips(c.name, name) for name in skip)}
        chosen = [c for c in chosen if c.name not in skipped]
        report.entries = [replace(e, sparse=False, reason="named in skip") if e.name in skipped else e for e in report.entries]
    if not chosen:
        raise RecipeError("prune_folder: skip leaves no layer to prune.")
    return chosen, report


def check_model(model: nn.Module) -> None:
    if any(isinstance(m, NMWeight) and m.governed for m in model.modules()):
        raise RecipeError(
            "prune_: the model has sparse layers already; get the dense model back first, with handle.remove() or densify_(model)."
        )
    if any(is_sharded(p) for p in model.parameters()) or any(type(m).__name__ == "FullyShardedDataParallel" for m in model.modules()):
        raise RecipeError(
            "prune_: the model's weights are sharded. Prune before fully_shard; on several GPUs each rank passes its share of "
            "the data, and layers are spread over ranks."
        )


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


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor | str]]:
    """All weights and buffers by name; of one without memory its form."""
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        yield name, f"{t.dtype} {tuple(t.shape)}" if t.is_meta else t


def configuration(model: nn.Module) -> list[str]:
    """What its modules, and a model of transformers, say of their settings."""
    config: Any = getattr(model, "config", None)
    described = (model, config.to_dict() if hasattr(config, "to_dict") else None)
    return [re.sub(" at 0x[0-9a-f]+", "", repr(each)) for each in described]  # of a function, its place in memory


def sample(matrix: Tensor) -> Tensor:
    """Some of the elements of a weight, to recognise it."""
    flat = matrix.reshape(-1)
    return flat[:: max(1, len(flat) // 4096)]
