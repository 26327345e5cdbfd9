"""SLoPe: masks that never change, the second one that does, and adapters from their first step to the file."""

import json

import pytest
import torch
from safetensors import safe_open
from torch import nn

import nmkernels as nm
from nmkernels.nn.adapter import adapter_of, folded
from nmkernels.recipes import SLoPe
from python_tests.recipes.loop import batches, loss_of, mlp
from python_tests.recipes.training import F32, run, start, step

DATA = batches(20, F32)
RECIPE = SLoPe("2:4", 20, rank=2, start=15, every=4, seed=1)


# ---- the masks


def test_mask_applies_before_attach_and_before_clipping():
    model = mlp(F32)
    handle = nm.sparsify_(model, RECIPE)
    assert torch.equal(model[0].effective_weight(), nm.ops.prune(model[0].weight.detach(), "2:4"))
    handle.attach(RECIPE.optimizer(model.parameters()))
    loss_of(model, DATA[0]).backward()
    assert not any(layer.weight.grad[~layer.nm_rows].any() for layer in (model[0], model[2]))


def test_plain_adamw_state_chooses_masks_again():
    model, handle, optimizer = run(RECIPE, F32, DATA)
    plain = torch.optim.AdamW(model.parameters())
    with torch.no_grad():
        for layer in handle.layers.values():
            layer.weight.copy_(layer.weight.flip(1) + 0.01)
    want = nm.ops.mask(model[0].weight.detach(), "2:4")
    optimizer.load_state_dict(plain.state_dict())
    assert torch.equal(model[0].nm_rows, want) and torch.equal(handle.run.held.masks["0"], want)


# ---- the adapters


def test_adapters_train_in_the_last_steps():
    model, handle, optimizer = start(RECIPE, F32)
    assert {id(p) for layer in handle.layers.values() for p in adapter_of(layer)} <= {id(p) for p in model.parameters()}
    left = model[0].nm_left.detach().clone()
    for t, batch in enumerate(DATA):
        step(model, optimizer, batch)
        assert (model[0].nm_left.grad is not None) == (model[0].nm_right.grad is not None) == (t >= 15)
        assert (model[0].nm_right in optimizer.state) == (t >= 15) != torch.equal(model[0].nm_left, left)
    assert optimizer.state[model[0].nm_right]["step"] == 5


def test_left_factor_is_seeded_by_layer():
    def lefts(dtype, seed):
        model = nn.Sequential(nn.Linear(256, 64), nn.Linear(64, 256)).to(dtype)
        return [layer.nm_left.detach() for layer in nm.sparsify_(model, SLoPe("2:4", 20, rank=32, seed=seed)).layers.values()]

    (left, _), (again, other), (another, _) = lefts(F32, 3), lefts(torch.bfloat16, 3), lefts(torch.bfloat16, 4)
    assert left.shape == (256, 32) and abs(float(left.mean())) < 0.05 and abs(float(left.std()) - 1) < 0.05
    assert torch.equal(again, left.bfloat16()) and not torch.equal(again[:64], other) and not torch.equal(again, another)


def test_rank_as_a_number_or_a_share_of_the_smaller_side():
    for rank, want in [(3, 3), (0.25, 8), (0.001, 1), (1, 1)]:
        model, _, _ = start(SLoPe("2:4", 20, rank=rank), model=nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8)))
        assert [p.shape for p in adapter_of(model[0])] == [(64, want), (want, 32)]


def test_a_frozen_layer_has_a_frozen_adapter():
    model = mlp(F32)
    model[0].weight.requires_grad_(False)
    model, _, optimizer = start(RECIPE, model=model)
    for batch in DATA:
        step(model, optimizer, batch)
    assert not model[0].nm_right.any() and model[2].nm_right.any()


def test_loading_a_run_or_a_dense_checkpoint():
    model, handle, _ = run(RECIPE, F32, DATA)
    other = mlp(F32, seed=5)
    fresh = nm.sparsify_(other, RECIPE)
    other.load_state_dict(model.state_dict())
    with handle.deployable(), fresh.deployable(), torch.no_grad():
        assert torch.equal(other(DATA[0][0]), model(DATA[0][0]))
    assert not other[0].adapts
    left = model[0].nm_left.detach().clone()
    model.load_state_dict(mlp(F32, seed=3).state_dict())
    assert not model[0].nm_right.any() and torch.equal(model[0].nm_left, left)
    assert all(p.requires_grad for layer in handle.layers.values() for p in adapter_of(layer))


# ---- the end


def test_adapters_in_finish_compress_and_save_dense(tmp_path):
    model, handle, _ = run(RECIPE, F32, DATA)
    x, parts = DATA[0][0], {name: adapter_of(layer) for name, layer in handle.layers.items()}
    handle.finish()
    want = model(x)
    assert nm.ops.is_nm(model[0].weight.detach(), "2:4") and not hasattr(model[0], "nm_rows")
    nm.save_dense(model, tmp_path / "m")
    with safe_open(tmp_path / "m", "pt") as file:
        state, about = {k: file.get_tensor(k) for k in file.keys()}, json.loads(file.metadata()["nm"])  # noqa: SIM118
    dense = mlp(F32, seed=4)
    dense.load_state_dict(state)
    torch.testing.assert_close(dense(x), want)
    assert about == {}
    nm.compress_(model)
    assert all(model.get_submodule(name).adapter == part for name, part in parts.items()), "a Parameter stays the same Parameter"
    torch.testing.assert_close(model(x), want)


@pytest.mark.parametrize("when", ["trained", "finished", "nothing to add"])
def test_remove_folds(when):
    model, handle, _ = run(RECIPE, F32, DATA)
    if when != "trained":
        handle.finish()
    if when == "nothing to add":
        nn.init.zeros_(model[0].nm_right)
    with handle.deployable(), torch.no_grad():
        want = model(DATA[0][0])
    weight = folded(model[0].weight.detach(), *adapter_of(model[0]))
    handle.remove()
    assert type(model[0]) is nn.Linear and torch.equal(model[0].weight, weight) and list(model.state_dict()) == list(mlp().state_dict())
    assert nm.ops.is_nm(weight, "2:4") == (when == "nothing to add")
    torch.testing.assert_close(model(DATA[0][0]), want)


# ---- the schedule, and layers


def test_when_the_adapters_begin():
    assert SLoPe("2:4", 1000).stages[1][0] == 990 and SLoPe("2:4", 30).stages[1][0] == 29, "at least one step"
    assert SLoPe("2:4", 30, start=0).stages[1][0] == 0 and len(SLoPe("2:4", rank=0).stages) == 1
    assert SLoPe("2:4", rank=0).final == "nm" and SLoPe("2:4", 10).final == "nm+adapter"


def test_wide_layers_may_be_left_out():
    def model():
        return nn.Sequential(nn.Linear(32, 160), nn.Linear(160, 64), nn.Linear(64, 64))

    handle = nm.sparsify_(model(), SLoPe("2:4", rank=0, max_aspect=4))
    assert list(handle.layers) == ["1", "2"] and "5.0 times its shorter one" in str(handle.report)
    assert list(nm.sparsify_(model(), SLoPe("2:4", rank=0, max_aspect=5)).layers) == ["0", "1", "2"]
