"""STEP against the independent loop: dense phase, switch, frozen second moment; and its configuration."""

import math
import warnings
from dataclasses import replace

import pytest
import torch

import nmkernels as nm
from nmkernels.ops import STATS
from nmkernels.optim import MaskedAdamW
from nmkernels.recipes import STEP, Observed
from nmkernels.recipes.methods.step import REASONS, figure, window
from python_tests.for_each import for_each
from python_tests.recipes.loop import Adam, Step, batches, distance, loss_of, mlp, snapshot, train
from python_tests.recipes.training import metrics_of, run, start
from python_tests.recipes.training import train as steps

STEPS = 30
FAST = Adam(beta2=0.9)  # a window of ten steps
BASE = Step(t_min=4, t_max=14, threshold=1e-30)  # T_max decides


def recipe_of(s, decay=0.0):
    eps_mode = "inside" if s.inside else "outside"
    same = ("switch", "t_min", "t_max", "start", "threshold", "bias_corrected", "clamp")
    return STEP("2:4", **{name: getattr(s, name) for name in same}, eps_mode=eps_mode, decay=decay)


def equals_the_loop(s, adam=FAST, decay=0.0, dtype=torch.float64):
    """The step after which both have switched."""
    _, handle, _ = run(recipe_of(s, decay), dtype, batches(STEPS, dtype), model=mlp(dtype), **adam.keywords)
    want, _, switched = train(snapshot(mlp(dtype)), batches(STEPS, dtype), 2, 4, decay, adam, s)
    assert handle.state["switch_step"] == switched
    assert distance(snapshot(handle.model), want) < (1e-10 if dtype == torch.float64 else 1e-5)
    return switched


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


@pytest.mark.parametrize("case", CASES)
def test_equals_independent_loop(case):
    step, adam, decay = CASES[case]
    assert equals_the_loop(step, adam, decay) == (10 if step.switch == "fixed" else step.t_max + 1)


POLICIES = {
    "paper": Step("paper", t_min=17, t_max=29, threshold=1.2e-6),
    "paper_geometric": Step("paper_geometric", t_min=20, t_max=29, threshold=4.6e-7),
    "relative": Step("relative", t_min=15, t_max=28, threshold=0.1),
    "relative_norm": Step("relative_norm", t_min=3, t_max=28, threshold=0.05),
    "staleness": Step("staleness", t_min=3, t_max=28, threshold=0.6),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", POLICIES)
def test_policy_switches_at_the_step_of_the_independent_loop(name, dtype):
    step = POLICIES[name]
    assert step.t_min + 1 < equals_the_loop(step, dtype=dtype) < step.t_max  # the policy itself decided


def test_phase_and_metrics_follow_the_switch():
    rows = []
    model, handle, optimizer = start(recipe_of(BASE), **FAST.keywords)
    steps(model, optimizer, batches(STEPS), lambda t: rows.append(metrics_of(handle)))
    _, log, switched = train(snapshot(mlp()), batches(STEPS), 2, 4, 0.0, FAST, BASE)
    # the phase is that of the next forward pass, the other figures are of the step just done
    assert [r["phase"] for r in rows] == [0] * (switched - 1) + [1] * (STEPS - switched + 1)
    assert [r["density"] for r in rows] == [1.0] * switched + [0.5] * (STEPS - switched)
    assert [r["switch_step"] for r in rows] == [0] * (switched - 1) + [switched] * (STEPS - switched + 1)
    assert [r["flip_rate"] * 1536 for r in rows] == pytest.approx([row["flips"] for row in log])
    assert [r["max_update"] for r in rows] == pytest.approx([row["largest"] for row in log], rel=1e-8)


def test_the_relative_rule_knows_no_scale():
    """A loss a thousand times as large, with the ε that belongs to it, is the same run; the paper's rule switches at another step."""

    def switched(switch, scale, threshold=None):
        recipe = STEP("2:4", switch=switch, t_min=15, t_max=28, threshold=threshold)
        model, handle, optimizer = start(recipe, **replace(FAST, eps=1e-12 * scale).keywords)
        for batch in batches(STEPS):
            optimizer.zero_grad()
            (scale * loss_of(model, batch)).backward()
            optimizer.step()
        return handle.state["switch_step"]

    assert 16 < switched("relative", 1.0) == switched("relative", 1000.0) < 29
    assert switched("paper", 1.0, 1e-3) == 16 and switched("paper", 1000.0, 1e-3) == 29


def test_a_switch_at_t_max_is_reported_once():
    recipe = recipe_of(replace(BASE, switch="paper"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, handle, optimizer = run(recipe, data=batches(20), **FAST.keywords)
    (said,) = (str(w.message) for w in caught)
    for part in ("at its upper bound T_max", "T₀ = 15", "z_bar < 1e-30", 'switch="relative"', 'switch="fixed"'):
        assert part in said
    assert handle.metrics()["switch_reason"].item() == REASONS.index("t_max") and str(handle.report).endswith(said)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again, resumed, other = start(recipe, **FAST.keywords)
        again.load_state_dict(model.state_dict())
        other.load_state_dict(optimizer.state_dict())
        assert resumed.report.remark == said
        for decided in (replace(POLICIES["paper"], switch="fixed", start=5), POLICIES["paper"]):
            _, handle, _ = run(recipe_of(decided), data=batches(STEPS), **FAST.keywords)
            assert not handle.report.remark


def test_bounds():
    assert STEP(total_steps=1000).bounds() == (100, 500)
    assert STEP(t_min=7, t_max=9).bounds() == (7, 9)
    assert STEP(t_min=None, t_max=3).bounds() == (None, 3)
    # the window is not known yet: what T_min can be at most
    assert STEP(t_max=9).bounds() == STEP(t_max=9, total_steps=1000).bounds() == (9, 9)
    assert STEP(t_max=None).bounds() == (None, None) and STEP(total_steps=99).bounds() == (9, 50)
    assert STEP(total_steps=40, switch="fixed", start=0.5).bounds() == (20, 20)
    assert STEP(switch="fixed", start=6).bounds() == (6, 6)


def test_default_threshold():
    group = {"eps": 1e-5, "betas": (0.9, 0.99)}
    assert STEP(total_steps=10, switch="paper").first_state(group)["threshold"] == 1e-5
    assert STEP(total_steps=10, switch="paper_geometric").first_state(group)["threshold"] == 1e-5
    assert STEP(total_steps=10, switch="relative_norm").first_state(group)["threshold"] == 0.5
    assert STEP(total_steps=10, switch="staleness").first_state(group)["threshold"] == 0.96
    assert STEP(total_steps=10).first_state(group)["threshold"] == 0.1
    assert STEP(total_steps=10, threshold=3.0).first_state(group)["threshold"] == 3.0


# ---- the window of the second moment


@pytest.mark.parametrize(
    ("total", "window"), [(1, 10), (10, 10), (109, 10), (110, 11), (1000, 100), (9999, 999), (10_000, 1000), (10**6, 1000)]
)
def test_beta2_of_its_own_optimizer_follows_from_the_run(total, window):
    optimizer = STEP(total_steps=total, switch="fixed", start=1).optimizer(mlp().parameters(), lr=0.1)
    assert type(optimizer) is MaskedAdamW and optimizer.defaults["lr"] == 0.1
    beta1, beta2 = optimizer.defaults["betas"]
    assert beta1 == 0.9 and beta2 == pytest.approx(1 - 1 / window, rel=1e-12)


def test_given_betas_are_used_as_they_are():
    recipe = STEP(total_steps=1000)
    assert recipe.optimizer(mlp().parameters(), betas=(0.8, 0.999)).defaults["betas"] == (0.8, 0.999)
    assert STEP(t_max=5).optimizer(mlp().parameters()).defaults["betas"] == (0.9, 0.999), "the length of the run is not known"
    groups = [{"params": list(mlp().parameters()), "betas": (0.7, 0.98)}]
    assert recipe.optimizer(groups).param_groups[0]["betas"] == (0.7, 0.98)


def test_the_default_switches_after_a_whole_window_and_says_nothing():
    """Of the optimizer that is attached, here ten of 300 steps; T_min chooses T₀ where the test has passed by then."""
    for threshold, reason in ((None, "test"), (10.0, "t_min")):
        recipe = STEP("2:4", total_steps=300, threshold=threshold)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            _, handle, _ = run(recipe, data=batches(60), **FAST.keywords)
        switched = handle.state["switch_step"]
        assert switched > 11 if reason == "test" else switched == 11, switched
        assert REASONS[handle.state["switch_reason"]] == reason and not handle.report.remark
        assert recipe.bounds() == (30, 150), "without an optimizer, what they are at most"


def test_ordinary_runs_give_no_warning():
    """With its own optimizer and all defaults."""
    total = 200
    recipe = STEP("2:4", total_steps=total)
    model = mlp()
    handle = nm.sparsify_(model, recipe, filter_fn=lambda module, name: name != "4")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = handle.attach(recipe.optimizer(model.parameters(), lr=1e-3))
        steps(model, optimizer, batches(total))
    assert total // 10 < handle.state["switch_step"] <= total // 2 and REASONS[handle.state["switch_reason"]] in ("test", "t_min")


# ---- the policies on made-up statistics

GROUP = {"eps": 1e-8, "betas": (0.9, 0.9)}  # a window of ten
NUMEL = 50


def observed(stats, t, step):
    return Observed(stats, NUMEL, t, updated_by=lambda: [(GROUP, {"exp_avg_sq": torch.ones(4), "step": torch.tensor(float(step))})])


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
def test_the_switch_lies_between_the_bounds(low, high, small, want):
    """(Z̄ < ε and t > T_min) or t > T_max."""
    got, _ = switch_step(STEP(switch="paper", t_min=low, t_max=high), (seen(t, [1e-12 if small else 1.0] * NUMEL) for t in range(1, 40)))
    assert got == want


@for_each("change, until, at, want", [(1e-12, 40, 6, "t_min"), (1.0, 40, 13, "t_max"), (1.4e-8, 6, 9, "test"), (1.5e-8, 9, 13, "test")])
def test_why_it_switched(change, until, at, want):
    """``until`` is the last step with a change; the mean over ten steps then falls below 1e-8."""
    recipe = STEP(switch="paper", t_min=5, t_max=12)
    got, state = switch_step(recipe, (seen(t, [change if t <= until else 0.0] * NUMEL) for t in range(1, 40)))
    assert (got, REASONS[state["switch_reason"]]) == (at, want)
    got, free = switch_step(STEP(switch="paper", t_min=None, t_max=None), [seen(1, [1e-12] * NUMEL)])
    assert (got, REASONS[free["switch_reason"]]) == (1, "test"), "no bound held the test back"
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
    return seen(t, [0.0] * NUMEL)


def test_the_default_test_needs_no_remark_at_any_t_min():
    recipe = STEP(t_min=4, t_max=20, threshold=10.0)
    state = recipe.first_state(GROUP)
    assert [t for t in range(1, 6) if recipe.advance(state, still(t))] == [5]
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


# ---- layers with different numbers of steps


def uneven(recipe, total, joins=0, idle=lambda t: False, after=lambda t, handle, optimizer: None, second=(0.9, 0.999), **keywords):
    """Train two layers, the last of which joins the optimizer at step ``joins``, counted from 0, and has no gradient where ``idle(t)``.

    Its group has the betas ``second`` and the ``keywords``, which that of the first layer has not.

    Returns the updates of the last step over lr, and those with v* and the number of steps that each layer had at the switch.
    """
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({name: torch.nn.Linear(32, 32, bias=False) for name in "ab"}).double()
    handle, beta1, beta2 = nm.sparsify_(model, recipe), 0.9, {"a": 0.999, "b": second[1]}
    weights = {name: model[name].weight for name in "ab"}
    groups = [{"params": [weights[name]], "betas": (beta1, beta2[name]), **(keywords if name == "b" else {})} for name in "ab"]
    optimizer = MaskedAdamW(groups[:1] if joins else groups, lr=1e-3, weight_decay=0.0)
    handle.attach(optimizer)
    m, v, steps, frozen = dict.fromkeys("ab", 0.0), dict.fromkeys("ab", 0.0), dict.fromkeys("ab", 0), {}
    for t in range(total):
        if joins and t == joins:
            optimizer.add_param_group(groups[1])
        x, before = torch.randn(16, 32, dtype=torch.float64), {name: w.detach().clone() for name, w in weights.items()}
        optimizer.zero_grad()
        sum((model[name](x) - x).square().mean() for name in ("a" if idle(t) else "ab")).backward()
        for name, w in weights.items():
            if w.grad is not None and (name == "a" or t >= joins):
                steps[name] += 1
                m[name] = beta1 * m[name] + (1 - beta1) * w.grad
                v[name] = beta2[name] * v[name] + (1 - beta2[name]) * w.grad**2
        optimizer.step()
        after(t + 1, handle, optimizer)
        if handle.state["switch_step"] == t + 1:
            frozen = {name: v[name] / (1 - beta2[name] ** steps[name]) for name in "ab" if steps[name]}
    updates = {name: (before[name] - w.detach()) / 1e-3 for name, w in weights.items()}
    want = {name: m[name] / (1 - beta1 ** steps[name]) / (v.sqrt() + 1e-8) for name, v in frozen.items()}
    return updates, want, handle


@for_each("joins, idle", [(30, lambda t: False), (0, lambda t: t % 4 != 0 and t != 40), (0, lambda t: False)])
@for_each("amsgrad, beta2", [(False, 0.999), (True, 0.999), (False, 0.95)])
def test_layers_with_fewer_steps_have_their_own_bias_correction(joins, idle, amsgrad, beta2):
    """Those that join later, or that run only in some forward passes, also by settings of their own."""
    recipe = STEP("2:4", total_steps=100, switch="fixed", start=40, clamp=None)
    updates, want, handle = uneven(recipe, 41, joins, idle, amsgrad=amsgrad, second=(0.9, beta2))
    assert handle.state["switch_step"] == handle.state["v_step"] == 40
    # with amsgrad v is a running maximum, which is v itself only while that grows
    assert all(((updates[k] - want[k]).abs().sum() / want[k].abs().sum()).item() < (0.02 if amsgrad else 1e-9) for k in "ab")


def test_an_optimizer_that_rests_at_the_switch_counts_too():
    model = torch.nn.ModuleDict({name: torch.nn.Linear(32, 32) for name in "ab"})
    handle = nm.sparsify_(model, STEP("2:4", total_steps=100, switch="fixed", start=40))
    resting, driving = (MaskedAdamW(model[name].parameters(), lr=1e-3) for name in "ba")
    handle.attach(resting, driving)
    for t in range(1, 41):
        x = torch.randn(16, 32)
        model.zero_grad()
        (model["a"](x) - model["b"](x)).sub(x).square().mean().backward()
        v = resting.state[model["b"].weight].get("exp_avg_sq", x).clone()
        if t % 2:
            resting.step()
        driving.step()
    assert handle.state["switch_step"] == handle.state["v_step"] == 40
    torch.testing.assert_close(resting.state[model["b"].weight]["exp_avg_sq"] / (1 - 0.999**40), v / (1 - 0.999**20))


def test_a_layer_whose_first_gradient_comes_after_the_switch_is_named():
    recipe = STEP("2:4", total_steps=100, switch="fixed", start=5)
    for joins, idle in ((7, lambda t: False), (0, lambda t: t < 7)):
        with pytest.warns(UserWarning, match="layer 'b' had no gradient before step froze the second moment; theirs is zero") as caught:
            uneven(recipe, 9, joins, idle)
        assert len(caught) == 1


def test_raw_moments_are_frozen_as_they_are():
    recipe, moments = STEP("2:4", total_steps=100, switch="fixed", start=40, bias_corrected=False), {}

    def after(t, handle, optimizer):
        if t >= 39:
            moments[t] = [state["exp_avg_sq"].clone() for state in optimizer.state.values()]

    uneven(recipe, 41, 30, lambda t: t >= 39, after)
    assert all(torch.equal(a, b) for a, b in zip(moments[40][1:], moments[39][1:], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(moments[41], moments[40], strict=True))


@for_each("joins, idle, beta2", [(30, lambda t: False, 0.999), (0, lambda t: t % 4 != 1, 0.999), (0, lambda t: False, 0.99)])
def test_the_default_test_counts_the_steps_of_each_layer(joins, idle, beta2):
    means, rows = [0.0], []

    def after(t, handle, optimizer):
        states = zip(optimizer.state.values(), (0.999, beta2), strict=False)
        means.append(sum(float(s["exp_avg_sq"].sum()) / (1 - b ** int(s["step"])) for s, b in states))
        rows.append((handle.state["z_bar"].item(), abs(means[t] - means[t // 2]) / means[t]))

    uneven(STEP("2:4", total_steps=400, t_min=100), 70, joins, idle, after, (0.9, beta2))
    assert [row[0] for row in rows[1:]] == pytest.approx([row[1] for row in rows[1:]], rel=1e-9)
    assert rows[-1][0] < 0.1, "both layers have settled"


def test_a_layer_whose_first_step_was_skipped():
    layers = [{"exp_avg_sq": torch.full((4,), v), "step": torch.tensor(t)} for v, t in ((1.0, 5.0), (0.0, 0.0))]
    got = figure("relative", Observed(torch.zeros(9), 8, 5, lambda: [(GROUP, layer) for layer in layers]))
    assert got.item() == pytest.approx(4 / (1 - 0.9**5))


def test_the_host_asks_only_between_the_bounds(monkeypatch):
    recipe, asked, item = STEP(switch="paper", t_min=5, t_max=9), [], torch.Tensor.item
    state = recipe.first_state(GROUP)
    for t in range(1, 15):
        monkeypatch.setattr(torch.Tensor, "item", lambda self, t=t: asked.append(t) or item(self))
        recipe.advance(state, seen(t))
    assert [t for t in asked if t != 10] == [6, 7, 8, 9]
