"""The definition of right: every operation in plain torch, one family per file, float64 supported."""

from .adamw import masked_adamw_
from .bitpack import pack_indices, unpack_indices
from .compress import compress, decompress
from .linear import linear, linear_dgrad, linear_wgrad
from .mask import is_nm, mask, prune
from .sums import chunked_sum
from .threshold import soft_threshold, soft_threshold_scale

__all__ = [
    "chunked_sum",
    "compress",
    "decompress",
    "is_nm",
    "linear",
    "linear_dgrad",
    "linear_wgrad",
    "mask",
    "masked_adamw_",
    "pack_indices",
    "prune",
    "soft_threshold",
    "soft_threshold_scale",
    "unpack_indices",
]
