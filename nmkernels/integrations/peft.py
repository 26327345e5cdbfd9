"""PEFT: LoRA on layers with N:M weights, finished or compressed, and ways to merge it that keep N:M.

Importing this module makes peft's own functions accept these layers, also when an adapter is loaded. ``sparsify_``, ``compress_`` and
``load_compressed`` import it if peft is imported by then; else ``import nmkernels.integrations.peft``::

    import nmkernels as nm
    from peft import LoraConfig, get_peft_model

    nm.load_compressed(model, "model.safetensors")
    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
    ...                                                      # train
    model.save_pretrained("adapter")                         # elsewhere: PeftModel.from_pretrained(model, "adapter")
    model = nm.integrations.peft.absorb(model)               # the adapter becomes the layers' own: same logits, nothing lost

W + s B A is dense, so merging would lose either the pattern or, pruned again, most of the update. ``merge_adapter`` and
``merge_and_unload`` therefore raise, and the message says how much would be lost. To keep both, use ``absorb``, or train with
``MaskedLoraConfig``, whose update has the zeros of the weight; to keep the pattern only, ``merge_and_prune``; to keep the update only,
``absorb``, then ``nm.densify_``.

Written for peft 0.21.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft import PeftMixedModel, PeftModel
from peft import config as peft_config
from peft.tuners import tuners_utils
from peft.tuners.ia3.layer import IA3Layer
from peft.tuners.lora import model as lora_model
from peft.tuners.lora.config import LoraConfig
from peft.tuners.lora.layer import Linear, LoraVariant
from peft.tuners.lora.variants import ALoraLinearVariant, DoraLinearVariant
from peft.tuners.mixed.model import MixedModel
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer, check_adapters_to_merge
from peft.utils import SAFETENSORS_WEIGHTS_NAME, transformers_weight_conversion
from torch import Tensor, nn

from .. import ops
from ..layouts import CONV1D, MATRICES
from ..nn.adapter import adapter_of, set_adapter
from ..nn.compressed import CompressedLinear, CompressedPart
from ..nn.conv import CompressedConv2d
from ..nn.dense import CompressedEmbedding
from ..nn.experts import CompressedStack, layer_name
from ..nn.linear import SparseLinear
from ..nn.swap import SparseConv1D
from ..nn.weight import NMWeight
from ..pattern import OptionError, RecipeError, ShapeError
from ..shards import is_sharded
from ..train.layer_names import check_names

__all__ = ["MaskedLoraConfig", "absorb", "export_adapter", "lost_by_merging", "merge_and_prune", "targets"]

EXACT, PRUNE, ABSORB = "exact", "prune", "absorb"
"""Modes of merging: raise if anything would be lost; prune the result; make the adapter the layer's own."""

ONE_PROCESS = "Save the adapter (model.save_pretrained) and load it with the base model in one process."


@dataclasses.dataclass
class MaskedLoraConfig(LoraConfig):
    """LoRA whose update has the zeros of the N:M weight, y = x Wᵀ + s x ((B A) ⊙ M)ᵀ with M = [W kept].

    ``merge_and_unload`` is then exact and leaves an N:M weight, compressed or not. The cost is a GEMM with a dense ``(out, in)`` weight per
    layer and pass, and half of the update's entries at 2:4. On dense layers it is plain LoRA. Options and files are those of
    ``LoraConfig``; the file has one more key, ``nm_masked``, and needs this module imported where it is loaded.

    Raises:
        OptionError: combined with a variant of LoRA such as DoRA.
    """

    nm_masked: bool = True


NO_MERGE = (
    "the weight has {0} values, and the sum would have to be rounded again. Nothing was merged. Keep the adapter separate; or "
    "nm.integrations.peft.absorb(model) makes a LoRA adapter the layer's own; or merge it into the model with floating-point weights, then "
    "nm.compress_(model, values={0!r})."
)

CONSTANT = "an embedding of integers, which are constants. To train it, compress_ the model without naming it or a tied head in dense=."


def is_linear(module: nn.Module) -> bool:
    """Whether ``module`` is a linear layer with an N:M weight, trainable or compressed."""
    if isinstance(module, CompressedLinear):
        return type(module).forward in (CompressedLinear.forward, CompressedPart.forward) and module.layout in MATRICES
    return isinstance(module, (SparseLinear, SparseConv1D))


def is_sparse(module: nn.Module) -> bool:
    """Whether ``module`` is any layer with an N:M weight; each stack of experts is one."""
    return isinstance(module, (NMWeight, CompressedLinear, CompressedConv2d, CompressedStack))


def rounded_to(layer: nn.Module) -> str:
    """The integers that the values of ``layer`` are, ``"int8"`` or ``"int4"``; empty for floating-point values."""
    return layer.weight.kind if isinstance(layer, CompressedLinear) and layer.weight.step is not None else ""


def base_of(module: nn.Module) -> nn.Module:
    """The layer inside peft's wrappers."""
    return module.get_base_layer() if isinstance(module, BaseTunerLayer) else module


def targets(model: nn.Module) -> list[str]:
    """Names of the linear layers of ``model`` with an N:M weight, for ``LoraConfig(target_modules=...)``, without output embeddings.

    Layers that peft would mistake for experts of a mixture by their names are left out, such as ``gate_proj`` of Qwen-MoE's shared expert.

    Args:
        model: a model with finished (``handle.finish()``) or compressed (``nm.compress_``) layers, with or without peft adapters.

    Example::

        LoraConfig(r=8, target_modules=nm.integrations.peft.targets(model))
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    # names that peft rewrites into target_parameters of stacked experts, wherever they occur
    kind = getattr(getattr(model, "config", None), "model_type", None)
    patterns = getattr(transformers_weight_conversion, "_MODEL_TO_CONVERSION_PATTERN", {})
    experts = getattr(transformers_weight_conversion, "_MOE_TARGET_MODULE_MAPPING", {}).get(patterns.get(kind), {})
    inside: tuple[str, ...] = ()
    names = []
    for name, module in model.named_modules():
        if inside and name.startswith(inside):
            continue
        if isinstance(module, BaseTunerLayer):
            inside += (f"{name}.",)
        if is_linear(base_of(module)) and module is not head and name.rpartition(".")[2] not in experts:
            names.append(name)
    return names


# ---------------------------------------------------------------------------------------------------------------- what a layer computes


class MaskedVariant(LoraVariant):
    """y = base(x) + s x ((B A) ⊙ M)ᵀ."""

    @staticmethod
    def init(module: SparseLoraLinear, adapter_name: str, **kwargs: Any) -> None:
        """There are no parameters besides A and B."""

    @staticmethod
    def forward(module: SparseLoraLinear, active_adapter: str, x: Tensor, result: Tensor, **kwargs: Any) -> Tensor:
        """``result`` ``(..., out)`` plus the adapter's part."""
        b, dropout = module.lora_B[active_adapter], module.lora_dropout[active_adapter]
        update = module.update(active_adapter)
        bias = None if b.bias is None else b.bias * module.scaling[active_adapter]
        return result + F.linear(dropout(x), update, bias)


class SparseDoraVariant(DoraLinearVariant):
    """DoRA, y = m x (W + s B A)ᵀ / ‖W + s B A‖ + b, which needs W in dense layout for its row norms."""

    @staticmethod
    def init(module: SparseLoraLinear, adapter_name: str, **kwargs: Any) -> None:
        """Initialise the magnitudes m with the row norms of W."""
        DoraLinearVariant.init(DenseBase(module), adapter_name, **kwargs)

    @staticmethod
    def forward(module: SparseLoraLinear, active_adapter: str, x: Tensor, result: Tensor, **kwargs: Any) -> Tensor:
        """y ``(..., out)`` from the base layer's ``result``."""
        return DoraLinearVariant.forward(DenseBase(module), active_adapter=active_adapter, x=x, result=result, **kwargs)


class DenseBase:
    """A view of ``module`` whose base layer has the weight in dense layout."""

    def __init__(self, module: SparseLoraLinear) -> None:
        self.__dict__["_module"] = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)

    def get_base_layer(self) -> nn.Module:
        """The weight, as the dense layer stores it, and the bias."""
        layer: Any = nn.Linear(1, 1, device="meta")
        weight, bias = self._module.weight_and_order()[0], self._module.get_base_layer().bias
        layer.weight = nn.Parameter(weight.t() if self.fan_in_fan_out else weight, requires_grad=False)
        layer.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        return layer


class SparseLoraLinear(Linear):
    """peft's LoRA on a linear layer with an N:M weight, finished or compressed: y = x Wᵀ + b + s x Aᵀ Bᵀ.

    It replaces peft's ``lora.Linear``, with the same parameters and state dict. ``merge`` keeps the weight N:M or raises.
    """

    # peft finds layers that it has wrapped, for "all-linear", by "Linear" in the class name

    merging = EXACT
    _unmerged: tuple[Any, list[Any]] | None = None  # (base layer, its tensors before merging)
    merged_adapters: list[str]

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: LoraConfig, **kwargs: Any) -> None:
        transposed = base_of(base_layer).layout == CONV1D  # the dense layer stores its weight as (in, out)
        config.fan_in_fan_out = transposed  # as peft does by the class of the dense layer
        super().__init__(base_layer, adapter_name, config=config, is_target_conv_1d_layer=transposed, **kwargs)

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        return int(module.in_features), int(module.out_features)  # type: ignore[arg-type]

    @property
    def lora_variants(self) -> dict[tuple[str, ...], type[LoraVariant] | None]:
        """The variants of LoRA that these layers support, by their fields of the config."""
        return {(): None, ("use_dora",): SparseDoraVariant, ("alora_invocation_tokens",): ALoraLinearVariant}

    def resolve_lora_variant(self, *, config: LoraConfig, **kwargs: Any) -> LoraVariant | None:
        """The variant that ``config`` asks for, if any."""
        reason = unsupported(config)
        if reason:
            raise OptionError(reason)
        if config.use_dora and adapter_of(self.get_base_layer()) is not None:
            raise OptionError(
                "DoRA scales each row of the weight by its norm, but this layer has its own low-rank adapter, which would not scale. Use "
                "LoRA without use_dora, or remove that adapter: "
                "nm.integrations.peft.export_adapter(model, folder, remove=True)."
            )
        return MaskedVariant() if getattr(config, "nm_masked", False) else super().resolve_lora_variant(config=config, **kwargs)

    def is_masked(self, adapter: str) -> bool:
        """Whether ``adapter`` has the zeros of the weight."""
        return isinstance(self.lora_variant.get(adapter), MaskedVariant)

    # ---- the weight

    def weight_and_order(self) -> tuple[Tensor, Tensor | None]:
        """(the base layer's weight ``(out, in)`` in dense layout, the column order in which it is N:M)."""
        base = self.get_base_layer()
        if isinstance(base, CompressedLinear):
            return base.dense(), base.order
        return base.master.detach(), base.columns

    def tensors(self) -> list[Any]:
        """What the base layer holds while no adapter is merged: values and indices, or the dense weight ``(out, in)``; and the bias."""
        base = self.get_base_layer()
        if self._unmerged is None:
            return [*([base.values, base.indices] if isinstance(base, CompressedLinear) else [base.master.detach()]), base.bias]
        if self._unmerged[0] is not base:
            raise RecipeError("unmerge: the layer was replaced while the adapter was merged, so its weight from before is lost.")
        return self._unmerged[1]

    def mask(self) -> Tensor:
        """M, the entries of the weight that the pattern keeps: bool ``(out, in)``."""
        base, (weight, indices, *_) = self.get_base_layer(), self.tensors()
        if isinstance(base, CompressedLinear):
            ones = torch.ones(base.out_features, base.pattern.kept(base.in_features), device=weight.device)
            return _ordered(ops.Compressed(ones, indices, base.pattern, base.weight.shape).dense() != 0, base.order, back=True)
        return _ordered(ops.mask(_ordered(weight, base.columns), base.pattern), base.columns, back=True)

    def update(self, adapter: str) -> Tensor:
        """s B A ``(out, in)``, masked if the adapter is a masked one."""
        a, b = self.lora_A[adapter].weight, self.lora_B[adapter].weight
        full = (b @ a) * self.scaling[adapter]
        return full * self.mask() if self.is_masked(adapter) else full

    def get_delta_weight(self, adapter: str) -> Tensor:
        """The update as the dense layer stores its weight."""
        full = super().get_delta_weight(adapter)
        if not self.is_masked(adapter):
            return full
        return full * (self.mask().t() if self.fan_in_fan_out else self.mask())

    # ---- merging

    @torch.no_grad()
    def merged_weight(self, adapters: Sequence[str], safe_merge: bool = False) -> tuple[Tensor, Tensor | None]:
        """(weight ``(out, in)``, bias) of the layer and ``adapters`` combined, as peft merges them."""
        if any(is_sharded(p) for p in self.parameters()):
            raise RecipeError(f"merging: the weights are sharded. {ONE_PROCESS}")
        base, (first, *rest, bias) = self.get_base_layer(), self.tensors()
        if isinstance(base, CompressedLinear):
            first = _ordered(ops.Compressed(first, rest[0], base.pattern, base.weight.shape).dense(), base.order, back=True)
        weight = first
        for name in adapters:
            variant, update = self.lora_variant.get(name), self.get_delta_weight(name)
            update = update.t() if self.fan_in_fan_out else update
            merged = weight + update
            if isinstance(variant, SparseDoraVariant):
                merged *= (self.lora_magnitude_vector[name].weight / (first + update).norm(dim=1))[:, None]
            elif variant is not None and not isinstance(variant, MaskedVariant):
                variant.merge_unsafe(self, name, weight)  # raises
            weight = merged.to(first.dtype)
            if self.lora_bias[name]:
                if bias is None:
                    raise RuntimeError("Impossible to merge LoRA with `lora_bias=True` because the base layer has no bias.")
                bias = bias + self.lora_B[name].bias * self.scaling[name]
            if safe_merge and not all(bool(t.isfinite().all()) for t in (weight, bias) if t is not None):
                raise ValueError(f"NaNs detected in the merged weights. The adapter {name} seems to be broken")
        return weight, bias

    @torch.no_grad()
    def lost(self, adapters: Sequence[str]) -> float:
        """The share of the update's norm that pruning the merged weight would lose, ‖prune(W') − W'‖ / ‖W' − W‖; 0 if it is N:M.

        W includes what is merged already.
        """
        merged, _ = self.merged_weight(list(dict.fromkeys([*self.merged_adapters, *adapters])))
        weight, order = self.weight_and_order()
        wide = torch.promote_types(merged.dtype, torch.float32)
        grouped = _ordered(merged, order).to(wide)
        if ops.is_nm(grouped, self.get_base_layer().pattern):
            return 0.0
        rest = grouped - ops.prune(grouped, self.get_base_layer().pattern)
        return float(rest.norm() / (merged.to(wide) - weight.to(wide)).norm())

    def named(self, adapter_names: Sequence[str] | None) -> list[str]:
        """Those of ``adapter_names``, or of the active adapters, that this layer has."""
        return [name for name in (adapter_names or self.active_adapters) if name in self.lora_A]

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add the adapters to the weight, which stays N:M; ``unmerge`` restores the weight bit for bit.

        Raises:
            RecipeError: the result would not be N:M; nothing has changed.
        """
        base = self.get_base_layer()
        if not is_linear(base):  # made dense by densify_ since
            super().merge(safe_merge, adapter_names)
            return
        names = [name for name in check_adapters_to_merge(self, adapter_names) if name in self.lora_A]
        if not names:
            return
        kind = rounded_to(base)
        if kind:
            raise RecipeError(f"merging adapter {', '.join(map(repr, names))}: {NO_MERGE.format(kind)}")
        adapters = [*self.merged_adapters, *names]
        weight, bias = self.merged_weight(adapters, safe_merge)
        grouped = _ordered(weight, self.weight_and_order()[1])
        if not ops.is_nm(grouped, base.pattern):
            if self.merging != PRUNE:
                raise RecipeError(refusal({"": self.lost(adapters)}, {"": self}, names))
            grouped = ops.prune(grouped, base.pattern)
        if self._unmerged is None:
            self._unmerged = base, [None if t is None else t.detach().clone() for t in self.tensors()]
        self._write(grouped, bias)
        self.merged_adapters = adapters

    def _write(self, grouped: Tensor, bias: Tensor | None) -> None:
        """Store the weight ``grouped``, N:M in the layer's column order, and ``bias`` in the base layer."""
        base = self.get_base_layer()
        if isinstance(base, CompressedLinear):
            packed = ops.compress(grouped.contiguous(), base.pattern)
            base.values, base.indices = packed.values, packed.indices  # new buffers, so that cached layouts of the old ones are dropped
        else:
            base.master.copy_(_ordered(grouped, base.columns, back=True))
        if bias is not None:
            base.bias.copy_(bias)

    @torch.no_grad()
    def unmerge(self) -> None:
        """Restore the weight and the bias from before ``merge``."""
        base = self.get_base_layer()
        if not is_linear(base):
            super().unmerge()
        elif self._unmerged is None:
            warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)
        else:
            *weight, bias = self.tensors()
            if isinstance(base, CompressedLinear):
                base.values, base.indices = weight
            else:
                base.master.copy_(weight[0])
            if bias is not None:
                base.bias.copy_(bias)
            self._unmerged, self.merged_adapters = None, []

    # ---- absorbing

    def not_absorbed_reason(self, adapter_names: Sequence[str] | None) -> str:
        """Why the adapters cannot become the layer's own, or ''."""
        for name in self.named(adapter_names):
            if isinstance(self.lora_variant.get(name), ALoraLinearVariant):
                return f"adapter {name!r} is an activated LoRA, which acts only on tokens after its invocation"
            if self.lora_bias[name] and self.get_base_layer().bias is None:
                return f"adapter {name!r} has a bias (lora_bias=True), and the layer has none"
            if rounded_to(self.get_base_layer()) and (self.is_masked(name) or isinstance(self.lora_variant.get(name), SparseDoraVariant)):
                return (
                    f"adapter {name!r} changes the weight ({'MaskedLoraConfig' if self.is_masked(name) else 'DoRA'}), whose "
                    f"{rounded_to(self.get_base_layer())} values would have to be rounded again; keep it separate, or absorb it into the "
                    "model with floating-point weights and compress_ that"
                )
        if any(is_sharded(p) for p in self.parameters()):
            return f"it is sharded. {ONE_PROCESS}"
        return "it is merged; call unmerge_adapter() first" if self.merged else ""

    @torch.no_grad()
    def absorb(self, adapter_names: Sequence[str] | None = None) -> None:
        """Make the adapters the base layer's own: nm_left = [Aᵀ ...] and nm_right = [s r Bᵀ ...], r the sum of the ranks; W and b stay.

        Masked adapters are merged. DoRA's factors f = m / ‖W + s B A‖ scale the rows of W, which stays N:M, and of B.
        """
        base = self.get_base_layer()
        names = self.named(adapter_names)
        masked = [name for name in names if self.is_masked(name)]
        if masked:
            self.merge(adapter_names=masked)
        names = [name for name in names if name not in masked]
        if not names:
            return
        weight, order = self.weight_and_order()
        wide = torch.promote_types(weight.dtype, torch.float32)
        lefts, rights, scales = [], [], torch.ones(weight.shape[0], dtype=wide, device=weight.device)
        adapter = adapter_of(base)
        if adapter is not None:
            lefts, rights = [adapter[0].to(wide)], [adapter[1].to(wide) / adapter[0].shape[1]]
        for name in names:
            a, b = self.lora_A[name].weight.to(wide), self.lora_B[name].weight.to(wide) * self.scaling[name]
            if isinstance(self.lora_variant.get(name), SparseDoraVariant):
                factor = self.lora_magnitude_vector[name].weight.to(wide) / (weight.to(wide) + b @ a).norm(dim=1)
                b, scales = b * factor[:, None], scales + factor - 1
            lefts, rights = [*lefts, a.t()], [*rights, b.t()]
            if self.lora_bias[name]:
                base.bias += self.lora_B[name].bias * self.scaling[name]
        rank = sum(left.shape[1] for left in lefts)
        left, right = torch.cat(lefts, 1), torch.cat(rights, 0) * rank
        if not bool((scales == 1).all()):
            self._write(_ordered(weight * scales[:, None].to(weight.dtype), order), None)
        set_adapter(base, left.to(weight.dtype), right.to(weight.dtype), self.out_features, self.in_features)

    def unload_and_optionally_merge_module(self, merge: bool, safe_merge: bool, adapter_names: list[str] | None) -> nn.Module:
        """The base layer, after merging the adapters if ``merge``; called by peft's ``merge_and_unload`` and ``unload``."""
        if merge and self.merging == ABSORB and is_linear(self.get_base_layer()):
            self.absorb(adapter_names)
        elif merge:
            self.merge(safe_merge=safe_merge, adapter_names=adapter_names)
        return self.get_base_layer()


def _ordered(weight: Tensor, order: Tensor | None, back: bool = False) -> Tensor:
    """The columns of ``weight`` in this order, or ``back`` from it."""
    if order is None:
        return weight
    order = order.long().to(weight.device)
    return weight.index_select(1, order.argsort() if back else order)


# ---------------------------------------------------------------------------------------------------------------- merging a model


def absorb(model: nn.Module, adapter_names: Sequence[str] | None = None) -> nn.Module:
    """Make LoRA adapters the layers' own, without loss, and return the model without peft's wrappers.

    Each N:M layer then computes y = x Wᵀ + b + x L R / r with L = Aᵀ and R = s r Bᵀ, its Parameters ``nm_left`` and ``nm_right``, which
    ``nm.compress_``, ``nm.save_compressed`` and the kernels support; ``nm.densify_`` and ``nm.save_dense`` fold them into a dense weight.
    Several adapters, and one that a layer already has, are concatenated; DoRA's factors scale the rows of W. Adapters of dense layers are
    merged, and ``modules_to_save`` replace the originals. Computed in the dtype of the weights.

    Args:
        model: with LoRA: the result of ``get_peft_model`` or ``PeftModel.from_pretrained``, or a Hugging Face model after ``load_adapter``.
        adapter_names: the adapters to keep; the active ones if None.

    Raises:
        RecipeError: the model has no peft adapters, or none of a given name, or one cannot be absorbed: an activated LoRA, or a bias where
            the layer has none.

    Example::

        model = nm.integrations.peft.absorb(model)
        nm.save_compressed(model, "model.safetensors")
    """
    for name, layer in _lora_layers(model, "absorb", adapter_names).items():
        reason = layer.not_absorbed_reason(adapter_names)
        if reason:
            raise RecipeError(f"absorb: layer {name!r} cannot absorb the adapter: {reason.rstrip('.')}.")
    return _merged(model, ABSORB, adapter_names)


def merge_and_prune(model: nn.Module, adapter_names: Sequence[str] | None = None) -> nn.Module:
    """``merge_and_unload``, then prune each weight to the nearest N:M matrix; ``lost_by_merging`` computes beforehand what that loses.

    Args and errors: as for ``absorb``.
    """
    _lora_layers(model, "merge_and_prune", adapter_names)
    return _merged(model, PRUNE, adapter_names)


def lost_by_merging(model: nn.Module, adapter_names: Sequence[str] | None = None) -> dict[str, float]:
    """By layer, the share of the update's norm that ``merge_and_prune`` would lose, ‖prune(W') − W'‖ / ‖W' − W‖ with W' = W + s B A.

    About 0.7 for LoRA on 2:4, half of the energy; 0 for ``MaskedLoraConfig``. ``absorb`` loses nothing.
    """
    layers = _lora_layers(model, "lost_by_merging", adapter_names)
    return {name: layer.lost(layer.named(adapter_names)) for name, layer in layers.items() if layer.named(adapter_names)}


def _tuner(model: nn.Module, verb: str) -> Any:
    """The object whose ``merge_and_unload`` handles the adapters of ``model``."""
    if hasattr(model, "merge_and_unload"):
        return model
    if not getattr(model, "_hf_peft_config_loaded", False):
        raise RecipeError(
            f"{verb}: the model has no peft adapters. Pass the result of get_peft_model or PeftModel.from_pretrained, or a Hugging Face "
            "model after its add_adapter or load_adapter."
        )
    # transformers inserts the layers without a tuner
    tuner = lora_model.LoraModel.__new__(lora_model.LoraModel)
    nn.Module.__init__(tuner)
    tuner.model, tuner.peft_config = model, model.peft_config
    return tuner


def _lora_layers(model: nn.Module, verb: str, adapter_names: Sequence[str] | None) -> dict[str, SparseLoraLinear]:
    """The LoRA layers of ``model`` on N:M weights, by their names without peft's wrappers; the model must have the adapters."""
    inner = _tuner(model, verb)
    check_names(f"{verb}: adapter_names", adapter_names or (), inner.peft_config, kind="adapter")
    while isinstance(inner, (PeftModel, PeftMixedModel, BaseTuner)):
        inner = inner.model if isinstance(inner, BaseTuner) else inner.base_model
    return {name: m for name, m in inner.named_modules() if isinstance(m, SparseLoraLinear) and is_linear(m.get_base_layer())}


def _merged(model: nn.Module, how: str, adapter_names: Sequence[str] | None) -> nn.Module:
    layers = [m for m in model.modules() if isinstance(m, SparseLoraLinear)]
    for layer in layers:
        layer.merging = how
    try:
        merged: Any = _tuner(model, how).merge_and_unload(adapter_names=None if adapter_names is None else list(adapter_names))
    finally:
        for layer in layers:
            layer.merging = EXACT
    if merged is model:
        merged.__dict__["_hf_peft_config_loaded"] = False  # else transformers would still save only the adapter
    result: nn.Module = merged
    return result


def refusal(lost: Mapping[str, float], layers: Mapping[str, SparseLoraLinear], names: Sequence[str] | None) -> str:
    """The message for a merge that would lose N:M; ``lost`` is the share that each layer would lose."""
    worst = sorted(lost, key=lost.__getitem__, reverse=True)[:3]
    losses = "; ".join(f"{repr(name) + ': ' if name else ''}{lost[name]:.0%} of the update's norm" for name in worst)
    pattern = layers[worst[0]].get_base_layer().pattern
    weights = f"{len(lost)} {pattern} weights" if len(lost) > 1 else f"a {pattern} weight"
    of = f"adapter {', '.join(map(repr, names))}" if names else "the adapters"
    return (
        f"merging {of} would make {weights} dense, and pruning again would lose {losses}. Nothing was merged. Without loss: "
        "nm.integrations.peft.absorb(model) makes the adapters the layers' own; one trained with nm.integrations.peft.MaskedLoraConfig "
        "merges exactly. With that loss: nm.integrations.peft.merge_and_prune(model). For a dense model: absorb, then nm.densify_(model)."
    )


def check_merge(call: dict[str, Any]) -> None:
    """Raise ``RecipeError``, before any layer is changed, if a tuner's merge of adapters would make an N:M weight dense."""
    if not call.get("merge", True):
        return
    model, adapter_names = call["self"].model, call["adapter_names"]
    lost, layers = {}, {}
    for name, module in model.named_modules():
        if isinstance(module, SparseLoraLinear) and is_linear(module.get_base_layer()):
            adapters = [a for a in module.named(adapter_names) if a not in module.merged_adapters]
            kind = rounded_to(module.get_base_layer())
            if kind and adapters and module.merging != ABSORB:
                raise RecipeError(f"merging adapters into {name!r}: {NO_MERGE.format(kind)}")
            share = module.lost(adapters) if adapters and module.merging == EXACT else 0.0
            if share:
                lost[name], layers[name] = share, module
        elif isinstance(module, BaseTunerLayer) and is_sparse(module.get_base_layer()) and not isinstance(module, IA3Layer):
            # IA3 scales rows or columns, which keeps the zeros
            raise RecipeError(
                f"merging {type(module).__module__.split('.')[2]} into the N:M weight of {name!r} would make it dense. Nothing was merged: "
                "keep the adapter separate, or make the model dense first: nm.densify_(model)."
            )
    if lost:
        raise RecipeError(refusal(lost, layers, adapter_names))


# ---------------------------------------------------------------------------------------------------------------- SLoPe's adapters


def export_adapter(model: nn.Module, folder: str | Path, task_type: str | None = None, remove: bool = False) -> Path:
    """Write the layers' own adapters (SLoPe's, or absorbed ones) as a LoRA adapter that peft loads: A = Lᵀ, B = Rᵀ, lora_alpha = 1.

    Args:
        model: a finished or compressed model with layers that have an adapter.
        folder: for ``adapter_config.json`` and ``adapter_model.safetensors``; created if missing.
        task_type: peft's task type, such as ``"CAUSAL_LM"``, which determines the class of the loaded model.
        remove: delete the adapters from ``model``, which is then the base model of the saved adapter.

    Returns:
        The folder.

    Raises:
        RecipeError: no layer has an adapter, a layer is not finished, or the model has peft adapters.

    Example::

        nm.integrations.peft.export_adapter(model, "adapter", remove=True)
        model = PeftModel.from_pretrained(model, "adapter")
    """
    from safetensors.torch import save_file

    if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        raise RecipeError("export_adapter: the model has peft adapters; save those with save_pretrained, or absorb(model) first.")
    layers = {name: (m, adapter_of(m)) for name, m in model.named_modules() if is_linear(m) and adapter_of(m) is not None}
    if not layers:
        raise RecipeError("export_adapter: no layer has its own adapter (nm_left, nm_right); SLoPe and absorb create them.")
    training = [name for name, (layer, _) in layers.items() if isinstance(layer, NMWeight) and not layer.finished]
    if training:
        raise RecipeError(f"export_adapter: layer {training[0]!r} is still in training; call handle.finish() first.")
    tensors, ranks = {}, {}
    for name, (_, factors) in layers.items():
        assert factors is not None
        left, right = (p.detach() for p in factors)
        ranks[name] = left.shape[1]
        # clone: .t() shares memory with the Parameter
        tensors[f"base_model.model.{name}.lora_A.weight"] = left.t().clone(memory_format=torch.contiguous_format)
        tensors[f"base_model.model.{name}.lora_B.weight"] = right.t().clone(memory_format=torch.contiguous_format)
    rank = Counter(ranks.values()).most_common(1)[0][0]
    config = LoraConfig(
        r=rank,
        lora_alpha=1,
        rank_pattern={name: r for name, r in ranks.items() if r != rank},
        target_modules=set(layers),
        fan_in_fan_out=all(layer.layout == CONV1D for layer, _ in layers.values()),
        task_type=task_type,
        inference_mode=True,
        base_model_name_or_path=getattr(getattr(model, "config", None), "_name_or_path", None) or None,
    )
    path = Path(folder)
    config.save_pretrained(str(path))
    save_file(tensors, str(path / SAFETENSORS_WEIGHTS_NAME), metadata={"format": "pt"})
    if remove:
        for layer, _ in layers.values():
            for parameter in ("nm_left", "nm_right"):
                delattr(layer, parameter)
    return path


# ---------------------------------------------------------------------------------------------------------------- what is refused


def unsupported(config: LoraConfig) -> str:
    """Why LoRA with ``config`` does not work on N:M weights, or ''."""
    init = config.init_lora_weights
    if isinstance(init, str) and init.lower().startswith(("pissa", "olora", "corda", "loftq", "lora_ga")):
        return (
            f"init_lora_weights={init!r} moves a part of the weight into the adapter and leaves a dense remainder. Use True, "
            "'gaussian', 'orthogonal' or 'eva'."
        )
    if config.use_qalora or config.loftq_config:
        return "QA-LoRA and LoftQ are for quantized weights, which N:M weights are not. Use LoRA without them."
    variants = [f.name for f in dataclasses.fields(config) if f.metadata.get("is_lora_variant") and getattr(config, f.name)]
    if init == "mica":
        variants.append("init_lora_weights='mica'")
    other = [name for name in variants if name not in ("use_dora", "alora_invocation_tokens")]  # which only multiply by the weight
    if other:
        return f"{other[0]} is a variant of LoRA that N:M weights do not support; they support LoRA, rsLoRA, DoRA and aLoRA."
    if variants and getattr(config, "nm_masked", False):
        return f"MaskedLoraConfig cannot be combined with {variants[0]}; choose one of them."
    return ""


def check_injection(call: dict[str, Any]) -> None:
    """Raise, before any layer is changed, if the config of a call's adapter requests what an N:M weight of the model does not support.

    Raises:
        OptionError: a method, variant or option that these layers do not support.
        RecipeError: a layer is still in training.
        ShapeError: a layer is split by tensor parallelism.
    """
    tuner, model, adapter = call["self"], call["model"], call["adapter_name"]
    configs = call.get("peft_config") or tuner.peft_config
    config: Any = configs.get(adapter) if isinstance(configs, dict) else configs
    layers = {name: base_of(m) for name, m in model.named_modules() if is_sparse(base_of(m)) and not name.endswith(".base_layer")}
    if not layers:
        return
    stacks = {name: layer_name(name, layer) for name, layer in layers.items()}
    parameters = {f"{name}.weight" if stack == name else stack: name for name, stack in stacks.items()}
    rewritten = copy.deepcopy(config)  # for mixtures peft rewrites the names of modules that are now stacked
    with suppress(Exception):  # peft reports the error itself
        transformers_weight_conversion.convert_peft_config_for_transformers(rewritten, model=model, conversions=None)
    for wanted in sorted(getattr(rewritten, "target_parameters", None) or ()):
        hit = next((name for stored, name in parameters.items() if f".{stored}".endswith(f".{wanted}")), None)
        if hit is not None:
            raise OptionError(
                f"peft would parametrize {wanted!r} (target_parameters), which is the N:M weight of a {type(layers[hit]).__name__} and "
                "already transformed. Name linear layers only: target_modules=nm.integrations.peft.targets(model). Experts with N:M "
                "weights do not support LoRA."
            )
    embedding = next((name for name, layer in layers.items() if isinstance(layer, CompressedEmbedding)), None)
    if embedding is not None and getattr(config, "trainable_token_indices", None):
        raise OptionError(f"trainable_token_indices would train rows of {embedding!r}, {CONSTANT}")
    for wanted in getattr(config, "modules_to_save", None) or ():
        hit = next((name for name in layers if re.match(rf"(^|.*\.){re.escape(wanted)}($|\..*)", name)), None)
        if hit is not None and isinstance(layers[hit], CompressedEmbedding):
            raise OptionError(f"modules_to_save={wanted!r} includes {hit!r}, {CONSTANT}")
        if hit is not None:
            raise OptionError(
                f"modules_to_save={wanted!r} includes {hit!r}, a {type(layers[hit]).__name__}: the copy that peft trains would become "
                "dense, or not train if it is compressed. Name it in target_modules instead."
            )
    chosen = [name for name in layers if _is_target(tuner, model, config, name)]
    if not chosen:
        return
    for name in chosen:
        layer = layers[name]
        if isinstance(layer, NMWeight) and not layer.finished:
            raise RecipeError(
                f"layer {name!r} is still in training: its recipe will change the weight, and the adapter would no longer fit. Call "
                "handle.finish() first."
            )
        if isinstance(layer, CompressedPart) or (isinstance(layer, NMWeight) and is_sharded(layer.parameter)):
            raise ShapeError(f"layer {name!r} is split over ranks; peft adapters on N:M weights require whole layers.")
    if isinstance(tuner, lora_model.LoraModel) and type(config) in (LoraConfig, MaskedLoraConfig):
        reason = unsupported(config)
        if reason:
            raise OptionError(f"LoRA on {chosen[0]!r} and other N:M weights: {reason}")
        refused = [name for name in chosen if not is_linear(layers[name])]
    else:
        refused = [name for name in chosen if not isinstance(layers[name], nn.Linear)]
    if refused:
        layer = layers[refused[0]]
        method = getattr(config.peft_type, "value", config.peft_type)
        raise OptionError(
            f"{method} does not support {refused[0]!r}, a {type(layer).__name__}. LoRA (peft.LoraConfig) supports linear layers, and "
            "prompt methods any; a finished nn.Linear supports every method before nm.compress_."
        )


def _is_target(tuner: BaseTuner, model: nn.Module, config: Any, name: str) -> bool:
    """Whether peft will put an adapter on the module ``name``."""
    resolved = copy.copy(config)
    if not hasattr(config, "target_modules"):
        return False
    try:
        resolved = tuner._prepare_adapter_config(resolved, tuner.get_model_config(model))
        resolved = tuners_utils._maybe_include_all_linear_layers(resolved, model)
        return bool(tuner._check_target_module_exists(resolved, name))
    except (ValueError, TypeError, AttributeError):
        return False  # peft reports the error itself


def check_weighted(call: dict[str, Any]) -> None:
    """Raise ``OptionError`` for a sum of masked and other adapters."""
    tuner, adapters = call["self"], call["adapters"]
    masked = {bool(getattr(tuner.peft_config.get(name), "nm_masked", False)) for name in adapters}
    if len(masked) > 1:
        raise OptionError(
            f"add_weighted_adapter: some of {', '.join(map(repr, adapters))} are masked (MaskedLoraConfig) and some are not, and their sum "
            "would be neither. Combine adapters of one kind."
        )


# ---------------------------------------------------------------------------------------------------------------- into peft


def install() -> None:
    """Wrap functions of peft, which has no registry for layers. Called at the end of this file; a second call does nothing."""
    _wrap(tuners_utils, "_maybe_include_all_linear_layers", _include_all_linear)
    transformers_weight_conversion._maybe_include_all_linear_layers = tuners_utils._maybe_include_all_linear_layers
    _wrap(lora_model.LoraModel, "_create_new_module", _create_module)
    _wrap(peft_config.PeftConfigMixin, "from_peft_type", _read_config)
    # some methods inspect the layers before they inject anything, with less helpful messages
    _check_first(BaseTuner, "__init__", check_injection)
    _check_first(BaseTuner, "inject_adapter", check_injection)
    _check_first(BaseTuner, "_unload_and_optionally_merge", check_merge)
    _check_first(MixedModel, "_unload_and_optionally_merge", check_merge)
    _check_first(BaseTuner, "merge_adapter", check_merge)
    _check_first(lora_model.LoraModel, "add_weighted_adapter", check_weighted)


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Have the function ``name`` of ``owner``, also a static or class method, call ``wrapper`` with itself first, unless it does."""
    old = vars(owner)[name]
    inner = old.__func__ if isinstance(old, (staticmethod, classmethod)) else old
    if getattr(inner, "_nm_wraps", False):
        return

    @wraps(inner)
    def new(*args: Any, **kwargs: Any) -> Any:
        return wrapper(inner, *args, **kwargs)

    new._nm_wraps = True  # type: ignore[attr-defined]
    setattr(owner, name, type(old)(new) if isinstance(old, (staticmethod, classmethod)) else new)


def _check_first(owner: Any, name: str, check: Callable[[dict[str, Any]], None]) -> None:
    """Have the method ``name`` of ``owner`` call ``check`` first, with its arguments by name."""

    def wrapper(original: Any, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(original).bind(*args, **kwargs)
        bound.apply_defaults()
        check(bound.arguments)
        return original(*args, **kwargs)

    _wrap(owner, name, wrapper)


def _include_all_linear(original: Any, config: Any, model: nn.Module) -> Any:
    all_linear = isinstance(getattr(config, "target_modules", None), str) and config.target_modules.lower() == "all-linear"
    config = original(config, model)
    if all_linear:
        config.target_modules = set(config.target_modules) | set(targets(model))
    return config


def _create_module(original: Any, lora_config: LoraConfig, adapter_name: str, target: nn.Module, **kwargs: Any) -> nn.Module:
    base = base_of(target)
    custom = any(isinstance(base, kind) for kind in lora_config._custom_modules or ())
    if custom or not is_linear(base) or kwargs.get("parameter_name") is not None:
        layer: nn.Module = original(lora_config, adapter_name, target, **kwargs)
        return layer
    return SparseLoraLinear(target, adapter_name, config=lora_config, **kwargs)


def _read_config(original: Any, cls: Any, **kwargs: Any) -> Any:
    if not kwargs.get("nm_masked") or kwargs.get("peft_type") != "LORA":
        return original(cls, **kwargs)
    if {field.name for field in dataclasses.fields(MaskedLoraConfig)}.issuperset(kwargs):
        return MaskedLoraConfig(**kwargs)
    plain = original(cls, **{k: v for k, v in kwargs.items() if k != "nm_masked"})  # warns about unknown keys
    return MaskedLoraConfig(**{f.name: getattr(plain, f.name) for f in dataclasses.fields(plain) if f.init})


install()
