"""Edge-case inputs that break kernels which pass on random numbers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..pattern import Pattern, PatternLike


class EdgeCase(NamedTuple):
    """One named input."""

    id: str
    x: Tensor


def cases(pattern: PatternLike, dtype: torch.dtype = torch.float32) -> list[EdgeCase]:
    """Edge cases for an op that groups the last dimension by ``pattern``; all last dimensions are divisible by M.

    Ties, zeros, -0.0, infinities, NaN, denormals, one group, odd numbers of rows and groups, strided, expanded and empty
    tensors, one to three dimensions; the same ones every time.

    Example:
        >>> [c.id for c in cases("2:4")][:4]
        ['normal', 'ties', 'zeros', 'signed_zeros']
    """
    p = Pattern(pattern)
    m, gen = p.m, torch.Generator().manual_seed(0)
    values = _values(m, dtype, gen)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen, dtype=torch.float32).to(dtype)

    shapes = {
        "one_group": normal(m),
        "one_row": normal(1, 3 * m),
        "ragged_rows": normal(17, 5 * m),
        "wide": normal(3, 67 * m),
        "three_dims": normal(2, 3, 2 * m),
        "transposed": normal(4 * m, 7).t(),
        "sliced_rows": normal(10, 4 * m)[1::2],
        "sliced_columns": normal(5, 8 * m)[:, m : 5 * m],
        "strided_columns": normal(5, 8 * m)[:, ::2],
        "offset": normal(4 * m * 3 + 1)[1:].reshape(3, 4 * m),
        "expanded_rows": normal(1, 2 * m).expand(6, 2 * m),
        "expanded_columns": normal(5, 1).expand(5, 2 * m),
        "no_rows": normal(0, 2 * m),
        "no_columns": normal(3, 0),
    }
    return [EdgeCase(name, x) for name, x in (values | shapes).items()]


def _values(m: int, dtype: torch.dtype, gen: torch.Generator) -> dict[str, Tensor]:
    """Matrices of 8 rows and 4 groups with edge-case values."""
    shape, info = (8, 4 * m), torch.finfo(dtype)
    normal = torch.randn(shape, generator=gen, dtype=torch.float32).to(dtype)

    def pick(options: list[float]) -> Tensor:
        return torch.tensor(options, dtype=dtype)[torch.randint(len(options), shape, generator=gen)]

    def sprinkled(options: list[float], share: float) -> Tensor:
        return torch.where(torch.rand(shape, generator=gen, dtype=torch.float32) < share, pick(options), normal)

    inf, nan = float("inf"), float("nan")
    denormal = info.smallest_normal / 4
    return {
        "normal": normal,
        "ties": pick([1.0, -1.0, 2.0, -2.0]),
        "zeros": torch.zeros(shape, dtype=dtype),
        "signed_zeros": pick([0.0, -0.0]),
        "few_nonzero": torch.where(torch.rand(shape, generator=gen, dtype=torch.float32) < 0.2, normal, pick([0.0, -0.0])),
        "infinite": sprinkled([inf, -inf], 0.3),
        "nan": sprinkled([nan], 0.3),
        "all_nan": torch.full(shape, nan, dtype=dtype),
        "nan_and_infinite": pick([nan, inf, -inf, 0.0, 1.0]),
        "denormal": pick([denormal, -denormal, 2 * denormal, info.smallest_normal, 0.0]),
        "extreme": pick([info.max, -info.max, info.tiny, -info.tiny, 1.0]),
        "close": 1 + info.eps * torch.randint(3, shape, generator=gen).to(dtype),
    }
