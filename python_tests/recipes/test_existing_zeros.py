"""Zeros that were made elsewhere are taken over as masks and trained on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import nmkernels as nm
from nmkernels.pattern import RecipeError
from nmkernels.recipes.existing import existing_pattern
from python_tests.for_each import for_each
from python_tests.recipes.loop import mlp, snapshot
from python_tests.recipes.training import DATA32, F32, train


@torch.no_grad()
def pruned(n: int = 2, m: int = 4) -> tuple[nn.Sequential, dict[str, Tensor]]:
    """A model of which the first two linear layers are pruned, not by magnitude, and their masks."""
    model, masks = mlp(F32), {}
    for name in ("0", "2"):
        weight = model.get_submodule(name).weight
        masks[name] = nm.ops.mask(torch.randn_like(weight), nm.Pattern(n, m))
        weight.mul_(masks[name])
    return model, masks


def check_trained(model: nn.Module, handle: nm.recipes.Handle, masks: dict[str, Tensor]) -> None:
    """The zeros stay where they are through training, finish and compression, and what is not pruned learns."""
    assert list(handle.layers) == list(masks)
    before = snapshot(model)
    train(model, handle.attach(torch.optim.AdamW(model.parameters(), lr=1e-2)), DATA32[:5])
    handle.finish()
    for name, mask in masks.items():
        weight = model.get_submodule(name).weight
        assert torch.equal(weight != 0, mask) and not torch.equal(weight, before[f"{name}.weight"])
    x = DATA32[0][0]
    y = model(x)
    assert torch.allclose(nm.compress_(model)(x), y, atol=1e-5)


@for_each("n, m", [(2, 4), (1, 4), (2, 8)])
def test_masks_are_found_and_trained_on(n, m):
    model, masks = pruned(n, m)
    handle = nm.recipes.adopt(model)
    assert handle.recipe == nm.recipes.ASP(f"{n}:{m}", score="existing")
    check_trained(model, handle, masks)


def test_with_a_pattern_and_a_filter():
    model, masks = pruned(1, 4)
    handle = nm.recipes.adopt(model, "2:4", lambda module, name: name != "0")  # 1:4 is 2:4 too
    assert list(handle.layers) == ["2"] and str(handle.recipe.pattern) == "2:4"
    check_trained(model, handle, {"2": nm.ops.mask(masks["2"].float(), "2:4")})  # one more zero of each group trains


def test_the_pattern_of_a_weight():
    w = torch.randn(8, 32)
    for text in ("2:4", "1:4", "3:8", "2:8", "5:16"):
        assert existing_pattern(nm.ops.prune(w, text)) == nm.Pattern(text)
    assert existing_pattern(w) is None and existing_pattern(nm.ops.prune(w, "3:4")) is None
    assert existing_pattern(torch.zeros(4, 8)) == nm.Pattern("1:8")


def test_refused():
    with pytest.raises(RecipeError, match=r"no weight has N:M zeros.*0: its weight is in no pattern that is looked for, with 0 %.*ASP"):
        nm.recipes.adopt(mlp(F32))
    with pytest.raises(RecipeError, match=r"adopt: the weight of layer '0' is on the meta device, or offloaded; load it into memory first"):
        nm.recipes.adopt(mlp(F32).to("meta"), "2:4")
    for pattern in ("3:4", "5:8", "4:4"):
        model = mlp(F32)
        with torch.no_grad():
            model[2].weight.copy_(nm.ops.prune(model[2].weight, pattern))
        way = r'Looked for: N ≤ M/2, M = 4, 8, 16, 32; give another pattern: adopt\(model, "3:4"\)\.'
        with pytest.raises(RecipeError, match=way):
            nm.recipes.adopt(model)
        assert "2" in nm.recipes.adopt(model, pattern).layers
    model, _ = pruned()
    with pytest.raises(RecipeError, match=r"no weight has 1:4 zeros.*0: its weight is not 1:4, with 50 % zeros"):
        nm.recipes.adopt(model, "1:4")
    with torch.no_grad():
        model[4].weight.copy_(nm.ops.prune(model[4].weight, "3:8"))
        model[4].weight[0, :4] = torch.tensor([1.0, 2.0, 3.0, 0.0])
        model[4].weight[0, 4:8] = 0.0
    with pytest.raises(RecipeError, match=r"most pruned layers are 2:4, but 4 is 3:8"):
        nm.recipes.adopt(model)
    assert all(type(layer) is nn.Linear for layer in model[::2])


def test_every_layer_that_is_left_out_has_its_true_reason():
    torch.manual_seed(0)
    model = nn.ModuleDict({
        "pruned": nn.Linear(32, 32), "dense": nn.Linear(32, 32), "quarter": nn.Linear(32, 32), "odd": nn.Linear(30, 32),
        "not": nn.Linear(32, 32), "normed": nn.utils.parametrizations.weight_norm(nn.Linear(32, 32)), "words": nn.Embedding(32, 32),
    })  # fmt: skip
    for name in ("pruned", "not"):
        model[name].weight.data = nm.ops.prune(model[name].weight.data, "2:4")
    model["quarter"].weight.data[:, ::2][:, :8] = 0
    handle = nm.recipes.adopt(model, filter_fn=lambda module, name: name != "not")
    assert list(handle.layers) == ["pruned"]
    want = {
        "dense": "its weight is not 2:4, with 0 % zeros", "quarter": "its weight is not 2:4, with 25 % zeros",
        "not": "not chosen by the filter", "odd": "in_features=30 is not a multiple of M=4",
        "normed": "torch.nn.utils.parametrize (_WeightNorm)",
        "words": "an embedding",
    }  # fmt: skip
    for _ in range(2):
        reasons = {e.name: e.reason for e in handle.report.skipped}
        assert reasons.keys() == want.keys() and all(want[name] in reasons[name] for name in want)
        handle.finish(allow_unused=True)


def test_an_already_sparse_model_is_refused():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    handle = nm.sparsify_(model, "ste:2:4")
    handle.finish(allow_unused=True)
    with pytest.raises(nm.RecipeError, match=r"adopt: the model has sparse layers already.*handle\.remove\(\)"):
        nm.recipes.adopt(model)
    handle.remove()
    assert list(nm.recipes.adopt(model).finish(allow_unused=True)) == list(model)
    nm.compress_(model)
    with pytest.raises(nm.RecipeError, match=r"0: it is compressed already.*densify_"):
        nm.recipes.adopt(model)
    assert list(nm.recipes.adopt(nm.densify_(model)).layers) == ["0", "2"]
