"""The plan: the search for rates as a function of the rows, and what each stage asks for."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import pytest

from bench.accuracy import plan as planning
from bench.accuracy import tasks
from bench.accuracy.plan import best_rates, cost, foreseen, neighbour, pending, plan, search, shared_rate
from bench.accuracy.rows import RunRow, bare
from bench.accuracy.spec import RunSpec

START = (1e-3, 3e-3, 1e-2)


def until_over(loss, start=START, factor=3.0):
    """Let the search run on a function of the rate, and count its rounds."""
    losses: dict[float, float] = {}
    for rounds in range(20):
        found = search(losses, start, factor)
        if found.over:
            return found, rounds
        losses |= {lr: loss(lr) for lr in found.todo}
    raise AssertionError("the search does not end")


def valley(best):
    return lambda lr: abs(math.log10(lr / best))


def test_the_grid_goes_by_half_decades_or_by_two():
    rates = [1e-3]
    for _ in range(5):
        rates.append(neighbour(rates[-1], 3, up=True))
    assert rates == [1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3] and neighbour(1e-3, 3, up=False) == 3e-4
    assert neighbour(5e-5, 2, up=False) == 2.5e-5 and neighbour(4e-3, 2, up=True) == 8e-3


@pytest.mark.parametrize(("best", "tried", "rounds"), [(3e-3, 5, 2), (1e-3, 5, 2), (1e-2, 5, 2), (0.1, 7, 3), (1e-4, 7, 3)])
def test_search_ends_with_two_rates_beyond_on_each_side(best, tried, rounds):
    found, took = until_over(valley(best))
    assert (found.rate, found.closed, len(found.losses), took) == (best, True, tried, rounds)
    assert found.below >= 2 and found.above >= 2


def test_a_search_without_an_end_is_given_up_and_open():
    for loss in (lambda lr: lr, lambda lr: -lr, lambda lr: math.nan):
        found, _ = until_over(loss)
        assert len(found.losses) == planning.MOST_RATES and found.over and not found.closed


def test_divergence_is_worst_and_ties_go_to_the_smaller_rate():
    found, _ = until_over(lambda lr: math.nan if lr > 5e-3 else 1 / lr)
    assert (found.rate, found.closed, found.losses[1e-2]) == (3e-3, True, math.inf)
    assert search(dict.fromkeys(START, 1.0), START, 3).rate == 1e-3
    assert search({1e-3: math.inf, 3e-3: math.nan, 1e-2: 5.0}, START, 3).rate == 1e-2


def test_order_of_rates_and_complete_seeds(tiny):
    assert search({}, START, 3).todo == START and search({1e-3: 1.0}, START, 3).todo == START[1:]
    specs = plan("tune", "tiny", only=["ste"], patterns=["2:4"], optimizers=["adamw"])
    assert Counter(s.lr for s in specs) == dict.fromkeys(tiny.settings.start, 3)
    assert [s.seed for s in specs] == sorted(s.seed for s in specs)
    rows = [bare(s, 1.0) for s in specs[:-1]]
    assert len(best_rates(rows, "tiny")["ste", "2:4"].losses) == 2 and len(pending(specs, rows)) == 1


def done(tiny, only=(), best=1e-2):
    """Rows of the whole search with the optimum of every method at ``best``, of SGD at 20 times it."""
    rows: list[RunRow] = []
    while todo := pending(plan("tune", "tiny", rows, only), rows):
        rows += [bare(s, valley(best * (20 if s.optimizer == "sgd" else 1))(s.lr)) for s in todo]
    return rows


def test_searches_are_independent(tiny):
    rows = done(tiny)
    assert {(r.method, r.optimizer) for r in rows if r.optimizer == "sgd"} == {("dense", "sgd"), ("ste", "sgd"), ("srste", "sgd")}
    for optimizer, rate in (("adamw", 1e-2), ("sgd", 0.2)):
        found = best_rates(rows, "tiny", optimizer)
        assert {(s.rate, s.closed) for s in found.values()} == {(rate, True)} and len(found) == (7 if optimizer == "adamw" else 5)
        assert shared_rate(rows, "tiny", optimizer) == rate
    assert best_rates(rows, "tiny", beta2=0.99) == {} and best_rates(rows, "tiny", length=2) == {}


def test_stages_use_the_rates_found(tiny):
    assert plan("tuned", "tiny") == [] and {s.lr for s in plan("shared", "tiny")} == {1e-2}
    rows = done(tiny, ["dense", "srste"], best=5e-3) + done(tiny, ["step-25"], best=2e-2)
    tuned = plan("tuned", "tiny", rows, seeds=2, optimizers=["adamw"])
    assert {(s.method, s.lr) for s in tuned} == {("dense", 5e-3), ("srste", 5e-3), ("step-25", 2e-2)}
    assert [s.seed for s in tuned] == [0] * 5 + [1] * 5
    shared = plan("shared", "tiny", rows)
    assert {(s.optimizer, s.lr, s.beta2) for s in shared} == {("adamw", 5e-3, 0.999), ("sgd", 0.1, 0.0)}
    assert {s.beta2 for s in plan("ablation", "tiny", rows)} == {0.99}
    assert {s.method for s in plan("variants", "tiny", rows)} == {"step-10"}
    assert {s.steps for s in plan("lengths", "tiny", rows)} == {50, 100, 200}


def test_controls_of_step(tiny):
    rows = done(tiny, ["dense", "srste"], best=5e-3) + done(tiny, ["step-25"], best=2e-2)
    controls = plan("controls", "tiny", rows, patterns=["1:8"], seeds=1)
    assert {(s.method, s.lr) for s in controls} == {
        ("srste", 5e-3),  # its own best rate
        ("srste", 6e-2),  # three times STEP's
        ("srste", 1.5e-2),  # three times the shared one
        ("step-25-thawed", 2e-2),  # STEP's
        ("step-25-thawed", 5e-3),  # the shared one, and SR-STE's
    }


def test_longer_runs_can_have_a_search_of_their_own(tiny, monkeypatch):
    longer = dataclasses.replace(
        tiny.settings, lengths=(1, 5), length_search=True, length_methods=("srste",), tune_steps=20, tuning_seeds=1
    )
    monkeypatch.setattr(tiny, "settings", longer)
    specs = plan("tune", "tiny", optimizers=["adamw"])
    assert {(s.steps, s.method) for s in specs if s.steps != 20} == {(100, "srste")} and {s.seed for s in specs} == {100}
    rows = [bare(s, valley(1e-2)(s.lr)) for s in specs]
    assert best_rates(rows, "tiny", length=5)["srste", "1:8"].rate == 1e-2


def test_what_is_repeated_is_among_the_runs_of_its_task():
    repeats = [spec for task in tasks.names() for spec in plan("repeat", task)]
    planned = {spec.key for task in {s.task for s in repeats} for spec in plan("tune", task)}
    assert len(repeats) == len(planning.REPEATED) == 10 and {spec.key for spec in repeats} <= planned


def test_costs_are_in_hours_of_one_core(tiny):
    assert cost([RunSpec("tiny", "ste", "2:4", 0, 1e-2, 500)] * 10) == pytest.approx(1.0)


def test_what_a_search_will_need_is_foreseen(tiny):
    ahead = foreseen([], "tiny", ["ste"], ["2:4"])
    assert Counter((r.optimizer, r.lr) for r in ahead if r.optimizer == "sgd") == {("sgd", lr): 3 for lr in (0.05, 0.1, 0.2, 0.4, 0.8)}
    assert {s.closed for s in best_rates(ahead, "tiny").values()} == {True} and len(plan("tuned", "tiny", ahead)) == 10
    first = [bare(s, -s.lr) for s in plan("tune", "tiny", [], ["ste"], ["2:4"], optimizers=["adamw"])]
    ahead = foreseen(first, "tiny", ["ste"], ["2:4"])
    assert best_rates(ahead, "tiny")["ste", "2:4"].rate == 2e-2 and len([r for r in ahead if r.optimizer == "adamw"]) == 15


def test_keys_and_names(tiny):
    spec = RunSpec("mlp", "srste", "1:8", 0, 0.006, 1000)
    assert spec.key == "mlp/srste/1:8/adamw/0.999/0.006/1000/0" and RunSpec.from_key(spec.key) == spec
    sgd = RunSpec("mlp", "srste", "1:8", 0, 0.1, 1000, "sgd")
    assert sgd.key == "mlp/srste/1:8/sgd/0/0.1/1000/0" and RunSpec.from_key(sgd.key) == sgd
    for words in (("stages", "tiny"), ("tune", "tinny")):
        with pytest.raises(ValueError, match="did you mean"):
            plan(*words)
    with pytest.raises(ValueError, match="did you mean 'sgd'"):
        plan("tune", "tiny", optimizers=["sgdd"])
