"""apex's ASP by its names."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import nmkernels as nm
from nmkernels.integrations.asp import ASP
from nmkernels.pattern import RecipeError

pytestmark = pytest.mark.filterwarnings("ignore:ASP. layers that stay dense. 4 .tiny")


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
    assert list(handle.layers) == ["0", "2"]
    train(ours, optimizer)
    for a, b in zip(model.state_dict().values(), ours.state_dict().values(), strict=True):
        assert torch.allclose(a, b, atol=1e-7)
    assert model.state_dict().keys() == ours.state_dict().keys()
    handle.finish()
    nm.compress_(ours)


def test_step_by_step():
    model = mlp()
    handle = ASP.init_model_for_pruning(model, "m8n1_1d", disallowed_layer_names=["2"], allow_permutation=False)
    assert list(handle.layers) == ["0"]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    ASP.init_optimizer_for_pruning(optimizer)
    dense = copy.deepcopy(model[0].weight)
    train(model, optimizer, 2)
    assert not torch.equal(model[0].weight, dense) and not nm.ops.is_nm(model[0].weight.detach(), "1:8")
    ASP.compute_sparse_masks()
    train(model, optimizer, 2)
    assert nm.ops.is_nm(model[0].weight.detach(), "1:8")


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
        ({"custom_layer_dict": {nn.Bilinear: ["weight"]}}, "linear layers and Conv2d"),
        ({"allowed_layer_names": ["nowhere"]}, "'nowhere', which .* layer of the model"),
    ]:
        with pytest.raises(RecipeError, match=said):
            ASP.init_model_for_pruning(model, **given)
    assert type(model[0]) is nn.Linear
    optimizer = torch.optim.AdamW(model.parameters())
    ASP.prune_trained_model(model, optimizer)
    with pytest.raises(RecipeError, match="chosen once"):
        ASP.compute_sparse_masks()
    with pytest.raises(RecipeError, match="would fill the zeros"):
        ASP.init_optimizer_for_pruning(optimizer)


def cnn(*head):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), *head)


def test_a_model_of_convolutions_alone():
    model = cnn()
    handle = ASP.init_model_for_pruning(model, allow_permutation=False)
    ASP.compute_sparse_masks()
    assert list(handle.layers) == ["0", "2"] and all((layer.weight == 0).double().mean() == 0.5 for layer in handle.layers.values())


@pytest.mark.slow
@pytest.mark.parametrize("head", [(), (nn.Flatten(), nn.Linear(256, 64))], ids=["alone", "with a linear layer"])
def test_convolutions_are_pruned_and_reordered(head):
    model = cnn(*head)
    handle = ASP.prune_trained_model(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for layer in handle.layers.values():
        assert (layer.weight == 0).double().mean() == 0.5
    assert list(handle.layers) == ["0", "2", *(["4"] if head else [])]
    assert handle.report.channels["2"].startswith("reordered with the outputs of 0")
    assert all(handle.report.channels[name].startswith("left alone: its input comes from") for name in handle.layers if name != "2")


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.line, self.fc = nn.Conv2d(3, 16, 3), nn.Conv1d(16, 16, 3), nn.Linear(16, 16)
        self.frozen, self.out = nn.Linear(16, 16).requires_grad_(False), nn.Linear(16, 4)
        self.line.requires_grad_(False)  # that it is a Conv1d is said first


def test_layers_that_stay_dense_are_reported():
    with pytest.warns(UserWarning, match="ASP: layers that stay dense") as caught:
        handle = ASP.init_model_for_pruning(Mixed(), disallowed_layer_names=[])
    (said,) = [str(w.message) for w in caught]
    for part in [
        "stem (a convolution whose in_channels=3",
        "line (a convolution other than nn.Conv2d",
        "frozen (its weight is frozen)",
        "out (tiny",
    ]:
        assert part in said
    assert list(handle.layers) == ["fc"]
    with pytest.warns(UserWarning, match=r"stay dense: frozen \(its weight is frozen\)\. print"):
        handle = ASP.init_model_for_pruning(Mixed(), whitelist=[nn.Linear], disallowed_layer_names=["out"])
    assert {e.name: e.reason for e in handle.report.entries}["frozen"] == "its weight is frozen"


def test_a_parametrized_layer_stays_dense():
    model = mlp()
    parametrize.register_parametrization(model[2], "weight", nn.Identity())
    with pytest.warns(UserWarning, match=r"stay dense: 2 \(.*parametri[sz]"):
        assert list(ASP.init_model_for_pruning(model).layers) == ["0"]


def test_a_tiny_layer_is_pruned_if_it_is_named():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(ASP.init_model_for_pruning(mlp(), allowed_layer_names=["4"]).layers) == ["4"]


@pytest.mark.filterwarnings("ignore:ASP. layers that stay dense")
def test_names_and_classes_narrow_the_choice_as_in_apex():
    handle = ASP.init_model_for_pruning(cnn(nn.Flatten(), nn.Linear(256, 64)), whitelist=[nn.Conv2d], allowed_layer_names=["0"])
    assert list(handle.layers) == ["0"]
    for given, said in [
        ({"allowed_layer_names": ["4"], "whitelist": [nn.Conv2d]}, "'4': not in whitelist, or disallowed"),
        ({"allowed_layer_names": ["0", "nowhere"]}, "'nowhere', which .* layer of the model"),
        ({"disallowed_layer_names": ["module.0"]}, "disallowed_layer_names names 'module.0'"),
        ({"whitelist": [nn.Embedding]}, "cannot be pruned to 2:4: all of the model"),
        ({"disallowed_layer_names": ["0", "2", "4"]}, "cannot be pruned to 2:4: all"),
        ({"allowed_layer_names": []}, "cannot be pruned to 2:4: all"),
    ]:
        model = cnn(nn.Flatten(), nn.Linear(256, 64))
        with pytest.raises(RecipeError, match=said):
            ASP.init_model_for_pruning(model, **given)
        assert type(model[0]) is nn.Conv2d
    with pytest.raises(RecipeError, match="cannot be pruned to 2:4: '0': tiny"):
        ASP.init_model_for_pruning(nn.Sequential(nn.Linear(32, 4)))


def test_a_weight_that_the_warning_names_can_be_disallowed():
    model = nn.ModuleDict({"fc": nn.Linear(32, 32), "attention": nn.MultiheadAttention(32, 2)})
    kinds = [nn.Linear, nn.MultiheadAttention]
    with pytest.warns(UserWarning, match=r"stay dense: attention\.in_proj_weight"):
        ASP.init_model_for_pruning(copy.deepcopy(model), whitelist=kinds)
    with pytest.warns(UserWarning, match=r"stay dense: attention\.out_proj"):
        ASP.init_model_for_pruning(model, whitelist=kinds, disallowed_layer_names=["attention.in_proj_weight"])


def test_an_optimizer_that_comes_after_the_masks_is_not_ignored():
    model = mlp()
    ASP.init_model_for_pruning(model, allowed_layer_names=["0", "2"])
    ASP.compute_sparse_masks()
    with pytest.raises(RecipeError, match="would fill the zeros"):
        ASP.init_optimizer_for_pruning(torch.optim.SGD(model.parameters(), lr=0.1))
