"""FST: its mask against all patterns of a tile, when it is renewed, the decay by the held mask, both endings, and what it refuses."""

import itertools

import pytest
import torch
from torch import nn

import nmkernels as nm
from nmkernels.pattern import ShapeError
from nmkernels.recipes import FST, STEP
from python_tests.for_each import for_each
from python_tests.nn.test_effective import Calls
from python_tests.recipes.loop import batches
from python_tests.recipes.loop_effective import transposable
from python_tests.recipes.training import F32, run, start, step, train

# ---- the mask


def test_mask_is_searched_every_k_applied_steps():
    model, handle, optimizer = start(FST(every=4, end=None), F32)
    held, rates, searches = [model[0].nm_mask.clone()], [], []
    for batch in batches(9, F32):
        with Calls() as seen:
            step(model, optimizer, batch)
        held.append(model[0].nm_mask.clone())
        rates.append(handle.metrics()["flip_rate"].item())
        searches.append(seen.names.count("transposable_mask"))
    assert searches == [0, 0, 0, 2, 0, 0, 0, 2, 0], "one search per layer"
    assert [not torch.equal(a, b) for a, b in itertools.pairwise(held)] == [r > 0 for r in rates] == [n > 0 for n in searches]


# ---- the end


@for_each("pattern", ["2:4", "1:4"])
def test_without_a_dense_end_both_orientations_compress(pattern):
    """By the mask that training used last."""
    _, handle, _ = run(FST(pattern, every=7, end=None), F32, batches(10, F32))
    want = [layer.weight.detach() * layer.nm_mask for layer in handle.layers.values()]
    handle.finish()
    for layer, w in zip(handle.layers.values(), want, strict=True):
        assert torch.equal(layer.weight, w)
        for side in (w, w.t().contiguous()):
            assert torch.equal(nm.ops.compress(side, pattern).dense(), side)


# ---- layers and errors


def test_outputs_that_m_does_not_divide_are_skipped_and_reported():
    model = nn.Sequential(nn.Linear(32, 18), nn.Linear(18, 32), nn.Linear(32, 32))
    for recipe in (FST(end=None), STEP("2:4", 20, inner="fst(end=None)")):
        handle = nm.sparsify_(model, recipe)
        assert list(handle.layers) == ["2"]
        assert "out_features=18 is not a multiple of M=4, which a transposable mask needs" in str(handle.report)
        handle.remove()
    with pytest.raises(ShapeError, match=r"layer '0'.*out_features=18"):
        nm.sparsify_(model, FST(end=None), filter_fn=lambda module, name: name == "0")


def test_inside_step():
    """After STEP's switch: held masks with a frozen second moment."""
    recipe = STEP("2:4", 20, switch="fixed", start=5, inner="fst(end=None, every=4, mvue=None)")
    model, _, optimizer = run(recipe, F32, batches(5, F32))
    v, held = optimizer.state[model[0].weight]["exp_avg_sq"].clone(), model[0].nm_mask.clone()
    assert torch.equal(held, transposable(model[0].weight.detach(), 2, 4))
    train(model, optimizer, batches(3, F32))
    assert torch.equal(model[0].nm_mask, held) and torch.equal(optimizer.state[model[0].weight]["exp_avg_sq"], v)
