"""FST: its mask against all patterns of a tile, when it is renewed, the decay by the held mask, both endings, and what it refuses."""

import itertools

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import nmkernels as nm
from nmkernels.optim import MaskedAdamW
from nmkernels.pattern import RecipeError, ShapeError
from nmkernels.recipes import FST, SRSTE, STEP, Dense
from nmkernels.recipes.base import Span
from nmkernels.recipes.compose import deployed
from nmkernels.recipes.methods.fst import TransposableMask
from python_tests.recipes.loop import Adam, batches, distance, loss_of, mlp, snapshot
from python_tests.recipes.loop_fst import fst, tile_patterns, transposable

F32, F64 = torch.float32, torch.float64
DATA = batches(20)
MAKERS = {
    "masked_adamw": lambda p: MaskedAdamW(p, **Adam().keywords),
    "adamw": lambda p: torch.optim.AdamW(p, **Adam().keywords),
    "fused_adamw": lambda p: torch.optim.AdamW(p, fused=True, **Adam().keywords),
}


class Calls(TorchDispatchMode):
    """Counts the calls of each of the package's operations."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name().startswith("nmkernels::"):
            self.names.append(func.name().removeprefix("nmkernels::nm_"))
        return func(*args, **(kwargs or {}))


def start(recipe, dtype=F64, maker="masked_adamw"):
    model = mlp(dtype)
    handle = nm.sparsify_(model, recipe)
    return model, handle, handle.attach(MAKERS[maker](model.parameters()))


def go(model, optimizer, data):
    for batch in data:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()


# ---- the mask


def test_there_are_90_patterns_and_the_mask_is_the_best_of_them():
    assert len(tile_patterns(2, 4)) == 90 and len(tile_patterns(1, 4)) == 24
    w = torch.randn(32, 16)
    held = TransposableMask(nm.Pattern("2:4")).renew(w, [None], torch.Generator())["nm_mask"]
    assert torch.equal(held, transposable(w, 2, 4))
    rows, cols = held.reshape(32, 4, 4).sum(-1), held.t().reshape(16, 8, 4).sum(-1)
    assert rows.eq(2).all() and cols.eq(2).all()


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("refresh", [1, 5, 40])
def test_equals_independent_loop(maker, refresh):
    model, _, optimizer = start(FST("2:4", 20, every=refresh, decay=0.2, end=16, mvue=None), maker=maker)
    go(model, optimizer, DATA)
    want = fst(snapshot(mlp()), DATA, 2, 4, refresh, 0.2, 16)
    assert distance(snapshot(model), want) < 1e-10
    assert distance(fst(snapshot(mlp()), DATA, 2, 4, refresh + 2, 0.2, 16), want) > (1e-3 if refresh < 19 else -1)


def test_the_mask_is_searched_every_k_applied_steps_and_held_in_between():
    model, handle, optimizer = start(FST(every=4, end=None), F32)
    held, rates = [], []
    for batch in batches(9, F32):
        held.append(model[0].nm_mask.clone())
        with Calls() as seen:
            go(model, optimizer, [batch])
        rates.append(handle.metrics()["flip_rate"].item())
        assert seen.names.count("transposable_mask") == (2 if len(held) % 4 == 0 else 0), "one search per layer"
    changed = [not torch.equal(a, b) for a, b in itertools.pairwise(held)]
    assert changed == [False, False, False, True, False, False, False, True]
    assert [r > 0 for r in rates] == [False, False, False, True, False, False, False, True, False]


def test_the_mask_follows_weights_initialised_after_sparsify():
    model = mlp()
    handle = nm.sparsify_(model, FST(end=None))
    nn.init.normal_(model[0].weight)
    handle.attach(MAKERS["adamw"](model.parameters()))
    assert torch.equal(model[0].nm_mask, transposable(model[0].weight.detach(), 2, 4))
    assert not any("nm_" in key for key in model.state_dict()), "masks are no part of the model's state"


def test_values_follow_the_weight_under_a_held_mask():
    model, _, optimizer = start(FST(end=None))
    go(model, optimizer, DATA[:3])
    layer = model[0]
    assert torch.equal(layer.effective_weight(), layer.weight * layer.nm_mask)


def test_forward_and_backward_use_the_same_mask():
    model, _, _ = start(FST(end=None, mvue=None))
    layer, x, g = model[0], torch.randn(5, 16, dtype=F64, requires_grad=True), torch.randn(5, 32, dtype=F64)
    y = layer(x)
    y.backward(g)
    used = layer.weight.detach() * layer.nm_mask
    torch.testing.assert_close(y, x @ used.t() + layer.bias, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(x.grad, g @ used, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer.weight.grad, g.t() @ x.detach(), rtol=1e-12, atol=1e-12)


def test_decay_comes_after_unscaling_and_clipping_and_by_the_held_mask():
    model, _, optimizer = start(FST(end=None, mvue=None, decay=1e-3), F32, "adamw")
    go(model, optimizer, batches(15, F32))
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


def test_approximate_exact_and_no_estimate_differ_in_the_weight_gradient_only():
    grads = {}
    for mvue in (None, "exact", "approx"):
        model, _, _ = start(FST(end=None, mvue=mvue, seed=0))
        loss_of(model, DATA[0]).backward()
        grads[mvue] = {k: p.grad for k, p in model.named_parameters()}
    for mvue in ("exact", "approx"):
        assert distance({"b": grads[mvue]["0.bias"]}, {"b": grads[None]["0.bias"]}) < 1e-12
        assert distance({"w": grads[mvue]["0.weight"]}, {"w": grads[None]["0.weight"]}) > 1e-6


# ---- transposable against plain masks


def test_transposable_srste_differs_from_srste_only_in_its_mask(monkeypatch):
    ends = {}
    for name, recipe in (("plain", SRSTE(decay=0.1)), ("transposable", FST(mvue=None, end=None, every=1, decay=0.1))):
        model, _, optimizer = start(recipe)
        go(model, optimizer, DATA)
        ends[name] = snapshot(model)
    assert distance(ends["plain"], ends["transposable"]) > 1e-2
    monkeypatch.setattr(TransposableMask, "renew", lambda self, w, *_: {"nm_mask": nm.ops.mask(w, self.pattern)})
    model, _, optimizer = start(FST(mvue=None, end=None, every=1, decay=0.1))
    go(model, optimizer, DATA)
    assert distance(snapshot(model), ends["plain"]) < 1e-12


# ---- packed products


def test_packed_products_are_those_of_the_dense_layout():
    ends = []
    for packed in (False, True):
        model, _, optimizer = start(FST(end=None, packed=packed, seed=0), F32)
        with Calls() as seen:
            go(model, optimizer, batches(3, F32))
        ends.append(snapshot(model))
        assert seen.names.count("linear") == seen.names.count("pack") == (6 if packed else 0)
        assert seen.names.count("linear_dgrad") == (3 if packed else 0), "the first layer's input wants no gradient"
    assert distance(*ends) < 1e-5


def test_packed_once_per_step_also_with_accumulation():
    model, _, optimizer = start(FST(end=None, packed=True), F32)
    go(model, optimizer, batches(1, F32))
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
        go(model, optimizer, [batch])
    assert phases == [1] * 15 + [0] * 5 and handle.recipe.final == "dense"
    assert handle.metrics()["density"].item() == 1.0 and handle.metrics()["decay_ratio"].item() == 0.0
    assert "held" not in handle.state
    handle.finish()
    assert type(model[0]) is nn.Linear and not nm.ops.is_nm(model[0].weight.detach(), "2:4")


def test_finishing_before_the_dense_end_is_told():
    model, handle, optimizer = start(FST("2:4", 20), F32)
    go(model, optimizer, batches(3, F32))
    with pytest.warns(UserWarning, match="fst has not come to its dense end, so the weights become dense"):
        handle.finish()


@pytest.mark.parametrize("pattern", ["2:4", "1:4"])
def test_without_a_dense_end_both_orientations_compress(pattern):
    model, handle, optimizer = start(FST(pattern, every=7, end=None), F32)
    go(model, optimizer, batches(10, F32))
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


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({}, "total_steps is needed"),
        ({"every": 0}, "every=0"),
        ({"every": 2.5}, r"every=2\.5"),
        ({"decay": -1.0}, "decay"),
        ({"total_steps": 10, "end": 0}, "leave none"),
        ({"end": None, "mvue": "best"}, "mvue='best'"),
        ({"end": None, "mvue": "approx", "mvue_pattern": "1:4"}, "approx"),
        ({"end": None, "packed": "always"}, "packed='always' is unknown"),
        ({"end": None, "seed": 1.5}, r"seed=1\.5"),
    ],
)
def test_wrong_configuration(config, match):
    with pytest.raises(RecipeError, match=match):
        FST(**config)


def test_profile():
    assert FST("2:4", 60).profile(60) == [Span(50, 0.5, 0.5, 0.5), Span(10)]
    assert FST("1:4", end=None, mvue=None).profile(7) == [Span(7, 0.25, 0.25, 1.0)]
    assert deployed(FST("2:4", 60)) == deployed(Dense())


def test_inside_step():
    """After STEP's switch: held masks with a frozen second moment, and the shapes that FST can do with."""
    recipe = STEP("2:4", 20, switch="fixed", start=5, inner="fst(end=None, every=4, mvue=None)")
    model, handle, optimizer = start(recipe, F32)
    go(model, optimizer, batches(5, F32))
    v = optimizer.state[model[0].weight]["exp_avg_sq"].clone()
    held = model[0].nm_mask.clone()
    assert torch.equal(held, transposable(model[0].weight.detach(), 2, 4))
    go(model, optimizer, batches(3, F32))
    assert torch.equal(model[0].nm_mask, held) and torch.equal(optimizer.state[model[0].weight]["exp_avg_sq"], v)
    go(model, optimizer, batches(12, F32))
    handle.finish()
    assert all(nm.ops.is_nm(layer.weight.detach().t().contiguous(), "2:4") for layer in handle.layers.values())
    assert "out_features=18" in str(nm.sparsify_(nn.Sequential(nn.Linear(32, 18), nn.Linear(18, 32), nn.Linear(32, 32)), recipe).report)
