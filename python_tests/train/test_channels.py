"""ASP with channel permutation: the function stays, optimizers follow, and the report tells."""

import copy
import logging

import pytest
import torch
from torch import nn

import nmkernels as nm
from nmkernels.optim import MaskedAdamW
from nmkernels.recipes import ASP, search_permutation
from nmkernels.recipes.methods import permutation
from python_tests.recipes.loop import batches, distance, mlp, snapshot
from python_tests.recipes.training import F32, start, through_a_file, train

DATA = batches(20)
FEW = 3
"""Escapes: enough to have some."""

MAKERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "masked_adamw": lambda p: MaskedAdamW(p, lr=1e-2),
}


def orders(before, after):
    """The order of hidden channels that leads from one copy of layer 0 to the other, by its bias."""
    return torch.tensor([int((before["0.bias"] == b).nonzero()) for b in after["0.bias"]])


@pytest.mark.parametrize(("pattern", "width", "sparse"), [("2:4", 16, ["0", "2"]), ("1:8", 10, ["2"])])
def test_before_the_mask_the_function_is_the_same(pattern, width, sparse):
    """Also where the producer is not sparse itself."""
    model = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8)).double()
    x, dense, before = torch.randn(5, width, dtype=torch.float64), copy.deepcopy(model), snapshot(model)
    want = dense(x)
    handle = nm.sparsify_(model, ASP(pattern, permute=True, escapes=FEW))
    assert list(handle.layers) == sparse
    handle.run.hooks.use_final_form()
    order = orders(before, snapshot(model))
    assert not torch.equal(model[0].weight, before["0.weight"])
    dense.load_state_dict(model.state_dict())
    assert torch.allclose(dense(x), want, atol=1e-13)
    assert torch.equal(model[2].weight, before["2.weight"][:, order])
    assert torch.equal(model[4].weight, before["4.weight"])
    handle.run.hooks.enter(handle.run.stage)
    assert distance(snapshot(model), before) == 0.0


@pytest.mark.parametrize("maker", MAKERS)
def test_moments_and_gradients_move_along(maker):
    """Dense until step 5; then every tensor of the layers is the dense run's, in the new order."""
    model, dense = mlp(), mlp()
    handle = nm.sparsify_(model, ASP("2:4", permute=True, escapes=FEW, start=5))
    ours, theirs = handle.attach(MAKERS[maker](model.parameters())), MAKERS[maker](dense.parameters())
    train(model, ours, DATA[:5])
    train(dense, theirs, DATA[:5])
    order = orders(snapshot(dense), snapshot(model))
    assert sorted(order.tolist()) == list(range(32)) != order.tolist()
    assert torch.equal(order, search_permutation(dense[2].weight.detach(), escapes=FEW).order)
    for index, take in ((0, lambda t: t[order]), (2, lambda t: t[:, order])):
        mask = nm.ops.mask(take(dense[index].weight.detach()), "2:4")
        assert torch.equal(model[index].weight, take(dense[index].weight) * mask)
        assert torch.equal(model[index].weight.grad, take(dense[index].weight.grad))
        for key, value in theirs.state[dense[index].weight].items():
            got = ours.state[model[index].weight][key]
            assert torch.equal(got, take(value) if value is not None and value.dim() == 2 else value)
    assert torch.equal(model[4].weight, dense[4].weight)


def test_the_mask_keeps_more_and_says_so():
    model = mlp()
    handle = nm.sparsify_(model, ASP("2:4", permute=True, escapes=FEW))
    assert "0  left alone: its input comes from the input of the model" in str(handle.report)
    assert "2  to be reordered, with the outputs of 0" in str(handle.report)
    total = model[2].weight.detach().abs().sum()
    plain = nm.ops.prune(model[2].weight.detach(), "2:4").abs().sum() / total
    optimizer = handle.attach(MAKERS["adamw"](model.parameters()))
    kept = model[2].weight.detach().abs().sum() / total
    assert kept > plain * 1.02
    assert f"the mask keeps {kept:.4f} of the magnitude instead of {plain:.4f}" in handle.report.channels["2"]
    train(model, optimizer, DATA[:1])
    assert handle.metrics()["kept_gain"].item() == pytest.approx((kept / plain - 1).item(), rel=1e-6)


@pytest.mark.parametrize("late", [0, 6])
def test_one_shot(late):
    """With no optimizer, ``finish`` searches, ``deployable`` previews it to the bit, and every weight is back outside."""
    model = mlp(F32)
    x, before = DATA[0][0].float(), snapshot(model)
    handle = nm.sparsify_(model, ASP("2:4", permute=True, escapes=FEW, start=late))
    with handle.deployable(), torch.no_grad():
        want = model(x)
    assert distance(snapshot(model), before) == 0.0
    handle.finish()
    assert torch.equal(model(x), want)
    assert torch.equal(orders(before, snapshot(model)), search_permutation(before["2.weight"], escapes=FEW).order)


def test_channel_order_in_the_dense_phase_and_after_resume():
    recipe = ASP("2:4", permute=True, escapes=FEW, start=3)
    model, handle, optimizer = start(recipe)
    train(model, optimizer, DATA[:2])
    want = nm.ops.prune(model[2].weight.detach(), "2:4")
    with handle.deployable():
        assert torch.equal(model[2].effective_weight(), want)
    train(model, optimizer, DATA[2:4])
    (state,) = through_a_file(optimizer.state_dict())
    _, again, theirs = start(recipe, model=mlp(seed=3))
    theirs.load_state_dict(state)
    assert "reordered earlier: the mask keeps" in again.report.channels["2"] and again.report.channels["0"] == "left alone"


def test_wanda_moves_its_norms():
    model = mlp()
    handle, before = nm.sparsify_(model, ASP("2:4", score="wanda", permute=True, escapes=FEW)), snapshot(model)
    with handle.calibrate(), torch.no_grad():
        model(DATA[0][0])
    scores = (before["2.weight"].abs() * handle.run.held.inputs.squares["2"].sqrt()).float()
    handle.attach(MAKERS["sgd"](model.parameters()))
    order = search_permutation(scores, escapes=FEW).order
    assert torch.equal(orders(before, snapshot(model)), order)
    assert torch.equal(model[2].weight.detach() != 0, nm.ops.mask(scores[:, order], "2:4"))


def left(change):
    model, handle, optimizer = start(ASP("2:4", permute=True, escapes=FEW, start=2), make=torch.optim.AdamW)
    train(model, optimizer, DATA[:1])
    change(model, optimizer)
    before = snapshot(model)["0.bias"]
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, DATA[1:2])
    assert nm.ops.is_nm(model[2].weight.detach(), "2:4")
    return handle.report.channels["2"], torch.equal(model[0].bias, before)


def test_what_comes_after_sparsify_is_seen():
    said, same = left(lambda model, o: model[1].register_forward_hook(lambda *a: None))
    assert "1 (GELU with hooks)" in said and same
    said, same = left(lambda model, o: o.state[model[0].weight].update(rows=torch.ones(3)))
    assert "'rows' has a different shape" in said and same
    said, same = left(lambda model, o: None)
    assert said.startswith("reordered with the outputs of 0") and not same


def test_parameters_of_an_unknown_optimizer():
    model = mlp()
    handle = nm.sparsify_(model, ASP("2:4", permute=True, escapes=FEW))
    handle.attach(MAKERS["sgd"]([*model[2].parameters(), model[0].weight]))
    assert "belongs to no optimizer that attach was given" in handle.report.channels["2"]
    assert torch.equal(model[0].bias, mlp()[0].bias)


def test_convolutions_are_pruned_and_reordered_too():
    """The new order goes through a batch norm, its statistics and the moments; the mask keeps more, and without a mask nothing changes."""
    torch.manual_seed(0)
    body = nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 16, 3)
    model = nn.Sequential(*body, nn.Flatten(), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 16))
    x = torch.randn(4, 16, 10, 10)
    handle = nm.sparsify_(model, ASP("2:4", permute=True, escapes=FEW, start=2))
    optimizer = handle.attach(torch.optim.AdamW(model.parameters(), lr=1e-3))
    assert list(handle.layers) == ["0", "4", "6", "8"] and "input of the model" in handle.report.channels["0"]
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        dense, grads = copy.deepcopy(model), {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.param_groups[0]["lr"] = 0.0
        optimizer.step()
    assert handle.report.channels["4"].startswith("reordered with the outputs of 0: ")
    assert handle.report.channels["8"].startswith("reordered with the outputs of 6: ")
    assert "Flatten" in handle.report.channels["6"]
    order = torch.tensor([int((dense[1].running_var == v).nonzero()) for v in model[1].running_var])
    assert sorted(order.tolist()) == list(range(32)) != order.tolist()
    assert torch.equal(model[1].running_mean, dense[1].running_mean[order])
    assert torch.equal(model[0].bias.grad, grads["0.bias"][order])
    assert torch.equal(model[4].weight.grad, grads["4.weight"][:, order])
    rows = dense[4].weight.detach().permute(0, 2, 3, 1).reshape(16, -1)
    assert model[4].weight.detach().abs().sum() > nm.ops.prune(rows, "2:4").abs().sum() * 1.005
    handle.finish()
    nm.compress_(model)(x)


def test_long_searches_log(caplog, monkeypatch):
    clock = iter(range(0, 10**6, 11))
    monkeypatch.setattr(permutation.time, "monotonic", lambda: next(clock))
    with caplog.at_level(logging.INFO, "nmkernels.permutation"):
        nm.sparsify_(mlp(), ASP("2:4", permute=True, escapes=FEW)).finish(allow_unused=True)
    assert any(record.getMessage().startswith("2: escape") for record in caplog.records)
