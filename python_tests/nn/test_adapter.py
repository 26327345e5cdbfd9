"""The low-rank adapter of an N:M weight: what it computes, where it is stored, and how it is folded into a weight."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nmkernels as nm
from nmkernels.nn.adapter import ADAPTER, adapter_of, folded
from nmkernels.testing import assert_no_worse
from python_tests.copy_model import COPY_METHODS, copy_model


def layer_of(dtype=torch.float32, rank=3, **keywords):
    """A CompressedLinear 32 -> 16 with an adapter, and the dense weight that computes the same, in float64."""
    torch.manual_seed(0)
    c = nm.ops.compress(torch.randn(16, 32).to(dtype), "2:4")
    left, right = torch.randn(32, rank).to(dtype), torch.randn(rank, 16).to(dtype)
    layer = nm.CompressedLinear(c, torch.randn(16).to(dtype), adapter=(left, right), **keywords)
    return layer, c.dense().double() + (left.double() @ right.double()).t() / rank


def test_folded_weight_equals_layer_with_adapter():
    for keep_dense in [False, True]:
        for dtype in [torch.float32, torch.bfloat16, torch.float64]:
            layer, weight = layer_of(dtype, keep_dense=keep_dense)
            x = torch.randn(2, 5, 32).to(dtype)
            dense = F.linear(x, layer.weight.dense(), layer.bias) + (x @ layer.nm_left) @ layer.nm_right / 3
            assert_no_worse(layer(x), dense, F.linear(x.double(), weight, layer.bias.double()))
            got = folded(layer.weight.dense(), layer.nm_left, layer.nm_right)
            assert not got.requires_grad
            torch.testing.assert_close(got, weight.to(dtype), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
    layer, weight = layer_of()
    x = torch.randn(5, 32)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), F.linear(x.double(), weight, layer.bias.double()), rtol=0.1, atol=0.3)


def test_gradients_reach_the_adapter_and_the_input():
    layer, weight = layer_of(torch.float64)
    x = torch.randn(5, 32, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    y.square().sum().backward()
    g = 2 * y.detach()
    torch.testing.assert_close(x.grad, g @ weight)
    torch.testing.assert_close(layer.nm_left.grad, x.detach().t() @ g @ layer.nm_right.detach().t() / 3)
    torch.testing.assert_close(layer.nm_right.grad, (x.detach() @ layer.nm_left.detach()).t() @ g / 3)


def test_parameters_keys_and_repr():
    layer, _ = layer_of()
    assert list(layer.state_dict()) == ["bias", *ADAPTER, "values", "indices"] and "rank=3" in repr(layer)
    assert layer.adapter == adapter_of(layer) == (layer.nm_left, layer.nm_right) and all(p.requires_grad for p in layer.adapter)
    plain = nm.CompressedLinear(layer.weight)
    assert plain.adapter is None and list(plain.state_dict()) == ["values", "indices"] and "rank" not in repr(plain)
    left, right = nn.Parameter(torch.zeros(32, 1)), nn.Parameter(torch.zeros(1, 16))
    assert nm.CompressedLinear(layer.weight, adapter=(left, right)).adapter == (left, right), "a Parameter stays the same Parameter"


def test_shapes_that_do_not_fit():
    for left, right, message in [
        ((32, 2), (3, 16), r"with r >= 1; got \(32, 2\) and \(3, 16\)"),
        ((32, 0), (0, 16), "with r >= 1"),
        ((32,), (1, 16), "with r >= 1"),
        ((16, 2), (2, 32), r"do not fit a weight .* of shape \(16, 32\)"),
    ]:
        with pytest.raises(nm.ShapeError, match=message):
            nm.CompressedLinear(layer_of()[0].weight, adapter=(torch.zeros(left), torch.zeros(right)))


def test_copies_casts_and_compiled_forms_compute_the_same():
    layer, weight = layer_of()
    x = torch.randn(3, 32)
    want, others = layer(x), [copy_model(layer, how) for how in COPY_METHODS]
    moved = copy.deepcopy(layer).to(torch.float64)
    assert moved.nm_left.dtype == torch.float64
    torch.testing.assert_close(moved(torch.eye(32, dtype=torch.float64)) - moved.bias, weight.t(), rtol=1e-6, atol=1e-6)
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), want)
    with torch.no_grad():
        layer.nm_right.zero_()
    assert all(torch.equal(other(x), want) for other in others)
