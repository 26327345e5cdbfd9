"""MaskLLM: its schedule, its prior, what trains, and that it finds a better mask than magnitude."""

import copy

import pytest
import torch

import nmkernels as nm
from nmkernels.pattern import RecipeError, ShapeError
from nmkernels.recipes import MaskLLM
from python_tests.recipes.loop import batches, loss_of, mlp, snapshot
from python_tests.recipes.running import F32, start, step, train

DATA = batches(12, F32)


def begun(recipe, model=None, **keywords):
    return start(recipe, F32, model=model, **keywords)


# ---- the schedule


def test_schedule():
    recipe = MaskLLM("2:4", total_steps=100, decay=0.5)
    at = [{k: float(v) for k, v in recipe.values({"t": torch.tensor(float(t), dtype=torch.float64)}).items()} for t in (0, 50, 100, 120)]
    assert [round(a["tau"], 6) for a in at] == [4.0, 2.025, 0.05, 0.05]
    assert [a["kappa"] for a in at] == [100.0, 300.0, 500.0, 500.0] and {a["penalty"] for a in at} == {0.5}
    linear = MaskLLM("2:4", total_steps=100, decay=0.5, decay_schedule="linear")
    assert [float(linear.values({"t": torch.tensor(t)})["penalty"]) for t in (0.0, 50.0, 100.0)] == [0.5, 0.25, 0.0]
    assert recipe.values({})["tau"] == 4.0


def test_layers_follow_the_schedule_and_the_model_runs_before_attach():
    model = mlp(F32)
    recipe = MaskLLM("2:4", total_steps=12)
    handle = nm.sparsify_(model, recipe)
    assert model(DATA[0][0]).isfinite().all() and model[0].nm_tau == 4.0
    optimizer = handle.attach(recipe.optimizer(model.parameters(), lr=1e-2))
    for batch in DATA[:6]:
        step(model, optimizer, batch)
    assert float(model[0].nm_tau) == pytest.approx(2.025) and float(handle.metrics()["kappa"]) == 300.0
    assert {"tau", "kappa", "sharpness"} <= handle.metrics().keys()


def test_noise_is_new_in_every_step_and_layer_and_the_same_within_one():
    model, handle, optimizer = begun(MaskLLM("2:4", total_steps=12, seed=0))
    seen = []
    for batch in DATA[:4]:
        first = model(batch[0])
        assert torch.equal(first, model(batch[0]))
        seen += [tuple(layer.nm_draw.tolist()) for layer in handle.layers.values()]
        step(model, optimizer, batch)
    assert len(set(seen)) == 8
    again = begun(MaskLLM("2:4", total_steps=12, seed=0))[1]
    assert [tuple(layer.nm_draw.tolist()) for layer in again.layers.values()] == seen[:2]
    other = begun(MaskLLM("2:4", total_steps=12, seed=1))[1]
    assert [tuple(layer.nm_draw.tolist()) for layer in other.layers.values()] != seen[:2]


def test_masks_get_sharper():
    model, handle, optimizer = begun(MaskLLM("2:4", total_steps=12))
    sharp = []
    train(model, optimizer, DATA, lambda t: sharp.append(handle.metrics()["sharpness"].item()))
    assert sharp[-1] > 0.95 > sharp[0] > 1 / 6


# ---- what trains


@pytest.mark.parametrize("others", ["frozen", "trained"])
@pytest.mark.parametrize("own", [True, False])
def test_weights_neither_learn_nor_decay(others, own):
    recipe = MaskLLM("2:4", total_steps=12, others=others)
    model, handle, optimizer = begun(recipe, make=None if own else torch.optim.AdamW, weight_decay=0.5)
    before = snapshot(model)
    train(model, optimizer, DATA)
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    logits = {"0.nm_logits", "2.nm_logits"}
    assert moved == (logits if others == "frozen" else set(before) - {"0.weight", "2.weight"})
    handle.finish()
    for i in (0, 2):
        kept = model[i].weight != 0
        assert torch.equal(model[i].weight, before[f"{i}.weight"] * kept) and nm.ops.is_nm(model[i].weight.detach(), "2:4")


def test_the_logits_have_their_own_rate():
    recipe = MaskLLM("2:4", total_steps=12)
    model, _, optimizer = begun(recipe, lr=3e-3, weight_decay=0.1)
    names = {id(p): name for name, p in model.named_parameters()}
    rates = {names[id(p)]: group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert {name for name, lr in rates.items() if lr == pytest.approx(3e-2)} == {"0.nm_logits", "2.nm_logits"}
    assert {lr for name, lr in rates.items() if "nm_" not in name} == {3e-3}
    with pytest.raises(RecipeError, match="sparsify_ first"):
        recipe.optimizer(mlp().parameters())


def test_flips_are_those_of_the_likeliest_mask():
    model, handle, optimizer = begun(MaskLLM("2:4", total_steps=12, lr_multiplier=1.0))
    for batch in DATA:
        before = [layer.kept() for layer in handle.layers.values()]
        step(model, optimizer, batch)
        flips = sum(int((layer.kept() ^ b).sum()) for layer, b in zip(handle.layers.values(), before, strict=True))
        assert handle.metrics()["flip_rate"].item() == pytest.approx(flips / 1536)
    assert flips


def test_hard_masks_are_nm_in_training():
    model, handle, optimizer = begun(MaskLLM("2:8", total_steps=12, hard=True))
    step(model, optimizer, DATA[0])
    assert handle.metrics()["density"] == 0.25 and nm.ops.is_nm(model[0].effective_weight(), "2:8")


# ---- the prior


def test_the_prior_is_the_mask_by_magnitude():
    _, handle, _ = begun(MaskLLM("2:4", total_steps=12, prior_strength=50.0))
    for layer in handle.layers.values():
        assert torch.equal(layer.kept(), nm.ops.mask(layer.weight.detach(), "2:4"))
    _, handle, _ = begun(MaskLLM("2:4", total_steps=12, prior_strength=0.0))
    agree = [(layer.kept() == nm.ops.mask(layer.weight.detach(), "2:4")).float().mean().item() for layer in handle.layers.values()]
    assert max(agree) < 0.6


def test_a_given_prior_survives_attach():
    recipe, model = MaskLLM("2:4", total_steps=12, prior_strength=50.0), mlp(F32)
    handle = nm.sparsify_(model, recipe)
    mask = nm.ops.mask(torch.randn(32, 16), "2:4")
    recipe.set_prior_(handle.layers, {"0": mask})
    handle.attach(recipe.optimizer(model.parameters(), lr=1e-2))
    assert torch.equal(model[0].kept(), mask) and torch.equal(model[2].kept(), nm.ops.mask(model[2].weight.detach(), "2:4"))
    with pytest.raises(RecipeError, match="'1'.*0, 2"):
        recipe.set_prior_(handle.layers, {"1": mask})
    for bad in (mask.t(), torch.ones(32, 16, dtype=torch.bool)):
        with pytest.raises(ShapeError, match="must be 2:4"):
            recipe.set_prior_(handle.layers, {"0": bad})


# ---- the result


@pytest.mark.slow
def test_it_finds_a_better_mask_than_magnitude():
    model = mlp(F32)
    data = batches(64, F32)
    dense = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(6):
        train(model, dense, data)

    def loss(of):
        with torch.no_grad():
            return sum(loss_of(of, batch).item() for batch in data) / len(data)

    pruned = copy.deepcopy(model)
    for i in (0, 2):
        pruned[i].weight.data = nm.ops.prune(pruned[i].weight.detach(), "2:4")
    gap, dense_loss = loss(pruned) - loss(model), loss(model)
    _, handle, optimizer = begun(MaskLLM("2:4", total_steps=6 * len(data), seed=0), model, lr=3e-4)
    for _ in range(6):
        train(model, optimizer, data)
    handle.finish()
    assert dense_loss < loss(model) < dense_loss + 0.75 * gap
