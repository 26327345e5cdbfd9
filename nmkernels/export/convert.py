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
from ..layouts import CONV1D, LINEAR, MATRICES, as_matrix
from ..nn.compress import compressed_like
from ..nn.compressed import CompressedLinear
from ..ops import Compressed
from ..ops.check import FLOATS
from ..pattern import CheckpointError, Pattern
from ..recipes.existing import existing_pattern
from ..train.report import starred
from ..train.sparsify import TIED, LayerCandidate, candidates
from .card import CARD, METHOD, config_entry, write_card
from .folders import CONFIG, REPORT, carry_over, check_out, check_weights, parts_of, read_config
from .foreign import SCALED, Foreign, bitmask, damaged, keeps_steps, marlin24, masked
from .plan import announce, check_filled
from .safetensors import HUGGING_FACE, described, table
from .stream import ShardWriter
from .tensors import INDEX, SINGLE, Contents, quote, read, weight_files

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
RUN, LOCK, DONE = "run.json", ".lock", ".done.json"
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
        CheckpointError: the folder is damaged, has another format, or no layer with N:M zeros. ``out`` is then as it was.
    """
    source, out = Path(model_dir), Path(out)
    check_out(source, out)
    work = work_folder(out)
    with _owned(work):
        check_out(source, out)  # another run may have finished meanwhile
        run = _Run(source, work, model, exact, progress or (lambda done, total, what: None), work / out.name)
        run.plan()
        run.resume()
        for number, file in enumerate(run.files):
            run.say(number, len(run.files), f"converting {file}")
            run.convert(file)
        run.say(len(run.files), len(run.files), "converting done")
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
        if not any(work.glob(f"*{DONE}")):
            shutil.rmtree(work, ignore_errors=True)
        else:
            (work / LOCK).unlink(missing_ok=True)
        os.close(lock)


@dataclass(eq=False)
class _Layer:
    """A weight to convert: how it is stored, the names of its tensors by part, and the module that it is for; else it becomes dense, for
    a ``reason``."""

    name: str
    stored: str
    keys: dict[str, str]
    candidate: LayerCandidate | None = None
    reason: str = ""
    pattern: Pattern | None = None
    becomes: CompressedLinear | None = None  # without data

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
    about: dict[str, Tensor] = field(default_factory=dict)  # and its shape and dtype
    layers: dict[str, _Layer] = field(default_factory=dict)
    masks: dict[str, str] = field(default_factory=dict)  # of apex: tensor -> its mask
    outputs: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # file -> what is written to it
    dropped: list[str] = field(default_factory=list)

    # ---- what there is, and what becomes of it

    def plan(self) -> None:
        """Find the layers and their form in the headers of all files, and in the zeros of dense weights."""
        self.config, stored = _settings(self.source)
        self.format, self.notes = _format(self.source, stored)
        self.files = check_weights(self.source)
        able = {c.name: c for c in candidates(self.model, Pattern("1:1"), None) if c.linear and c.layout in MATRICES}
        tied = {key.removesuffix(".weight") for pair in getattr(self.model, "all_tied_weights_keys", {}).items() for key in pair}
        for file in self.files:
            for key, tensor in read(self.source / file).tensors.items():
                if key in self.where:
                    raise CheckpointError(f"{self.source} has {quote(key)} twice, in {self.where[key]} and in {file}; download it again.")
                self.where[key], self.about[key] = file, tensor.to("meta")
        self.dtype = _dtype(self.config, self.about.values())
        self.model.to(self.dtype)
        self._find()
        for number, file in enumerate(self.files):
            self.say(number, len(self.files), f"reading {file}")
            contents = read(self.source / file)
            for layer in self.layers.values():
                if self.where[layer.home] == file:
                    self._choose(layer, able, tied, contents)
        chosen = {name: layer.becomes for name, layer in self.layers.items() if layer.becomes is not None}
        if not chosen:
            raise CheckpointError(f"{self.source} has no layer with N:M zeros{self._why()}; python -m nmkernels prune makes them.")
        self.entries = table(chosen)
        announce(self.source, dict(self.model.named_modules(remove_duplicate=False)), self.entries)
        if self.exact and any(c.dtype != self.dtype for c in chosen.values()):
            self.dtype = torch.float32
            for about in self.entries.values():
                about["dtype"] = "float32"
        self._place(chosen)

    def _find(self) -> None:
        """All layers, by name, and what is left out."""
        keys = self.about
        for key, t in keys.items():
            stem, _, end = key.rpartition(".")
            apex = APEX.search(key)
            if apex is not None:
                weight = f"{key[: apex.start()]}.{apex[1]}".removeprefix(".")
                if apex[2] == "mask":
                    self.masks[weight] = key
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
        parts = [*parts, *(part for part in (SCALE, ZERO, ORDER) if self.format and f"{name}.{part}" in self.about)]
        self.layers[name] = _Layer(name, stored, {part: f"{name}.{part}" for part in parts})
        for key in self.layers[name].keys.values():
            if key not in self.about:
                raise damaged(name, f"the files lack its {key.rpartition('.')[2]}; download the folder again")

    def _choose(self, layer: _Layer, able: Mapping[str, LayerCandidate], tied: set[str], contents: Contents) -> None:
        """The module that ``layer`` is for, and what it becomes, or why it stays dense."""
        c, dense = able.get(layer.name), layer.stored == "dense"
        rows, cols, bits, steps = self._sizes(layer)
        if c is None:
            layer.reason = f"{type(self.model).__name__} has no linear layer of that name"
        elif layer.name in tied:
            layer.reason = TIED
        else:
            layer.reason = c.impossible
        if not layer.reason and c is not None:
            if dense and c.layout == CONV1D:
                rows, cols = cols, rows
            if c.matrix_shape != (rows, cols):
                raise damaged(layer.name, f"the files have a weight of {(rows, cols)}, the model one of {c.matrix_shape}")
            layer.candidate, layer.pattern = c, Pattern("2:4")
            if dense:
                weight = self._matrix(layer, contents)
                layer.pattern = existing_pattern(weight if weight.dtype not in SCALED[1:] else weight.view(torch.int8) & 0x7F)
                if layer.pattern is None:
                    layer.reason = f"{100 * float(weight.float().eq(0).double().mean()):.0f} % of its weights are 0, in no N:M pattern"
                elif steps > 1 and cols % (steps * layer.pattern.m):
                    layer.reason = f"groups of {cols // steps} columns are not whole groups of {layer.pattern}"
        if layer.reason:
            layer.pattern = None
            return
        assert c is not None and layer.pattern is not None
        kind = self.about[layer.home].dtype if layer.stored != "marlin-24" else torch.int8
        if kind not in (*FLOATS, *SCALED):
            raise damaged(layer.name, f"its values are {kind}; floating point, int8 and float8 are known")
        floats = self.exact and bits and not keeps_steps(self._tensor(layer.keys[_scale_of(layer)], contents))
        if kind in SCALED and (floats or not bits):
            kind, bits = torch.float32 if self.exact else self.dtype, 0
        p = layer.pattern
        width = p.kept(cols) if bits != 4 else -(-p.kept(cols) // 2)
        values = torch.empty(rows, width, dtype=(torch.uint8 if bits == 4 else torch.int8) if bits else kind, device="meta")
        indices = torch.empty(rows, p.index_bytes(cols), dtype=torch.uint8, device="meta")
        step = torch.empty(rows, steps, dtype=torch.bfloat16, device="meta") if bits else None
        layer.becomes = compressed_like(c.module, Compressed(values, indices, p, (rows, cols), step), c.layout)

    def _sizes(self, layer: _Layer) -> tuple[int, int, int, int]:
        """(rows, columns, bits of integers or 0, steps of a row), from the headers; what does not fit is found when it is read."""
        home = self.about[layer.home]
        if layer.stored == "marlin-24":
            scale = self.about[layer.keys["scale_packed"]]
            if home.dim() != 2 or scale.dim() != 2 or not scale.shape[1]:
                raise damaged(layer.name, f"its weight_packed has shape {tuple(home.shape)}, its scale_packed {tuple(scale.shape)}")
            return scale.shape[1], 32 * home.shape[0], max(4, 2 * home.shape[1] // scale.shape[1]), scale.shape[0]
        if home.dim() != 2:
            raise damaged(layer.name, f"its {layer.home.rpartition('.')[2]} has shape {tuple(home.shape)}, which is no matrix")
        rows, cols = home.shape[0], home.shape[1] * (2 if layer.stored == "sparse-24-bitmask" else 1)
        scaled = self.about[layer.keys[SCALE]] if SCALE in layer.keys else None
        steps = scaled.shape[1] if scaled is not None and scaled.dim() == 2 and scaled.shape[0] == rows else 1
        return rows, cols, 8 if home.dtype == torch.int8 else 0, max(1, steps)

    def _place(self, chosen: Mapping[str, CompressedLinear]) -> None:
        """What is written, by file."""
        self.outputs = {file: {} for file in self.files}
        used = {key for layer in self.layers.values() for key in layer.keys.values()} | set(self.dropped)
        homes = {layer.home: layer for layer in self.layers.values()}
        for key, t in self.about.items():
            to = self.outputs[self.where[key]]
            if key in homes and (layer := homes[key]).becomes is not None:
                to |= {f"{layer.name}.{part}": tensor for part, tensor in parts_of(layer.becomes).items()}
            elif key in homes:
                layer = homes[key]
                rows, cols, _, _ = self._sizes(layer)
                scaled = layer.stored == "marlin-24" or t.dtype in SCALED
                dtype = torch.float32 if self.exact and (scaled or t.dtype in FLOATS) and self.dtype == torch.float32 else t.dtype
                to[f"{layer.name}.weight"] = torch.empty(rows, cols, dtype=self.dtype if scaled else dtype, device="meta")
            elif key not in used:
                to[key] = t.to(self._kept_dtype(t))
        guard = f"{min(chosen)}.weight"
        first = next(file for file in self.files if self.outputs[file])
        self.outputs[first] = {guard: torch.empty(0), **self.outputs[first]}
        self.files = [file for file in self.files if self.outputs[file]]

    def _kept_dtype(self, t: Tensor) -> torch.dtype:
        return torch.float32 if self.exact and self.dtype == torch.float32 and t.dtype in (torch.float16, torch.bfloat16) else t.dtype

    def _why(self) -> str:
        reasons = [f"{layer.name}: {layer.reason}" for layer in self.layers.values() if layer.candidate or layer.reason]
        return f" ({reasons[0]})" if reasons else ""

    # ---- reading and writing one file

    def resume(self) -> None:
        """Keep the finished files of an earlier run of the same folder, and delete those of another."""
        sizes = {file: [(stat := (self.source / file).stat()).st_size, stat.st_mtime_ns] for file in weight_files(self.source)}
        run = {"format": "nmkernels-convert-1", "version": __version__, "exact": self.exact, "config": self.config, "files": sizes}
        run = json.loads(json.dumps({**run, "source": str(self.source.resolve()), "layers": self.entries}))
        before = None
        with suppress(OSError, ValueError):
            before = json.loads((self.work / RUN).read_bytes())
        with writing(self.work):
            if before != run:
                for path in self.work.iterdir():
                    if path.name != LOCK:
                        shutil.rmtree(path) if path.is_dir() else path.unlink()
                atomic_write(self.work / RUN, lambda temporary: temporary.write_text(json.dumps(run)))
            for path in self.work.iterdir():
                if path.is_dir() and path != self.folder:  # what a kill left
                    shutil.rmtree(path)
            self.folder.mkdir(exist_ok=True)

    def convert(self, file: str) -> None:
        """Write the tensors of one file, unless an earlier run has."""
        done = self.work / f"{file}{DONE}"
        if done.exists() and (self.folder / file).exists():
            return
        place = self.work / "writing"
        with writing(place):
            place.mkdir()
        contents = read(self.source / file)
        tensors = self.outputs[file]
        writer = ShardWriter(place, tensors, {**described(self.entries), "format": HUGGING_FACE}, shard=1 << 62)
        rows = {}
        try:
            for layer in self.layers.values():
                if self.where[layer.home] == file:
                    rows[layer.name] = self._convert(layer, contents, writer)
            written = {f"{layer.name}.weight" for layer in self.layers.values()}
            for name in tensors:
                if name in self.where and name not in written:
                    tensor = contents.tensors[name]
                    self._check_mask(name, tensor, contents)
                    writer.write(name, tensor.to(self._kept_dtype(tensor)))
            writer.close()
        finally:
            writer.abandon()
        with writing(self.work):
            os.replace(place / SINGLE, self.folder / file)
            sync(self.folder)
            shutil.rmtree(place)
        atomic_write(done, lambda temporary: temporary.write_text(json.dumps(rows)))

    def _convert(self, layer: _Layer, contents: Contents, writer: ShardWriter) -> dict[str, Any]:
        """Write one layer; returns its row of the report."""
        foreign = self._foreign(layer, contents)
        row: dict[str, Any] = {"stored": layer.stored}
        if layer.becomes is None:
            key, dense = f"{layer.name}.weight", self.outputs[self.where[layer.home]][f"{layer.name}.weight"]
            if foreign is None:
                tensor = contents.tensors[layer.home]
                self._check_mask(key, tensor, contents)
                writer.write(key, tensor.to(dense.dtype))
                return {**row, "now": f"dense {_word(dense.dtype)}", "error": 0.0}
            writer.write(key, foreign.dense(dense.dtype).to(dense.dtype))
            values = foreign.values if foreign.scale is None else foreign.floats(dense.dtype)
            error = foreign.error(Compressed(values, foreign.indices, foreign.pattern, foreign.shape))
            return {**row, "values": foreign.kind, "now": f"dense {_word(dense.dtype)}", "error": error}
        assert foreign is not None and layer.candidate is not None
        weight = foreign.converted(self.dtype, self.exact)
        made = compressed_like(layer.candidate.module, weight, layer.candidate.layout)
        check_filled(layer.name, made, {}, set())
        for part, tensor in parts_of(made).items():
            writer.write(f"{layer.name}.{part}", tensor)
        return {**row, "values": foreign.kind, "now": now(weight), "error": foreign.error(weight)}

    def _foreign(self, layer: _Layer, contents: Contents) -> Foreign | None:
        """The weight as it is stored; None for a dense one of floating-point numbers that stays so."""
        tensors = {part: self._tensor(key, contents) for part, key in layer.keys.items() if part != "weight"}
        self._check_symmetric(layer, tensors)
        if layer.stored == "sparse-24-bitmask":
            compressed, mask, shape = (tensors[part] for part in BITMASK)
            return bitmask(layer.name, compressed, mask, shape, tensors.get(SCALE))
        if layer.stored == "marlin-24":
            return marlin24(layer.name, *(tensors[part] for part in MARLIN))
        weight = self._matrix(layer, contents)
        if layer.pattern is None and weight.dtype not in SCALED:
            return None
        self._check_mask(layer.home, contents.tensors[layer.home], contents)
        return masked(layer.name, weight, layer.pattern or Pattern(1, 1), tensors.get(SCALE))

    def _matrix(self, layer: _Layer, contents: Contents) -> Tensor:
        return as_matrix(contents.tensors[layer.home], CONV1D if layer.candidate and layer.candidate.layout == CONV1D else LINEAR)

    def _tensor(self, key: str, contents: Contents) -> Tensor:
        """A tensor, which may be in another file."""
        return contents.tensors[key] if key in contents.tensors else read(self.source / self.where[key]).tensors[key].clone()

    def _check_symmetric(self, layer: _Layer, tensors: Mapping[str, Tensor]) -> None:
        if ZERO in tensors and bool((tensors[ZERO].float() != 0).any()):
            raise damaged(layer.name, "it has zero points, and integers here are symmetric: a weight is integer · step")
        if ORDER in tensors and bool((tensors[ORDER] >= 0).any()):
            raise damaged(layer.name, "its columns are in an order of their own (weight_g_idx), which convert does not know")

    def _check_mask(self, key: str, tensor: Tensor, contents: Contents) -> None:
        """apex's mask of a weight, if there is one, has to say where its zeros are."""
        if key in self.masks:
            mask = self._tensor(self.masks[key], contents)
            if mask.shape != tensor.shape:
                raise damaged(key, f"its mask of apex has shape {tuple(mask.shape)}, and the weight {tuple(tensor.shape)}")
            if outside := int((tensor.ne(0) & mask.eq(0)).sum()):
                raise damaged(key, f"{outside} weights outside its mask of apex are not 0; multiply them: weight *= mask")

    # ---- the folder

    def assemble(self, out: Path) -> dict[str, Any]:
        """Put everything together, and rename it to ``out``; returns the report."""
        rows: dict[str, Any] = {}
        for file in self.files:
            rows |= json.loads((self.work / f"{file}{DONE}").read_bytes())
        folder = self.folder
        with writing(folder):
            for path in folder.iterdir():
                if path.name not in self.files:  # of an earlier run that was killed here
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        left = carry_over(self.source, folder, {*weight_files(self.source), INDEX})
        config, kind = dict(self.config), type(self.model).__name__
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = _word(self.dtype)
        config["quantization_config"] = config_entry(self.entries)
        facts = self._facts(rows, left)
        with writing(folder):
            if (generation := self.source / "generation_config.json").is_file():
                shutil.copyfile(generation, folder / generation.name)
            (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            (folder / REPORT).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
            if self.files != [SINGLE]:
                index = {"metadata": {"total_size": facts["bytes"]["after"]}, "weight_map": self._map()}
                (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
            write_card(folder, kind, self.entries)
            card = (folder / CARD).read_text(encoding="utf-8").partition(HOW)[0].rstrip()
            (folder / CARD).write_text(f"{card}\n\n{HOW}\n\n{how(facts)}", encoding="utf-8")
            sync(folder)
            out.parent.mkdir(parents=True, exist_ok=True)
            os.replace(folder, out)
            sync(out.parent)
        for path in self.work.glob(f"*{DONE}"):
            path.unlink()
        return facts

    def _map(self) -> dict[str, str]:
        return dict(sorted((name, file) for file in self.files for name in self.outputs[file]))

    def _facts(self, rows: dict[str, Any], left: list[str]) -> dict[str, Any]:
        layers = {name: rows[name] for name in self.layers if self.layers[name].becomes is not None}
        return {
            "format": "nmkernels-convert-report-1",
            "model": self.source.resolve().name,
            "stored": self.format or "dense, with zeros",
            "exact": all(row["error"] == 0 for row in rows.values()),
            "layers": layers,
            "left dense": {
                name: {**rows[name], "reason": layer.reason}
                for name, layer in self.layers.items()
                if layer.becomes is None and (layer.candidate is not None or layer.stored != "dense" or rows[name]["error"])
            },
            "notes": self.notes,
            "dropped": self.dropped,
            "not carried over": left,
            "bytes": {
                "before": sum(t.nbytes for t in self.about.values()),
                "after": sum(t.nbytes for file in self.files for t in self.outputs[file].values()),
            },
            "versions": {"nmkernels": __version__, "torch": torch.__version__, "python": platform.python_version()},
        }


def _scale_of(layer: _Layer) -> str:
    return "scale_packed" if layer.stored == "marlin-24" else SCALE


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


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def now(weight: Compressed) -> str:
    """What a converted weight is, in words."""
    if weight.step is None:
        return f"{weight.pattern} {_word(weight.dtype)}"
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
