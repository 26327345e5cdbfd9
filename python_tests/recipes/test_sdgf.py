"""SdGf: its frames, layers too narrow for them, and what it refuses. The trajectories are the roster's."""

import pytest
import torch
from torch import nn

import nmkernels as nm
from nmkernels.optim import MaskedAdamW
from nmkernels.recipes import SdGf
from python_tests.recipes.loop import batches, top_n
from python_tests.recipes.running import start, step


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


def begins(recipe):
    return [begin for begin, _ in recipe.stages]


def test_frames_are_of_equal_length_between_the_phases():
    assert begins(SdGf("1:8", 100)) == [0, 0, 25, 50, 75]
    assert begins(SdGf("1:8", 100, start=0.2, end=60)) == [0, 20, 30, 40, 50]
    assert begins(SdGf("1:4", 10)) == [0, 0, 3, 7]


@pytest.mark.parametrize("make", [MaskedAdamW, torch.optim.AdamW])
def test_flips_density_and_phase_follow_the_frames(make):
    recipe = SdGf("1:8", 20, start=4)
    model, handle, optimizer = start(recipe, make=make)
    for t, batch in enumerate(batches(20)):
        frame = (t - 4) // 4 if t >= 4 else None
        now = recipe.frames()[frame] if frame is not None else nm.Pattern("8:8")
        layers = handle.layers.values()
        before = [top_n(layer.weight.detach(), now.n, now.m) for layer in layers]
        step(model, optimizer, batch)
        after = [top_n(layer.weight.detach(), now.n, now.m) for layer in layers]
        got = {k: v.item() for k, v in handle.metrics().items()}
        assert got["flip_rate"] == sum(int((a ^ b).sum()) for a, b in zip(after, before, strict=True)) / sum(a.numel() for a in after)
        assert got["density"] == now.density
        assert got["frame"] == min(4, (t + 1) // 4) and got["phase"] == (t >= 3)


def test_layers_and_optimizer_mask_by_the_pattern_of_the_frame():
    """By that of now and not of the end."""
    model, _, optimizer = start(SdGf("1:8", 20))
    for batch in batches(3):
        step(model, optimizer, batch)
        w = model[0].weight.detach()
        assert torch.equal(model[0].effective_weight(), w * top_n(w, 7, 8))
        assert str(optimizer.targets[model[0].weight].pattern) == "7:8"


def test_a_narrow_layer_takes_the_next_frame_that_fits():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))
    recipe = SdGf("1:8", 8, schedule="geometric")
    handle = nm.sparsify_(model, recipe)
    optimizer = handle.attach(MaskedAdamW(model.parameters()))
    seen = []
    for _ in range(8):
        seen.append(" ".join(str(model[i].mask_pattern) for i in (0, 2, 4)))
        for i in (0, 2, 4):
            p, w = model[i].mask_pattern, model[i].weight.detach()
            assert torch.equal(model[i].effective_weight(), w * top_n(w, p.n, p.m))
        optimizer.zero_grad()
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        assert handle.metrics()["density"].item() == 1 / 8
    assert seen[::2] == ["8:64 4:32 8:64", "4:32 4:32 4:32", "2:16 2:16 2:16", "1:8 1:8 1:8"] and seen[1::2] == seen[::2]
    handle.finish()
    assert all(nm.ops.is_nm(model[i].weight.detach(), "1:8") for i in (0, 2, 4))
