"""The three GEMMs of a linear layer with one operand compressed: on the compressed form, or decompressed and multiplied densely.

The sparse kernels multiply what is stored and nothing else, so an inf or NaN of the other operand reaches a result only
through a stored weight (a stored zero counts); where the dense GEMM is chosen, it reaches every result. They do N/M of the work at a
rate of their own, so they win where N/M is small enough, whatever the size of the matrix.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from ...capability import compiled_core
from ...dispatch import Tuning
from ...reference.common import compute_dtype
from ...reference.linear import ACTIVATIONS
from ..shared import address, contiguous
from .core import DTYPES, core, register
from .groups import check_indices, expand

FEW_TOKENS, FEW_TOKENS_16_BIT = 16, 1
"""Up to so many tokens ``linear`` reads every stored weight once for all of them; and in 16 bits next to a dense weight at hand."""

DENSEST = {
    # instruction set -> largest N/M that beats dense: float32; 16-bit numbers in fprop and wgrad; in dgrad,
    # which sorts first (or in fprop next to a dense weight at hand)
    "avx512_bf16": (3 / 4, 1 / 8, 1 / 16),
    "avx512": (3 / 4, 1 / 8, 1 / 16),
    "avx2": (1 / 2, 1 / 16, 1 / 16),
    "portable": (1 / 4, 1 / 32, 1 / 32),
}


def sparse_wins(dtype: torch.dtype, n: int, m: int, dgrad: bool = False) -> bool:
    """Whether a GEMM with many tokens is faster from the compressed form than dense."""
    wide, narrow, narrow_dgrad = DENSEST[core().isa()]
    return n / m <= (wide if dtype == torch.float32 else narrow_dgrad if dgrad else narrow)


def packed_wins(role: str, dtype: torch.dtype, tokens: int, n: int, m: int, device: torch.device) -> bool:
    """Whether one of a layer's GEMMs is done faster from the compressed weight as it is than from a dense one that is at hand.

    In 16 bits that is less often than ``sparse_wins`` says, which compares with expanding the weight first. Of wgrad, the dense operand
    is an estimate in dense layout.
    """
    if device.type != "cpu" or dtype == torch.float64 or not compiled_core().ok:
        return False
    wide = dtype == torch.float32
    if role == "fprop" and tokens <= (FEW_TOKENS if wide else FEW_TOKENS_16_BIT):
        return True
    return sparse_wins(dtype, n, m, dgrad=True)


TUNING = Tuning(heuristic=packed_wins)

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


def _expanded(op: str, values: Tensor, indices: Tensor, n: int, m: int, cols: int) -> Tensor:
    return expand(op, values, indices, n, m, cols, _room.like(values, values.shape[0], cols))


def _deliver(result: Tensor, out: Tensor | None) -> Tensor:
    return result.contiguous() if out is None else out.copy_(result)


def _by_tokens(x: Tensor, cols: int) -> tuple[int, int, int]:
    """``(tokens, cols)`` as the core's matrix ``[cols, tokens]``: address and strides."""
    return x.data_ptr(), 1, cols


@register("nm_linear", tuning=TUNING)
def _linear(
    x: Tensor, values: Tensor, indices: Tensor, n: int, m: int, cols: int, bias: Tensor | None = None, activation: str = "",
    residual: Tensor | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    y = _plain_linear(x, values, indices, n, m, cols, bias, out)
    if activation:  # in float32, but of a result that is rounded already
        y.copy_(ACTIVATIONS[activation](y.to(compute_dtype(y.dtype))))
    return y if residual is None else y.add_(residual)


def _plain_linear(x: Tensor, values: Tensor, indices: Tensor, n: int, m: int, cols: int, bias: Tensor | None, out: Tensor | None) -> Tensor:
    rows, tokens = values.shape[0], x.shape[:-1].numel()
    if tokens > FEW_TOKENS and not sparse_wins(x.dtype, n, m):
        return _deliver(torch.nn.functional.linear(x, _expanded("linear", values, indices, n, m, cols), bias), out)
    x, values, indices = contiguous(x), contiguous(values), indices.contiguous()
    b = None if bias is None else contiguous(bias)
    y = x.new_empty(*x.shape[:-1], rows) if out is None else out
    addresses = (x.data_ptr(), values.data_ptr(), indices.data_ptr(), address(b), y.data_ptr())
    valid = core().linear(*addresses, DTYPES[x.dtype], tokens, rows, cols, n, m, torch.get_num_threads())
    check_indices("linear", valid, m)
    return y


@register("nm_linear_dgrad", tuning=TUNING)
def _linear_dgrad(g: Tensor, values: Tensor, indices: Tensor, n: int, m: int, cols: int, out: Tensor | None = None) -> Tensor:
    rows, tokens = values.shape[0], g.shape[:-1].numel()
    if not sparse_wins(g.dtype, n, m, dgrad=True):
        return _deliver(g @ _expanded("linear_dgrad", values, indices, n, m, cols), out)
    g, values, indices = contiguous(g), contiguous(values), indices.contiguous()
    dx = g.new_empty(*g.shape[:-1], cols) if out is None else out
    operands = (values.data_ptr(), indices.data_ptr(), rows, cols, tokens, *_by_tokens(g, rows), 0, *_by_tokens(dx, cols))
    valid = core().spmm_transposed(core().SpmmCall(*operands), DTYPES[g.dtype], n, m, torch.get_num_threads())
    check_indices("linear_dgrad", valid, m)
    return dx


@register("nm_linear_wgrad", tuning=TUNING)
def _linear_wgrad(values: Tensor, indices: Tensor, n: int, m: int, cols: int, x: Tensor, out: Tensor | None = None) -> Tensor:
    rows, width = values.shape[0], x.shape[1]
    if not sparse_wins(x.dtype, n, m):
        return _deliver(_expanded("linear_wgrad", values, indices, n, m, cols) @ x, out)
    x, values, indices = contiguous(x), contiguous(values), indices.contiguous()
    dw = x.new_empty(rows, width) if out is None else out
    operands = (values.data_ptr(), indices.data_ptr(), rows, cols, width, x.data_ptr(), width, 1, 0, dw.data_ptr(), width, 1)
    valid = core().spmm(core().SpmmCall(*operands), DTYPES[x.dtype], n, m, torch.get_num_threads())
    check_indices("linear_wgrad", valid, m)
    return dw
