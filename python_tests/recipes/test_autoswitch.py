"""The switching policies on made-up statistics; test_step.py runs them in training."""

import math
from dataclasses import replace

import pytest
import torch

from nmkernels.ops import STATS
from nmkernels.recipes import STEP, Observed
from nmkernels.recipes.methods.step import REASONS, window
from python_tests.for_each import for_each

GROUP = {"eps": 1e-8, "betas": (0.9, 0.9)}  # a window of ten
NUMEL = 50


def observed(stats, t, step):
    return Observed(stats, NUMEL, t, optimizer_state=lambda key: [torch.tensor(float(step))] if key == "step" else [])


def seen(t, changes=(1.0,) * NUMEL, applied=True):
    """What one step showed: |Δv| of every weight."""
    stats = dict.fromkeys(STATS, 0.0)
    if applied:
        stats["applied"], stats["v_change"], stats["v_unchanged"] = 1.0, sum(changes), changes.count(0.0)
        stats["v_log_change"] = sum(math.log(max(c, 2.0**-149)) for c in changes)
    values = torch.tensor([stats[name] for name in STATS], dtype=torch.float64)
    return observed(values, t, t)


def switch_step(recipe, steps):
    state = recipe.first_state(GROUP)
    for observed in steps:
        if recipe.advance(state, observed):
            return state["switch_step"], state
    return 0, state


def test_window_is_rounded():
    assert [window(b) for b in (0.999, 0.95, 0.98, 0.99, 0.9, 0.0)] == [1000, 20, 50, 100, 10, 1]
    for switch in ("relative", "relative_norm"):
        state = STEP(total_steps=10, switch=switch).first_state({"eps": 1e-8, "betas": (0.9, 0.999)})
        assert state["window"] == 1000 and state["ring"].numel() == (1000 if switch == "relative" else 1)


@for_each("changes, want, unchanged", [([0.5] * 30 + [0.0] * 20, 0.5, 20), ([0.0] * NUMEL, 0.0, NUMEL), ([1e-60] * NUMEL, 2.0**-149, 0)])
def test_option_two_skips_unchanged_weights(changes, want, unchanged):
    _, state = switch_step(STEP(switch="paper_geometric", t_min=5, t_max=None), [seen(1, changes)])
    assert state["z_bar"].item() == pytest.approx(want, rel=1e-9) and state["v_unchanged"].item() == unchanged


@for_each("low, high, small, want", [(5, 12, True, 6), (5, 12, False, 13), (0, 12, True, 1), (None, 3, False, 4), (None, None, True, 1)])
def test_bounds(low, high, small, want):
    """(Z̄ < ε and t > T_min) or t > T_max."""
    got, _ = switch_step(STEP(switch="paper", t_min=low, t_max=high), (seen(t, [1e-12 if small else 1.0] * NUMEL) for t in range(1, 40)))
    assert got == want


@for_each("change, until, at, want", [(1e-12, 40, 6, "t_min"), (1.0, 40, 13, "t_max"), (1.4e-8, 6, 9, "test"), (1.5e-8, 9, 13, "test")])
def test_why_it_switched(change, until, at, want):
    """``until`` is the last step with a change; the mean over ten steps then falls below 1e-8."""
    recipe = STEP(switch="paper", t_min=5, t_max=12)
    got, state = switch_step(recipe, (seen(t, [change if t <= until else 0.0] * NUMEL) for t in range(1, 40)))
    assert (got, REASONS[state["switch_reason"]]) == (at, want)
    assert bool(recipe.stage(state).remark) == (want != "test") and recipe.values(state)["switch_reason"] == state["switch_reason"]
    assert recipe.stage(recipe.first_state(GROUP)).remark == ""
    fixed = STEP(switch="fixed", start=3)
    _, state = switch_step(fixed, map(seen, range(1, 9)))
    assert REASONS[state["switch_reason"]] == "fixed" and fixed.stage(state).remark == ""


@for_each(
    "total, high, beta2, want",
    [(1000, 0.5, 0.9, 11), (1000, 0.5, 0.98, 51), (1000, 0.5, 0.999, 101), (50, 0.5, 0.9, 6), (None, 90, 0.95, 21), (None, 6, 0.9, 7),
     (1000, 8, 0.9, 9), (None, None, 0.9, 11)],
)  # fmt: skip
@for_each("switch", ["paper", "relative_norm"])
def test_t_min_is_the_window_of_the_optimizer(total, high, beta2, want, switch):
    """But at most a tenth of the run and T_max; a switch there needs no remark, and one at the same T_min of the user's does."""
    group = {"eps": 1e-8, "betas": (0.9, beta2)}
    recipe = STEP(total_steps=total, t_max=high, switch=switch)
    for each in (recipe, replace(recipe, t_min=want - 1)):
        state = each.first_state(group)
        for t in range(1, 120):
            if each.advance(state, still(t)):
                break
        assert (state["switch_step"], REASONS[state["switch_reason"]]) == (want, "t_min")
        assert bool(each.stage(state).remark) == (each is not recipe)


def still(t):
    """A step that leaves the second moment as it is."""
    stats = seen(t, [0.0] * NUMEL).stats
    return Observed(stats, NUMEL, t, optimizer_state=lambda key: [torch.ones(4)] if key == "exp_avg_sq" else [torch.tensor(float(t))])


def test_the_default_test_needs_no_remark_at_any_t_min():
    recipe = STEP(t_min=4, t_max=20, threshold=10.0)
    state = recipe.first_state(GROUP)
    assert [t for t in range(1, 6) if recipe.advance(state, replace(still(t), find_group=lambda: GROUP))] == [5]
    assert REASONS[state["switch_reason"]] == "t_min" and recipe.stage(state).remark == ""


def test_a_state_without_its_window_switches_after_a_tenth_of_the_run():
    """As checkpoints of earlier versions have it."""
    recipe = STEP(total_steps=300, switch="paper")
    state = recipe.first_state(GROUP)
    del state["window"]
    assert [t for t in range(1, 32) if recipe.advance(state, still(t))] == [31]


def test_skipped_steps_do_not_bring_t_min_forward():
    recipe, small = STEP(switch="paper", t_min=3, t_max=None), [1e-12] * NUMEL
    steps = [seen(t, applied=False) for t in (1, 2)] + [seen(t, small) for t in range(3, 12)]
    assert switch_step(recipe, steps)[0] == 4


def test_a_loaded_second_moment_keeps_its_own_bias_correction():
    """T₀ counts the steps of the recipe, v* the steps of the optimizer, which may have been loaded from a dense run."""
    recipe = STEP(switch="fixed", start=3)
    state = recipe.first_state(GROUP)
    for t in range(1, 4):
        recipe.advance(state, observed(seen(t).stats, t, 1000 + t))
    assert (state["switch_step"], state["v_step"]) == (3, 1003)
    assert recipe.stage(state).rule.v_step == 1003
    assert STEP(switch="fixed", start=3, bias_corrected=False).stage(state).rule.v_step == 0


def test_the_host_asks_only_between_the_bounds(monkeypatch):
    recipe, asked, item = STEP(switch="paper", t_min=5, t_max=9), [], torch.Tensor.item
    state = recipe.first_state(GROUP)
    for t in range(1, 15):
        monkeypatch.setattr(torch.Tensor, "item", lambda self, t=t: asked.append(t) or item(self))
        recipe.advance(state, seen(t))
    assert [t for t in asked if t != 10] == [6, 7, 8, 9]
