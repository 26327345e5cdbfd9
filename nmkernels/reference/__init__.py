"""Reference implementations that define the correct results: every op in plain torch, one family per file, also in float64."""

from .adamw import masked_adamw_
from .adamw_pack import masked_adamw_pack_, pack_forms_
from .common import chunked_sum, distance
from .compress import compress, decompress, pack_indices, unpack_indices
from .integers import dequantize_values, linear_integers, pack_integers, quantize_values, unpack_integers
from .layouts import from_layout, to_layout
from .linear import linear, linear_dgrad, linear_wgrad
from .mask import is_nm, mask, prune, soft_threshold, soft_threshold_scale
from .mvue import group_mvue, has_level_rule, mvue, mvue_compress, philox4x32, uniforms24, word_pairs, words
from .pack import pack
from .quantize import linear_quantized, quantize, quantize_pack
from .transposable import transposable_mask

__all__ = [
    "chunked_sum",
    "compress",
    "decompress",
    "dequantize_values",
    "distance",
    "from_layout",
    "group_mvue",
    "has_level_rule",
    "is_nm",
    "linear",
    "linear_dgrad",
    "linear_integers",
    "linear_quantized",
    "linear_wgrad",
    "mask",
    "masked_adamw_",
    "masked_adamw_pack_",
    "mvue",
    "mvue_compress",
    "pack",
    "pack_forms_",
    "pack_indices",
    "pack_integers",
    "philox4x32",
    "prune",
    "quantize",
    "quantize_pack",
    "quantize_values",
    "soft_threshold",
    "soft_threshold_scale",
    "to_layout",
    "transposable_mask",
    "uniforms24",
    "word_pairs",
    "words",
    "unpack_indices",
    "unpack_integers",
]
