"""Zeros are never lost in silence: late parameter groups, further optimizers, and weights that something else has written."""

import copy
import warnings
from functools import partial

import pytest
import torch

import nmkernels as nm
from nmkernels.optim import MaskedAdamW
from nmkernels.recipes import ASP, SRSTE, STEP, LayerWise, MaskLLM, SLoPe
from nmkernels.train.checkpoint import HELD
from nmkernels.train.guards import FORGOTTEN
from python_tests.recipes.loop import batches, mlp
from python_tests.recipes.roster import ROSTER
from python_tests.recipes.training import DATA, net, optimizer_of, start, step, train

HOLDING = {"asp": ASP, "slope": lambda: SLoPe(rank=0)}
OPTIMIZERS = {"AdamW": torch.optim.AdamW, "MaskedAdamW": MaskedAdamW, "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)}


def zeros(layer):
    return float((layer.weight == 0).double().mean())


def said_by(action, about="held masks|not attached|taken again"):
    """The warnings of ``action`` that are about what this file tests."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(w.message) for w in caught if any(word in str(w.message) for word in about.split("|"))]


# ---- parameter groups that come later


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", HOLDING)
@pytest.mark.parametrize("how", ["add_param_group", "append"])
def test_a_layer_that_is_unfrozen_later_keeps_its_zeros(name, kind, how):
    model = mlp()
    model[0].requires_grad_(False)
    handle = nm.sparsify_(model, HOLDING[name]())
    optimizer = handle.attach(OPTIMIZERS[kind]([p for p in model.parameters() if p.requires_grad]))
    train(model, optimizer, batches(2))
    model[0].requires_grad_(True)
    before = model[0].weight.detach().clone()
    if how == "append":
        optimizer.param_groups[0]["params"] += model[0].parameters()
    else:
        optimizer.add_param_group({"params": list(model[0].parameters())})
    assert not said_by(lambda: train(model, optimizer, batches(4), lambda t: handle.metrics()))
    assert zeros(model[0]) == zeros(model[2]) == 0.5 and not torch.equal(before, model[0].weight)
    assert handle.metrics()["density"].item() == 0.5
    saved = optimizer.state_dict()
    assert sum(HELD in state for state in saved["state"].values()) == 2
    kept = model[0].weight != 0

    for attach_first in (False, True):  # resumed, with the groups in the order that they have now
        model = copy.deepcopy(model)
        resumed = nm.sparsify_(nm.densify_(model), HOLDING[name]())
        again = OPTIMIZERS[kind]([p for i in (2, 4) for p in model[i].parameters()])
        if attach_first:
            resumed.attach(again)
        if how == "append":
            again.param_groups[0]["params"] += model[0].parameters()
        else:
            again.add_param_group({"params": list(model[0].parameters())})
        again.load_state_dict(copy.deepcopy(saved))
        if not attach_first:
            resumed.attach(again)
        assert sum(HELD in state for state in again.state_dict()["state"].values()) == 2
        train(model, again, batches(2))
        assert torch.equal(kept, model[0].weight != 0)


def test_a_late_group_needs_a_supported_optimizer():
    model = mlp()
    handle = nm.sparsify_(model, STEP(total_steps=9))
    head = torch.optim.SGD(model[4].parameters(), lr=0.1)
    handle.attach(head, MaskedAdamW([*model[0].parameters(), *model[2].parameters()]))
    step(model, head, batches(1)[0])
    head.add_param_group({"params": list(model[2].parameters())})
    with pytest.raises(nm.RecipeError, match="freezes the second moment, which SGD cannot"):
        step(model, head, batches(1)[0])


def test_an_optimizer_without_a_swapped_layer_may_get_one_later():
    model = mlp()
    handle = nm.sparsify_(model, ASP())
    head, body = torch.optim.SGD(model[4].parameters(), lr=0.1), torch.optim.SGD(model[0].parameters(), lr=0.1)
    assert handle.attach(body, head) == (body, head)
    head.add_param_group({"params": list(model[2].parameters())})
    for optimizer in (body, head):
        train(model, optimizer, batches(3))
    assert zeros(model[0]) == zeros(model[2]) == 0.5


def test_a_group_added_after_freezing_is_reported():
    recipe = STEP(total_steps=9, switch="fixed", start=2)
    model = mlp()
    handle = nm.sparsify_(model, recipe)
    optimizer = handle.attach(MaskedAdamW([*model[0].parameters(), *model[4].parameters()], lr=1e-2))
    train(model, optimizer, batches(3))
    optimizer.add_param_group({"params": list(model[2].parameters())})
    (message,) = said_by(lambda: step(model, optimizer, batches(1)[0]), "second moment")
    assert "'2'" in message and "before the switch" in message


# ---- further optimizers


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("detached", [False, True])
def test_attach_continues_with_a_second_optimizer(kind, detached):
    model, handle, first = start(ASP(total_steps=20, start=0.1))
    train(model, first, batches(3))
    masks = {name: mask.clone() for name, mask in handle.run.held.masks.items()}
    second = OPTIMIZERS[kind](model.parameters())
    assert handle.attach(second) is second
    assert "nm_recipe" in second.param_groups[0] and "nm_recipe" not in first.param_groups[0]
    if detached:
        handle.detach(first)
        assert not first._optimizer_step_pre_hooks and not first.param_groups[0].keys() & {"nm_recipe"}
    assert not said_by(lambda: train(model, second, batches(FORGOTTEN + 1), lambda t: handle.metrics()))
    assert all(torch.equal(mask, handle.run.held.masks[name]) for name, mask in masks.items())
    assert zeros(model[0]) == zeros(model[2]) == 0.5 and handle.state["t"] == 3 + FORGOTTEN + 1
    assert handle.metrics()["density"].item() == 0.5
    if not detached:  # it is still attached
        assert not said_by(lambda: train(model, first, batches(FORGOTTEN + 1)))
        assert zeros(model[0]) == 0.5
        handle.attach(first)  # and may lead again
        assert first.param_groups[0]["nm_recipe"] is handle.state and "nm_recipe" not in second.param_groups[0]
    assert not said_by(handle.finish)


def test_changing_the_optimizer_changes_no_result():
    """Where the optimizer keeps nothing, only the recipe could tell them apart."""
    runs = []
    for change in (False, True):
        model, handle, optimizer = start(SRSTE(decay=0.1), make=lambda p, **_: torch.optim.SGD(p, lr=0.1))
        train(model, optimizer, DATA[:5])
        if change:
            handle.detach(optimizer)
            optimizer = handle.attach(torch.optim.SGD(model.parameters(), lr=0.1))
        train(model, optimizer, DATA[5:])
        figures = {k: v.item() for k, v in handle.metrics().items()}
        runs.append((model, figures))
    assert all(torch.equal(a, b) for a, b in zip(runs[0][0].parameters(), runs[1][0].parameters(), strict=True))
    assert runs[0][1] == runs[1][1]


def test_state_is_in_the_scheduling_optimizer():
    model, handle, first = start(ASP(total_steps=20, start=0.2))
    train(model, first, batches(5))
    second = handle.attach(torch.optim.AdamW(model.parameters()))
    train(model, second, batches(2))
    again, resumed, third = start(ASP(total_steps=20, start=0.2), make=torch.optim.AdamW, seed=3)
    again.load_state_dict(model.state_dict())
    third.load_state_dict(second.state_dict())
    assert resumed.state["t"] == 7 and torch.equal(resumed.run.held.masks["0"], handle.run.held.masks["0"])


def test_an_optimizer_that_is_given_twice_is_attached_once():
    model, handle, first = start(ASP())
    handle.attach(first, first)
    assert len(first._optimizer_step_pre_hooks) == 1
    train(model, first, batches(2))
    handle.detach(first)
    assert not first._optimizer_step_pre_hooks


def test_detach_of_all_and_attach_again():
    model, handle, first = start(ASP())
    train(model, first, batches(2))
    kept = model[0].weight != 0
    handle.detach()
    assert not first._optimizer_step_pre_hooks and not model[0].effective.attached
    handle.attach(second := torch.optim.SGD(model.parameters(), lr=0.1))
    train(model, second, batches(2))
    assert torch.equal(kept, model[0].weight != 0)
    with pytest.raises(nm.RecipeError, match="not attached to this handle"):
        handle.detach(first)
    handle.detach(second)
    handle.finish()
    assert torch.equal(kept, model[0].weight != 0), "finish keeps the masks too"


def test_step_needs_the_frozen_second_moment():
    recipe = STEP(total_steps=9, switch="fixed", start=2)
    model, handle, first = start(recipe)
    train(model, first, batches(4))
    second = MaskedAdamW(model.parameters())
    with pytest.raises(nm.RecipeError, match=r"load_state_dict\(earlier.state_dict\(\)\)"):
        handle.attach(second)
    assert not second._optimizer_step_pre_hooks and first.param_groups[0]["nm_recipe"] is handle.state
    step(model, first, batches(1)[0])
    second.load_state_dict(first.state_dict())
    handle.attach(second)
    handle.detach(first)
    step(model, second, batches(1)[0])
    assert handle.state["t"] == 6 and handle.metrics()["phase"] == 1


def test_a_refused_second_optimizer_leaves_the_first_attached():
    model, handle, first = start(STEP(total_steps=9))
    step(model, first, batches(1)[0])
    with pytest.raises(nm.RecipeError, match="freezes the second moment"):
        handle.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    step(model, first, batches(1)[0])
    assert handle.state["t"] == 2 and len(first._optimizer_step_pre_hooks) == 1


# ---- an optimizer that nobody attached


@pytest.mark.parametrize("recipe", [ASP(), SRSTE()], ids=["asp", "srste"])
def test_a_forgotten_optimizer_is_reported_after_some_steps(recipe):
    model, handle, first = start(recipe)
    train(model, first, batches(2))
    second = torch.optim.SGD(model.parameters(), lr=0.1)
    messages = [len(said_by(partial(step, model, second, batch))) for batch in batches(FORGOTTEN + 3)]
    assert messages == [0] * (FORGOTTEN - 1) + [1] + [0] * 3
    said = said_by(handle.finish)
    assert bool(said) == (recipe.name == "asp") and all("SGD" in text and "'0', '2'" in text and "handle.attach" in text for text in said)
    assert nm.ops.is_nm(model[0].weight.detach(), "2:4")


def test_optimizer_wrappers_are_recognised():
    class Lookahead(torch.optim.Optimizer):
        def __init__(self, inner):
            self.inner = inner
            super().__init__(inner.param_groups, {})

        def step(self, closure=None):
            self.inner.step()

    class Sam(torch.optim.SGD):
        def __init__(self, params, **keywords):
            super().__init__(params, **keywords)
            self.base = torch.optim.SGD(self.param_groups, **keywords)

        def step(self, closure=None):
            self.base.step()

    def all_of(model, wrap):
        handle = nm.sparsify_(model, ASP())
        inside = torch.optim.SGD(model.parameters(), lr=0.1)
        outside = wrap(inside)
        handle.attach(inside if wrap is Lookahead else outside)
        train(model, outside, batches(FORGOTTEN + 2), lambda t: handle.metrics())
        handle.finish()

    assert not said_by(lambda: all_of(mlp(), Lookahead))
    assert not said_by(lambda: all_of(mlp(), lambda inside: Sam(inside.param_groups[0]["params"], lr=0.1)))


# ---- weights that something else has written


WRITES = {
    "load_state_dict": lambda layer, w: layer.load_state_dict({**layer.state_dict(), "weight": w}),
    ".data": lambda layer, w: layer.weight.data.copy_(w),
    "in place": lambda layer, w: torch.no_grad()(layer.weight.copy_)(w),
    "assign": lambda layer, w: layer.load_state_dict({**layer.state_dict(), "weight": w}, assign=True),
}


@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("name", HOLDING)
def test_lost_zeros_are_reported_once(name, how):
    model, handle, optimizer = start(HOLDING[name]())
    train(model, optimizer, batches(2))
    mask = handle.run.held.masks["2"].clone()
    WRITES[how](model[2], torch.randn_like(model[2].weight))
    (message,) = said_by(lambda: (handle.metrics(), handle.metrics()))
    assert message.startswith("metrics: the weights of layer '2' are not zero") and "handle.renew_masks()" in message
    count = sum(model[i].weight.numel() for i in (0, 2))
    assert handle.metrics()["density"].item() == (0.5 * model[0].weight.numel() + model[2].weight.numel()) / count
    x = batches(1)[0][0]
    with handle.deployable():
        previewed = model(x)
    assert not said_by(handle.finish), "it was said already"
    assert torch.equal(mask, model[2].weight != 0) and torch.equal(previewed, model(x))


def test_weights_loaded_midway_are_reported():
    model, handle, optimizer = start(ASP())
    train(model, optimizer, batches(2))
    mask = handle.run.held.masks["0"].clone()
    model.load_state_dict({name: torch.randn_like(value) for name, value in model.state_dict().items()})
    (message,) = said_by(lambda: train(model, optimizer, batches(2)))
    assert message.startswith("step: ") and "renew_masks" in message
    assert torch.equal(mask, model[0].weight != 0), "rewound weights keep their masks"


def test_exchanging_weights_for_an_evaluation_is_no_loss():
    model, handle, optimizer = start(ASP())
    average = torch.optim.swa_utils.AveragedModel(model)
    for batch in batches(4):
        step(model, optimizer, batch)
        average.update_parameters(model)
        before = copy.deepcopy(model.state_dict())
        model.load_state_dict(average.module.state_dict())
        with handle.deployable():
            model(batch[0])
        model.load_state_dict(before)
    assert not said_by(lambda: (train(model, optimizer, batches(1)), handle.finish()))


# ---- weights that come after attach and before the first step


BEGINS = {
    "asp": lambda: ASP(),
    "asp-permute": lambda: ASP(permute=True, escapes=2),
    "slope": lambda: SLoPe(rank=0),
    "sste": lambda: nm.recipes.get("sste:2:4"),
    "maskllm": lambda: MaskLLM(total_steps=9, seed=3),
    "layerwise": lambda: LayerWise("2:8"),
    "bimask": lambda: nm.recipes.get("bimask:2:4", total_steps=9, seed=3),
}


@pytest.mark.parametrize("how", ["load_state_dict", ".data"])
@pytest.mark.parametrize("name", BEGINS)
def test_recipe_starts_from_weights_loaded_after_attach(name, how):
    """As if they had been there before: every number that the recipe keeps is the same."""
    recipe, other = BEGINS[name](), net(BEGINS[name](), seed=5)
    model, handle, _ = start(recipe)
    if how == "load_state_dict":
        model.load_state_dict(other.state_dict())
    else:
        for i in (0, 2, 4):
            model[i].weight.data.copy_(other[i].weight)
            model[i].bias.data.copy_(other[i].bias)
    torch.manual_seed(9)  # learned logits begin with noise
    (message,) = said_by(handle.metrics)
    assert "taken again" in message and not said_by(handle.metrics)
    wanted = nm.sparsify_(other, recipe)
    torch.manual_seed(9)
    wanted.attach(optimizer_of(recipe, other.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    mine, theirs = (h.run.save() for h in (handle, wanted))
    for key in ("held", "patterns", "kept"):
        assert str(mine.get(key)) == str(theirs.get(key))
    buffers = [dict(m.named_buffers()) for m in (model, other)]
    assert buffers[0].keys() == buffers[1].keys() and all(torch.equal(value, buffers[1][key]) for key, value in buffers[0].items())


def test_first_masks_come_from_weights_loaded_after_attach():
    model, _, optimizer = start(ASP())
    weights = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(weights)
    (message,) = said_by(lambda: train(model, optimizer, batches(3)))
    assert message.startswith("step: the weights of layers '0', '2' were loaded")
    assert torch.equal(model[2].weight != 0, nm.ops.mask(weights["2.weight"], "2:4"))


def test_a_foreign_first_step_is_named():
    model, handle, _ = start(ASP())
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), batches(1))
    (message,) = said_by(handle.metrics)
    assert "changed after handle.attach by SGD, which is not attached" in message


def test_replaced_parameters_missing_in_the_optimizer():
    model, handle, optimizer = start(ASP())
    model.load_state_dict({name: torch.randn_like(value) for name, value in model.state_dict().items()}, assign=True)
    (message,) = said_by(handle.metrics)
    assert "No attached optimizer has the new Parameters of layers '0', '2'" in message
    handle.detach(optimizer)
    train(model, handle.attach(torch.optim.SGD(model.parameters(), lr=0.1)), batches(2))
    assert zeros(model[0]) == 0.5 and not said_by(handle.metrics)


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_resuming_after_attach_is_not_taken_for_other_weights(order):
    model, _, optimizer = start(ASP())
    train(model, optimizer, batches(3))
    again, resumed, fresh = start(ASP(), seed=7)
    loads = [lambda: again.load_state_dict(model.state_dict()), lambda: fresh.load_state_dict(optimizer.state_dict())]
    said = said_by(lambda: [load() for load in (loads if order == "model first" else loads[::-1])])
    said += said_by(lambda: train(again, fresh, batches(2), lambda t: resumed.metrics()))
    assert not said and torch.equal(again[0].weight != 0, model[0].weight != 0)


def test_renew_masks():
    model, handle, optimizer = start(ASP(total_steps=20))
    train(model, optimizer, batches(3))
    weights = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(weights)
    assert not said_by(handle.renew_masks)
    assert not said_by(lambda: train(model, optimizer, batches(2), lambda t: handle.metrics()))
    assert torch.equal(model[0].weight != 0, nm.ops.mask(weights["0.weight"], "2:4")) and handle.state["t"] == 5
    handle.finish()
    with pytest.raises(nm.RecipeError, match="renew_masks: the recipe is finished"):
        handle.renew_masks()


@pytest.mark.parametrize("name", ["sste", "maskllm"])
def test_loading_dense_weights_midway_keeps_learned_state(name):
    model, handle, optimizer = start(BEGINS[name]())
    train(model, optimizer, batches(2))
    before = {key: value.clone() for key, value in model.state_dict().items() if ".nm_" in key}
    dense = net(BEGINS[name](), seed=4).state_dict()
    said = said_by(lambda: model.load_state_dict(dense), "middle of a run")
    assert said and all("handle.renew_masks()" in text for text in said)
    assert before and all(torch.equal(value, model.state_dict()[key]) for key, value in before.items())
    handle.renew_masks()
    assert not all(torch.equal(value, model.state_dict()[key]) for key, value in before.items())


@pytest.mark.parametrize("name", BEGINS)
def test_renew_masks_needs_attach(name):
    model = net(BEGINS[name]())
    handle = nm.sparsify_(model, BEGINS[name]())
    handle.renew_masks()
    assert not handle.run.state
    optimizer = handle.attach(optimizer_of(handle.recipe, model.parameters()))
    step(model, optimizer, DATA[0])
    assert handle.run.state


def test_renew_masks_takes_a_scale_again():
    model, handle, optimizer = start(nm.recipes.get("sste:2:4"))
    train(model, optimizer, batches(2))
    with torch.no_grad():
        model[0].weight.mul_(3.0).add_(torch.randn_like(model[0].weight))
    before = dict(model[0].named_buffers())
    handle.renew_masks()
    (name,) = before
    scale = nm.ops.soft_threshold_scale(model[0].weight.detach(), "2:4")
    assert torch.equal(dict(model[0].named_buffers())[name].reshape(()), scale) and not torch.equal(before[name].reshape(()), scale)


# ---- no false alarms


@pytest.mark.quick(1, per="entry.recipe.name")
@pytest.mark.parametrize("entry", ROSTER.values(), ids=ROSTER.keys())
def test_no_recipe_raises_a_false_alarm(entry):
    recipe = entry.recipe

    def run():
        model = net(recipe)
        handle = nm.sparsify_(model, recipe)
        optimizer = handle.attach(optimizer_of(recipe, model.parameters()))
        handle.metrics()
        for batch in DATA[:8]:
            step(model, optimizer, batch)
            handle.metrics()
            with handle.deployable():
                model(batch[0])
        handle.finish()

    assert not said_by(run)
