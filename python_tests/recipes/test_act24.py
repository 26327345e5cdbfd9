"""Activation24: when its modules are sparse, what is left at the end, split weight gradients in training, and what it refuses."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nmkernels as nm
from nmkernels.autograd import SplitRule, split
from nmkernels.nn import SquaredReLU, SquaredReLUMLP
from nmkernels.pattern import Pattern
from nmkernels.recipes import Activation24
from python_tests.for_each import for_each
from python_tests.recipes.loop import Adam, batches, distance, snapshot
from python_tests.recipes.loop_effective import activation
from python_tests.recipes.training import F32, F64, net, start, train


def rules(model):
    return {m.rule for m in model.modules() if isinstance(m, SquaredReLU)}


def test_rules_inside_the_preview_and_after_the_end():
    recipe = Activation24("2:4", 12, start=6)
    model, handle, optimizer = start(recipe, F32)
    train(model, optimizer, batches(3, F32))
    with handle.deployable():
        assert rules(model) == {handle.recipe.rule(split=False)}
    assert rules(model) == {None}
    train(model, optimizer, batches(9, F32)[3:])
    handle.finish()
    assert rules(model) == {handle.recipe.rule(split=False)} and type(model[0]) is nn.Linear


@for_each("recipe, during", [("srste:2:4", "1:4"), (Activation24("2:4", 12, start=0), "2:4")])
def test_remove_restores_the_previous_rule(recipe, during):
    model = net(Activation24("2:4", start=0), F32)
    model[1] = SquaredReLU("1:4")
    handle = nm.sparsify_(model, recipe)
    assert str(model[1].rule.pattern) == during
    handle.remove()
    assert str(model[1].rule.pattern) == "1:4" and model[3].rule is None


# ---- split weight gradients


def split_loop(params, data, rule, grad):
    """fc, squared ReLU, proj by hand: the split in both weight gradients, sp in the gradient of the input."""
    leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
    optimizer = torch.optim.AdamW(leaves.values(), **Adam().keywords)
    for x, target in data:
        w1, b1, w2, b2 = (leaves[k] for k in ("fc.weight", "fc.bias", "proj.weight", "proj.bias"))
        y1 = F.linear(x, w1, b1).detach().requires_grad_()
        a = activation(y1, 2, 4, grad)
        y2 = F.linear(a.detach(), w2, b2).detach().requires_grad_()
        (g2,) = torch.autograd.grad(F.mse_loss(y2, target), y2)
        (g1,) = torch.autograd.grad(a, y1, g2 @ w2.detach())
        w2.grad, b2.grad = g2.t() @ split(a.detach(), rule), g2.sum(0)
        w1.grad, b1.grad = split(g1, rule).t() @ x, g1.sum(0)
        optimizer.step()
    return {k: p.detach() for k, p in leaves.items()}


@pytest.mark.parametrize("grad", ["chain", "ste"])
def test_split_training_equals_an_independent_loop(grad):
    recipe = Activation24("2:4", start=0, gradient=grad, split=True, dense_features=0.1, multiple=2)
    torch.manual_seed(0)
    model = SquaredReLUMLP(16, 32, 8, dtype=F64)
    params = snapshot(model)
    _, handle, optimizer = start(recipe, model=model)
    train(model, optimizer, batches(12))
    want = split_loop(params, batches(12), SplitRule(Pattern("2:4"), 0.1, 2), grad)
    assert distance(snapshot(model), want) < 1e-10
    handle.finish()
    assert model.act.rule == handle.recipe.rule(split=False) and model.act.rule.split is None
