"""STE and SR-STE against the independent loop, with every kind of optimizer, and where the decay is added."""

import pytest
import torch

import nmkernels as nm
from nmkernels.optim import MaskedAdamW
from python_tests.recipes.loop import SPARSE, Adam, batches, distance, loss_of, mlp, snapshot, top_n, train, train_with

STEPS = 30
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def run(recipe, make_optimizers, dtype, steps=STEPS):
    model, data = mlp(dtype), batches(steps, dtype)
    handle = nm.sparsify_(model, recipe)
    optimizers = make_optimizers(dict(model.named_parameters()))
    handle.attach(*optimizers)
    for batch in data:
        loss = loss_of(model, batch)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    return snapshot(model), handle


OPTIMIZERS = {
    "adamw": lambda p: [torch.optim.AdamW(p.values(), **Adam().keywords)],
    "adamw_maximize": lambda p: [torch.optim.AdamW(p.values(), maximize=True, **Adam(lr=1e-3).keywords)],
    "fused_adamw": lambda p: [torch.optim.AdamW(p.values(), fused=True, **Adam().keywords)],
    "sgd_momentum": lambda p: [torch.optim.SGD(p.values(), lr=0.05, momentum=0.9, weight_decay=1e-3)],
    "muon_and_adamw": lambda p: [
        torch.optim.Muon([v for v in p.values() if v.dim() == 2], lr=0.01),
        torch.optim.AdamW([v for v in p.values() if v.dim() != 2], **Adam().keywords),
    ],
}


@pytest.mark.parametrize("decay", [0.0, 1e-2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_equals_independent_loop(name, dtype, decay):
    recipe = nm.recipes.SRSTE("2:4", decay=decay)
    got, _ = run(recipe, OPTIMIZERS[name], dtype)
    sign = -1.0 if name == "adamw_maximize" else 1.0  # the optimizer negates what it is given
    want = train_with(OPTIMIZERS[name], snapshot(mlp(dtype)), batches(STEPS, dtype), 2, 4, sign * decay)
    assert distance(got, want) < TOLERANCE[dtype]


def test_maximize_shrinks_pruned_weights_in_both_kinds_of_optimizer():
    recipe, keywords = nm.recipes.SRSTE("2:4", decay=0.1), {"maximize": True, **Adam(lr=1e-3).keywords}
    ours, _ = run(recipe, lambda p: [MaskedAdamW(p.values(), **keywords)], torch.float64)
    plain, _ = run(recipe, lambda p: [torch.optim.AdamW(p.values(), **keywords)], torch.float64)
    assert distance(ours, plain) < 1e-10


@pytest.mark.parametrize("make", [MaskedAdamW, torch.optim.AdamW])
def test_metrics_equal_hand_computation(make):
    model, data, decay = mlp(), batches(12), 1e-2
    handle = nm.sparsify_(model, nm.recipes.SRSTE("2:4", decay=decay))
    optimizer = handle.attach(make(model.parameters(), **Adam().keywords))
    _, log, _ = train(snapshot(model), data, 2, 4, decay)
    total = sum(dict(model.named_parameters())[k].numel() for k in SPARSE)
    for batch, row in zip(data, log, strict=True):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        got = {k: v.item() for k, v in handle.metrics().items()}
        assert got["flip_rate"] == row["flips"] / total
        assert got["density"] == 0.5 and got["phase"] == 1
        assert got["decay_ratio"] == pytest.approx(float(decay * row["pruned_w"] / row["pruned_g"]), rel=1e-9)
        if make is MaskedAdamW:
            assert got["max_update"] == pytest.approx(row["largest"], rel=1e-9)
    assert any(row["flips"] for row in log)


def test_a_swap_counts_as_two_flips():
    model = torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False))
    torch.nn.init.zeros_(model[0].weight)
    with torch.no_grad():
        model[0].weight[0, :4] = torch.tensor([4.0, 3.0, 2.9, 1.0])
    handle = nm.sparsify_(model, nm.recipes.STE("2:4"))
    optimizer = handle.attach(torch.optim.SGD(model.parameters(), lr=1.0))
    model[0].weight.grad = torch.zeros(16, 16)
    model[0].weight.grad[0, 2] = -0.5  # element 2 overtakes element 1
    optimizer.step()
    assert handle.metrics()["flip_rate"].item() == 2 / 256


def test_gradients_of_autograd_carry_no_decay():
    model, (x, y) = mlp(), batches(1)[0]
    nm.sparsify_(model, nm.recipes.SRSTE("2:4", decay=0.5))
    loss_of(model, (x, y)).backward()
    with_decay = model[0].weight.grad.clone()
    model.zero_grad()
    dense = mlp()
    with torch.no_grad():
        for i in (0, 2):
            dense[i].weight.mul_(top_n(dense[i].weight, 2, 4))
    loss_of(dense, (x, y)).backward()
    assert torch.allclose(with_decay, dense[0].weight.grad, rtol=1e-12, atol=1e-14)


def test_mask_from_master_weight():
    """Magnitudes that tie in bf16 are told apart in fp32, also under autocast."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([1.0, 1.0005, 1.001, 1.0015]).repeat(16, 4))
    assert model[0].weight.bfloat16().unique().numel() == 1
    handle = nm.sparsify_(model, nm.recipes.STE("2:4"))
    optimizer = handle.attach(MaskedAdamW(model.parameters(), lr=1e-9, weight_decay=0.0))
    expected = torch.tensor([False, False, True, True]).repeat(16, 4)
    for _ in range(3):  # the copy of the first forward, and the ones that the optimizer writes
        with torch.autocast("cpu", torch.bfloat16):
            y = model(torch.eye(16))
        assert y.dtype == torch.bfloat16
        assert torch.equal(y.t() != 0, expected)
        optimizer.zero_grad()
        y.float().sum().backward()
        assert model[0].weight.grad.dtype == torch.float32
        optimizer.step()
