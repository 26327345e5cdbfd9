"""What tracers see of a layer: ``torch.fx`` records one call, as for torch's own layers; ``torch.jit.trace`` a dense weight, as a constant
that needs nothing of this package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.jit._trace import is_tracing

from ..pattern import NMError

__all__ = ["PROXY", "constant", "is_tracing", "leaf", "refuse_script"]

PROXY: Any = fx.Proxy
"""The placeholder that ``torch.fx`` passes to a module instead of a tensor."""


def leaf(module: nn.Module, *args: Any) -> Any:
    """Record the call ``module(*args)``, whose first argument is a proxy, as a node of the graph that ``torch.fx`` traces."""
    tracer = args[0].tracer
    path = tracer.path_of_module(module)
    if not path:
        raise NMError(f"torch.fx: the model itself is one {type(module).__name__}, which a graph can only call; put it in nn.Sequential.")
    return tracer.create_proxy("call_module", path, args, {})


def constant(make: Callable[[], Tensor]) -> Tensor:
    """The tensor that ``make`` returns, as a constant of ``torch.jit.trace``, which records nothing of how it is made."""
    c: Any = torch._C
    state = c._get_tracing_state()
    c._set_tracing_state(None)
    try:
        with torch.no_grad():
            return make().detach().clone()  # training may later write into the original
    finally:
        c._set_tracing_state(state)


def refuse_script(layer: nn.Module) -> NoReturn:
    """Raise ``NMError`` in ``torch.jit.script``."""
    raise NMError(
        f"torch.jit.script cannot compile {type(layer).__name__}: torch.jit.trace(model, example) works at every stage. Or script a dense "
        "model: handle.remove() after finish(), or nm.densify_(model), gives the dense layers back with the zeros in their weights."
    )
