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

from ..layouts import CONV2D, MATRICES
from ..nn.experts import by_expert, child_name
from ..ops import Compressed
from ..train.layer_names import listed
from ..train.sparsify import LayerCandidate
from .ranks import ranks


@dataclass(frozen=True)
class PruningProblem:
    """One matrix to prune: that of a layer, or of one expert in its stack. ``source`` names the input, which several may share."""

    candidate: LayerCandidate
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
        return matrix if self.expert is None else matrix.unflatten(0, (self.candidate.shape[0], -1))[self.expert]


def problems_of(c: LayerCandidate, source: str) -> list[PruningProblem]:
    """The matrices of a layer, one for each expert of a stack."""
    if c.key == "weight":
        return [PruningProblem(c, source)]
    home, end = c.name.rpartition(".")[0], "last" if c.key == "down_proj" else "first"
    return [PruningProblem(c, f"{home}/{end}/{expert}", expert) for expert in range(c.shape[0])]


def joined(parts: Sequence[Compressed], shape: tuple[int, int]) -> Compressed:
    """The matrix of a layer ``(rows, in)`` from those of its problems, one below the other."""
    if len(parts) == 1:
        return parts[0]
    values, indices = (torch.cat([getattr(part, name) for part in parts]) for name in ("values", "indices"))
    steps = [part.step for part in parts if part.step is not None]
    return Compressed(values, indices, parts[0].pattern, shape, torch.cat(steps) if steps else None)


class Hessians:
    """The Hessians of ``problems``, by source."""

    def __init__(self, problems: Sequence[PruningProblem]) -> None:
        self.sums: dict[str, Tensor] = {}  # Σ xᵀx over the tokens of a source, in fp32, or fp64 for fp64 weights
        self.tokens: dict[str, Tensor] = {}  # how many; not waiting for a GPU
        self._problems = {p.source: p for p in reversed(problems)}  # of layers with one input the first speaks for all
        self._lost: list[tuple[int, str, Tensor]] = []  # (batch, source, how many tokens)
        for source, p in self._problems.items():
            module, key, cols = p.candidate.module, p.candidate.key, p.shape[1]
            stack = module._modules.get(child_name(key))  # of experts that are sparse or compressed already
            weight: Any = getattr(module, key) if stack is None else stack.weight
            self.sums[source] = torch.zeros(cols, cols, dtype=wide(weight.dtype), device=weight.device)
            self.tokens[source] = torch.zeros((), dtype=torch.int64, device=weight.device)

    @contextmanager
    def collecting(self, tokens: Callable[[Tensor], tuple[int, Tensor | None]]) -> Iterator[None]:
        """Add the inputs of the forward passes run inside. ``tokens(x)``: (the number of the present batch, for ``warn``; which rows of an
        input are tokens, None for all).
        """
        modules = {p.candidate.module: p for p in self._problems.values()}  # an experts module has several problems
        hooks = [m.register_forward_pre_hook(partial(self._collect, p, tokens), with_kwargs=True) for m, p in modules.items()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def _collect(
        self,
        problem: PruningProblem,
        tokens: Callable[[Tensor], tuple[int, Tensor | None]],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        x: Tensor = (*args, *kwargs.values())[0]
        number, keep = tokens(x)
        with exact_gemms(x.device):
            if problem.expert is None:
                self._add(problem.source, rows_of(x, problem.candidate), None if problem.candidate.layout == CONV2D else keep, number)
                return
            name = problem.source.split("/")[0]
            for expert, first, last in by_expert(module, keep, *args, **kwargs):
                self._add(f"{name}/first/{expert}", first, None, number)
                self._add(f"{name}/last/{expert}", last, None, number)

    def _add(self, source: str, x: Tensor, keep: Tensor | None, number: int) -> None:
        if source not in self.sums or not len(x):
            return
        total = self.sums[source]
        x = x.to(total.dtype)
        good = x.isfinite().all(1)
        lost = (~good if keep is None else ~good & keep).sum()
        good = good if keep is None else good & keep
        x = x.masked_fill(~good[:, None], 0.0)
        total.addmm_(x.t(), x)
        self.tokens[source] += good.sum()
        self._lost.append((number, source, lost))

    def share(self) -> None:
        """Add up what all ranks of ``torch.distributed`` have collected; does nothing in a single process."""
        if ranks()[0] > 1:
            for source in sorted(self.sums):
                torch.distributed.all_reduce(self.sums[source])
                torch.distributed.all_reduce(self.tokens[source])

    def mean(self, source: str) -> tuple[Tensor, int]:
        """(H = XᵀX / tokens, tokens) of a source, and forget its sum; zeros where it has seen no token."""
        tokens = int(self.tokens.pop(source))
        return self.sums.pop(source).div_(max(1, tokens)), tokens

    def warn(self) -> None:
        """Warn of tokens that were left out because they were not finite."""
        lost = [(number, source, int(count)) for number, source, count in self._lost if count]
        if lost:
            first, source, _ = lost[0]
            tokens = sum(count for _, other, count in lost if other == source)
            others = dict.fromkeys(other for _, other, _ in lost if other != source)
            also = f" So did {listed(self._problems[other].name for other in others)}." if others else ""
            warnings.warn(
                f"prune_: layer {self._problems[source].name!r} got NaN or infinite input values in {tokens} tokens, first in "
                f"batch {first}.{also} Such tokens are left out. If they are not padding, prune in bfloat16 or float32.",
                stacklevel=6,
            )


def inverse_factor(h: Tensor) -> Tensor:
    """The upper triangular U with UᵀU = H⁻¹; ``h`` is overwritten. Raises ``LinAlgError`` if it is not positive definite.

    Reversing both orders of H turns its lower Cholesky factor into an upper one, whose inverse is U. H⁻¹ itself, which squares the
    condition number again, is never formed.
    """
    lower = torch.linalg.cholesky(h.flip(0, 1))
    h.zero_().diagonal().fill_(1.0)  # its memory is not needed any more
    return torch.linalg.solve_triangular(lower, h, upper=False).flip(0, 1)


def wide(dtype: torch.dtype) -> torch.dtype:
    """What weights of ``dtype`` are pruned in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@contextmanager
def exact_gemms(device: torch.device) -> Iterator[None]:
    """fp32 GEMMs in fp32: no autocast, no TF32, and no bf16 inside oneDNN."""
    backends: Any = torch.backends
    switches = backends.cuda.matmul, backends.mkldnn.matmul
    before = [switch.fp32_precision for switch in switches]
    try:
        older: str | None = torch.get_float32_matmul_precision()
    except RuntimeError:  # the user has set the newer switches, with which the older one must not be mixed
        older = None
    try:
        if older is not None:
            torch.set_float32_matmul_precision("highest")
        else:
            for switch in switches:
                switch.fp32_precision = "ieee"
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        if older is not None:
            torch.set_float32_matmul_precision(older)
        for switch, value in zip(switches, before, strict=True):
            switch.fp32_precision = value


def windows_of(candidate: LayerCandidate) -> tuple[object, ...]:
    """What tells apart the vectors of two layers with one input: the windows of a convolution. A linear layer takes all of its input."""
    conv: Any = candidate.module
    if candidate.layout != CONV2D:
        return ()
    return conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.padding_mode


def rows_of(x: Tensor, candidate: LayerCandidate) -> Tensor:
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
