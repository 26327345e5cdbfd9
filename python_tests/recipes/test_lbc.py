"""LBC: its schedule, and what happens to combinations, scores and weights on the way."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from nmkernels.nn.weight import is_learned
from nmkernels.pattern import Pattern
from nmkernels.recipes import LBC, LayerWise
from python_tests.for_each import for_each
from python_tests.recipes.loop import batches
from python_tests.recipes.training import F32, run, start, step

DATA = batches(20, F32)


@for_each("pattern, exponent, begin, end", itertools.product(["2:4", "1:16", "2:8"], [1, 3, 4, 0.5], [0, 7], [50]))
def test_schedule_is_the_equation(pattern, exponent, begin, end):
    recipe = LBC(pattern, start=begin, end=end, exponent=exponent)
    count = math.comb(recipe.pattern.m, recipe.pattern.n)
    for t in range(end + 5):
        x = min(max((t - begin) / (end - begin), 0.0), 1.0)
        assert recipe.remaining(t) == 1 + math.ceil((count - 1) * (1 - x) ** exponent - 1e-9)
    assert recipe.remaining(begin) == count and recipe.remaining(end) == 1 and recipe.remaining(end - 1) > 1
    assert LBC("2:4", total_steps=2 * end).stages[-1][0] == end


def test_combinations_are_removed_for_good():
    model, handle, optimizer = start(LBC("2:4", start=2, end=14), F32)
    layer, alive, density = model[0], [], [1.0]
    assert torch.equal(layer.effective_weight(), layer.weight.detach())
    for t, batch in enumerate(DATA):
        alive.append(layer.nm_alive.clone())
        assert (alive[-1].sum(1) == handle.recipe.remaining(t)).all() and (alive[-1] <= alive[max(t - 1, 0)]).all()
        assert handle.metrics().get("combinations", 6) == alive[-1][0].sum()
        step(model, optimizer, batch)
        density.append(handle.metrics()["density"].item())
        assert handle.metrics()["flip_rate"].item() == pytest.approx(density[-2] - density[-1])
    assert alive[0].all() and (alive[-1].sum(1) == 1).all()
    assert density[1] == 1.0 and density == sorted(density, reverse=True) and density[14:] == [0.5] * 7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_are_not_rounded_with_the_model(dtype):
    """In bfloat16 a step of AdamW at 1e-4 is less than half a unit in the last place of 1/3, and no score would ever move."""
    model, _, optimizer = start(LBC("2:4", total_steps=20), F32)
    step(model, optimizer, DATA[0])
    scores, grad = model[0].nm_scores.detach().clone(), model[0].nm_scores.grad.clone()
    model.to(dtype)
    assert model[0].weight.dtype == model[0].weight.grad.dtype == dtype
    assert torch.equal(model[0].nm_scores, scores) and torch.equal(model[0].nm_scores.grad, grad) and is_learned(model[0].nm_scores)
    step(model, optimizer, tuple(t.to(dtype) for t in DATA[1]))
    assert (model[0].nm_scores != scores).double().mean() > 0.9


def test_a_layer_of_another_pattern_keeps_as_large_a_part_of_its_combinations():
    _, handle, _ = start(LayerWise("2:4", 100, rule=None, given={"0": "1:4"}, inner="lbc"))
    for inner in ("2:8", "1:8", "3:8", "2:4"):
        transform = replace(LBC("2:4", 100).stages[0][1].transform, pattern=Pattern(inner))
        scores = transform.start(torch.randn(8, 16))["nm_scores"] + torch.rand(1)
        count, alive = scores.shape[1], torch.ones_like(scores, dtype=torch.bool)
        kept = [
            int(transform.renew(scores, [scores, alive, torch.tensor(float(left))], None)["nm_alive"][0].sum()) for left in range(6, 0, -1)
        ]
        assert kept == [1 + math.ceil((count - 1) * (left - 1) / 5) for left in range(6, 0, -1)] and kept[0] == count
    assert [layer.nm_alive.shape[1] for layer in handle.layers.values()] == [4, 6] and all(
        layer.nm_alive.all() for layer in handle.layers.values()
    )


def test_finishing_early_takes_the_best_that_remains():
    model, handle, _ = run(LBC("1:4", start=0, end=18), F32, DATA[:9])
    best = model[0].nm_scores.detach().masked_fill(~model[0].nm_alive, -math.inf).argmax(1)
    with pytest.warns(UserWarning, match="still has 2 combinations"):
        handle.finish()
    assert torch.equal((model[0].weight != 0).reshape(-1, 4).int().argmax(1), best)


@for_each("pattern", ["4:4", "1:1"])
def test_a_single_combination_is_the_whole_group(pattern):
    _, handle, _ = run(LBC(pattern, start=0, end=4), F32, DATA[:1])
    assert handle.metrics()["combinations"] == 1 and handle.metrics()["density"] == 1.0
    handle.finish()
