"""The search for λ: its rates against masks counted by hand, what it leaves behind, what it chooses, and the way out when nothing fits."""

import copy

import pytest
import torch
from torch import nn

import nmkernels as nm
from nmkernels.pattern import RecipeError
from nmkernels.recipes import FST, SRSTE, STEP, Dense, search_decay
from python_tests.recipes.loop import SPARSE, Adam, batches, distance, loss_of, mlp, snapshot
from python_tests.recipes.loop_fst import transposable
from python_tests.recipes.running import step

F32 = torch.float32
DATA = batches(12, F32)
RECIPE = FST("2:4", total_steps=600, mvue=None, every=3, decay=0.7)
ANY = (0.0, 100.0)


def make(params):
    return torch.optim.AdamW(params, **Adam().keywords)


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
    found = search_decay(RECIPE, mlp(F32), make, step, DATA, grid=(0.0, 0.5), feasible=ANY, stride=stride)
    model = mlp(F32)
    assert found.dense_rate == pytest.approx(counted(model, make(model.parameters()), 6, lambda w: transposable(w, 2, 4), stride))
    for trial in found.trials:
        model = mlp(F32)
        handle = nm.sparsify_(model, FST(mvue=None, every=3, decay=trial.decay, end=None))
        optimizer = handle.attach(make(model.parameters()))
        assert trial.flip_rate == pytest.approx(counted(model, optimizer, 6, lambda w: transposable(w, 2, 4), stride))
        assert trial.ratio == trial.flip_rate / found.dense_rate


def test_a_plain_mask_is_counted_for_a_plain_recipe():
    found = search_decay(SRSTE("1:4"), mlp(F32), make, step, DATA, grid=(0.1,), feasible=ANY, measure=1.0)
    model = mlp(F32)
    assert found.dense_rate == pytest.approx(counted(model, make(model.parameters()), 0, lambda w: nm.ops.mask(w, "1:4")))
    assert found.recipe == SRSTE("1:4", decay=0.1)


def test_decay_lowers_the_flip_rate():
    """The method's premise, on a run long enough to see it."""
    found = search_decay(RECIPE, mlp(F32), make, step, batches(150, F32), grid=(0.0, 3e-3, 3e-2), feasible=ANY)
    rates = [t.flip_rate for t in found.trials]
    assert rates[0] > 1.5 * rates[2] and rates[1] > rates[2]


@pytest.mark.slow
def test_the_middle_of_the_interval_is_chosen_and_only_lambda_changes():
    data = batches(60, F32)
    everything = search_decay(RECIPE, mlp(F32), make, step, data, grid=(0.0, 1e-3, 3e-2), feasible=ANY)
    middle = everything.trials[1].ratio
    found = search_decay(RECIPE, mlp(F32), make, step, data, grid=(0.0, 1e-3, 3e-2), feasible=(middle - 0.01, middle + 0.01))
    assert found.decay == 1e-3 and found.trials == everything.trials
    assert found.recipe == FST("2:4", total_steps=600, mvue=None, every=3, decay=1e-3)
    text = str(found)
    assert "chosen: decay=0.001" in text and len(text.splitlines()) == 7


class Noisy(nn.Module):
    """The usual net with dropout and a buffer that counts the passes."""

    def __init__(self):
        super().__init__()
        self.net, self.drop = mlp(F32), nn.Dropout(0.2)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        self.passes += 1
        return self.net(self.drop(x))


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_afterwards_as_it_was(fails):
    model = Noisy()
    loss_of(model, DATA[0]).backward()
    state, grads = copy.deepcopy(model.state_dict()), [p.grad for p in model.parameters()]
    params, rng, calls = list(model.parameters()), torch.get_rng_state(), []

    def once(model, optimizer, batch):
        calls.append(model.training)
        if fails and len(calls) > 20:
            raise ValueError("the data broke")
        step(model, optimizer, batch)

    if fails:
        with pytest.raises(ValueError, match="the data broke"):
            search_decay(RECIPE, model, make, once, DATA, grid=(0.1,), feasible=ANY)
    else:
        found = search_decay(RECIPE, model, make, once, DATA, grid=(0.1, 0.1), feasible=ANY)
        assert found.trials[0] == found.trials[1], "every run sees the same random numbers"
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert all(p is q and p.grad is g for p, q, g in zip(model.parameters(), params, grads, strict=True))
    assert torch.equal(torch.get_rng_state(), rng)
    assert type(model.net[0]) is nn.Linear
    nm.sparsify_(model, RECIPE)  # and it can be trained


def test_progress_tells_every_run():
    lines = []
    search_decay(RECIPE, mlp(F32), make, step, DATA, grid=(0.1, 0.2), feasible=ANY, progress=lines.append)
    assert len(lines) == 3 and lines[0].startswith("dense: flip rate") and lines[2].startswith("decay=0.2: flip rate")


@pytest.mark.parametrize(
    ("feasible", "match"),
    [((0.0, 1e-9), "too often. Extend the grid upwards"), ((50.0, 60.0), "too seldom. Extend the grid downwards")],
)
def test_no_feasible_decay_raises_with_all_figures(feasible, match):
    with pytest.raises(RecipeError, match=match) as error:
        search_decay(RECIPE, mlp(F32), make, step, DATA, grid=(0.1, 0.2), feasible=feasible)
    assert all(text in str(error.value) for text in ("dense", "0.1", "0.2", "feasible:"))


@pytest.mark.slow
def test_between_two_points_of_the_grid():
    found = search_decay(RECIPE, mlp(F32), make, step, batches(80, F32), grid=(0.0, 0.1), feasible=ANY)
    high, low = (t.ratio for t in found.trials)
    assert high > low
    gap = (low + 0.4 * (high - low), low + 0.6 * (high - low))
    with pytest.raises(RecipeError, match="Refine the grid"):
        search_decay(RECIPE, mlp(F32), make, step, batches(80, F32), grid=(0.0, 0.1), feasible=gap)


def test_a_diverged_run_is_not_feasible():
    def blow_up(model, optimizer, batch):
        step(model, optimizer, batch)
        if isinstance(model[0], nm.SparseLinear) and model[0].transform is not None:
            with torch.no_grad():
                model[0].weight.fill_(torch.nan)

    with pytest.raises(RecipeError, match="nan"):
        search_decay(RECIPE, mlp(F32), make, blow_up, DATA, grid=(0.1,), feasible=ANY)


def test_nothing_to_compare_with():
    with pytest.raises(RecipeError, match=r"flip rate of the dense run is 0\.0"):
        search_decay(RECIPE, mlp(F32), lambda p: torch.optim.SGD(p, lr=0.0), step, DATA, grid=(0.1,))


@pytest.mark.parametrize(
    ("recipe", "config", "match"),
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
        search_decay(recipe, model, make, step, DATA, **config)
    assert distance(snapshot(model), before) == 0.0
