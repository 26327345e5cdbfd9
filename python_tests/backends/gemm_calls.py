"""Small GEMMs with a packed weight, as the tests of every backend call them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from nmkernels import Pattern, reference

PATTERNS = ("2:4", "1:4", "2:8", "1:8", "1:16", "1:32", "3:5", "4:32")
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
ACTIVATIONS = {"": lambda y: y, "gelu": F.gelu, "silu": F.silu, "relu2": lambda y: F.relu(y).square()}


def packed(text, rows, cols, dtype=torch.float32, device="cpu", gen=None):
    """The compressed form of a random matrix, and the matrix."""
    p, gen = Pattern(text), gen or torch.Generator().manual_seed(1)
    values, indices = reference.compress(torch.randn(rows, p.groups(cols) * p.m, generator=gen).to(dtype), p.n, p.m)
    return *(t.to(device) for t in (values, indices)), reference.decompress(values, indices, p.n, p.m, cols).to(device)


def inputs(tokens, cols, dtype=torch.float32, device="cpu", seed=2):
    return torch.randn(tokens, cols, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def unaligned(x):
    """The same numbers one element past a multiple of 16 bytes."""
    room = torch.empty(x.numel() + 17, dtype=x.dtype, device=x.device)
    first = -(room.data_ptr() // x.element_size()) % (16 // x.element_size()) + 1
    return room[first : first + x.numel()].view(x.shape).copy_(x)
