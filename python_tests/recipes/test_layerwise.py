"""Layer-wise N:M: which patterns the rules find, that each layer keeps its own to the end, and what is refused."""

import itertools
import json
import random

import pytest
import torch
from torch import nn

import nmkernels as nm
from nmkernels.recipes import LayerWise, SdGf
from nmkernels.recipes.contrib import layerwise as module
from nmkernels.recipes.contrib.layerwise import allocate
from python_tests.for_each import for_each
from python_tests.recipes import loop_layerwise as layerwise
from python_tests.recipes.loop import SPARSE, batches, distance, mlp, snapshot, top_n
from python_tests.recipes.training import start, step, through_a_file, train

DATA = batches(20)


def counts(patterns):
    return {name: pattern.n for name, pattern in patterns.items()}


def kept_counts(handle):
    return counts({name: layer.pattern for name, layer in handle.layers.items()})


def density(patterns, weights):
    return sum(weights[k].numel() * p.density for k, p in patterns.items()) / sum(w.numel() for w in weights.values())


def net(seed, shapes=((24, 16), (32, 48), (16, 64), (48, 16))):
    g = torch.Generator().manual_seed(seed)
    scale = torch.rand(len(shapes), generator=g) + 0.1
    return {f"l{i}": torch.randn(s, generator=g) * scale[i] for i, s in enumerate(shapes)}


# ---- the rules


@for_each("choices, options", [("powers", (1, 2, 4)), ("all", range(1, 8))])
def test_magnitude_is_the_best_of_all_maps(choices, options):
    for seed, n in enumerate((2, 3, 7)):
        weights = net(seed)
        got = LayerWise(f"{n}:8", rule="magnitude", choices=choices).setup.patterns(weights)
        want = layerwise.cheapest(weights, lambda k, w, n: w.abs()[~top_n(w, n, 8)].sum().item(), options, 8, n / 8)
        assert counts(got) == want


def test_energy_does_not_see_the_layers_scales():
    weights = net(0)
    scaled = {k: w * 10**i for i, (k, w) in enumerate(weights.items())}
    patterns = LayerWise("4:16", rule="energy", choices="all").setup.patterns
    energy = lambda k, w, n: w.numel() * (w[~top_n(w, n, 16)].square().sum() / w.square().sum()).item()  # noqa: E731
    assert counts(patterns(weights)) == layerwise.cheapest(weights, energy, range(1, 16), 16, 0.25)
    assert patterns(scaled) == patterns(weights) != LayerWise("4:16", rule="magnitude").setup.patterns(scaled)


@for_each("choices, options", [("powers", (1, 2, 4, 8)), ("all", range(1, 16))])
def test_erk_is_the_closest_to_the_shares_within_the_budget(choices, options):
    weights, patterns = net(0), LayerWise("4:16", choices=choices).setup.patterns
    got = patterns(weights)
    assert counts(got) == layerwise.erk(weights, options, 16, 0.25) and density(got, weights) == 0.25
    assert patterns({k: w.to("meta") for k, w in weights.items()}) == got
    # the small layer's share would be 16 of 16; it is 15, and of the maps that keep a half, (8, 8) and (14, 7), the second is nearer
    sizes = {"small": torch.empty(16, 16), "big": torch.empty(32, 48)}
    assert list(counts(LayerWise("8:16", choices=choices).setup.patterns(sizes)).values()) == ([8, 8] if choices == "powers" else [14, 7])


def test_a_layer_that_sees_a_token_ten_times_costs_tenfold():
    weights = net(0)
    plain, often = (LayerWise("4:16", choices="all", rows=rows).setup.patterns(weights) for rows in (None, {"l1": 10}))
    cost = {k: w.numel() * (10 if k == "l1" else 1) for k, w in weights.items()}
    assert 0.2 < sum(cost[k] * p.density for k, p in often.items()) / sum(cost.values()) <= 0.25 and often != plain


def test_only_the_ratios_of_rows_count():
    weights = net(0)
    some, all_a_third = (LayerWise("4:16", rule="magnitude", rows=rows).setup.patterns(weights) for rows in (None, {"*": 1 / 3}))
    assert all_a_third == some


# ---- given patterns


def test_given_patterns_and_the_rest_of_the_budget():
    given = {"l0": "8:16", "l[12]": "2:16"}
    recipe = LayerWise("4:16", given=given)
    assert list(map(str, recipe.setup.patterns(net(0)).values())) == ["8:16", "2:16", "2:16", "8:16"]
    assert LayerWise("4:16", given=json.dumps(given)) == recipe
    for given, rest in (({"l0": "2:4", "l*": "4:16"}, "4:16"), ({"l0": "2:4"}, "1:8")):
        alone = LayerWise("1:8", rule=None, given=given).setup.patterns(net(0))
        assert list(map(str, alone.values())) == ["2:4", rest, rest, rest]


# ---- in training


def test_patterns_are_fixed_at_attach():
    recipe, model = LayerWise("2:8", rule="magnitude", choices="all", inner="asp"), mlp()
    handle = nm.sparsify_(model, recipe)
    before = kept_counts(handle)
    assert [e.reason for e in handle.report.sparse] == [f"{n}:8" for n in before.values()]
    model[2].weight.data.mul_(5)
    optimizer = handle.attach(recipe.optimizer(model.parameters(), lr=1e-2))
    after = kept_counts(handle)
    model[0].weight.data.mul_(50)
    train(model, optimizer, DATA[:3])
    assert before["2"] < after["2"] and kept_counts(handle) == after
    assert handle.state["patterns"] == {name: f"{n}:8" for name, n in after.items()}
    weights, state = through_a_file(model.state_dict(), optimizer.state_dict())
    other, again, theirs = start(recipe, model=mlp(seed=3))
    assert kept_counts(again) != after
    theirs.load_state_dict(state)
    other.load_state_dict(weights)
    assert kept_counts(again) == after and [e.reason for e in again.report.sparse] == [e.reason for e in handle.report.sparse]
    again.finish(allow_unused=True)
    assert all(nm.ops.is_nm(layer.weight.detach(), layer.pattern) for layer in again.layers.values())


def test_resume_refuses_another_inner_recipe():
    model, handle, optimizer = start(LayerWise("2:8", 20, inner="mdgf", rule="magnitude"))
    step(model, optimizer, DATA[0])
    start(LayerWise("2:8", 20, inner="mdgf"))[1].load_state_dict(handle.state_dict())
    for inner, said in (("srste", "is of mdgf:2:8"), ("mdgf(residual=0.1)", "another schedule: residual")):
        with pytest.raises(nm.CheckpointError, match=said):
            start(LayerWise("2:8", 20, inner=inner))[1].load_state_dict(handle.state_dict())


@for_each(
    "patterns, said",
    [({"0": "2:8"}, "only one of them has 2"), ({"0": "2:8", "2": "2:5"}, "layer '2' does not fit"), ({"0": "2:8", "2": "x"}, "layer '2'")],
)
def test_patterns_of_another_model(patterns, said):
    _, handle, _ = start(LayerWise("2:8"))
    state = handle.state_dict()["nm_recipe"]
    with pytest.raises(nm.CheckpointError, match=said):
        handle.load_state_dict({"nm_recipe": {**state, "patterns": patterns}})


# ---- inner recipes


SCHEDULES = {
    "stepwise": ["7:8 7:8 7:8"] * 3 + ["6:8 4:8 4:8"] * 2 + ["6:8 2:8 1:8"] * 3,
    "geometric": ["48:64 8:32 8:64"] * 2 + ["24:32 8:32 4:32"] * 2 + ["12:16 4:16 2:16"] * 2 + ["6:8 2:8 1:8"] * 2,
    "densify": ["6:64 2:32 1:64"] * 2 + ["6:32 2:32 1:32"] * 2 + ["6:16 2:16 1:16"] * 2 + ["6:8 2:8 1:8"] * 2,
}
"""The patterns of three layers of 64, 32 and 64 inputs; one that is too narrow for a frame takes the next that fits."""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_sdgf_leads_each_layer_to_its_own(schedule):
    model = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))
    recipe = LayerWise("2:8", 8, rule=None, given={"0": "6:8", "4": "1:8"}, inner=SdGf("2:8", 8, schedule=schedule, end=1.0))
    _, handle, optimizer = start(recipe, model=model)
    seen = []
    for _ in range(8):
        seen.append(" ".join(str(layer.mask_pattern) for layer in handle.layers.values()))
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
    assert seen == SCHEDULES[schedule]


INNER = ["ste", "srste", "asp", "asp(start=3)", "mdgf", "mdgf(start=3)", "sdgf", "sste", "maxq", "bimask", "maskllm", "lbc"]


@for_each("inner", INNER)
def test_inner_recipes_end_with_the_layers_patterns(inner):
    model, handle, optimizer = start(LayerWise("2:4", 10, rule=None, given={"0": "1:4"}, inner=inner))
    before = snapshot(model)
    train(model, optimizer, DATA[:10])
    assert (distance(snapshot(model), {k: before[k] for k in SPARSE}) == 0.0) == (inner == "maskllm"), "it holds the weights still"
    handle.finish()
    assert kept_counts(handle) == {"0": 1, "2": 2}
    for layer in handle.layers.values():
        assert nm.ops.is_nm(layer.weight.detach(), layer.pattern)
        assert layer.weight.count_nonzero() == layer.weight.numel() * layer.pattern.density


def test_learned_tensors_of_another_pattern_say_so():
    recipe, model = LayerWise("2:8", 10, rule="magnitude", choices="all", inner="lbc"), mlp()
    handle = nm.sparsify_(model, recipe)
    model[2].weight.data.mul_(50)
    with pytest.raises(nm.RecipeError, match=r"its nm_scores have shape .*needs .*Load the weights before sparsify_"):
        handle.attach(recipe.optimizer(model.parameters(), lr=1e-2))


def test_an_inner_recipe_with_dense_weights_is_refused():
    for text in ("act24(start=0)", "act24(start=2)", "dense"):
        with pytest.raises(nm.RecipeError, match="trains nothing sparse"):
            LayerWise("2:8", 10, inner=text)


def test_no_inner_recipe():
    with pytest.raises(nm.RecipeError, match="LayerWise: inner=None must be a recipe"):
        nm.recipes.get("layerwise:2:4(inner=None)")


def test_no_choice_of_patterns():
    with pytest.warns(UserWarning, match=r'groups of 8 keep at least 1, .* LayerWise\("4:32"\)'):
        assert kept_counts(start(LayerWise("1:8"))[1]) == {"0": 1, "2": 1}


# ---- sharing a budget out


def problem(seed, items=5):
    r = random.Random(seed)
    costs = [sorted(r.sample(range(1, 60), r.randint(1, 5))) for _ in range(items)]
    losses = [[r.random() * 10 for _ in item] for item in costs]
    least, most = sum(c[0] for c in costs), sum(c[-1] for c in costs)
    return costs, losses, r.randint(least, most)


def totals(costs, losses, choices):
    return sum(c[i] for c, i in zip(costs, choices, strict=True)), sum(v[i] for v, i in zip(losses, choices, strict=True))


def test_equals_trying_everything():
    for seed in range(40):
        costs, losses, budget = problem(seed)
        every = [totals(costs, losses, c) for c in itertools.product(*(range(len(item)) for item in costs))]
        cost, loss = totals(costs, losses, allocate(costs, losses, budget))
        assert cost <= budget and loss == pytest.approx(min(v for c, v in every if c <= budget))
        cost, loss = totals(costs, losses, allocate(costs, losses, budget, fill=True))
        most = max(c for c, _ in every if c <= budget)
        assert cost == most and loss == pytest.approx(min(v for c, v in every if c == most))


def test_large_budgets_are_shared_out_in_few_sums(monkeypatch):
    """In units of the common divisor: seven of a million are seven sums, not seven million; where it is 1, nearly."""
    r = random.Random(0)
    sizes = [r.randint(900, 1100) for _ in range(30)]
    costs, losses = [[s, 2 * s, 4 * s, 8 * s] for s in sizes], [[s / n for n in (1, 2, 4, 8)] for s in sizes]
    best = [totals(costs, losses, allocate(costs, losses, 3 * sum(sizes), fill))[1] for fill in (False, True)]
    monkeypatch.setattr(module, "SUMS", 256)
    for fill in (False, True):
        cost, loss = totals(costs, losses, allocate(costs, losses, 3 * sum(sizes), fill))
        assert 0.97 * 3 * sum(sizes) < cost <= 3 * sum(sizes) and loss < 1.02 * best[fill]
    monkeypatch.setattr(module, "SUMS", 8)
    costs, losses = [[10**6, 2 * 10**6, 4 * 10**6]] * 2, [[9, 3, 0], [9, 5, 0]]
    assert allocate(costs, losses, 7 * 10**6) == [1, 2] and allocate(costs, losses, 6 * 10**6 - 1) == [1, 1]


def test_too_small_a_budget():
    with pytest.raises(nm.RecipeError, match="cheapest choices cost 3, more than the budget of 2"):
        allocate([[1, 2], [2, 4]], [[1, 0], [1, 0]], 2)
