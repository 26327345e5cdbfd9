"""Schedules: steps as counts and shares, spans of FLOPs, and the profile of each recipe by hand."""

import math

import numpy as np
import pytest
import torch

import nmkernels as nm
from nmkernels.recipes import ASP, FST, SRSTE, SSTE, STE, STEP, BiMask, Dense, MdGf, SdGf, SLoPe, Span
from nmkernels.recipes.compose import deployed
from nmkernels.recipes.contract import truncate
from nmkernels.recipes.schedule import resolve_step


def shares(recipe, steps=100):
    return [(s.steps, s.fprop, s.dgrad, s.wgrad) for s in recipe.profile(steps)]


def test_steps_are_counts_or_shares():
    for value, total, want in (
        (250, None, 250),
        (250, 10, 250),
        (np.int64(250), 10, 250),
        (0, None, 0),
        (1, 10, 1),
        (torch.tensor(1), 10, 1),
    ):
        assert resolve_step("STEP", "t_min", value, total) == want
    for value, total, want in ((0.1, 1000, 100), (0.0, 10, 0), (1.0, 10, 10), (0.25, 10, 2)):
        assert resolve_step("STEP", "t_min", value, total) == want
    for value in (-1, -0.1, 1.01, float("nan"), True, None, "8", [8], torch.tensor(0.5)):
        with pytest.raises(nm.RecipeError, match="STEP: t_min="):
            resolve_step("STEP", "t_min", value, 100)
    with pytest.raises(nm.RecipeError, match="total_steps is needed"):
        resolve_step("STEP", "t_max", 0.5, None)


@pytest.mark.parametrize("bad", [{"steps": -1}, {"fprop": -0.1}, {"dgrad": math.nan}, {"wgrad": math.inf}, {"rank": -1}, {"teacher": True}])
def test_a_span_checks_itself(bad):
    with pytest.raises(nm.RecipeError, match=next(iter(bad))):
        Span(**{"steps": 1, **bad})


def test_first_cuts_and_prolongs():
    spans = [Span(30), Span(20, fprop=0.5), Span(0, fprop=0.25)]
    assert truncate(spans, 40) == [Span(30), Span(10, fprop=0.5)]
    assert truncate(spans, 100) == [Span(30), Span(20, fprop=0.5), Span(50, fprop=0.25)]
    assert truncate(spans, 30) == [Span(30)]
    assert truncate(spans, 0) == []


def test_recipes_without_a_schedule():
    assert shares(Dense("1:8")) == [(100, 1, 1, 1)] and deployed(Dense("2:4")).fprop == 1
    assert shares(STE("1:8")) == [(100, 1 / 8, 1, 1)] and deployed(SRSTE("1:16")).fprop == 1 / 16
    assert shares(SRSTE("2:4")) == shares(ASP("2:4")) == [(100, 1 / 2, 1, 1)]
    # by its paper's table: forward sparse, dgrad dense, wgrad sparse by MVUE, whose pattern is not that of the weights
    assert shares(SSTE("1:8")) == [(100, 1 / 8, 1, 1 / 2)]
    assert shares(SSTE("2:4", mvue=None)) == [(100, 1 / 2, 1, 1)]
    assert shares(SSTE("2:4", mvue_pattern="1:4")) == [(100, 1 / 2, 1, 1 / 4)]


def test_step_and_asp_are_dense_to_their_latest_switch():
    assert shares(ASP("1:4", total_steps=100, start=0.3)) == [(30, 1, 1, 1), (70, 1 / 4, 1, 1)]
    assert shares(STEP("2:4", total_steps=100)) == [(51, 1, 1, 1), (49, 1 / 2, 1, 1)]
    assert shares(STEP("2:4", total_steps=100, switch="fixed", start=0.25)) == [(25, 1, 1, 1), (75, 1 / 2, 1, 1)]
    assert shares(STEP("2:4", t_min=10, t_max=None)) == [(100, 1, 1, 1)]
    assert shares(STEP("1:4", total_steps=100).switched_at(20)) == [(20, 1, 1, 1), (80, 1 / 4, 1, 1)]


def test_mdgf_is_dense_until_its_mask_is_binary():
    assert shares(MdGf("1:8", 100)) == shares(MdGf("1:8", 100, start=10)) == [(75, 1, 1, 1), (25, 1 / 8, 1, 1)]
    assert shares(MdGf("1:8", 100, end=1.0)) == [(100, 1, 1, 1)]
    assert shares(MdGf("1:8", 100, schedule="linear", end=1.0)) == [(100, 1, 1, 1)]
    # D = max(0, 1 − t/20) is 0 from t = 20 on, long before the fine-tuning phase
    assert shares(MdGf("1:8", 100, schedule="linear", coefficient=0.05)) == [(20, 1, 1, 1), (80, 1 / 8, 1, 1)]


def test_sdgf_counts_each_frame_by_its_own_pattern():
    frames = [(20, share, 1, 1) for share in (1, 7 / 8, 1 / 2, 1 / 4, 1 / 8)]
    assert shares(SdGf("1:8", 100, start=20, end=1.0)) == frames
    assert shares(SdGf("1:8", 100, schedule="geometric", end=80)) == [(20, 1 / 8, 1, 1)] * 3 + [(40, 1 / 8, 1, 1)]
    assert shares(SdGf("1:2", 100, schedule="densify", end=1.0), 60) == [(25, 1 / 16, 1, 1), (25, 1 / 8, 1, 1), (10, 1 / 4, 1, 1)]
    assert shares(SdGf("1:8", 100, end=1.0), 200)[-1] == (125, 1 / 8, 1, 1)


def test_recipes_that_save_in_the_gradient_of_the_input():
    assert shares(BiMask("2:8")) == [(100, 0.25, 0.25, 1)]
    assert shares(FST("2:4", 60), 60) == [(50, 0.5, 0.5, 0.5), (10, 1, 1, 1)]
    assert shares(FST("1:4", end=None, mvue=None)) == [(100, 0.25, 0.25, 1)]
    plain, lazy = SLoPe("2:8", 100, rank=0.1, start=90).profile(100)
    assert plain == Span(90, 0.25, 0.25, 1.0) and lazy == Span(10, 0.25, 0.25, 1.0, rank=0.1)
    assert deployed(FST("2:4", 60)) == deployed(Dense()) and deployed(SLoPe("2:8", 100, rank=0.1)).rank == 0.1
