"""transformed: W̃ in the graph of torch's own multiplication, its gradient by the transform's rule."""

from dataclasses import dataclass

import pytest
import torch
from torch.autograd import forward_ad

import nmkernels as nm
from nmkernels.autograd import HardMask, WeightTransform, transformed
from nmkernels.autograd.transforms import reading
from nmkernels.layouts import as_matrix, as_stored, ordered

P = nm.Pattern("2:4")
SHAPES = {"linear": (4, 8), "conv2d": (4, 8, 3, 3), "experts": (2, 4, 8), "experts_t": (2, 8, 4)}


@dataclass(frozen=True)
class Scaled(WeightTransform):
    """W̃ = s W with a learned number s: ∂L/∂W = s g, ∂L/∂s = Σ g W."""

    reads = reading(nm_factor="learned")

    def __call__(self, weight, *extras, out=None):
        return weight * extras[0]

    def gradient(self, g, weight, *extras):
        assert g.dim() == weight.dim() == 2
        return g * extras[0], {"nm_factor": (g * weight).sum()}


def used_of(w, transform, layout, *extras, dtype=None):
    matrix = transform(as_matrix(ordered(w.detach(), layout), layout), *(e.detach() for e in extras))
    return as_stored(matrix.to(dtype or w.dtype), layout, w.shape)


@pytest.mark.parametrize("layout", SHAPES)
@pytest.mark.parametrize("chain", [False, True])
def test_the_gradient_follows_the_rule(layout, chain):
    torch.manual_seed(0)
    w = ordered(torch.randn(SHAPES[layout]), layout).requires_grad_()
    rule = HardMask(P, chain=chain)
    used = used_of(w, rule, layout, dtype=torch.bfloat16)
    y = transformed(w, used, rule, (), layout)
    assert torch.equal(y, used) and y.data_ptr() == used.data_ptr()
    g = torch.randn(w.shape)  # in an order of its own
    y.backward(g.bfloat16())
    want = g.bfloat16().float()
    want = want * (used != 0) if chain else want
    assert torch.equal(w.grad, want) and w.grad.dtype == w.dtype and w.grad.stride() == w.stride()


def test_learned_parameters_get_gradients():
    w, s = torch.randn(4, 8, 3, 3, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    y = transformed(w, used_of(w, Scaled(P), "conv2d", s), Scaled(P), [s], "conv2d")
    (y * torch.arange(288.0).view(w.shape)).sum().backward()
    assert torch.equal(w.grad, 2 * torch.arange(288.0).view(w.shape))
    assert torch.allclose(s.grad, (w.detach() * torch.arange(288.0).view(w.shape)).sum())
    frozen = w.detach()
    y = transformed(frozen, used_of(w, Scaled(P), "conv2d", s), Scaled(P), [s], "conv2d")
    y.sum().backward()  # the weight is not trained, the other parameter is


@pytest.mark.parametrize("chain", [False, True])
def test_second_derivatives_are_refused(chain):
    w, rule = torch.randn(4, 8, requires_grad=True), HardMask(P, chain=chain)
    y = transformed(w, used_of(w, rule, "linear"), rule)
    (g,) = torch.autograd.grad(y.square().sum(), w, create_graph=True)
    with pytest.raises(nm.NMError, match="no second derivative"):
        g.sum().backward()


def test_torch_func_and_no_forward_mode():
    w, x = torch.randn(4, 8, 3, 3), torch.randn(5, 8, 6, 6)
    rule, used = HardMask(P), used_of(w, HardMask(P), "conv2d")

    def loss(w, x):
        return torch.conv2d(x[None], transformed(w, used_of(w, rule, "conv2d"), rule, (), "conv2d")).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(w, x)
    for i in range(5):
        leaf = used.clone().requires_grad_()
        torch.conv2d(x[i][None], leaf).square().sum().backward()
        assert torch.allclose(each[i], leaf.grad, atol=1e-4)
    t = torch.randn_like(w)
    with forward_ad.dual_level(), pytest.raises(nm.NMError, match="no derivative in forward mode"):
        transformed(forward_ad.make_dual(w, t), used, HardMask(P), (), "conv2d")
