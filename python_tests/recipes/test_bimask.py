"""Bi-Mask: its two masks in a training run, when the permutation changes, and what it refuses."""

import torch
from torch import nn

import nmkernels as nm
from nmkernels.recipes import SRSTE, BiMask
from nmkernels.recipes.compose import deployed
from python_tests.recipes.loop import batches, distance, loss_of, snapshot
from python_tests.recipes.running import F32, start, step

DATA = batches(12, torch.float32)


def orders(handle):
    return [layer.nm_order.clone() for layer in handle.layers.values()]


def test_the_permutation_is_renewed_every_k_steps_and_the_masks_at_each():
    model, handle, optimizer = start(BiMask("2:4", draws=5, every=4, seed=1), F32)
    seen, transposed = [], []
    for batch in DATA:
        seen.append(orders(handle)[1])
        layer = model[2]
        transposed.append(layer.transform.for_dgrad(layer.effective_weight(), layer.nm_order) != 0)
        step(model, optimizer, batch)
    assert [t for t in range(1, 12) if not torch.equal(seen[t], seen[t - 1])] == [4, 8]
    assert any(not torch.equal(transposed[t], transposed[t - 1]) for t in (1, 2, 3)), "the mask follows the weight under a held permutation"


def test_once_only_and_none():
    _, handle, optimizer = start(BiMask("2:4", draws=5, every=0, seed=1), F32)
    model, first = handle.model, orders(handle)
    for batch in DATA:
        step(model, optimizer, batch)
    assert all(torch.equal(a, b) for a, b in zip(orders(handle), first, strict=True))
    assert sorted(first[0].tolist()) == list(range(32)) != first[0].tolist()
    _, handle, _ = start(BiMask("2:4", draws=0), F32)
    assert torch.equal(orders(handle)[0], torch.arange(32))


def test_layers_and_seeds_have_permutations_of_their_own():
    found = [orders(start(BiMask("2:4", draws=3, seed=seed))[1]) for seed in (1, 2, 1)]
    assert not torch.equal(found[0][0], found[0][1]) and not torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[2], strict=True))


def test_the_first_layer_is_trained_by_the_other_weight():
    ends = []
    for recipe in (SRSTE("2:4", decay=2e-4), BiMask("2:4", decay=2e-4, draws=0, seed=0)):
        model, _, _ = start(recipe, F32)
        loss_of(model, DATA[0]).backward()
        ends.append({name: p.grad for name, p in model.named_parameters()})
    same = {name: torch.equal(g, ends[1][name]) for name, g in ends[0].items()}
    assert same == {"0.weight": False, "0.bias": False, "2.weight": True, "2.bias": True, "4.weight": True, "4.bias": True}


def test_without_anything_to_lose_it_is_srste():
    ends = []
    for recipe in (SRSTE("4:4", decay=0.1), BiMask("4:4", decay=0.1, draws=3, every=2, seed=0)):
        model, _, optimizer = start(recipe, F32)
        for batch in DATA:
            step(model, optimizer, batch)
        ends.append(snapshot(model))
    assert distance(*ends) == 0.0


def test_outputs_that_m_does_not_divide():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 18), nn.GELU(), nn.Linear(18, 8)).requires_grad_()
    handle = nm.sparsify_(model, BiMask("1:8", draws=4, every=2, seed=0))
    optimizer = handle.attach(handle.recipe.optimizer(model.parameters(), lr=1e-2))
    for x, y in DATA:
        x = x.clone().requires_grad_()
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        assert torch.isfinite(x.grad).all() and sorted(model[0].nm_order.tolist()) == list(range(18))
    handle.finish()
    assert nm.ops.is_nm(model[0].weight.detach(), "1:8")


def test_its_cost():
    (span,) = BiMask("2:8").profile(10)
    assert (span.fprop, span.dgrad, span.wgrad) == (0.25, 0.25, 1.0) and deployed(BiMask("2:8")).fprop == 0.25
