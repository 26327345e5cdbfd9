"""Chains of convolutions: found between batch norms, pooling and depthwise convolutions, and reordered without changing the model."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nmkernels.nn.chains import Chain, channel_parameters, find_chains, reorder_
from nmkernels.nn.swap import make_sparse_

X = torch.randn(2, 8, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Through(nn.Module):
    """``between`` applied to two convolutions and the input."""

    def __init__(self, between, **parts):
        super().__init__()
        self.a, self.b, self.between = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), between
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.between(self, x)


def through(between, **parts):
    torch.manual_seed(0)
    model = Through(between, **parts).double()
    for _ in range(2):  # statistics and affine parts differ from channel to channel
        model(X + torch.randn_like(X))
    for p in model.parameters():
        p.data.add_(torch.randn_like(p) * 0.1)
    return model


FOUND = {
    "relu": (lambda m, x: m.b(F.relu(m.a(x))), {}, ()),
    "norm": (lambda m, x: m.b(m.norm(m.a(x)).relu()), {"norm": nn.BatchNorm2d(8)}, ("norm",)),
    "no affine part": (lambda m, x: m.b(m.norm(m.a(x))), {"norm": nn.BatchNorm2d(8, affine=False)}, ("norm",)),
    "pooling": (lambda m, x: m.b(m.pool(F.avg_pool2d(m.a(x), 2))), {"pool": nn.MaxPool2d(2, ceil_mode=True)}, ()),
    "functions": (lambda m, x: m.b(F.interpolate(F.max_pool2d(m.a(x), 2), scale_factor=2)), {}, ()),
    "depthwise": (lambda m, x: m.b(m.depth(m.a(x))), {"depth": nn.Conv2d(8, 8, 3, groups=8)}, ("depth",)),
    "norm of both": (lambda m, x: m.b(m.norm(m.a(x))) + m.b(m.norm(m.a(x * 2))), {"norm": nn.BatchNorm2d(8)}, ("norm",)),
}
LEFT = {
    "flatten": (lambda m, x: m.b(m.a(x).flatten(2).unflatten(2, (8, 8))), "unflatten", {}),
    "grouped": (lambda m, x: m.b(m.group(m.a(x))), "group (Conv2d)", {"group": nn.Conv2d(8, 8, 1, groups=2)}),
    "group norm": (lambda m, x: m.b(m.norm(m.a(x))), "norm (GroupNorm)", {"norm": nn.GroupNorm(2, 8)}),
    "indices": (lambda m, x: m.b(F.max_pool2d(m.a(x), 2, return_indices=True)[0]), "getitem", {}),
    "padded channels": (lambda m, x: m.b(F.pad(m.a(x), (0, 0, 0, 0, 1, -1))), "pad", {}),
    "linear": (lambda m, x: m.b(m.linear(m.a(x))), "different dimensions", {"linear": nn.Linear(8, 8)}),
    "frozen norm": (lambda m, x: m.b(m.norm(m.a(x))), "norm is frozen", {"norm": nn.BatchNorm2d(8).requires_grad_(False)}),
    "norm of the input too": (lambda m, x: m.b(m.norm(m.a(x))) + m.norm(x), "the model", {"norm": nn.BatchNorm2d(8)}),
    "weight read": (lambda m, x: m.b(m.a(x)) * m.a.weight.mean((1, 2, 3))[:, None, None], "weight of a is read", {}),
}


@pytest.mark.parametrize("name", FOUND)
@pytest.mark.parametrize("sparse", [False, True])
def test_found_and_the_function_stays(name, sparse):
    between, parts, carried = FOUND[name]
    model = through(between, **copy.deepcopy(parts))
    if sparse:
        for layer in (model.a, model.b):
            make_sparse_(layer, "2:4").use(None, layer.plan)
    chains, reasons = find_chains(model)
    assert chains == [Chain(("a",), ("b",), 8, carried)] and set(reasons) == {"a"}
    for mode in (True, False):
        want = copy.deepcopy(model).train(mode)(X)
        moved, order = copy.deepcopy(model).train(mode), torch.randperm(8, generator=torch.Generator().manual_seed(1))
        for tensor, dim in channel_parameters(moved, chains[0]):
            reorder_(tensor.detach(), dim, order)
        assert not torch.equal(moved.a.weight, model.a.weight) and (moved(X) - want).abs().max() < 1e-12


@pytest.mark.parametrize("name", LEFT)
def test_left_alone_with_a_reason(name):
    between, reason, parts = LEFT[name]
    chains, reasons = find_chains(Through(between, **parts))
    assert chains == [] and reason in reasons["b"]


def test_what_pools_an_image_mixes_the_channels_of_linear_layers():
    model = nn.Sequential(nn.Linear(8, 8), nn.MaxPool2d(3, 1, 1), nn.Linear(8, 8))
    chains, reasons = find_chains(model)
    assert chains == [] and "MaxPool2d" in reasons["2"]


def test_residual_network():
    class Block(nn.Module):
        def __init__(self, wide, out):
            super().__init__()
            self.conv1, self.bn1, self.relu = nn.Conv2d(wide, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU(inplace=True)
            self.conv2, self.bn2 = nn.Conv2d(out, out, 3, padding=1, bias=False), nn.BatchNorm2d(out)
            self.down = None if wide == out else nn.Conv2d(wide, out, 1, bias=False)

        def forward(self, x):
            y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
            y += x if self.down is None else self.down(x)
            return self.relu(y)

    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), Block(8, 8), Block(8, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    chains, reasons = find_chains(nn.Sequential(model, nn.Linear(16, 4)))
    assert {c.consumers: (c.producers, c.between) for c in chains} == {
        ("0.2.conv1", "0.3.conv1", "0.3.down"): (("0.0", "0.2.conv2"), ("0.1", "0.2.bn2")),
        ("0.2.conv2",): (("0.2.conv1",), ("0.2.bn1",)),
        ("0.3.conv2",): (("0.3.conv1",), ("0.3.bn1",)),
    }
    assert "Flatten" in reasons["1"]
