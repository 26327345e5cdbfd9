"""Floor 5: modules. SparseLinear trains, CompressedLinear deploys."""

from .compressed import CompressedLinear, compress_
from .conv1d import SparseConv1D, from_conv1d, is_conv1d, to_conv1d
from .linear import NMWeight, SparseLinear, from_linear, to_linear

__all__ = [
    "CompressedLinear",
    "NMWeight",
    "SparseConv1D",
    "SparseLinear",
    "compress_",
    "from_conv1d",
    "from_linear",
    "is_conv1d",
    "to_conv1d",
    "to_linear",
]
