"""FST: its mask against all patterns of a tile, when it is renewed, the decay by the held mask, both endings, and what it refuses."""

import itertools

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import nmkernels as nm
from nmkernels.pattern import ShapeError
from nmkernels.recipes import FST, SRSTE, STEP, Dense
from nmkernels.recipes.base import Span
from nmkernels.recipes.compose import deployed
from nmkernels.recipes.methods.fst import TransposableMask
from python_tests.recipes.loop import batches, distance, loss_of, mlp, snapshot
from python_tests.recipes.loop_fst import tile_patterns, transposable
from python_tests.recipes.running import F32, start, step, train


class Calls(TorchDispatchMode):
    """Counts the calls of each of the package's operations."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name().startswith("nmkernels::"):
            self.names.append(func.name().removeprefix("nmkernels::nm_"))
        return func(*args, **(kwargs or {}))


# ---- the mask


def test_there_are_90_patterns_and_the_mask_is_the_best_of_them():
    assert len(tile_patterns(2, 4)) == 90 and len(tile_patterns(1, 4)) == 24
    w = torch.randn(32, 16)
    held = TransposableMask(nm.Pattern("2:4")).renew(w, [None], torch.Generator())["nm_mask"]
    assert torch.equal(held, transposable(w, 2, 4))
    rows, cols = held.reshape(32, 4, 4).sum(-1), held.t().reshape(16, 8, 4).sum(-1)
    assert rows.eq(2).all() and cols.eq(2).all()


def test_the_mask_is_searched_every_k_applied_steps_and_held_in_between():
    model, handle, optimizer = start(FST(every=4, end=None), F32)
    held, rates = [], []
    for batch in batches(9, F32):
        held.append(model[0].nm_mask.clone())
        with Calls() as seen:
            step(model, optimizer, batch)
        rates.append(handle.metrics()["flip_rate"].item())
        assert seen.names.count("transposable_mask") == (2 if len(held) % 4 == 0 else 0), "one search per layer"
    changed = [not torch.equal(a, b) for a, b in itertools.pairwise(held)]
    assert changed == [False, False, False, True, False, False, False, True]
    assert [r > 0 for r in rates] == [False, False, False, True, False, False, False, True, False]


def test_the_mask_follows_weights_initialised_after_sparsify():
    model = mlp()
    handle = nm.sparsify_(model, FST(end=None))
    nn.init.normal_(model[0].weight)
    handle.attach(torch.optim.AdamW(model.parameters()))
    assert torch.equal(model[0].nm_mask, transposable(model[0].weight.detach(), 2, 4))
    assert not any("nm_" in key for key in model.state_dict()), "masks are no part of the model's state"


def test_decay_comes_after_unscaling_and_clipping_and_by_the_held_mask():
    model, _, optimizer = start(FST(end=None, mvue=None, decay=1e-3), F32, make=torch.optim.AdamW)
    train(model, optimizer, batches(15, F32))
    layer, seen = model[0], {}
    held, before = layer.nm_mask.clone(), layer.weight.detach().clone()
    assert not torch.equal(held, transposable(before, 2, 4)), "the weight has moved on"
    optimizer.zero_grad()
    (8.0 * loss_of(model, batches(1, F32)[0])).backward()
    for p in model.parameters():
        p.grad /= 8.0
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    clipped = layer.weight.grad.clone()
    optimizer.register_step_pre_hook(lambda o, *_: seen.update(g=layer.weight.grad.clone()))
    optimizer.step()
    torch.testing.assert_close(seen["g"], clipped + 1e-3 * ~held * before, rtol=0, atol=1e-9)


# ---- packed GEMMs


def test_packed_gemms_are_those_of_the_dense_layout():
    ends = []
    for packed in (False, True):
        model, _, optimizer = start(FST(end=None, packed=packed, seed=0), F32)
        with Calls() as seen:
            train(model, optimizer, batches(3, F32))
        ends.append(snapshot(model))
        assert seen.names.count("linear") == seen.names.count("pack") == (6 if packed else 0)
        assert seen.names.count("linear_dgrad") == (3 if packed else 0), "the first layer's input wants no gradient"
    assert distance(*ends) < 1e-5


def test_packed_once_per_step_also_with_accumulation():
    model, _, optimizer = start(FST(end=None, packed=True), F32)
    train(model, optimizer, batches(1, F32))
    with Calls() as seen:
        for batch in batches(4, F32):
            loss_of(model, batch).backward()
    assert seen.names.count("pack") == 2 and seen.names.count("linear") == 8


# ---- the end


def test_dense_end_trains_densely_and_leaves_a_dense_model():
    model, handle, optimizer = start(FST("2:4", 20, end=0.75, decay=0.1), F32)
    phases = []
    for batch in batches(20, F32):
        phases.append(handle.metrics()["phase"].item())
        step(model, optimizer, batch)
    assert phases == [1] * 15 + [0] * 5 and handle.recipe.final == "dense"
    assert handle.metrics()["density"].item() == 1.0 and handle.metrics()["decay_ratio"].item() == 0.0
    assert "held" not in handle.state
    handle.finish()
    assert type(model[0]) is nn.Linear and not nm.ops.is_nm(model[0].weight.detach(), "2:4")


@pytest.mark.parametrize("pattern", ["2:4", "1:4"])
def test_without_a_dense_end_both_orientations_compress(pattern):
    model, handle, optimizer = start(FST(pattern, every=7, end=None), F32)
    train(model, optimizer, batches(10, F32))
    masks = [layer.nm_mask.clone() for layer in handle.layers.values()]
    weights = [layer.weight.detach().clone() for layer in handle.layers.values()]
    handle.finish()
    for layer, mask, before in zip(handle.layers.values(), masks, weights, strict=True):
        w = layer.weight.detach()
        assert torch.equal(w, before * mask), "the mask that training used"
        for side in (w, w.t().contiguous()):
            assert torch.equal(nm.ops.compress(side, pattern).dense(), side)


# ---- layers and errors


def test_outputs_that_m_does_not_divide_are_skipped_and_reported():
    model = nn.Sequential(nn.Linear(32, 18), nn.Linear(18, 32), nn.Linear(32, 32))
    handle = nm.sparsify_(model, FST(end=None))
    assert list(handle.layers) == ["2"]
    assert "out_features=18 is not a multiple of M=4, which a transposable mask needs" in str(handle.report)
    handle.remove()
    with pytest.raises(ShapeError, match=r"layer '0'.*out_features=18"):
        nm.sparsify_(model, FST(end=None), filter_fn=lambda module, name: name == "0")
    assert list(nm.sparsify_(model, SRSTE()).layers) == ["0", "2"]


def test_profile():
    assert FST("2:4", 60).profile(60) == [Span(50, 0.5, 0.5, 0.5), Span(10)]
    assert FST("1:4", end=None, mvue=None).profile(7) == [Span(7, 0.25, 0.25, 1.0)]
    assert deployed(FST("2:4", 60)) == deployed(Dense())


def test_inside_step():
    """After STEP's switch: held masks with a frozen second moment, and the shapes that FST can do with."""
    recipe = STEP("2:4", 20, switch="fixed", start=5, inner="fst(end=None, every=4, mvue=None)")
    model, handle, optimizer = start(recipe, F32)
    train(model, optimizer, batches(5, F32))
    v = optimizer.state[model[0].weight]["exp_avg_sq"].clone()
    held = model[0].nm_mask.clone()
    assert torch.equal(held, transposable(model[0].weight.detach(), 2, 4))
    train(model, optimizer, batches(3, F32))
    assert torch.equal(model[0].nm_mask, held) and torch.equal(optimizer.state[model[0].weight]["exp_avg_sq"], v)
    train(model, optimizer, batches(12, F32))
    handle.finish()
    assert all(nm.ops.is_nm(layer.weight.detach().t().contiguous(), "2:4") for layer in handle.layers.values())
    assert "out_features=18" in str(nm.sparsify_(nn.Sequential(nn.Linear(32, 18), nn.Linear(18, 32), nn.Linear(32, 32)), recipe).report)
