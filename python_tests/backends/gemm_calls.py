"""Small GEMMs with a packed weight, as the tests of every backend call them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from nmkernels import Pattern, reference
from nmkernels.reference.integers import pack_integers
from nmkernels.testing import assert_no_worse

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


def as_good_as_dense(y, w, x, bias=None, activation="", residual=None, by_column=False, what=""):
    """``y`` = activation(x wᵀ + bias) + residual, or w x, is no worse than what torch makes of dense operands in y's dtype."""

    def dense(dtype):
        a, b, c, r = (None if t is None else t.to(dtype) for t in (w, x, bias, residual))
        made = a @ b if by_column else ACTIVATIONS[activation](F.linear(b, a, c))
        return made if r is None else made + r

    assert_no_worse(y, dense(y.dtype), dense(torch.float64), f"{y.dtype} {tuple(w.shape)} with {tuple(x.shape)} {activation} {what}")


def unaligned(x):
    """The same numbers one element past a multiple of 16 bytes."""
    room = torch.empty(x.numel() + 17, dtype=x.dtype, device=x.device)
    first = -(room.data_ptr() // x.element_size()) % (16 // x.element_size()) + 1
    return room[first : first + x.numel()].view(x.shape).copy_(x)


def damaged(indices, p, row, k):
    """The same, but for the k-th of a row, which no group has."""
    broken, per_byte = indices.clone(), 8 // p.index_bits
    broken[row, k // per_byte] |= (2**p.index_bits - 1) << (k % per_byte * p.index_bits)
    return broken


# ---- weights of integers with steps


def integer_weight(text, rows, cols, bits, steps=1, device="cpu", extreme=False):
    """(values, indices, steps) of random integers, or of the least one, at random places, padding after the last column among them."""
    p, gen = Pattern(text), torch.Generator().manual_seed(rows * cols + bits + steps)
    _, indices = reference.compress(torch.randn(rows, p.groups(cols) * p.m, generator=gen), p.n, p.m)
    low, high = (-128, 127) if bits == 8 else (-8, 7)
    values = torch.randint(low, high + 1, (rows, p.kept(cols)), generator=gen)
    values = torch.full_like(values, low) if extreme else values
    step = (torch.rand(rows, steps, generator=gen) + 0.1) * 0.01 * torch.tensor([1.0, -1.0])[torch.arange(steps) % 2]
    return [t.to(device) for t in (pack_integers(values.to(torch.int8), bits), indices, step.to(torch.bfloat16))]


def steps_of(p, cols):
    """Numbers of steps per row that may be: one, and runs of whole groups."""
    return [1] + [cols // group for group in (32, 64, 128, 256, cols // 2) if group and cols % group == 0 and group % p.m == 0]


def hard(rows, kept):
    """Ties, zeros, denormals, magnitudes of every size, and rows that are not finite."""
    gen = torch.Generator().manual_seed(kept)
    w = torch.randn(rows, kept, generator=gen) * 10.0 ** torch.randint(-44, 38, (rows, 1), generator=gen)
    for row, value in enumerate((0.0, -0.0, 1e-45, -1e-40, 3e38, float("nan"), float("inf"), -1.0)):
        w[row, kept // 2 :] = value
        if row < 5:
            w[row, : kept // 2] = 0.0 if row % 2 else value
    w[8] = torch.arange(kept) % 17 - 8.0
    w[9] = torch.linspace(-127, 127, kept)
    w[10] = (torch.randint(-255, 256, (kept,), generator=gen) / 2).clamp(-127, 127)
    return w


def product_of_integers(call, text, x, operands, bias=None, activation="", residual=None, what=""):
    """What ``call`` computes, as good as the reference in x's dtype."""
    p, cols = Pattern(text), x.shape[-1]
    y, wide = call(x, *operands, p.n, p.m, cols, bias, activation, residual), []
    for convert in (lambda t: t.cpu(), lambda t: t.cpu().double()):
        extras = [None if t is None else convert(t) for t in (bias, residual)]
        rest = (*(t.cpu() for t in operands), p.n, p.m, cols, extras[0], activation, extras[1])
        wide.append(reference.linear_integers(convert(x), *rest))
    assert_no_worse(y, *wide, f"{text}, {cols} columns, {tuple(x.shape)} {x.dtype}, {tuple(operands[2].shape)} steps {what}")
    return y
