"""Define an op as ``torch.ops.nmkernels.*``: schema, contract, dispatch to backends, and a cache of kinds of calls.

A *contract* takes the raw op's arguments, raises if they are invalid, and returns the shape and dtype of each result. The eager kernel, the
fake kernel (tracing, ``torch.compile``) and the check of ``out=`` share it. Contracts and the backends' ``supports`` depend only on
metadata, so the chosen function is cached per kind of call: a repeated call runs it directly, without contract, choice or torch's
dispatcher, unless it is traced, profiled or transformed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from .. import backends as _backends  # noqa: F401 - registers the implementations
from .. import dispatch
from ..backends.shared import device_of
from ..pattern import DtypeError, NMError, ShapeError
from ..shards import is_sharded
from . import verify
from .derivatives import no_gradient, with_autograd

NAMESPACE = "nmkernels"
Spec = tuple[Any, torch.dtype]
"""(shape, dtype) of one result; results are contiguous."""
Contract = Callable[..., tuple[Spec, ...]]

MOST_PLANS = 4096
"""Size of the cache of kinds of calls; when full it is cleared, so that changing shapes do not fill memory."""

NO_ONNX = (
    "{}: torch.onnx.export met a sparse layer that is in training or compressed, and ONNX has neither masks nor N:M weights. Export the "
    "finished model: call handle.finish() but not nm.compress_(model), so that its weights are constants with zeros; or load the file of "
    "nm.save_dense into the dense model. torch.export and AOTInductor support compressed models."
)

CALLS: dict[str, Callable[..., Any]] = {}
"""Op → the function returned by ``define``."""
CONTRACTS: dict[str, Contract] = {}
"""Op → its contract."""

_SCALARS = frozenset((int, bool, str, NoneType, torch.dtype))
_lib = torch.library.Library(NAMESPACE, "DEF")


def define(
    name: str,
    schema: str,
    contract: Contract,
    outs: tuple[str, ...] = (),
    leading: tuple[str, ...] = (),
    floats: bool = True,
) -> Callable[..., Any]:
    """Register ``torch.ops.nmkernels.<name>`` and return ``call(*args, out=None, backend="")``, which calls it with little overhead.

    ``backend`` takes precedence over the others; graphs and traces contain the plain op.

    Derivatives raise (``derivatives.with_autograd``), and ``torch.vmap`` is supported (``_vmap_rule``).

    Args:
        schema: ``"(Tensor w, int n, int m) -> Tensor"``.
        contract: see the module docstring.
        outs: one name per result, to define ``<name>_out`` with these keyword-only arguments, which it writes to. ``call`` takes them as
            ``out``, a tensor or tuple, and returns it.
        leading: the tensors that may have any number of leading dimensions, the same for all of them.
        floats: whether a result is floating-point, so that it could have a derivative.
    """
    op = _register(name, schema)
    defaults = tuple(a.default_value for a in op._schema.arguments if a.has_default_value())
    total, single = len(op._schema.arguments), len(op._schema.returns) == 1
    mutates = [i for i, a in enumerate(op._schema.arguments) if a.alias_info is not None and a.alias_info.is_write]

    def checked(args: tuple[Any, ...], named: dict[str, Tensor]) -> tuple[tuple[Any, ...], tuple[Tensor, ...], tuple[Spec, ...]]:
        """Check a call; return the arguments with defaults, the ``out`` tensors, and the specs of the results."""
        if len(args) < total:  # torch drops trailing arguments that equal their defaults
            args += defaults[len(args) - total :]
        specs = contract(*args)
        buffers = tuple(named[out] for out in outs) if named else ()
        for out, x, (shape, dtype) in zip(outs, buffers, specs, strict=False):
            wanted = ("shape", tuple(x.shape), tuple(shape)), ("dtype", x.dtype, dtype), ("device", x.device, device_of(args))
            for what, passed, right in wanted:
                if passed != right:
                    error = DtypeError if what == "dtype" else ShapeError
                    raise error(f"{name}: {out} has {what} {passed}, the result has {right}. Pass a tensor of that {what}, or omit out=.")
        return args, buffers, specs

    def run(fn: Callable[..., Any], args: tuple[Any, ...], buffers: tuple[Tensor, ...]) -> Any:
        if buffers and not _writable(buffers, args):
            results = plainly(fn, *args)
            for tensor, result in zip(buffers, (results,) if single else results, strict=True):
                tensor.detach().copy_(result)
            return None
        result = plainly(fn, *args, out=buffers[0] if single else buffers) if buffers else plainly(fn, *args)
        written = list(buffers)
        for position in mutates:
            written += args[position] or ()
        increment_version(written)  # as torch's own in-place ops do, so that caches and autograd notice it
        return None if buffers else result

    def kernel(*args: Any, **named: Tensor) -> Any:
        args, buffers, _ = checked(args, named)
        return run(_chosen(name, args, buffers), args, buffers)

    def fake(*args: Any, **named: Tensor) -> Any:
        if torch.onnx.is_in_onnx_export():
            raise NMError(NO_ONNX.format(name))
        args, buffers, specs = checked(args, named)
        if buffers or not specs:
            return None
        results = tuple(torch.empty(shape, dtype=dtype, device=device_of(args)) for shape, dtype in specs)
        return results[0] if single else results

    def install(variant: str, op: torch._ops.OpOverload) -> None:
        _lib.impl(variant, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{variant}", fake, lib=_lib)
        if floats:
            _lib.impl(variant, with_autograd(name, op, kernel), "Autograd", with_keyset=True)

    install(name, op)
    torch.library.register_vmap(f"{NAMESPACE}::{name}", _vmap_rule(name, op, leading), lib=_lib)
    op_out = None
    if outs:
        keywords = ", ".join(f"Tensor({chr(ord('a') + i)}!) {out}" for i, out in enumerate(outs))
        op_out = _register(f"{name}_out", f"{schema.split(') ->')[0]}, *, {keywords}) -> ()")
        install(f"{name}_out", op_out)

    def call(*args: Any, out: Any = None, backend: str = "") -> Any:
        if len(args) < total:
            args += defaults[len(args) - total :]
        buffers = () if out is None else (out,) if single else out
        kind = kind_of(name, args, buffers, backend)
        fn = None if kind is None else dispatch.plans.get(kind)
        if fn is None and backend and kind is not None:
            args, buffers, _ = checked(args, dict(zip(outs, buffers, strict=True)))
            fn = _chosen(name, args, buffers, backend)
        if fn is None:
            if any(isinstance(arg, Tensor) and is_sharded(arg) for arg in args):  # a traced constant has no type to ask for
                from . import sharded  # registers sharding rules for DTensor

                sharded.check(name, out)
            if op_out is None or out is None:
                return op(*args)
            op_out(*args, **dict(zip(outs, buffers, strict=True)))
            return out
        if out is None and not mutates and not torch._C._is_any_autocast_enabled():
            return fn(*args)  # no argument requires grad, or grad mode is off
        result = run(fn, args, buffers)
        return result if out is None else out

    CALLS[name], CONTRACTS[name] = call, contract
    return call


def _chosen(name: str, args: tuple[Any, ...], buffers: tuple[Tensor, ...], backend: str = "") -> Callable[..., Any]:
    """The function that runs a call; cached per kind of call once it has passed its check on this machine."""
    kind = plainly(kind_of, name, args, buffers, backend)
    fn = None if kind is None else dispatch.plans.get(kind)
    while fn is None:
        entry, lasting = dispatch.decide(name, args, backend)
        plan = kind if lasting or kind is None else (entry.backend, *kind)  # the next call of this kind may use another backend
        trusted = plan is None or plan in dispatch.plans or verify.trusted(entry, args)
        if trusted and plan is not None:
            if len(dispatch.plans) >= MOST_PLANS:
                dispatch.forget()
            dispatch.plans[plan] = entry.fn
        if trusted is not False:
            fn = entry.fn
    return fn


def kind_of(name: str, args: Sequence[Any], buffers: Sequence[Tensor] = (), backend: str = "") -> tuple[Any, ...] | None:
    """The cache key of a call of ``name``; None if torch's dispatcher has to handle the call.

    That is so while compiling, in torch modes, functorch, tracing, profiling and forward mode, and for arguments that are not plain
    tensors: subclasses, lazy negations, zero tensors, and tensors that require grad while grad mode is on.
    """
    if (
        torch.compiler.is_compiling()
        or forward_ad._current_level >= 0
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
        or torch.autograd.profiler._is_profiler_enabled
    ):
        return None
    recording = torch.is_grad_enabled()
    kind: list[Any] = [name, dispatch.environment.get(dispatch.ENV_KEY) or backend]
    rest = [*args, *buffers]
    for x in rest:  # grows by the elements of lists
        cls = type(x)
        if cls is Tensor or cls is Parameter:
            if x.layout is not torch.strided or x.is_neg() or x._is_zerotensor() or (recording and x.requires_grad):
                return None
            kind += (x.shape, x.dtype, x.device)
            if not x.is_contiguous():
                kind.append(x.stride())
        elif cls in _SCALARS:
            kind.append(x)
        elif cls is list:
            kind += (list, len(x))
            rest += x
        else:
            return None
    return tuple(kind)


def plainly(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``fn`` with grad mode and autocast off, so that a backend in plain torch behaves like one in C++.

    Otherwise autograd would record the former but not the latter, and autocast would use another dtype than the contract's.
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


def _vmap_rule(name: str, op: torch._ops.OpOverload, leading: tuple[str, ...]) -> Callable[..., Any]:
    """The vmap rule of ``op``: one call if only ``leading`` tensors are batched, else one per element."""
    free, writes = {i for i, a in enumerate(op._schema.arguments) if a.name in leading}, op._schema.is_mutable

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


def _register(name: str, schema: str) -> torch._ops.OpOverload:
    _lib.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _writable(outs: tuple[Tensor, ...], args: tuple[Any, ...]) -> bool:
    """Whether a backend may write directly to ``outs``: contiguous, and not sharing memory with inputs."""
    for o in outs:
        where = o.untyped_storage().data_ptr()
        if not o.is_contiguous():
            return False
        for a in args:  # loops, since a generator expression is a call for each element
            if isinstance(a, Tensor) and where and a.untyped_storage().data_ptr() == where:
                return False
    return True


def _refuse(g: Tensor, shape: Sequence[int], dtype: torch.dtype, op: str) -> Tensor:
    raise NMError(no_gradient(op))


# stands for the gradient of a tensor of that shape and dtype; raises when it runs
_lib.define("refuse(Tensor g, SymInt[] shape, ScalarType dtype, str op) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_lib.impl("refuse", _refuse, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::refuse", lambda g, shape, dtype, op: g.new_empty(shape, dtype=dtype), lib=_lib)
torch.library.register_vmap(f"{NAMESPACE}::refuse", lambda info, dims, *args: _refuse(*args), lib=_lib)
