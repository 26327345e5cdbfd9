"""apex's ASP by its names."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import nmkernels as nm
from nmkernels.integrations.asp import ASP
from nmkernels.pattern import RecipeError


@pytest.fixture(autouse=True)
def fresh():
    yield
    ASP._handle = ASP._optimizer = None


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 4))


def train(model, optimizer, steps=5):
    for step in range(steps):
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def test_two_lines_do_what_apex_does():
    model, ours = mlp(), mlp()
    masks = {name: nm.ops.mask(model.get_submodule(name).weight, "2:4") for name in ("0", "2")}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with torch.no_grad():  # as apex: weights at once, gradients before the step and weights after it times the mask
        for name, mask in masks.items():
            model.get_submodule(name).weight.mul_(mask)

    def masked_step(step=optimizer.step):
        for name, mask in masks.items():
            model.get_submodule(name).weight.grad.mul_(mask)
        step()
        with torch.no_grad():
            for name, mask in masks.items():
                model.get_submodule(name).weight.mul_(mask)

    optimizer.step = masked_step
    train(model, optimizer)
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-2)
    handle = ASP.prune_trained_model(ours, optimizer)
    assert ASP.is_sparsity_enabled() and ASP.already_init_asp_model() and list(handle.layers) == ["0", "2"]
    train(ours, optimizer)
    for a, b in zip(model.state_dict().values(), ours.state_dict().values(), strict=True):
        assert torch.allclose(a, b, atol=1e-7)
    assert model.state_dict().keys() == ours.state_dict().keys()
    handle.finish()
    nm.compress_(ours)


def test_step_by_step_and_from_a_checkpoint():
    model = mlp()
    handle = ASP.init_model_for_pruning(model, "m8n1_1d", disallowed_layer_names=["2"], allow_permutation=False)
    assert list(handle.layers) == ["0"] and not ASP.is_sparsity_enabled()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    ASP.init_optimizer_for_pruning(optimizer)
    dense = copy.deepcopy(model[0].weight)
    train(model, optimizer, 2)
    assert not torch.equal(model[0].weight, dense) and not ASP.is_sparsity_enabled()  # dense until the masks are computed
    ASP.compute_sparse_masks()
    train(model, optimizer, 2)
    assert ASP.is_sparsity_enabled() and nm.ops.is_nm(model[0].weight.detach(), "1:8")
    saved, again = model.state_dict(), mlp()
    ASP.init_model_for_pruning(again, "m8n1_1d", allowed_layer_names=["0"])
    assert not ASP.is_sparsity_enabled()
    again.load_state_dict(saved)
    assert ASP.is_sparsity_enabled()


def test_without_an_optimizer_it_prunes_for_good():
    model = mlp()
    ASP.init_model_for_pruning(model)
    handle = ASP.compute_sparse_masks()
    assert handle.finished and nm.ops.is_nm(model[2].weight.detach(), "2:4")


def test_refused_in_words():
    model = mlp()
    with pytest.raises(RecipeError, match="no model yet"):
        ASP.compute_sparse_masks()
    for given, said in [
        ({"mask_calculator": "m4n2_2d_best"}, "FST"),
        ({"mask_calculator": lambda w: w > 0}, r"nm\.recipes\.adopt"),
        ({"allow_recompute_mask": True}, "SRSTE"),
        ({"custom_layer_dict": {nn.Bilinear: ["weight"]}}, "Bilinear"),
        ({"allowed_layer_names": ["nowhere"]}, "no layer"),
    ]:
        with pytest.raises(RecipeError, match=said):
            ASP.init_model_for_pruning(model, **given)
    assert type(model[0]) is nn.Linear
    optimizer = torch.optim.AdamW(model.parameters())
    ASP.prune_trained_model(model, optimizer)
    with pytest.raises(RecipeError, match="chosen once"):
        ASP.compute_sparse_masks()
    with pytest.raises(RecipeError, match="dense checkpoint"):
        ASP.restore_pruned_weights()
