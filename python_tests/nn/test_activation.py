"""SquaredReLU and the MLP around it: modes, autocast, sparse weights, state dicts. Its gradients: recipes/test_act24.py."""

import copy

import pytest
import torch
from torch import nn

import nmkernels as nm
from nmkernels.autograd import SplitRule
from nmkernels.nn import ActivationRule, SquaredReLU, SquaredReLUMLP
from nmkernels.pattern import NMError, Pattern, RecipeError

P24 = Pattern("2:4")
SPLIT = ActivationRule(P24, "ste", SplitRule(P24, 0.1, 8))


def test_dense_form_and_pattern():
    x = torch.randn(5, 8)
    assert torch.equal(SquaredReLU()(x), x.relu() ** 2)
    sparse = SquaredReLU("2:4")
    assert sparse(x).reshape(-1, 4).ne(0).sum(1).max() <= 2
    sparse.rule = None
    assert torch.equal(sparse(x), x.relu() ** 2)
    with pytest.raises(NMError, match="grad='best'"):
        SquaredReLU("2:4", "best")
    assert str(SquaredReLU("1:4", "ste")) == "SquaredReLU(pattern=1:4, grad=ste)" and str(SquaredReLU()) == "SquaredReLU()"


def test_split_leaves_the_forward_pass_alone():
    wide = SquaredReLUMLP(16, 32, 24, bias=False, dtype=torch.float64)
    assert wide(torch.randn(2, 3, 16, dtype=torch.float64)).shape == (2, 3, 24) and wide.fc.bias is None
    mlp, x = SquaredReLUMLP(16, 32, pattern="2:4", grad="ste"), torch.randn(4, 16)
    want = mlp(x)
    assert list(mlp.state_dict()) == ["fc.weight", "fc.bias", "proj.weight", "proj.bias"]
    mlp.act.rule = SPLIT
    assert torch.equal(mlp(x), want)
    with torch.no_grad():
        assert torch.equal(mlp(x), want)


def test_autocast_gives_its_dtype_and_fp32_gradients():
    mlp = SquaredReLUMLP(16, 32)
    mlp.act.rule = SPLIT
    with torch.autocast("cpu", torch.bfloat16):
        y = mlp(torch.randn(8, 16))
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16 and all(p.grad.dtype == torch.float32 for p in mlp.parameters())


def test_split_needs_dense_weights():
    mlp = SquaredReLUMLP(16, 32)
    mlp.act.rule = SPLIT
    handle = nm.sparsify_(mlp, "ste:2:4")
    with pytest.raises(RecipeError, match="dense weights"):
        mlp(torch.randn(4, 16))
    mlp.act.rule = ActivationRule(P24)
    assert mlp(torch.randn(4, 16)).shape == (4, 16), "sparse weights and sparse activations go together"
    handle.remove()
    handle = nm.sparsify_(mlp, "dense")
    mlp.act.rule = SPLIT
    mlp(torch.randn(4, 16)).sum().backward()
    assert mlp.fc.ran and mlp.fc.weight.grad is not None
    handle.remove()
    mlp.fc = nn.Sequential(mlp.fc)
    with pytest.raises(RecipeError, match="Sequential"):
        mlp(torch.randn(4, 16))


def test_compiles_with_a_split():
    torch.compiler.reset()
    mlp, x = SquaredReLUMLP(16, 32), torch.randn(12, 16)
    mlp.act.rule = SPLIT
    baseline = copy.deepcopy(mlp)
    torch.compile(mlp, fullgraph=True, backend="aot_eager")(x).sum().backward()
    baseline(x).sum().backward()
    for p, q in zip(mlp.parameters(), baseline.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    torch.compiler.reset()
