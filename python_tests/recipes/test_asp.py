"""ASP: the three ways of choosing a mask, when it is chosen, and that nothing revives a pruned weight."""

import pytest
import torch

import nmkernels as nm
from nmkernels.optim import MaskedAdamW
from nmkernels.recipes import ASP
from python_tests.recipes.loop import SPARSE, Adam, batches, distance, gradients, loss_of, mlp, snapshot, top_n
from python_tests.recipes.running import train

MAKERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, **Adam(weight_decay=0.1).keywords),
    "fused_adamw": lambda p: torch.optim.AdamW(p, fused=True, **Adam(weight_decay=0.1).keywords),
    "masked_adamw": lambda p: MaskedAdamW(p, **Adam(weight_decay=0.1).keywords),
}


def weights(model):
    return {k: p.detach() for k, p in model.named_parameters() if k in SPARSE}


@pytest.mark.parametrize("maker", MAKERS)
def test_equals_independent_loop_and_holds_the_mask(maker):
    """g ← g ⊙ M, step, W ← W ⊙ M, with torch's own optimizer on the other side."""
    model = mlp()
    handle = nm.sparsify_(model, ASP("2:4"))
    masks = {k: top_n(w, 2, 4) for k, w in weights(model).items()}
    leaves = {k: (p.detach() * masks[k] if k in masks else p.detach().clone()).requires_grad_() for k, p in model.named_parameters()}
    theirs = MAKERS["adamw" if "adamw" in maker else maker](leaves.values())
    optimizer = handle.attach(MAKERS[maker](model.parameters()))

    def held(t):
        for k, w in weights(model).items():
            assert not w[~masks[k]].any() and not torch.signbit(w[~masks[k]]).any()
            assert handle.metrics()["density"].item() == 0.5 and handle.metrics()["phase"].item() == 2

    data = batches(20)
    train(model, optimizer, data, held)
    for batch in data:
        _, grads = gradients(leaves, batch, masks)
        for k, p in leaves.items():
            p.grad = grads[k] * masks[k] if k in masks else grads[k]
        theirs.step()
        with torch.no_grad():
            for k in masks:
                leaves[k].mul_(masks[k])
    assert distance(snapshot(model), leaves) < 1e-10
    for k in SPARSE:  # the moments see no gradient of a pruned weight
        state = optimizer.state[model.get_parameter(k)]
        moment = state["momentum_buffer"] if maker == "sgd" else state["exp_avg"]
        assert not moment[~masks[k]].any() and moment[masks[k]].any()


def test_a_nan_gradient_of_a_pruned_weight_stays_out():
    model = mlp()
    optimizer = nm.sparsify_(model, ASP("2:4")).attach(MAKERS["sgd"](model.parameters()))
    mask = model[0].weight != 0
    loss_of(model, batches(1)[0]).backward()
    model[0].weight.grad[~mask] = torch.nan
    optimizer.step()
    assert torch.isfinite(model[0].weight).all()


@pytest.mark.parametrize("maker", MAKERS)
def test_prune_at(maker):
    model, dense = mlp(), mlp()
    recipe = ASP("2:4", total_steps=10, start=0.4)
    handle = nm.sparsify_(model, recipe)
    optimizer = handle.attach(MAKERS[maker](model.parameters()))
    phases, trail = [], []
    train(model, optimizer, batches(10), lambda t: (phases.append(handle.metrics()["phase"].item()), trail.append(snapshot(model))))
    train(dense, MAKERS[maker](dense.parameters()), batches(4))
    assert phases == [0] * 3 + [2] * 7
    for k, w in snapshot(dense).items():
        mask = top_n(w, 2, 4) if k in SPARSE else torch.ones_like(w, dtype=torch.bool)
        assert torch.equal(trail[3][k], w * mask)
        assert not trail[-1][k][~mask].any()


def test_prune_at_counts_applied_steps_only():
    model = mlp(torch.float32)
    handle = nm.sparsify_(model, ASP("2:4", start=3))
    optimizer = handle.attach(MaskedAdamW(model.parameters()))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for t, (x, y) in enumerate(batches(6, torch.float32)):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, (x * (torch.inf if t in (0, 2) else 1), y))).backward()
        scaler.step(optimizer)
        scaler.update()
        assert handle.metrics()["phase"].item() == (2 if t >= 4 else 0)


def test_the_host_asks_only_when_pruning_can_be_due(monkeypatch):
    model = mlp()
    optimizer = nm.sparsify_(model, ASP(start=4)).attach(MaskedAdamW(model.parameters()))
    dense = mlp()
    plain = MaskedAdamW(dense.parameters())
    asked, item = [], torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "item", lambda self: asked.append(1) or item(self))
    train(model, optimizer, batches(3))
    ours = len(asked)
    asked.clear()
    train(dense, plain, batches(3))
    assert ours == len(asked)  # the reference backend reads its step counters, and only that


def wanda_model():
    model = torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False, dtype=torch.float64))
    x = torch.linspace(0.1, 3.0, 16, dtype=torch.float64).flip(0) * torch.randn(40, 16, dtype=torch.float64)
    return model, x


def test_wanda_scores_by_hand():
    model, x = wanda_model()
    w = model[0].weight.detach().clone()
    handle = nm.sparsify_(model, ASP("1:4", score="wanda"))
    with handle.calibrate():
        model(x[:10].reshape(2, 5, 16))
        model(x[10:])
    model(100 * x.flip(1))  # outside calibrate: not counted
    handle.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    norms = [sum(float(v) ** 2 for v in x[:, j]) ** 0.5 for j in range(16)]
    mask = top_n(w * torch.tensor(norms, dtype=torch.float64), 1, 4)
    assert torch.equal(model[0].weight.detach(), w * mask)
    assert not torch.equal(mask, top_n(w, 1, 4))


def test_wanda_without_calibration_raises_everywhere():
    model, _ = wanda_model()
    handle = nm.sparsify_(model, ASP("1:4", score="wanda"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = snapshot(model)
    for action in (lambda: handle.attach(optimizer), lambda: handle.finish(allow_unused=True), handle.deployable().__enter__):
        with pytest.raises(nm.RecipeError, match=r"seen none for 0.*calibrate"):
            action()
    assert distance(snapshot(model), before) == 0.0
    assert "nm_recipe" not in optimizer.param_groups[0] and not optimizer._optimizer_step_pre_hooks


def test_existing_adopts_the_zeros():
    model = mlp()
    other = {k: top_n(w.flip(1), 2, 4) for k, w in weights(model).items()}  # any mask but magnitude's own
    with torch.no_grad():
        for k, p in model.named_parameters():
            p.mul_(other.get(k, 1.0))
    before = snapshot(model)
    handle = nm.sparsify_(model, ASP("2:4", score="existing"))
    optimizer = handle.attach(MAKERS["adamw"](model.parameters()))
    assert distance(snapshot(model), before) == 0.0
    train(model, optimizer, batches(5))
    assert all(torch.equal(w != 0, other[k]) for k, w in weights(model).items())
    handle.finish()
    nm.compress_(model)


def test_existing_refuses_what_is_not_nm():
    model = mlp()
    handle = nm.sparsify_(model, ASP("2:4", score="existing"))
    for action in (lambda: handle.attach(MAKERS["sgd"](model.parameters())), lambda: handle.finish(allow_unused=True)):
        with pytest.raises(nm.RecipeError, match=r"'0' is not 2:4"):
            action()
    assert distance(snapshot(model), snapshot(mlp())) == 0.0


def test_adopting_without_training():
    model = mlp()
    with torch.no_grad():
        for k, w in weights(model).items():
            model.get_parameter(k).copy_(w * top_n(w, 2, 4))
    x = batches(1)[0][0]
    want = model(x)
    nm.sparsify_(model, ASP("2:4", score="existing")).finish(allow_unused=True)
    nm.compress_(model)
    assert torch.allclose(model(x), want, rtol=1e-12)


def test_state_stores_packed_indices():
    model = mlp()
    handle = nm.sparsify_(model, ASP("2:4"))
    optimizer = handle.attach(MAKERS["adamw"](model.parameters()))
    masks = optimizer.state_dict()["param_groups"][0]["nm_recipe"]["masks"]
    assert set(masks) == {"0", "2"}
    for name, packed in masks.items():
        w = model.get_parameter(f"{name}.weight").detach()
        assert packed.dtype == torch.uint8 and packed.numel() * 8 == w.numel()  # half of the weights, two bits each
        assert torch.equal(packed, nm.ops.compress(w, "2:4").indices)


def test_prune_step():
    assert ASP("2:4", total_steps=100, start=0.25).stages[1][0] == 25
    assert ASP("2:4", start=7).stages[1][0] == 7
    assert ASP("2:4").stages[1][0] == 0
