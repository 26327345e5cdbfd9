"""Floor 4: autograd. One linear Function driven by a GemmPlan, and the weight transforms in front of it."""

from .linear import linear, linear_compressed
from .plan import STRAIGHT_THROUGH, GemmPlan, packed_inference
from .transforms import HardMask, WeightTransform

__all__ = ["STRAIGHT_THROUGH", "GemmPlan", "HardMask", "WeightTransform", "linear", "linear_compressed", "packed_inference"]
