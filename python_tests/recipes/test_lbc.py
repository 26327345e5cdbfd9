"""LBC: its schedule, and what happens to combinations, scores and weights on the way."""

import math

import pytest
import torch

import nmkernels as nm
from nmkernels.recipes import LBC
from python_tests.recipes.loop import batches, snapshot
from python_tests.recipes.running import F32, start, step, train

DATA = batches(20, torch.float32)


def test_schedule_is_the_equation():
    for pattern in ["2:4", "1:4", "1:16", "2:8", "2:16"]:
        for exponent in [1, 3, 4, 0.5]:
            for begin, end in [(0, 60), (7, 50)]:
                recipe = LBC(pattern, start=begin, end=end, exponent=exponent)
                count = math.comb(recipe.pattern.m, recipe.pattern.n)
                for t in range(end + 5):
                    x = min(max((t - begin) / (end - begin), 0.0), 1.0)
                    assert recipe.remaining(t) == 1 + math.ceil((count - 1) * (1 - x) ** exponent - 1e-9)
                assert recipe.remaining(begin) == count and recipe.remaining(end) == 1 and recipe.remaining(end - 1) > 1


def test_begin_and_end_as_shares():
    assert LBC("2:4", total_steps=120).stages[-1][0] == 60 == LBC("2:4", start=0, end=60).stages[-1][0]


def test_combinations_go_and_stay_away():
    model, handle, optimizer = start(LBC("2:4", start=2, end=14), F32)
    layer, seen = model[0], []
    for t, batch in enumerate(DATA):
        alive = layer.nm_alive.clone()
        assert (alive.sum(1) == handle.recipe.remaining(t)).all() and handle.metrics().get("combinations", 6) == alive[0].sum()
        assert not seen or (alive <= seen[-1]).all()
        seen.append(alive)
        step(model, optimizer, batch)
    assert seen[0].all() and (seen[-1].sum(1) == 1).all()


def test_training_begins_dense_and_thins_out():
    model, handle, optimizer = start(LBC("2:4", start=2, end=14), F32)
    assert torch.equal(model[0].effective_weight(), model[0].weight.detach())
    densities, flips = [], []
    for batch in DATA:
        step(model, optimizer, batch)
        figures = handle.metrics()
        densities.append(figures["density"].item())
        flips.append(figures["flip_rate"].item())
    assert densities[0] == 1.0 and densities == sorted(densities, reverse=True) and densities[13:] == [0.5] * 7
    drops = [a - b for a, b in zip([1.0, *densities], densities, strict=False)]
    assert flips == pytest.approx(drops)


def test_finishing_early_takes_the_best_that_remains():
    model, handle, optimizer = start(LBC("1:4", start=0, end=18), F32)
    for batch in DATA[:9]:
        step(model, optimizer, batch)
    best = model[0].nm_scores.detach().masked_fill(~model[0].nm_alive, -math.inf).argmax(1)
    with pytest.warns(UserWarning, match="still has 2 combinations"):
        handle.finish()
    assert torch.equal((model[0].weight != 0).reshape(-1, 4).int().argmax(1), best)


def test_the_gradient_rule_does_not_matter_to_what_the_union_computes():
    ends = []
    for grad in ("chain", "ste"):
        model, handle, optimizer = start(LBC("2:4", start=0, end=14, gradient=grad), F32)
        train(model, optimizer, DATA)
        handle.finish()
        ends.append(snapshot(model))
    assert all(torch.equal(ends[0][k], ends[1][k]) for k in ends[0])


def test_top_n_is_sparse_from_the_first_step():
    model, _, optimizer = start(LBC("2:8", start=0, end=14, forward="top_n"), F32)
    for batch in DATA:
        assert nm.ops.is_nm(model[0].effective_weight(), "2:8")
        step(model, optimizer, batch)


def test_a_single_combination_is_the_whole_group():
    for pattern in ["4:4", "1:1"]:
        model, handle, optimizer = start(LBC(pattern, start=0, end=4), F32)
        step(model, optimizer, DATA[0])
        assert handle.metrics()["combinations"] == 1 and handle.metrics()["density"] == 1.0
        handle.finish()
