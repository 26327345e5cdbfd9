"""Masks that are held: packing, adopting, refusing."""

import pytest
import torch

import nmkernels as nm
from nmkernels.recipes.masks import HeldMask, HeldMasks
from python_tests.recipes.loop import mlp, top_n


def layers(pattern="2:4", seed=0):
    model = mlp(torch.float32, seed)
    return nm.sparsify_(model, nm.recipes.Dense(pattern)).layers


def test_held_mask_keeps_bits_and_writes_positive_zeros():
    w = torch.tensor([[-0.0, -1.0, torch.inf, torch.nan]])
    held = HeldMask(nm.Pattern("2:4"), torch.tensor([[True, False, True, False]]))
    for got in (held(w), held(w, out=torch.empty_like(w))):
        assert torch.equal(got, torch.tensor([[0.0, 0.0, torch.inf, 0.0]]))
        assert torch.signbit(got).tolist() == [[True, False, False, False]]


@pytest.mark.parametrize("pattern", ["2:4", "1:16", "3:8"])
def test_masks_survive_packing(pattern):
    chosen = HeldMasks(layers(pattern), "magnitude")
    state = {}
    chosen.adopt(state)
    n, m = map(int, pattern.split(":"))
    for name, layer in chosen.layers.items():
        assert torch.equal(chosen.masks[name], layer.weight != 0)
        assert torch.equal(chosen.masks[name], top_n(layers(pattern)[name].weight.detach(), n, m))
    again = HeldMasks(layers(pattern), "magnitude")
    again.adopt(state)
    assert all(torch.equal(again.masks[name], chosen.masks[name]) for name in chosen.masks)
    assert all(torch.equal(again.layers[name].weight, chosen.layers[name].weight) for name in chosen.masks)


def test_collecting_sums_over_batches_and_leaves_no_hook():
    fixed = HeldMasks(layers(), "wanda")
    x = torch.randn(6, 16)
    with fixed.collecting():
        for part in (x[:2], x[2:].reshape(2, 2, 16)):
            fixed.layers["0"](part)
    fixed.layers["0"](x)
    assert torch.allclose(fixed._squares["0"], x.double().square().sum(0))
    assert not fixed.layers["0"]._forward_pre_hooks
