"""The handle's life: errors of attach, deployable, finish, remove, metrics."""

import copy
import itertools
import math
import operator
import warnings

import pytest
import torch
from torch import nn

import nmkernels as nm
from nmkernels.optim import MaskedAdamW
from nmkernels.recipes import ASP, SRSTE, STE, STEP, MaskLLM
from python_tests import moe
from python_tests.recipes.loop import batches, loss_of, mlp
from python_tests.recipes.training import start, train

# ---- attach


def test_attach_refuses():
    """Optimizers of no swapped weight, and any after the end."""
    model = mlp()
    handle = nm.sparsify_(model, STE())
    for optimizer in (torch.optim.SGD(model[4].parameters(), lr=1.0), torch.optim.SGD(copy.deepcopy(model).parameters(), lr=1.0)):
        with pytest.raises(nm.RecipeError, match="none of the optimizers updates a weight of the sparse layers"):
            handle.attach(optimizer)
    for end in ("finish", "remove"):
        model, handle, optimizer = start(STE())
        assert len(optimizer._optimizer_step_pre_hooks) == 1
        train(model, optimizer, batches(1))
        getattr(handle, end)()
        with pytest.raises(nm.RecipeError, match="finished"):
            handle.attach(optimizer)


def test_before_attach():
    model = mlp()
    handle = nm.sparsify_(model, STE())
    for action in (handle.state_dict, lambda: handle.state, lambda: handle.load_state_dict({"nm_recipe": {}})):
        with pytest.raises(nm.RecipeError, match="attach"):
            action()
    got = {k: v.item() for k, v in handle.metrics().items()}
    assert math.isnan(got.pop("flip_rate")) and math.isnan(got.pop("decay_ratio")), "nobody counts"
    assert got == {"density": 0.5, "phase": 1}
    handle.attach(MaskedAdamW(model.parameters()))
    assert {k: v.item() for k, v in handle.metrics().items()} == {"flip_rate": 0.0, "density": 0.5, "phase": 1, "decay_ratio": 0.0}
    assert nm.sparsify_(mlp(), STEP(total_steps=9)).metrics()["density"].item() == 1.0


FORGOTTEN = {
    "an optimizer of its own": "no optimizer was ever attached",
    "cleared": "no optimizer was ever attached",
    "compiled": "no optimizer was ever attached",
    "another than the attached one": "no attached optimizer has made a step",
}


@pytest.mark.parametrize("how", FORGOTTEN)
def test_training_without_the_recipe_is_reported(how):
    """A trainer with an optimizer of its own: neither schedule nor decay ever runs."""
    for recipe in (SRSTE(decay=0.1), STEP(total_steps=9), MaskLLM(total_steps=9)):
        model = mlp(torch.float32)
        handle = nm.sparsify_(model, recipe)
        compiled = how == "compiled" and recipe.name == "srste"
        run = torch.compile(model, backend="aot_eager") if compiled else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if how.startswith("another"):
            handle.attach(recipe.optimizer(model.parameters(), lr=1e-2))
        for batch in batches(3, torch.float32):
            loss_of(run, batch).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=how == "cleared")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for verb in (handle.metrics, handle.metrics, handle.finish, handle.finish):
                verb()
        messages = [str(w.message) for w in said if "got gradients" in str(w.message)]
        # between backward and the first step of an attached one nothing is wrong yet
        assert [message.split(":")[0] for message in messages] == ["metrics"] * (not how.startswith("another")) + ["finish"]
        assert all(FORGOTTEN[how] in message and f"recipe {recipe.name}" in message and "handle.attach" in message for message in messages)
        assert all(w.filename == __file__ for w in said)


@pytest.mark.parametrize("how", ["prune_", "adopt"])
def test_masks_that_were_lost_in_training_without_attach_name_that_cause(how):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    if how == "prune_":
        handle = nm.prune_(model, "2:4", [torch.randn(256, 64)], method="magnitude")
    else:
        for layer in (model[0], model[2]):
            layer.weight.data *= nm.ops.mask(layer.weight.data, "2:4")
        handle = nm.recipes.adopt(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    for end in (lambda: handle.attach(torch.optim.AdamW(model.parameters())), handle.finish):
        with (
            pytest.raises(nm.RecipeError, match=r"not 2:4 any more: it was trained before handle\.attach\(optimizer\)"),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            end()


def test_no_false_alarm_where_the_recipe_did_not_miss_a_step():
    data = batches(2)
    for case in ("one shot", "trained dense before", "calibrated", "evaluated in train mode", "trained"):
        model = mlp()
        if case == "trained dense before":
            train(model, torch.optim.AdamW(model.parameters()), data)
            assert model[0].weight.grad is not None
        handle = nm.sparsify_(model, ASP(score="wanda") if case == "calibrated" else STE() if case == "trained" else ASP())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if case == "calibrated":
                with handle.calibrate():
                    model(data[0][0])
            elif case == "evaluated in train mode":
                assert model(data[0][0]).requires_grad
            elif case == "trained":
                train(model, handle.attach(MaskedAdamW(model.parameters())), data, lambda _, handle=handle: handle.metrics())
            handle.metrics()
            handle.finish(allow_unused=case in ("one shot", "trained dense before"))
            assert math.isnan(handle.metrics()["flip_rate"].item()) == (case != "trained")


def test_no_false_alarm_after_going_back_to_a_checkpoint():
    model, handle, optimizer = start(SRSTE(), make=torch.optim.AdamW)
    train(model, optimizer, batches(3))
    best = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, batches(1))
    model.load_state_dict(best[0])
    optimizer.load_state_dict(best[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handle.finish()


@pytest.mark.parametrize("end", ["step", "finish", "remove"])
def test_nothing_watches_gradients_longer_than_needed(end):
    model, handle, optimizer = start(STE())
    assert model[0].weight._post_accumulate_grad_hooks and not copy.deepcopy(model)[0].weight._post_accumulate_grad_hooks
    if end == "step":
        train(model, optimizer, batches(1))
    else:
        model(batches(1)[0][0])
        getattr(handle, end)()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


# ---- watching


@pytest.mark.parametrize("make", [MaskedAdamW, torch.optim.AdamW])
@pytest.mark.parametrize("recipe", [SRSTE(decay=0.1), ASP()], ids=["srste", "asp"])
def test_metrics_do_not_wait_for_the_device(monkeypatch, recipe, make):
    model, handle, optimizer = start(recipe, make=make)
    train(model, optimizer, batches(2))
    monkeypatch.setattr("nmkernels.train.run.readable", lambda weight: False)

    def refuse(self, *args):
        raise AssertionError("read on the host")

    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    got = handle.metrics()
    assert all(isinstance(v, torch.Tensor) and v.dim() == 0 for v in got.values())


# ---- deployable, finish, remove


def test_deployable_is_left_after_an_error():
    model, handle, _ = start(STEP(t_min=2, t_max=4))
    x = batches(1)[0][0]
    before = model(x)
    with pytest.raises(KeyError), handle.deployable():
        assert not torch.equal(model(x), before)
        raise KeyError
    assert torch.equal(model(x), before)


def test_deployable_within_deployable_changes_nothing():
    model = nn.Sequential(nn.Linear(32, 64), nm.nn.SquaredReLU(), nn.Linear(64, 32))
    handle = nm.sparsify_(model, "act24:2:4(total_steps=100, start=50)")
    x = torch.randn(4, 32)
    before = model(x)
    with handle.deployable():
        deployed = model(x)
        with handle.deployable():
            assert torch.equal(model(x), deployed)
        assert torch.equal(model(x), deployed) and not torch.equal(deployed, before)
    assert torch.equal(model(x), before)


# ---- copies


@pytest.mark.parametrize(
    "recipe", ["srste:2:4", "step:2:4(total_steps=10, switch=fixed, start=3)", "asp:2:4", "vnm:2:4", "slope:2:4(total_steps=10)"]
)
def test_copied_together_model_handle_and_optimizer_go_on(recipe):
    model, data = mlp(), batches(6)
    handle = nm.sparsify_(model, recipe)
    optimizer = handle.attach((MaskedAdamW if "step:" in recipe else torch.optim.AdamW)(model.parameters(), lr=1e-2))
    train(model, optimizer, data[:2])
    copies = copy.deepcopy((model, handle, optimizer))
    alone = copy.deepcopy((model, handle))
    copies[1].attach(copies[2])
    train(model, optimizer, data[2:])
    assert not torch.equal(model[0].weight, copies[0][0].weight)
    train(copies[0], copies[2], data[2:])
    for a, b in zip(model.parameters(), copies[0].parameters(), strict=True):
        assert torch.equal(a, b)
    for each in (handle, copies[1], alone[1]):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "finish: the recipe")  # a schedule that was cut short
            each.finish(allow_unused=True)
        assert each.state_dict().keys() == {"nm_recipe"}


def test_a_copied_handle_can_be_removed_before_attach():
    copied = copy.deepcopy(nm.sparsify_(mlp(), "srste:2:4"))
    assert type(copied.remove()[0]) is nn.Linear


@pytest.mark.parametrize("recipe", ["ste:2:4", "asp:2:4", "fst:2:4(end=None, mvue=None)", "act24:2:4(total_steps=4)"])
def test_layers_that_never_ran_are_finished_like_the_others(recipe):
    class Skips(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.read, self.spare = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
            self.act = nm.nn.SquaredReLU()

        def forward(self, x):
            return self.act(self.used(x)) @ self.read.weight

    for allowed in (False, True):
        model = Skips()
        handle = nm.sparsify_(model, recipe)
        optimizer = handle.attach(handle.recipe.optimizer(model.parameters(), lr=1e-2))
        model(torch.randn(2, 16)).sum().backward()
        optimizer.step()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            handle.finish(allow_unused=allowed)
        said = [str(w.message) for w in caught if "never ran" in str(w.message)]
        fate = "pruned" if handle.recipe.final == "nm" else "made dense again"
        assert len(said) == (0 if allowed else 1) and handle.finished
        for words in (f"are {fate} like the others: read, spare.", "did not call them", "reads the weight itself", "filter_fn"):
            assert all(words in message for message in said)
        assert all(nm.ops.is_nm(getattr(model, name).weight, "2:4") == (fate == "pruned") for name in ("used", "read", "spare"))


def test_finish_refuses_weights_that_are_not_finite():
    for recipe, bad in itertools.product([STE(), ASP()], [torch.nan, torch.inf]):
        model, handle, optimizer = start(recipe)
        train(model, optimizer, batches(1))
        with torch.no_grad():
            model[2].weight[0, 0] = bad
        before = model[0].weight.detach().clone()
        with pytest.raises(nm.RecipeError, match="'2' has NaN or infinite values"):
            handle.finish()
        assert torch.equal(model[0].weight, before) and not handle.finished


def test_finish_refuses_weights_without_data():
    with torch.device("meta"):
        model = mlp()
    handle = nm.sparsify_(model, ASP())
    with pytest.raises(nm.RecipeError, match="finish: the weight of layer '0' is on the meta device.*model.to_empty"):
        handle.finish()
    model.to_empty(device="cpu").load_state_dict(mlp().state_dict())
    assert nm.ops.is_nm(handle.finish(allow_unused=True)[0].weight.detach(), "2:4")


# ---- layers that are no longer the handle's

VERBS = {
    "attach": lambda handle: handle.attach(torch.optim.AdamW(handle.model.parameters())),
    "deployable": lambda handle: handle.deployable().__enter__(),
    **{
        verb: operator.methodcaller(verb)
        for verb in ("renew_masks", "state_dict", "metrics", "expert_metrics", "calibrate", "refresh", "finish", "remove")
    },
}


def pruned_once():
    """A model with one layer pruned, its data, and the handle, which an optimizer was attached to."""
    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)), [torch.randn(128, 16)]
    handle = nm.prune_(model, "2:4", data, lambda module, name: name == "0", method="wanda")
    handle.attach(torch.optim.AdamW(model.parameters()))
    handle.detach()
    return model, data, handle


def refuses(handle, verb, message):
    with pytest.raises(nm.RecipeError, match=f"{verb}: {message}"):
        VERBS[verb](handle)


@pytest.mark.parametrize("how", ["prune_", "sparsify_", "finished"])
def test_a_handle_that_was_replaced(how):
    model, data, old = pruned_once()
    if how == "finished":
        old.finish(allow_unused=True)
    if how == "sparsify_":
        new = nm.sparsify_(nm.densify_(model), "srste:2:4")
    else:
        new = nm.prune_(model, "4:8", data, lambda module, name: name == "2", method="wanda")
    for verb in ("metrics", "refresh", "remove") if how == "finished" else VERBS:
        refuses(old, verb, "this handle was replaced by a later prune_ or sparsify_; use the one that it returned")
    optimizer = new.attach(torch.optim.AdamW(model.parameters(), lr=1e-2))
    for _ in range(3):
        optimizer.zero_grad()
        model(data[0]).square().mean().backward()
        optimizer.step()
    new.finish()
    assert all(nm.ops.is_nm(layer.weight.detach(), layer.pattern) for layer in new.layers.values())


def test_a_handle_of_experts_that_was_replaced():
    data = [torch.randn(60, 16, dtype=torch.float64)]
    model, call = moe.mixture(), lambda model, x: model(x, 3)
    old, new = (
        nm.prune_(model, "2:4", data, lambda module, name, end=end: name.endswith(end), forward=call) for end in ("up_proj", "down_proj")
    )
    refuses(old, "metrics", "this handle was replaced")
    nm.densify_(model)
    refuses(old, "metrics", r"layer 'experts\.gate_up_proj' is dense again")
    refuses(new, "metrics", "layer 'experts.* is dense again")


def test_a_handle_of_a_model_that_is_dense_again():
    model, _, handle = pruned_once()
    nm.densify_(model)
    for verb in VERBS.keys() - {"remove"}:
        refuses(
            handle, verb, r"layer '0' is dense again, by densify_ or a handle's remove\(\), or compressed, which ends this handle; spars"
        )
    assert handle.remove() is model and type(model[0]) is nn.Linear
    refuses(handle, "metrics", "layer '0' is dense again")


def test_the_state_of_finished_experts_is_there_after_compress_():
    model = moe.mixture()
    handle = nm.sparsify_(model, "ste:2:4")
    handle.attach(torch.optim.AdamW(model.parameters()))
    nm.compress_(handle.finish(allow_unused=True))
    assert handle.state_dict().keys() == {"nm_recipe"}
    refuses(handle, "metrics", "layer 'experts.* or compressed, which ends this handle")


def test_guards_can_be_turned_off(monkeypatch):
    monkeypatch.setenv("NMKERNELS_GUARDS", "0")
    model = mlp()
    handle = nm.sparsify_(model, ASP())
    assert all(layer.watch is None and not layer.weight._post_accumulate_grad_hooks for layer in handle.layers.values())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss_of(model, batches(1)[0]).backward()
        handle.metrics()
        optimizer = handle.attach(MaskedAdamW(model.parameters()))
        train(model, optimizer, batches(1))
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), batches(9))
        handle.finish()
    assert nm.ops.is_nm(model[0].weight.detach(), "2:4")
