"""Modules: SparseLinear for training, CompressedLinear for inference."""

from . import replicas  # noqa: F401  (what DistributedDataParallel sends)
from .activation import ActivationRule, SquaredReLU, SquaredReLUMLP
from .adapter import ADAPTER, adapter_of, add_adapter, folded, set_adapter
from .chains import Chain, channel_parameters, find_chains, reorder_
from .compress import compress_, compressed_like, decompress_
from .compressed import CompressedLinear, is_order
from .conv import CompressedConv2d, SparseConv2d
from .experts import CompressedExperts, CompressedStack, SparseExperts, StackedWeight
from .linear import SparseLinear
from .swap import SparseConv1D, is_conv1d, is_conv1d_type, make_dense_, make_sparse_, replace_, switch_fast_paths
from .weight import NMWeight

__all__ = [
    "ActivationRule",
    "SquaredReLU",
    "SquaredReLUMLP",
    "ADAPTER",
    "Chain",
    "CompressedConv2d",
    "CompressedExperts",
    "CompressedLinear",
    "CompressedStack",
    "NMWeight",
    "SparseConv1D",
    "SparseConv2d",
    "SparseExperts",
    "SparseLinear",
    "StackedWeight",
    "adapter_of",
    "add_adapter",
    "channel_parameters",
    "compress_",
    "decompress_",
    "compressed_like",
    "find_chains",
    "folded",
    "is_conv1d",
    "is_conv1d_type",
    "is_order",
    "make_dense_",
    "make_sparse_",
    "reorder_",
    "replace_",
    "set_adapter",
    "switch_fast_paths",
]
