"""The public operations, thin wrappers over ``torch.ops.nmkernels.*``."""

from ..pattern import OptionError as OptionError
from .adamw import STATS as STATS
from .adamw import mask_bits, masked_adamw_
from .adamw_pack import masked_adamw_pack_
from .compress import Compressed as Compressed
from .compress import compress, decompress, dequantize_values, quantize_values
from .linear import linear, linear_dgrad, linear_wgrad
from .mask import is_nm, mask, prune, soft_threshold, soft_threshold_scale, transposable_mask
from .mvue import mvue, mvue_compress
from .pack import DeviceCompressed as DeviceCompressed
from .pack import Packed as Packed
from .pack import pack, relayout
from .quantize import Quantized as Quantized
from .quantize import QuantizedPacked as QuantizedPacked
from .quantize import linear_quantized, quantize, quantize_pack

__all__ = [
    "compress",
    "decompress",
    "dequantize_values",
    "is_nm",
    "linear",
    "linear_dgrad",
    "linear_quantized",
    "linear_wgrad",
    "mask",
    "mask_bits",
    "masked_adamw_",
    "masked_adamw_pack_",
    "mvue",
    "mvue_compress",
    "pack",
    "prune",
    "quantize",
    "quantize_pack",
    "quantize_values",
    "relayout",
    "soft_threshold",
    "soft_threshold_scale",
    "transposable_mask",
]
