"""Whether a plan computes what it should. Some of the library's algorithms do not, or not always, so none is used unchecked.

The rule is that of every rounded result: the largest error against float64 is at most twice torch's own in the same dtype, plus 4 eps of
the largest result. Besides, two runs must agree in every bit, and no element may be left unwritten.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...pattern import BackendError
from ...reference import distance
from ._compress import by_another, compress_as
from ._context import Here, Ready
from ._problem import LAYOUTS, Algorithm, Problem

SEED = 24


class Judge:
    """Random operands of one problem, and what is right for them. The caller's random numbers are not touched.

    Args:
        like: a tensor on the device.
    """

    def __init__(self, problem: Problem, here: Here, like: Tensor, stream: int) -> None:
        self.problem, self.here, self.stream = problem, here, stream
        generator = torch.Generator(like.device).manual_seed(SEED)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=like.device, dtype=torch.float32)

        p = problem
        full, other = normal(p.rows, p.cols), normal(*((p.width, p.cols) if p.by_token else (p.cols, p.width)))
        sparse, dense = _of_dtype(by_another("nm_prune", full, 2, 4), p.dtype), _of_dtype(other, p.dtype)
        self.bias = normal(p.rows).to(p.bias_dtype) if p.bias else None
        self.residual = _of_dtype(normal(*self._shape), p.out) if p.residual else None
        self.dense = dense
        self.blob = compress_as(p.layout, sparse.t() if LAYOUTS[p.layout][0] else sparse, here, stream)
        self.exact = self._result(sparse, dense, torch.float64)
        self.bound = self._bound(sparse, dense)

    @property
    def _shape(self) -> tuple[int, int]:
        p = self.problem
        return (p.width, p.rows) if p.by_token else (p.rows, p.width)

    def _result(self, sparse: Tensor, dense: Tensor, dtype: torch.dtype) -> Tensor:
        p = self.problem
        s, b = sparse.to(dtype), dense.to(dtype)
        # a first call may well come under autocast, which would multiply in its own dtype
        with torch.autocast(s.device.type, enabled=False):
            y = b @ s.t() if p.by_token else s @ b
        if self.bias is not None:
            y = y + (self.bias.to(dtype) if p.by_token else self.bias.to(dtype)[:, None])
        y = {"": lambda y: y, "relu": F.relu, "gelu": F.gelu}[p.activation](y)
        return y if self.residual is None else y + self.residual.to(dtype)

    def _bound(self, sparse: Tensor, dense: Tensor) -> float:
        p = self.problem
        if not p.out.is_floating_point:
            self.exact = self.exact.clamp(torch.iinfo(p.out).min, torch.iinfo(p.out).max)
            return 0.0
        computed = p.dtype if p.dtype == p.out else torch.float32
        own = self.error(self._result(sparse, dense, computed).to(p.out))
        return 2 * own + 4 * torch.finfo(p.out).eps * float(self.exact.abs().max())

    def error(self, y: Tensor) -> float:
        """The largest distance from float64; NaN where there is one."""
        return distance(y, self.exact)

    def __call__(self, algorithm: Algorithm) -> str:
        """What is wrong with a plan by this algorithm; empty where nothing is."""
        try:
            ready = self.here.plan(self.problem, algorithm, self.dense)
            wrong = self._two_runs(ready)
            library = self.here.library
            if wrong and self.bias is not None and not library.replan:
                # perhaps a plan keeps the address of the bias that it was made with: then it must be made anew for each
                library.replan = True
                wrong = self._two_runs(ready)
                library.replan = not wrong
        except BackendError as error:
            return str(error).removeprefix("cuSPARSELt: ")
        if wrong:
            self.here.drop(ready)
        return wrong

    def _two_runs(self, ready: Ready) -> str:
        """The second run has its bias elsewhere, and in the first one's memory is no number by then."""
        first = None if self.bias is None else self.bias.clone()
        one = self.run(ready, first, -1)
        second = None if first is None else first.clone()
        if first is not None:
            first.fill_(torch.nan)
        other = self.run(ready, second, 0x55)
        error = self.error(one)
        if not error <= self.bound:  # false for NaN
            return f"max error {error:.3g} against float64 is above {self.bound:.3g}"
        return "" if torch.equal(one, other) else "two runs differ"

    def run(self, ready: Ready, bias: Tensor | None, before: int) -> Tensor:
        """The result of one run in memory whose every byte was ``before``: -1 makes NaN of floats."""
        self.out = torch.empty(self._shape, dtype=self.problem.out, device=self.dense.device)
        self.out.view(torch.int8).fill_(before)
        self.again(ready, bias)
        return self.out

    def again(self, ready: Ready, bias: Tensor | None = None) -> None:
        """The product alone, to be timed; into the memory of the last run."""
        bias = self.bias if bias is None else bias
        self.here.run(ready, self.blob.address, self.dense, self.out, bias, self.residual, self.stream, 1.0)


def _of_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    return (3 * x).round().to(dtype) if dtype == torch.int8 else x.to(dtype)
