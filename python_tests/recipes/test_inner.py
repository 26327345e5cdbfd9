"""STEP with another recipe in its second phase: how that one is given, over which steps it runs, and what it takes from the switch."""

import pytest
import torch

import nmkernels as nm
from nmkernels.recipes import SRSTE, STEP, MdGf, SdGf
from python_tests.recipes.loop import batches
from python_tests.recipes.loop_effective import soft
from python_tests.recipes.training import run, start, step

DATA = batches(20)


def begins(recipe):
    return [begin for begin, _ in recipe.stages]


def fixed(inner, pattern="1:8", total=100, at=40, **keywords):
    return STEP(pattern, total, switch="fixed", start=at, inner=inner, **keywords)


# ---- text, pattern and length


def test_text_round_trip_and_inherited_arguments():
    for recipe in (fixed(SdGf("1:8", 60), clamp=None), fixed("mdgf(schedule=linear)")):
        assert nm.recipes.get(nm.recipes.text(recipe)) == recipe
    assert fixed("mdgf").inner == MdGf("1:8", 100) and fixed("srste(decay=0.1)").inner == SRSTE("1:8", 100, decay=0.1)
    assert nm.recipes.get("step:1:8", total_steps=100, inner="mdgf") == STEP("1:8", 100, inner=MdGf("1:8", 55))


def test_inner_schedule_covers_the_remaining_steps():
    recipe = STEP("1:8", 1000, inner=MdGf("1:8", 1000, end=0.9))
    assert begins(recipe.sparse(101)) == [0, 0, round(899 * 0.9)] and begins(recipe.sparse(501)) == [0, 0, 449]
    assert recipe.sparse(501) is recipe.sparse(501)
    assert begins(STEP("1:8", 1000, inner=MdGf("1:8", 101, end=100)).sparse(400)) == [0, 0, 100]
    recipe = STEP("1:8", t_min=3, t_max=9, inner=MdGf("1:8", 50))
    assert begins(recipe.sparse(4)) == begins(recipe.sparse(10)) == begins(MdGf("1:8", 50))


@pytest.mark.parametrize(("t_max", "fits"), [(0.5, True), (95, True), (96, False), (None, False)])
def test_too_few_steps_after_the_latest_switch(t_max, fits):
    """The three frames of 1:4 need four steps, after any switch that can happen: three quarters of them are three."""
    if fits:
        STEP("1:4", 100, t_max=t_max, inner="sdgf")
    else:
        with pytest.raises(nm.RecipeError, match=r"after a switch at step 9[79] its inner recipe has too few steps left.*frames"):
            STEP("1:4", 100, t_max=t_max, inner="sdgf")


# ---- in training


def test_in_phase_0_the_preview_is_of_the_present_weights():
    model, handle, _ = run(fixed("sste(mvue=None)", "2:4", 20, 15), data=DATA[:9])
    w = model[0].weight.detach()
    s = soft(w, 2, 4)
    with handle.deployable():
        torch.testing.assert_close(model[0].effective_weight(), (w * s).sum() / s.square().sum() * s, rtol=1e-12, atol=1e-12)
    assert torch.equal(model[0].effective_weight(), w)


def test_inner_recipe_after_the_switch():
    for inner, pattern in (("sste(seed=3)", "2:4"), ("mdgf", "1:8")):
        model, handle, optimizer = start(fixed(inner, pattern, 20, 6))
        for t, batch in enumerate(DATA):
            assert inner == "mdgf" or (handle.layers["0"].seed is None) == (t < 6)
            step(model, optimizer, batch)
            got = handle.metrics()
            assert ("flow" in got) == (inner == "mdgf" and t >= 5) and got["switch_step"].item() == (6 if t >= 5 else 0)
        assert inner == "mdgf" or handle.layers["0"].seed[1] == 14


def test_another_inner_recipe_is_refused_after_the_switch_only():
    recipe = fixed("mdgf", "1:8", 20, 6)
    for count, fits in ((4, True), (9, False)):
        _, handle, _ = run(recipe, data=DATA[:count])
        for other in (fixed("mdgf(residual=0.1)", "1:8", 20, 6), fixed("srste", "1:8", 20, 6)):
            theirs = start(other)[1]
            if fits:
                theirs.load_state_dict(handle.state_dict())
            else:
                with pytest.raises(nm.CheckpointError, match="another schedule|the checkpoint is of mdgf:1:8"):
                    theirs.load_state_dict(handle.state_dict())


def test_profile_is_dense_and_then_the_inner_recipes():
    recipe = fixed("mdgf(end=0.5)", "1:8", 100, 40)
    assert [(s.steps, s.fprop) for s in recipe.profile(100)] == [(40, 1.0), (30, 1.0), (30, 0.125)]
    assert sum(s.steps for s in recipe.switched_at(20).profile(100)) == 100
    assert fixed("sste", "2:4").profile(100)[-1] == nm.recipes.SSTE().profile(60)[-1]
