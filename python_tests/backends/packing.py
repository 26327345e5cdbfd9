"""Masks for tests of what packs."""

from __future__ import annotations

import torch
from torch import Tensor

from nmkernels import Pattern


def some_mask(rows: int, cols: int, p: Pattern) -> Tensor:
    """Any number of elements up to N kept in each group, at random places."""
    groups = torch.rand(rows, cols // p.m, p.m)
    most = torch.randint(0, p.n + 1, (*groups.shape[:-1], 1))
    return (groups.argsort(-1).argsort(-1) < most).flatten(-2)


def some_mask_both_ways(rows: int, cols: int, p: Pattern) -> Tensor:
    """At most N of M along rows and along columns: circulant tiles with their rows shuffled, some elements left out."""
    circle = (torch.arange(p.m)[:, None] - torch.arange(p.m)) % p.m < p.n
    tiles = [[circle[torch.randperm(p.m)] for _ in range(cols // p.m)] for _ in range(rows // p.m)]
    whole = torch.cat([torch.cat(row, 1) for row in tiles]) if rows and cols else torch.zeros(rows, cols, dtype=torch.bool)
    return whole & (torch.rand(rows, cols) < 0.8)
