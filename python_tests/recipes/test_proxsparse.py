"""ProxSparse: its proximal operator against brute force, its penalty, and what it leaves. The trajectories are the roster's."""

import pytest
import torch

import nmkernels as nm
from nmkernels.optim import MaskedAdamW
from nmkernels.pattern import Pattern
from nmkernels.recipes import ProxSparse, prox
from nmkernels.recipes.contrib.proxsparse import Anchored
from python_tests.for_each import for_each
from python_tests.recipes.loop import batches, mlp, top_n
from python_tests.recipes.loop_prox import brute, objective
from python_tests.recipes.training import F32, F64, run


def groups(kind, count=1500):
    """Rows of four with signs, on the scale at which λ = 1 matters."""
    r = torch.rand(count, 4, dtype=F64, generator=torch.Generator().manual_seed(7))
    one = r.mean(1, keepdim=True)
    v = {
        "small": r * 0.1,
        "middle": 0.2 + 0.6 * r,
        "wide": r * 2.5,
        "near": 2.5 * one * (1 - 0.1 * r),
        "one large": torch.cat([1.2 * r[:, :1], one * (1 - 0.1 * r[:, 1:])], 1),
        "two large": torch.cat([1.2 * one * (1 - 0.05 * r[:, :2]), 0.5 * one * (1 - 0.05 * r[:, 2:])], 1),
        "coarse": (r * 5).round() / 5,
        "equal": one.expand(-1, 4) * 2,
    }[kind]
    signs = torch.where(torch.rand(count, 4, generator=torch.Generator().manual_seed(8)) < 0.5, -1.0, 1.0).double()
    return (v * signs)[:, torch.randperm(4, generator=torch.Generator().manual_seed(9))]


KINDS = ("small", "middle", "wide", "near", "one large", "two large", "coarse", "equal")


# ---- the operator


@pytest.mark.slow
def test_no_point_is_better_than_the_operators():
    for strength in [1.0, 0.25]:
        for kind in KINDS:
            v = groups(kind) / strength
            w = prox(v, strength)
            best = objective(brute(v, strength), v, strength)
            got = objective(w, v, strength)
            assert (got - best).max() <= 1e-12 / strength**2
            assert (w * v >= 0).all() and (w.abs() <= v.abs() + 1e-15).all(), "signs stay and magnitudes shrink"


def test_the_mask_stays():
    for kind in KINDS:
        v = groups(kind)
        for strength in (0.3, 1.0, 5.0):
            assert torch.equal(top_n(prox(v, strength), 2, 4), top_n(v, 2, 4))


@for_each("z, strength, want", [((0.75, -0.75, 0.75, 0.0), 1.0, 0.5), ((0.16, -0.16, -0.16, 0.16), 2.0, 0.1)])
def test_equal_weights_by_hand(z, strength, want):
    """Three equal ones and a zero: z = w + λ w²; four: z = w + 3 λ w²."""
    v = torch.tensor([z], dtype=F64)
    torch.testing.assert_close(prox(v, strength), want * v.sign(), rtol=1e-14, atol=0.0)


def test_what_is_2_4_already_keeps_its_bits():
    v = torch.tensor([[0.0, -1.25, 0.0, 3.1], [0.0, 0.0, 0.0, -7.0], [0.0, 0.0, 0.0, 0.0], [-0.0, 1.0, 2.0, 0.0]])
    for strength in (0.0, 1e-3, 1.0, 1e30):
        assert torch.equal(prox(v, strength), v)


def test_huge_and_vanishing_strengths():
    v = groups("middle").float()
    for strength in [1e30, float("inf"), torch.tensor(1e30)]:
        assert torch.equal(prox(v, strength), v * top_n(v, 2, 4))
        assert torch.equal(prox(torch.ones(1, 4), strength), torch.tensor([[1.0, 1.0, 0.0, 0.0]])), "ties keep the lower index"
    for strength in [0.0, torch.tensor(0.0), 1e-30, 1e-20]:
        torch.testing.assert_close(prox(v, strength), v, rtol=3e-7, atol=0.0)


def test_nan_and_inf_do_not_spread_to_other_groups():
    v = torch.tensor([[float("nan"), 1.0, 2.0, 3.0, 0.3, 0.2, 0.1, 0.0], [float("inf"), -2.0, 1.0, 0.5, 0.3, 0.2, 0.1, 0.0]])
    w = prox(v, 1.0)
    assert torch.isfinite(w[:, 4:]).all() and torch.isnan(w[0, 0]) and w[1, 0] == torch.inf


def test_dtypes_and_shapes():
    v = groups("middle", 64).reshape(16, 16)
    want = prox(v, 1.0)
    torch.testing.assert_close(prox(v.float(), 1.0).double(), want, rtol=1e-4, atol=1e-6)
    assert prox(v.bfloat16(), 1.0).dtype == torch.bfloat16
    torch.testing.assert_close(prox(v.bfloat16(), 1.0), prox(v.bfloat16().float(), 1.0).bfloat16())
    assert torch.equal(prox(v.t().contiguous().t(), 1.0), want)


# ---- the penalty


def test_penalty_is_the_gradient_of_its_term():
    w, first = torch.randn(4, 8, dtype=F64, requires_grad=True), torch.randn(4, 8, dtype=F64)
    first[0, 0] = 0.0
    sign = torch.where(first < 0, -1.0, 1.0).to(first)
    term = 0.7 * ((w / (first + 0.1 * sign)) * (w - first)).square().sum()
    got = Anchored(Pattern("2:4"), 0.7, 0.1).penalty(w.detach(), first)["weight"]
    torch.testing.assert_close(got, torch.autograd.grad(term, w)[0], rtol=1e-12, atol=1e-12)
    assert not Anchored(Pattern("2:4"), 0.7).penalty(first, first)["weight"].any(), "nothing pulls at the initial weight"


# ---- the recipe


@for_each("values", ["initial", "trained"])
def test_finish_values_under_the_learned_mask(values):
    model, handle, _ = run(ProxSparse(decay=0.4, final_values=values), F32, batches(6, F32))
    w, first = model[0].weight.detach().clone(), mlp(F32)[0].weight.detach()
    handle.finish()
    assert torch.equal(model[0].weight.detach(), top_n(w, 2, 4) * (first if values == "initial" else w))


def test_anchor_is_the_weight_at_attach():
    recipe, model, other = ProxSparse(decay=0.4, anchor=0.5), mlp(F32), mlp(F32, seed=3)
    handle = nm.sparsify_(model, recipe)
    with torch.no_grad():
        model[0].weight.mul_(2.0)
    handle.attach(MaskedAdamW(model.parameters()))
    assert torch.equal(model[0].nm_initial, 2.0 * mlp(F32)[0].weight)
    nm.sparsify_(other, recipe)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other[0].nm_initial, model[0].nm_initial)
    other.load_state_dict(mlp(F32, seed=4).state_dict())
    assert torch.equal(other[0].nm_initial, mlp(F32, seed=4)[0].weight), "a dense checkpoint is a new start"
