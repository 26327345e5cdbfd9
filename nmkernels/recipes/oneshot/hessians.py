"""Hessians of layers' inputs: H = XᵀX / tokens, summed over the forward passes of a model.

What a layer multiplies gives its rows: each token of a linear layer, each position's window of a convolution, the tokens that are routed to
each expert. Layers with one input share one Hessian.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...layouts import CONV2D, MATRICES
from ...nn.experts import by_expert
from ..sparsify import Candidate
from ..writes import listed


@dataclass(frozen=True)
class Problem:
    """One matrix to prune: that of a layer, or of one expert in its stack. ``source`` names the input, which several may share."""

    candidate: Candidate
    source: str
    expert: int | None = None

    @property
    def name(self) -> str:
        return self.candidate.name if self.expert is None else f"{self.candidate.name}[{self.expert}]"

    @property
    def shape(self) -> tuple[int, int]:
        """``(out, in)``."""
        rows, cols = self.candidate.matrix_shape
        return (rows if self.expert is None else rows // self.candidate.shape[0]), cols

    def part(self, matrix: Tensor) -> Tensor:
        """The rows of this problem in the layer's matrix, as a view."""
        if self.expert is None:
            return matrix
        rows = self.shape[0]
        return matrix[self.expert * rows : (self.expert + 1) * rows]


class Hessians:
    """The Hessians of ``problems``, by source.

    Attributes:
        sums: source -> Σ xᵀx over its tokens, in fp32, or fp64 for fp64 weights.
        tokens: source -> how many; not waiting for a GPU.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.sums: dict[str, Tensor] = {}
        self.tokens: dict[str, Tensor] = {}
        self._problems = {p.source: p for p in problems}
        self._lost: dict[str, list[Tensor]] = {}

    @contextmanager
    def collecting(self, padding: Callable[[Tensor], Tensor | None]) -> Iterator[None]:
        """Add the inputs of the forward passes run inside. ``padding(x)``: of the rows of an input, which are tokens; None for all."""
        hooks, seen = [], set()
        for problem in self._problems.values():
            module = problem.candidate.module
            if id(module) not in seen:  # an experts module has several sources
                seen.add(id(module))
                hooks.append(module.register_forward_pre_hook(partial(self._collect, problem, padding), with_kwargs=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _collect(
        self, problem: Problem, padding: Callable[[Tensor], Tensor | None], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        with torch.no_grad(), exact_gemms((*args, *kwargs.values())[0].device):
            x: Tensor = (*args, *kwargs.values())[0]
            keep = padding(x)
            if problem.expert is None:
                self._add(problem.source, rows_of(x, problem.candidate), keep)
                return
            name = problem.source.split("/")[0]
            for expert, first, last in by_expert(module, keep, *args, **kwargs):
                self._add(f"{name}/first/{expert}", first, None)
                self._add(f"{name}/last/{expert}", last, None)

    def _add(self, source: str, x: Tensor, keep: Tensor | None) -> None:
        problem = self._problems.get(source)
        if problem is None or not len(x):
            return
        x = x.to(wide(problem.candidate.module.get_parameter(problem.candidate.key).dtype))
        good = x.isfinite().all(1)
        lost = (~good if keep is None else ~good & keep).sum()
        good = good if keep is None else good & keep
        x = x.masked_fill(~good[:, None], 0.0)
        if source not in self.sums:
            self.sums[source] = torch.zeros(x.shape[1], x.shape[1], dtype=x.dtype, device=x.device)
            self.tokens[source] = torch.zeros((), dtype=torch.int64, device=x.device)
            self._lost[source] = []
        self.sums[source].addmm_(x.t(), x)
        self.tokens[source] += good.sum()
        self._lost[source].append(lost)

    def share(self) -> None:
        """Add up what all ranks of ``torch.distributed`` have collected; does nothing in a single process."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1):
            return
        for source, problem in sorted(self._problems.items()):
            weight = problem.candidate.module.get_parameter(problem.candidate.key)
            cols = problem.shape[1]
            if source not in self.sums:  # another rank may have tokens for this expert
                self.sums[source] = torch.zeros(cols, cols, dtype=wide(weight.dtype), device=weight.device)
                self.tokens[source] = torch.zeros((), dtype=torch.int64, device=weight.device)
            torch.distributed.all_reduce(self.sums[source])
            torch.distributed.all_reduce(self.tokens[source])

    def mean(self, source: str) -> tuple[Tensor, int]:
        """(H = XᵀX / tokens, tokens) of a source, and forget its sum; zeros where it has seen no token."""
        problem = self._problems[source]
        if source not in self.sums:
            cols = problem.shape[1]
            weight = problem.candidate.module.get_parameter(problem.candidate.key)
            return torch.zeros(cols, cols, dtype=wide(weight.dtype), device=weight.device), 0
        tokens = int(self.tokens.pop(source))
        return self.sums.pop(source).div_(max(1, tokens)), tokens

    def warn(self) -> None:
        """Warn of tokens that were left out because they were not finite."""
        lost = {source: counts for source, seen in self._lost.items() if seen and any(counts := torch.stack(seen).tolist())}
        if lost:
            source = next(iter(lost))
            first = next(i for i, count in enumerate(lost[source], 1) if count)
            also = f" So did {listed([self._problems[other].name for other in list(lost)[1:]])}." if len(lost) > 1 else ""
            warnings.warn(
                f"prune_: layer {self._problems[source].name!r} got NaN or infinite input values in {sum(lost[source])} tokens, first in "
                f"batch {first}.{also} Such tokens are left out. If they are not padding, prune in bfloat16 or float32.",
                stacklevel=5,
            )


def wide(dtype: torch.dtype) -> torch.dtype:
    """What weights of ``dtype`` are pruned in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@contextmanager
def exact_gemms(device: torch.device) -> Iterator[None]:
    """fp32 GEMMs in fp32: no autocast, no TF32, and no bf16 inside oneDNN."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def rows_of(x: Tensor, candidate: Candidate) -> Tensor:
    """The vectors ``(rows, in)`` that the layer's matrix multiplies in input ``x``."""
    if candidate.layout in MATRICES:
        return x.reshape(-1, x.shape[-1])
    assert candidate.layout == CONV2D
    conv: Any = candidate.module
    if x.dim() == 3:
        x = x[None]
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    x = F.pad(x, conv._reversed_padding_repeated_twice, mode=mode)
    windows = F.unfold(x.float() if x.dtype != torch.float64 else x, conv.kernel_size, conv.dilation, 0, conv.stride)
    # (batch, in · kh · kw, positions); the matrix has the channels innermost
    windows = windows.unflatten(1, (conv.in_channels, -1)).permute(0, 3, 2, 1)
    return windows.reshape(-1, candidate.matrix_shape[1])
