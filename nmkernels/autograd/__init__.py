"""Autograd: one linear Function driven by a GemmPlan, and the weight transforms in front of it."""

from .activation import SplitRule, sparse_relu2, split, split_linear
from .linear import linear, linear_compressed
from .plan import STRAIGHT_THROUGH, Form, GemmPlan, Operands, Reads, gemms_of, operands, reads
from .transformed import transformed
from .transforms import CombinationMask, HardMask, WeightTransform, combination_count, masked

__all__ = [
    "STRAIGHT_THROUGH",
    "Form",
    "GemmPlan",
    "HardMask",
    "Operands",
    "Reads",
    "SplitRule",
    "CombinationMask",
    "WeightTransform",
    "combination_count",
    "linear",
    "linear_compressed",
    "masked",
    "operands",
    "gemms_of",
    "reads",
    "sparse_relu2",
    "split",
    "split_linear",
    "transformed",
]
