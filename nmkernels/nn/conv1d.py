"""SparseConv1D: Hugging Face's Conv1D (GPT-2's linear layer, weight stored transposed) with an N:M weight."""

from __future__ import annotations

from torch import nn

from .linear import NMWeight


def is_conv1d(module: nn.Module) -> bool:
    """True for ``transformers.pytorch_utils.Conv1D`` itself, told by name so that transformers is never imported."""
    return is_conv1d_type(type(module))


def is_conv1d_type(kind: type) -> bool:
    """True for the class ``transformers.pytorch_utils.Conv1D``."""
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


class SparseConv1D(NMWeight):
    """y = x W̃ + b with the parameter ``weight`` stored ``(in, out)``; groups run along ``in``, its dimension 0.

    A model's own Conv1D becomes one by ``sparsify_``, never directly, and turns back on ``remove``.
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
