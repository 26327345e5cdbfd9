"""Floor 4: autograd. One linear Function driven by a GemmPlan, and the weight transforms in front of it."""

from .activation import SplitRule, sparse_relu2, split, split_linear
from .anchor import Anchored, AnchoredMask
from .annealed import AnnealedMask
from .blocks import OBJECTIVES, BlockColumns
from .combinations import BestCandidate, CandidateMask, GumbelMask, LikeliestMask, combination_count
from .dgrad import CRITERIA, BiMasked, DoublePruned
from .forms import Form, Operands, Reads, reads
from .linear import linear, linear_compressed
from .plan import STRAIGHT_THROUGH, GemmPlan, packed_inference
from .queries import PartlyDense, SoftQuery
from .strided import StrideMask
from .transforms import DecayedMask, HardMask, SoftThreshold, WeightTransform, masked
from .transposable import TransposableMask

__all__ = [
    "CRITERIA",
    "OBJECTIVES",
    "STRAIGHT_THROUGH",
    "Anchored",
    "AnchoredMask",
    "AnnealedMask",
    "BiMasked",
    "BlockColumns",
    "BestCandidate",
    "CandidateMask",
    "DecayedMask",
    "DoublePruned",
    "Form",
    "GemmPlan",
    "GumbelMask",
    "HardMask",
    "Operands",
    "PartlyDense",
    "Reads",
    "SoftQuery",
    "LikeliestMask",
    "SoftThreshold",
    "SplitRule",
    "TransposableMask",
    "StrideMask",
    "WeightTransform",
    "combination_count",
    "linear",
    "linear_compressed",
    "masked",
    "packed_inference",
    "reads",
    "sparse_relu2",
    "split",
    "split_linear",
]
