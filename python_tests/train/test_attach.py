"""How recipes live in real optimizers: scalers, closures, accumulation, schedulers, several optimizers."""

from functools import partial

import pytest
import torch

import nmkernels as nm
from nmkernels.optim import MaskedAdamW
from nmkernels.recipes import SRSTE
from python_tests.recipes import training
from python_tests.recipes.loop import Adam, batches, loss_of, mlp, top_n
from python_tests.recipes.training import step

F32 = torch.float32
KEYWORDS = Adam().keywords
MAKERS = {"masked_adamw": MaskedAdamW, "adamw": torch.optim.AdamW, "fused_adamw": partial(torch.optim.AdamW, fused=True)}


def start(recipe, maker):
    return training.start(recipe, F32, make=MAKERS[maker])


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


@pytest.mark.parametrize("maker", ["masked_adamw", "fused_adamw"])
def test_decay_scaled_beyond_the_range_of_fp16_leaves_no_nan(maker):
    model = mlp().half()
    _, optimizer = training.start(SRSTE(decay=0.5), model=model, make=MAKERS[maker])[1:]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)
    x = torch.randn(8, model[0].weight.shape[1]).half()
    scaler.scale(model(x).float().square().mean() * 1e-4).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    before = model[0].weight.detach().clone()
    scaler.step(optimizer)
    assert all(p.isfinite().all() for p in model.parameters()) and not torch.equal(model[0].weight, before)


@pytest.mark.parametrize("maker", ["masked_adamw", "fused_adamw"])
def test_a_skipped_step_leaves_the_metrics_of_the_one_before(maker):
    model, handle, optimizer = start(SRSTE(decay=0.1), maker)
    scaler, want = torch.amp.GradScaler("cpu", init_scale=256.0), {"density": 0.5, "decay_ratio": 0.0}
    for t, (x, y) in enumerate(batches(4, F32)):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, (x * (torch.inf if t in (0, 3) else 1.0), y))).backward()
        scaler.step(optimizer)
        scaler.update()
        got = training.metrics_of(handle)
        if t in (0, 3):
            assert got["flip_rate"] == 0 and want.items() <= got.items()
        want = {name: value for name, value in got.items() if name != "flip_rate"}
    assert got["decay_ratio"] > 0


@pytest.mark.parametrize("maker", MAKERS)
def test_frozen_layers(maker):
    """A frozen layer stays as it is, is used masked, does not count, and joins in when it is unfrozen."""
    model = mlp()
    model[0].weight.requires_grad_(False)
    model, handle, optimizer = training.start(SRSTE(decay=0.1), model=model, make=MAKERS[maker])
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
