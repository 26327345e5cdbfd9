"""Floor 6: training recipes. Each method of the field is one file with a frozen configuration."""

from .base import Observed, Recipe, Stage
from .cost import Span
from .handle import Handle, densify_
from .methods.act24 import Activation24
from .methods.asp import ASP
from .methods.ast import AST, distill_loss
from .methods.bimask import BiMask
from .methods.complementary import Complementary
from .methods.dense import Dense
from .methods.fst import FST
from .methods.layerwise import LayerWise
from .methods.lbc import LBC
from .methods.maskllm import MaskLLM
from .methods.maxq import MaxQ
from .methods.mdgf import MdGf
from .methods.proxsparse import ProxSparse, prox
from .methods.sdgf import SdGf
from .methods.slope import SLoPe
from .methods.sste import SSTE
from .methods.ste import SRSTE, STE
from .methods.step import STEP
from .methods.vnm import VNM
from .registry import get, names, recipe
from .report import Report
from .search.decay import DecaySearch, search_decay
from .search.permutation import Found, search_permutation
from .sparsify import sparsify_

__all__ = [
    "ASP",
    "AST",
    "Activation24",
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
    "Found",
    "Handle",
    "LayerWise",
    "MaxQ",
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
    "densify_",
    "distill_loss",
    "get",
    "names",
    "prox",
    "recipe",
    "search_permutation",
    "search_decay",
    "sparsify_",
]
