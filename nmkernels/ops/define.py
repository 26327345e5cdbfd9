"""How an op becomes ``torch.ops.nmkernels.*``: one schema, one contract, and the dispatcher behind it.

A *contract* takes the raw op's arguments, raises when they do not fit, and returns the shape and dtype of
each result. The eager kernel, the fake kernel (tracing, ``torch.compile``) and the check of ``out=`` all use
that same function, so they cannot disagree.

What ``torch.vmap`` does with an op: one call where its tensors may have one dimension more, else one call for each element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import backends as _backends  # noqa: F401 - registers the implementations
from ..dispatch import choose
from ..pattern import DtypeError, NMError, ShapeError
from .check import no_gradient, with_autograd


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


NAMESPACE = "nmkernels"
Spec = tuple[Any, torch.dtype]
"""(shape, dtype) of one result; results are contiguous."""
Contract = Callable[..., tuple[Spec, ...]]

_lib = torch.library.Library(NAMESPACE, "DEF")


def define(
    name: str, schema: str, contract: Contract, mutates: tuple[int, ...] = (), leading: tuple[str, ...] = (), floats: bool = True
) -> torch._ops.OpOverload:
    """Register ``torch.ops.nmkernels.<name>`` and return its overload, ready to be called.

    Its derivatives are refused (``_grad``), and ``torch.vmap`` knows it (``_batch``).

    Args:
        name: the op's name, which is also its name in the dispatcher.
        schema: ``"(Tensor w, int n, int m) -> Tensor"``.
        contract: see the module's docstring.
        mutates: positions of the arguments that are written in place.
        leading: the tensors that may have any number of leading dimensions, the same for all of them.
        floats: whether a result is floating-point, so that it could have a derivative.
    """
    op = _register(name, schema)
    defaults = tuple(a.default_value for a in op._schema.arguments if a.has_default_value())
    total, single = len(op._schema.arguments), len(op._schema.returns) == 1

    def kernel(*args: Any) -> Any:
        if len(args) < total:  # torch drops trailing arguments that equal their defaults
            args += defaults[len(args) - total :]
        contract(*args)
        result = plainly(choose(name, *args).fn, *args)
        for position in mutates:
            _bump(args[position] or ())
        return result

    def fake(*args: Any) -> Any:
        device = _device(args)
        results = tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in contract(*args))
        return results[0] if single else results

    _lib.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_lib)
    if floats:
        _lib.impl(name, with_autograd(name, op, kernel, bool(mutates)), "Autograd", with_keyset=True)
    torch.library.register_vmap(f"{NAMESPACE}::{name}", with_vmap(name, op, leading, bool(mutates)), lib=_lib)
    return op


def define_out(name: str, schema: str, contract: Contract, outs: tuple[str, ...] = ("out",), floats: bool = True) -> torch._ops.OpOverload:
    """Register ``<name>_out``, which writes into tensors of the caller, and return its overload.

    Args:
        name: the functional op's name.
        schema: the functional op's arguments, ``"(Tensor w, int n, int m)"``.
        contract: the functional op's contract.
        outs: the keyword-only arguments that are written.
        floats: see ``define``.
    """
    keywords = ", ".join(f"Tensor({chr(ord('a') + i)}!) {out}" for i, out in enumerate(outs))
    op = _register(f"{name}_out", f"{schema[:-1]}, *, {keywords}) -> ()")
    defaults = tuple(a.default_value for a in op._schema.arguments if a.has_default_value())
    total = len(op._schema.arguments) - len(outs)

    def check(args: tuple[Any, ...], given: tuple[Tensor, ...]) -> None:
        for out, (shape, dtype), tensor in zip(outs, contract(*args), given, strict=True):
            _check_out(name, out, tensor, tuple(shape), dtype, _device(args))

    def kernel(*args: Any, **kwargs: Tensor) -> None:
        if len(args) < total:
            args += defaults[len(args) - total :]
        given = tuple(kwargs[out] for out in outs)
        check(args, given)
        fn = choose(name, *args).fn
        if _writable(given, args):
            plainly(fn, *args, out=given[0] if len(outs) == 1 else given)
            _bump(given)
        else:
            results = plainly(fn, *args)
            for tensor, result in zip(given, (results,) if len(outs) == 1 else results, strict=True):
                tensor.detach().copy_(result)

    def fake(*args: Any, **kwargs: Tensor) -> None:
        check(args, tuple(kwargs[out] for out in outs))

    _lib.impl(f"{name}_out", kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}_out", fake, lib=_lib)
    if floats:
        _lib.impl(f"{name}_out", with_autograd(name, op, kernel, writes=True), "Autograd", with_keyset=True)
    return op


def unwatched(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether torch's dispatcher would do nothing for a call with these but cost 9 us: eager, no mode, no transform, no trace, no profile.

    (AMD EPYC, 2026-11-21: a third of that is its own, the rest what a call that may come from anywhere has to check.)
    """
    return not (
        torch.compiler.is_compiling()
        or torch.is_grad_enabled()
        or forward_ad._current_level >= 0
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
        or torch.autograd.profiler._is_profiler_enabled
        or type(x) is not Tensor
        or type(weight) is not Tensor
        or not (bias is None or type(bias) is torch.nn.Parameter or type(bias) is Tensor)
    )


def _register(name: str, schema: str) -> torch._ops.OpOverload:
    _lib.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def plainly(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``fn`` with grad mode and autocast off, so that a backend in plain torch does what one in C++ does.

    Autograd would record the former and nothing of the latter; autocast would multiply in another dtype than the contract's.
    """
    before = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)  # the context manager costs 1.5 us more
    try:
        if not torch._C._is_any_autocast_enabled():
            return fn(*args, **kwargs)
        with torch._C._DisableAutocast():
            return fn(*args, **kwargs)
    finally:
        torch._C._set_grad_enabled(before)


def _device(args: Iterable[Any]) -> torch.device:
    for arg in args:
        if isinstance(arg, Tensor):
            return arg.device
        if isinstance(arg, (list, tuple)) and arg:
            return _device(arg)
    return torch.device("cpu")


def _check_out(op: str, name: str, out: Tensor, shape: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> None:
    if tuple(out.shape) != shape:
        raise ShapeError(
            f"{op}: {name} has shape {tuple(out.shape)}, the result has {shape}. Pass a tensor of that shape, or leave out= away."
        )
    if out.dtype != dtype:
        raise DtypeError(f"{op}: {name} has dtype {out.dtype}, the result has {dtype}. Pass a tensor of that dtype, or leave out= away.")
    if out.device != device:
        raise ShapeError(f"{op}: {name} is on {out.device}, the input is on {device}. Both must be on one device.")


def _writable(outs: tuple[Tensor, ...], args: tuple[Any, ...]) -> bool:
    """A backend may write straight into ``outs``: contiguous, and in memory that none of the inputs uses."""
    inputs = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)} - {0}
    return all(o.is_contiguous() and o.untyped_storage().data_ptr() not in inputs for o in outs)


def _bump(tensors: Tensor | Iterable[Tensor]) -> None:
    """Count a write as torch's own in-place ops do, so that caches and autograd notice it."""
    every = (tensors,) if isinstance(tensors, Tensor) else tensors
    torch.autograd.graph.increment_version([t for t in every if not t.is_inference()])


def _refuse(g: Tensor, shape: Sequence[int], dtype: torch.dtype, op: str) -> Tensor:
    raise NMError(no_gradient(op))


# the gradient of a tensor of that shape and dtype, were there one
_lib.define("refuse(Tensor g, SymInt[] shape, ScalarType dtype, str op) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_lib.impl("refuse", _refuse, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::refuse", lambda g, shape, dtype, op: g.new_empty(shape, dtype=dtype), lib=_lib)
torch.library.register_vmap(f"{NAMESPACE}::refuse", lambda info, dims, *args: _refuse(*args), lib=_lib)
