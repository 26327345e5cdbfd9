"""What every layer with an N:M weight promises to those that do not know it: state-dict keys, copies, pickles, and no trace afterwards."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import nmkernels as nm
from nmkernels.nn import NMWeight
from python_tests.moe import Experts

RECIPES = {
    "srste:2:4": [],
    "sste:2:4": ["nm_scale"],
    "maskllm:2:4": ["nm_logits"],
    "slope:2:4": ["nm_left", "nm_right"],
}
"""What the state dict of a layer has in addition to the dense keys, in order."""


class Net(nn.Module):
    """One layer of each kind, and experts."""

    def __init__(self):
        super().__init__()
        self.linear, self.conv, self.experts = nn.Linear(32, 16), nn.Conv2d(8, 4, 3), Experts()


def sparse(recipe, model):
    handle = nm.sparsify_(model, nm.recipes.get(recipe, total_steps=10), lambda module, name: True)
    return handle, handle.attach(handle.recipe.optimizer(model.parameters(), lr=1e-2))


def step(model, optimizer, x):
    model(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:finish")
@pytest.mark.parametrize("recipe", RECIPES)
def test_state_dict_keys_in_order(recipe):
    model = nn.Sequential(nn.Linear(32, 16))
    handle, optimizer = sparse(recipe, model)
    for _ in range(2):
        assert list(model.state_dict()) == ["0.weight", "0.bias", *(f"0.{name}" for name in RECIPES[recipe])]
        step(model, optimizer, torch.randn(4, 32))
    handle.finish()
    left = RECIPES[recipe] if handle.recipe.final == "nm+adapter" else []
    assert list(model.state_dict()) == ["0.weight", "0.bias", *(f"0.{name}" for name in left)]


def test_keys_and_attributes_of_every_kind_are_the_dense_ones_again():
    model = Net()
    keys, attributes = list(model.state_dict()), {name: set(vars(m)) for name, m in model.named_modules()}
    for undo in (lambda handle: handle.remove(), lambda handle: nm.densify_(handle.model), lambda handle: handle.finish(True).cpu()):
        handle = nm.sparsify_(model, "srste:2:4", lambda module, name: True)
        assert len(handle.layers) == 4 and list(model.state_dict()) == keys
        undo(handle)
        handle.remove()
        assert list(model.state_dict()) == keys
        assert {name: set(vars(m)) for name, m in model.named_modules()} == attributes
        assert not any(isinstance(m, NMWeight) for m in model.modules())
    built = nm.SparseLinear(8, 4)
    assert vars(nm.densify_(nn.Sequential(built))[0]).keys() == vars(nn.Linear(8, 4)).keys()


def test_remove_after_densify_leaves_no_attribute():
    model = nn.Sequential(nn.Linear(32, 16))
    handle, optimizer = sparse("sdgf:2:4", model)
    step(model, optimizer, torch.randn(4, 32))
    twin = nm.densify_(copy.deepcopy(model))
    assert vars(twin[0]).keys() == vars(nn.Linear(1, 1)).keys()
    handle.detach()
    nm.densify_(model)
    handle.remove()
    assert type(model[0]) is nn.Linear and vars(model[0]).keys() == vars(nn.Linear(1, 1)).keys()


def saved_and_loaded(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved_and_loaded], ids=["copy", "pickle", "save"]
)
@pytest.mark.filterwarnings("ignore:finish")
@pytest.mark.parametrize("recipe", RECIPES)
def test_copies_compute_the_same_and_share_nothing(recipe, duplicate):
    model, x = nn.Sequential(nn.Linear(32, 16)), torch.randn(4, 32)
    handle, optimizer = sparse(recipe, model)
    step(model, optimizer, x)
    for _ in range(2):
        twin = duplicate(model)
        layer, other = model[0], twin[0]
        assert torch.equal(model(x), twin(x)) and list(model.state_dict()) == list(twin.state_dict())
        assert vars(layer).keys() == vars(other).keys() and type(layer) is type(other)
        same = ("pattern", "final", "transform", "plan", "adapts", "starts", "governed", "stepped", "finished", "ran")
        assert [getattr(layer, name) for name in same] == [getattr(other, name) for name in same]
        assert layer.effective is not other.effective and not other.effective.attached
        assert other.gather is None and other.watch is None
        assert not {p.data_ptr() for p in model.parameters()} & {p.data_ptr() for p in twin.parameters()}
        handle.finish()


def test_a_dense_checkpoint_starts_what_the_recipe_learns_again():
    model, dense = nn.Sequential(nn.Linear(32, 16)), nn.Sequential(nn.Linear(32, 16))
    handle = nm.sparsify_(model, "sste:2:4")
    before, restored = model[0].nm_scale.clone(), copy.deepcopy(model.state_dict())
    assert str(model.load_state_dict(dense.state_dict())) == "<All keys matched successfully>"
    want = nm.ops.soft_threshold_scale(dense[0].weight.detach(), "2:4")
    assert torch.equal(model[0].nm_scale, want) and not torch.equal(want, before)
    model.load_state_dict(restored)
    handle.attach(handle.recipe.optimizer(model.parameters()))
    assert torch.equal(model[0].nm_scale, before), "what a checkpoint has is not taken from the weights again"
