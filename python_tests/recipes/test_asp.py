"""ASP: the three ways of choosing a mask, when it is chosen, and that nothing revives a pruned weight."""

import pytest
import torch

import nmkernels as nm
from nmkernels.optim import MaskedAdamW
from nmkernels.recipes import ASP
from nmkernels.train.sparsify import select
from python_tests.for_each import for_each
from python_tests.recipes.loop import SPARSE, Adam, batches, distance, gradients, loss_of, mlp, snapshot, top_n
from python_tests.recipes.training import train

MAKERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, **Adam(weight_decay=0.1).keywords),
    "fused_adamw": lambda p: torch.optim.AdamW(p, fused=True, **Adam(weight_decay=0.1).keywords),
    "masked_adamw": lambda p: MaskedAdamW(p, **Adam(weight_decay=0.1).keywords),
}


def weights(model):
    return {k: p.detach() for k, p in model.named_parameters() if k in SPARSE}


@pytest.mark.parametrize("begin", [0, 4])
@pytest.mark.parametrize("maker", MAKERS)
def test_equals_independent_loop_and_holds_the_mask(maker, begin):
    """From step ``begin`` on g ← g ⊙ M, step, W ← W ⊙ M, with torch's own optimizer on the other side."""
    model, data, phases, masks = mlp(), batches(10), [], {}
    leaves = {k: p.detach().clone().requires_grad_() for k, p in model.named_parameters()}
    theirs = MAKERS["adamw" if "adamw" in maker else maker](leaves.values())
    handle = nm.sparsify_(model, ASP("2:4", total_steps=10, start=begin / 10))
    optimizer = handle.attach(MAKERS[maker](model.parameters()))
    train(model, optimizer, data, lambda t: phases.append(handle.metrics()["phase"].item()))
    assert phases == [2 if t >= begin else 0 for t in range(1, 11)]
    for t, batch in enumerate(data):
        if t == begin:
            masks = {k: top_n(leaves[k].detach(), 2, 4) for k in SPARSE}
        with torch.no_grad():
            for k in masks:
                leaves[k].mul_(masks[k])
        _, grads = gradients(leaves, batch, masks)
        for k, p in leaves.items():
            p.grad = grads[k] * masks[k] if k in masks else grads[k]
        theirs.step()
    for k, mask in masks.items():
        leaves[k].data.mul_(mask)
        pruned = model.get_parameter(k).detach()[~mask]
        assert not pruned.any() and not torch.signbit(pruned).any()
        moment = optimizer.state[model.get_parameter(k)]["momentum_buffer" if maker == "sgd" else "exp_avg"]
        assert moment[~mask].any() == bool(begin) and moment[mask].any(), "the moments see no gradient of a pruned weight"
    assert distance(snapshot(model), leaves) < 1e-10


def test_a_nan_gradient_of_a_pruned_weight_stays_out():
    model = mlp()
    optimizer = nm.sparsify_(model, ASP("2:4")).attach(MAKERS["sgd"](model.parameters()))
    mask = model[0].weight != 0
    loss_of(model, batches(1)[0]).backward()
    model[0].weight.grad[~mask] = torch.nan
    optimizer.step()
    assert torch.isfinite(model[0].weight).all()


def test_wanda_scores_by_hand():
    model = torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False, dtype=torch.float64))
    x = torch.linspace(3.0, 0.1, 16, dtype=torch.float64) * torch.randn(40, 16, dtype=torch.float64)
    w = model[0].weight.detach().clone()
    handle = nm.sparsify_(model, ASP("1:4", score="wanda"))
    with handle.calibrate():
        model(x[:10].reshape(2, 5, 16))
        model(x[10:])
    model(100 * x.flip(1))  # outside calibrate: not counted
    handle.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    mask = top_n(w * x.square().sum(0).sqrt(), 1, 4)
    assert torch.equal(model[0].weight.detach(), w * mask) and not torch.equal(mask, top_n(w, 1, 4))


@for_each("score, said", [("wanda", r"seen none for 0.*calibrate"), ("existing", r"'0' is not 2:4")])
def test_without_calibration_or_zeros_it_raises_everywhere(score, said):
    model = mlp()
    handle, optimizer = nm.sparsify_(model, ASP("2:4", score=score)), MAKERS["sgd"](model.parameters())
    for action in (lambda: handle.attach(optimizer), lambda: handle.finish(allow_unused=True), handle.deployable().__enter__):
        with pytest.raises(nm.RecipeError, match=said):
            action()
    assert distance(snapshot(model), snapshot(mlp())) == 0.0
    assert "nm_recipe" not in optimizer.param_groups[0] and not optimizer._optimizer_step_pre_hooks


SEEN = "ranks weights by what linear layers have seen"


@for_each(
    "options, linear_only, whole",
    [
        ({}, "", ""),
        ({"score": "existing"}, "", ""),
        ({"score": "wanda"}, SEEN, "ranks weights by all inputs"),
        ({"permute": True}, "", "reorders the channels of whole weights"),
        ({"score": "wanda", "permute": True}, SEEN, "ranks weights by all inputs"),
    ],
)
def test_which_layers_cannot_be_taken_and_why(options, linear_only, whole):
    recipe = ASP("2:4", **options)
    assert recipe.setup.needs_whole.startswith(whole) and bool(recipe.setup.needs_whole) == bool(whole)
    assert (recipe.setup.hooks is not None) == ("permute" in options)
    conv, report = select(torch.nn.Sequential(torch.nn.Conv2d(16, 16, 3)), recipe.pattern, recipe=recipe)
    assert len(conv) == (not linear_only) and report.entries[0].reason == (f"ASP {linear_only}" if linear_only else "2:4")
