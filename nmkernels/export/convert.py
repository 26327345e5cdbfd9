"""``convert_folder``: a Hugging Face folder that another library has compressed or pruned becomes one of this package, file by file."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._version import __version__
from ..files import atomic_write, lock_file, sync, writing
from ..gemm.problem import plain
from ..layouts import MATRICES, as_matrix, as_stored
from ..nn.compress import compressed_like
from ..nn.experts import stacks_of
from ..ops import Compressed
from ..ops.check import FLOATS
from ..pattern import CheckpointError, Pattern
from ..recipes.existing import LOOKED_FOR, existing_pattern
from ..train.report import starred
from ..train.sparsify import TIED, LayerCandidate, candidates
from .card import METHOD, config_entry, end_card, write_card
from .folders import CONFIG, REPORT, RESULT, carry_over, check_complete, check_out, check_weights, parts_of, read_config
from .foreign import SCALED, bitmask, damaged, keeps_steps, marlin24, masked
from .plan import announce, check_filled
from .safetensors import HUGGING_FACE, described, table
from .stream import ShardWriter
from .tensors import INDEX, SINGLE, Contents, quote, read

FORMATS = ("dense", "sparse-24-bitmask", "marlin-24", "int-quantized", "float-quantized", "naive-quantized")
"""compressed-tensors' names of what is read."""
SECTIONS = ("quantization_config", "compression_config")
"""Where config.json says how a model is stored; the second is an older name."""
BITMASK, MARLIN = ("compressed", "bitmask", "shape"), ("weight_packed", "scale_packed", "meta")
SCALE, ZERO, ORDER = "weight_scale", "weight_zero_point", "weight_g_idx"
OTHERS = re.compile(r"\.(weight|input|output|[qkv])_(scale|zero_point|g_idx|global_scale)$")
"""Tensors of compressed-tensors that have no place in a model whose weights alone are quantised."""
APEX = re.compile(r"(?:^|\.)__(\w+)_mma_(mask|pruned_p)$")
"""Buffers of apex's ASP."""
RUN, LOCK = "run.json", ".lock"
HOW = "## How it was converted"

Progress = Callable[[int, int, str], None]


def convert_folder(
    model_dir: str | os.PathLike[str],
    out: str | os.PathLike[str],
    model: nn.Module,
    *,
    exact: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Read a folder in a format of compressed-tensors (``sparse-24-bitmask``, ``marlin-24``), or a dense one whose weights have N:M zeros,
    and write another that ``from_pretrained`` loads with compressed layers; returns what ``report.json`` says.

    One file is read and written at a time. Finished ones are kept in a hidden folder next to ``out``, and the same call resumes from them
    after an interruption, with the same result. ``out`` appears when everything is written; ``model_dir`` is only read.

    Positions and integers stay as they are, and floating-point values to the bit. Integers' scales become bfloat16 steps, and 8-bit
    floating-point values those of the model's dtype; the report has the relative error ‖W' − W‖ / ‖W‖ of each layer.

    Args:
        model_dir: the folder, with safetensors files, one or several.
        out: the folder to write; new or empty.
        model: the dense model of that folder, on the meta device.
        exact: write float32 values for the layers that would be rounded, and a float32 model.
        progress: called with (done, total, what).

    Raises:
        CheckpointError: the folder is damaged or incomplete, has another format, or no layer with N:M zeros. ``out`` is then as it was.
    """
    source, out = Path(model_dir), Path(out)
    check_out(source, out)
    work = work_folder(out)
    with _owned(work):
        check_out(source, out)  # another run may have finished meanwhile
        run = _Run(source, work, model, exact, progress or (lambda done, total, what: None), work / RESULT / out.name)
        run.plan()
        run.resume()
        for number, file in enumerate(run.outputs):
            run.say(number, len(run.outputs), f"converting {file}")
            run.convert(file)
        run.say(len(run.outputs), len(run.outputs), "converting done")
        return run.assemble(out)


def work_folder(out: Path) -> Path:
    """Where finished files are until ``out`` is complete."""
    out = Path(os.path.abspath(out))
    return out.parent / f".{out.name}.nmkernels-convert"


@contextmanager
def _owned(work: Path) -> Iterator[None]:
    """No other run uses ``work``; it is removed unless it has a finished file."""
    with writing(work):
        work.mkdir(parents=True, exist_ok=True)
    lock = lock_file(work / LOCK, "another folder")
    try:
        yield
    finally:
        if any(work.glob(f"{RESULT}/*/*.safetensors")):
            (work / LOCK).unlink(missing_ok=True)
        else:
            shutil.rmtree(work, ignore_errors=True)
        os.close(lock)


@dataclass(eq=False)
class _Layer:
    """A weight: how it is stored, the names of its tensors by part, the module that it is for, if there is one, else the ``reason``. Then
    what becomes of it: the forms of its tensors, its entry in the table of layers if it is compressed, and its row of the report."""

    name: str
    stored: str
    keys: dict[str, str]
    candidate: LayerCandidate | None = None
    reason: str = ""
    zeros: float = 0.0  # their share of the weights
    forms: dict[str, Tensor] = field(default_factory=dict)
    entry: dict[str, Any] | None = None
    row: dict[str, Any] = field(default_factory=dict)

    @property
    def home(self) -> str:
        """The tensor in whose file the result is."""
        return next(iter(self.keys.values()))


@dataclass(eq=False)
class _Run:
    """One call of ``convert_folder``."""

    source: Path
    work: Path
    model: Any
    exact: bool
    say: Progress
    folder: Path  # in ``work``, which becomes the result
    files: list[str] = field(default_factory=list)
    where: dict[str, str] = field(default_factory=dict)  # the file of each tensor
    forms: dict[str, Tensor] = field(default_factory=dict)  # and its shape and dtype
    layers: dict[str, _Layer] = field(default_factory=dict)
    masks: dict[str, str] = field(default_factory=dict)  # of apex: weight -> its mask
    outputs: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # file -> the forms of what is written to it
    dropped: list[str] = field(default_factory=list)

    # ---- what there is, and what becomes of it

    def plan(self) -> None:
        """Find the layers, and read each once: what is damaged is refused before anything is written."""
        self.config, stored = _settings(self.source)
        self.format, self.notes = _format(self.source, stored)
        self.files = check_weights(self.source)
        for file in self.files:
            for key, tensor in read(self.source / file).tensors.items():
                if key in self.where:
                    raise CheckpointError(f"{self.source} has {quote(key)} twice, in {self.where[key]} and in {file}; download it again.")
                self.where[key], self.forms[key] = file, tensor.to("meta")
        self._find()
        stacks = {f"{name}.{key}" for name, module in self.model.named_modules() for key in stacks_of(module)} & self.forms.keys()
        if stacks:
            which = min(stacks) + (f" and {len(stacks) - 1} more" if len(stacks) > 1 else "")
            later = "nm.recipes.adopt takes over their zeros in the loaded model"
            self.notes.append(f"stacked experts are copied as they are ({which}); {later}")
        self.dtype = _dtype(self.config, self.forms.values())
        self.exact = self.exact and self._rounds()
        if self.exact:
            self.dtype = torch.float32
        self.model.to(self.dtype)
        able = {c.name: c for c in candidates(self.model, Pattern("1:1"), None) if c.linear and c.layout in MATRICES}
        tied = {key.removesuffix(".weight") for pair in getattr(self.model, "all_tied_weights_keys", {}).items() for key in pair}
        for layer in self.layers.values():
            c = able.get(layer.name)
            layer.reason = TIED if layer.name in tied else c.impossible if c else f"{type(self.model).__name__} has no such linear layer"
            layer.candidate = None if layer.reason else c
        for number, file in enumerate(self.files):
            self.say(number, len(self.files), f"reading {file}")
            contents = read(self.source / file)
            for layer in self._in(file):
                layer.forms = {name: t.to("meta") for name, t in self._convert(layer, contents).items()}
            for key in contents.tensors.keys() & self.masks.keys():
                self._check_mask(key, contents)
        self.entries = {layer.name: layer.entry for layer in self.layers.values() if layer.entry is not None}
        if not self.entries:
            known = [layer for layer in self.layers.values() if layer.zeros or layer.candidate is not None]
            most = max(known, key=lambda layer: layer.zeros, default=None)
            why = f" ({most.name}: {most.reason})" if most else ""
            raise CheckpointError(
                f"{self.source} has no layer with N:M zeros that can be compressed{why}; python -m nmkernels prune makes them."
            )
        announce(self.source, dict(self.model.named_modules(remove_duplicate=False)), self.entries)
        used = {key for layer in self.layers.values() for key in layer.keys.values()} | set(self.dropped)
        guard = {f"{min(self.entries)}.weight": torch.empty(0)}  # as save_pretrained writes it
        for file in self.files:
            kept = {key: t.to(self._kept(t)) for key, t in self.forms.items() if self.where[key] == file and key not in used}
            forms = {name: t for layer in self._in(file) for name, t in layer.forms.items()}
            if kept or forms:
                self.outputs[file] = {**({} if self.outputs else guard), **forms, **kept}
        packed = {name for layer in self.layers.values() if layer.entry is not None for name in layer.forms}
        written = {name: t for forms in self.outputs.values() for name, t in forms.items() if name not in packed}
        dense = {f"{name}.weight": self.model.get_parameter(f"{name}.weight") for name in self.entries}
        check_complete(self.source, self.model, written | dense)

    def _find(self) -> None:
        """All layers, by name, and what is left out."""
        keys = self.forms
        for key, t in keys.items():
            stem, _, end = key.rpartition(".")
            if (apex := APEX.search(key)) is not None:
                if apex[2] == "mask":
                    self.masks[f"{key[: apex.start()]}.{apex[1]}".removeprefix(".")] = key
                self.dropped.append(key)
            elif end in BITMASK and (f"{stem}.compressed" in keys or f"{stem}.bitmask" in keys):
                self._add(stem, "sparse-24-bitmask", BITMASK)
            elif end in MARLIN and (f"{stem}.weight_packed" in keys or f"{stem}.scale_packed" in keys):
                self._add(stem, "marlin-24", MARLIN)
            elif end == "weight" and t.dim() == 2 and t.dtype in (*FLOATS, *SCALED):
                self._add(stem, "dense", ("weight",))
            elif t.dtype in SCALED[1:]:
                raise damaged(stem, f"{quote(end)} is {t.dtype}, which convert does not know")
        used = {key for layer in self.layers.values() for key in layer.keys.values()}
        self.dropped += [key for key in keys if self.format and OTHERS.search(key) and key not in used]

    def _add(self, name: str, stored: str, parts: Iterable[str]) -> None:
        if name in self.layers and self.layers[name].stored != stored:
            raise damaged(name, f"it is stored twice, as {self.layers[name].stored} and as {stored}")
        parts = [*parts, *(part for part in (SCALE, ZERO, ORDER) if self.format and f"{name}.{part}" in self.forms)]
        self.layers[name] = _Layer(name, stored, {part: f"{name}.{part}" for part in parts})
        for part, key in self.layers[name].keys.items():
            if key not in self.forms:
                raise damaged(name, f"the files lack its {part}; download the folder again")

    def _rounds(self) -> bool:
        """Whether anything would be rounded without ``exact``."""
        scales = [layer.keys[part] for layer in self.layers.values() for part in (SCALE, "scale_packed") if part in layer.keys]
        return any(t.dtype in SCALED[1:] for t in self.forms.values()) or not all(keeps_steps(self._tensor(key)) for key in scales)

    def _in(self, file: str) -> list[_Layer]:
        return [layer for layer in self.layers.values() if self.where[layer.home] == file]

    def _kept(self, t: Tensor) -> torch.dtype:
        """The dtype in which a tensor is written that is not compressed."""
        return torch.float32 if self.exact and t.dtype in FLOATS else t.dtype

    # ---- reading and writing one file

    def resume(self) -> None:
        """Keep the finished files of an earlier run of the same folder, and delete those of another."""
        stats = {file: (self.source / file).stat() for file in self.files}
        run = {"format": "nmkernels-convert-1", "version": __version__, "exact": self.exact, "source": str(self.source.resolve())}
        run |= {"files": {file: [stat.st_size, stat.st_mtime_ns] for file, stat in stats.items()}, "layers": self.entries}
        before = None
        with suppress(OSError, ValueError):
            before = json.loads((self.work / RUN).read_bytes())
        with writing(self.work):
            same = before == json.loads(json.dumps(run))
            for path in self.work.iterdir():
                if path.name != LOCK and not (same and path.name in (RESULT, RUN)):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            self.folder.mkdir(parents=True, exist_ok=True)
        if not same:
            atomic_write(self.work / RUN, lambda temporary: temporary.write_text(json.dumps(run)))

    def convert(self, file: str) -> None:
        """Write the tensors of one file, unless an earlier run has."""
        if (self.folder / file).exists():
            return
        place = self.work / "writing"
        with writing(place):
            place.mkdir()
        writer = ShardWriter(place, self.outputs[file], {**described(self.entries), "format": HUGGING_FACE}, shard=1 << 62)
        try:
            self._write(file, writer)  # after which the file is not in memory any more, and the new one can be checked
            writer.close()
        finally:
            writer.abandon()
        with writing(self.work):
            os.replace(place / SINGLE, self.folder / file)
            sync(self.folder)
            shutil.rmtree(place)

    def _write(self, file: str, writer: ShardWriter) -> None:
        contents, left = read(self.source / file), dict(self.outputs[file])
        for layer in self._in(file):
            for name, tensor in self._convert(layer, contents).items():
                writer.write(name, tensor)
                del left[name]
        for name, form in left.items():
            if form.is_meta:  # not the guard
                writer.write(name, contents.tensors[name].to(form.dtype))

    def _convert(self, layer: _Layer, contents: Contents) -> dict[str, Tensor]:
        """The new tensors of one layer, by name; fills its entry and row."""
        c, scaled = layer.candidate, {part: self._tensor(key, contents) for part, key in layer.keys.items()}
        if ZERO in scaled and bool((scaled[ZERO].float() != 0).any()):
            raise damaged(layer.name, "it has zero points, and integers here are symmetric: a weight is integer · step")
        if ORDER in scaled and bool((scaled[ORDER] >= 0).any()):
            raise damaged(layer.name, "its columns are in an order of their own (weight_g_idx), which convert does not know")
        layer.row, dense = {"stored": layer.stored}, f"{layer.name}.weight"
        if layer.stored == "sparse-24-bitmask":
            foreign = bitmask(layer.name, scaled["compressed"], scaled["bitmask"], scaled["shape"], scaled.get(SCALE))
        elif layer.stored == "marlin-24":
            foreign = marlin24(layer.name, scaled["weight_packed"], scaled["scale_packed"], scaled["meta"])
        else:
            weight = scaled["weight"]
            matrix = weight if c is None else as_matrix(weight, c.layout)
            pattern = None if c is None else self._pattern(layer, matrix, scaled.get(SCALE))
            if pattern is None and weight.dtype in FLOATS:
                layer.row |= {"now": f"dense {plain(self._kept(weight))}", "error": 0.0}
                if c is None and (present := existing_pattern(weight)) is not None:
                    layer.zeros, layer.row["values"] = 1 - present.n / present.m, f"{plain(weight.dtype)} with {present} zeros"
                return {dense: weight.to(self._kept(weight))}
            foreign = masked(layer.name, matrix, pattern or Pattern(1, 1), scaled.get(SCALE))
        layer.zeros = layer.zeros or 1 - foreign.pattern.n / foreign.pattern.m
        if c is not None and foreign.shape != c.matrix_shape:
            raise damaged(layer.name, f"the files have a weight of {foreign.shape}, the model one of {c.matrix_shape}")
        if layer.reason:
            decoded = foreign.decoded(self.dtype)
            layer.row |= {"values": foreign.kind, "now": f"dense {plain(decoded.dtype)}", "error": foreign.error(decoded)}
            return {dense: decoded.dense() if c is None else as_stored(decoded.dense(), c.layout, ()).contiguous()}
        assert c is not None
        compressed = foreign.converted(self.dtype, self.exact)
        made = compressed_like(c.module, compressed, c.layout)
        check_filled(layer.name, made, {}, set())
        layer.entry = table({layer.name: made})[layer.name]
        layer.row |= {"values": foreign.kind, "now": now(compressed), "error": foreign.error(compressed)}
        return {f"{layer.name}.{part}": tensor for part, tensor in parts_of(made).items()}

    def _pattern(self, layer: _Layer, weight: Tensor, scale: Tensor | None) -> Pattern | None:
        """The pattern of a dense weight's zeros; None, and a reason, if it has none that can be used."""
        whole = weight.view(torch.int8) & 0x7F if weight.dtype in SCALED[1:] else weight
        pattern = existing_pattern(whole)
        groups = 1 if scale is None or scale.dim() != 2 else scale.shape[1]
        layer.zeros = 1 - int(torch.count_nonzero(whole)) / max(1, whole.numel())
        if pattern is None:
            where = "in no N:M pattern"
            if layer.zeros >= 0.005:
                where = f'in no pattern that is looked for ({LOOKED_FOR}); give another one: nm.recipes.adopt(model, "3:4")'
            layer.reason = f"{100 * layer.zeros:.0f} % of its weights are 0, {where}"
        elif weight.dtype in SCALED and groups > 1 and weight.shape[1] % (groups * pattern.m):
            layer.reason, pattern = f"a scale's columns are not whole groups of {pattern}", None
        return pattern

    def _tensor(self, key: str, contents: Contents | None = None) -> Tensor:
        """A tensor, which may be in another file."""
        if contents is not None and key in contents.tensors:
            return contents.tensors[key]
        return read(self.source / self.where[key]).tensors[key].clone()

    def _check_mask(self, key: str, contents: Contents) -> None:
        """apex's mask of a weight has to say where its zeros are."""
        mask, tensor = self._tensor(self.masks[key], contents), contents.tensors[key]
        if mask.shape != tensor.shape:
            raise damaged(key, f"its mask of apex has shape {tuple(mask.shape)}, and the weight {tuple(tensor.shape)}")
        if outside := int((tensor.ne(0) & mask.eq(0)).sum()):
            raise damaged(key, f"{outside} weights outside its mask of apex are not 0; multiply them: weight *= mask")

    # ---- the folder

    def assemble(self, out: Path) -> dict[str, Any]:
        """Put everything together, and rename it to ``out``; returns the report."""
        folder = self.folder
        with writing(folder):
            for path in folder.iterdir():
                if path.name not in self.outputs:  # of an earlier run that was killed here
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        left = carry_over(self.source, folder, {*self.files, INDEX})
        config = dict(self.config)
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = plain(self.dtype)
        config["quantization_config"] = config_entry(self.entries)
        facts = self._facts(left)
        with writing(folder):
            if (generation := self.source / "generation_config.json").is_file():
                shutil.copyfile(generation, folder / generation.name)
            (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            (folder / REPORT).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
            if self.files != [SINGLE]:
                files = {name: file for file, forms in self.outputs.items() for name in forms}
                index = {"metadata": {"total_size": facts["bytes"]["after"]}, "weight_map": dict(sorted(files.items()))}
                (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
            write_card(folder, self.model, self.entries)
            end_card(folder, HOW, how(facts))
            sync(folder)
            out.parent.mkdir(parents=True, exist_ok=True)
            os.replace(folder, out)
            sync(out.parent)
        return facts

    def _facts(self, left: list[str]) -> dict[str, Any]:
        rows = {name: layer.row for name, layer in self.layers.items()}
        dense = {name: layer for name, layer in self.layers.items() if layer.entry is None}
        return {
            "format": "nmkernels-convert-report-1",
            "model": self.source.resolve().name,
            "stored": self.format or "dense, with zeros",
            "exact": all(row["error"] == 0 for row in rows.values()),
            "layers": {name: row for name, row in rows.items() if name not in dense},
            # without embeddings and the like, which have no such zeros
            "left dense": {
                name: {**rows[name], "reason": layer.reason}
                for name, layer in dense.items()
                if layer.candidate is not None or layer.stored != "dense" or "values" in layer.row
            },
            "notes": self.notes,
            "dropped": self.dropped,
            "not carried over": left,
            "bytes": {
                "before": sum(t.nbytes for t in self.forms.values()),
                "after": sum(t.nbytes for forms in self.outputs.values() for t in forms.values()),
            },
            "versions": {"nmkernels": __version__, "torch": torch.__version__, "python": platform.python_version()},
        }


def _settings(folder: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """(config.json without what it says of compression, what it says); the latter may be nested, as in multimodal models."""
    stored: list[Any] = []

    def stripped(table: dict[str, Any]) -> dict[str, Any]:
        stored.extend(table[key] for key in SECTIONS if table.get(key))
        return {key: stripped(value) if isinstance(value, dict) else value for key, value in table.items() if key not in SECTIONS}

    return stripped(read_config(folder)), next(iter(stored), None)


def _format(folder: Path, stored: Any) -> tuple[str, list[str]]:
    """(the format's names, remarks) for what config.json says; the former is empty for a dense folder."""
    if stored is None:
        return "", []
    if not isinstance(stored, dict):
        raise CheckpointError(f"{folder / CONFIG} is damaged: its quantization_config is {quote(stored)}.")
    inner: dict[str, Any] = next((stored[key] for key in SECTIONS if isinstance(stored.get(key), dict)), {})
    stored = {**stored, **inner}
    sparsity, method = stored.get("sparsity_config") or {}, stored.get("quant_method")
    if method == METHOD:
        raise CheckpointError(f"{folder} is compressed by nmkernels already.")
    if method not in (None, "compressed-tensors"):
        raise CheckpointError(f"{folder} is quantised by {quote(method)}; convert reads formats of compressed-tensors and dense folders.")
    formats = [name for name in (stored.get("format"), sparsity.get("format") if isinstance(sparsity, dict) else sparsity) if name]
    unknown = next((name for name in formats if name not in FORMATS), None)
    if unknown is not None:
        raise CheckpointError(f"{folder} is stored as {quote(unknown)}, which convert does not read; it reads {', '.join(FORMATS)}.")
    groups = stored.get("config_groups")
    schemes = [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []
    notes = []
    if any(scheme.get("input_activations") or scheme.get("output_activations") for scheme in schemes):
        notes.append("activations, which the model's own library quantises too, stay in floating point")
    if stored.get("kv_cache_scheme"):
        notes.append("the cache of keys and values, which the model's own library quantises, stays in floating point")
    return " and ".join(dict.fromkeys(name for name in formats if name != "dense")) or "dense, with zeros", notes


def _dtype(config: Mapping[str, Any], tensors: Iterable[Tensor]) -> torch.dtype:
    """The model's dtype: that of config.json, else the most frequent in the files."""
    for table_ in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key in ("dtype", "torch_dtype"):
            named = getattr(torch, str(table_.get(key)).removeprefix("torch."), None)
            if named in FLOATS:
                return named
    sizes: dict[torch.dtype, int] = {}
    for t in tensors:
        if t.dtype in FLOATS:
            sizes[t.dtype] = sizes.get(t.dtype, 0) + t.nbytes
    return max(sizes, key=lambda dtype: sizes[dtype]) if sizes else torch.float32


def now(weight: Compressed) -> str:
    """What a converted weight is, in words."""
    if weight.step is None:
        return f"{weight.pattern} {plain(weight.dtype)}"
    return f"{weight.pattern} {weight.kind}, a bfloat16 step per {f'{weight.group} columns' if weight.group else 'row'}"


def by_type(facts: Mapping[str, Any]) -> list[tuple[str, int, str, str, float]]:
    """(layers whose names differ only in numbers, how many, what they were, what they are, the mean error)."""
    kinds: dict[tuple[str, str, str], list[float]] = {}
    decoded = {name: row for name, row in facts["left dense"].items() if "values" in row}
    for name, row in (*facts["layers"].items(), *decoded.items()):
        kinds.setdefault((starred(name), f"{row['stored']}, {row['values']}", row["now"]), []).append(row["error"])
    return [(name, len(errors), was, becomes, sum(errors) / len(errors)) for (name, was, becomes), errors in kinds.items()]


def how(facts: Mapping[str, Any]) -> str:
    """The section of the model card, from the facts of ``report.json``."""
    lines = [f"From {facts['model']}, which was stored as {facts['stored']}. Positions and integers are those of the file.", ""]
    lines += ["| layers | | was | is | relative error |", "| --- | --- | --- | --- | --- |"]
    lines += [f"| `{name}` | {count} | {was} | {is_} | {size_of(error)} |" for name, count, was, is_, error in by_type(facts)]
    remarks = [f"{note[0].upper()}{note[1:]}." for note in facts["notes"]]
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return "\n".join([*lines, "", *remarks, f"Each layer is in `{REPORT}`. Made with {versions}.", ""])


def size_of(error: float) -> str:
    """A relative error in words."""
    return f"{100 * error:.2g} %" if error else "exact"
