"""The option ``packed``: which plans it makes, what it refuses, and that it changes how products are computed and nothing else."""

import pytest
import torch

import nmkernels as nm
from nmkernels.autograd import GemmPlan
from nmkernels.pattern import RecipeError
from nmkernels.recipes import FST, SRSTE, SSTE, STE, STEP, LayerWise
from nmkernels.recipes.packing import packing
from python_tests.recipes.loop import distance, snapshot
from python_tests.recipes.running import DATA, F32, F64, run, start, step, through_a_file

MAKERS = {
    "ste": lambda **k: STE("2:4", **k),
    "srste": lambda **k: SRSTE("2:4", decay=0.1, **k),
    "step": lambda **k: STEP("2:4", t_min=2, t_max=7, threshold=1e-30, decay=0.1, **k),
    "step_sste": lambda **k: STEP("2:4", 20, switch="fixed", switch_at=6, inner=SSTE(seed=1, **k)),
    "sste": lambda **k: SSTE("2:4", seed=1, **k),
    "sste_1_4": lambda **k: SSTE("1:4", seed=1, **k),
    "sste_dense_wgrad": lambda **k: SSTE("2:4", mvue=None, **k),
    "fst": lambda **k: FST("2:4", 20, refresh=3, decay=0.1, seed=1, **k),
    "fst_1_4": lambda **k: FST("1:4", refresh=3, decay=0.1, fine_tune=0, mvue=None, **k),
    "layerwise": lambda **k: LayerWise("2:8", inner=SRSTE("2:8", decay=0.1, **k), rule="magnitude", choices="all"),
}
EACH = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())


@EACH
@pytest.mark.parametrize("packed", [True, "auto"])
def test_twenty_steps_are_those_of_the_dense_layout(make, packed):
    for dtype, close in ((F64, 1e-10), (F32, 1e-4)):
        data = [(x.to(dtype), y.to(dtype)) for x, y in DATA]
        want, got = (run(make(packed=value), dtype, data)[0] for value in (False, packed))
        assert distance(snapshot(got), snapshot(want)) < close


@EACH
def test_packed_products_are_what_runs(make):
    model, handle, optimizer = start(make(packed=True), F32)
    for x, y in DATA[:9]:
        step(model, optimizer, (x.float(), y.float()))
    layer = model[2]
    assert layer.plan.packs and handle.stage.transform is not None
    model(torch.randn(4, 16))
    (packed,) = layer.used.kept
    assert packed.rows.pattern == layer.mask_pattern and packed.columns is None, "on a CPU the rows serve both products"
    assert torch.equal(packed.rows.dense(), layer.used_weight())


def test_plans():
    mvue = GemmPlan(wgrad="mvue", n=2, m=4)
    assert packing("X", False, "1:4", mvue) is mvue
    assert packing("X", True, "1:4", mvue) == GemmPlan("packed", "device", "mvue", 2, 4)
    assert packing("X", "auto", "1:8") == GemmPlan("auto", "auto", n=1, m=8)
    assert FST("2:4", 60, packed=True).plan().wgrad == "mvue" and SSTE("1:4", packed="auto").plan().fprop == "auto"
    assert all(not recipe().stage({}).plan.packs for recipe in (STE, SRSTE, SSTE))


@pytest.mark.parametrize("recipe", [STE, SRSTE, SSTE, STEP, lambda **k: FST(fine_tune=0, **k)])
@pytest.mark.parametrize("value", ["always", None, 2])
def test_unknown_values_are_refused(recipe, value):
    with pytest.raises(RecipeError, match=f'packed={value!r} is unknown; choose one of False, True and "auto"'):
        recipe(packed=value) if recipe is not STEP else recipe(packed=value, t_max=7, t_min=2)


def test_what_needs_the_dense_layout_is_refused():
    with pytest.raises(RecipeError, match="fp8='paper', packed=True do not go: .*the weight in dense layout"):
        SSTE(fp8="paper", packed=True)
    with pytest.raises(RecipeError, match="there is an inner recipe; give it to that one"):
        STEP("2:4", 20, packed=True, inner="srste")


@pytest.mark.parametrize("text", ["srste:2:4(packed=True)", "sste:1:4(packed='auto')", "fst:2:4(fine_tune=0, packed=auto)"])
def test_it_is_written_as_text_and_read_again(text):
    recipe = nm.recipes.get(text)
    assert recipe.packed in (True, "auto") and nm.recipes.get(recipe.text()) == recipe


@pytest.mark.parametrize(("before", "after"), [(False, True), (True, "auto"), ("auto", False)])
def test_a_run_may_go_on_with_other_products(before, after):
    whole = run(MAKERS["fst"](packed=before))[0]
    model, _, optimizer = start(MAKERS["fst"](packed=before))
    for batch in DATA[:8]:
        step(model, optimizer, batch)
    weights, state = through_a_file(model.state_dict(), optimizer.state_dict())
    other, _, theirs = start(MAKERS["fst"](packed=after), seed=5)
    other.load_state_dict(weights)
    theirs.load_state_dict(state)
    for batch in DATA[8:]:
        step(other, theirs, batch)
    assert distance(snapshot(other), snapshot(whole)) < 1e-10
