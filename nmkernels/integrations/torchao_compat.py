"""torch's semi-structured tensors from and to this package's 2:4 layers, and checks for torchao's ``quantize_``.

``to_semi_structured_`` gives a finished or compressed model torch's tensors. torchao's sparsity is archived: the migration guide has what
takes the place of its names.
"""

from __future__ import annotations

import functools
import sys
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..layouts import MATRICES
from ..nn.compressed import CompressedLinear
from ..nn.swap import replace_each_
from ..nn.weight import NMWeight
from ..pattern import DtypeError, Pattern, RecipeError, ShapeError

TWO_OF_FOUR = Pattern("2:4")


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
            if isinstance(module, NMWeight) and not module.finished:
                raise RecipeError(f"to_semi_structured_: layer {name!r} is still in training; call handle.finish() first.")
            if module.pattern != TWO_OF_FOUR or module.layout not in MATRICES:
                kind = f"a {type(module).__name__}" if module.layout not in MATRICES else str(module.pattern)
                raise RecipeError(
                    f"to_semi_structured_: layer {name!r} is {kind}; torch has tensors for 2:4 weights of linear layers only."
                )
            reordered = (module.columns if isinstance(module, NMWeight) else module.order) is not None
            if "nm_left" in module._parameters or reordered:
                what = "reorders its inputs" if reordered else "has a low-rank adapter"
                raise RecipeError(f"to_semi_structured_: layer {name!r} {what}, which an nn.Linear cannot.")
            if isinstance(module, CompressedLinear) and module.weight.step is not None:
                raise DtypeError(
                    f"to_semi_structured_: layer {name!r} has {module.weight.kind} values, and torch's tensors take fp16 and bf16: call it "
                    "on the model with floating-point weights, or first nm.densify_(model), which decodes these, and then "
                    "nm.recipes.adopt(model).finish(allow_unused=True)."
                )
            c = module.weight if isinstance(module, CompressedLinear) else ops.compress(module.grouped.detach().contiguous(), TWO_OF_FOUR)
            weights[module] = semi_structured(c)
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


install()
