"""STEP against the independent loop: dense phase, switch, frozen second moment; and its configuration."""

from dataclasses import replace

import pytest
import torch

import nmkernels as nm
from nmkernels.optim import MaskedAdamW
from nmkernels.recipes import STEP
from python_tests.recipes.loop import SPARSE, Adam, Step, batches, distance, loss_of, mlp, snapshot, train

STEPS = 30
FAST = Adam(beta2=0.9)  # a window of ten steps
BASE = Step(t_min=4, t_max=14, threshold=1e-30)  # T_max decides


def recipe_of(s, decay=0.0, pattern="2:4"):
    return STEP(
        pattern,
        switch=s.switch,
        t_min=s.t_min,
        t_max=s.t_max,
        start=s.start,
        threshold=s.threshold,
        bias_corrected=s.bias_corrected,
        eps_mode="inside" if s.inside else "outside",
        clamp=s.clamp,
        decay=decay,
    )


def run(recipe, adam, dtype=torch.float64, watch=lambda handle: None, data=None):
    model = mlp(dtype)
    handle = nm.sparsify_(model, recipe)
    optimizer = handle.attach(recipe.optimizer(model.parameters(), **adam.keywords))
    for batch in data or batches(STEPS, dtype):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        watch(handle)
    return snapshot(model), handle


CASES = {
    "default_adam": (BASE, Adam(), 0.0),
    "no_clamp": (BASE, FAST, 0.0),
    "clamp": (replace(BASE, clamp=0.5), FAST, 0.0),
    "raw_v": (replace(BASE, bias_corrected=False), Adam(), 0.0),
    "eps_inside": (replace(BASE, inside=True), Adam(eps=1e-4), 0.0),
    "raw_v_eps_inside_clamp": (replace(BASE, bias_corrected=False, inside=True, clamp=2.0), Adam(eps=1e-4), 0.0),
    "srste_decay": (BASE, FAST, 1e-2),
    "weight_decay": (BASE, replace(FAST, weight_decay=0.3), 0.0),
    "fixed": (replace(BASE, switch="fixed"), FAST, 0.0),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", CASES)
def test_equals_independent_loop(case, dtype):
    step, adam, decay = CASES[case]
    got, handle = run(recipe_of(step, decay), adam, dtype)
    want, _, switched = train(snapshot(mlp(dtype)), batches(STEPS, dtype), 2, 4, decay, adam, step)
    assert handle.state["switch_step"] == switched == (10 if step.switch == "fixed" else step.t_max + 1)
    assert distance(got, want) < (1e-10 if dtype == torch.float64 else 1e-5)


def test_every_case_tests_something():
    for case in [c for c in CASES if c not in ("no_clamp", "default_adam", "fixed")]:
        step, adam, decay = CASES[case]
        plain, plain_adam = replace(step, bias_corrected=True, inside=False, clamp=None), replace(adam, weight_decay=0.01)
        a, _, _ = train(snapshot(mlp()), batches(STEPS), 2, 4, decay, adam, step)
        b, _, _ = train(snapshot(mlp()), batches(STEPS), 2, 4, 0.0, plain_adam, plain)
        assert distance(a, b) > 1e-5


POLICIES = {
    "arithmetic": (Step("arithmetic", t_min=17, t_max=29), 1.2e-6),
    "geometric": (Step("geometric", t_min=20, t_max=29), 4.6e-7),
    "relative_norm": (Step("relative_norm", t_min=3, t_max=28), 0.05),
    "staleness": (Step("staleness", t_min=3, t_max=28), 0.6),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", POLICIES)
def test_policy_switches_at_the_step_of_the_independent_loop(name, dtype):
    step, threshold = POLICIES[name]
    step = replace(step, threshold=threshold)
    got, handle = run(recipe_of(step), FAST, dtype)
    want, _, switched = train(snapshot(mlp(dtype)), batches(STEPS, dtype), 2, 4, 0.0, FAST, step)
    assert step.t_min + 1 < switched < step.t_max  # the policy itself decided
    assert handle.state["switch_step"] == switched
    assert distance(got, want) < (1e-10 if dtype == torch.float64 else 1e-5)


def test_frozen_second_moment_and_unmasked_parameters():
    seen = []

    def watch(handle):
        optimizer = handle._attachments[0].optimizer
        seen.append([optimizer.state[p]["exp_avg_sq"].clone() for p in handle.model.parameters()])

    _, handle = run(recipe_of(BASE), FAST, watch=watch)
    switched = handle.state["switch_step"]
    for i, name in enumerate(dict(handle.model.named_parameters())):
        after = [torch.equal(seen[switched - 1][i], v[i]) for v in seen[switched:]]
        assert all(after) if name in SPARSE else not any(after)
        assert not torch.equal(seen[switched - 2][i], seen[switched - 1][i])


def test_phase_and_metrics_follow_the_switch():
    rows = []
    run(recipe_of(BASE), FAST, watch=lambda h: rows.append({k: v.item() for k, v in h.metrics().items()}))
    _, log, switched = train(snapshot(mlp()), batches(STEPS), 2, 4, 0.0, FAST, BASE)
    # the phase is that of the next forward pass, the other figures are of the step just done
    assert [r["phase"] for r in rows] == [0] * (switched - 1) + [1] * (STEPS - switched + 1)
    assert [r["density"] for r in rows] == [1.0] * switched + [0.5] * (STEPS - switched)
    assert [r["switch_step"] for r in rows] == [0] * (switched - 1) + [switched] * (STEPS - switched + 1)
    assert [r["flip_rate"] * 1536 for r in rows] == pytest.approx([row["flips"] for row in log])
    assert [r["max_update"] for r in rows] == pytest.approx([row["largest"] for row in log], rel=1e-8)


@pytest.mark.parametrize("switch", ["arithmetic", "geometric"])
def test_z_scales_with_the_square_of_the_loss(switch):
    z = []
    for c in (1.0, 8.0):
        model = mlp()
        recipe = STEP(switch=switch, t_min=None, t_max=None, threshold=1e-300)
        handle = nm.sparsify_(model, recipe)
        optimizer = handle.attach(recipe.optimizer(model.parameters(), lr=0.0))
        for batch in batches(4):
            optimizer.zero_grad()
            (c * loss_of(model, batch)).backward()
            optimizer.step()
        z.append(handle.metrics()["z_bar"].item())
    assert z[1] == pytest.approx(64 * z[0], rel=1e-9)


def test_dead_units_do_not_fire_option_two():
    """One weight in twelve never has a gradient; with its logarithm counted Z would be 1e-3 of the others' and fire."""

    def metrics(dead, threshold):
        model = mlp()
        recipe = STEP(switch="geometric", t_min=1, t_max=None, threshold=threshold)
        handle = nm.sparsify_(model, recipe)
        optimizer = handle.attach(recipe.optimizer(model.parameters(), lr=0.0))
        for x, y in batches(6):
            optimizer.zero_grad()
            loss_of(model, (x * (torch.arange(16) >= 4) if dead else x, y)).backward()
            optimizer.step()
        return {k: v.item() for k, v in handle.metrics().items()}

    alive = metrics(dead=False, threshold=1e-300)
    dead = metrics(dead=True, threshold=alive["z_bar"] / 5)
    assert alive["v_unchanged"] == 0 and dead["v_unchanged"] == 4 * 32
    assert dead["switch_step"] == 0 and dead["z_bar"] > alive["z_bar"] / 5


def test_any_other_optimizer_is_refused_with_the_replacement():
    model = mlp()
    handle = nm.sparsify_(model, STEP(total_steps=10))
    with pytest.raises(nm.RecipeError, match=r"handle\.attach\(nm\.optim\.MaskedAdamW\(model\.parameters\(\), lr=\.\.\.\)\)"):
        handle.attach(torch.optim.AdamW(model.parameters()))
    handle.attach(MaskedAdamW(model.parameters()))


def test_bounds():
    assert STEP(total_steps=1000).bounds() == (100, 500)
    assert STEP(t_min=7, t_max=9).bounds() == (7, 9)
    assert STEP(t_min=None, t_max=3).bounds() == (None, 3)
    assert STEP(total_steps=40, switch="fixed", start=0.5).bounds() == (20, 20)
    assert STEP(switch="fixed", start=6).bounds() == (6, 6)


def test_threshold_defaults_to_the_optimizers_eps_or_the_rivals_own():
    group = {"eps": 1e-5, "betas": (0.9, 0.99)}
    assert STEP(total_steps=10).first_state(group)["threshold"] == 1e-5
    assert STEP(total_steps=10, switch="relative_norm").first_state(group)["threshold"] == 0.5
    assert STEP(total_steps=10, switch="staleness").first_state(group)["threshold"] == 0.96
    assert STEP(total_steps=10, threshold=3.0).first_state(group)["threshold"] == 3.0
