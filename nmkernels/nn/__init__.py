"""Modules: SparseLinear for training, CompressedLinear for inference."""

from . import replicas  # noqa: F401  (what DistributedDataParallel sends)
from .activation import ActivationRule, SquaredReLU, SquaredReLUMLP
from .compress import compress_ as compress_
from .compress import decompress_
from .compressed import CompressedLinear as CompressedLinear
from .conv import CompressedConv2d, SparseConv2d
from .experts import CompressedExperts, SparseExperts
from .linear import SparseLinear as SparseLinear
from .swap import SparseConv1D
from .weight import NMWeight

__all__ = [
    "ActivationRule",
    "CompressedConv2d",
    "CompressedExperts",
    "NMWeight",
    "SparseConv1D",
    "SparseConv2d",
    "SparseExperts",
    "SquaredReLU",
    "SquaredReLUMLP",
    "decompress_",
]
