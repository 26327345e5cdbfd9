"""Philox4x32-10: random words from a key and a counter alone, so that any element can be drawn on any device.

Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Words are held in int64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..pattern import DtypeError, ShapeError

WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def philox4x32(counter: Tensor, key: tuple[Tensor | int, Tensor | int]) -> Tensor:
    """Ten rounds of Philox4x32: four random 32-bit words for each counter.

    One round: (c0, c1, c2, c3) -> (hi(B c2) ^ c1 ^ k0, lo(B c2), hi(A c0) ^ c3 ^ k1, lo(A c0)), A and B the ``MULTIPLIERS``;
    the key words grow by ``KEY_STEPS`` between rounds.

    Args:
        counter: int64 ``(..., 4)``, words in [0, 2^32).
        key: two words, ints or 0-d int64 tensors.

    Returns:
        int64 ``(..., 4)``, words in [0, 2^32).

    Example:
        >>> [hex(x) for x in philox4x32(torch.zeros(4, dtype=torch.int64), (0, 0)).tolist()]
        ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    c0, c1, c2, c3 = counter.unbind(-1)
    k0, k1 = key
    for _ in range(10):
        # the 64-bit product may wrap into the sign bit; masking after the shift takes the same 32 bits.
        a, b = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = ((b >> 32) & WORD) ^ c1 ^ k0, b & WORD, ((a >> 32) & WORD) ^ c3 ^ k1, a & WORD
        k0, k1 = (k0 + KEY_STEPS[0]) & WORD, (k1 + KEY_STEPS[1]) & WORD
    return torch.stack((c0, c1, c2, c3), dim=-1)


def _words(seed: Tensor, first: int, blocks: int) -> Tensor:
    """The words of counters (j lo, j hi, offset lo, hi), j from ``first``, under the key (seed lo, hi): ``(blocks, 4)``."""
    if seed.dtype != torch.int64:
        raise DtypeError(f"mvue: the seed tensor is {seed.dtype}, but int64 is required: torch.tensor([seed, offset]).")
    if seed.shape != (2,):
        raise ShapeError(f"mvue: the seed tensor has shape {tuple(seed.shape)}, but (2,) is required: torch.tensor([seed, offset]).")
    j = torch.arange(first, first + blocks, dtype=torch.int64, device=seed.device)
    low, high = seed & WORD, (seed >> 32) & WORD
    counter = torch.stack((j & WORD, j >> 32, low[1].expand_as(j), high[1].expand_as(j)), dim=-1)
    return philox4x32(counter, (low[0], high[0]))


def uniforms24(seed: Tensor, count: int, first: int = 0) -> Tensor:
    """One 24-bit number for each of groups first, ..., first + count - 1 (the exact MVUE method).

    Group j takes word j & 3 of counter (j >> 2, offset) under the key ``seed``, and of it the upper 24 bits.

    Args:
        seed: int64 ``(2,)``: (seed, offset), each split into a low and a high word.

    Returns:
        int64 ``(count,)`` in [0, 2^24), on the seed's device.

    Raises:
        DtypeError, ShapeError: the seed is not int64 of shape (2,).

    Example:
        >>> uniforms24(torch.tensor([0, 0]), 2).tolist() == [0x6627E8, 0xE169C5]
        True
    """
    skip = first & 3
    words = _words(seed, first >> 2, (skip + count + 3) >> 2)
    return words.flatten()[skip : skip + count] >> 8


def pairs24(seed: Tensor, count: int, first: int = 0) -> Tensor:
    """Two 24-bit numbers for each group (the approximate MVUE method): words 0 and 1 of counter (j, offset), >> 8.

    Arguments and errors as ``uniforms24``; returns int64 ``(count, 2)``.

    Example:
        >>> pairs24(torch.tensor([0, 0]), 1).tolist() == [[0x6627E8, 0xE169C5]]
        True
    """
    return _words(seed, first, count)[:, :2] >> 8
