"""What the ops, which have no derivative of their own, do when autograd is asked for one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..pattern import NMError


class _Refuse(torch.autograd.Function):
    """Identity on the second argument; raises where a gradient would flow back to the first."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, result: Tensor, op: str) -> Tensor:
        ctx.op = op
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NMError(
            f"{ctx.op} has no gradient: through a mask it depends on the training method. Train with nm.sparsify_ or nm.SparseLinear, "
            "which define it; or call the op on x.detach() if no gradient is wanted."
        )


def refuse_grad(op: str, source: Tensor, result: Tensor) -> Tensor:
    """``result``, made to raise in backward when ``source`` wants a gradient, instead of losing it silently."""
    if torch.is_grad_enabled() and source.requires_grad and not torch.compiler.is_compiling():
        return _Refuse.apply(source, result, op)
    return result


def require_no_grad(op: str, **tensors: Tensor | None) -> None:
    """Raise when a gradient is wanted of an op whose derivative lives in a layer."""
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad:
            raise NMError(
                f"{op}: {name} requires grad, and this raw product is not differentiable. "
                "Use nm.nn.CompressedLinear (inference, gradient to x) or nm.nn.SparseLinear (training); or call it under torch.no_grad()."
            )
