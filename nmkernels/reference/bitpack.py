"""Packing small integers into bytes, little end first, each row starting on a byte."""

from __future__ import annotations

import torch
from torch import Tensor

from ..pattern import DtypeError, PatternError, ShapeError


def _shifts(op: str, packed: Tensor, bits: int) -> Tensor:
    if bits not in (2, 4, 8):
        raise PatternError(f"{op}: {bits} bits per index; indices take 2, 4 or 8 (Pattern.index_bits).")
    if packed.dtype != torch.uint8:
        raise DtypeError(f"{op}: indices have dtype {packed.dtype}, but uint8 is required; cast them with .to(torch.uint8).")
    return torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)


def pack_indices(idx: Tensor, bits: int) -> Tensor:
    """Pack ``k`` values of ``bits`` bits per row: byte_b = sum over s of idx[b*8/bits + s] << (s*bits).

    Args:
        idx: uint8 ``(..., k)``, each below 2**bits.
        bits: 2, 4 or 8.

    Returns:
        uint8 ``(..., ceil(k*bits/8))``; spare bits of the last byte are 0.

    Raises:
        PatternError: ``bits`` is not 2, 4 or 8. DtypeError: not uint8.

    Example:
        >>> pack_indices(torch.tensor([1, 2, 3], dtype=torch.uint8), 4)
        tensor([33,  3], dtype=torch.uint8)
    """
    shifts = _shifts("pack_indices", idx, bits)
    per_byte = shifts.numel()
    size = -(-idx.shape[-1] // per_byte)
    padded = torch.nn.functional.pad(idx, (0, size * per_byte - idx.shape[-1]))
    return (padded.unflatten(-1, (size, per_byte)) << shifts).sum(-1, dtype=torch.uint8)


def unpack_indices(packed: Tensor, bits: int, count: int) -> Tensor:
    """The inverse of ``pack_indices``: the first ``count`` values of every row.

    Args:
        packed: uint8 ``(..., at least ceil(count*bits/8))``.

    Returns:
        uint8 ``(..., count)``.

    Raises:
        PatternError, DtypeError: as ``pack_indices``. ShapeError: the rows are too short for ``count``.

    Example:
        >>> unpack_indices(torch.tensor([33, 3], dtype=torch.uint8), 4, 3)
        tensor([1, 2, 3], dtype=torch.uint8)
    """
    shifts = _shifts("unpack_indices", packed, bits)
    need = -(-count * bits // 8)
    if packed.shape[-1] < need:
        raise ShapeError(f"unpack_indices: rows of {packed.shape[-1]} bytes cannot hold {count} indices of {bits} bits; {need} are needed.")
    return ((packed.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(-2)[..., :count].contiguous()
