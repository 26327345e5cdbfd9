"""A trainer that saves only model and optimizer resumes bit for bit, in every phase of every recipe."""

import copy
from dataclasses import replace

import pytest
import torch

import nmkernels as nm
from nmkernels.optim import MaskedAdamW
from nmkernels.pattern import CheckpointError
from nmkernels.recipes import ASP, SRSTE, STE, STEP
from nmkernels.recipes.registry import spec
from python_tests.recipes.loop import SPARSE, batches, distance, mlp, snapshot
from python_tests.recipes.training import metrics_of, same, through_a_file, train

F32 = torch.float32
DATA = batches(14, F32)
STEP_T0_5 = STEP(t_min=2, t_max=4, threshold=1e-30)
KEYWORDS = {"lr": 1e-2, "betas": (0.9, 0.9)}


def masked(p):
    return MaskedAdamW(p, **KEYWORDS)


def fused(p):
    return torch.optim.AdamW(p, fused=True, **KEYWORDS)


def plain(p):
    return torch.optim.AdamW(p, **KEYWORDS)


def sgd(p):
    return torch.optim.SGD(p, lr=0.05, momentum=0.9)


CASES = {
    "srste_plain": (SRSTE(decay=0.1), plain, 4),
    "srste_fused": (SRSTE(decay=0.1), fused, 4),
    "srste_sgd": (SRSTE(decay=0.1), sgd, 4),
    "step_raw_clamped": (replace(STEP_T0_5, bias_corrected=False, clamp=0.5, decay=0.1), masked, 8),
    "step_paper_geometric": (STEP(switch="paper_geometric", t_min=7, t_max=12, threshold=1e-7), masked, 6),
    "step_window": (STEP(total_steps=1000, threshold=10.0), masked, 6),
    "step_relative": (STEP(switch="relative", t_min=3, t_max=12), masked, 6),
    "step_relative_norm": (STEP(switch="relative_norm", t_min=3, t_max=12, threshold=0.1), masked, 3),
    "step_staleness": (STEP(switch="staleness", t_min=3, t_max=13, threshold=0.01), masked, 6),
    "asp_plain": (ASP(), plain, 4),
    "asp_sgd": (ASP(start=3), sgd, 5),
    "asp_wanda": (ASP(score="wanda"), masked, 4),
}
"""Those that the conformance suite, which resumes every entry of its roster, does not have."""


def start(recipe, make, seed=0):
    model = mlp(F32, seed)
    handle = nm.sparsify_(model, recipe)
    return model, handle, make(model.parameters())


def checkpoint(recipe, make, steps):
    """What a trainer writes after ``steps`` steps, and where the uninterrupted run ends."""
    model, handle, optimizer = start(recipe, make)
    if recipe == ASP(score="wanda"):
        with handle.calibrate():
            model(DATA[0][0])
    handle.attach(optimizer)
    train(model, optimizer, DATA[:steps])
    parts = through_a_file(model.state_dict(), optimizer.state_dict(), handle.state_dict())
    train(model, optimizer, DATA[steps:])
    return parts, snapshot(model), copy.deepcopy(handle.state), metrics_of(handle)


@pytest.mark.parametrize("case", CASES)
def test_resume(case):
    """From model and optimizer; also where a trainer knows only torch's own keys of a group and saves the handle's state with them."""
    recipe, make, steps = CASES[case]
    (weights, state, mine), want, end, metrics = checkpoint(recipe, make, steps)
    for separate in [False] if case == "asp_wanda" else [False, True]:
        model, handle, optimizer = start(recipe, make, seed=5)
        model.load_state_dict(weights)
        if separate:
            for group in state["param_groups"]:
                group.pop("nm_recipe", None)
            handle.attach(optimizer)
        optimizer.load_state_dict(copy.deepcopy(state))  # torch keeps the very tensors that it loads
        if separate:
            handle.load_state_dict(mine)
        else:
            handle.attach(optimizer)
        train(model, optimizer, DATA[steps:])
        assert distance(snapshot(model), want) == 0.0
        assert metrics_of(handle) == metrics
        if recipe.name == "step":
            assert handle.state["switch_step"] == end["switch_step"] > 0


def test_a_loaded_state_belongs_to_one_run_only():
    """Two runs from one state dict, and that state dict afterwards, do not share anything."""
    (weights, state, _), want, _, _ = checkpoint(STEP_T0_5, masked, 8)
    kept = copy.deepcopy(state)
    for _ in range(2):
        model, handle, optimizer = start(STEP_T0_5, masked)
        handle.attach(optimizer)
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        train(model, optimizer, DATA[8:])
        assert distance(snapshot(model), want) == 0.0
    assert same(state, kept)


def test_going_back_in_time():
    """Loading a checkpoint of phase 0 into a run that is past its switch, or of before pruning after it."""
    for recipe, early in ((STEP_T0_5, 3), (ASP(start=6), 4)):
        (weights, state, _), want, _, _ = checkpoint(recipe, masked, early)
        model, handle, optimizer = start(recipe, masked)
        handle.attach(optimizer)
        train(model, optimizer, DATA)
        optimizer.load_state_dict(state)
        model.load_state_dict(weights)
        assert handle.metrics()["phase"].item() == 0 and handle.run.held.masks == {}
        train(model, optimizer, DATA[early:])
        assert distance(snapshot(model), want) == 0.0


def test_state_of_plain_adamw_into_a_step_run():
    """The recipe starts at its beginning with the loaded moments; v* gets the bias correction of all its steps."""
    dense = mlp(F32)
    before = plain(dense.parameters())
    train(dense, before, DATA[:6])
    weights, state = through_a_file(dense.state_dict(), before.state_dict())
    for attach_first in (True, False):
        model, handle, optimizer = start(STEP_T0_5, masked)
        if attach_first:
            handle.attach(optimizer)
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        if not attach_first:
            handle.attach(optimizer)
        moments = [optimizer.state[model.get_parameter(k)]["exp_avg_sq"].clone() for k in SPARSE]
        loaded = [before.state[dense.get_parameter(k)]["exp_avg_sq"] for k in SPARSE]
        assert all(torch.equal(a, b) for a, b in zip(moments, loaded, strict=True))
        train(model, optimizer, DATA[6:])
        assert (handle.state["switch_step"], handle.state["v_step"]) == (5, 11)


def test_the_handles_state_is_a_copy_both_ways():
    model, handle, optimizer = start(STEP_T0_5, masked)
    handle.attach(optimizer)
    train(model, optimizer, DATA[:3])
    state = handle.state_dict()
    kept = copy.deepcopy(state)
    train(model, optimizer, DATA[3:])
    assert same(state, kept) and handle.state["switch_step"] == 5
    handle.load_state_dict(state)
    assert handle.metrics()["phase"].item() == 0
    train(model, optimizer, DATA)
    assert same(state, kept) and handle.state["switch_step"] == 5


# ---- what is refused


FOREIGN = {
    "recipe": (STE("2:4"), SRSTE("2:4"), r"of ste:2:4, this run uses srste:2:4"),
    "pattern": (SRSTE("2:4"), SRSTE("1:4"), r"of srste:2:4, this run uses srste:1:4"),
    "policy": (STEP_T0_5, replace(STEP_T0_5, switch="paper_geometric"), "switch is relative there and paper_geometric here"),
}


@pytest.mark.parametrize("way", ["load", "attach", "handle"])
@pytest.mark.parametrize("case", FOREIGN)
def test_checkpoint_of_another_recipe_leaves_all_as_it_was(case, way):
    """What makes a state foreign, and what mangled, is in test_base."""
    theirs, mine, said = FOREIGN[case]
    (_, state, handle_state), _, _, _ = checkpoint(theirs, masked, 3)
    model, handle, optimizer = start(mine, masked)
    if way == "attach":
        optimizer.load_state_dict(state)
    else:
        handle.attach(optimizer)
        train(model, optimizer, DATA[:2])
    before = copy.deepcopy((optimizer.state_dict(), snapshot(model), handle.metrics()["phase"].item()))
    actions = {
        "load": lambda: optimizer.load_state_dict(state),
        "attach": lambda: handle.attach(optimizer),
        "handle": lambda: handle.load_state_dict(handle_state),
    }
    with pytest.raises(CheckpointError, match=said):
        actions[way]()
    assert same(before, (optimizer.state_dict(), snapshot(model), handle.metrics()["phase"].item()))
    assert len(optimizer._optimizer_step_pre_hooks) == (0 if way == "attach" else 1)
    if way == "handle":
        with pytest.raises(CheckpointError, match="not a handle's state dict"):
            handle.load_state_dict({"state": handle_state})


def test_after_the_switch_the_policy_no_longer_matters():
    (_, state, _), _, _, _ = checkpoint(STEP_T0_5, masked, 8)
    _, handle, optimizer = start(replace(STEP_T0_5, switch="paper_geometric"), masked)
    handle.attach(optimizer)
    optimizer.load_state_dict(state)
    assert handle.metrics()["phase"].item() == 1


def test_masks_of_another_model():
    """Of other layers, of other shapes, or not there at all; in a handle's state, and with the moments in an optimizer's."""
    (_, state, mine), _, _, _ = checkpoint(ASP(), sgd, 2)
    model, handle, optimizer = start(ASP(), sgd)
    handle.attach(optimizer)
    train(model, optimizer, DATA[:1])
    before, held = copy.deepcopy(optimizer.state_dict()), mine["nm_recipe"]["held"]
    for bad, said in (
        ({"0": held["0"]}, "only one of them has 2"),
        ({**held, "0": held["2"]}, "'0' has a different shape from its weight"),
        ({**held, "elsewhere": {}}, "layers that this model does not have: elsewhere"),
    ):
        with pytest.raises(CheckpointError, match=said):
            handle.load_state_dict({"nm_recipe": {**mine["nm_recipe"], "held": bad}})
    for change, said in (
        (lambda own: own[0].pop("nm_held"), "masks of layer '0' are missing"),
        (lambda own: own[0].update(nm_held=own[2]["nm_held"][:4]), "'0' has a different shape from its weight"),
    ):
        bad = copy.deepcopy(state)
        change(bad["state"])
        with pytest.raises(CheckpointError, match=said):
            optimizer.load_state_dict(bad)
        _, again, theirs = start(ASP(), sgd)
        theirs.load_state_dict(bad)
        with pytest.raises(CheckpointError, match=said):
            again.attach(theirs)
    assert same(before, optimizer.state_dict())


def test_a_failed_attach_keeps_what_was_loaded():
    model, handle, optimizer = start(ASP(score="wanda"), sgd)
    loaded = {"spec": spec(handle.recipe), **handle.recipe.first_state({})}
    optimizer.param_groups[0]["nm_recipe"] = loaded
    with pytest.raises(nm.RecipeError, match="calibrate"):
        handle.attach(optimizer)
    assert optimizer.param_groups[0]["nm_recipe"] is loaded and not optimizer._optimizer_step_pre_hooks
    with handle.calibrate():
        model(DATA[0][0])
    handle.attach(optimizer)
