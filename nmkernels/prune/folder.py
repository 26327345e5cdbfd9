"""``prune_folder``: one-shot pruning of a Hugging Face folder into another, with one block of the model in memory at a time."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from .. import ops
from .._version import __version__
from ..export.card import config_entry, end_card, first_of, write_card
from ..export.folders import CONFIG, REPORT, RESULT, carry_over, check_out, parts_of
from ..export.plan import STACKS
from ..export.safetensors import HUGGING_FACE, described, table
from ..export.stream import ShardWriter
from ..export.tensors import INDEX, Layer, weight_name
from ..files import atomic_write, sync, writing
from ..layouts import CONV2D, as_matrix, as_stored, matrix_shape
from ..nn.compress import check_values, compressed_like
from ..nn.dense import dense_integers, dense_layout, why_not_dense
from ..nn.experts import CompressedStack, child_name
from ..nn.swap import after_swap
from ..ops import Compressed
from ..pattern import CheckpointError, PatternLike, RecipeError
from ..train.report import Report, starred
from ..train.sparsify import TINY, FilterFn, LayerCandidate
from .base import OneShot, resolve
from .data import batches_of, call, size_of
from .disk import OnDisk, check_folder, class_of, open_folder
from .plot import check_plot, plot_errors
from .progress import Progress, Tell
from .prune import Pruning, choose, patterns_from, trial
from .prune import check_device as check_device
from .ranks import ranks
from .relay import Relay
from .results import Results, digest, owned

__all__ = ["PrunedFolder", "prune_folder"]

log = logging.getLogger("nmkernels.prune")

PICTURE = "error.png"
PIECE = 1 << 24
"""Bytes of a weight file that are read at once to recognise the model."""
HOW = "## How it was pruned"


@dataclass(frozen=True)
class PrunedFolder:
    """The result of ``prune_folder``.

    Attributes:
        folder: what ``from_pretrained`` loads.
        report: as that of ``prune_``.
        perplexity: (of the dense model, of the pruned one) on the held-out batches, if there were any.
        dense_bytes, compressed_bytes: all tensors, before and after.
        seconds: of this call; an earlier, interrupted one is not included.
    """

    folder: Path
    report: Report
    perplexity: tuple[float, float] | None
    dense_bytes: int
    compressed_bytes: int
    seconds: float


def prune_folder(
    model_dir: str | os.PathLike[str],
    pattern: PatternLike | Mapping[str, PatternLike],
    data: Iterable[Any],
    out: str | os.PathLike[str],
    filter_fn: FilterFn | None = None,
    *,
    skip: Sequence[str] = (),
    method: OneShot | str = "admm",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    sequential: bool = True,
    permute: bool = False,
    values: str | None = None,
    group: int | None = None,
    dense_values: str | None = None,
    held_out: Sequence[Any] = (),
    trust_remote_code: bool = False,
    plot: bool = False,
    progress: Tell | Progress | bool | None = None,
) -> PrunedFolder:
    """Prune the dense model in a Hugging Face folder as ``prune_`` does, and write the compressed one to another folder.

    Only one block of the model is in memory at a time, next to what is outside the blocks (embeddings, output head) and the hidden states
    of the data. Finished blocks are kept in a hidden folder next to ``out``, and the same call resumes from them after an interruption,
    with the same result. ``out`` appears when everything is written; ``model_dir`` is only read.

    Args:
        model_dir: a folder of ``save_pretrained`` with safetensors files, one or several.
        pattern, filter_fn, method, sequential, permute: as for ``prune_``.
        skip: layers that stay dense, as for ``NMConfig``.
        data: batches as for ``prune_``, mappings of keyword arguments for instance.
        out: the folder to write; new or empty.
        device: where blocks are computed and solved, ``"cuda"`` for instance; default the CPU.
        dtype: of the weights, computed with and written; default that of the file.
        values, group: integers of 8 or 4 bits as values, as for ``prune_``; convolutions keep floating-point ones.
        dense_values: ``"int8"`` or ``"int4"``: integers for embeddings, output heads and other linear layers that stay dense, except tiny
            ones, as by ``compress_(model, values=..., dense=[...])``.
        held_out: batches with ``input_ids`` on which the perplexity of a causal language model is measured before and after.
        trust_remote_code: run a model's own code that lies in its folder; it is copied to ``out``.
        plot: draw the errors by layer, as ``error.png`` in the folder and its model card; needs matplotlib.
        progress: as for ``prune_``; the time left is that of all stages.

    Raises:
        CheckpointError: a folder cannot be read or written, or holds another run. ``out`` is then as it was.
        RecipeError: no layer can be pruned, or the data does not fit the model.
        OptionError: ``values`` is unknown, or ``group`` does not fit a layer.
    """
    begin = time.monotonic()
    launched = torch.distributed.is_available() and torch.distributed.is_torchelastic_launched()
    count = int(os.environ.get("WORLD_SIZE", "1")) if launched else ranks()[0]
    if count > 1:
        raise RecipeError(
            f"prune_folder: {count} processes were started, and one prunes a folder; start it without torchrun. To share the work "
            "on a model that fits into memory, call prune_ on every rank."
        )
    wanted, method, source, out = patterns_from("prune_folder", pattern), resolve(method), Path(model_dir), Path(out)
    config = check_folder(source)
    check_out(source, out)
    group = check_values("prune_folder", values, group)
    check_values("prune_folder: dense_values", dense_values, None)
    if plot:
        check_plot()
    kind, settings = class_of(source, config, trust_remote_code)
    batches, tests = batches_of(data, kind), batches_of(held_out, kind) if held_out else []
    device = None if device is None else check_device(device)
    work, say = work_folder(out), progress if isinstance(progress, Progress) else Progress(progress, device)
    say.device, showing = device, nullcontext() if say is progress else say
    new = not work.exists()
    chosen_of = partial(choose, pattern=wanted, filter_fn=filter_fn, method=method, skip=skip)
    size = sum((source / name).stat().st_size for name in config["weight files"])
    with owned(work), showing:
        try:
            check_out(source, out)  # another run may have finished meanwhile
            with writing(work):
                shutil.rmtree(work / "offload", ignore_errors=True)
            about = {"dtype": str(dtype), "data": digest(batches), "held_out": digest(tests)}
            about[CONFIG] = digest((source / CONFIG).read_text(encoding="utf-8"))
            about |= {"dense values": dense_values} if dense_values else {}
            about["weights"] = digest([_digest_of(source / name, say) for name in config["weight files"]])
            say(0, 1, f"reading {source}")
            say.plan("read", 2 * size)
            model, disk = open_folder(source, kind, settings, chosen_of, offload=work / "offload", dtype=dtype, device=device)
            check_tokens(model, [*batches, *tests])
            pruning = Pruning(model, *chosen_of(model), wanted, method, sequential, permute, values, group)
            pruning.check_groups("prune_folder")
            dense = _dense_layers(model, pruning, dense_values) if dense_values else {}
            about = {**pruning.settings, **about}
            results = Results(work / "units", {**about, "layers": list(pruning.layers)})
            say.did("read", size)
            say(1, 1, f"reading {source}")
        except BaseException:
            shutil.rmtree(work if new else work / "offload", ignore_errors=True)
            raise
        run = _Run(source, work, pruning, disk, about, batches, tests, say, dense, plot)
        run.plan(results)
        say.plan("write", 2 * size)
        before = run.perplexity("dense") if tests else 0.0
        run.prune(results)
        perplexity = (before, run.perplexity("pruned")) if tests else None
        sizes = run.assemble(out, perplexity)
    return PrunedFolder(out, pruning.report, perplexity, *sizes, time.monotonic() - begin)


def work_folder(out: Path, verb: str = "prune") -> Path:
    """Where results of finished blocks, or checkpoints, are until ``out`` is complete."""
    out = Path(os.path.abspath(out))
    return out.parent / f".{out.name}.nmkernels-{verb}"


def new_result(work: Path, out: Path) -> Path:
    """An empty folder in ``work`` with the name of ``out``, which may be that of something else there."""
    folder = work / RESULT / out.name
    with writing(folder):
        shutil.rmtree(folder.parent, ignore_errors=True)
        folder.mkdir(parents=True)
    return folder


def put_in_place(folder: Path, out: Path) -> None:
    """Rename the complete ``folder`` to ``out``."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)
    out.parent.mkdir(parents=True, exist_ok=True)
    os.replace(folder, out)
    sync(out.parent)


@dataclass(eq=False)
class _Run:
    """One call of ``prune_folder``: the opened model, and its steps. ``about`` is what a resumed run must have in common with it; ``dense``
    are the layers whose dense weights become integers, and ``rounded`` those of weights that stay in memory, by the weight."""

    source: Path
    work: Path
    pruning: Pruning
    disk: OnDisk
    about: dict[str, Any]
    batches: list[Any]
    tests: list[Any]
    say: Progress
    dense: dict[str, nn.Module]
    plot: bool = False
    rounded: dict[int, Compressed] = field(default_factory=dict)

    def plan(self, results: Results) -> None:
        """Tell the progress of all that is to come, about."""
        self.pruning.results, relay, rounds = results, self._relay(self.batches), 2 if self.tests else 0
        self.say.plan("evaluate", rounds * self._evaluation())
        self.say.plan("check", trial(relay) + rounds * trial(self._relay(self.tests)))
        self.pruning.plan(relay, self.say)

    def _evaluation(self) -> float:
        """The work of one evaluation."""
        return 2.0 * sum(p.numel() for p in self.model.parameters()) * sum(map(size_of, self.tests))

    # ---- the three passes

    def prune(self, results: Results) -> None:
        """Prune, and put the results into the model: at once where its weights are in memory, else when they are read."""

        self.say(0, 1, "checking that blocks can be run one by one")
        self.say.prefix = "pruning "
        self.pruning.run(self._relay(self.batches), results, self.about["data"], len(self.batches), self.say, self._in_memory)
        self.say.prefix = ""
        away = {part for name, part in self.model.named_modules() if any(f"{name}.{key}" in self.disk.names for key in part._parameters)}
        self._write({*self.model.modules()} - away)
        self.disk.change = lambda module: self._write({*module.modules()})

    def perplexity(self, which: str) -> float:
        """The perplexity of the dense or pruned model on the held-out batches; that of the dense one is remembered."""
        path, run = self.work / f"{which}.json", digest(repr(self.about))
        with suppress(OSError, ValueError, TypeError):
            before, value = json.loads(path.read_text())
            if before == run:
                self.say.plan("evaluate", self.say.planned["evaluate"] - self._evaluation())
                self.say.plan("check", self.say.planned["check"] - trial(self._relay(self.tests)))
                return float(value)
        total, count = 0.0, 0
        relay = self._relay(self.tests)
        with relay.running(), _head_on(self.model, self.disk.device):
            relay.trace()
            self.say.did("check", trial(relay))
            steps, head = len(relay.units) + 1, 2.0 * sum(p.numel() for p in self.model.parameters())
            head -= sum(map(relay.work, relay.units)) if not relay.whole else 0
            for number, unit in enumerate(relay.units):
                self.say(number, steps, f"evaluating {which}: {unit.name}")
                if unit.block is not None and not relay.whole:
                    with relay.resident(unit.block.module):
                        relay.run(unit, partial(self.say.did, "evaluate"))
                    relay.finish(unit)
            with self._in_memory(relay):
                for number, batch in enumerate(self.tests):
                    loss, tokens = loss_of(relay.output(number), batch)
                    total, count = total + loss, count + tokens
                    self.say.did("evaluate", head * size_of(batch))
        self.say(steps, steps, f"evaluating {which}")
        value = float(torch.tensor(total / max(1, count), dtype=torch.float64).exp())
        atomic_write(path, lambda temporary: temporary.write_text(json.dumps([run, value])))
        return value

    @property
    def model(self) -> Any:
        return self.pruning.model

    def _relay(self, batches: list[Any]) -> Relay:
        return Relay(self.model, self.pruning.chosen, batches, call, None, self.disk.device, self.disk)

    def _in_memory(self, relay: Relay) -> ExitStack:
        """Blocks that do not answer from a store run in every pass, so they stay in memory."""
        answering, staying = {unit.block for unit in relay.units if not relay.whole}, ExitStack()
        for block in relay.blocks:
            if block not in answering:
                staying.enter_context(self.disk(block.module))
        return staying

    def _write(self, modules: Set[nn.Module], round_dense: bool = True) -> None:
        """Write the results of all layers in ``modules``, whose weights are in memory."""
        for name, module in self.dense.items() if round_dense else ():
            weight: Any = module._parameters["weight"]
            if module in modules and id(weight) not in self.rounded:
                layout = dense_layout(module)
                packed = self._integers(name, as_matrix(weight.detach(), layout))
                if f"{name}.weight" not in self.disk.names:
                    self.rounded[id(weight)] = packed
                with torch.no_grad():
                    weight.copy_(as_stored(packed.dense(weight.dtype), layout, weight.shape))
        for number, unit in enumerate(self.pruning.units):
            layers = {c.name: c for c in unit.layers if c.module in modules}
            if layers:
                done = self.pruning.results.load(number)
                done.layers, done.rounded = ({n: c for n, c in part.items() if n in layers} for part in (done.layers, done.rounded))
                with torch.no_grad():
                    self.pruning.write(done)

    # ---- the files

    def assemble(self, out: Path, perplexity: tuple[float, float] | None) -> tuple[int, int]:
        """Write the folder ``out``; returns the bytes of all tensors before and after."""
        folder = new_result(self.work, out)
        state = self.model.state_dict()
        for key in self.model._keys_to_ignore_on_save or ():
            state.pop(key, None)
        state = remove_tied_weights_from_state_dict(state, self.model)
        dense_bytes = sum(t.nbytes for t in state.values())
        self.disk.change = lambda module: self._write({*module.modules()}, round_dense=False)
        layers = {c.name: self._layer(c) for c in self.pruning.chosen}
        layers |= {name: self._dense_layer(name, module) for name, module in self.dense.items()}
        packed = {name: child_name(name) if isinstance(layer, CompressedStack) else name for name, layer in layers.items()}
        of = {weight_name(name, layer): name for name, layer in layers.items()}
        entries = table(layers)
        first = first_of(entries)
        tensors: dict[str, Tensor] = {weight_name(first, layers[first]): torch.empty(0)}
        for key, value in state.items():
            if key in of:
                layer: Any = layers[of[key]]
                tensors |= {f"{packed[of[key]]}.{part}": tensor for part, tensor in parts_of(layer).items()}
            else:
                tensors[key] = value
        # save_pretrained makes the same metadata
        writer = ShardWriter(folder, tensors, {**described(entries), "format": HUGGING_FACE})
        self.say.plan("write", 2 * writer.total)  # they are read back
        try:
            self._fill(writer, {key for key in state if of.get(key) not in self.pruning.layers}, state, packed)
            writer.close()
            self.say.did("write", writer.total)
        finally:
            writer.abandon()
        sizes = dense_bytes, writer.total
        with writing(folder):
            self._describe(folder, entries, perplexity, sizes)
            put_in_place(folder, out)
        shutil.rmtree(self.work, ignore_errors=True)
        after_swap(self.model)  # so that transformers knows what it is asked to load
        return sizes

    def _layer(self, c: LayerCandidate) -> Layer:
        """The compressed layer that replaces ``c``, without data."""
        (rows, cols), p = c.matrix_shape, self.pruning.patterns[c.name]
        dtype = c.module.get_parameter(c.key).dtype
        with torch.device("meta"):
            values = torch.empty(rows, p.kept(cols), dtype=dtype)
            indices = torch.empty(rows, p.index_bytes(cols), dtype=torch.uint8)
        weight = Compressed(values, indices, p, (rows, cols))
        if self.pruning.integers is not None and c.layout != CONV2D:
            weight = ops.quantize_values(weight, *self.pruning.integers)
        if c.layout in STACKS:
            return CompressedStack(weight, c.shape[0], c.layout, dtype=dtype)
        return compressed_like(c.module, weight, c.layout)

    def _dense_layer(self, name: str, module: nn.Module) -> Layer:
        """The layer with integers that replaces the dense ``module``, without data."""
        weight, layout = module.get_parameter("weight"), dense_layout(module)
        packed = self._integers(name, torch.empty(matrix_shape(weight.shape, layout), dtype=weight.dtype, device="meta"))
        return compressed_like(module, packed, layout)

    def _integers(self, name: str, weight: Tensor) -> Compressed:
        """The dense weight ``(out, in)`` of a layer as integers."""
        packed = dense_integers(weight, self.about["dense values"])
        if packed.step is not None and not packed.step.is_meta and not bool(packed.step.isfinite().all()):
            raise CheckpointError(f"{self.source}: the weight of {name!r} has NaN or infinite values, which no integers can hold.")
        return packed

    def _fill(self, writer: ShardWriter, others: Iterable[str], state: Mapping[str, Tensor], packed: Mapping[str, str]) -> None:
        steps, left = len(self.pruning.units) + 1, dict.fromkeys(sorted(others))
        dense = {f"{name}.weight": name for name in self.dense}

        def put(key: str, value: Tensor) -> None:
            if key not in dense:
                writer.write(key, value)
                return
            name, module = dense[key], self.dense[dense[key]]
            packed = self.rounded.get(id(module._parameters["weight"]))
            packed = self._integers(name, as_matrix(value, dense_layout(module))) if packed is None else packed
            for part, tensor in parts_of(packed).items():
                writer.write(f"{name}.{part}", tensor)

        for number, unit in enumerate(self.pruning.units):
            self.say(number, steps, "writing layers")
            done = self.pruning.as_written(number, self.pruning.results.load(number))
            for name, weight in {**done.layers, **done.rounded}.items():
                experts = self.pruning.layers[name].shape[0] if packed[name] != name else None
                for part, tensor in parts_of(weight).items():
                    writer.write(f"{packed[name]}.{part}", tensor if experts is None else tensor.unflatten(0, (experts, -1)))
                    self.say.did("write", tensor.nbytes)
            if unit.block is not None and done.orders:
                # channels of dense tensors are reordered too
                with self.disk(unit.block.module):
                    present = unit.block.module.state_dict(prefix=f"{self.disk.prefix[unit.block.module]}.")
                    for name in present.keys() & left.keys():
                        put(name, present[name])
                        del left[name]
        self.say(steps - 1, steps, "writing other tensors")
        for name in left:
            put(name, self.disk.read(name) if state[name].is_meta else state[name])
            self.say.did("write", state[name].nbytes)
        self.say(steps, steps, "writing done")

    def _describe(self, folder: Path, entries: dict[str, Any], perplexity: tuple[float, float] | None, sizes: tuple[int, int]) -> None:
        """Everything but the weights."""
        model = self.model
        left = carry_over(self.source, folder, {*check_folder(self.source)["weight files"], INDEX})
        model.config.dtype, model.config.architectures = str(model.dtype).removeprefix("torch."), [type(model).__name__]
        model.config.quantization_config = config_entry(entries)
        model.config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        facts = {**self._facts(perplexity, sizes), "not carried over": left}
        (folder / REPORT).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        write_card(folder, model, entries)
        picture = f"\n![errors by layer]({PICTURE})\n" if self.plot and plot_errors(self.pruning.report, folder / PICTURE) else ""
        end_card(folder, HOW, f"{how(facts)}{picture}")

    def _facts(self, perplexity: tuple[float, float] | None, sizes: tuple[int, int]) -> dict[str, Any]:
        report, tokens, python = self.pruning.report, sum(map(_tokens, self.batches)), platform.python_version()
        return {
            "format": "nmkernels-prune-report-1",
            "model": self.source.resolve().name,
            **self.pruning.settings,
            **({"dense values": {"values": self.about["dense values"], "layers": list(self.dense)}} if self.dense else {}),
            "data": {"batches": len(self.batches), "tokens": tokens, "digest": self.about["data"]},
            "held_out": {"batches": len(self.tests), "tokens": sum(map(_tokens, self.tests))} if self.tests else None,
            "perplexity": None if perplexity is None else {"dense": perplexity[0], "pruned": perplexity[1]},
            "bytes": {"dense": sizes[0], "compressed": sizes[1]},
            "error by layer": by_type(report),
            # without times and memory, so that the same command writes the same bytes
            "layers": {
                name: {key: value for key, value in asdict(row).items() if key not in ("seconds", "memory")}
                for name, row in report.pruned.items()
            },
            "patterns": {name: str(p) for name, p in self.pruning.patterns.items()},
            "blocks": "each pass ran the whole model: " + self.pruning.whole if self.pruning.whole else "one by one",
            "left dense": {e.name: e.reason for e in report.skipped if e.linear},
            "device": "cpu" if self.disk.device is None else self.disk.device.type,
            "versions": {"nmkernels": __version__, **{lib.__name__: lib.__version__ for lib in (torch, transformers)}, "python": python},
        }


def _dense_layers(model: nn.Module, pruning: Pruning, values: str) -> dict[str, nn.Module]:
    """The embeddings and linear layers outside ``pruning`` whose weights become integers: no tiny ones, and none that share theirs with
    something else."""
    pruned = {c.module for c in pruning.chosen}
    fits = {
        name: module
        for name, module in model.named_modules()
        if dense_layout(module) and module not in pruned and not why_not_dense(module, values, None)
        if min(module.get_parameter("weight").shape) >= TINY
    }
    others = {id(p) for m in model.modules() for p in m._parameters.values() if p is not None and m not in {*fits.values()}}
    return {name: module for name, module in fits.items() if id(module._parameters["weight"]) not in others}


def by_type(report: Report) -> dict[str, float]:
    """The mean error of the layers whose names differ only in numbers (``model.layers.*.mlp.up_proj``), as they are written."""
    errors: dict[str, list[float]] = {}
    for name, row in report.pruned.items():
        error = row.error if row.rounded is None else row.rounded
        if error is not None:
            errors.setdefault(starred(name.partition("[")[0]), []).append(error)
    return {name: sum(values) / len(values) for name, values in errors.items()}


def how(facts: Mapping[str, Any]) -> str:
    """The section of the model card, from the facts of ``report.json``."""
    data, held, ppl, size = facts["data"], facts["held_out"], facts["perplexity"], facts["bytes"]
    then = f", then {facts['values']}," if facts["values"] else ""
    patterns = ", ".join(sorted(set(facts["patterns"].values())))
    dense = facts.get("dense values")
    kept = f" Layers left dense are in {dense['values']}: {', '.join(dense['layers'])}." if dense else ""
    lines = [
        f"One-shot, from {facts['model']}: {patterns} by `{facts['method']}`{then} on {data['tokens']:,} tokens in "
        f"{data['batches']} batches (digest {data['digest']}), block by block, without training afterwards.{kept}",
    ]
    lines += ["", "| | dense | pruned |", "| --- | --- | --- |"]
    if ppl is not None:
        lines.append(f"| perplexity on {held['tokens']:,} held-out tokens | {ppl['dense']:.3f} | {ppl['pruned']:.3f} |")
    lines.append(f"| bytes of all tensors | {size['dense']:,} | {size['compressed']:,} |")
    lines += ["", "| layers | mean error on their inputs |", "| --- | --- |"]
    lines += [f"| `{name}` | {100 * error:.2f} % |" for name, error in facts["error by layer"].items()]
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return "\n".join([*lines, "", f"Each layer is in `{REPORT}`. Made with {versions}.", ""])


@contextmanager
def _head_on(model: Any, device: torch.device | None) -> Any:
    """The output head, which is outside the blocks, runs on ``device``, where its GEMM takes no time."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if device is None or device.type == "cpu" or type(head) is not nn.Linear or "forward" in head.__dict__:
        yield
        return
    weight, bias = head.weight.to(device), None if head.bias is None else head.bias.to(device)
    head.__dict__["forward"] = lambda x: F.linear(x.to(device), weight, bias)
    try:
        yield
    finally:
        del head.__dict__["forward"]


def loss_of(output: Any, batch: Mapping[str, Tensor]) -> tuple[float, int]:
    """(the sum of the losses of next tokens, their number)."""
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    targets = ids if mask is None else ids.masked_fill(mask == 0, -100)
    total, count = 0.0, 0
    for logits, row in zip(output.logits, targets, strict=True):
        total += float(F.cross_entropy(logits[:-1].float(), row[1:].to(logits.device), reduction="sum"))
        count += int((row[1:] != -100).sum())
    return total, count


def _tokens(batch: Any) -> int:
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else batch[0] if isinstance(batch, (list, tuple)) else batch
    return int(ids.numel()) if isinstance(ids, Tensor) and not ids.is_floating_point() else 0


def check_tokens(model: Any, batches: Sequence[Any]) -> None:
    """Raise RecipeError if a batch has a token that the model does not know."""
    try:
        size = int(model.get_input_embeddings().num_embeddings)
    except (NotImplementedError, AttributeError):
        return
    for number, batch in enumerate(batches, 1):
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if isinstance(ids, Tensor) and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < size:
            wrong = int(ids.max()) if int(ids.max()) >= size else int(ids.min())
            raise RecipeError(
                f"batch {number} of the data has token {wrong}, and the model's vocabulary has 0 to {size - 1}; take the tokenizer of "
                "this model."
            )


def _digest_of(path: Path, say: Progress) -> str:
    """The SHA-256 of a file."""
    result, size = hashlib.sha256(), path.stat().st_size
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(PIECE):
            result.update(piece)
            say.did("read", len(piece))
            if size > 64 * PIECE:
                say(file.tell() // PIECE, -(-size // PIECE), f"recognising {path.name}")
    return result.hexdigest()
