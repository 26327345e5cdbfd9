"""What ``torch.vmap`` does with an op: one call where its tensors may have one dimension more, else one call for each element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..pattern import NMError


def with_vmap(name: str, op: torch._ops.OpOverload, leading: tuple[str, ...], writes: bool) -> Callable[..., Any]:
    """The rule of ``op``, as ``torch.library.register_vmap`` takes it.

    Args:
        leading: the tensors that may have any number of leading dimensions, the same for all of them.
        writes: ``op`` changes some of its arguments, and has no rule.
    """
    free = {i for i, a in enumerate(op._schema.arguments) if a.name in leading}

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any, **outs: Any) -> tuple[Any, Any]:
        if writes:
            raise NMError(
                f"{name}: an op that writes into its arguments cannot be batched by torch.vmap. Call it without out=, or in a loop."
            )
        size, batched = info.batch_size, {i for i, dim in enumerate(in_dims) if dim is not None}
        moved = [args[i].movedim(in_dims[i], 0) if i in batched else arg for i, arg in enumerate(args)]
        if batched <= free:
            both = [x if i in batched or i not in free or x is None else x.expand(size, *x.shape) for i, x in enumerate(moved)]
            result = op(*both)
        else:
            each = [op(*(x[k] if i in batched else x for i, x in enumerate(moved))) for k in range(size)]
            result = torch.stack(each) if isinstance(each[0], Tensor) else tuple(map(torch.stack, zip(*each, strict=True)))
        return result, 0 if isinstance(result, Tensor) else (0,) * len(result)

    return rule
