"""MaskLLM: its schedule, its prior, and what trains. The trajectories are the roster's."""

import pytest
import torch

import nmkernels as nm
from nmkernels.pattern import RecipeError, ShapeError
from nmkernels.recipes import MaskLLM
from python_tests.for_each import for_each
from python_tests.recipes.loop import batches, mlp
from python_tests.recipes.training import F32, start, step, train

DATA = batches(12, F32)
RECIPE = MaskLLM("2:4", total_steps=12, seed=0)


# ---- the schedule


def test_after_its_steps_the_schedule_stays_at_its_end():
    recipe = MaskLLM("2:4", total_steps=100, decay=0.5, decay_schedule="linear")
    for t in (100.0, 120.0):
        got = {k: float(v) for k, v in recipe.values({"t": torch.tensor(t, dtype=torch.float64)}).items()}
        assert got == pytest.approx({"tau": 0.05, "kappa": 500.0, "penalty": 0.0})


def test_schedule_and_forward_before_attach():
    model = mlp(F32)
    handle = nm.sparsify_(model, RECIPE)
    assert model(DATA[0][0]).isfinite().all() and model[0].nm_tau == 4.0
    optimizer, sharp = handle.attach(RECIPE.optimizer(model.parameters(), lr=1e-2)), []
    train(model, optimizer, DATA[:6], lambda t: sharp.append(handle.metrics()["sharpness"].item()))
    assert float(model[0].nm_tau) == pytest.approx(2.025) and float(handle.metrics()["kappa"]) == 300.0
    train(model, optimizer, DATA[6:], lambda t: sharp.append(handle.metrics()["sharpness"].item()))
    assert sharp[-1] > 0.95 > sharp[0] > 1 / 6


def test_noise_differs_by_step_and_layer():
    model, handle, optimizer = start(RECIPE, F32)
    draws = lambda handle: [tuple(layer.nm_draw.tolist()) for layer in handle.layers.values()]  # noqa: E731
    seen = []
    for batch in DATA[:4]:
        first = model(batch[0])
        assert torch.equal(first, model(batch[0]))
        seen += draws(handle)
        step(model, optimizer, batch)
    assert len(set(seen)) == 8
    assert draws(start(RECIPE, F32)[1]) == seen[:2] != draws(start(MaskLLM("2:4", total_steps=12, seed=1), F32)[1])


# ---- what trains


def test_the_logits_have_their_own_rate():
    model, _, optimizer = start(RECIPE, F32, lr=3e-3, weight_decay=0.1)
    names = {p: name for name, p in model.named_parameters()}
    rates = {names[p]: group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert rates == pytest.approx({name: 3e-2 if "nm_logits" in name else 3e-3 for name in rates}) and len(rates) == 8


def test_flip_rate_and_finish_use_the_likeliest_mask():
    model, handle, optimizer = start(MaskLLM("2:4", total_steps=12, lr_multiplier=1.0), F32)
    for batch in DATA:
        before = [layer.kept() for layer in handle.layers.values()]
        step(model, optimizer, batch)
        flips = sum(int((layer.kept() ^ b).sum()) for layer, b in zip(handle.layers.values(), before, strict=True))
        assert handle.metrics()["flip_rate"].item() == pytest.approx(flips / 1536)
    assert flips
    want = [layer.weight * layer.kept() for layer in handle.layers.values()]
    handle.finish()
    assert all(torch.equal(model[i].weight, w) for i, w in zip((0, 2), want, strict=True))


# ---- the prior


@for_each("strength, least, most", [(50.0, 1.0, 1.0), (0.0, 0.4, 0.6)])
def test_the_prior_is_the_mask_by_magnitude(strength, least, most):
    for layer in start(MaskLLM("2:4", total_steps=12, prior_strength=strength), F32)[1].layers.values():
        agree = (layer.kept() == nm.ops.mask(layer.weight.detach(), "2:4")).float().mean().item()
        assert least <= agree <= most


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
