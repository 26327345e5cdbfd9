"""The public operations, thin over ``torch.ops.nmkernels.*``."""

from ..pattern import OptionError
from .adamw import HYPER, STATS, masked_adamw_
from .compress import Compressed, compress, decompress
from .linear import linear, linear_dgrad, linear_wgrad
from .mask import is_nm, mask, prune, soft_threshold, soft_threshold_scale, transposable_mask
from .mvue import METHODS, mvue, mvue_compress
from .pack import DeviceCompressed, Packed, empty_packed, pack, relayout, tensor_core_pattern

__all__ = [
    "HYPER",
    "METHODS",
    "STATS",
    "Compressed",
    "DeviceCompressed",
    "OptionError",
    "Packed",
    "compress",
    "decompress",
    "empty_packed",
    "is_nm",
    "linear",
    "linear_dgrad",
    "linear_wgrad",
    "mask",
    "masked_adamw_",
    "mvue",
    "mvue_compress",
    "pack",
    "prune",
    "relayout",
    "soft_threshold",
    "soft_threshold_scale",
    "tensor_core_pattern",
    "transposable_mask",
]
