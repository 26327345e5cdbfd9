"""``nm.explain``: which backend runs a call of a public function, a raw op or a layer.

A public function is called until it reaches its raw op, which is not run; the explanation is that of the raw op.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode

from .. import dispatch
from ..backends.shared import tensors
from ..pattern import BackendError, NMError
from .define import CALLS, CONTRACTS, NAMESPACE

OPS_OF = {"relayout": ("nm_metadata", "nm_pack"), "linear": ("nm_linear", "nm_linear_integers")}
"""The raw ops of public functions whose raw op is not ``nm_`` plus their name."""


class _Reached(Exception):
    """Raised with the name and the arguments of a raw op when it would run."""


class _Until(TorchDispatchMode):
    """Raises ``_Reached`` when one of ``ops`` would run."""

    def __init__(self, ops: tuple[str, ...]) -> None:
        super().__init__()
        self.ops = ops

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2].removesuffix("_out")
        if func.namespace == NAMESPACE and name in self.ops:
            left_out = func._schema.arguments[len(args) :]  # torch drops trailing arguments that equal their defaults
            raise _Reached(name, (*args, *(a.default_value for a in left_out if not a.kwarg_only)))
        return func(*args, **(kwargs or {}))


def explain(what: str | Module, *args: Any, **kwargs: Any) -> str:
    """Explain which backend would run a call, and why each of the others would not, one line each. The op is not run.

    Args:
        what: the name of a function of ``nm.ops``, or of its raw op, or a ``SparseLinear``, ``CompressedLinear`` or ``CompressedConv2d``.
        args, kwargs: the arguments of the function, e.g. ``explain("linear", x, compressed)``, of the raw op, e.g. ``explain("nm_mask", w,
            2, 4)``, or the layer's input. If a layer does not use the op, or chooses the kernel itself, the last line says so.

    Raises:
        BackendError: there is no such function.
        NMError: wrong arguments, or the layer calls no op.

    Example:
        >>> import nmkernels as nm
        >>> print(nm.explain("mask", torch.randn(4, 8), "2:4").splitlines()[0])
        nm_mask:
    """
    if isinstance(what, Module):
        return _of_layer(what, *args, **kwargs)
    op, op_args = _raw_call(what, args, kwargs)
    return dispatch.verdicts(op, *op_args)


def _raw_call(name: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, tuple[Any, ...]]:
    """The raw op that a call reaches, and its arguments."""
    from .. import ops

    public = getattr(ops, name, None) if isinstance(name, str) and name in ops.__all__ else None
    targets: tuple[str, ...]
    if inspect.isfunction(public):
        function, targets, takes = public, OPS_OF.get(name, (f"nm_{name}",)), _parameters(public)
    elif isinstance(name, str) and name in CALLS:
        function, targets = getattr(getattr(torch.ops, NAMESPACE), name), (name,)
        takes = str(function.default._schema).partition(name)[2].partition(" ->")[0]
    else:
        known = sorted({*OPS_OF, *(op.removeprefix("nm_") for op in CALLS)} & set(ops.__all__))
        raise BackendError(
            f"explain: no op is called {name!r:.60}; it takes a function of nm.ops by name ({', '.join(known)}), a raw op (nm_mask and so "
            "on), or a layer; and then the arguments of that."
        )
    try:
        devices = {x.device for x in tensors(args) if x.is_cuda} if torch.cuda.is_available() else ()  # fake tensors may claim a GPU
        try:
            # the function may draw a seed
            with torch.no_grad(), torch.random.fork_rng(list(devices)), _Until(targets):
                function(*args, **kwargs)
        except _Reached as reached:
            op, op_args = reached.args
            CONTRACTS[op](*op_args)
            return op, op_args
    except NMError:
        raise
    except (TypeError, AttributeError, ValueError, RuntimeError) as error:
        passed = ", ".join((*map(_short, args), *(f"{key}={_short(value)}" for key, value in kwargs.items())))
        raise NMError(f"explain: {name!r} takes {takes} and got ({passed}): {str(error).splitlines()[0]}") from error
    raise NMError(f"explain: {name} is plain torch on every device; no backend is chosen for it.")


def _of_layer(layer: Module, *args: Any, **kwargs: Any) -> str:
    kind, as_op = type(layer).__name__, getattr(layer, "as_op", None)
    if as_op is None:
        inside = [name for name, module in layer.named_modules() if hasattr(module, "as_op")]
        some = f"{', '.join(map(repr, inside[:3]))}{' and others' if inside[3:] else ''}"
        way = f"Ask for one of its layers ({some}): nm.explain(model.get_submodule(name), x)." if inside else "It has no such layer either."
        raise NMError(f"explain: {kind} is not a layer whose GEMM an op does. {way}")
    if len(args) != 1 or kwargs or not isinstance(args[0], torch.Tensor):
        passed = ", ".join((*map(_short, args), *kwargs))
        raise NMError(f"explain: with a {kind} it takes its input x, a tensor, and got ({passed}).")
    with torch.no_grad():
        op_args, instead = as_op(args[0])
        op = "nm_linear_integers" if getattr(layer, "step", None) is not None else "nm_linear"
        CONTRACTS[op](*op_args)
    return dispatch.verdicts(op, *op_args) + (f"\n  {instead}" if instead else "")


def _parameters(function: Any) -> str:
    """The signature without annotations."""
    signature = inspect.signature(function)
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


def _short(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"{value!r:.60}"
