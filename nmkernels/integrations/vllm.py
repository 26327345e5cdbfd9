"""A vLLM plug-in that serves compressed folders as they are. Experimental: no GPU has measured it yet. For vllm 0.33.

vLLM imports it through the entry point ``nmkernels`` of the group ``vllm.general_plugins`` in each of its processes and calls ``register``;
``quant_method`` in ``config.json`` selects it. vLLM's own layers load, fuse and split the tensors, which have one row per output:
``values``, ``indices`` and ``step`` of q, k and v follow each other, tensor parallelism takes rows, or of split columns a range of bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.parameter import BasevLLMParameter, ChannelQuantScaleParameter, ModelWeightParameter

from .. import ops
from ..export.card import METHOD
from ..export.safetensors import VERSION
from ..layouts import LINEAR
from ..pattern import CheckpointError, NMError, Pattern, ShapeError

OTHERWISE = "Serve the dense weights with zeros (nm.densify_, save_pretrained) instead."


class NMConfig(QuantizationConfig):
    """The table of a folder's compressed layers.

    Raises:
        CheckpointError: the folder has a newer format version, or something that the plug-in does not serve: experts, convolutions, layers
            stored (in, out), integers of embeddings, heads and dense layers, adapters, reordered inputs.
    """

    def __init__(self, layers: dict[str, dict[str, Any]]) -> None:
        super().__init__()
        self.layers = layers

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> NMConfig:
        """The config of ``quantization_config`` in ``config.json``."""
        version, layers = config.get("version"), config.get("layers")
        if type(version) is not int or version > VERSION:
            raise CheckpointError(
                f"vLLM: the folder was saved in format version {version}; this one reads up to {VERSION}: upgrade nmkernels."
            )
        if not isinstance(layers, dict) or not layers:
            raise CheckpointError("vLLM: config.json names no compressed layers; the folder is dense or damaged.")
        for name, about in layers.items():
            if reason := _unserved(about):
                raise CheckpointError(f"vLLM: layer {name!r} {reason}, which the plug-in does not serve. {OTHERWISE}")
        return cls(layers)

    def get_name(self) -> Any:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 75

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Rename the layers as vLLM renames the model's modules."""
        self.layers = hf_to_vllm_mapper.apply_dict(self.layers)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """How ``layer`` multiplies: None or vLLM's own method for layers that are dense in the folder."""
        if not isinstance(layer, LinearBase):
            inside = [name for name in self.layers if name == prefix or (prefix and name.startswith(f"{prefix}."))]
            if inside:
                raise CheckpointError(
                    f"vLLM: {prefix!r} is a {type(layer).__name__}, and of those {inside[0]!r} may not be compressed. {OTHERWISE}"
                )
            return None
        home, _, last = prefix.rpartition(".")
        names = [f"{home}.{part}" if home else part for part in self.packed_modules_mapping.get(last, [last])]
        entries = {name: self.layers.get(name) for name in names}
        if not any(entries.values()):
            return UnquantizedLinearMethod()
        forms = {name: "dense" if about is None else _form(about) for name, about in entries.items()}
        if len(set(forms.values())) > 1:
            listed = "; ".join(f"{name}: {form}" for name, form in forms.items())
            raise CheckpointError(
                f"vLLM: {prefix!r} is one layer there, and its parts are stored differently ({listed}). Compress all alike."
            )
        return NMLinearMethod(names, next(about for about in entries.values() if about))


@register_weight_loader_v2_supported_method
class NMLinearMethod(LinearMethodBase):
    """The product with a compressed weight, in vLLM's linear layers: ``names`` are the parts that are fused there, all as in ``about``."""

    def __init__(self, names: list[str], about: dict[str, Any]) -> None:
        self.names, self.shape = names, tuple(about["shape"])
        self.pattern, self.values, self.group = Pattern(about["pattern"]), about.get("values"), about.get("group") or 0

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register ``values``, ``indices`` and ``step`` of this rank's part, and the guard ``weight``, which the folder has empty.

        Raises:
            CheckpointError: the weight in the folder has another number of columns.
            ShapeError: tensor parallelism would split columns inside a group or a byte.
        """
        p, rows, cols = self.pattern, sum(output_partition_sizes), input_size_per_partition
        if self.shape[1] != input_size:
            raise CheckpointError(f"vLLM: {self.names[0]!r} has {self.shape[1]} columns in the folder, {input_size} in the model.")
        kept, load = p.kept(cols), extra_weight_attrs["weight_loader"]
        if cols != input_size:
            parts = "" if cols % p.m == 0 and kept * p.index_bits % 8 == 0 else f"bytes of packed {p} indices"
            parts = parts or ("bytes of two integers" if self.values == "int4" and kept % 2 else "")
            parts = parts or (f"groups of {self.group} columns" if self.group and cols % self.group else "")
            if parts:
                raise ShapeError(
                    f"vLLM: tensor parallelism splits {input_size} columns of {self.names[0]!r} into parts of {cols}, which cuts {parts}. "
                    "Use fewer GPUs, or pipeline parallelism."
                )

        def counted(parameter: Any, loaded: Tensor, *shard: Any, **keywords: Any) -> None:
            load(parameter, loaded, *shard, **keywords)
            parameter.nm_loads = getattr(parameter, "nm_loads", 0) + 1

        def tensor(kind: type[BasevLLMParameter], width: int, dtype: torch.dtype, **dims: int) -> BasevLLMParameter:
            return kind(data=torch.empty(rows, width, dtype=dtype), weight_loader=counted, output_dim=0, **dims)

        dtype = {None: params_dtype, "int8": torch.int8, "int4": torch.uint8}[self.values]
        width = -(-kept // 2) if self.values == "int4" else kept
        layer.register_parameter("values", tensor(ModelWeightParameter, width, dtype, input_dim=1))
        layer.register_parameter("indices", tensor(ModelWeightParameter, p.index_bytes(cols), torch.uint8, input_dim=1))
        if self.values and self.group:
            layer.register_parameter("step", tensor(ModelWeightParameter, cols // self.group, torch.bfloat16, input_dim=1))
        elif self.values:  # where columns are split, every rank has the steps of whole rows
            layer.register_parameter("step", tensor(ChannelQuantScaleParameter, 1, torch.bfloat16))
        layer.register_parameter("weight", BasevLLMParameter(data=torch.empty(0, dtype=params_dtype), weight_loader=_load_guard))
        layer.nm_shape = rows, cols

    def process_weights_after_loading(self, layer: Any) -> None:
        """Take the loaded tensors as one weight; on a GPU its other forms are made now, before vLLM captures graphs.

        Raises:
            CheckpointError: the folder lacks a tensor of the layer.
        """
        for key in ("values", "indices", "step")[: 3 if self.values else 2]:
            if getattr(getattr(layer, key), "nm_loads", 0) < len(self.names):
                raise CheckpointError(f"vLLM: the folder lacks {key} of {', '.join(map(repr, self.names))}; copy it again.")
        step = layer.step.data if self.values else None
        layer.nm_weight = ops.Compressed(layer.values.data, layer.indices.data, self.pattern, layer.nm_shape, step)
        if layer.values.is_cuda:
            self.apply(layer, torch.zeros(32, layer.nm_shape[1], dtype=layer.params_dtype, device=layer.values.device))

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """y = x Wᵀ + b, x ``(..., in)``."""
        return ops.linear(x, layer.nm_weight, bias)


def _form(about: dict[str, Any]) -> str:
    values = about.get("values")
    return about["pattern"] + ("" if values is None else f" {values}, group {about.get('group')}") + f", {about['shape'][1]} columns"


def _unserved(about: Any) -> str:
    """What the plug-in cannot do with one entry of the table, to follow "layer ..."; empty if it can."""
    if not isinstance(about, dict) or not {"pattern", "shape", "layout"} <= about.keys():
        return "has a damaged entry"
    if about["layout"] != LINEAR:
        return f"has the layout {about['layout']!r}"
    if about["pattern"] == "1:1":
        return "is dense, in integers"
    try:
        Pattern(about["pattern"])
    except NMError as error:
        return f"has a pattern that is unknown ({error})"
    if about.get("values") not in (None, "int8", "int4"):
        return f"has values in {about['values']!r}"
    return "has an adapter" if "rank" in about else "has reordered inputs" if about.get("columns") else ""


def _load_guard(parameter: Any, loaded: Tensor, *shard: Any, **keywords: Any) -> None:
    """The empty tensor under the name of a compressed layer's dense weight, by which loading without nmkernels fails."""
    if loaded.numel():
        raise CheckpointError("vLLM: the folder has a dense weight for a layer that config.json calls compressed; save the model again.")


def register() -> None:
    """Tell vLLM of the method ``nmkernels``; may be called again."""
    register_quantization_config(METHOD)(NMConfig)
