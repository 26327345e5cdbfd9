"""Calibration data: the user's batches, how a model is called with one, and which of a layer's inputs are padding."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..pattern import RecipeError


def call(model: nn.Module, batch: Any) -> Any:
    """The model's output for ``batch``: keyword arguments, arguments, or a tensor; without a cache of keys and values."""
    place = next((p.device for p in model.parameters() if not p.is_meta), None)
    batch = moved(batch, place)
    kwargs = dict(batch) if isinstance(batch, Mapping) else {}
    args = () if isinstance(batch, Mapping) else tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
    if "use_cache" in inspect.signature(model.forward).parameters:
        kwargs.setdefault("use_cache", False)
    return model(*args, **kwargs)


def copied(values: Any) -> Any:
    """``values`` with copies of all tensors in them: a model may write into what it gets."""
    return pytree.tree_map_only(Tensor, torch.clone, values)


def moved(values: Any, device: torch.device | None) -> Any:
    """``values`` with all tensors in them on ``device``; None: as they are."""
    return values if device is None else pytree.tree_map_only(Tensor, lambda t: t.to(device), values)


def described(batch: Any) -> str:
    """A batch in a few words: ``input_ids int64 (4, 32)``."""
    if isinstance(batch, Mapping):
        return ", ".join(f"{key} {described(value)}" for key, value in batch.items()) or "an empty mapping"
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')} {tuple(batch.shape)}"
    if isinstance(batch, (tuple, list)):
        return f"({', '.join(described(value) for value in batch[:3])}{', ...' if len(batch) > 3 else ''})"
    return f"a {type(batch).__name__}"


def size_of(batch: Any) -> int:
    """The tokens of a batch, for the time it takes: those of ``input_ids``, or the rows of its first tensor."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    first = ids if isinstance(ids, Tensor) else next((leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)), None)
    if first is None:
        return 1
    return max(1, first.numel() // (first.shape[-1] if first.is_floating_point() and first.dim() > 1 else 1))


def padding(model: nn.Module, batch: Any, x: Tensor) -> Tensor | None:
    """Which rows of a layer's input ``x`` are tokens, from the attention masks of the batch that have its sizes; None: all.

    Where those of an encoder and a decoder have the same sizes, only what both leave out is left out.
    """
    if isinstance(batch, (tuple, list)):
        with suppress(TypeError, ValueError):  # forward= may take them apart in another way
            batch = inspect.signature(model.forward).bind_partial(*batch).arguments
    if not isinstance(batch, Mapping):
        return None
    masks = []
    for ids, name in (("input_ids", "attention_mask"), ("decoder_input_ids", "decoder_attention_mask")):
        mask, tokens = batch.get(name), batch.get(ids)
        if not isinstance(mask, Tensor) and isinstance(tokens, Tensor):
            mask = torch.ones(tokens.shape[:2])
        # of two dimensions, x has all tokens of the batch, or a row for each sequence as in a classification head
        if isinstance(mask, Tensor) and mask.dim() == 2 and (len(x) == mask.numel() if x.dim() == 2 else x.shape[:2] == mask.shape):
            masks.append(mask.reshape(-1) != 0)
    return torch.stack(masks).any(0).to(x.device) if masks else None


def batches_of(data: Iterable[Any], model: Any) -> list[Any]:
    """The batches of ``data`` on the CPU, copied, since a loader may fill the same tensors again; ``model``, or its class, takes them.

    numpy arrays and nested lists of numbers become tensors. Text next to them, which no model takes, is left out. One sample of a dataset,
    whose ``input_ids`` have no batch dimension, is a batch of one.
    """
    if data is None or isinstance(data, (str, bytes, os.PathLike)):
        what = "None" if data is None else f"the text {str(data)[:40]!r}"
        raise RecipeError(f"prune_: data is {what}, and must be batches of what the model takes: tokenized text, or inputs. {FORM}")
    if isinstance(data, Mapping) or (isinstance(data, (Tensor, np.ndarray)) and data.ndim < 3):
        raise RecipeError(f"prune_: data is a single batch, {described(data)}; pass [data], or its parts, data.split(8).")
    try:
        batches = [_plain(batch, number, model) for number, batch in enumerate(data, 1)]
    except TypeError as error:
        if isinstance(data, Iterable):
            raise
        raise RecipeError(f"prune_: data is {described(data)}, and must be batches of what the model takes. {FORM}") from error
    if not batches:
        raise RecipeError("prune_: data has no batch; pass a list of batches, or a DataLoader. A generator can be read only once.")
    return batches


def _plain(batch: Any, number: int, model: Any) -> Any:
    """A batch with tensors of its own, on the CPU, in the containers that pytree knows."""
    if isinstance(batch, Mapping):  # transformers' BatchEncoding is one, but no dict
        named = inspect.signature(model.forward).parameters
        values = {key: _tensors(value, number) for key, value in batch.items() if key in named or not _is_text(value)}
        if not values:
            raise RecipeError(f"prune_: batch {number} of data has text only ({', '.join(map(repr, batch))}). {FORM}")
        ids = values.get("input_ids")
        if isinstance(ids, Tensor) and ids.dim() == 1:
            return {key: value[None] if isinstance(value, Tensor) else value for key, value in values.items()}
        return values
    if _is_text(batch) or (isinstance(batch, (tuple, list)) and batch and all(map(_is_text, batch))):
        raise RecipeError(f"prune_: batch {number} of data is text. {FORM}")
    value = _tensors(batch, number)
    ids = isinstance(value, Tensor) and value.dim() == 1 and not value.is_floating_point()
    return value[None] if ids and getattr(model, "main_input_name", "") == "input_ids" else value


def _tensors(value: Any, number: int) -> Any:
    def plain(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            return torch.from_numpy(leaf.copy())
        if isinstance(leaf, Tensor):
            return leaf.detach().to("cpu", copy=True)
        try:
            return torch.tensor(leaf) if _has_numbers(leaf) else leaf
        except (ValueError, TypeError) as error:
            raise RecipeError(
                f"prune_: batch {number} of data has a list that is not a matrix ({error}). Give its rows one length, with an "
                "attention_mask for the padding, or pass each row as a batch."
            ) from error

    return pytree.tree_map(plain, value, is_leaf=_has_numbers)


def _has_numbers(value: Any) -> bool:
    """Whether this is a list of numbers, or of such lists, as in a row of a dataset. Tuples, which are sizes and the like, stay tuples."""
    return isinstance(value, list) and bool(value) and all(isinstance(v, (int, float, np.number)) or _has_numbers(v) for v in value)


def _is_text(value: Any) -> bool:
    return isinstance(value, (str, bytes)) or (isinstance(value, (list, tuple)) and bool(value) and all(map(_is_text, value)))


FORM = (
    "Such as [tokenizer(text, return_tensors='pt') for text in texts], or a DataLoader; a batch is a mapping of keyword arguments, a tuple "
    "of arguments, or a tensor."
)
