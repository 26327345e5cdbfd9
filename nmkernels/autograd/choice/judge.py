"""Whether a product came out right: what may be chosen by its speed has to be right first."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...reference import distance

WHOLE = 1 << 28
"""Multiplications up to which all of a product is done again in float64."""

EDGE, INNER = 16, 48
"""Of a larger one, so many rows and columns at each end, where kernels go wrong, and in between."""

FURTHER = 4.0
"""Outside the rows and columns that are done in float64, a result may be so many times the bound away from torch's own, which errs too."""


class Judge:
    """Says what is wrong with results of ``a @ b``: unwritten, too far from float64, or not the same twice.

    The error may be at most twice torch's own in the same dtype plus 4·eps·max|y|, as everywhere (``testing.no_worse``).

    Args:
        a, b: matrices ``(rows, k)`` and ``(k, columns)`` in dense layout.
    """

    def __init__(self, a: Tensor, b: Tensor) -> None:
        rows, cols = a.shape[0], b.shape[1]
        some = rows * cols * a.shape[1] > WHOLE
        self.rows = _some(rows, a.device) if some else None
        self.cols = _some(cols, a.device) if some else None
        self.theirs = a @ b
        exact_a, exact_b = _pick(a, 0, self.rows).double(), _pick(b, 1, self.cols).double()
        self.exact = exact_a @ exact_b
        top = float(self.exact.abs().max()) if self.exact.numel() else 0.0
        self.bound = 2 * self.error(self.theirs) + 4 * torch.finfo(a.dtype).eps * top

    def error(self, y: Tensor) -> float:
        """The largest distance from float64; NaN where there is one."""
        return distance(_pick(_pick(y, 0, self.rows), 1, self.cols), self.exact)

    def __call__(self, run: Callable[[Tensor], object]) -> str:
        """What is wrong with what ``run`` writes into its argument, a matrix; empty if nothing is."""
        first, second = (torch.full_like(self.theirs, torch.nan) for _ in range(2))
        run(first)
        error = self.error(first)
        if not error <= self.bound:  # false for NaN
            return f"max error {error:.3g} against float64 is above {self.bound:.3g}"
        if self.rows is not None:
            error = distance(first, self.theirs)
            if not error <= FURTHER * self.bound:
                return f"a distance of {error:.3g} from torch's own result is above {FURTHER * self.bound:.3g}"
        run(second)
        return "" if torch.equal(first, second) else "two runs differ"


def _some(size: int, device: torch.device) -> Tensor | None:
    if size <= 2 * EDGE + INNER:
        return None
    inner = torch.linspace(EDGE, size - EDGE - 1, INNER, device=device, dtype=torch.float64).long()
    ends = torch.arange(EDGE, device=device)
    return torch.cat([ends, inner, size - EDGE + ends])


def _pick(x: Tensor, dim: int, which: Tensor | None) -> Tensor:
    return x if which is None else x.index_select(dim, which)
