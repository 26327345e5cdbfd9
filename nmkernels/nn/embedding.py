"""CompressedEmbedding: an embedding for inference whose rows are integers with steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import ops
from ..gemm.problem import Problem
from ..layouts import EMBEDDING
from ..ops.integers import nm_dequantize_values
from ..pattern import PatternError, RecipeError
from .compressed import CompressedLinear
from .traces import PROXY, constant, is_tracing, leaf


class CompressedEmbedding(CompressedLinear):
    """An embedding y = W[ids] that stores W as integers with steps and decodes only the rows that it returns.

    Args:
        weight: dense integers ``(ids, features)``: ``ops.quantize_values(ops.compress(w, "1:1"), ...)``. An output head that is tied to the
            embedding may share it.
        padding_idx: as of ``nn.Embedding``.
        dtype: of y, and of the dense layer that it replaces; default torch's.

    Raises:
        PatternError: the weight is not of dense integers.

    Example:
        >>> c = ops.quantize_values(ops.compress(torch.tensor([[127.0, -1.0], [0.0, 2.0]]), "1:1"), "int8")
        >>> CompressedEmbedding(c)(torch.tensor([0, 0]))
        tensor([[127.,  -1.],
                [127.,  -1.]])
    """

    layouts = (EMBEDDING,)

    def __init__(self, weight: ops.Compressed, padding_idx: int | None = None, dtype: torch.dtype | None = None) -> None:
        if weight.step is None or weight.pattern.m != 1:
            raise PatternError(f"CompressedEmbedding: its rows are dense integers, 1:1 with steps, and the weight is {weight!r}.")
        super().__init__(weight, None, EMBEDDING, dtype=dtype)
        self.num_embeddings, self.embedding_dim = self.shape
        self.padding_idx = padding_idx

    def forward(self, input: Tensor) -> Tensor:
        """y ``(..., features)``, the rows that the whole numbers ``input`` ``(...)`` name."""
        ids = input
        if isinstance(ids, PROXY):
            return leaf(self, ids)
        if is_tracing():
            return F.embedding(ids, constant(partial(self.dense, self.dtype)))
        rows = ids.reshape(-1)
        values, step = self.values.index_select(0, rows), self.step.index_select(0, rows)
        return nm_dequantize_values(values, step, self.embedding_dim, self.dtype).view(*ids.shape, self.embedding_dim)

    def as_op(self, x: Tensor) -> tuple[tuple[Any, ...], str]:
        raise RecipeError("explain: an embedding reads rows and multiplies nothing; explain one of the other layers.")

    def problems(self, tokens: int) -> list[tuple[Problem, ...]]:
        """None: no GEMM."""
        return []

    def tunable(self, counts: Sequence[int]) -> Iterator[tuple[str, CompressedLinear, Sequence[int]]]:
        """None: no GEMM."""
        return iter(())

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        weight = self.weight
        form = f"values={weight.kind}, group={weight.group or 'row'}, dtype={self.dtype}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, {form}"
