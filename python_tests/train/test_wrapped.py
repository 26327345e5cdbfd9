"""Optimizers inside the wrappers of Accelerate, Lightning and ZeRO: the same training, the same resume, and an error for anything else."""

import copy
import json
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

import nmkernels as nm
from nmkernels.optim import MaskedAdamW
from nmkernels.recipes import ASP, SRSTE, STEP
from python_tests.recipes.loop import Adam, batches, distance, mlp, snapshot
from python_tests.recipes.training import same, train

KEYWORDS = Adam(lr=1e-2).keywords
RECIPES = {
    "srste": SRSTE("2:4", decay=0.1),
    "step": STEP("2:4", t_min=2, t_max=6, threshold=1e-30),
    "asp": ASP("2:4", start=3),
}
KINDS = [(name, kind) for name in RECIPES for kind in (MaskedAdamW, torch.optim.AdamW) if (name, kind) != ("step", torch.optim.AdamW)]


def passed_on(name):
    return lambda self, *args: getattr(self.inside(), name)(*args)


class Wrapper:
    """What both wrappers pass on by hand."""

    state_dict, load_state_dict, zero_grad, step = map(passed_on, ("state_dict", "load_state_dict", "zero_grad", "step"))


class LikeAccelerate(Wrapper, torch.optim.Optimizer):
    """Is an ``Optimizer`` whose own state was never made, as ``accelerate.optimizer.AcceleratedOptimizer`` is."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def inside(self):
        return self.optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)
    defaults = property(lambda self: self.optimizer.defaults)


class LikeLightning(Wrapper):
    """Takes the class of what it holds and passes on what it has not, as ``lightning.pytorch.core.optimizer.LightningOptimizer`` does."""

    def __init__(self, optimizer):
        self._optimizer = optimizer
        self.__class__ = type("Lightning" + type(optimizer).__name__, (LikeLightning, type(optimizer)), {})

    def inside(self):
        return self._optimizer

    def __getattr__(self, name):
        return getattr(self._optimizer, name)


@contextmanager
def one_process(folder):
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture(params=["accelerate", "lightning", "both", "zero"])
def wrapped(request, tmp_path):
    """``make(params, kind)``: an optimizer in its wrapper, and ``saved(it)``: its state dict."""
    if request.param == "zero":
        if not dist.is_available() or not dist.is_gloo_available():
            pytest.skip("torch is built without gloo")
        from torch.distributed.optim import ZeroRedundancyOptimizer

        def saved(optimizer):
            optimizer.consolidate_state_dict()
            return optimizer.state_dict()

        with one_process(tmp_path):
            yield lambda params, kind: ZeroRedundancyOptimizer(params, optimizer_class=kind, **KEYWORDS), saved
        return
    wrap = {
        "accelerate": LikeAccelerate,
        "lightning": LikeLightning,
        "both": lambda optimizer: LikeAccelerate(LikeLightning(optimizer)),
    }[request.param]
    yield lambda params, kind: wrap(kind(params, **KEYWORDS)), lambda optimizer: optimizer.state_dict()


def start(recipe, make):
    model = mlp()
    handle = nm.sparsify_(model, recipe)
    optimizer = make(model.parameters())
    assert handle.attach(optimizer) is optimizer, "the wrapper comes back, not what is in it"
    return model, handle, optimizer


@pytest.mark.parametrize(("name", "kind"), KINDS, ids=lambda x: getattr(x, "__name__", x))
def test_training_and_resuming_through_a_wrapper_is_that_without(wrapped, name, kind):
    make, saved = wrapped
    recipe, data = RECIPES[name], batches(12)
    want, plain, other = start(recipe, lambda params: kind(params, **KEYWORDS))
    train(want, other, data)
    model, handle, optimizer = start(recipe, lambda params: make(params, kind))
    # twice, since what the second one saves is not what the first one loaded
    for part in (data[:4], data[4:8], data[8:]):
        train(model, optimizer, part)
        state = copy.deepcopy(saved(optimizer))
        assert json.loads(state["param_groups"][0]["nm_recipe"])["spec"] == handle.state["spec"]
        weights, metrics = snapshot(model), handle.metrics()
        model, handle, optimizer = start(recipe, lambda params: make(params, kind))
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
    assert distance(weights, snapshot(want)) == 0.0
    expected = plain.metrics()
    assert metrics.keys() == expected.keys()
    for key in metrics:
        assert metrics[key].item() == expected[key].item(), key
    assert same(handle.state, plain.state)
    handle.remove()
    train(model, optimizer, data[:2])
    assert "nm_recipe" not in saved(optimizer)["param_groups"][0]


def test_a_wrapper_s_optimizer_is_attached_once():
    model = mlp()
    handle = nm.sparsify_(model, RECIPES["srste"])
    optimizer = torch.optim.AdamW(model.parameters())
    handle.attach(LikeAccelerate(optimizer))
    state = copy.deepcopy(optimizer.param_groups[0]["nm_recipe"])
    other = nm.sparsify_(mlp(), RECIPES["asp"])
    optimizer.add_param_group({"params": list(other.model.parameters())})
    for given in (optimizer, LikeLightning(optimizer)):
        with pytest.raises(nm.RecipeError, match="another model"):
            other.attach(given)
    assert optimizer.param_groups[0]["nm_recipe"] == state and len(optimizer._optimizer_step_pre_hooks) == 1


class NotEnough(torch.optim.Optimizer):
    def __init__(self):
        """Never calls that of its base class."""


def test_non_optimizers_are_refused():
    model = mlp()
    handle = nm.sparsify_(model, RECIPES["srste"])
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for given in (model.parameters(), "adamw", None, [optimizer], scheduler, NotEnough(), torch.optim.AdamW):
        with pytest.raises(nm.RecipeError, match=r"attach: \w+ is neither an optimizer") as error:
            handle.attach(given)
        assert ("one by one" in str(error.value)) == isinstance(given, list)
    assert not optimizer._optimizer_step_pre_hooks and handle.attach(optimizer) is optimizer


def test_zero_that_updates_inside_backward_is_refused(tmp_path):
    optim = pytest.importorskip("torch.distributed.optim")
    with one_process(tmp_path):
        model = mlp()
        zero = optim.ZeroRedundancyOptimizer(model.parameters(), optimizer_class=optim._FunctionalAdamW, overlap_with_ddp=True)
        with pytest.raises(nm.RecipeError, match="overlap_with_ddp"):
            nm.sparsify_(model, RECIPES["srste"]).attach(zero)
