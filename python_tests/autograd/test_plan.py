"""GemmPlan: which rules exist, which go together."""

import dataclasses

import pytest

from nmkernels.autograd import STRAIGHT_THROUGH, GemmPlan, HardMask, packed_inference
from nmkernels.nn import SparseLinear
from nmkernels.pattern import NMError, Pattern
from nmkernels.recipes.methods.bimask import BiMasked
from nmkernels.recipes.methods.fst import TransposableMask
from nmkernels.recipes.methods.slope import DoublePruned
from nmkernels.recipes.methods.sste import SoftThreshold


def test_straight_through_is_dense_in_all_three():
    plan = STRAIGHT_THROUGH
    assert (plan.fprop, plan.dgrad, plan.wgrad, plan.n, plan.m) == ("dense", "dense", "dense", 0, 0)


def test_packed_inference_has_no_weight_gradient():
    plan = packed_inference(2, 4)
    assert (plan.fprop, plan.dgrad, plan.wgrad, plan.n, plan.m) == ("packed", "packed", "none", 2, 4)


@pytest.mark.parametrize("role", ["fprop", "dgrad", "wgrad"])
def test_unknown_rule_names_role_rule_and_choices(role):
    with pytest.raises(NMError, match=f"{role}='sparse'.*dense"):
        GemmPlan(**{role: "sparse"})


@pytest.mark.parametrize("dgrad", ["packed", "columns", "device", "auto"])
def test_a_weight_packed_for_dgrad_is_packed_for_fprop(dgrad):
    with pytest.raises(NMError, match="same weight"):
        GemmPlan(dgrad=dgrad, n=2, m=4)


@pytest.mark.parametrize("fprop", ["packed", "auto"])
@pytest.mark.parametrize("dgrad", ["dense", "packed", "columns", "device", "auto"])
def test_dgrad_has_its_own_form_of_a_packed_weight(fprop, dgrad):
    plan = GemmPlan(fprop=fprop, dgrad=dgrad, n=2, m=4)
    assert plan.packs and not STRAIGHT_THROUGH.packs
    plan.check(TransposableMask(Pattern("2:4")))


@pytest.mark.parametrize(
    ("dgrad", "transform", "said"),
    [
        ("columns", HardMask(Pattern("2:4")), 'HardMask is not N:M along the outputs.*dgrad="dense"'),
        ("columns", SoftThreshold(Pattern("2:4")), "SoftThreshold is not N:M"),
        ("columns", BiMasked(Pattern("2:4")), "BiMasked has another weight"),
        ("packed", BiMasked(Pattern("2:4")), 'BiMasked has another weight.*dgrad="dense"'),
        ("packed", DoublePruned(Pattern("2:4")), "DoublePruned has another weight"),
    ],
)
def test_a_form_that_the_transform_does_not_have(dgrad, transform, said):
    plan = GemmPlan(fprop="packed", dgrad=dgrad, n=2, m=4)
    with pytest.raises(NMError, match=said):
        plan.check(transform)
    with pytest.raises(NMError, match=said):
        SparseLinear(8, 4).use(transform, plan)
    for other in ("dense", "device", "auto"):
        GemmPlan(fprop="packed", dgrad=other, n=2, m=4).check(transform)


@pytest.mark.parametrize(("n", "m"), [(0, 0), (0, 4), (5, 4), (-1, 4), (1, 257)])
@pytest.mark.parametrize("rules", [{"wgrad": "mvue"}, {"fprop": "packed", "dgrad": "packed"}])
def test_packed_operand_needs_a_pattern(rules, n, m):
    with pytest.raises(NMError, match="needs a pattern"):
        GemmPlan(**rules, n=n, m=m)


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"method": "best"}, "exact, approx"),
        ({"wgrad": "mvue", "n": 1, "m": 4, "method": "approx"}, "needs n = 2"),
        ({"fp8": "e4m3"}, "paper, hybrid"),
        ({"fp8": "paper", "fprop": "packed", "dgrad": "packed", "n": 2, "m": 4}, "dense layout"),
        ({"fp8": "paper", "fprop": "auto", "n": 2, "m": 4}, "dense layout"),
    ],
)
def test_options_that_do_not_go(keywords, said):
    with pytest.raises(NMError, match=said):
        GemmPlan(**keywords)


def test_plan_is_a_frozen_value():
    assert GemmPlan(wgrad="mvue", n=2, m=4) == GemmPlan(wgrad="mvue", n=2, m=4)
    assert hash(GemmPlan()) == hash(STRAIGHT_THROUGH)
    with pytest.raises(dataclasses.FrozenInstanceError):
        STRAIGHT_THROUGH.wgrad = "none"
