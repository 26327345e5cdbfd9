"""SLoPe: masks that never change, the second one that does, and adapters from their first step to the file."""

import copy
import json

import pytest
import torch
from safetensors import safe_open
from torch import nn

import nmkernels as nm
from nmkernels.autograd import HardMask
from nmkernels.nn import ADAPTER, adapter_of, folded
from nmkernels.optim import MaskedAdamW
from nmkernels.pattern import RecipeError
from nmkernels.recipes import ASP, STEP, SLoPe
from nmkernels.recipes.compose import deployed
from python_tests.recipes.loop import batches, loss_of, mlp, snapshot
from python_tests.recipes.running import F32, run, start, step

DATA = batches(20, F32)
RECIPE = SLoPe("2:4", 20, rank=2, start=15, every=4, seed=1)


# ---- the masks


def test_masks_are_those_of_the_initial_weight_and_never_change():
    first = {k: nm.ops.mask(v, "2:4") for k, v in snapshot(mlp(F32)).items() if k in ("0.weight", "2.weight")}
    model, handle, optimizer = start(RECIPE, F32)
    for batch in DATA:
        step(model, optimizer, batch)
        for k, mask in first.items():
            weight, state = dict(model.named_parameters())[k], optimizer.state[dict(model.named_parameters())[k]]
            assert all(bool((x[~mask] == 0).all()) for x in (weight, weight.grad, state["exp_avg"], state["exp_avg_sq"]))
        assert handle.metrics()["flip_rate"] == 0 and handle.metrics()["density"] == 0.5
    handle.finish()
    assert torch.equal(model[0].weight != 0, first["0.weight"])


def test_gradients_are_masked_before_clipping():
    model, _, _ = start(RECIPE, F32)
    loss_of(model, DATA[0]).backward()
    assert all(bool((layer.weight.grad[~layer.nm_rows] == 0).all()) for layer in (model[0], model[2]))


def test_the_column_mask_is_renewed_every_k_steps():
    model, _, optimizer = start(SLoPe("2:4", rank=0, every=4), F32)
    seen = []
    for batch in DATA:
        seen.append(model[2].nm_columns)
        step(model, optimizer, batch)
    changed = [t for t in range(1, 20) if not torch.equal(seen[t], seen[t - 1])]
    assert changed and set(changed) <= {4, 8, 12, 16}


def test_it_is_asp_but_for_the_gradient_of_the_input():
    grads = []
    for recipe in (ASP("2:4"), SLoPe("2:4", rank=0)):
        model, _, _ = start(recipe, F32)
        loss_of(model, DATA[0]).backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    grads[0]["2.weight"] = grads[0]["2.weight"] * nm.ops.mask(mlp(F32)[2].weight.detach(), "2:4")
    same = {name: torch.equal(g, grads[1][name]) for name, g in grads[0].items()}
    assert same == {"0.weight": False, "0.bias": False, "2.weight": True, "2.bias": True, "4.weight": True, "4.bias": True}


def test_before_an_optimizer_is_attached_the_masked_weight_is_used():
    model = mlp(F32)
    handle = nm.sparsify_(model, RECIPE)
    assert handle.run.stage.transform == HardMask(nm.Pattern("2:4")) and torch.equal(
        model[0].effective_weight(), nm.ops.prune(model[0].weight.detach(), "2:4")
    )


def test_a_state_of_plain_adamw_chooses_all_masks_anew():
    model, handle, optimizer = run(RECIPE, F32, DATA)
    plain = torch.optim.AdamW(model.parameters())
    with torch.no_grad():
        for layer in handle.layers.values():
            layer.weight.copy_(layer.weight.flip(1) + 0.01)
    want = nm.ops.mask(model[0].weight.detach(), "2:4")
    optimizer.load_state_dict(plain.state_dict())
    assert torch.equal(model[0].nm_rows, want) and torch.equal(handle.run.masks.masks["0"], want)


# ---- the adapters


def test_adapters_are_there_from_the_start_and_train_in_the_last_steps():
    model, handle, optimizer = start(RECIPE, F32)
    assert all(any(p is q for q in model.parameters()) for layer in handle.layers.values() for p in adapter_of(layer))
    left = {name: layer.nm_left.detach().clone() for name, layer in handle.layers.items()}
    for t, batch in enumerate(DATA):
        step(model, optimizer, batch)
        trains = t >= 15
        for name, layer in handle.layers.items():
            assert (layer.nm_left.grad is not None) == (layer.nm_right.grad is not None) == trains
            assert (layer.nm_right != 0).any() == trains and (trains or torch.equal(layer.nm_left, left[name]))
            assert layer.nm_right in optimizer.state or not trains
    assert optimizer.state[model[0].nm_right]["step"] == 5


def test_left_is_normal_seeded_by_layer_and_the_same_in_every_dtype():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 64), nn.Linear(64, 256))
    handle = nm.sparsify_(model, SLoPe("2:4", 20, rank=32, seed=3))
    left = handle.layers["0"].nm_left.detach()
    assert left.shape == (256, 32) and abs(float(left.mean())) < 0.05 and abs(float(left.std()) - 1) < 0.05
    handle.remove()
    again = nm.sparsify_(model.bfloat16(), SLoPe("2:4", 20, rank=32, seed=3))
    assert torch.equal(again.layers["0"].nm_left, left.bfloat16())
    assert not torch.equal(again.layers["0"].nm_left[:64], again.layers["1"].nm_left)
    again.remove()
    other = nm.sparsify_(model, SLoPe("2:4", 20, rank=32, seed=4))
    assert not torch.equal(other.layers["0"].nm_left, left.bfloat16())


def test_rank_as_a_number_or_a_share_of_the_smaller_side():
    for rank, want in [(3, 3), (0.25, 8), (0.001, 1), (1, 1)]:
        model, handle, _ = start(SLoPe("2:4", 20, rank=rank), model=nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8)))
        assert [p.shape for p in adapter_of(model[0])] == [(64, want), (want, 32)]
        assert handle.recipe.layer(nm.Pattern("2:4"), (32, 64)).rank == want


def test_an_optimizer_without_the_adapters_is_refused():
    model = mlp(F32)
    early = MaskedAdamW(model.parameters())
    handle = nm.sparsify_(model, RECIPE)
    with pytest.raises(RecipeError, match=r"no optimizer has 0.nm_left, 0.nm_right, 2.nm_left and more.*after sparsify_"):
        handle.attach(early)


def test_a_frozen_layer_has_a_frozen_adapter():
    model = mlp(F32)
    model[0].weight.requires_grad_(False)
    model, _, optimizer = start(RECIPE, model=model)
    for batch in DATA:
        step(model, optimizer, batch)
    assert not model[0].nm_right.any() and model[2].nm_right.any()


def test_a_dense_checkpoint_starts_the_adapters_anew():
    model, handle, _ = run(RECIPE, F32, DATA)
    left = model[0].nm_left.detach().clone()
    model.load_state_dict(mlp(F32, seed=3).state_dict())
    assert not model[0].nm_right.any() and torch.equal(model[0].nm_left, left)
    assert all(p.requires_grad for layer in handle.layers.values() for p in adapter_of(layer))


def test_only_the_weights_of_a_run_are_previewed_with_its_adapters():
    model, handle, _ = run(RECIPE, F32, DATA)
    x = DATA[0][0]
    with handle.deployable(), torch.no_grad():
        want = model(x)
    other = mlp(F32, seed=5)
    fresh = nm.sparsify_(other, RECIPE)
    other.load_state_dict(model.state_dict())
    with fresh.deployable(), torch.no_grad():
        assert torch.equal(other(x), want)
    assert not other[0].adapts


# ---- the end


def test_finish_keeps_the_adapters_and_compress_takes_them_over(tmp_path):
    model, handle, optimizer = run(RECIPE, F32, DATA)
    x, parts = DATA[0][0], {name: adapter_of(layer) for name, layer in handle.layers.items()}
    with handle.deployable(), torch.no_grad():
        want = model(x)
    handle.finish()
    assert torch.equal(model(x), want) and nm.ops.is_nm(model[0].weight.detach(), "2:4")
    assert not hasattr(model[0], "nm_rows") and "nm_recipe" not in optimizer.param_groups[0]
    nm.compress_(model)
    assert all(model.get_submodule(name).adapter == part for name, part in parts.items()), "a Parameter stays the same Parameter"
    torch.testing.assert_close(model(x), want)
    nm.save_compressed(model, tmp_path / "m")
    assert torch.equal(nm.load_compressed(mlp(F32, seed=4), tmp_path / "m")(x), model(x))


def test_save_dense_folds(tmp_path):
    model, handle, _ = run(RECIPE, F32, DATA)
    x = DATA[0][0]
    handle.finish()
    nm.save_dense(model, tmp_path / "m")
    with safe_open(tmp_path / "m", "pt") as file:
        state, about = {k: file.get_tensor(k) for k in file.keys()}, json.loads(file.metadata()["nm"])  # noqa: SIM118
    dense = mlp(F32, seed=4)
    dense.load_state_dict(state)
    torch.testing.assert_close(dense(x), model(x))
    assert about == {}


@pytest.mark.parametrize("finished", [False, True])
def test_remove_folds(finished):
    model, handle, _ = run(RECIPE, F32, DATA)
    x, want = DATA[0][0], None
    with handle.deployable(), torch.no_grad():
        want = model(x)
    weight = folded(model[0].weight.detach(), *adapter_of(model[0]))
    if finished:
        handle.finish()
    handle.remove()
    assert type(model[0]) is nn.Linear and torch.equal(model[0].weight, weight) and list(model.state_dict()) == list(mlp().state_dict())
    torch.testing.assert_close(model(x), want)


def test_remove_without_the_adapters_share():
    model, handle, _ = run(RECIPE, F32, DATA)
    handle.finish()
    with torch.no_grad():
        model[0].nm_right.zero_()
    weight = model[0].weight.detach().clone()
    handle.remove()
    assert torch.equal(model[0].weight, weight) and nm.ops.is_nm(weight, "2:4")


def test_conv1d():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=8, vocab_size=32)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()
    handle = nm.sparsify_(model, SLoPe("2:4", 4, rank=2, start=2))
    optimizer = handle.attach(handle.recipe.optimizer(model.parameters(), lr=1e-2))
    ids = torch.randint(32, (2, 8))
    for _ in range(4):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    handle.finish()
    want, dense = model(ids).logits, copy.deepcopy(model)
    nm.densify_(dense)
    torch.testing.assert_close(dense(ids).logits, want)
    nm.compress_(model)
    torch.testing.assert_close(model(ids).logits, want)
    assert model.transformer.h[0].mlp.c_fc.adapter is not None


# ---- with STEP, and the schedule


def test_inside_step():
    model, handle, optimizer = run(STEP("2:4", 20, switch="fixed", start=6, inner="slope(rank=2, start=11, seed=5)"), F32, DATA)
    assert handle.recipe.final == "nm+adapter" and handle.recipe.setup.seed == 5 and model[0].nm_right.any()
    assert optimizer.state[model[0].nm_right]["step"] == 3
    handle.finish()
    assert nm.ops.is_nm(model[0].weight.detach(), "2:4") and set(ADAPTER) < set(model[0].state_dict())


def test_when_the_adapters_begin():
    assert SLoPe("2:4", 1000).stages[1][0] == 990 and SLoPe("2:4", 30).stages[1][0] == 29, "at least one step"
    assert SLoPe("2:4", 30, start=0).stages[1][0] == 0 and len(SLoPe("2:4", rank=0).stages) == 1
    assert SLoPe("2:4", rank=0).final == "nm" and SLoPe("2:4", 10).final == "nm+adapter"


def test_its_cost():
    plain, lazy = SLoPe("2:8", 100, rank=0.1, start=90).profile(100)
    assert (plain.steps, plain.fprop, plain.dgrad, plain.wgrad, plain.rank) == (90, 0.25, 0.25, 1.0, 0)
    assert (lazy.steps, lazy.rank) == (10, 0.1) and deployed(SLoPe("2:8", 100, rank=0.1)).rank == 0.1
    shape = {"fc": (64, 32)}
    base, more = (nm.flops(shape, SLoPe("2:4", 100, rank=rank, start=90), 100) for rank in (0, 0.1))
    assert more.training - base.training == 10 * 3 * 2 * 3 * (64 + 32) and more.inference - base.inference == 2 * 3 * (64 + 32)
    assert base.training_ratio == (0.5 + 0.5 + 1) / 3


def test_wide_layers_may_be_left_out():
    def model():
        return nn.Sequential(nn.Linear(32, 160), nn.Linear(160, 64), nn.Linear(64, 64))

    handle = nm.sparsify_(model(), SLoPe("2:4", rank=0, max_aspect=4))
    assert list(handle.layers) == ["1", "2"] and "5.0 times its shorter one" in str(handle.report)
    assert list(nm.sparsify_(model(), SLoPe("2:4", rank=0, max_aspect=5)).layers) == ["0", "1", "2"]
