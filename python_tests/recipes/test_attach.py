"""How recipes live in real optimizers: scalers, closures, accumulation, schedulers, several optimizers."""

import copy
import math
from collections import Counter
from functools import partial

import pytest
import torch

import nmkernels as nm
from nmkernels import dispatch
from nmkernels.optim import MaskedAdamW
from nmkernels.recipes import ASP, SRSTE, STE, STEP
from python_tests.recipes import running
from python_tests.recipes.loop import Adam, batches, distance, loss_of, mlp, snapshot, top_n
from python_tests.recipes.running import run, same, step

F32 = torch.float32
KEYWORDS = Adam().keywords
MAKERS = {"masked_adamw": MaskedAdamW, "adamw": torch.optim.AdamW, "fused_adamw": partial(torch.optim.AdamW, fused=True)}


def start(recipe, maker):
    return running.start(recipe, F32, make=MAKERS[maker])


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("maker", MAKERS)
def test_the_decay_is_that_of_unscaled_gradients_and_skipped_steps_do_not_count(maker, unscale):
    """Whoever unscales them and when; a step whose gradients are not finite leaves weights, state and schedule as they were."""
    step_runs = maker == "masked_adamw" and not unscale
    recipe = STEP(t_min=2, t_max=4, threshold=1e-30, decay=0.1) if step_runs else SRSTE(decay=0.1)
    model, handle, optimizer = start(recipe, maker)
    scaler, sizes, data = (
        torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000, backoff_factor=1 - 1e-9),
        [],
        batches(20, F32),
    )
    optimizer.register_step_pre_hook(lambda *_: sizes.append(model[4].bias.grad.abs().max().item()))
    for t, (x, y) in enumerate(data):
        before = copy.deepcopy((optimizer.state_dict(), snapshot(model), handle.metrics()))
        optimizer.zero_grad()
        scaler.scale(loss_of(model, (x * torch.inf if t % 2 == 0 else x, y))).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if t % 2 == 0:
            assert t == 0 or same(before[0], optimizer.state_dict())
            assert distance(snapshot(model), before[1]) == 0.0
            assert handle.metrics()["density"].item() == before[2]["density"].item()
            assert handle.metrics()["flip_rate"].item() == 0.0 or maker == "adamw"
    assert len(sizes) == (10 if maker == "adamw" else 20)  # unfused, torch does not call step at all
    # the hooks of a fused step do see scaled gradients
    assert (min(size for size in sizes if math.isfinite(size)) > 2) == (maker != "adamw" and not unscale)
    want, other, _ = run(recipe, F32, data[1::2], make=MAKERS[maker])
    assert distance(snapshot(model), snapshot(want)) < 1e-5
    assert distance(snapshot(model), snapshot(run(STE(), F32, data[1::2], make=MAKERS[maker])[0])) > 1e-2
    assert handle.metrics()["decay_ratio"].item() == pytest.approx(other.metrics()["decay_ratio"].item(), rel=1e-3)
    assert not step_runs or handle.state["switch_step"] == other.state["switch_step"] == 5


@pytest.mark.parametrize("maker", MAKERS)
def test_decay_comes_after_clipping(maker):
    """clip_grad_norm_ bounds the loss's gradient only: g = clip(g) + λ (1 − M) w, as one SGD-like first step of Adam's m shows."""
    model, _, optimizer = start(SRSTE(decay=0.5), maker)
    w = model[0].weight.detach().clone()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scaler.scale(loss_of(model, batches(1, F32)[0])).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    clipped = model[0].weight.grad.clone()
    scaler.step(optimizer)
    want = 0.1 * (clipped + 0.5 * w * ~top_n(w, 2, 4))
    assert torch.allclose(optimizer.state[model[0].weight]["exp_avg"], want, rtol=1e-5, atol=1e-8)


CLOSURES = [(maker, recipe) for maker in MAKERS for recipe in (SRSTE(decay=0.1), ASP(start=3))]
CLOSURES.append(("masked_adamw", STEP(t_min=2, t_max=4)))


@pytest.mark.parametrize(("maker", "recipe"), CLOSURES, ids=lambda x: getattr(x, "name", x))
@pytest.mark.parametrize("keyword", [True, False])
def test_lightning_closure(maker, recipe, keyword):
    """zero_grad and backward run inside the closure, after the pre-hooks."""
    model, _, optimizer = start(recipe, maker)
    losses = []
    for batch in batches(10, F32):

        def closure(batch=batch):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure=closure) if keyword else optimizer.step(closure))
    want, _, _ = run(recipe, F32, batches(10, F32), make=MAKERS[maker])
    assert all(torch.is_tensor(loss) for loss in losses)
    assert distance(snapshot(model), snapshot(want)) == 0.0


def test_two_masked_optimizers_switch_together():
    """Option I over the weights of both, and no step of one in another phase than that of the other."""
    recipe, data = STEP(t_min=2, t_max=6, threshold=1e-30), batches(12)
    model = mlp()
    handle = nm.sparsify_(model, recipe)
    first, second = handle.attach(MaskedAdamW(model[:2].parameters(), **KEYWORDS), MaskedAdamW(model[2:].parameters(), **KEYWORDS))
    for batch in data:
        model.zero_grad()
        loss_of(model, batch).backward()
        first.step()
        second.step()
    want, other, _ = run(recipe, data=data)
    assert handle.state["switch_step"] == other.state["switch_step"] == 7
    assert distance(snapshot(model), snapshot(want)) == 0.0
    got, expected = handle.metrics(), other.metrics()
    assert got.keys() == expected.keys()
    for key in got:
        assert got[key].item() == pytest.approx(expected[key].item(), rel=1e-12)
    assert "nm_recipe" not in first.param_groups[0] and "nm_recipe" in second.param_groups[0]


@pytest.mark.parametrize("maker", MAKERS)
def test_frozen_layers(maker):
    """A frozen layer stays as it is, is used masked, does not count, and joins in when it is unfrozen."""
    model = mlp()
    model[0].weight.requires_grad_(False)
    model, handle, optimizer = running.start(SRSTE(decay=0.1), model=model, make=MAKERS[maker])
    frozen = model[0].weight.detach().clone()
    for t, batch in enumerate(batches(6)):
        if t == 3:
            assert torch.equal(model[0].weight, frozen)
            model[0].weight.requires_grad_(True)
        before = model[2].weight.detach().clone(), model[0].weight.detach().clone()
        step(model, optimizer, batch)
        layers = [2] if t < 3 else [2, 0]
        flips = sum(int((top_n(model[i].weight.detach(), 2, 4) ^ top_n(w, 2, 4)).sum()) for i, w in zip((2, 0), before, strict=True))
        assert handle.metrics()["density"].item() == 0.5
        assert handle.metrics()["flip_rate"].item() == flips / sum(model[i].weight.numel() for i in layers)
    assert not torch.equal(model[0].weight, frozen)


def test_one_fused_call_per_group_and_kind_and_one_prune_per_layer_and_step(monkeypatch):
    """The optimizer's pass masks, decays and counts; nothing else masks but the one copy of each layer."""
    calls, decide = Counter(), dispatch.decide
    # nothing lasts, so every call decides
    monkeypatch.setattr(dispatch, "decide", lambda op, args: (calls.update([op]), (decide(op, args)[0], False))[1])
    model = mlp()
    handle = nm.sparsify_(model, SRSTE(decay=0.1))
    optimizer = handle.attach(MaskedAdamW([{"params": model[:2].parameters()}, {"params": model[2:].parameters(), "lr": 1e-3}]))
    copies = []
    for t, batch in enumerate(batches(5)):
        calls.clear()
        optimizer.zero_grad()
        (loss_of(model, batch) + loss_of(model, batch)).backward()
        assert calls == ({"nm_prune": 2} if t == 0 else {})
        optimizer.step()
        handle.metrics()
        for name, layer in handle.layers.items():
            used = layer.effective_weight()
            w = model.get_parameter(f"{name}.weight").detach()
            assert torch.equal(used, w * top_n(w, 2, 4))
            copies.append(used.data_ptr())
        assert calls == {"nm_masked_adamw_": 4, "nm_prune": 4 if t == 0 else 2}
    assert len(set(copies)) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recipe", [nm.recipes.FST("2:4", end=None, decay=0.5, seed=1), nm.recipes.SRSTE("2:4", decay=0.5)])
def test_figures_of_16_bit_weights_are_not_summed_in_16_bits(dtype, recipe):
    """A row of them has more digits than 16 bits, and in fp16 a sum that is too large for it."""
    layer = torch.nn.Linear(4096, 8, bias=False, dtype=dtype)
    torch.nn.init.uniform_(layer.weight, 30.0, 90.0)
    model = torch.nn.Sequential(layer)
    handle = nm.sparsify_(model, recipe, filter_fn=lambda module, name: isinstance(module, torch.nn.Linear))
    optimizer = handle.attach(torch.optim.SGD(model.parameters(), lr=0.0))
    swapped = model[0]
    swapped.weight.grad = torch.rand_like(swapped.weight) + 1.0
    pruned = ~swapped.kept()
    w, g = (x.detach().double()[pruned].sum().item() for x in (swapped.weight, swapped.weight.grad))
    optimizer.step()
    assert handle.metrics()["decay_ratio"].item() == pytest.approx(0.5 * w / g, rel=1e-6)
