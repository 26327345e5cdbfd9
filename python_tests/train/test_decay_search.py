"""The search for λ: its rates against masks counted by hand, what it leaves behind, what it chooses, and the way out when nothing fits."""

import contextlib
import copy

import pytest
import torch
from torch import nn

import nmkernels as nm
from nmkernels.pattern import RecipeError
from nmkernels.recipes import FST, SRSTE, STEP, Dense, search_decay
from python_tests.for_each import for_each
from python_tests.recipes.loop import SPARSE, Adam, batches, distance, loss_of, mlp, snapshot
from python_tests.recipes.loop_effective import transposable
from python_tests.recipes.training import F32, start, step

DATA = batches(12, F32)
RECIPE = FST("2:4", total_steps=600, mvue=None, every=3, decay=0.7)


def make(params):
    return torch.optim.AdamW(params, **Adam().keywords)


def search(recipe=RECIPE, model=None, make=make, step=step, data=DATA, grid=(0.1,), feasible=(0.0, 100.0), **config):
    return search_decay(recipe, mlp(F32) if model is None else model, make, step, data, grid=grid, feasible=feasible, **config)


def counted(model, optimizer, first, mask, stride=1):
    """The mean flip rate after ``first`` steps, by hand."""
    before, flips, total = None, [], sum(model.get_parameter(k).numel() for k in SPARSE)
    for t in range(len(DATA) + 1):
        if t >= first and (t - first) % stride == 0:
            now = [mask(model.get_parameter(k).detach()) for k in SPARSE]
            if before is not None:
                flips.append(sum(int((a ^ b).sum()) for a, b in zip(before, now, strict=True)) / total)
            before = now
        if t < len(DATA):
            step(model, optimizer, DATA[t])
    return sum(flips) / len(flips)


@pytest.mark.parametrize("stride", [1, 2])
def test_rates_are_those_counted_by_hand(stride):
    mask, lines = lambda w: transposable(w, 2, 4), []
    found = search(grid=(0.0, 0.5), stride=stride, progress=lines.append)
    model = mlp(F32)
    assert found.dense_rate == pytest.approx(counted(model, make(model.parameters()), 6, mask, stride))
    for trial in found.trials:
        model, _, optimizer = start(FST(mvue=None, every=3, decay=trial.decay, end=None), model=mlp(F32), make=torch.optim.AdamW)
        assert trial.flip_rate == pytest.approx(counted(model, optimizer, 6, mask, stride))
        assert trial.ratio == trial.flip_rate / found.dense_rate
    assert len(lines) == 3 and lines[0].startswith("dense: flip rate") and lines[2].startswith("decay=0.5: flip rate")
    model, plain = mlp(F32), search(SRSTE("1:4"), measure=1.0)
    assert plain.dense_rate == pytest.approx(counted(model, make(model.parameters()), 0, lambda w: nm.ops.mask(w, "1:4")))
    assert plain.recipe == SRSTE("1:4", decay=0.1)


@pytest.mark.slow
def test_middle_of_the_interval_is_chosen():
    data, grid = batches(60, F32), (0.0, 1e-3, 3e-2)
    everything = search(data=data, grid=grid)
    high, middle, low = (t.ratio for t in everything.trials)
    found = search(data=data, grid=grid, feasible=(middle - 0.01, middle + 0.01))
    assert high > middle > low and found.decay == 1e-3 and found.trials == everything.trials
    assert found.recipe == FST("2:4", total_steps=600, mvue=None, every=3, decay=1e-3)
    assert "chosen: decay=0.001" in str(found) and len(str(found).splitlines()) == 7
    with pytest.raises(RecipeError, match="Refine the grid"):
        search(data=data, grid=grid, feasible=(middle + 0.4 * (high - middle), middle + 0.6 * (high - middle)))


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_afterwards_as_it_was(fails):
    model, calls = nn.Sequential(nn.Dropout(0.2), nn.BatchNorm1d(16), *mlp(F32)), []
    loss_of(model, DATA[0]).backward()
    state, params, rng = copy.deepcopy(model.state_dict()), [(p, p.grad) for p in model.parameters()], torch.get_rng_state()

    def once(model, optimizer, batch):
        calls.append(model.training)
        if fails and len(calls) > 20:
            raise ValueError("the data broke")
        step(model, optimizer, batch)

    with pytest.raises(ValueError, match="the data broke") if fails else contextlib.nullcontext():
        first, second = search(model=model, step=once, grid=(0.1, 0.1)).trials
        assert first == second, "every run sees the same random numbers"
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert all(p is q and p.grad is g for p, (q, g) in zip(model.parameters(), params, strict=True))
    assert torch.equal(torch.get_rng_state(), rng) and type(model[2]) is nn.Linear
    nm.sparsify_(model, RECIPE)  # and it can be trained


@pytest.mark.parametrize(
    ("feasible", "match"),
    [((0.0, 1e-9), "too often. Extend the grid upwards"), ((50.0, 60.0), "too seldom. Extend the grid downwards")],
)
def test_no_feasible_decay_raises_with_all_figures(feasible, match):
    with pytest.raises(RecipeError, match=match) as error:
        search(grid=(0.1, 0.2), feasible=feasible)
    assert all(text in str(error.value) for text in ("dense", "0.1", "0.2", "feasible:"))


def test_a_diverged_run_is_not_feasible():
    def blow_up(model, optimizer, batch):
        step(model, optimizer, batch)
        if isinstance(model[0], nm.SparseLinear) and model[0].transform is not None:
            nn.init.constant_(model[0].weight, torch.nan)

    with pytest.raises(RecipeError, match="nan"):
        search(step=blow_up)


def test_nothing_to_compare_with():
    with pytest.raises(RecipeError, match=r"flip rate of the dense run is 0\.0"):
        search(make=lambda p: torch.optim.SGD(p, lr=0.0))


@for_each(
    "recipe, config, match",
    [
        (Dense(), {}, "Dense has no decay"),
        (STEP(t_min=1, t_max=2), {}, "begins with dense steps"),
        (RECIPE, {"grid": ()}, "grid"),
        (RECIPE, {"grid": (-1.0,)}, "grid"),
        (RECIPE, {"feasible": (1.0, 0.5)}, "feasible"),
        (RECIPE, {"measure": 0.0}, "measure"),
        (RECIPE, {"stride": 7}, "12 batches are too few"),
    ],
)
def test_wrong_arguments(recipe, config, match):
    model = mlp(F32)
    before = snapshot(model)
    with pytest.raises(RecipeError, match=match):
        search(recipe, model, **config)
    assert distance(snapshot(model), before) == 0.0
