"""Floor 6: training recipes. Each method of the field is one file with a frozen configuration."""

from .act24 import Activation24
from .asp import ASP
from .ast import AST
from .base import Observed, Recipe, Stage
from .bimask import BiMask
from .complementary import Complementary
from .compute import Flops, LayerFlops, flops
from .convert import sparsify_
from .cost import Span
from .decay_search import DecaySearch, search_decay
from .dense import Dense
from .distill import distill_loss
from .fst import FST
from .handle import Handle
from .layerwise import LayerWise
from .lbc import LBC
from .maskllm import MaskLLM
from .maxq import MaxQ
from .mdgf import MdGf
from .permutation import Found, search_permutation
from .proximal import prox
from .proxsparse import ProxSparse
from .registry import get, names, recipe
from .report import Report
from .sdgf import SdGf
from .slope import SLoPe
from .speed import Advice, Audit, LayerAudit, audit
from .sste import SSTE
from .ste import SRSTE, STE
from .step import STEP
from .swap import densify_
from .vnm import VNM

__all__ = [
    "ASP",
    "AST",
    "Activation24",
    "Advice",
    "Audit",
    "FST",
    "LBC",
    "SRSTE",
    "SSTE",
    "STE",
    "STEP",
    "VNM",
    "BiMask",
    "DecaySearch",
    "Complementary",
    "Dense",
    "Flops",
    "Found",
    "Handle",
    "LayerWise",
    "MaxQ",
    "LayerAudit",
    "LayerFlops",
    "MaskLLM",
    "MdGf",
    "Observed",
    "ProxSparse",
    "Recipe",
    "Report",
    "SLoPe",
    "SdGf",
    "Span",
    "Stage",
    "audit",
    "densify_",
    "distill_loss",
    "flops",
    "get",
    "names",
    "prox",
    "recipe",
    "search_permutation",
    "search_decay",
    "sparsify_",
]
