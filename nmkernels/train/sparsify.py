"""Which layers of a model can be made N:M sparse, why the others cannot, and ``sparsify_``, which swaps them in place."""

from __future__ import annotations

import inspect
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from ..layouts import CONV1D, CONV2D, EMBEDDING, LINEAR, MATRICES, ORDERS, REDUCED, as_matrix, matrix_shape, ordered
from ..nn.classes import class_of, computed_by
from ..nn.compress import FLOATING, names_of
from ..nn.compressed import CompressedLinear
from ..nn.conv import CompressedConv2d
from ..nn.experts import (
    CompressedExperts,
    CompressedStack,
    SparseExperts,
    StackedWeight,
    child_name,
    experts_per_token,
    layer_name,
    make_stack_sparse_,
    stacks_of,
)
from ..nn.swap import after_swap, is_conv1d, is_conv1d_type, make_dense_, make_sparse_, switch_fast_paths
from ..nn.weight import NMWeight
from ..ops.compress import group_of
from ..pattern import Pattern, RecipeError, ShapeError
from ..recipes.contract import LayerSetup, Recipe
from ..recipes.registry import resolve
from ..shards import is_sharded
from .handle import Handle
from .report import FILTERED, Entry, Report

FilterFn = Callable[[nn.Module, str], bool]
DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
HEADS = frozenset({"lm_head", "head", "classifier"})
NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase)
NOT_LINEAR: tuple[tuple[tuple[type[nn.Module], ...], str], ...] = (
    ((_ConvNd,), "a convolution other than nn.Conv2d, the only kind with a sparse form"),
    ((nn.Embedding, nn.EmbeddingBag), "an embedding looks rows up and multiplies nothing"),
    ((nn.RNNBase, nn.RNNCellBase), "a recurrent layer, whose weights torch multiplies by kernels of its own"),
    ((nn.Bilinear,), "a bilinear form of two inputs, not a matrix for one"),
)
"""Torch's layers that are not linear."""

ALREADY_SPARSE = "it is sparse already; give the dense model back with handle.remove() or densify_ first"
REPLACED = "its forward was replaced on the instance (a hook of accelerate, for instance), which bypasses the layer's own"
TIED = "its weight is tied to another module"
SHARDED = "its weight is sharded (DTensor), and {} is not split among ranks; leave it out of fully_shard, or train it with DDP"
COMPRESSED = "it is compressed already; nm.densify_ gives the dense layer back"

LOOKED_UP = re.compile("position|pos_|_pos|embed", re.IGNORECASE)
"""Names of 3-D tensors that are looked up and not multiplied."""
ATTENTION = re.compile("attention|attn", re.IGNORECASE)
"""Names of modules whose 3-D weights have a dimension for the heads, as in XLNet, and not for experts."""

TINY = 16
"""With fewer features than this on one side the mask costs more than the GEMM."""


@dataclass(frozen=True)
class LayerCandidate:
    """A weight of a module, with the reasons against making it sparse.

    ``shape``: of a linear layer ``(out, in)``, else as stored; ``layout``: how it is stored, one of ``nmkernels.layouts``; ``key``: the
    Parameter's name in the module; ``linear`` and ``rows`` as in ``Entry``.
    """

    name: str
    module: nn.Module
    shape: tuple[int, ...]
    impossible: str = ""
    keep_dense: str = ""
    misshapen: bool = False
    linear: bool = True
    layout: str = LINEAR
    key: str = "weight"
    rows: float | None = None

    @cached_property
    def matrix_shape(self) -> tuple[int, int]:
        """``(out, in)`` of the matrix that is masked."""
        return matrix_shape(self.shape, LINEAR if self.layout in MATRICES else self.layout)

    @property
    def matrix(self) -> Tensor:
        """The present weight as that matrix, detached; a copy where the memory is not in its order yet."""
        return as_matrix(ordered(self.module.get_parameter(self.key).detach(), self.layout), self.layout)


def check_groups(verb: str, values: str, group: int | None, pattern: Pattern, layers: Iterable[LayerCandidate]) -> None:
    """Raise ``OptionError`` if a ``group`` of integers does not fit one of the dense ``layers``; warn of those that keep floats."""
    floating = []
    for c in layers:
        if c.layout != CONV2D:
            group_of(f"{verb}: layer {c.name!r}", values, group, pattern, c.matrix_shape[1])
        else:
            floating.append(c.name)
    if floating:
        warnings.warn(f"{verb}: {FLOATING.format(values, names_of(floating))}", stacklevel=3)


def select(
    model: nn.Module, pattern: Pattern, filter_fn: FilterFn | None = None, recipe: Recipe | None = None
) -> tuple[list[LayerCandidate], Report]:
    """The layers to make ``pattern`` sparse for ``recipe``, and the report on all layers; nothing is changed."""
    chosen, report = [], Report()
    for c in candidates(model, pattern, recipe):
        kind = type(c.module).__name__
        if not c.linear:
            report.entries.append(Entry(c.name, kind, c.shape, False, c.impossible, linear=False))
            continue
        wanted = filter_fn is None or bool(filter_fn(c.module, c.name))
        if filter_fn is not None and wanted and c.impossible:
            raise (ShapeError if c.misshapen else RecipeError)(
                f"sparsify_: the filter chose layer {c.name!r}, which cannot be made {pattern} sparse: {c.impossible}. Leave it out of the "
                "filter."
            )
        reason = c.impossible or (c.keep_dense if filter_fn is None else "") or ("" if wanted else FILTERED)
        if not reason:
            chosen.append(c)
        report.entries.append(Entry(c.name, kind, c.shape, not reason, reason or str(pattern), rows=c.rows))
    return chosen, report


def candidates(model: nn.Module, pattern: Pattern, recipe: Recipe | None) -> Iterator[LayerCandidate]:
    """Everything in ``model`` that has a weight, except norms."""
    # a module may stand under several names; only a parameter of several modules is tied
    uses = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    kinds = {kind for kind in {type(m) for m in model.modules()} if _hands_weights_over(kind)}
    bypassed = {id(child): type(m).__name__ for m in model.modules() if type(m) in kinds for child in m.children()}
    heads = set()
    for getter in (getattr(m, "get_output_embeddings", None) for m in model.modules()):
        with suppress(NotImplementedError, AttributeError):  # in Hugging Face: the model has none
            if callable(getter):
                heads.add(id(getter()))
    # what a layer of PEFT adds to the layer that it wraps: low-rank matrices, which are small already
    wrapping = [m for m in model.modules() if hasattr(m, "adapter_layer_names") and isinstance(getattr(m, "base_layer", None), nn.Module)]
    adapters = {id(part) for m in wrapping for name, child in m.named_children() if name != "base_layer" for part in child.modules()}
    for name, module in model.named_modules():
        if id(module) in adapters:
            continue
        if isinstance(module, (StackedWeight, CompressedStack)):
            continue  # comes with its experts module
        if isinstance(module, CompressedLinear) and module.layout == EMBEDDING:
            continue
        conv = isinstance(module, nn.Conv2d) and not _channels(module, pattern)
        if conv or isinstance(module, (nn.Linear, NMWeight, CompressedLinear)) or any(map(is_conv1d_type, type(module).__mro__)):
            yield _candidate(name, module, pattern, recipe, uses, bypassed, heads)
        elif stacks_of(module) or isinstance(module, (SparseExperts, CompressedExperts)):
            yield from _stacks(name, module, pattern, recipe, uses)
        elif isinstance(module, nn.MultiheadAttention):
            for key, p in module.named_parameters(recurse=False):
                if p.dim() == 2:
                    yield LayerCandidate(_join(name, key), module, tuple(p.shape), "nn.MultiheadAttention multiplies it itself")
        # parametrized weights come with their module
        elif not isinstance(module, (*NORMS, ParametrizationList)):
            yield from _others(name, module, pattern)


def _hands_weights_over(kind: type[nn.Module]) -> bool:
    """Whether a method of the class passes its layers' weights to torch's function for attention, as torch's own class and WavLM's do."""
    for name in dir(kind):  # a loop, since each element of a generator is a call
        code = getattr(inspect.getattr_static(kind, name), "__code__", None)
        if code is not None and "multi_head_attention_forward" in code.co_names:
            return True
    return False


def _channels(conv: nn.Conv2d, pattern: Pattern) -> str:
    """Why the input channels of ``conv`` have no groups of ``pattern``; empty where they have."""
    if is_lazy(conv._parameters.get("weight")):  # type: ignore[arg-type]  # asking for the attribute may compute it
        return "a convolution whose parameters are not initialised yet; run the model once first"
    if conv.groups != 1:
        summed = conv.in_channels // conv.groups
        return f"a convolution with groups={conv.groups}, whose outputs each sum over {summed} of {conv.in_channels} input channels"
    return f"a convolution whose in_channels={conv.in_channels} is not a multiple of M={pattern.m}" if conv.in_channels % pattern.m else ""


def _stacks(name: str, module: nn.Module, pattern: Pattern, recipe: Recipe | None, uses: Counter[int]) -> Iterator[LayerCandidate]:
    """The stacks of an experts module, dense, sparse or compressed; each counts as one matrix per expert."""
    chosen = experts_per_token(module)
    for child, stack in module.named_children():
        if isinstance(stack, CompressedStack):
            full_name, rows = layer_name(_join(name, child), stack), None if chosen is None else chosen / stack.experts
            yield LayerCandidate(full_name, module, stack.stored_shape, COMPRESSED, layout=stack.layout, rows=rows)
    for key, layout in stacks_of(module).items():
        weight = module._parameters[key]
        assert weight is not None
        if child_name(key) in module._modules:
            impossible = ALREADY_SPARSE
        elif "forward" in module.__dict__:
            impossible = REPLACED
        elif is_sharded(weight):
            impossible = SHARDED.format("a stack of experts")
        else:
            impossible = _form(weight) or (TIED if uses[id(weight)] > 1 else "")
        shape = tuple(weight.shape)
        keep_dense = f"tiny: fewer than {TINY} features on one side" if min(shape[1:]) < TINY else ""
        rows = None if chosen is None else chosen / shape[0]
        c = LayerCandidate(_join(name, key), module, shape, impossible, keep_dense, layout=layout, key=key, rows=rows)
        yield _fitted(c, pattern, recipe)


def _fitted(c: LayerCandidate, pattern: Pattern, recipe: Recipe | None) -> LayerCandidate:
    """``c`` with the reasons of its shape and of ``recipe``."""
    if c.impossible:
        return c
    if recipe is not None and c.layout not in MATRICES and recipe.setup.linear_only:
        return replace(c, impossible=f"{type(recipe).__name__} {recipe.setup.linear_only}")
    planned = LayerSetup(None) if recipe is None else recipe.layer(pattern, c.matrix_shape)
    cols = c.shape[REDUCED[c.layout] if c.layout not in MATRICES else 1]
    reason = f"in_features={cols} is not a multiple of M={pattern.m}" if cols % pattern.m else planned.unsupported_reason
    keep_dense = "" if isinstance(c.module, NMWeight) else c.keep_dense or planned.keep_dense_reason
    return replace(c, impossible=reason, misshapen=bool(reason), keep_dense=keep_dense)


def _others(name: str, module: nn.Module, pattern: Pattern) -> Iterator[LayerCandidate]:
    kind, known = type(module).__name__, next((reason for kinds, reason in NOT_LINEAR if isinstance(module, kinds)), "")
    weights: dict[str, Tensor] = {key: p for key, p in module.named_parameters(recurse=False) if "bias" not in key}
    weights |= {key: b for key, b in module.named_buffers(recurse=False) if "weight" in key and "mask" not in key}
    for key, made in module._modules.get("parametrizations", nn.ModuleDict()).items():  # type: ignore[union-attr, operator]
        weights[key] = max(made.parameters(recurse=False), key=Tensor.numel)
    # vectors are no weights; position embeddings and class tokens have a first size of 1
    weights = {k: t for k, t in weights.items() if is_lazy(t) or known or (sum(size > 1 for size in t.shape) > 1 and t.shape[0] > 1)}
    features = getattr(module, "out_features", None), getattr(module, "in_features", None)
    if ".quantized." in f"{type(module).__module__}.":
        # a layer of torch.ao keeps its weight packed in an object of C++
        weight = getattr(module, "weight", None)
        if callable(weight) or hasattr(module, "_all_weight_values") or hasattr(module, "_packed_weight_ih"):
            shape = tuple(weight().shape) if callable(weight) else ()
            reason = "quantised by torch.ao; make the model sparse first and quantise it afterwards"
            yield LayerCandidate(name, module, shape, reason, linear=hasattr(module, "in_features"))
        return
    if weights and all(isinstance(f, int) for f in features):
        dtypes = {str(w.dtype) for w in weights.values() if not w.is_floating_point()}
        why = f"is quantised, to {', '.join(sorted(dtypes))}" if dtypes else "is a linear layer of its own kind"
        yield LayerCandidate(name, module, features, f"{kind} {why}; only nn.Linear and Hugging Face's Conv1D are taken")  # type: ignore[arg-type]
        return
    if isinstance(module, nn.Conv2d):
        known = _channels(module, pattern)
    for key, w in weights.items():
        shape = () if is_lazy(w) else tuple(w.shape)
        if known:
            yield LayerCandidate(name if key == "weight" else _join(name, key), module, shape, known, linear=False)
            continue
        why, linear = f"a tensor of {kind}, a layer that sparsify_ does not know", len(shape) == 3 and not LOOKED_UP.search(f"{kind}.{key}")
        if linear and not ATTENTION.search(kind):
            why = f"3-D expert weights of {kind}, " + (
                "which does not say along which dimension it sums, as transformers' experts modules do (use_experts_implementation)"
                if w.is_floating_point()
                else f"quantised to {w.dtype}; make the model sparse first, from weights that are loaded dense"
            )
        yield LayerCandidate(_join(name, key), module, shape, why, linear=linear)


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _candidate(
    name: str, module: nn.Module, pattern: Pattern, recipe: Recipe | None, uses: Counter[int], bypassed: dict[int, str], heads: set[int]
) -> LayerCandidate:
    if isinstance(module, CompressedLinear):
        shape = module.stored_shape if isinstance(module, CompressedConv2d) else module.weight.shape
        return LayerCandidate(name, module, shape, COMPRESSED)
    # reading the attribute may compute it, which changes the state of spectral_norm
    weight: Tensor | None = module._parameters.get("weight")
    if isinstance(weight, nn.parameter.UninitializedParameter):
        return LayerCandidate(name, module, (), "its parameters are not initialised yet; run the model once first")
    layout = LINEAR
    if isinstance(module, nn.Linear):
        # a quantised weight may have any shape, and a computed one is not there
        plain = weight is not None and weight.dim() == 2 and weight.dtype in DTYPES
        shape = tuple(module.weight.shape) if plain else (module.out_features, module.in_features)
    elif isinstance(module, nn.Conv2d):
        shape, layout = (module.out_channels, module.in_channels, *module.kernel_size), CONV2D
    else:
        shape, layout = () if weight is None else tuple(weight.shape[::-1]), CONV1D
    keep_dense = ""
    if id(module) in heads or name.removesuffix(".base_layer").rpartition(".")[2] in HEADS:
        keep_dense = "output head"
    elif shape and min(shape[:2]) < TINY:
        keep_dense = f"tiny: fewer than {TINY} {'channels' if layout == CONV2D else 'features'} on one side"
    impossible = _obstacle(module, weight, layout, uses, bypassed, pattern)
    return _fitted(LayerCandidate(name, module, shape, impossible, keep_dense, layout=layout), pattern, recipe)


def _obstacle(module: nn.Module, weight: Tensor | None, layout: str, uses: Counter[int], bypassed: dict[int, str], pattern: Pattern) -> str:
    """Why a layer cannot be made sparse whatever the pattern is; empty if it can."""
    kind = type(module).__name__
    if isinstance(module, NMWeight):
        if module.governed:
            return ALREADY_SPARSE
        return computed_by(module) if module.pattern == pattern else f"it is {module.pattern} already; take a recipe of that pattern"
    if id(module) in bypassed:
        return f"{bypassed[id(module)]} hands its weight to torch's multi_head_attention_forward, and never calls the layer"
    form = "" if weight is None else _form(weight)
    if form:
        return form
    computed = computed_by(module) or (computed_by(module, "bias") if is_parametrized(module, "bias") else "")
    if computed:
        return computed
    if class_of(module) not in (nn.Linear, nn.Conv2d) and not is_conv1d(module):
        base = {LINEAR: "nn.Linear", CONV2D: "nn.Conv2d"}.get(layout, "Conv1D")
        return f"{kind} is a subclass of {base} with behaviour of its own"
    if "forward" in module.__dict__:
        return REPLACED
    if weight is None:
        return "its weight is not a Parameter: something else computes it"
    if uses[id(weight)] > 1:
        return TIED
    if layout not in MATRICES and is_sharded(weight):
        return SHARDED.format("a convolution")
    dims = len(ORDERS[layout])
    if hasattr(weight, "ds_id"):
        return "DeepSpeed's ZeRO-3 has sharded its weight; use torch.distributed.fsdp.fully_shard"
    if weight.dim() != dims:
        return (
            f"its weight has {weight.dim()} dimensions and not {dims}: it was flattened, as FullyShardedDataParallel (FSDP1) does; use "
            "torch.distributed.fsdp.fully_shard"
        )
    return ""


def _form(weight: Tensor) -> str:
    """Why kernels cannot read such a weight; empty if they can."""
    kind = type(weight)
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ and not isinstance(weight, FakeTensor) and not is_sharded(weight):
        return f"its weight is a {kind.__module__}.{kind.__name__}, a quantised or wrapped tensor; make the layer sparse before that"
    if weight.layout != torch.strided:
        return f"its weight is {weight.layout}; only strided ones have kernels"
    if weight.dtype not in DTYPES:
        quantised = " (quantised; make the layer sparse before that)" if not (weight.is_complex() or weight.dtype == torch.bool) else ""
        return f"its weight is {weight.dtype}{quantised}; only float16, bfloat16, float32 and float64 have kernels"
    return ""


def sparsify_(model: nn.Module, recipe: Recipe | str, filter_fn: FilterFn | None = None) -> Handle:
    """Turn the linear layers and convolutions of ``model`` into sparse ones, in place, and return the handle that drives the recipe.

    Module and Parameter objects, hooks, dtype, device and mode stay the same, and ``state_dict`` keys stay those of the dense model, so
    optimizers may be built before or after. It takes ``nn.Linear``, Hugging Face's ``Conv1D`` and stacked experts, ``nn.Conv2d`` where the
    recipe does no more than transform weights, and layers that were built as ``SparseLinear`` or ``SparseConv2d`` of the recipe's pattern
    and never had a handle; ``print(handle.report)`` shows which layers were left dense and why. A copy of the model (an EMA) keeps the
    phase that it was copied in: to evaluate it, load its state dict into ``model``.

    Args:
        model: any module; its own class is not changed.
        recipe: a recipe, or its name such as ``"srste:2:4"``.
        filter_fn: ``filter_fn(module, name) -> bool`` chooses among these layers, output heads and tiny ones included.

    Raises:
        RecipeError: no layer can be made sparse, the model is sparse already, the filter chose an impossible layer, or a layer's
            weight cannot start the recipe (S-STE has no scale for zeros).
        ShapeError: the filter chose a layer that M does not divide, or whose shape the recipe cannot do with. The model is then as it was.

    Example:
        >>> from nmkernels.recipes import SRSTE
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
        >>> len(sparsify_(model, SRSTE("2:4")).layers)
        2
    """
    recipe = resolve(recipe)
    pattern = Pattern(recipe.pattern)
    if any(isinstance(m, NMWeight) and m.governed for m in model.modules()):
        raise RecipeError(
            "sparsify_: the model has sparse layers already; get the dense model back first, with handle.remove() or densify_(model)."
        )
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise RecipeError(
            "sparsify_: FullyShardedDataParallel (FSDP1) flattens weights. Use torch.distributed.fsdp.fully_shard, which keeps "
            "Parameters apart."
        )
    chosen, report = select(model, pattern, filter_fn, recipe)
    if not chosen:
        raise RecipeError(f"sparsify_: no layer of the model can be made {pattern} sparse:\n{report}")
    return make_handle_(model, recipe, chosen, report)


def make_handle_(
    model: nn.Module, recipe: Recipe, chosen: Iterable[LayerCandidate], report: Report, patterns: Mapping[str, Pattern] | None = None
) -> Handle:
    """Swap the layers that ``select`` has chosen, in place, and return the handle: ``sparsify_`` for a caller that has chosen already.

    ``patterns``: of layers that do not have the recipe's, by name.
    """
    pattern = Pattern(recipe.pattern)
    built = {c.name: c.module for c in chosen if isinstance(c.module, NMWeight)}
    layers: dict[str, NMWeight] = {}
    for c in chosen:
        own = (patterns or {}).get(c.name, pattern)
        if c.key != "weight":
            layers[c.name] = make_stack_sparse_(c.module, c.key, own)
        else:
            layers[c.name] = built.get(c.name) or make_sparse_(c.module, own)
    after_swap(model)
    try:
        handle = Handle(model, recipe, layers, report)
    except Exception:
        for name, layer in layers.items():
            layer.remove_extras()
            if name in built:
                layer._start(pattern)
            else:
                make_dense_(layer)
        switch_fast_paths(model)
        raise
    return handle
