"""What the autograd Functions share under ``torch.func`` and in forward mode, and the refusal of second derivatives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..pattern import NMError

TWICE = (
    "there is no second derivative: the backward pass of a sparse layer is once_differentiable, since the gradient through a mask is the "
    "rule of a training method and no derivative of anything. Differentiate once, or use the dense layer."
)


class _Once(torch.autograd.Function):
    """A gradient, which is the first and the last: a derivative of it by one of ``sources`` is refused."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gradient: Tensor, *sources: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        raise NMError(TWICE)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        raise NMError(TWICE)


def functional() -> bool:
    """Whether ``torch.func`` is at work, or forward mode: who asks takes the Function that knows them."""
    found = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    if found and torch.compiler.is_compiling():
        # traced, its forward pass would be differentiated instead, through masks that have no derivative
        torch._dynamo.graph_break(
            "a sparse layer under torch.func or in forward mode runs eagerly: its gradient is a rule, not a derivative"
        )
    return found


def once(gradient: Tensor | None, *sources: Tensor | None) -> Tensor | None:
    """``gradient``, made without autograd in a backward pass, whose derivative by any of ``sources`` is refused.

    What ``torch.autograd.function.once_differentiable`` does, but for every source and not only for the gradient that came in, and under
    ``torch.func``, which lets that one give zeros.
    """
    if gradient is None or not torch.is_grad_enabled() or torch.compiler.is_compiling():  # graphs have no second derivative in any case
        return gradient
    given = [s for s in sources if s is not None]
    if not torch._C._are_functorch_transforms_active():  # a tensor of torch.func may need one at another level
        given = [s for s in given if s.requires_grad]
    return _Once.apply(gradient, *given) if given else gradient
