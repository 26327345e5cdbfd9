"""MaskLLM: its schedule, its prior, and what trains. The trajectories are the roster's.

And what any recipe may learn in addition to the weights: parameter groups, a loss term of the method, and frozen parameters.
"""

import copy
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import pytest
import torch
from torch import nn

import nmkernels as nm
from nmkernels.autograd import WeightTransform
from nmkernels.optim import MaskedAdamW
from nmkernels.pattern import Pattern, RecipeError, ShapeError
from nmkernels.recipes import MaskLLM, Recipe, Setup, Stage
from nmkernels.recipes.methods.maskllm import Freeze, learned_apart
from python_tests.for_each import for_each
from python_tests.recipes.loop import batches, loss_of, mlp
from python_tests.recipes.training import F32, start, step, train

DATA, DATA64 = batches(12, F32), batches(4)
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


# ---- what is learned, by a recipe of one number


@dataclass(frozen=True)
class Gain(WeightTransform):
    """W̃ = a W with a learned, pulled by a loss term −3 a² of its own."""

    reads: ClassVar = {"nm_gain": "learned"}

    def start(self, weight):
        return {"nm_gain": torch.ones((), dtype=weight.dtype)}

    def __call__(self, weight, gain, out=None):
        return weight * gain.detach()

    def gradient(self, g, weight, gain):
        return None, {"nm_gain": (g * weight).sum()}

    def penalty(self, weight, gain):
        return {"nm_gain": -6 * gain.detach()}

    def watch(self, weight, gain):
        return {"gain": gain.detach()}


@dataclass(frozen=True)
class Toy(Recipe):
    others: str = "trained"
    name: ClassVar = "toy"
    final: ClassVar = "dense"

    @property
    def setup(self):
        return Setup(hooks=partial(Freeze, self) if self.others else None)

    def stage(self, state):
        return Stage(phase=1, transform=Gain(Pattern(self.pattern)))


def started(make, **options):
    model = mlp()
    handle = nm.sparsify_(model, Toy(**options))
    return model, handle, handle.attach(make(model.parameters()))


def sgd(params, **keywords):
    return torch.optim.SGD(params, lr=1.0, **keywords)


def change(model, optimizer, scaler=None, clip=None):
    """By how much one step changes the gain of the first layer."""
    before = model[0].nm_gain.item()
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    scaler.scale(loss_of(model, DATA64[0])).backward()
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    scaler.step(optimizer)
    return model[0].nm_gain.item() - before


# ---- the loss term


def test_loss_term_is_added_once_per_step():
    model, _, optimizer = started(sgd)
    loss_of(model, DATA64[0]).backward()
    g = model[0].nm_gain.grad.item()
    optimizer.step()
    assert model[0].nm_gain.item() == pytest.approx(1 - g + 6)
    for make in (sgd, partial(MaskedAdamW, lr=1.0, eps=1.0)):
        scalers = (torch.amp.GradScaler("cpu", init_scale=scale) for scale in (1.0, 256.0))
        plain, scaled = (change(*started(make)[::2], scaler) for scaler in scalers)
        assert scaled == pytest.approx(plain, rel=1e-6)
    model, _, optimizer = started(sgd)
    assert change(model, optimizer, clip=1e-12) == pytest.approx(6, abs=1e-9)
    model, _, optimizer = started(lambda p: sgd(p, maximize=True))
    assert change(model, optimizer) == pytest.approx(6 + g)


def test_what_does_not_run_gets_none():
    model, handle, optimizer = started(sgd)
    model[0].nm_gain.requires_grad_(False)
    assert change(model, optimizer) == 0 and model[2].nm_gain.item() != 1
    assert handle.metrics()["gain"].item() == pytest.approx((512 * 1 + 1024 * model[2].nm_gain.item()) / 1536)


# ---- parameters that stand still


@pytest.mark.parametrize(("others", "still"), [("", 0), ("trained", 2), ("frozen", 5)])
@pytest.mark.parametrize("end", ["finish", "remove"])
def test_parameters_stand_still_until_the_end(others, still, end):
    """Also with zeros left in their gradients, which would decay; what was frozen before stays frozen after."""
    model = mlp()
    loss_of(model, DATA64[0]).backward()
    model[4].bias.requires_grad_(False)
    handle = nm.sparsify_(model, Toy(others=others))
    optimizer = handle.attach(torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5))
    dense = {name: p for name, p in model.named_parameters() if ".nm_" not in name}
    assert sum(not p.requires_grad for p in dense.values()) == still + 1
    before = {name: p.detach().clone() for name, p in dense.items()}
    for batch in DATA64:
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, batch).backward()
        optimizer.step()
    moved = {name for name, p in dense.items() if not torch.equal(p, before[name])}
    swapped = {"0.weight", "2.weight"} if others else set()
    assert moved - {"4.bias"} == (set() if others == "frozen" else set(dense) - swapped - {"4.bias"})
    getattr(handle, end)()
    assert [name for name, p in dense.items() if not p.requires_grad] == ["4.bias"]


@pytest.mark.parametrize("how", ["assign", "to_empty"])
def test_parameters_that_loading_replaces_train_after_the_end(how):
    saved, model = mlp(F32, seed=2).state_dict(), mlp(F32)
    handle = nm.sparsify_(model, RECIPE)
    if how == "to_empty":
        model.to("meta").to_empty(device="cpu")
    model.load_state_dict(copy.deepcopy(saved), assign=how == "assign")
    optimizer = handle.attach(RECIPE.optimizer(model.parameters(), lr=1e-2))
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["0.nm_logits", "2.nm_logits"]
    train(model, optimizer, DATA)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in saved.items())
    handle.finish()
    assert all(p.requires_grad for p in model.parameters())


def test_a_dense_checkpoint_renews_the_very_parameter():
    model, _, _ = started(sgd)
    gain = model[0].nm_gain
    with torch.no_grad():
        gain.fill_(3.0)
    saved = copy.deepcopy(model.state_dict())
    model.load_state_dict(mlp(seed=2).state_dict())
    assert model[0].nm_gain is gain and gain.item() == 1.0
    model.load_state_dict(saved)
    assert gain.item() == 3.0


# ---- parameter groups


def names_of(model, groups):
    known = {id(p): name for name, p in model.named_parameters()}
    return [sorted(known[id(p[1] if isinstance(p, tuple) else p)] for p in group["params"]) for group in groups]


def test_learned_parameters_stand_apart_in_every_form():
    model = mlp()
    nm.sparsify_(model, Toy())
    learned, rest = ["0.nm_gain", "2.nm_gain"], sorted(name for name, _ in model.named_parameters() if ".nm_" not in name)
    for params in (model.parameters(), list(model.named_parameters()), [{"params": model.parameters()}]):
        groups = learned_apart("X", params, 0.1, 10.0)
        assert names_of(model, groups) == [rest, learned] and "lr" not in groups[0] and groups[1]["lr"] == pytest.approx(1.0)
        torch.optim.AdamW(groups, lr=0.1)
    split = [{"params": [model[0].weight, model[0].nm_gain], "weight_decay": 0.1}, {"params": [model[2].nm_gain], "lr": 0.5}]
    groups = learned_apart("X", split, 0.1, 10.0)
    assert names_of(model, groups) == [["0.weight"], ["0.nm_gain"], ["2.nm_gain"]]
    assert [g.get("lr") for g in groups] == [None, 1.0, 5.0] and groups[1]["weight_decay"] == 0.1
    assert learned_apart("X", [{"params": model[0].nm_gain}], 0.1, 10.0)[0]["lr"] == 1.0


def test_an_optimizer_built_too_early_is_refused():
    model = mlp()
    params = list(model.parameters())
    handle = nm.sparsify_(model, Toy())
    with pytest.raises(RecipeError, match="0.nm_gain"):
        handle.attach(torch.optim.AdamW(params))
    handle.attach(torch.optim.AdamW(model.parameters()))
    handle.remove()
    assert list(model.state_dict()) == list(mlp().state_dict())
    with pytest.raises(RecipeError, match="sparsify_ first"):
        learned_apart("X", mlp().parameters(), 0.1, 10.0)
