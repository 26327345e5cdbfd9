"""SdGf: its frames. The trajectories are the roster's; layers too narrow for a frame are in test_layerwise.py."""

import pytest
import torch

import nmkernels as nm
from nmkernels.optim import MaskedAdamW
from nmkernels.recipes import SdGf
from python_tests.recipes.loop import batches, top_n
from python_tests.recipes.training import metrics_of, start, step


def test_frames():
    for pattern, schedule, want in [
        ("1:16", "stepwise", "15:16 8:16 4:16 2:16 1:16"),
        ("1:8", "stepwise", "7:8 4:8 2:8 1:8"),
        ("2:4", "stepwise", "3:4 2:4"),
        ("3:8", "stepwise", "7:8 4:8 3:8"),
        ("1:7", "stepwise", "6:7 4:7 2:7 1:7"),
        ("1:2", "stepwise", "1:2"),
        ("3:4", "stepwise", "3:4"),
        ("4:4", "stepwise", "4:4"),
        ("1:8", "geometric", "8:64 4:32 2:16 1:8"),
        ("2:4", "geometric", "16:32 8:16 4:8 2:4"),
        ("1:32", "geometric", "8:256 4:128 2:64 1:32"),
        ("1:64", "geometric", "4:256 2:128 1:64"),
        ("1:256", "geometric", "1:256"),
        ("1:8", "densify", "1:64 1:32 1:16 1:8"),
    ]:
        assert " ".join(map(str, SdGf(pattern, 100, schedule=schedule).frames())) == want


def test_frames_are_of_equal_length_between_the_phases():
    for recipe, begins in [
        (SdGf("1:8", 100), [0, 0, 19, 38, 56]),
        (SdGf("1:8", 100, end=1.0), [0, 0, 25, 50, 75]),
        (SdGf("1:8", 100, start=0.2, end=60), [0, 20, 30, 40, 50]),
        (SdGf("1:4", 10, end=1.0), [0, 0, 3, 7]),
    ]:
        assert [begin for begin, _ in recipe.stages] == begins


@pytest.mark.parametrize("make", [MaskedAdamW, torch.optim.AdamW])
def test_flips_density_and_phase_follow_the_frames(make):
    recipe = SdGf("1:8", 20, start=4, end=1.0)
    model, handle, optimizer = start(recipe, make=make)
    for t, batch in enumerate(batches(20)):
        now = recipe.frames()[(t - 4) // 4] if t >= 4 else nm.Pattern("8:8")
        before, _, after = marked(handle, now), step(model, optimizer, batch), marked(handle, now)
        got = metrics_of(handle)
        assert got["flip_rate"] == (before ^ after).double().mean() and got["density"] == now.density
        assert got["frame"] == min(4, (t + 1) // 4) and got["phase"] == (t >= 3)


def marked(handle, pattern):
    return torch.cat([top_n(layer.weight.detach(), pattern.n, pattern.m).flatten() for layer in handle.layers.values()])
