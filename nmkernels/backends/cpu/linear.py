"""The three GEMMs of a linear layer with one operand compressed: on the compressed form, or decompressed and multiplied densely.

The sparse kernels multiply what is stored and nothing else, so an inf or NaN of the other operand reaches a result only
through a stored weight (a stored zero counts); where the dense GEMM is chosen (``ways``), it reaches every result.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...capability import compiled_core
from ...dispatch import Tuning
from ...reference.common import compute_dtype
from ...reference.linear import ACTIVATIONS
from ..shared import address, contiguous
from .core import DTYPES, core, register
from .groups import check_indices, expand
from .ways import DENSE, SPARSE, Gemm, Problem, prepare, seconds, way

CLEAR = 1.25
"""A predicted gain over dense below that is not relied on."""


def packed_wins(role: str, dtype: torch.dtype, tokens: int, rows: int, cols: int, n: int, m: int, device: torch.device) -> bool:
    """Whether the sparse kernel does one of a layer's GEMMs clearly faster than torch from a dense weight that is at hand, by a roofline.

    Of wgrad, the dense operand is an estimate in dense layout.
    """
    if device.type != "cpu" or dtype == torch.float64 or not compiled_core().ok:
        return False
    problem = Problem(role, dtype, rows, tokens, cols, n, m) if role == "wgrad" else Problem(role, dtype, rows, cols, tokens, n, m)
    return CLEAR * seconds(SPARSE, problem) < seconds(DENSE, problem)


ROOM_BYTES = 256 << 20
"""The largest dense weight whose memory a thread keeps for the next one; fresh pages cost more than expanding into them."""


class _Room(threading.local):
    """Where a thread expands weights: one piece of memory, as large as the largest so far."""

    memory = torch.empty(0, dtype=torch.uint8)

    def like(self, values: Tensor, *shape: int) -> Tensor:
        """An uninitialised tensor, valid until the next call."""
        count = torch.Size(shape).numel() * values.element_size()
        if count > ROOM_BYTES:
            return values.new_empty(shape)
        if count > self.memory.numel():
            self.memory = torch.empty(count, dtype=torch.uint8)
        return self.memory[:count].view(values.dtype).view(shape)


_room = _Room()


def _expanded(op: str, dtype: torch.dtype, values: Tensor, indices: Tensor, n: int, m: int, cols: int) -> Tensor:
    values = values.to(dtype)
    return expand(op, values, indices, n, m, cols, _room.like(values, values.shape[0], cols))


def _by_tokens(x: Tensor, cols: int) -> tuple[int, int, int]:
    """``(tokens, cols)`` as the core's matrix ``[cols, tokens]``: address and strides."""
    return x.data_ptr(), 1, cols


# ---- on the compressed form


def sparse_linear(
    x: Tensor, values: Tensor, indices: Tensor, n: int, m: int, cols: int, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    rows, tokens = values.shape[0], x.shape[:-1].numel()
    x, values, indices = contiguous(x), contiguous(values), indices.contiguous()
    b = None if bias is None else contiguous(bias)
    y = x.new_empty(*x.shape[:-1], rows) if out is None else out
    addresses = (x.data_ptr(), values.data_ptr(), indices.data_ptr(), address(b), y.data_ptr())
    valid = core().linear(*addresses, DTYPES[x.dtype], tokens, rows, cols, n, m, torch.get_num_threads())
    check_indices("linear", valid, m)
    return y


def frozen_linear(values: Tensor, indices: Tensor, n: int, m: int, cols: int) -> Callable[[Tensor, Tensor | None], Tensor]:
    """``sparse_linear`` as a function of x and the bias alone: what there is to find out about the weight is found out once."""
    values, indices = contiguous(values), indices.contiguous()
    run, dtype, rows = core().linear, DTYPES[values.dtype], values.shape[0]

    def linear(x: Tensor, bias: Tensor | None) -> Tensor:
        x, b = contiguous(x), None if bias is None else contiguous(bias)
        y = x.new_empty((*x.shape[:-1], rows))
        addresses = x.data_ptr(), values.data_ptr(), indices.data_ptr(), address(b), y.data_ptr()
        valid = run(*addresses, dtype, x.numel() // cols, rows, cols, n, m, torch.get_num_threads())
        check_indices("linear", valid, m)
        return y

    return linear


def _sparse_dgrad(g: Tensor, values: Tensor, indices: Tensor, n: int, m: int, cols: int, out: Tensor | None = None) -> Tensor:
    rows, tokens = values.shape[0], g.shape[:-1].numel()
    g, values, indices = contiguous(g), contiguous(values), indices.contiguous()
    dx = g.new_empty(*g.shape[:-1], cols) if out is None else out
    operands = (values.data_ptr(), indices.data_ptr(), rows, cols, tokens, *_by_tokens(g, rows), 0, *_by_tokens(dx, cols))
    valid = core().spmm_transposed(core().SpmmCall(*operands), DTYPES[g.dtype], n, m, torch.get_num_threads())
    check_indices("linear_dgrad", valid, m)
    return dx


def _sparse_wgrad(values: Tensor, indices: Tensor, n: int, m: int, cols: int, x: Tensor, out: Tensor | None = None) -> Tensor:
    rows, width = values.shape[0], x.shape[1]
    x, values, indices = contiguous(x), contiguous(values), indices.contiguous()
    dw = x.new_empty(rows, width) if out is None else out
    operands = (values.data_ptr(), indices.data_ptr(), rows, cols, width, x.data_ptr(), width, 1, 0, dw.data_ptr(), width, 1)
    valid = core().spmm(core().SpmmCall(*operands), DTYPES[x.dtype], n, m, torch.get_num_threads())
    check_indices("linear_wgrad", valid, m)
    return dw


# ---- decompressed, and multiplied in ``dtype``


def _expanded_linear(
    dtype: torch.dtype, x: Tensor, values: Tensor, indices: Tensor, n: int, m: int, cols: int, bias: Tensor | None = None
) -> Tensor:
    w = _expanded("linear", dtype, values, indices, n, m, cols)
    return F.linear(x.to(dtype), w, None if bias is None else bias.to(dtype)).to(x.dtype)


def _expanded_dgrad(dtype: torch.dtype, g: Tensor, values: Tensor, indices: Tensor, n: int, m: int, cols: int) -> Tensor:
    return (g.to(dtype) @ _expanded("linear_dgrad", dtype, values, indices, n, m, cols)).to(g.dtype)


def _expanded_wgrad(dtype: torch.dtype, values: Tensor, indices: Tensor, n: int, m: int, cols: int, x: Tensor) -> Tensor:
    return (_expanded("linear_wgrad", dtype, values, indices, n, m, cols) @ x.to(dtype)).to(x.dtype)


# ---- the ops


def _of_linear(x: Tensor, values: Tensor, indices: Tensor, n: int, m: int, cols: int, *bias: Tensor | None) -> Problem:
    return Problem("fprop", x.dtype, values.shape[0], cols, x.shape[:-1].numel(), n, m)


def _of_dgrad(g: Tensor, values: Tensor, indices: Tensor, n: int, m: int, cols: int) -> Problem:
    return Problem("dgrad", g.dtype, values.shape[0], cols, g.shape[:-1].numel(), n, m)


def _of_wgrad(values: Tensor, indices: Tensor, n: int, m: int, cols: int, x: Tensor) -> Problem:
    return Problem("wgrad", x.dtype, values.shape[0], cols, x.shape[1], n, m)


FPROP = Gemm(sparse_linear, _expanded_linear, _of_linear)
DGRAD = Gemm(_sparse_dgrad, _expanded_dgrad, _of_dgrad)
WGRAD = Gemm(_sparse_wgrad, _expanded_wgrad, _of_wgrad)


def fprop_way(*args: Any) -> str:
    """How ``nm_linear(*args)`` does its GEMM."""
    return way(FPROP.problem(*args), FPROP, args)


def _register(op: str, gemm: Gemm, then: Callable[[Callable[..., Tensor]], Callable[..., Tensor]] = lambda multiply: multiply) -> None:
    """``then``: what the op does after the GEMM, as a function of it."""
    tuning = Tuning(packed_wins, prepare=partial(prepare, gemm), kernel=gemm.sparse, ways=tuple(map(then, gemm.each())))
    register(op, tuning=tuning)(then(gemm.__call__))


def _with_epilogue(multiply: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def linear(
        x: Tensor, values: Tensor, indices: Tensor, n: int, m: int, cols: int, bias: Tensor | None = None, activation: str = "",
        residual: Tensor | None = None, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        y = multiply(x, values, indices, n, m, cols, bias, out=out)
        if activation:  # in float32, but of a result that is rounded already
            y.copy_(ACTIVATIONS[activation](y.to(compute_dtype(y.dtype))))
        return y if residual is None else y.add_(residual)

    return linear


_register("nm_linear", FPROP, _with_epilogue)
_register("nm_linear_dgrad", DGRAD)
_register("nm_linear_wgrad", WGRAD)
