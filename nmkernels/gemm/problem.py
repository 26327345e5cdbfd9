"""Problem: the description of a GEMM, used to choose its method, to measure it and as key of the results."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .. import timing
from ..ops.integers import BITS
from ..pattern import Pattern

ROLES = ("fprop", "dgrad", "wgrad")


class Problem(NamedTuple):
    """One GEMM of a layer y = x W̃ᵀ, and the forms in which its sparse operand is available.

    Args:
        role: ``"fprop"`` y = x W̃ᵀ, ``"dgrad"`` dx = g W̃, or ``"wgrad"`` dW = ĝᵀ x, with ĝ an N:M estimate of g along tokens.
        tokens: rows of x and g.
        rows, cols: (out, in) of the layer.
        n, m: the pattern of W̃, or of ĝᵀ.
        dtype, device: of the operands.
        forms: ``"dense"``: W̃ in dense layout; ``"rows"``: W̃ compressed; ``"columns"``: W̃ᵀ compressed, for dgrad with a transposable
            mask; ``"rows:wgmma.sp"`` and so on: the same in a tensor-core layout. The preferred compressed form comes first. In wgrad, the
            forms in which ĝᵀ may be written.
        rule: how wgrad estimates ĝ: ``"exact"`` or ``"approx"``, as in ``ops.mvue``, or ``"magnitude"``; empty for other roles.
        changing: W̃ changes between calls, as in training, so its construction is part of the time.
        cached: the weight stays in the cache between calls, as those of a small model do.
        values: what the values of a constant W̃ in fprop are: ``"float"``, in ``dtype``, or ``"int8"`` or ``"int4"`` with a step.
        group: the columns that share a step; 0 for a row.
    """

    role: str
    tokens: int
    rows: int
    cols: int
    n: int
    m: int
    dtype: torch.dtype
    device: torch.device
    forms: tuple[str, ...] = ("dense", "rows")
    rule: str = ""
    changing: bool = False
    cached: bool = False
    values: str = "float"
    group: int = 0

    @property
    def integers(self) -> bool:
        """Whether the values are integers with a step."""
        return self.values != "float"

    def words(self) -> str:
        """A short text such as ``fprop 4096x1024 2:4 bfloat16, 8192 tokens``."""
        kind = f" {stored_as(self)}" if self.integers else ""
        return f"{self.role} {self.rows}x{self.cols} {self.n}:{self.m}{kind} {plain(self.dtype)}, {self.tokens} tokens"


def key(*problems: Problem) -> str:
    """The key of the table of measurements, for a GEMM or for several of one layer that are chosen together."""
    parts = []
    for p in problems:
        what = f"{p.role} {p.rule}" if p.rule else p.role
        how = f"{'+'.join(p.forms)}{' changing' if p.changing else ''}{' cached' if p.cached else ''}"
        how += f" {stored_as(p)}" if p.integers else ""
        parts.append(f"{what}|{plain(p.dtype)}|{p.n}:{p.m}|{p.rows}x{p.cols}|{how}")
    return timing.key("gemm", problems[0].device, " and ".join(parts), problems[0].tokens)


def stored_as(p: Problem) -> str:
    """The kind of integer values, and the columns that share a step, such as ``int4/128``; ``int8`` if a row does."""
    return f"{p.values}/{p.group}" if p.group else p.values


def packed_bytes(pattern: Pattern, dtype: torch.dtype, values: str = "float", group: int = 0) -> float:
    """Bytes of the compressed form per element of the dense one, with the step of each group; that of a row does not count."""
    bits = BITS[values] if values in BITS else 8 * dtype.itemsize
    index_bits = 0 if values in BITS and pattern.m == 1 else pattern.index_bits
    return pattern.density * (bits + index_bits) / 8 + (2 / group if group else 0.0)


def plain(dtype: torch.dtype) -> str:
    """The name of a dtype without ``torch.``."""
    return str(dtype).removeprefix("torch.")
