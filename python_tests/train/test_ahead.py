"""The forms of all weights made at once when the model is called, on the path of GPUs; the reference makes them here."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import nmkernels as nm
from nmkernels import testing
from nmkernels.autograd.transforms import HardMask
from nmkernels.nn import effective
from nmkernels.train import ahead
from python_tests.recipes.roster import ROSTER
from python_tests.recipes.training import DATA32, F32, start, step, train

RECIPES = ["srste_packed", "sste_packed", "fst_packed"]
X, Y = DATA32[0]


class Counted:
    """What was made, at once and layer by layer."""

    def __init__(self, monkeypatch, kernel=True):
        self.at_once, self.alone, self.kept = [], 0, 0
        call, make = ahead.nm_pack_forms_, effective._made
        monkeypatch.setattr(effective, "fingerprint", lambda *tensors: None)
        monkeypatch.setattr(effective, "readable", lambda weight: False)
        monkeypatch.setattr(ahead, "in_one_pass", lambda *args: kernel)

        def many(*args):
            self.at_once.append(len(args[-2]))
            self.kept += not args[6]  # no indices are written
            call(*args)

        def one(source, *wanted):
            self.alone += any(w.wanted for w in wanted)
            return make(source, *wanted)

        monkeypatch.setattr(ahead, "nm_pack_forms_", many)
        monkeypatch.setattr(effective, "_made", one)

    def clear(self):
        self.at_once.clear()
        self.alone = self.kept = 0


def right(model, handle, y, x=X):
    """Whether ``y`` is what the model computes if every layer makes W̃ again."""
    handle.refresh()
    with torch.no_grad():
        want = model(x)
    torch.testing.assert_close(y.detach(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("key", RECIPES)
def test_layers_make_nothing_after_the_first_steps(key, monkeypatch):
    made = Counted(monkeypatch)
    model, handle, optimizer = start(ROSTER[key].recipe, F32)
    train(model, optimizer, DATA32[:2])
    made.clear()
    y = model(X)
    assert (sum(made.at_once), made.alone) == (len(handle.layers), 0)
    assert made.kept == (len(made.at_once) if key.startswith("fst") else 0)
    y.sum().backward()
    made.clear()
    model(X)
    assert (made.at_once, made.alone) == ([], 0), "nothing has changed"
    right(model, handle, y)


@pytest.mark.parametrize("key", RECIPES)
def test_training_has_the_same_bits(key, monkeypatch):
    """Over renewals of the held mask, after which the positions are written again."""

    def trained(kernel):
        with monkeypatch.context() as patch:
            made = Counted(patch, kernel)
            model, _, optimizer = start(ROSTER[key].recipe, F32)
            for batch in DATA32[:16]:
                step(model, optimizer, batch, parts=2)
            return [p.detach().clone() for p in model.parameters()], made

    (want, none), (got, some) = trained(False), trained(True)
    testing.assert_equal_bits(got, want)
    assert not none.at_once and len(some.at_once) >= 14
    if key.startswith("fst"):
        assert 0 < some.kept < len(some.at_once), "every 7 steps there is another mask"


def write(layer):
    layer.weight.data.mul_(-1.5)


def test_a_hook_that_writes_in_the_forward_pass(monkeypatch):
    made = Counted(monkeypatch)
    model, handle, optimizer = start(ROSTER["srste_packed"].recipe, F32)
    train(model, optimizer, DATA32[:2])
    last = list(handle.layers.values())[-1]
    remover = last.register_forward_pre_hook(lambda *_: write(last))
    made.clear()
    y = model(X)
    remover.remove()
    assert not made.at_once
    right(model, handle, y)


def test_a_stage_of_another_pattern_than_the_layers(monkeypatch):
    """As a schedule has it on its way to 2:4."""
    made = Counted(monkeypatch)
    model, handle, optimizer = start(ROSTER["srste_packed"].recipe, F32)
    for layer in handle.layers.values():
        layer.use(HardMask(nm.Pattern("1:4")), layer.plan)
    train(model, optimizer, DATA32[:3])
    y = model(X)
    assert not made.at_once and made.alone
    right(model, handle, y)


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.both = nn.Linear(16, 16), nn.Linear(16, 16), True

    def forward(self, x):
        x = self.first(x)
        return self.second(x) if self.both else x


def test_what_a_call_leaves_out_is_not_believed_later(monkeypatch):
    made, model, x = Counted(monkeypatch), Branch(), torch.randn(4, 16)
    chosen = nm.recipes.get("srste:2:4", packed=True)
    handle = nm.sparsify_(model, chosen, filter_fn=lambda module, name: True)
    optimizer = handle.attach(chosen.optimizer(model.parameters(), lr=0.01))

    def stepped():
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    stepped()
    stepped()
    assert sum(made.at_once) == 2
    made.clear()
    model.both = False
    model(x)
    model.both = True
    write(model.second)
    right(model, handle, model(x), x)
    stepped()
    made.clear()
    model(x)
    assert sum(made.at_once) == 1, "the layer that was left out makes its own"


def test_an_evaluation_before_the_next_training_step(monkeypatch):
    made = Counted(monkeypatch)
    model, handle, optimizer = start(ROSTER["srste_packed"].recipe, F32)
    train(model, optimizer, DATA32[:2])
    made.clear()
    with torch.no_grad():
        model(X)
        write(model[0])
        model(X)
    assert not made.at_once
    y = model(X)
    assert sum(made.at_once) == len(handle.layers)
    right(model, handle, y)


def test_a_forward_pass_that_fails(monkeypatch):
    Counted(monkeypatch)
    model, handle, optimizer = start(ROSTER["srste_packed"].recipe, F32)
    train(model, optimizer, DATA32[:2])
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(model[1], "forward", lambda x: 1 / 0)
        model(X)
    write(list(handle.layers.values())[-1])
    right(model, handle, model(X))


def test_checkpointing_that_runs_layers_without_gradients_first(monkeypatch):
    made = Counted(monkeypatch)
    model, handle, optimizer = start(ROSTER["srste_packed"].recipe, F32)
    for _ in range(4):
        optimizer.zero_grad()
        y = checkpoint(model, X.clone().requires_grad_(), use_reentrant=True)
        y.sum().backward()
        optimizer.step()
    assert made.alone
    right(model, handle, model(X))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"])
def test_a_copy_of_the_model_leaves_the_run_alone(copied, monkeypatch):
    made = Counted(monkeypatch)
    model, handle, optimizer = start(ROSTER["srste_packed"].recipe, F32)
    train(model, optimizer, DATA32[:2])
    made.clear()
    other = copied(model)
    y = other(X)
    assert not made.at_once
    right(model, handle, y)


def test_hooks_end_with_the_run(monkeypatch):
    Counted(monkeypatch)
    model, handle, optimizer = start(ROSTER["srste_packed"].recipe, F32)
    assert model._forward_pre_hooks and model._forward_hooks
    train(model, optimizer, DATA32[:2])
    handle.finish()
    assert not model._forward_pre_hooks and not model._forward_hooks


def test_a_cpu_needs_no_hooks():
    model, _, _ = start(ROSTER["srste_packed"].recipe, F32)
    assert not model._forward_pre_hooks and not model._forward_hooks


def test_weights_without_a_kernel_are_left_to_their_layers(monkeypatch):
    """Whole tiles of 64 x 64 in bfloat16 have one."""
    made = Counted(monkeypatch, kernel=False)
    model, handle, optimizer = start(ROSTER["srste_packed"].recipe, F32)
    train(model, optimizer, DATA32[:3])
    assert not made.at_once and made.alone
    right(model, handle, model(X))
