"""GemmPlan: which rules exist, which go together."""

import pytest

from nmkernels.autograd import STRAIGHT_THROUGH, GemmPlan, HardMask
from nmkernels.nn import SparseLinear
from nmkernels.pattern import NMError, Pattern
from nmkernels.recipes.methods.bimask import BiMasked
from nmkernels.recipes.methods.fst import TransposableMask
from nmkernels.recipes.methods.slope import DoublePruned
from nmkernels.recipes.methods.sste import SoftThreshold


def test_unknown_rule_names_role_rule_and_choices():
    for role in ["fprop", "dgrad", "wgrad"]:
        with pytest.raises(NMError, match=f"{role}='sparse'.*dense"):
            GemmPlan(**{role: "sparse"})


def test_a_weight_packed_for_dgrad_is_packed_for_fprop():
    for dgrad in ["packed", "columns", "device", "auto"]:
        with pytest.raises(NMError, match="same weight"):
            GemmPlan(dgrad=dgrad, n=2, m=4)


def test_dgrad_has_its_own_form_of_a_packed_weight():
    for fprop in ["packed", "auto"]:
        for dgrad in ["dense", "packed", "columns", "device", "auto"]:
            plan = GemmPlan(fprop=fprop, dgrad=dgrad, n=2, m=4)
            assert plan.packs and not STRAIGHT_THROUGH.packs
            plan.check(TransposableMask(Pattern("2:4")))


def test_a_form_that_the_transform_does_not_have():
    for dgrad, transform, said in [
        ("columns", HardMask(Pattern("2:4")), 'HardMask is not N:M along the outputs.*dgrad="dense"'),
        ("columns", SoftThreshold(Pattern("2:4")), "SoftThreshold is not N:M"),
        ("columns", BiMasked(Pattern("2:4")), "BiMasked has another weight"),
        ("packed", BiMasked(Pattern("2:4")), 'BiMasked has another weight.*dgrad="dense"'),
        ("packed", DoublePruned(Pattern("2:4")), "DoublePruned has another weight"),
    ]:
        plan = GemmPlan(fprop="packed", dgrad=dgrad, n=2, m=4)
        with pytest.raises(NMError, match=said):
            plan.check(transform)
        with pytest.raises(NMError, match=said):
            SparseLinear(8, 4).use(transform, plan)
        for other in ("dense", "device", "auto"):
            GemmPlan(fprop="packed", dgrad=other, n=2, m=4).check(transform)


def test_packed_operand_needs_a_pattern():
    for n, m in [(0, 0), (0, 4), (5, 4), (-1, 4), (1, 257)]:
        for rules in [{"wgrad": "mvue"}, {"fprop": "packed", "dgrad": "packed"}]:
            with pytest.raises(NMError, match="needs a pattern"):
                GemmPlan(**rules, n=n, m=m)


def test_options_that_do_not_go():
    for keywords, said in [
        ({"method": "best"}, "exact, approx"),
        ({"wgrad": "mvue", "n": 1, "m": 4, "method": "approx"}, "needs n = 2"),
        ({"fp8": "e4m3"}, "paper, hybrid"),
        ({"fp8": "paper", "fprop": "packed", "dgrad": "packed", "n": 2, "m": 4}, "dense layout"),
        ({"fp8": "paper", "fprop": "auto", "n": 2, "m": 4}, "dense layout"),
    ]:
        with pytest.raises(NMError, match=said):
            GemmPlan(**keywords)
