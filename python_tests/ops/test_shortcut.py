"""A layer's product at inference skips torch's dispatcher only where nobody could tell."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import nmkernels as nm
from nmkernels import BackendError, ShapeError
from nmkernels.ops import define
from nmkernels.testing import assert_equal_bits


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return nm.CompressedLinear(nm.ops.compress(torch.randn(6, 16), "2:4"), torch.randn(6))


@torch.no_grad()
def test_the_same_bits_as_the_op(layer):
    c = layer.weight
    for x in (torch.randn(16), torch.randn(1, 1, 16), torch.randn(5, 16), torch.randn(16, 3).t(), torch.randn(0, 16), torch.randn(40, 16)):
        for bias in (None, layer.bias):
            expected = torch.ops.nmkernels.nm_linear(x, c.values, c.indices, 2, 4, 16, bias)
            assert_equal_bits(nm.autograd.linear_compressed(x, c, bias), expected)


@torch.no_grad()
def test_whoever_watches_sees_the_op(layer, monkeypatch):
    x = torch.randn(1, 16)
    assert define.unwatched(x, layer.values, layer.bias)
    with Recorder() as mode:
        layer(x)
    assert any("nm_linear" in name for name in mode.seen)
    with torch.profiler.profile() as profile:
        layer(x)
    assert any("nm_linear" in event.key for event in profile.key_averages())
    assert not define.unwatched(torch.nn.Parameter(x), layer.values, None)
    with torch.autograd.forward_ad.dual_level():
        assert not define.unwatched(x, layer.values, layer.bias)
    torch.testing.assert_close(torch.func.vmap(layer)(torch.randn(3, 16)).shape, torch.Size([3, 6]))
    monkeypatch.setenv("NMKERNELS_BACKEND", "nobody")
    with pytest.raises(BackendError, match="names no backend"):
        layer(x)


@torch.no_grad()
def test_operands_that_do_not_fit_are_refused_as_ever(layer):
    for x in (torch.randn(1, 12), torch.randn(1, 20), torch.tensor(1.0)):
        with pytest.raises((ShapeError, IndexError)):
            layer(x)
    broken = nm.ops.compress(torch.randn(6, 20), "3:5")
    broken.indices.fill_(255)
    with pytest.raises(ShapeError, match="does not exist in a group of 5"):
        nm.autograd.linear_compressed(torch.randn(1, 20), broken)
