"""Floor 5: modules. SparseLinear trains, CompressedLinear deploys."""

from .compressed import CompressedLinear
from .conv1d import SparseConv1D, is_conv1d, is_conv1d_type
from .deploy import compress_, deployed
from .linear import NMWeight, SparseLinear
from .swap import make_dense_, make_sparse_, replace_, switch_fast_paths

__all__ = [
    "CompressedLinear",
    "NMWeight",
    "SparseConv1D",
    "SparseLinear",
    "compress_",
    "deployed",
    "is_conv1d",
    "is_conv1d_type",
    "make_dense_",
    "make_sparse_",
    "replace_",
    "switch_fast_paths",
]
