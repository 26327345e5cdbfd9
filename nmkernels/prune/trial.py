"""What layers get in a forward pass, in short, so that two passes can be compared without keeping their tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..pattern import RecipeError
from ..train.sparsify import LayerCandidate

VECTORS = 4
"""Fixed random vectors whose products with a tensor's rows stand for it; a difference is orthogonal to all of them by chance only."""
NARROW, WIDE = 2e-2, 1e-3
"""The relative difference of two passes that is rounding, with 16-bit numbers and with others."""

LARGEST = 1e15
"""Logits are masked by the least number of their dtype, whose products would be infinite."""

Sketches = list[tuple[Tensor, float]]
"""(products, the relative difference that is rounding) of each tensor."""


def sketch(values: Any) -> Sketches:
    """The sketches of all tensors in ``values``: of t ``(..., d)`` the products t V, V ``(d, VECTORS)``, in fp32; NaN and inf are 0."""
    return [(_products(t.detach()), NARROW if t.dtype.itemsize == 2 else WIDE) for t in pytree.tree_leaves(values) if isinstance(t, Tensor)]


def _products(t: Tensor) -> Tensor:
    if not t.numel():
        return torch.zeros(0, VECTORS)
    t = torch.view_as_real(t) if t.is_complex() else t
    rows = t.reshape(-1, t.shape[-1] if t.dim() else 1).to(torch.float32).nan_to_num(0.0, 0.0, 0.0)
    rows = rows.clamp(-LARGEST, LARGEST)
    vectors = torch.randn(rows.shape[1], VECTORS, generator=torch.Generator().manual_seed(0))
    with torch.autocast(t.device.type, enabled=False):
        return (rows @ vectors.to(t.device)).cpu()


def alike(one: Sketches, other: Sketches) -> bool:
    """Whether the tensors are the same up to rounding."""
    return len(one) == len(other) and all(
        a.shape == b.shape and float((a - b).norm()) <= most * float(b.norm()) for (a, most), (b, _) in zip(one, other, strict=True)
    )


class Calls:
    """The calls of layers in some passes.

    Attributes:
        inputs: name -> sketches of all tensors that the layer got, call by call.
    """

    def __init__(self) -> None:
        self.inputs: dict[str, Sketches] = {}
        # of each call of a layer, the number of the call that first got the same tensor
        self._first: dict[str, list[int]] = {}
        self._seen: dict[int, tuple[ref[Tensor], int, int]] = {}
        self._numbers = count()

    def add(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Layer ``name`` is called."""
        self.inputs.setdefault(name, []).extend(sketch((args, dict(kwargs))))
        x, number = next(iter((*args, *kwargs.values())), None), next(self._numbers)
        if isinstance(x, Tensor):
            known, version, first = self._seen.get(id(x), (None, 0, 0))
            if known is not None and known() is x and version == x._version:
                number = first
            else:
                self._seen[id(x)] = ref(x), x._version, number
        self._first.setdefault(name, []).append(number)

    def sources(self, parts: Mapping[str, object]) -> dict[str, str]:
        """Layer -> the first layer all of whose calls got the same tensors; ``parts``: layer -> what of a tensor it multiplies."""
        first: dict[tuple[object, ...], str] = {}
        return {name: first.setdefault((parts[name], *numbers), name) for name, numbers in self._first.items()}


@contextmanager
def finite_weights(model: nn.Module, layers: Sequence[LayerCandidate]) -> Iterator[None]:
    """Every module that runs inside must have weights without NaN, and those of ``layers`` without inf.

    Raises:
        RecipeError: names the weight.
    """
    pruned = {(c.module, c.key) for c in layers}
    seen = set[nn.Module]()

    def check(name: str, module: nn.Module, args: Any) -> None:
        if module in seen:
            return
        seen.add(module)
        for key, weight in module._parameters.items():
            if weight is None or not weight.is_floating_point() or weight.is_meta:
                continue
            wrong = ~weight.isfinite() if (module, key) in pruned else weight.isnan()
            if many := int(wrong.sum()):
                raise RecipeError(
                    f"prune_: the weight {f'{name}.{key}' if name else key!r} has {many} elements that are "
                    f"{'NaN or infinite' if (module, key) in pruned else 'NaN'}; load or train the model again. A weight of float16 may "
                    "have overflowed."
                )

    hooks = [m.register_forward_pre_hook(partial(check, name)) for name, m in model.named_modules() if m._parameters]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def first_line(error: BaseException) -> str:
    """The first line of a message, or the error's type, without a full stop."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200].rstrip(".")
