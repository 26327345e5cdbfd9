"""What a product is measured with: random numbers, and copies of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ... import ops
from ...pattern import NMError, Pattern
from . import candidates
from .product import Product

CACHE_BYTES = 64 << 20
MOST_SETS = 16
"""Sets of operands, so that together they exceed this much cache: a model comes back to a layer when others have been there."""

BLOCK = 1 << 18
"""Random numbers are drawn so many at a time and repeated: making them must not take longer than the products."""

Operands = tuple[Tensor, Any, "Tensor | None"]
"""x or g, what ``candidates.call`` takes as the sparse operand, and the seed."""


def operands(product: Product) -> Operands:
    """Random numbers, from a generator of their own; the weight is N:M, both ways where its columns are wanted."""
    p, rows, cols = product, product.rows, product.cols
    draw = partial(_random, product.dtype, product.device)
    if p.role == "wgrad":
        return draw(p.tokens, cols), draw(p.tokens, rows), torch.tensor([1, 2], device=p.device)
    return draw(p.tokens, cols if p.role == "fprop" else rows), _weight(product, draw(rows, cols)), None


def _weight(product: Product, w: Tensor) -> dict[str, Any]:
    """W̃ in the forms of the product; for one that cannot be made the reason."""
    pattern = Pattern(product.n, product.m)
    turned = any(form.startswith("columns") for form in product.forms)
    mask = ops.transposable_mask(w, pattern) if turned else ops.mask(w, pattern)
    w = w * mask
    made: dict[str, Any] = {"dense": w}
    for form in product.forms:
        kind, _, layout = form.partition(":")
        if kind == "dense":
            continue
        c = ops.compress(w if kind == "rows" else w.t().contiguous(), pattern, mask if kind == "rows" else mask.t().contiguous())
        try:
            made[form] = _laid_out(c, layout)
        except NMError as error:
            made[form] = str(error)
    return made


def _laid_out(c: ops.Compressed, layout: str) -> tuple[Tensor, Tensor]:
    if not layout:
        return c.values, c.indices
    d = ops.relayout(c, layout)
    return d.values, d.meta


def _random(dtype: torch.dtype, device: torch.device, rows: int, cols: int) -> Tensor:
    generator = torch.Generator(device=device).manual_seed(rows * 31 + cols)
    count = rows * cols
    block = torch.randn(min(count, BLOCK - 1), generator=generator, device=device).to(dtype)
    if count <= block.numel():
        return block.view(rows, cols)
    return block.repeat(-(-count // block.numel()))[:count].view(rows, cols)


def dense_pair(product: Product, other: Tensor, operand: Any, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    """The matrices whose product it is."""
    if product.role == "fprop":
        return other, operand["dense"].t()
    return (other, operand["dense"]) if product.role == "dgrad" else (candidates.estimate(product, operand, seed), other)


def copies(given: Operands) -> list[Operands]:
    """Further sets of the same numbers, so many that all of them together exceed the caches."""
    held = sum(t.nbytes for t in _tensors(given))
    return [_copy(given) for _ in range(min(MOST_SETS, -(-CACHE_BYTES // max(held, 1))) - 1)]


def _tensors(given: Any) -> list[Tensor]:
    if isinstance(given, (Tensor, str)):
        return [given] if isinstance(given, Tensor) else []
    parts = given.values() if isinstance(given, dict) else given or ()
    return [t for part in parts for t in _tensors(part)]


def _copy(given: Any) -> Any:
    if isinstance(given, Tensor):
        return given.clone()
    if isinstance(given, dict):
        return {name: _copy(part) for name, part in given.items()}
    return tuple(_copy(part) for part in given) if isinstance(given, tuple) else given
