"""A recipe in an optimizer's state dict: its schedule as one text, and held masks with the moments of their weights.

``torch.distributed.checkpoint`` loads only keys that a fresh optimizer's state dict has too, and trainers may write the entries of a group
once for every parameter: so the schedule is one value, ``param_groups[0]["nm_recipe"]``. The state of a parameter is sharded as the
parameter is: so the held masks of a weight are there, as one tensor of its shape, ``state[i]["nm_held"]``.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..layouts import as_matrix, as_stored, ordered
from ..nn.weight import NMWeight
from ..pattern import CheckpointError
from ..recipes.contract import State
from ..shards import is_sharded, like, local, spread

HELD = "nm_held"
BITS = (1, 2, 4, 8, 16, 32, 64, 128)
FOREIGN = "the optimizer state holds a recipe state that nmkernels did not write."


def written(state: State, layers: Mapping[str, NMWeight], holding: Mapping[str, NMWeight]) -> tuple[str, dict[str, Tensor]]:
    """``state`` as text, and for each layer of ``holding`` a uint8 tensor, shaped and sharded as its weight, whose bit k is the k-th mask.

    ``state["held"]`` (layer -> name -> tensor) is what the layers hold. Masks of other ``layers`` are in the text, but not those of sharded
    weights, which differ by rank.
    """
    bits = {name: torch.zeros_like(local(layer.parameter), dtype=torch.uint8) for name, layer in holding.items()}
    entries: dict[str, dict[str, Any]] = {}
    for name, values in state.get("held", {}).items():
        layer, used = layers[name], 0
        (rows, cols), entry = layer.master.shape, entries.setdefault(name, {})
        for key, value in values.items():
            of_weight = value.dtype == torch.bool and value.dim() == 2 and value.shape[1] == cols and rows % (value.shape[0] or 1) == 0
            if not of_weight:
                entry[key] = _plain(value)
            elif name in bits:
                every = rows // (value.shape[0] or 1) or 1
                mask = value.repeat_interleave(every, 0) if every > 1 else value
                as_matrix(bits[name], layer.layout).bitwise_or_(mask.to(torch.uint8) * BITS[used])
                entry[key] = {"bit": used, "every": every}
                used += 1
            elif not is_sharded(layer.parameter):
                entry[key] = _plain(value)
    rest = {key: value for key, value in state.items() if key != "held"}
    text = json.dumps(_plain({**rest, "held": entries} if entries else rest))
    return text, {name: like(layer.parameter.detach(), bits[name]) for name, layer in holding.items()}


def restored(saved: Any, layers: Mapping[str, NMWeight], masks: Mapping[str, Tensor]) -> State:
    """The inverse of ``written``; ``saved`` may be a state already.

    Raises:
        CheckpointError: it is not such a text, or masks are missing in ``masks``, or their shapes are not those of their weights.
    """
    if isinstance(saved, dict):
        return dict(saved)
    try:
        state = _tensors(json.loads(saved))
        entries = dict(state.get("held", {}))
        held = {name: _held(name, values, layers, masks) for name, values in entries.items()}
    except CheckpointError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(FOREIGN) from error
    if held:
        state["held"] = held
    return dict(state)


def _held(name: str, values: dict[str, Any], layers: Mapping[str, NMWeight], masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    tensors = {key: value for key, value in values.items() if isinstance(value, Tensor)}
    places = {key: value for key, value in values.items() if key not in tensors}
    layer, bits = layers.get(name), masks.get(name)
    if layer is None:
        return tensors  # whether the layers are those of this run is checked later
    for key, value in tensors.items():
        if value.dtype == torch.bool and value.shape == layer.shape and is_sharded(layer.parameter):
            stored = as_stored(value, layer.layout, layer.parameter.shape)
            tensors[key] = as_matrix(local(spread(layer.parameter, stored)), layer.layout)
    if not places:
        return tensors
    if bits is None:
        if layer.parameter.requires_grad:
            raise CheckpointError(
                f"the checkpoint's masks of layer {name!r} are missing: they are {HELD!r} in the optimizer's state of its weight. "
                "Load all of that; of several optimizers, in the order in which attach was given them."
            )
        return tensors  # loaders leave out what belongs to a frozen weight
    if bits.shape != layer.parameter.shape or local(bits).shape != local(layer.parameter).shape:
        raise CheckpointError(f"the checkpoint's mask of layer {name!r} has a different shape from its weight {layer.shape}.")
    packed = as_matrix(ordered(local(bits).to(torch.uint8), layer.layout), layer.layout)
    for key, place in places.items():
        tensors[key] = (packed & BITS[place["bit"]]).ne(0)[:: place["every"]].contiguous()
    return tensors


# ---- values as JSON


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(inside) for key, inside in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inside) for inside in value]
    if not isinstance(value, Tensor):
        return value
    if value.dtype == torch.bool:
        eight = F.pad(value.cpu().flatten(), (0, -value.numel() % 8)).view(-1, 8) * torch.tensor(BITS, dtype=torch.uint8)
        packed = eight.sum(1, dtype=torch.uint8).numpy().tobytes()
        return {"bits": base64.b64encode(packed).decode(), "shape": list(value.shape)}
    return {"dtype": str(value.dtype).removeprefix("torch."), "values": value.tolist()}


def _tensors(value: Any) -> Any:
    if isinstance(value, list):
        return [_tensors(inside) for inside in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"dtype", "values"}:
        return torch.tensor(value["values"], dtype=getattr(torch, value["dtype"]))
    if value.keys() == {"bits", "shape"}:
        shape = value["shape"]
        packed = torch.frombuffer(bytearray(base64.b64decode(value["bits"]) or b"\0"), dtype=torch.uint8)
        return (packed[:, None] & torch.tensor(BITS, dtype=torch.uint8)).ne(0).flatten()[: math.prod(shape)].view(shape)
    return {key: _tensors(inside) for key, inside in value.items()}
