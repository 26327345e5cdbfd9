"""GemmPlan: which rules exist, which go together."""

from itertools import product

import pytest

from nmkernels.autograd import HardMask
from nmkernels.gemm.plan import STRAIGHT_THROUGH, GemmPlan
from nmkernels.nn import SparseLinear
from nmkernels.pattern import NMError, Pattern
from nmkernels.recipes.contrib.bimask import BiMasked
from nmkernels.recipes.methods.fst import TransposableMask

P = Pattern("2:4")


def test_dgrad_has_its_own_form_of_a_packed_weight():
    for fprop, dgrad in [*product(["packed"], ["dense", "packed", "columns", "device"]), ("auto", "auto")]:
        plan = GemmPlan(fprop=fprop, dgrad=dgrad, n=2, m=4)
        assert plan.packs and not STRAIGHT_THROUGH.packs
        plan.check(TransposableMask(P))
        with pytest.raises(NMError, match="same weight"):
            GemmPlan(dgrad=dgrad if dgrad != "dense" else "auto", n=2, m=4)


def test_a_form_that_the_transform_does_not_have():
    for dgrad, transform, said in [
        ("columns", HardMask(P), 'HardMask is not N:M along the outputs.*dgrad="dense"'),
        ("columns", BiMasked(P), "BiMasked uses another weight"),
        ("packed", BiMasked(P), 'BiMasked uses another weight.*dgrad="dense"'),
    ]:
        with pytest.raises(NMError, match=said):
            SparseLinear(8, 4).use(transform, GemmPlan(fprop="packed", dgrad=dgrad, n=2, m=4))
        for fprop, other in (("packed", "dense"), ("packed", "device"), ("auto", "auto")):
            GemmPlan(fprop=fprop, dgrad=other, n=2, m=4).check(transform)


def test_what_does_not_go():
    packed = {"fprop": "packed", "dgrad": "packed"}
    for keywords, said in [
        *(({role: "sparse"}, f"{role}='sparse'.*dense") for role in ("fprop", "dgrad", "wgrad")),
        *(({**rules, "n": n, "m": m}, "needs a pattern") for rules in ({"wgrad": "mvue"}, packed) for n, m in [(0, 0), (5, 4), (1, 257)]),
        ({"method": "best"}, "exact, approx"),
        ({"wgrad": "mvue", "n": 1, "m": 4, "method": "approx"}, "needs n = 2"),
        ({"fp8": "e4m3"}, "paper, hybrid"),
        ({"fp8": "paper", **packed, "n": 2, "m": 4}, "dense layout"),
        ({"fp8": "paper", "fprop": "auto", "dgrad": "auto", "n": 2, "m": 4}, "dense layout"),
        ({"fprop": "auto", "dgrad": "packed", "n": 2, "m": 4}, "chooses both together"),
        ({"fprop": "packed", "dgrad": "auto", "n": 2, "m": 4}, "chooses both together"),
    ]:
        with pytest.raises(NMError, match=said):
            GemmPlan(**keywords)
