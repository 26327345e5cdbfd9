"""Check results against float64 before a candidate may be chosen for its speed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..reference import distance

WHOLE = 1 << 28
"""GEMMs with at most this many multiplications are checked completely in float64."""

EDGE, INNER = 16, 48
"""Rows and columns of a larger GEMM that are checked: at each end, where kernels tend to fail, and in between."""

FURTHER = 4.0
"""Elsewhere a result may differ from torch's, which is also rounded, by this many times the bound."""


class Validator:
    """Checks the matrix that a call writes: unwritten elements, too large an error, or different results in two runs.

    The error may be at most twice torch's own in the same dtype plus 4·eps·max|y|, as in ``testing.assert_no_worse``; 0 for integers.
    ``exact`` is the float64 result, restricted to ``rows`` and ``cols``; ``theirs`` is torch's result.
    """

    def __init__(self, exact: Tensor, theirs: Tensor, rows: Tensor | None = None, cols: Tensor | None = None) -> None:
        self.exact, self.theirs, self.rows, self.cols = exact, theirs, rows, cols
        self.bound = 0.0
        if theirs.is_floating_point():
            top = float(exact.abs().max()) if exact.numel() else 0.0
            self.bound = 2 * self.error(theirs) + 4 * torch.finfo(theirs.dtype).eps * top

    @classmethod
    def of_gemm(cls, a: Tensor, b: Tensor) -> Validator:
        """For ``a @ b``, dense matrices ``(rows, k)`` and ``(k, columns)``; large GEMMs are checked in part."""
        some = a.shape[0] * b.shape[1] * a.shape[1] > WHOLE
        rows, cols = (_some(a.shape[0], a.device), _some(b.shape[1], a.device)) if some else (None, None)
        return cls(_pick(a, 0, rows).double() @ _pick(b, 1, cols).double(), a @ b, rows, cols)

    def error(self, y: Tensor) -> float:
        """The largest error against float64; NaN if there is a NaN."""
        return distance(_pick(_pick(y, 0, self.rows), 1, self.cols), self.exact)

    def __call__(self, run: Callable[[Tensor], object]) -> str:
        """Run the candidate and describe what is wrong with its result; empty if nothing is."""
        first = self._run(run, -1)  # NaN for floats
        error = self.error(first)
        if not error <= self.bound:  # false for NaN
            return f"max error {error:.3g} against float64 is above {self.bound:.3g}"
        if self.rows is not None or self.cols is not None:
            error = distance(first, self.theirs)
            if not error <= FURTHER * self.bound:
                return f"a difference of {error:.3g} from torch's result is above {FURTHER * self.bound:.3g}"
        return "" if torch.equal(first, self._run(run, 0x55)) else "two runs differ"

    def _run(self, run: Callable[[Tensor], object], before: int) -> Tensor:
        """Run into memory filled with the byte ``before``."""
        out = torch.empty(self.theirs.shape, dtype=self.theirs.dtype, device=self.theirs.device)
        out.view(torch.int8).fill_(before)
        run(out)
        return out


def _some(size: int, device: torch.device) -> Tensor | None:
    if size <= 2 * EDGE + INNER:
        return None
    inner = torch.linspace(EDGE, size - EDGE - 1, INNER, device=device, dtype=torch.float64).long()
    ends = torch.arange(EDGE, device=device)
    return torch.cat([ends, inner, size - EDGE + ends])


def _pick(x: Tensor, dim: int, which: Tensor | None) -> Tensor:
    return x if which is None else x.index_select(dim, which)
