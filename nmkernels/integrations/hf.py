"""Hugging Face models: ``save_pretrained`` writes compressed models, ``from_pretrained`` loads them, or prunes dense ones while loading.

Importing this module registers the quantization method "nmkernels" with transformers, and LoRA on sparse layers with peft, if that is
installed. Nobody needs to: ``sparsify_``, ``compress_`` and ``load_compressed`` import it where transformers' models are in use, and
``nmkernels_autoload`` when a process opens a compressed folder.

A folder holds::

    config.json         quantization_config: quant_method "nmkernels", version, and layers, the table of nm.save_compressed's files
    model.safetensors   fqn.values; fqn.indices, but of dense integers; fqn.step of integers; fqn.nm_left and fqn.nm_right of an adapter;
                        fqn.columns if inputs are reordered; every other tensor as in the dense model; shards and an index if it is
                        large; the same table as metadata
    README.md           a model card that says how to load it

Where nmkernels is not installed transformers would initialise the compressed layers randomly and only log a warning. Therefore the file
also has an empty tensor under the name of the first compressed layer's dense weight, so that loading fails there with a size mismatch,
unless ``ignore_mismatched_sizes=True`` permits that.

``model.dequantize()`` gives the dense model. transformers refuses ``model.half()`` and ``model.float()`` of any model with a quantizer;
``model.to(dtype)`` works. If ``device_map`` offloads layers to disk, packed weights stay in memory unless ``offload_buffers=True``.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from .. import integrations, ops
from ..export.card import METHOD, config_entry, first_of, format_version, integers_of, is_dense, patterns_of, write_card
from ..export.plan import BUFFERS, STACKS, announce, check_filled, home_of
from ..export.safetensors import VERSION, described, table
from ..export.tensors import Layer, sparse_layers, weight_name
from ..layouts import CONV2D, as_matrix, ordered
from ..nn.compress import check_values, compressed_like, decompress_
from ..nn.compressed import LAYOUTS, CompressedLinear, CompressedPart
from ..nn.dense import dense_layout, too_large
from ..nn.experts import CompressedStack, child_name, compress_stacks_, compressed_stack
from ..nn.swap import after_swap, post_swap_hooks, replace_each_
from ..nn.weight import NMWeight
from ..ops import Compressed
from ..ops.integers import BITS, GROUPS
from ..pattern import CheckpointError, OptionError, Pattern, PatternError, PatternLike, RecipeError
from ..recipes import Report
from ..shards import place
from ..train.layer_names import check_names, skips
from ..train.report import Entry
from ..train.sparsify import LayerCandidate, check_groups, select
from .trainer import prepare

__all__ = ["NMConfig", "NMQuantizer", "mark_", "prepare"]

if int(transformers.__version__.partition(".")[0]) < 5:
    raise ImportError(f"nmkernels.integrations.hf needs transformers 5; {transformers.__version__} is installed.")


class NMConfig(QuantizationConfigMixin):
    """The N:M sparsity of a model's weights: ``quantization_config`` of ``from_pretrained`` and in ``config.json``.

    With a dense checkpoint, ``from_pretrained(folder, quantization_config=NMConfig("2:4"))`` prunes and compresses the weights that
    ``sparsify_`` would choose, one by one as they are read, by magnitude; the whole dense model is never in memory. The result equals
    ``sparsify_(model, "ste:2:4")``, ``finish`` and ``compress_``, which then takes ``values`` and ``group``. Layers that the checkpoint
    lacks stay dense.
    With a compressed checkpoint only ``keep_dense`` is used, and a pattern, values or a group other than the checkpoint's are refused.

    Args:
        pattern: ``"N:M"``; required for a dense checkpoint.
        skip: layers that stay dense: full names, parts of names between dots, or either with shell wildcards (``*``, ``?``).
        keep_dense: see ``CompressedLinear``.
        values: None for floating-point values; ``"int8"`` or ``"int4"`` for those of linear layers and experts, as ``compress_`` rounds
            them.
        group: columns that share a step, as for ``compress_``.
        layers: for a compressed checkpoint: layer name -> its entry in the table of ``save_compressed``.
        version: format version of that table.
        quant_method: always ``"nmkernels"``.

    Raises:
        PatternError: the pattern is not ``"N:M"``, or differs from the checkpoint's.
        OptionError: the values are unknown or differ from the checkpoint's, or the group fits no layer or differs.
        RecipeError: while loading, a name of ``skip`` is not a layer of the model.
        CheckpointError: the checkpoint has a newer format version.

    Example:
        >>> NMConfig("2:4", skip=["o_proj", "layers.0.*"]).pattern
        '2:4'
    """

    def __init__(
        self,
        pattern: PatternLike | None = None,
        skip: Iterable[str] = (),
        keep_dense: bool = False,
        layers: dict[str, Any] | None = None,
        version: int = VERSION,
        quant_method: str = METHOD,
        values: str | None = None,
        group: int | None = None,
    ) -> None:
        if type(version) is not int or version > VERSION:
            raise CheckpointError(f"the model was saved in format version {version}; this one reads up to {VERSION}: upgrade nmkernels.")
        self.quant_method = quant_method
        self.pattern = None if pattern is None else str(Pattern(pattern))
        self.skip = [skip] if isinstance(skip, str) else list(skip)
        self.keep_dense = keep_dense
        self.values, self.group = values, check_values("NMConfig", values, group)
        if not isinstance(layers, dict | None):
            raise CheckpointError("NMConfig: layers is not a dict; config.json is damaged.")
        self.layers = layers or {}

    def to_dict(self) -> dict[str, Any]:
        """The entry of ``config.json``: the table of a compressed model, else the options for pruning."""
        if self.layers:
            return {**config_entry(self.layers), "quant_method": self.quant_method}
        about = {"quant_method": self.quant_method, "version": format_version(bool(self.values))}
        about |= {"pattern": self.pattern, "skip": list(self.skip), "keep_dense": self.keep_dense}
        return {**about, "values": self.values, "group": self.group} if self.values else about

    def get_loading_attributes(self) -> dict[str, Any]:
        """The attributes that transformers copies from the user's config to that of a compressed checkpoint."""
        return {"pattern": self.pattern, "keep_dense": self.keep_dense, "values": self.values, "group": self.group}


class NMQuantizer(HfQuantizer):
    """transformers' quantizer for ``NMConfig``: loads, prunes, saves and decompresses a model.

    Attributes: ``report``, which layers of a dense checkpoint were pruned and why the others were not; None for a compressed checkpoint.
    """

    is_trainable = True  # by adapters
    is_compileable = True
    quantization_config: NMConfig

    def __init__(self, quantization_config: NMConfig, **keywords: Any) -> None:
        super().__init__(copy.deepcopy(quantization_config), **keywords)
        self.report: Report | None = None
        self._layers: dict[str, Any] = {}
        self._tied: dict[CompressedLinear, CompressedLinear] = {}
        self._chosen: dict[str, LayerCandidate] = {}
        self._conversions: list[Any] = []
        self._dtype: torch.dtype | None = None

    def is_serializable(self) -> bool:
        return True

    def validate_environment(self, *args: Any, **keywords: Any) -> None:
        config = self.quantization_config
        pattern, patterns, rounded = config.pattern, patterns_of(config.layers), integers_of(config.layers)
        if not self.pre_quantized and pattern is None:
            raise PatternError('NMConfig: the checkpoint is dense; pass the pattern to prune it to, NMConfig("2:4").')
        if self.pre_quantized and pattern is not None and patterns not in ([], [pattern]):
            raise PatternError(
                f"NMConfig({pattern!r}): the checkpoint is already compressed, as {', '.join(patterns)}. Leave the pattern out, or prune "
                "the checkpoint of the dense model."
            )
        if self.pre_quantized and config.values is not None and not all(map(self._agrees, config.layers.values())):
            way = "prune the checkpoint of the dense model" if rounded else "nm.compress_(model, values=...) rounds them after loading"
            raise OptionError(
                f"NMConfig(values={config.values!r}, group={config.group}): the checkpoint is already compressed, with values in "
                f"{'; '.join(rounded) or 'floating point'}. Leave values out; {way}."
            )

    def _agrees(self, about: Any) -> bool:
        """Whether a layer of the checkpoint has the values and group of the config that was passed. Convolutions have no integers, and
        up to version 7 experts had none."""
        config = self.quantization_config
        if not isinstance(about, dict) or about.get("layout") == CONV2D or is_dense(about):
            return True
        if about.get("layout") in STACKS and "values" not in about:
            return True
        group, shape = about.get("group"), about.get("shape")
        same = [0, *(shape[-1:] if isinstance(shape, list) else ())] if group == 0 else [group]
        return about.get("values") == config.values and (config.group is None or config.group in same)

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        self._dtype = dtype
        return dtype

    @property
    def quantized_element_size(self) -> float | None:
        """Bytes per element of the dense weight, for ``device_map="auto"``."""
        if self.pre_quantized or self._dtype is None:
            return None
        p = Pattern(str(self.quantization_config.pattern))
        values, group = self.quantization_config.values, self.quantization_config.group
        size = self._dtype.itemsize if values is None else BITS[values] / 8
        steps = 2 / (group or GROUPS[0]) if values == "int4" or group else 0  # about: rows are long, and groups may be smaller
        return p.n / p.m * (size + p.index_bits / 8) + steps

    # ---- loading

    def _process_model_before_weight_loading(self, model: Any, **keywords: Any) -> None:
        if getattr(model.config, "distributed_config", None) is not None:
            raise RecipeError(
                "from_pretrained: a model with compressed weights cannot be split over devices while loading. Build the dense model, split "
                "it by torch's parallelize_module, and call nm.load_compressed(model, folder)."
            )
        if self.pre_quantized:
            self._announce(model)
        else:
            self._choose(model)

    def _announce(self, model: Any) -> None:
        """Replace the layers named in the table by compressed ones without data."""
        layers, modules = self.quantization_config.layers, dict(model.named_modules(remove_duplicate=False))
        prefix, table = model.base_model_prefix, {}
        for name, about in layers.items():
            # this model may have a head that the saved one had not, or the other way round
            for own_name in (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")):
                if home_of(own_name, about)[0] in modules:  # else transformers reports its tensors
                    table[own_name] = about
                    break
        if not table:
            some = next(iter(layers), "none at all")
            raise CheckpointError(f"{type(model).__name__} has none of the compressed layers that config.json names ({some}, ...).")
        for pair in model.all_tied_weights_keys.items():  # transformers ties after loading
            names = [key.removesuffix(".weight") for key in pair]
            about = next((table[name] for name in names if is_dense(table.get(name))), None)
            one, other = (modules.get(name) for name in names)
            if about is not None and one is not None and other is not None and dense_layout(one) and dense_layout(other):
                one._parameters["weight"] = other._parameters["weight"]
                for name in names:  # the saved model may have had no head
                    table.setdefault(name, {**about, "layout": dense_layout(modules[name])})
        for (dense, _), (name, layer) in announce("config.json", modules, table, self.quantization_config.keep_dense).items():
            self._put(model, name, dense, layer)
            self._layers[name] = layer
        hand_over_ties_(model)
        self._tied = sharing(model, self._layers)
        for layer in self._tied:  # room of their own until they are tied: what is not in the file and not persistent is not missed
            layer._non_persistent_buffers_set |= {*SHARED}
            for part in (*SHARED, "indices"):
                setattr(layer, part, torch.empty_like(getattr(layer, part)))
        # the empty tensor in place of the first layer's dense weight
        key = re.escape(first_of(layers).removeprefix(f"{prefix}."))
        model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), rf"(^|\.){key}(\.weight)?$"}

    def _put(self, model: Any, name: str, dense: nn.Module, layer: Any) -> None:
        if isinstance(layer, CompressedStack):
            home, _, key = name.rpartition(".")
            compress_stacks_(dense, {key: layer})
            around = model.get_submodule(home.rpartition(".")[0])
            if not (around._parameters or around._buffers):  # Qwen3-Omni's would initialise the dense stacks
                around._is_hf_initialized = True
        else:
            replace_each_(model, {dense: layer})

    def _choose(self, model: Any) -> None:
        """Choose the layers of the dense checkpoint to prune."""
        config = self.quantization_config
        pattern = Pattern(str(config.pattern))
        chosen, report = select(model, pattern)
        known = [*dict(model.named_modules()), *(e.name for e in report.entries)]
        check_names("NMConfig: skip", config.skip, known, skips)
        tied = {key.removesuffix(".weight") for pair in model.all_tied_weights_keys.items() for key in pair}
        taken = {c.name: c for c in chosen if c.layout in (*LAYOUTS, *STACKS)}
        self._chosen = {}
        for i, e in enumerate(report.entries):
            reason = "its weight is tied to another module" if e.linear and e.name in tied else ""
            if e.sparse and not reason:
                reason = "" if e.name in taken else "it has no compressed form"
                reason = "named in skip" if any(skips(e.name, name) for name in config.skip) else reason
            if reason:
                report.entries[i] = Entry(e.name, e.kind, e.shape, False, reason)
            elif e.sparse:
                c = taken[e.name]
                self._chosen[c.name if c.layout in STACKS else f"{c.name}.weight"] = c
        self.report = report
        if not self._chosen:
            raise RecipeError(f"NMConfig: no layer of {type(model).__name__} can be made {pattern} sparse:\n{report}")
        if config.values is not None:
            check_groups("NMConfig", config.values, config.group, pattern, self._chosen.values())

    def get_weight_conversions(self) -> list[Any]:
        from transformers.core_model_loading import WeightRenaming

        # a file of save_compressed up to version 5 next to a config.json
        stacks = {".".join(name.split(".")[-2:]) for name, layer in self._layers.items() if isinstance(layer, CompressedStack)}
        names = [(r"\.weight", ""), *((re.escape(f".{name}"), f".{child_name(name)}") for name in sorted(stacks))] if self._layers else []
        self._conversions = [WeightRenaming(rf"{old}\.({'|'.join(BUFFERS)})$", rf"{new}.\1") for old, new in names]
        return self._conversions

    def param_needs_quantization(self, model: Any, param_name: str, **keywords: Any) -> bool:
        return param_name in self._chosen

    def get_quantize_ops(self) -> Any:
        return self  # for its ``convert``

    @torch.no_grad()
    def convert(self, tensors: dict[str, Any], model: Any = None, missing_keys: Any = None, **keywords: Any) -> dict[str, Any]:
        """Prune and compress dense weights as they are read, and replace their layers."""
        config, rest = self.quantization_config, {}
        for key, value in tensors.items():
            if key not in self._chosen:
                rest[key] = value
                continue
            c, weight = self._chosen[key], value[0] if isinstance(value, list) else value
            dense = c.module._parameters[c.key]
            assert dense is not None
            if weight.shape != dense.shape:
                raise CheckpointError(f"{key!r} has shape {tuple(weight.shape)} in the file, {tuple(dense.shape)} in the model.")
            if not bool(torch.isfinite(weight).all()):
                raise CheckpointError(f"{key!r} has NaN or infinite values and cannot be pruned by magnitude.")
            stored, pattern = weight.to(dense.dtype), str(config.pattern)
            layer: Layer
            if c.layout in STACKS:
                layer = compressed_stack(stored, c.layout, pattern, config.keep_dense, config.values, config.group)
            else:
                packed = ops.compress(as_matrix(ordered(stored, c.layout), c.layout), pattern)
                if config.values is not None and c.layout != CONV2D:
                    packed = ops.quantize_values(packed, config.values, config.group)
                layer = compressed_like(c.module, packed, c.layout, config.keep_dense)
            if config.values is not None and (problem := too_large(stored, config.values, layer.dense)):
                raise CheckpointError(f"{key!r} has {problem}.")
            self._put(model, c.name, c.module, layer)
            self._layers[c.name] = layer
            missing_keys.discard(key)
        return rest

    def _process_model_after_weight_loading(self, model: Any, **keywords: Any) -> Any:
        for layer, first in self._tied.items():
            if first.values.is_meta:
                raise CheckpointError(
                    "from_pretrained: an output head shares the integers of an embedding that device_map offloads. Leave out "
                    "offload_buffers=True, which keeps packed weights in memory."
                )
            layer._non_persistent_buffers_set -= {*SHARED}
            for part in (*SHARED, "indices"):
                setattr(layer, part, getattr(first, part))
        for name, layer in self._layers.items():
            check_filled(name, layer, *_filled(layer, self.pre_quantized and layer not in self._tied))
        # save_pretrained must not write the names of save_compressed
        model._weight_conversions = [c for c in model._weight_conversions if c not in self._conversions]
        model.__dict__.pop("_keys_to_ignore_on_load_unexpected", None)
        self._layers, self._tied, self._chosen, self._conversions = {}, {}, {}, []
        after_swap(model)
        return model

    # ---- saving

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor] | None, dict[str, str]]:
        if getattr(model, "_hf_peft_config_loaded", False):
            return None, {}  # peft saves the adapters only
        layers = compressed_layers(model)
        if any(isinstance(layer, CompressedPart) for layer in layers.values()):
            raise RecipeError(
                "save_pretrained: tensor parallelism has split the compressed layers. nm.save_compressed, called on every rank, writes "
                "them to one file, which from_pretrained reads as model.safetensors next to a config.json."
            )
        self.quantization_config.layers = about = table(layers)
        model.config.quantization_config = self.quantization_config
        state, first = model.state_dict(), first_of(about)
        shared = sharing(model, layers)
        for name, layer in layers.items():
            for part in SHARED if layer in shared else ():
                state.pop(f"{name}.{part}", None)
        state[weight_name(first, layers[first])] = torch.empty(0)
        return state, described(about)

    # ---- back to dense

    def _dequantize(self, model: Any, dtype: Any = None) -> Any:
        decompress_(model)
        if dtype is not None and dtype != model.config.dtype:  # the base class passes config.dtype if the user passes none
            model.to(dtype)
        # the base class deletes these attributes, and fails if they are missing
        model.hf_quantizer, model.quantization_method = self, METHOD
        return model


def compressed_layers(model: nn.Module) -> dict[str, Layer]:
    """Every compressed layer of ``model`` by name; a shared layer has several names, a stack of experts that of its Parameter."""
    if not [m for m in model.modules() if isinstance(m, (CompressedLinear, CompressedStack))]:
        return {}  # names take longer
    return {name: layer for name, layer in sparse_layers(model).items() if not isinstance(layer, NMWeight)}


SHARED = ("values", "step")
"""The buffers that an embedding and an output head share if their weights were tied and became integers."""


def sharing(model: Any, layers: Mapping[str, Layer]) -> dict[CompressedLinear, CompressedLinear]:
    """Those of ``layers`` that share the integers of another one → that one, whose name files have: the source of transformers' tie."""
    _, targets = model.__dict__.get(KEPT, (None, {}))
    names, first = sorted(layers, key=lambda name: f"{name}.weight" in targets), dict[object, CompressedLinear]()
    single = dict.fromkeys(layer for name in names if isinstance(layer := layers[name], CompressedLinear))
    return {layer: one for layer in single if (one := first.setdefault(_memory(layer.values), layer)) is not layer}


def _memory(values: Tensor) -> object:
    """A key that is equal for two tensors that are the same memory."""
    return id(values) if values.is_meta or not values.numel() else place(values)


def hand_over_ties_(part: Any) -> None:
    """Leave out of what transformers ties the weights of layers with integers, which share them already; put back those of layers that are
    dense again."""
    if KEPT in part.__dict__:
        part._tied_weights_keys, part.all_tied_weights_keys = part.__dict__.pop(KEPT)
    pairs = getattr(part, "all_tied_weights_keys", None) or {}
    modules = dict(part.named_modules(remove_duplicate=False)) if pairs else {}
    ours = {key for pair in pairs.items() for key in pair if isinstance(modules.get(key.removesuffix(".weight")), CompressedLinear)}
    if ours:
        part.__dict__[KEPT] = part._tied_weights_keys, pairs
        part._tied_weights_keys = {target: source for target, source in pairs.items() if not {target, source} & ours}
        part.all_tied_weights_keys = dict(part._tied_weights_keys)


KEPT = "_nm_tied_weights_keys"
"""The attribute of a model in which its ties are kept as they were."""


def mark_(model: nn.Module) -> None:
    """Set or remove the quantizer of every Hugging Face model in ``model``, so that ``save_pretrained`` writes compressed layers.

    ``compress_``, ``densify_`` and ``load_compressed`` call it; call it yourself after you have inserted a ``CompressedLinear`` by hand.
    A model that is marked gets a config of its own, since others may have been built from the same object.
    """
    for part in _outermost(model):
        headless = part.base_model is part and not part.can_generate()
        if compressed_layers(part) and not (part is model and headless):  # else a model around it, which is saved, may have the same one
            _own_config_(part, model)
    for part in reversed(list(model.modules())):  # the outermost model last: inner ones share its config
        if not isinstance(part, PreTrainedModel):
            continue
        layers, present = compressed_layers(part), getattr(part, "hf_quantizer", None)
        hand_over_ties_(part)
        if present is not None and not isinstance(present, NMQuantizer):
            if layers:
                warnings.warn(
                    f"{type(part).__name__} has compressed layers and the quantizer {type(present).__name__}, which does not know them: "
                    "save_pretrained will write a folder that cannot be loaded. Use nm.save_compressed.",
                    stacklevel=3,
                )
        elif layers:
            config = present.quantization_config if present is not None else NMConfig()
            config.layers = table(layers)
            part.hf_quantizer = present or NMQuantizer(config, pre_quantized=True)
            part.is_quantized, part.quantization_method = True, METHOD
            part.config.quantization_config, part.config._is_quantized = part.hf_quantizer.quantization_config, True
            part.add_model_tags([METHOD])
            part.save_pretrained = partial(_save_pretrained, part)
            part._upload_modified_files = partial(_upload, part)
        elif present is not None:
            present.remove_quantization_config(part)
            part.config._is_quantized = False
            part.model_tags = [tag for tag in part.model_tags or () if tag != METHOD]
            for name in ("save_pretrained", "_upload_modified_files"):
                part.__dict__.pop(name, None)


def _outermost(module: nn.Module) -> Iterator[Any]:
    """The Hugging Face models in ``module`` that are not parts of others there."""
    if isinstance(module, PreTrainedModel):
        yield module
    else:
        for child in module.children():
            yield from _outermost(child)


def _own_config_(part: Any, model: nn.Module) -> None:
    """Copy the config of ``part``, with those inside it, for all modules of ``model`` that hold it; not if it has a quantizer already."""
    if getattr(part, "hf_quantizer", None) is not None:
        return
    copies: dict[int, Any] = {}
    copy.deepcopy(part.config, copies)
    for module in model.modules():
        for name, value in module.__dict__.items():
            if isinstance(value, transformers.PretrainedConfig) and id(value) in copies:
                module.__dict__[name] = copies[id(value)]


def _save_pretrained(model: Any, save_directory: Any, *args: Any, **keywords: Any) -> Any:
    """transformers' ``save_pretrained`` under the model's own tensor names, and the model card."""
    if len(args) < 8:  # programs that need the names of older checkpoints cannot read compressed weights
        keywords.setdefault("save_original_format", False)
    done = type(model).save_pretrained(model, save_directory, *args, **keywords)
    main = args[0] if args else keywords.get("is_main_process", True)
    if main and not getattr(model, "_hf_peft_config_loaded", False) and Path(save_directory).is_dir():
        write_card(save_directory, model, model.config.quantization_config.layers)
    return done


def _upload(model: Any, working_dir: Any, *args: Any, **keywords: Any) -> Any:
    """Called by both upload paths of transformers, just after it has written its own card."""
    write_card(working_dir, model, model.config.quantization_config.layers)
    return type(model)._upload_modified_files(model, working_dir, *args, **keywords)


def _filled(layer: nn.Module, read: bool) -> tuple[dict[str, Tensor], set[str]]:
    """(offloaded indices, steps and columns, which accelerate puts into ``layer`` while it runs; names of tensors that no file held)."""
    hook = getattr(layer, "_hf_hook", None)
    maps = [weights for h in getattr(hook, "hooks", (hook,)) if (weights := getattr(h, "weights_map", None)) is not None]
    names = {key.rpartition(".")[2] for weights in maps for key in weights}  # the maps iterate over full names
    offloaded, missing = {}, set()
    for name, tensor in layer.state_dict(keep_vars=True).items():
        if name == "bias":
            continue  # transformers initialises and reports it
        if tensor.is_meta and name in names:
            if name in ("indices", "step", "columns"):
                offloaded[name] = maps[0][name]
        elif tensor.is_meta or (read and not getattr(tensor, "_is_hf_initialized", False)):
            missing.add(name)
    return offloaded, missing


def install() -> None:
    """Register with transformers, and with peft where it is installed. Called at the end of this file; a second call does nothing."""
    if auto.AUTO_QUANTIZER_MAPPING.get(METHOD) is not NMQuantizer:
        # when transformers initialises a model, it skips modules with this attribute
        for kind in (CompressedLinear, Compressed):
            setattr(kind, "_is_hf_initialized", True)  # noqa: B010
        auto.AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = NMConfig  # for the class that nmkernels_autoload puts there
        auto.AUTO_QUANTIZER_MAPPING[METHOD] = NMQuantizer
        # from_pretrained uses get_loading_attributes of these types
        auto.LOADING_ATTRIBUTES_CONFIG_TYPES += (NMConfig,)
        post_swap_hooks.append(mark_)
        if find_spec("peft") is not None:  # transformers imports it when it loads an adapter
            integrations.install("peft")


install()
