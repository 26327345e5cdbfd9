"""Autograd Functions that also work under ``torch.func``, and raise in forward mode and on a second derivative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..pattern import NMError

TWICE = (
    "there is no second derivative: the backward pass of a sparse layer is once_differentiable, since the gradient through a mask is the "
    "rule of a training method and not a derivative. Differentiate once, or use the dense layer."
)
FORWARD_MODE = (
    "a sparse layer has no derivative in forward mode (torch.func.jvp, jacfwd, forward_ad): its gradient is the rule of a training method "
    "and not a derivative. There is no second derivative (torch.func.hessian) either. Differentiate backward once (torch.func.vjp, jacrev, "
    ".backward()), or use the dense layer."
)


def with_functional(
    forward: Callable[..., Any], remember: Callable[..., tuple[Tensor | None, ...]], backward: Callable[..., tuple[Tensor | None, ...]]
) -> tuple[Any, Any]:
    """Return two Functions that compute the same: a fast one, and one for where ``functional()``.

    The second has ``setup_context``, which ``torch.func`` requires, and with which torch inspects the signature at every call (16 µs).

    Args:
        forward: ``(functional, *args)`` returns the result, which is no view of what it computes if ``functional``.
        remember: ``(ctx, functional, result, *args)`` stores in ``ctx`` what backward needs and returns the tensors to save; if
            ``functional``, also those for which a second derivative raises.
        backward: ``(ctx, g)`` returns a gradient for each of ``args``.
    """

    class Fast(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            result = forward(False, *args)
            ctx.save_for_backward(*remember(ctx, False, result, *args))
            return result

        @staticmethod
        def backward(ctx: Any, g: Tensor, *others: Any) -> tuple[Tensor | None, ...]:
            return backward(ctx, g)

    class Functional(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*args: Any) -> Any:
            return forward(True, *args)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            ctx.save_for_backward(*remember(ctx, True, output, *inputs))
            ctx.set_materialize_grads(False)

        @staticmethod
        def backward(ctx: Any, g: Tensor | None, *others: Any) -> tuple[Tensor | None, ...]:
            return (None,) * len(ctx.needs_input_grad) if g is None else backward(ctx, g)

        @staticmethod
        def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
            raise NMError(FORWARD_MODE)

    return Fast, Functional


def functional() -> bool:
    """Whether a ``torch.func`` transform or forward mode is active."""
    active = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    if active and torch.compiler.is_compiling():
        # tracing would differentiate the forward pass, through masks that have no derivative, instead of using backward
        torch._dynamo.graph_break(
            "a sparse layer under torch.func or in forward mode runs eagerly: its gradient is a rule, not a derivative"
        )
    return active


class _Once(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(gradient: Tensor, *sources: Tensor) -> Tensor:
        return gradient.clone()  # not a view: autograd refuses in-place writes to views that a Function returns

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        raise NMError(TWICE)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        raise NMError(TWICE)


def once(gradient: Tensor | None, *sources: Tensor | None) -> Tensor | None:
    """Return ``gradient`` such that differentiating it with respect to any of ``sources`` raises; for use in backward passes.

    ``once_differentiable`` raises only for the incoming gradient, and gives zeros under ``torch.func``.
    """
    if gradient is None or not torch.is_grad_enabled() or torch.compiler.is_compiling():  # compiled graphs have no second derivative
        return gradient
    tensors = [s for s in sources if s is not None]
    if not torch._C._are_functorch_transforms_active():  # under torch.func a tensor may require grad at another level
        tensors = [s for s in tensors if s.requires_grad]
    return _Once.apply(gradient, *tensors) if tensors else gradient
