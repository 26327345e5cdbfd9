"""SparseConv1D: Hugging Face's Conv1D (GPT-2's linear layer, weight stored transposed) with an N:M weight."""

from __future__ import annotations

from torch import nn

from ..pattern import PatternLike
from .linear import OWN_ATTRIBUTES, NMWeight


def is_conv1d(module: nn.Module) -> bool:
    """True for ``transformers.pytorch_utils.Conv1D`` itself, told by name so that transformers is never imported."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


class SparseConv1D(NMWeight):
    """y = x W̃ + b with the parameter ``weight`` stored ``(in, out)``; groups run along ``in``, its dimension 0.

    It is made from a model's own layer by ``sparsify_``, never directly, and gives that layer back on ``remove``.
    """

    transposed = True
    nf: int
    nx: int
    dense_type: type[nn.Module]

    @property
    def in_features(self) -> int:
        """Length of the input, ``nx``."""
        return int(self.weight.shape[0])

    @property
    def out_features(self) -> int:
        """Length of the output, ``nf``."""
        return int(self.weight.shape[1])


def from_conv1d(dense: nn.Module, pattern: PatternLike) -> SparseConv1D:
    """A SparseConv1D over the very same Parameters, hooks and mode as ``dense``; M must divide its ``nx``."""
    layer = SparseConv1D.__new__(SparseConv1D)
    layer.__dict__.update(dense.__dict__)
    layer.dense_type = type(dense)
    layer._start(pattern, "sparsify_")
    return layer


def to_conv1d(layer: SparseConv1D) -> nn.Module:
    """The Hugging Face layer over the same Parameters as ``layer``."""
    kind = layer.dense_type
    dense = kind.__new__(kind)
    dense.__dict__.update({k: v for k, v in layer.__dict__.items() if k not in OWN_ATTRIBUTES | {"dense_type"}})
    return dense
