"""torchao's names for 2:4 sparsity, with this package's layers; torchao may be installed too, and is not needed.

====================================================  =================================================================================
torchao                                               here
====================================================  =================================================================================
``sparsity.sparsify_``, ``semi_sparse_weight``        weights whose zeros are 2:4 are compressed: ``CompressedLinear``
``sparsity.apply_fake_sparsity``                      weights are pruned to 2:4 by magnitude, and stay dense tensors
``sparsity.training.SemiSparseLinear``                ``nm.SparseLinear``: 2:4 along ``in`` at every call, gradient straight through
``swap_linear_with_semi_sparse_linear``, and back     the same; module objects and Parameters stay
``quantization.quantize_``                            torchao's own, with checks for layers of this package
``torch.sparse.to_sparse_semi_structured``            ``to_semi_structured_``: a finished or compressed model with torch's tensors
====================================================  =================================================================================

torchao's sparsifiers leave plain layers with zeros: ``nm.recipes.adopt(model)`` makes them sparse layers, to train or to compress.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from .. import ops
from ..layouts import MATRICES
from ..nn import CompressedLinear, NMWeight, SparseLinear, compress_, make_dense_, make_sparse_
from ..nn.swap import after_swap, replace_each_
from ..pattern import DtypeError, Pattern, RecipeError, ShapeError
from ..recipes.existing import adopt
from ..train.layer_names import check_names, listed

FilterFn = Callable[[nn.Module, str], bool]
TWO_OF_FOUR = Pattern("2:4")

ELSEWHERE = {
    "WeightNormSparsifier": 'nm.sparsify_(model, nm.recipes.ASP("2:4")) prunes by magnitude and keeps the mask',
    "WandaSparsifier": 'nm.sparsify_(model, nm.recipes.ASP("2:4", score="wanda")) scores by inputs, after handle.calibrate()',
    "PerChannelNormObserver": "handle.calibrate() collects the norms of inputs",
    "SupermaskLinear": "nm.recipes.MaskLLM and BiMask learn masks of frozen weights",
    "BlockSparseWeightConfig": "block sparsity is not an N:M pattern",
    "block_sparse_weight": "block sparsity is not an N:M pattern",
    "SemiSparseActivationLinear": "nm.recipes.Activation24 makes the activations of nm.nn.SquaredReLUMLP 2:4",
}
"""Names of torchao that do not exist here, and what to use instead."""


def __getattr__(name: str) -> NoReturn:
    if name in ELSEWHERE:
        raise ImportError(f"nmkernels has no {name} of torchao: {ELSEWHERE[name]}. torchao's own may be used together with nmkernels.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@dataclass(frozen=True)
class SemiSparseWeightConfig:
    """torchao's config for ``sparsify_``; ``alg_id``, cuSPARSELt's algorithm, is ignored: ``nm.tune`` measures which is fastest."""

    alg_id: int = 0


semi_sparse_weight = SemiSparseWeightConfig
"""torchao's older name of SemiSparseWeightConfig."""


def sparsify_(model: nn.Module, config: Any, filter_fn: FilterFn | None = None) -> nn.Module:
    """Compress every linear layer whose weight is 2:4, in place, and return the model, like torchao's function of this name.

    Args:
        config: ``SemiSparseWeightConfig()``, this package's or torchao's.
        filter_fn: ``filter_fn(module, name) -> bool``; None: every layer with 2:4 zeros.

    Raises:
        RecipeError: another config; a layer chosen by the filter is not 2:4; or no layer is.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        >>> type(sparsify_(apply_fake_sparsity(model), semi_sparse_weight())[0]).__name__
        'CompressedLinear'
    """
    if type(config).__name__ != SemiSparseWeightConfig.__name__:
        raise RecipeError(
            f"sparsify_: {type(config).__name__} is not a config for 2:4 weights; pass SemiSparseWeightConfig(). "
            f"{ELSEWHERE.get(type(config).__name__, 'To quantise, call quantize_ on a finished model')}."
        )
    if not any(isinstance(module, NMWeight) and module.finished for module in model.modules()):
        if filter_fn is not None:
            for name, module in _linears(model, filter_fn):
                if module.in_features % 4 or not ops.is_nm(module.weight.detach(), TWO_OF_FOUR):
                    raise RecipeError(
                        f"sparsify_: the weight of layer {name!r} is not 2:4. Train it so (nm.sparsify_), or prune it by "
                        "apply_fake_sparsity(model, filter_fn=...), which loses accuracy."
                    )
        adopt(model, TWO_OF_FOUR, filter_fn).finish(allow_unused=True)
    return compress_(model)


@torch.no_grad()
def apply_fake_sparsity(model: nn.Module, filter_fn: FilterFn | None = None) -> nn.Module:
    """Set the two smallest of every four weights along ``in`` to 0 in every linear layer, in place, and return the model.

    Args:
        filter_fn: ``filter_fn(module, name) -> bool``; None: every ``nn.Linear`` whose ``in_features`` is a multiple of 4.

    Raises:
        RecipeError: the filter chose no layer.
        ShapeError: the filter chose a layer whose ``in_features`` is not a multiple of 4.
    """
    chosen = _linears(model, filter_fn)
    if filter_fn is not None and not chosen:
        raise RecipeError(f"apply_fake_sparsity: filter_fn chooses no nn.Linear of {listed(name for name, _ in _linears(model, None))}.")
    for name, module in chosen:
        if module.in_features % 4 == 0:
            ops.prune(module.weight.detach().clone(), TWO_OF_FOUR, out=module.weight.detach())
        elif filter_fn is not None:
            raise ShapeError(f"apply_fake_sparsity: layer {name!r} has in_features={module.in_features}, which is not a multiple of 4.")
    return model


# ---- training


class SemiSparseLinear(SparseLinear):
    """torchao's name of ``nm.SparseLinear`` at 2:4. torchao's mask is 2:4 along both dimensions and chosen greedily; this one is 2:4 along
    ``in`` and optimal."""

    @classmethod
    def from_dense(cls, linear: nn.Linear) -> NMWeight:
        """Make ``linear`` sparse in place, with its Parameters and hooks, and return it."""
        return make_sparse_(linear, TWO_OF_FOUR)

    @staticmethod
    def to_dense(layer: NMWeight) -> nn.Module:
        """Make ``layer`` an ``nn.Linear`` again in place, with its weight unchanged, and return it."""
        return make_dense_(layer)


def swap_linear_with_semi_sparse_linear(model: nn.Module, config: Mapping[str, type], current: str = "") -> None:
    """Make the linear layers that ``config`` names sparse, in place; it maps names to ``SemiSparseLinear``, this package's or torchao's.

    ``nm.sparsify_(model, recipe)`` may follow, for a recipe other than the straight-through gradient.

    Raises:
        RecipeError: a class other than ``SemiSparseLinear``, or a name that is not an ``nn.Linear`` of the model; nothing has changed.
        ShapeError: ``in_features`` is not a multiple of 4; nothing has changed.
    """
    chosen, linears = {}, {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    for full, kind in config.items():
        name = full.removeprefix(f"{current}.") if current else full
        if kind.__name__ != SemiSparseLinear.__name__:
            raise RecipeError(
                f"swap_linear_with_semi_sparse_linear: {kind.__name__} of layer {full!r}: {ELSEWHERE.get(kind.__name__, '')}."
            )
        check_names("swap_linear_with_semi_sparse_linear: config", [name], linears, kind="nn.Linear")
        module = linears[name]
        TWO_OF_FOUR.check_divides(f"swap_linear_with_semi_sparse_linear: layer {full!r}", module.in_features, "in_features")
        chosen[full] = module
    for module in chosen.values():
        make_sparse_(module, TWO_OF_FOUR)
    after_swap(model)


def swap_semi_sparse_linear_with_linear(model: nn.Module, current: str = "") -> None:
    """Make every sparse layer without a handle an ``nn.Linear`` again, with its weight unchanged; for others use ``handle.remove()``."""
    for module in list(model.modules()):
        if isinstance(module, SparseLinear) and not module.governed:
            make_dense_(module)
    after_swap(model)


# ---- torch's sparse tensors


def to_semi_structured_(model: nn.Module) -> nn.Module:
    """Give every finished or compressed 2:4 layer a weight of ``torch.sparse.SparseSemiStructuredTensor``, in place; returns the model.

    The layers become plain ``nn.Linear``, which run without this package on a GPU with 2:4 tensor cores; weights must be fp16 or bf16,
    ``out`` a multiple of 32 and ``in`` of 64. The tensors have torch's CUTLASS form, on any device.

    Raises:
        RecipeError: a layer is in training, has another pattern, an adapter or reordered inputs; nothing has changed.
        ShapeError, DtypeError: torch does not support that size or dtype, integers among them; nothing has changed.
    """
    weights: dict[nn.Module, Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, (NMWeight, CompressedLinear)):
            weights[module] = semi_structured(_packed(name, module))
    if not weights:
        raise RecipeError("to_semi_structured_: the model has no sparse linear layer.")
    made: dict[nn.Module, nn.Module] = {}
    for module, weight in weights.items():
        rows, cols = weight.shape
        plain = nn.Linear(cols, rows, bias=False, device="meta")
        plain.register_parameter("bias", module._parameters["bias"])
        plain.weight = nn.Parameter(weight, requires_grad=False)
        made[module] = plain.train(module.training)
    replace_each_(model, made)
    return model


def _packed(name: str, module: NMWeight | CompressedLinear) -> ops.Compressed:
    if isinstance(module, NMWeight) and not module.finished:
        raise RecipeError(f"to_semi_structured_: layer {name!r} is still in training; call handle.finish() first.")
    if module.pattern != TWO_OF_FOUR or module.layout not in MATRICES:
        kind = f"a {type(module).__name__}" if module.layout not in MATRICES else str(module.pattern)
        raise RecipeError(f"to_semi_structured_: layer {name!r} is {kind}; torch has tensors for 2:4 weights of linear layers only.")
    reordered = (module.columns if isinstance(module, NMWeight) else module.order) is not None
    if "nm_left" in module._parameters or reordered:
        what = "reorders its inputs" if reordered else "has a low-rank adapter"
        raise RecipeError(f"to_semi_structured_: layer {name!r} {what}, which an nn.Linear cannot.")
    if isinstance(module, CompressedLinear) and module.weight.step is not None:
        raise DtypeError(
            f"to_semi_structured_: layer {name!r} has {module.weight.kind} values, and torch's tensors take fp16 and bf16: call it on the "
            "model with floating-point weights, or first nm.densify_(model), which decodes these, and then "
            "nm.recipes.adopt(model).finish(allow_unused=True)."
        )
    return ops.compress(module.grouped.detach().contiguous(), TWO_OF_FOUR) if isinstance(module, NMWeight) else module.weight


def semi_structured(c: ops.Compressed) -> Tensor:
    """Convert a compressed 2:4 matrix to torch's ``SparseSemiStructuredTensorCUTLASS``, which orders the indices differently.

    Raises:
        ShapeError: ``out`` is not a multiple of 32, or ``in`` not of 64.
        DtypeError: values are neither fp16 nor bf16.
    """
    from torch.sparse import SparseSemiStructuredTensorCUTLASS as Cutlass

    rows, cols = c.shape
    if c.pattern != TWO_OF_FOUR or len(c.shape) != 2 or rows % 32 or cols % 64:
        raise ShapeError(f"semi_structured: torch's tensors are 2:4 of shape (32·a, 64·b), not {c.pattern} {tuple(c.shape)}.")
    if c.values.dtype not in (torch.float16, torch.bfloat16):
        raise DtypeError(f"semi_structured: the weight is {c.kind if c.step is not None else c.dtype}; make it fp16 or bf16 first.")
    # one nibble per group, as in hardware; four make a 16-bit word, and torch stores words in CUTLASS's order
    words = c.indices.contiguous().view(torch.int16)
    meta = torch.empty_like(words).view(-1).scatter_(0, _word_order(words), words.reshape(-1)).view_as(words)
    return Cutlass(torch.Size(c.shape), c.values, meta, None, None, None)


def from_semi_structured(tensor: Tensor) -> ops.Compressed:
    """Convert torch's ``SparseSemiStructuredTensorCUTLASS``, fp16 or bf16, to a compressed matrix for ``CompressedLinear``.

    Raises:
        DtypeError: another kind of tensor; cuSPARSELt's has its own order of indices, for which use ``tensor.to_dense()`` on its GPU.
    """
    packed, meta = getattr(tensor, "packed", None), getattr(tensor, "meta", None)
    if packed is None or meta is None or meta.dtype != torch.int16 or packed.shape[1] * 2 != tensor.shape[1]:
        raise DtypeError(
            f"from_semi_structured: a {type(tensor).__name__} has no readable indices; use ops.compress(tensor.to_dense(), '2:4')."
        )
    words = meta.reshape(-1).gather(0, _word_order(meta)).view_as(meta)
    return ops.Compressed(packed.contiguous(), words.view(torch.uint8), TWO_OF_FOUR, tuple(tensor.shape))


def _word_order(words: Tensor) -> Tensor:
    """The position of each word of indices ``(out, in / 16)`` in CUTLASS's order: blocks of 32 rows and 2 columns."""
    from torch.sparse._semi_structured_conversions import _calculate_meta_reordering_scatter_offsets as offsets

    order: Tensor = offsets(words.shape[0], words.shape[1], words.dtype, words.device)
    return order


# ---- torchao's quantize_


def check_quantize(model: nn.Module, filter_fn: Any = None) -> None:
    """Raise ``RecipeError`` if torchao's ``quantize_`` would break a sparse model or do nothing; warn if it would skip layers."""
    compressed = [name for name, module in model.named_modules() if isinstance(module, CompressedLinear)]
    chosen = filter_fn if callable(filter_fn) else lambda module, name: isinstance(module, nn.Linear)
    for name, module in model.named_modules():
        if isinstance(module, NMWeight) and not module.finished and module.transform is not None and chosen(module, name):
            raise RecipeError(f"quantize_: layer {name!r} is in training: its mask depends on the float weight. Call finish() first.")
    if not compressed:
        return
    way = "Quantise the finished model, before compress_: the quantised weights keep its zeros"
    wanted = callable(filter_fn) and any(filter_fn(model.get_submodule(name), name) for name in compressed)
    if wanted or not any(isinstance(module, nn.Linear) for module in model.modules()):
        raise RecipeError(f"quantize_: layer {compressed[0]!r} is compressed, and torchao has no quantised form of it. {way}.")
    warnings.warn(f"quantize_: {len(compressed)} compressed layers stay as they are. {way}.", stacklevel=3)


def install() -> None:
    """Add these checks to torchao's own ``quantize_``, if torchao is imported. Called at the end of this file and after layers are swapped.

    A name that was bound to the function earlier (``from torchao.quantization import quantize_``) has no checks.
    """
    module: Any = sys.modules.get("torchao.quantization.quant_api")
    if module is None or hasattr(module.quantize_, "_nm_checked"):
        return
    theirs = module.quantize_

    @functools.wraps(theirs)
    def checked(model: nn.Module, config: Any, *args: Any, **kwargs: Any) -> Any:
        check_quantize(model, args[0] if args else kwargs.get("filter_fn"))
        return theirs(model, config, *args, **kwargs)

    checked._nm_checked = True  # type: ignore[attr-defined]
    for place in (module, sys.modules.get("torchao.quantization")):
        if getattr(place, "quantize_", None) is theirs:
            place.quantize_ = checked  # type: ignore[union-attr]


def _linears(model: nn.Module, filter_fn: FilterFn | None) -> list[tuple[str, nn.Linear]]:
    found = ((name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return [(name, module) for name, module in found if filter_fn is None or filter_fn(module, name)]


install()
