"""SquaredReLU and the MLP around it: modes, split gradients, autocast, sparse weights, and what is in no state dict."""

import copy

import pytest
import torch
from torch import nn

import nmkernels as nm
from nmkernels.autograd import SplitRule, split
from nmkernels.nn import ActivationRule, SquaredReLU, SquaredReLUMLP
from nmkernels.pattern import NMError, Pattern, PatternError, RecipeError
from python_tests.copies import WAYS, copied

P24 = Pattern("2:4")
SPLIT = ActivationRule(P24, "ste", SplitRule(P24, 0.1, 8))
F64 = torch.float64


def test_dense_form_and_pattern():
    x = torch.randn(5, 8)
    assert torch.equal(SquaredReLU()(x), x.relu() ** 2)
    sparse = SquaredReLU("2:4")
    assert sparse(x).reshape(-1, 4).ne(0).sum(1).max() <= 2
    sparse.rule = None
    assert torch.equal(sparse(x), x.relu() ** 2)
    assert str(SquaredReLU("1:4", "ste")) == "SquaredReLU(pattern=1:4, grad=ste)" and str(SquaredReLU()) == "SquaredReLU()"


def test_wrong_arguments():
    with pytest.raises(PatternError):
        SquaredReLU("4:2")
    with pytest.raises(NMError, match="grad='best'"):
        SquaredReLU("2:4", "best")


@pytest.mark.parametrize("how", WAYS)
def test_copies_keep_the_rule_and_the_state_dict_is_that_of_the_linears(how):
    mlp = SquaredReLUMLP(16, 32, pattern="2:4")
    mlp.act.rule = SPLIT
    assert copied(mlp, how).act.rule == SPLIT
    assert list(mlp.state_dict()) == ["fc.weight", "fc.bias", "proj.weight", "proj.bias"]


def test_sizes():
    mlp = SquaredReLUMLP(16, 32, 24, bias=False, dtype=F64)
    assert mlp(torch.randn(2, 3, 16, dtype=F64)).shape == (2, 3, 24) and mlp.fc.bias is None


def test_split_gradients_are_those_of_the_equations():
    mlp = SquaredReLUMLP(16, 32, dtype=F64)
    mlp.act.rule = SPLIT
    x, g = torch.randn(20, 16, dtype=F64, requires_grad=True), torch.randn(20, 16, dtype=F64)
    y2 = mlp(x)
    y2.backward(g)
    w1, w2 = mlp.fc.weight.detach(), mlp.proj.weight.detach()
    y1 = x.detach() @ w1.t() + mlp.fc.bias.detach()
    a = nm.ops.prune(y1.relu(), "2:4") ** 2
    dy1 = 2 * y1.relu() * (g @ w2)
    close = dict(rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(y2.detach(), a @ w2.t() + mlp.proj.bias.detach(), **close)
    torch.testing.assert_close(mlp.proj.weight.grad, g.t() @ split(a, SPLIT.split), **close)
    torch.testing.assert_close(mlp.fc.weight.grad, split(dy1, SPLIT.split).t() @ x.detach(), **close)
    torch.testing.assert_close(x.grad, nm.ops.prune(dy1, "2:4") @ w1, **close)
    torch.testing.assert_close(mlp.fc.bias.grad, dy1.sum(0), **close)


def test_split_leaves_the_forward_pass_alone():
    mlp, x = SquaredReLUMLP(16, 32, pattern="2:4", grad="ste"), torch.randn(4, 16)
    want = mlp(x)
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


def test_split_with_sparse_weights_is_refused_and_with_dense_ones_in_a_sparse_layer_not():
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
