"""STE and SR-STE against the independent loop, with every kind of optimizer, and where the decay is added."""

import pytest
import torch
from torch import nn

import nmkernels as nm
from nmkernels.optim import MaskedAdamW
from nmkernels.recipes import SRSTE, STE
from python_tests.recipes.loop import Adam, batches, distance, loss_of, mlp, snapshot, top_n, train, train_with
from python_tests.recipes.training import metrics_of, start, step

DATA = batches(30)


def stepped(recipe, make_optimizers, data=DATA):
    model = mlp()
    optimizers = make_optimizers(dict(model.named_parameters()))
    nm.sparsify_(model, recipe).attach(*optimizers)
    for batch in data:
        model.zero_grad()
        loss_of(model, batch).backward()
        for optimizer in optimizers:
            optimizer.step()
    return snapshot(model)


OPTIMIZERS = {
    "adamw": lambda p: [torch.optim.AdamW(p.values(), **Adam().keywords)],
    "adamw_maximize": lambda p: [torch.optim.AdamW(p.values(), maximize=True, **Adam(lr=1e-3).keywords)],
    "masked_adamw_maximize": lambda p: [MaskedAdamW(p.values(), maximize=True, **Adam(lr=1e-3).keywords)],
    "fused_adamw": lambda p: [torch.optim.AdamW(p.values(), fused=True, **Adam().keywords)],
    "sgd_momentum": lambda p: [torch.optim.SGD(p.values(), lr=0.05, momentum=0.9, weight_decay=1e-3)],
    "muon_and_adamw": lambda p: [
        torch.optim.Muon([v for v in p.values() if v.dim() == 2], lr=0.01),
        torch.optim.AdamW([v for v in p.values() if v.dim() != 2], **Adam().keywords),
    ],
}


@pytest.mark.parametrize("decay", [0.0, 1e-2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_equals_independent_loop(name, decay):
    sign = -1.0 if name.endswith("maximize") else 1.0  # the optimizer negates what it is given
    want = train_with(OPTIMIZERS[name], snapshot(mlp()), DATA, 2, 4, sign * decay)
    assert distance(stepped(SRSTE("2:4", decay=decay), OPTIMIZERS[name]), want) < 1e-10


@pytest.mark.parametrize("make", [MaskedAdamW, torch.optim.AdamW])
def test_metrics_equal_hand_computation(make):
    decay = 1e-2
    model, handle, optimizer = start(SRSTE("2:4", decay=decay), make=make)
    _, log, _ = train(snapshot(model), DATA[:12], 2, 4, decay)
    for batch, row in zip(DATA, log, strict=False):
        step(model, optimizer, batch)
        got = metrics_of(handle)
        assert got["flip_rate"] == row["flips"] / 1536
        assert got["density"] == 0.5 and got["phase"] == 1
        assert got["decay_ratio"] == pytest.approx(float(decay * row["pruned_w"] / row["pruned_g"]), rel=1e-9)
        if make is MaskedAdamW:
            assert got["max_update"] == pytest.approx(row["largest"], rel=1e-9)
    assert any(row["flips"] for row in log)


def test_gradients_of_autograd_carry_no_decay():
    model, dense = start(SRSTE("2:4", decay=0.5))[0], mlp()
    with torch.no_grad():
        for i in (0, 2):
            dense[i].weight.mul_(top_n(dense[i].weight, 2, 4))
    for net in (model, dense):
        loss_of(net, DATA[0]).backward()
    assert torch.allclose(model[0].weight.grad, dense[0].weight.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.filterwarnings("ignore:the weight of .* gets a gradient from outside the layer")
def test_a_weight_that_two_layers_share_decays_once():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.ReLU(), nn.Linear(32, 32, bias=False))
    handle = nm.sparsify_(model, SRSTE(decay=0.5))
    model[2].weight = model[0].weight
    optimizer = handle.attach(torch.optim.SGD(model.parameters(), lr=1e-2))
    model(torch.randn(16, 32)).square().mean().backward()
    w, gradient = model[0].weight.detach().clone(), model[0].weight.grad.clone()
    optimizer.step()
    torch.testing.assert_close(model[0].weight.grad - gradient, 0.5 * w.masked_fill(nm.ops.mask(w, "2:4"), 0.0))


def test_mask_from_master_weight():
    """Magnitudes that tie in bf16 are distinguished in fp32, in the copy of the first forward and in those that the optimizer writes."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([1.0, 1.0005, 1.001, 1.0015]).repeat(16, 4))
    _, _, optimizer = start(STE("2:4"), model=model, lr=1e-9, weight_decay=0.0)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            y = model(torch.eye(16))
        assert torch.equal(y.t() != 0, torch.tensor([False, False, True, True]).repeat(16, 4))
        y.float().sum().backward()
        optimizer.step()
