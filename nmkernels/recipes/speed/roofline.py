"""The roofline: each piece of a step takes as long as its bytes or its arithmetic do, whichever is more, and the start of a kernel.

    product: max(bytes / (share · bandwidth), 2 · tokens · out · in / (rate · ratio)) + launch        ratio 1 where it is dense
    pass over memory: bytes / (share · bandwidth) + launch

Bytes per element of s bytes, and p = s·N/M + index bits in packed form (1.125 for 2:4 in 16 bits): a weight of w bytes masked and packed
one way w + p (3.125 for w = s = 2), both ways with the mask w + 2p + 1/8 (4.375), MVUE to packed s + p (3.125). MaskedAdamW, which
reads the weight anyhow, only adds what is written.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ...ops import tensor_core_pattern
from ...pattern import Pattern
from .costs import Cost, Rules
from .devices import Device

TWO_FOUR = Pattern("2:4")


@dataclass(frozen=True)
class Layer:
    """A linear layer as a roofline sees it.

    Args:
        shape: of the weight, ``(out, in)``. tokens: rows of its input.
        dtype: of the products. master: of the weight.
    """

    shape: tuple[int, int]
    tokens: int
    dtype: torch.dtype
    master: torch.dtype

    def sizes(self, role: str) -> tuple[int, int, int]:
        """``(rows, cols)`` of what is N:M in that product, groups along ``cols``, and how many columns it is multiplied with."""
        out, cols = self.shape
        return {"fprop": (out, cols, self.tokens), "dgrad": (cols, out, self.tokens), "wgrad": (out, self.tokens, cols)}[role]


def packed_bytes(pattern: Pattern, dtype: torch.dtype) -> float:
    """Bytes of the compressed form per element of the dense one.

    Example:
        >>> packed_bytes(Pattern("2:4"), torch.bfloat16)
        1.125
    """
    return pattern.density * (dtype.itemsize + pattern.index_bits / 8)


def predict(device: Device, layer: Layer, rules: Rules, fused: bool = True) -> Cost:
    """Seconds of each piece of ``layer`` by the roofline of ``device``, as a function of its name.

    Args:
        fused: the optimizer masks and packs in its own pass over the weight, as MaskedAdamW can with masks by magnitude.
    """

    def cost(piece: str) -> float | None:
        role, _, form = piece.partition(" ")
        if form == "estimated":  # here product and estimate are two pieces
            return None
        if role == "weight":
            return _prepare(device, layer, rules, form, fused and rules.prepare in ("mask", "transposable"))
        if role == "estimate":
            assert rules.estimate is not None
            moved = layer.tokens * layer.shape[0] * (layer.dtype.itemsize + packed_bytes(rules.estimate, layer.dtype))
            return moved / (device.estimate * device.bandwidth) + device.call
        if role == "adapter":
            return _adapter(device, layer, rules.rank) if rules.rank else None
        if role == "expand":
            moved = layer.shape[0] * layer.shape[1] * (layer.dtype.itemsize + packed_bytes(rules.pattern, layer.dtype))
            return moved / (device.passes * device.bandwidth) + device.call
        pattern = None if form == "dense" else rules.estimate if role == "wgrad" else rules.pattern
        if form == "dense" or pattern is None or not refused(device, layer, role, pattern):
            return product(device, layer, role, pattern)
        return None

    return cost


def refused(device: Device, layer: Layer, role: str, pattern: Pattern) -> str:
    """Why no kernel profits from the N:M operand of that product; empty where one does."""
    rows, cols, width = layer.sizes(role)
    # tokens are filled up with zeros; a dgrad from the weight packed along its rows has the rows of fprop
    if role == "wgrad":
        return device.refuses(rows, 0, layer.shape[1], layer.dtype, pattern)
    if role == "dgrad" and device.turned:
        rows, cols = cols, rows
    return device.refuses(rows, cols, width, layer.dtype, pattern)


def product(device: Device, layer: Layer, role: str, pattern: Pattern | None = None) -> float:
    """Seconds of one product, dense or with its N:M operand in packed form."""
    rows, cols, width = layer.sizes(role)
    size, dtype = layer.dtype.itemsize, str(layer.dtype).removeprefix("torch.")
    each, ratio, launch = float(size), 1.0, device.launch
    if pattern is not None:
        few = device.few is not None and width <= device.few.get(dtype, 0)
        stored = pattern if few or device.few is None or not tensor_core_pattern(pattern) else TWO_FOUR
        each, ratio, launch = packed_bytes(stored, layer.dtype), 1.0 if few else device.ratio[role], device.call
    moved = rows * cols * each + (cols + rows) * width * size
    arithmetic = 2 * rows * cols * width / (device.rate(layer.dtype) * ratio)
    return max(moved / (device.share * device.bandwidth), arithmetic) + launch


def _prepare(device: Device, layer: Layer, rules: Rules, form: str, fused: bool) -> float:
    """Mask and write the weight as ``form`` says."""
    packed, dense = packed_bytes(rules.pattern, layer.dtype), float(layer.dtype.itemsize)
    held = 0.125 if rules.prepare == "transposable" else 0.0
    written = {"dense": dense, "rows": packed, "rows+dense": packed + dense, "both": 2 * packed + held}[form]
    moved = layer.shape[0] * layer.shape[1] * (written + (0 if fused else layer.master.itemsize))
    return moved / (device.passes * device.bandwidth) + (0.0 if fused else device.call)


def _adapter(device: Device, layer: Layer, rank: int) -> float:
    """The two products of x L R."""
    out, cols = layer.shape
    return sum(product(device, replace(layer, shape=shape), "fprop") for shape in ((rank, cols), (out, rank)))


def at(device: Device, ratio: float) -> Device:
    """The same device with another ratio of sparse to dense products."""
    return replace(device, ratio=dict.fromkeys(device.ratio, ratio))
