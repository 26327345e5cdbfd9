"""Refuse derivatives of the raw ops: in backward, forward mode, torch.func and compiled graphs.

The ops raise at the dispatcher's Autograd key, so that ``torch.ops.nmkernels.*`` and graphs behave like the public functions. In backward
mode they raise only when a gradient arrives, since merely using a result is fine. Forward mode takes the derivative during the call, and an
op that writes into its arguments has no later moment, so these raise immediately.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from ..backends.shared import tensors
from ..pattern import NMError

Kernel = Callable[..., Any]

GEMM = (
    "this raw GEMM is not differentiable. Use nm.nn.CompressedLinear (inference, gradient to x) or nm.nn.SparseLinear (training); or "
    "call it under torch.no_grad()."
)

_NATIVE = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)


class _Refused(_SingleLevelFunction):
    """Records a call of an op so that backward through it raises. Single-level, because torch.func calls the Autograd key at each level."""

    @staticmethod
    def forward(ctx: Any, name: str, call: Kernel, *args: Any) -> Any:
        ctx.name = name
        ctx.sources = [(tuple(a.shape), a.dtype) if isinstance(a, Tensor) else None for a in args]
        if not torch._C._are_functorch_transforms_active():
            return call(*args)
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):  # for the levels below
            return call(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # an op, so that a graph raises in its backward pass and not while tracing
        refuse, g = torch.ops.nmkernels.refuse, next(g for g in grads if g is not None)
        wanted = zip(ctx.sources, ctx.needs_input_grad[2:], strict=True)
        return None, None, *[refuse(g, *source, ctx.name) if source and needed else None for source, needed in wanted]


def with_autograd(name: str, op: torch._ops.OpOverload, kernel: Kernel) -> Kernel:
    """The kernel for ``op``'s Autograd key: runs ``kernel`` and refuses derivatives."""
    direct, dispatched = set[int](), set[int]()  # key sets where only a device kernel follows autograd, and all others
    only = len([a for a in op._schema.arguments if "Tensor" in str(a.type)]) == 1

    def autograd(keyset: Any, *args: Any, **outs: Tensor) -> Any:
        keys = keyset.raw_repr()
        wanted = torch.is_grad_enabled() and (args[0].requires_grad if only else torch._C._any_requires_grad(*args, **outs))
        if not wanted and keys in direct and forward_ad._current_level < 0:
            return kernel(*args, **outs)
        if keys not in direct and keys not in dispatched:
            alone = (keyset & torch._C._after_ADInplaceOrView_keyset).highestPriorityTypeId() in _NATIVE
            (direct if alone else dispatched).add(keys)
        return derived(keyset, wanted, *args, **outs)

    def derived(keyset: Any, wanted: bool, *args: Any, **outs: Tensor) -> Any:
        transformed = forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()
        if transformed and any(torch._VF._unpack_dual(x, level=0)[1] is not None for x in tensors((*args, *outs.values()))):
            raise NMError(no_gradient(name, " in forward mode"))  # an argument has a tangent

        def call(*args: Any) -> Any:
            if keyset.raw_repr() in direct:
                return kernel(*args, **outs)
            with torch._C._AutoDispatchBelowAutograd():
                return op.redispatch(keyset & torch._C._after_autograd_keyset, *args, **outs)

        if not wanted:
            return call(*args)
        if op._schema.is_mutable:
            raise NMError(
                f"{name}: an argument requires grad, and the op writes where autograd does not see it. Call it under torch.no_grad(), "
                "or on detached tensors."
            )
        allowed = torch._C._functorch.get_single_level_autograd_function_allowed()
        torch._C._functorch.set_single_level_autograd_function_allowed(True)
        try:
            return _Refused.apply(name, call, *args)  # type: ignore[attr-defined]
        finally:
            torch._C._functorch.set_single_level_autograd_function_allowed(allowed)

    return autograd


def require_no_grad(op: str, **tensors: Tensor | None) -> None:
    """Raise if an argument requires grad of an op that is differentiable only through a layer."""
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad:
            raise NMError(f"{op}: {name} requires grad, and {GEMM}")


def no_gradient(name: str, where: str = "") -> str:
    """The error message for a derivative of op ``name``."""
    if name.startswith("nm_linear"):
        return f"{name} has no gradient{where}: {GEMM}"
    return (
        f"{name} has no gradient{where}: through a mask it depends on the training method. Train with nm.sparsify_ or nm.SparseLinear, "
        "which define it; or call the op on x.detach() if no gradient is wanted."
    )
