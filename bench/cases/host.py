"""What calls cost the host, on tiny tensors.

``host(op)``: an asynchronous call, minus that of a no-op with the same schema; and its cost in a CUDA graph. ``calls``: a layer's forward
pass, the optimizer's step of two layers, and ``compress``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import nmkernels as nm
from nmkernels import reference, testing
from nmkernels.gemm.forms import layout_on
from nmkernels.ops.define import CALLS

from ..device import graphed
from ..registry import Call, Grid, Provider, Ratio, Spec, Work, family
from . import _ours

NODES = 100
"""Calls captured in one graph."""

WHOLE = 16
"""Tokens that cuSPARSELt takes without padding; a single one is padded to 8."""

NAMESPACE = "nmkernels_bench"
OPS = ("nm_mask", "nm_compress", "nm_linear")
GRID = {"patterns": ("2:4",), "dtypes": ("bfloat16",), "on": "cuda"}


@cache
def _library() -> torch.library.Library:
    return torch.library.Library(NAMESPACE, "DEF")


@cache
def nothing(op: str) -> Callable[[Any], Callable[..., Any]]:
    """A no-op of the same schema whose kernel, in Python like ours, returns ``result``."""
    schema = str(getattr(torch.ops.nmkernels, op).default._schema).split("::", 1)[1].replace(".default", "")
    _library().define(schema)
    box: list[Any] = [None]
    _library().impl(op, lambda *args: box[0], "CompositeExplicitAutograd")
    overload = getattr(getattr(torch.ops, NAMESPACE), op).default

    def returning(result: Any) -> Callable[..., Any]:
        box[0] = result
        return overload

    return returning


def _arguments(op: str, spec: Spec, device: str, ordered: bool) -> tuple[Any, ...]:
    w = _ours.normal(spec.rows, spec.cols, device=device, dtype=spec.torch_dtype)
    if op == "nm_mask":
        return w, spec.n, spec.m
    if op == "nm_compress":
        return w, spec.n, spec.m, None
    values, indices = reference.compress(w, spec.n, spec.m)
    if ordered:
        indices = reference.to_layout(indices, spec.cols, layout_on(w.device, spec.rows))
    return _ours.normal(spec.tokens, spec.cols, device=device, dtype=spec.torch_dtype), values, indices, spec.n, spec.m, spec.cols, None


def _family(op: str, ordered: bool = False) -> None:
    """``ordered``: the weight has the layout of tensor cores; for ``wgmma.sp`` the host makes three tensor maps in every call."""
    name = f"host({op}(cores))" if ordered else f"host({op})"

    @family(name, grids=(Grid(("64x64",), tokens=(1, WHOLE) if op == "nm_linear" else (0,), **GRID),))  # type: ignore[arg-type]
    def host(spec: Spec, device: str) -> Work:
        """``<op>`` as called by the public functions and the layers, on a tiny weight."""
        call, args = CALLS[op], _arguments(op, spec, device, ordered)
        idle = nothing(op)(_ours.reference(op)(*args))  # if a backend fails, only its own rows are lost

        def check() -> None:
            _ours.same_shapes(call(*args), _ours.reference(op)(*args), op)

        mine = _ours.ours(op, args, lambda: Provider("", lambda: call(*args), check=check, host=True))
        other = Provider("torch no-op", lambda: idle(*args), host=True)
        ratios = [Ratio("us beyond a no-op", p.name, (other.name,), "more") for p in mine]
        work = Work([*mine, other], ratios)
        if device.startswith("cuda"):
            _in_a_graph(work, op, args, device)
        return work


def _in_a_graph(work: Work, op: str, args: tuple[Any, ...], device: str) -> None:
    """Add the replay of a graph of ours, and of one of as many torch kernels, each per node.

    A graph is captured in the warm-up call; if the capture fails, only that provider is lost.
    """
    run, x = CALLS[op], torch.zeros(64, 64, device=device)

    def graph(name: str, call: Call, under: Callable[[], AbstractContextManager[object]] = nullcontext) -> Provider:
        return Provider(name, graphed(lambda: [call() for _ in range(NODES)], device), host=True, count=NODES, under=under)

    other = graph("torch graph", lambda: x.add_(1))
    ours = [p for p in work.providers if p.name.startswith("nmkernels")]
    mine = [graph(f"{p.name}, graph", lambda: run(*args), p.under) for p in ours]
    work.providers += [other, *mine]
    work.ratios += [Ratio("us beyond torch's kernels", p.name, (other.name,), "more") for p in mine]


for _op in OPS:
    _family(_op)
_family("nm_linear", ordered=True)


DENSE, ADAMW = "torch dense forward", "torch AdamW(fused) step"


@family("calls", grids=(Grid(("64x64",), tokens=(8,)),))
def calls(spec: Spec, device: str) -> Work:
    """Microseconds of each call; SR-STE with ``packed`` True and False, compared with torch's dense layer and AdamW."""
    x, w = (_ours.normal(n, spec.cols, device=device, dtype=spec.torch_dtype) for n in (spec.tokens, spec.rows))

    def dense() -> nn.Sequential:
        torch.manual_seed(0)
        options: dict[str, Any] = {"device": device, "dtype": spec.torch_dtype}
        return nn.Sequential(nn.Linear(spec.cols, spec.rows, **options), nn.Linear(spec.rows, spec.cols, **options))

    def forward(layer: nn.Module) -> Callable[[], Tensor]:
        return lambda: layer(x)

    providers = [Provider("nmkernels compress", lambda: nm.ops.compress(w, spec.pattern), check=lambda: _same(w, spec.pattern))]
    for packed in (True, False):
        model, recipe = dense(), nm.recipes.SRSTE(spec.pattern, packed=packed)
        optimizer = nm.sparsify_(model, recipe).attach(recipe.optimizer(model.parameters(), lr=1e-5))
        model(x).sum().backward()
        name = "packed" if packed else "masked"
        providers += [Provider(f"nmkernels {name} forward", forward(model[0])), Provider(f"nmkernels {name} step", optimizer.step)]
    model = dense()
    plain = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    model(x).sum().backward()
    providers += [Provider(DENSE, forward(model[0])), Provider(ADAMW, plain.step)]
    for provider in providers:
        provider.host = True
    ratios = [Ratio("us beyond torch", p.name, (DENSE if "forward" in p.name else ADAMW,), "more") for p in providers[1:5]]
    return Work(providers, ratios)


def _same(w: Tensor, pattern: str) -> None:
    testing.assert_equal_bits(nm.ops.compress(w, pattern).dense(), nm.ops.prune(w, pattern))
