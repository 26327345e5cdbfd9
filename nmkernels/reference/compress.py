"""The compressed form: the kept values of each row and their packed positions inside their groups.

Positions are packed into bytes, lowest bits first, each row starting on a byte.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..pattern import Pattern, ShapeError
from .common import grouped
from .mask import mask as nm_mask


def pack_indices(idx: Tensor, bits: int) -> Tensor:
    """Pack rows of ``k`` uint8 into ceil(k*bits/8) bytes: byte_b = sum over s of idx[b*8/bits + s] << (s*bits), bits 2, 4 or 8.

    Spare bits of the last byte are 0.
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=idx.device)
    per_byte = shifts.numel()
    size = -(-idx.shape[-1] // per_byte)
    padded = torch.nn.functional.pad(idx, (0, size * per_byte - idx.shape[-1]))
    return (padded.unflatten(-1, (size, per_byte)) << shifts).sum(-1, dtype=torch.uint8)


def unpack_indices(packed: Tensor, bits: int, count: int) -> Tensor:
    """The inverse of ``pack_indices``: the first ``count`` values of every row, uint8 ``(..., count)``."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(-2)[..., :count].contiguous()


def compress(w: Tensor, n: int, m: int, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Gather the ``n`` kept elements of every group of ``m``, in order of index, with their packed positions: see ``nm.ops.compress``.

    If ``mask`` keeps fewer than n in a group, the lowest unkept positions are stored with value +0.0.
    """
    selected = grouped(nm_mask(w, n, m) if mask is None else mask, m)
    short = n - selected.sum(-1, keepdim=True)
    if mask is not None and (short < 0).any():
        most = n - int(short.min())
        raise ShapeError(f"compress: the mask keeps {most} elements in a group, but {n}:{m} stores {n}; prune it first.")
    stored = selected | (~selected & ((~selected).cumsum(-1) <= short))
    shape = (*w.shape[:-1], w.shape[-1] // m * n)
    values = grouped(w, m).masked_fill(~selected, 0.0)[stored].reshape(shape)
    position = torch.arange(m, device=w.device).to(torch.uint8).expand(stored.shape)[stored].reshape(shape)
    return values, pack_indices(position, Pattern(n, m).index_bits)


def decompress(values: Tensor, indices: Tensor, n: int, m: int, cols: int) -> Tensor:
    """Scatter the stored values back into a dense tensor ``(..., cols)``: out[group*m + index] = value, +0.0 elsewhere.

    If ``cols`` is not a multiple of ``m``, positions of the last group beyond it are dropped.
    """
    pattern = Pattern(n, m)
    position = unpack_indices(indices, pattern.index_bits, pattern.kept(cols)).long()
    if position.numel() and int(position.max()) >= m:
        raise ShapeError(
            f"decompress: index {int(position.max())} does not exist in a group of {m}; the indices are corrupt or have another pattern."
        )
    dense = values.new_zeros(*values.shape[:-1], pattern.groups(cols), m)
    dense.scatter_(-1, grouped(position, n), grouped(values, n))
    return dense.flatten(-2)[..., :cols].contiguous()
