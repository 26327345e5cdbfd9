"""Calibration data: the user's batches, how a model is called with one, and which of a layer's inputs are padding."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...pattern import RecipeError
from .relay import moved


def call(model: nn.Module, batch: Any) -> Any:
    """The model's output for ``batch``: keyword arguments, arguments, or a tensor; without a cache of keys and values."""
    place = next((p.device for p in model.parameters() if not p.is_meta), None)
    batch = moved(batch, place)
    kwargs = dict(batch) if isinstance(batch, Mapping) else {}
    args = () if isinstance(batch, Mapping) else tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
    if "use_cache" in inspect.signature(model.forward).parameters:
        kwargs.setdefault("use_cache", False)
    return model(*args, **kwargs)


def padding(batch: Any, x: Tensor) -> Tensor | None:
    """Which rows of a layer's input ``x`` are tokens, from the attention masks of the batch that have its sizes; None: all.

    Where those of an encoder and a decoder have the same sizes, only what both leave out is left out.
    """
    if not isinstance(batch, Mapping):
        return None
    masks = []
    for ids, name in (("input_ids", "attention_mask"), ("decoder_input_ids", "decoder_attention_mask")):
        mask, tokens = batch.get(name), batch.get(ids)
        if not isinstance(mask, Tensor) and isinstance(tokens, Tensor):
            mask = torch.ones(tokens.shape[:2])
        if isinstance(mask, Tensor) and mask.dim() == 2 and (x.shape[:2] == mask.shape or (x.dim() == 2 and len(x) == mask.numel())):
            masks.append(mask.reshape(-1) != 0)
    return torch.stack(masks).any(0).to(x.device) if masks else None


def batches_of(data: Iterable[Any]) -> list[Any]:
    """The batches of ``data`` on the CPU, copied: a loader may fill the same tensors again."""
    if isinstance(data, Mapping):
        raise RecipeError("prune_: data is a single batch; pass a list of batches, or a DataLoader.")
    batches = []
    for batch in data:
        # transformers' BatchEncoding is a mapping, but no dict, of which pytree knows no leaves
        plain = dict(batch) if isinstance(batch, Mapping) else batch
        batches.append(pytree.tree_map_only(Tensor, lambda t: t.detach().to("cpu", copy=True), plain))
    if not batches:
        raise RecipeError("prune_: data has no batch; pass a list of batches, or a DataLoader. A generator can be read only once.")
    return batches
