"""Bi-Mask: its permutations. The trajectories are the roster's."""

import torch
from torch import nn

import nmkernels as nm
from nmkernels.recipes import BiMask
from python_tests.recipes.loop import batches
from python_tests.recipes.training import start


def test_layers_and_seeds_have_permutations_of_their_own():
    found = [[layer.nm_order for layer in start(BiMask("2:4", draws=3, seed=seed))[1].layers.values()] for seed in (1, 2, 1)]
    assert sorted(found[0][0].tolist()) == list(range(32)) != found[0][0].tolist()
    assert not torch.equal(found[0][0], found[0][1]) and not torch.equal(found[0][0], found[1][0])
    assert all(map(torch.equal, found[0], found[2]))
    assert torch.equal(start(BiMask("2:4", draws=0))[0][0].nm_order, torch.arange(32))


def test_outputs_that_m_does_not_divide():
    model = nn.Sequential(nn.Linear(16, 18), nn.GELU(), nn.Linear(18, 8))
    handle = nm.sparsify_(model, BiMask("1:8", draws=4, every=2, seed=0))
    optimizer = handle.attach(handle.recipe.optimizer(model.parameters(), lr=1e-2))
    for x, y in batches(4, torch.float32):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x.requires_grad_()), y).backward()
        optimizer.step()
        assert torch.isfinite(x.grad).all() and sorted(model[0].nm_order.tolist()) == list(range(18))
    handle.finish()
    assert nm.ops.is_nm(model[0].weight.detach(), "1:8")
