"""Autograd: one linear Function driven by a GemmPlan, and the weight transforms in front of it."""

from ..gemm.plan import STRAIGHT_THROUGH, GemmPlan
from .activation import SplitRule, sparse_relu2, split, split_linear
from .linear import linear, linear_compressed
from .transforms import CombinationMask, HardMask, WeightTransform, combination_count, masked, transformed

__all__ = [
    "STRAIGHT_THROUGH",
    "GemmPlan",
    "HardMask",
    "SplitRule",
    "CombinationMask",
    "WeightTransform",
    "combination_count",
    "linear",
    "linear_compressed",
    "masked",
    "sparse_relu2",
    "split",
    "split_linear",
    "transformed",
]
