"""The compiled CPU core as a backend: float32, bfloat16 and float16 in C++, bit-equal to the reference.

The core takes pointers, so inputs that are not contiguous are copied first (AdamW works on strides in place). Every
kernel runs on ``torch.get_num_threads()`` threads and gives the same bits for any number of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from .._capability import compiled_core
from .._dispatch import Verdict, impl
from ..pattern import Pattern, ShapeError

NAME, PRIORITY = "cpu", 10
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
"""The core's code of each dtype; float64 only as gradient or output of AdamW."""
FEW_TOKENS = 8
"""Up to so many tokens ``linear`` works on the compressed form; above, on the decompressed weight."""


@cache
def _core() -> Any:
    """The extension module; imported by the first call that needs it."""
    return import_module(".._C", __package__)


def _tensors(args: Iterable[Any]) -> Iterator[Tensor]:
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, (list, tuple)):
            yield from _tensors(arg)


def _runnable(tensors: Iterable[Tensor]) -> Verdict:
    core = compiled_core()
    if not core.ok:
        return False, core.reason
    for x in tensors:
        if x.device.type != "cpu":
            return False, f"it works on CPU tensors, and one of these is on {x.device}"
        if x.layout != torch.strided:
            return False, f"it works on strided tensors, and one of these is {x.layout}; call .to_dense()"
    return True, "compiled for the CPU"


def _supports(*args: Any) -> Verdict:
    tensors = list(_tensors(args))
    for x in tensors:
        if x.dtype == torch.float64:
            return False, "it computes in float32, and this call is in float64"
    return _runnable(tensors)


def _supports_adamw(params: Sequence[Tensor], *args: Any) -> Verdict:
    if any(p.dtype == torch.float64 for p in params):
        return False, "it computes in float32, and a parameter is float64"
    return _runnable(_tensors((params, *args)))


def _register(op: str, supports: Callable[..., Verdict] = _supports) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return impl(op, backend=NAME, priority=PRIORITY, supports=supports)


def _dense(x: Tensor) -> Tensor:
    """Contiguous, with a lazy negation carried out: what the pointer shows is what the tensor says."""
    return x.resolve_neg().contiguous()


def _rows(x: Tensor, cols: int) -> int:
    return x.numel() // cols if cols else 0


def _elementwise(op: str, name: str, dtype: torch.dtype | None = None) -> None:
    """Register an op that maps ``(..., cols)`` to the same shape, group by group."""

    @_register(op)
    def run(w: Tensor, n: int, m: int, out: Tensor | None = None) -> Tensor:
        w = _dense(w)
        result = torch.empty_like(w, dtype=dtype or w.dtype) if out is None else out
        getattr(_core(), name)(w.data_ptr(), DTYPES[w.dtype], w.numel(), n, m, result.data_ptr(), torch.get_num_threads())
        return result


_elementwise("nm_mask", "mask", torch.bool)
_elementwise("nm_prune", "prune")
_elementwise("nm_soft_threshold", "soft_threshold")


@_register("nm_soft_threshold_scale")
def _soft_threshold_scale(w: Tensor, n: int, m: int, out: Tensor | None = None) -> Tensor:
    w = _dense(w)
    scale = _core().soft_threshold_scale(w.data_ptr(), DTYPES[w.dtype], w.numel(), n, m, torch.get_num_threads())
    return torch.tensor(scale, dtype=torch.float32) if out is None else out.fill_(scale)


@_register("nm_transposable_mask")
def _transposable_mask(w: Tensor, n: int, m: int, out: Tensor | None = None) -> Tensor:
    w, cols = _dense(w), w.shape[-1]
    result = torch.empty_like(w, dtype=torch.bool) if out is None else out
    _core().transposable_mask(w.data_ptr(), DTYPES[w.dtype], _rows(w, cols), cols, n, m, result.data_ptr(), torch.get_num_threads())
    return result


def _packed(like: Tensor, lead: Sequence[int], cols: int, n: int, m: int) -> tuple[Tensor, Tensor]:
    """Room for the compressed form of ``(*lead, cols)``."""
    pattern = Pattern(n, m)
    values = like.new_empty(*lead, pattern.kept(cols))
    return values, like.new_empty(*lead, pattern.index_bytes(cols), dtype=torch.uint8)


@_register("nm_compress")
def _compress(w: Tensor, n: int, m: int, mask: Tensor | None = None, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    w, cols = _dense(w), w.shape[-1]
    values, indices = _packed(w, w.shape[:-1], cols, n, m) if out is None else out
    given = None if mask is None else mask.contiguous()
    address = 0 if given is None else given.data_ptr()
    fits = _core().compress(
        w.data_ptr(), DTYPES[w.dtype], _rows(w, cols), cols, n, m, address, values.data_ptr(), indices.data_ptr(), torch.get_num_threads()
    )
    if not fits:
        raise ShapeError(f"compress: the mask keeps more than {n} elements in a group, but {n}:{m} stores {n}; prune it first.")
    return values, indices


def _check_indices(op: str, valid: bool, m: int) -> None:
    if not valid:
        raise ShapeError(f"{op}: an index does not exist in a group of {m}; the indices are damaged or of another pattern.")


@_register("nm_decompress")
def _decompress(values: Tensor, indices: Tensor, n: int, m: int, cols: int, out: Tensor | None = None) -> Tensor:
    return _expand("decompress", values, indices, n, m, cols, out)


def _expand(op: str, values: Tensor, indices: Tensor, n: int, m: int, cols: int, out: Tensor | None = None) -> Tensor:
    values, indices = _dense(values), indices.contiguous()
    dense = values.new_empty(*values.shape[:-1], cols) if out is None else out
    valid = _core().decompress(
        values.data_ptr(),
        indices.data_ptr(),
        DTYPES[values.dtype],
        _rows(dense, cols),
        cols,
        n,
        m,
        dense.data_ptr(),
        torch.get_num_threads(),
    )
    _check_indices(op, valid, m)
    return dense


def _deliver(result: Tensor, out: Tensor | None) -> Tensor:
    return result.contiguous() if out is None else out.copy_(result)


@_register("nm_linear")
def _linear(
    x: Tensor, values: Tensor, indices: Tensor, n: int, m: int, cols: int, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    rows = values.shape[0]
    tokens = x.shape[:-1].numel()
    if tokens > FEW_TOKENS:
        return _deliver(torch.nn.functional.linear(x, _expand("linear", values, indices, n, m, cols), bias), out)
    x, values, indices = _dense(x), _dense(values), indices.contiguous()
    b = None if bias is None else _dense(bias)
    y = x.new_empty(*x.shape[:-1], rows) if out is None else out
    addresses = (x.data_ptr(), values.data_ptr(), indices.data_ptr(), 0 if b is None else b.data_ptr(), y.data_ptr())
    valid = _core().linear(*addresses, DTYPES[x.dtype], tokens, rows, cols, n, m, torch.get_num_threads())
    _check_indices("linear", valid, m)
    return y


@_register("nm_linear_dgrad")
def _linear_dgrad(g: Tensor, values: Tensor, indices: Tensor, n: int, m: int, cols: int, out: Tensor | None = None) -> Tensor:
    return _deliver(g @ _expand("linear_dgrad", values, indices, n, m, cols), out)


@_register("nm_linear_wgrad")
def _linear_wgrad(values: Tensor, indices: Tensor, n: int, m: int, cols: int, x: Tensor, out: Tensor | None = None) -> Tensor:
    return _deliver(_expand("linear_wgrad", values, indices, n, m, cols) @ x, out)


def _mvue_call(g: Tensor, dim: int, seed: Tensor, method: str) -> Any:
    """``g`` as (outer, length, inner) around ``dim``."""
    key, offset = seed.tolist()
    outer, inner = g.shape[:dim].numel(), g.shape[dim + 1 :].numel()
    return _core().MvueCall(g.data_ptr(), outer, g.shape[dim], inner, key, offset, method == "approx")


@_register("nm_mvue")
def _mvue(g: Tensor, n: int, m: int, dim: int, seed: Tensor, method: str, out: Tensor | None = None) -> Tensor:
    g, dim = _dense(g), dim % g.dim()
    result = torch.empty_like(g) if out is None else out
    _core().mvue(_mvue_call(g, dim, seed, method), DTYPES[g.dtype], n, m, result.data_ptr(), torch.get_num_threads())
    return result


@_register("nm_mvue_compress")
def _mvue_compress(
    g: Tensor, n: int, m: int, dim: int, seed: Tensor, method: str, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    g, dim = _dense(g), dim % g.dim()
    lead = (*g.shape[:dim], *g.shape[dim + 1 :])
    values, indices = _packed(g, lead, g.shape[dim], n, m) if out is None else out
    call = _mvue_call(g, dim, seed, method)
    _core().mvue_compress(call, DTYPES[g.dtype], n, m, values.data_ptr(), indices.data_ptr(), torch.get_num_threads())
    return values, indices


def _row_stride(x: Tensor) -> int | None:
    """The one stride between rows of ``x`` seen as ``(rows, last dimension)``; None where no single stride exists."""
    step, reach = 0, None
    for size, stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if size == 1:
            continue
        if reach is None:
            step = stride
        elif stride != reach:
            return None
        reach = stride * size
    return step


class _Views:
    """The 2-D views of one call's tensors; one that has no such view works on a copy, which ``write_back`` returns."""

    def __init__(self) -> None:
        self.copies: list[tuple[Tensor, Tensor]] = []
        self.alive: list[Tensor] = []

    def view(self, x: Tensor | None, written: bool = True) -> Any:
        """The core's description of ``x``; None gives the absent view."""
        if x is None:
            return _core().View()
        row_stride = None if x.is_neg() else _row_stride(x)
        if row_stride is None:
            copy = _dense(x)
            self.copies += [(x, copy)] if written else []
            x, row_stride = copy, x.shape[-1] if x.dim() else 1
        self.alive.append(x)
        return _core().View(x.data_ptr(), DTYPES[x.dtype], row_stride, x.stride(-1) if x.dim() else 1)

    def write_back(self) -> None:
        """Copy what the core wrote into copies back to where it belongs."""
        for target, copy in self.copies:
            target.copy_(copy)


@_register("nm_masked_adamw_", _supports_adamw)
def _masked_adamw(
    params: Sequence[Tensor], grads: Sequence[Tensor], exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor], steps: Sequence[Tensor], outs: Sequence[Tensor], hyper: Tensor, n: int, m: int,
    frozen: bool, eps_inside: bool, maximize: bool, geometric: bool, grad_scale: Tensor | None, found_inf: Tensor | None,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    views, absent = _Views(), [None] * len(params)
    described = []
    rest = zip(grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs or absent, steps, outs or absent, strict=True)
    for p, (grad, avg, sq, top, step, masked) in zip(params, rest, strict=True):
        cols = p.shape[-1] if p.dim() else 1
        one = [views.view(p), views.view(grad, written=False), *(views.view(x) for x in (avg, sq, top, masked))]
        described.append(_core().AdamWParam(_rows(p, cols), cols, step.data_ptr(), *one))
    scale, skip = (0 if x is None else x.data_ptr() for x in (grad_scale, found_inf))
    stats = _core().masked_adamw(
        described, hyper.tolist(), n, m, frozen, eps_inside, maximize, geometric, scale, skip, torch.get_num_threads()
    )
    views.write_back()
    result = torch.tensor(stats, dtype=torch.float64)
    return result if out is None else out.copy_(result)
