"""What the ops, which have no derivative of their own, do when one is asked for: backward, in forward mode, by torch.func, compiled.

The refusal is part of the op, at the dispatcher's Autograd key, so that ``torch.ops.nmkernels.*`` and graphs refuse as the public functions
do. Backward it is raised where a gradient arrives, not before: to look at a result is no error. Forward mode takes the derivative in the
call itself, and an op that writes into its arguments has no later moment: these raise at once.

Checks shared by the ops' contracts; every message names the op, the value, the constraint and the way out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from ..backends.tensors import tensors
from ..pattern import DtypeError, NMError, Pattern, PatternLike, ShapeError
from ..reference.layouts import check_layout, layout_of, meta_shape

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@lru_cache(maxsize=1024)
def _parsed(spec: Any) -> Pattern:
    return Pattern(spec)


def as_pattern(spec: PatternLike) -> Pattern:
    """The ``Pattern`` that a public function was given as text or object, parsed once per text."""
    if isinstance(spec, Pattern):
        return spec
    # a graph would record the cache's lock, not its answer
    return _parsed(spec) if isinstance(spec, str) and not torch.compiler.is_compiling() else Pattern(spec)


def check_float(op: str, what: str, x: Tensor) -> None:
    """Raise ``DtypeError`` unless ``x`` is fp16, bf16, fp32 or fp64."""
    if x.dtype not in FLOATS:
        way = "take .abs() or split real and imaginary parts" if x.is_complex() else "convert it first, e.g. with .float()"
        raise DtypeError(f"{op}: {what} has dtype {x.dtype}; it must be float16, bfloat16, float32 or float64. {way[0].upper()}{way[1:]}.")


def check_dense(op: str, w: Tensor, n: int, m: int, what: str = "the input") -> Pattern:
    """The checks of every op that groups a dense tensor along its last dimension."""
    p = Pattern(n, m)
    check_float(op, what, w)
    if not w.dim():
        raise ShapeError(
            f"{op}: {what} is 0-dimensional; groups run along the last dimension, so it needs one. Reshape it to at least 1-D."
        )
    if w.shape[-1] % m:
        p.check_divides(op, int(w.shape[-1]), f"the last dimension of {what}")
    return p


def check_packed(op: str, values: Tensor, indices: Tensor, n: int, m: int, cols: int) -> Pattern:
    """The checks of every op that takes a compressed operand of ``cols`` dense columns."""
    p = Pattern(n, m)
    check_float(op, "values", values)
    if indices.dtype != torch.uint8:
        raise DtypeError(f"{op}: indices have dtype {indices.dtype}; packed indices are uint8. Make them with nm.ops.compress.")
    if cols < 0:
        raise ShapeError(f"{op}: cols is {cols}; the number of dense columns cannot be negative.")
    kept, size = p.kept(cols), p.index_bytes(cols)
    if not values.dim() or values.shape[-1] != kept:
        raise ShapeError(
            f"{op}: values have shape {tuple(values.shape)}; {cols} columns at {p} store {kept} values per row. "
            "Pass the number of dense columns that was compressed, and the same pattern."
        )
    if indices.shape != (*values.shape[:-1], size):
        raise ShapeError(
            f"{op}: indices have shape {tuple(indices.shape)}; {cols} columns at {p} need {(*values.shape[:-1], size)} "
            f"({p.index_bits} bits per kept element, each row starting on a byte). Make them with nm.ops.compress."
        )
    if values.device != indices.device:
        check_device(op, values=values, indices=indices)
    return p


def check_operand(op: str, values: Tensor, indices: Tensor, n: int, m: int, cols: int) -> Pattern:
    """The checks of an op whose packed matrix may also be in a device layout, told by the dtype of its indices."""
    if indices.dtype != torch.int32:
        return check_packed(op, values, indices, n, m, cols)
    p, layout = Pattern(n, m), layout_of(indices)
    check_float(op, "values", values)
    check_matrix(op, "the compressed operand", values)
    rows = values.shape[0]
    check_layout(op, layout, rows, cols, p, values.dtype)
    expected = (rows, cols // 2), meta_shape(rows, cols, layout)
    if (values.shape, indices.shape) != expected:
        raise ShapeError(
            f"{op}: values {tuple(values.shape)} and metadata {tuple(indices.shape)} are not {layout!r} of {cols} columns, which has "
            f"{tuple(map(tuple, expected))}. Make them with nm.ops.pack."
        )
    if values.device != indices.device:
        check_device(op, values=values, indices=indices)
    return p


def check_matrix(op: str, what: str, x: Tensor) -> None:
    """Raise ``ShapeError`` unless ``x`` is 2-D."""
    if x.dim() != 2:
        raise ShapeError(
            f"{op}: {what} has shape {tuple(x.shape)}; it must be a matrix. Flatten the leading dimensions with .reshape(-1, size)."
        )


def check_same_dtype(op: str, first: str, a: Tensor, second: str, b: Tensor) -> None:
    """Raise ``DtypeError`` unless both have one dtype."""
    if a.dtype != b.dtype:
        raise DtypeError(f"{op}: {first} is {a.dtype} and {second} is {b.dtype}; they must be the same. Convert one with .to({a.dtype}).")


def check_device(op: str, **tensors: Tensor | None) -> None:
    """Raise ``ShapeError`` unless all tensors are on one device."""
    first: tuple[str, torch.device] | None = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if first is None:
            first = (name, tensor.device)
        elif tensor.device != first[1]:
            raise ShapeError(
                f"{op}: {first[0]} is on {first[1]} and {name} is on {tensor.device}; all tensors must be on one device. "
                f"Move {name} with .to({str(first[1])!r})."
            )


Kernel = Callable[..., Any]

PRODUCT = (
    "this raw product is not differentiable. Use nm.nn.CompressedLinear (inference, gradient to x) or nm.nn.SparseLinear (training); or "
    "call it under torch.no_grad()."
)

_NATIVE = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)


class _Refused(_SingleLevelFunction):
    """A call of an op, recorded so that backward through it raises. Of one level: torch.func comes to the Autograd key at each."""

    @staticmethod
    def forward(ctx: Any, name: str, call: Kernel, *args: Any) -> Any:
        ctx.name = name
        ctx.sources = [(tuple(a.shape), a.dtype) if isinstance(a, Tensor) else None for a in args]
        if not torch._C._are_functorch_transforms_active():
            return call(*args)
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):  # of the levels below
            return call(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # an op, which a graph runs in its backward pass and not when it is traced
        refuse, g = torch.ops.nmkernels.refuse, next(g for g in grads if g is not None)
        wanted = zip(ctx.sources, ctx.needs_input_grad[2:], strict=True)
        return None, None, *[refuse(g, *source, ctx.name) if source and wants else None for source, wants in wanted]


def with_autograd(name: str, op: torch._ops.OpOverload, kernel: Kernel, writes: bool) -> Kernel:
    """The kernel of the Autograd key of ``op``: what ``kernel`` does, and no derivative of it.

    Args:
        writes: ``op`` changes some of its arguments.
    """
    direct, others = set[int](), set[int]()  # dispatch keys of calls that after autograd only a device's kernel sees, and of the rest
    only = len([a for a in op._schema.arguments if "Tensor" in str(a.type)]) == 1

    def autograd(keyset: Any, *args: Any, **outs: Tensor) -> Any:
        keys = keyset.raw_repr()
        wanted = torch.is_grad_enabled() and (args[0].requires_grad if only else torch._C._any_requires_grad(*args, **outs))
        if not wanted and keys in direct and forward_ad._current_level < 0:
            return kernel(*args, **outs)
        if keys not in direct and keys not in others:
            alone = (keyset & torch._C._after_ADInplaceOrView_keyset).highestPriorityTypeId() in _NATIVE
            (direct if alone else others).add(keys)
        return derived(keyset, wanted, *args, **outs)

    def derived(keyset: Any, wanted: bool, *args: Any, **outs: Tensor) -> Any:
        transformed = forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()
        if transformed and any(map(has_tangent, tensors((*args, *outs.values())))):
            raise NMError(no_gradient(name, " in forward mode"))

        def call(*args: Any) -> Any:
            if keyset.raw_repr() in direct:
                return kernel(*args, **outs)
            with torch._C._AutoDispatchBelowAutograd():
                return op.redispatch(keyset & torch._C._after_autograd_keyset, *args, **outs)

        if not wanted:
            return call(*args)
        if writes:
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
    """Raise when a gradient is wanted of an op whose derivative lives in a layer."""
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad:
            raise NMError(f"{op}: {name} requires grad, and {PRODUCT}")


def has_tangent(x: Tensor) -> bool:
    """Whether ``x`` carries one of forward mode; a level must be open."""
    return torch._VF._unpack_dual(x, level=0)[1] is not None


def no_gradient(name: str, where: str = "") -> str:
    """The words in which op ``name`` refuses."""
    if name.startswith("nm_linear"):
        return f"{name} has no gradient{where}: {PRODUCT}"
    return (
        f"{name} has no gradient{where}: through a mask it depends on the training method. Train with nm.sparsify_ or nm.SparseLinear, "
        "which define it; or call the op on x.detach() if no gradient is wanted."
    )
