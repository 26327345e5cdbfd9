"""Weights that are read outside their layer are found in the first backward pass; penalties, reuse and recomputation raise no alarm."""

import copy
import gc
import io
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import nmkernels as nm

X = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    """``between`` applied to one layer and the input."""

    def __init__(self, between, layer=None):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.between = layer or nn.Linear(32, 32), between

    def forward(self, x):
        return self.between(self.layer, x)


def mse(model, x=X):
    return (model(x) - x).square().mean()


def said(model, loss=mse, recipe="srste:2:4", steps=2, run=None):
    """The layers that a few steps warn of."""
    handle = nm.sparsify_(model, recipe)
    optimizer = handle.attach(recipe_optimizer(handle, model))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            optimizer.zero_grad()
            loss(model if run is None else run).backward()
            optimizer.step()
    found = [str(w.message) for w in caught if "outside the layer" in str(w.message)]
    assert all("'layer'" in text and "filter_fn" in text for text in found)
    return len(found), handle


def recipe_optimizer(handle, model):
    return handle.recipe.optimizer(model.parameters(), lr=1e-2)


def tied(layer, x):
    return F.linear(layer(x).relu(), layer.weight.t())


def twice(layer, x):
    return layer(layer(x).relu())


def again(reentrant):
    def between(layer, x):
        for _ in range(2):
            x = checkpoint(lambda t: layer(t).relu(), x, use_reentrant=reentrant)
        return x

    return between


@pytest.mark.parametrize(
    "recipe", ["ste:2:4", "srste:2:4", "sste:2:4", "fst:2:4(total_steps=20)", "mdgf:2:4(total_steps=20)", "srste:2:4(packed=True)"]
)
def test_a_transposed_tie_is_found_and_nothing_else(recipe):
    assert said(Model(tied), recipe=recipe)[0] == 1
    assert said(Model(twice), recipe=recipe)[0] == 0
    assert said(Model(lambda layer, x: layer(x)), recipe=recipe)[0] == 0


def weight_of(model):
    return model.layer.weight


LOSSES = {
    "l2": lambda m: mse(m) + 0.1 * weight_of(m).square().sum(),
    "l1": lambda m: mse(m) + 0.01 * weight_of(m).abs().sum(),
    "elastic": lambda m: mse(m) + 0.01 * weight_of(m).abs().sum() + weight_of(m).norm(),
    "another gradient first": lambda m: (torch.autograd.grad(mse(m, X.clone().requires_grad_()), weight_of(m)), mse(m))[1],
    "input gradient first": lambda m: (torch.autograd.grad(mse(m, x := X.clone().requires_grad_()), x), mse(m))[1],
    "accumulated": lambda m: (mse(m).backward(), mse(m, 2 * X))[1],
    "kept graph": lambda m: ((loss := mse(m)).backward(retain_graph=True), loss)[1],
    "functional_call": lambda m: mse(lambda x: torch.func.functional_call(m, {k: p * 1.0 for k, p in m.named_parameters()}, (x,))),
}


@pytest.mark.parametrize("name", LOSSES)
def test_no_alarm(name):
    assert said(Model(twice), LOSSES[name])[0] == 0


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_layers(reentrant):
    assert said(Model(again(reentrant)), lambda m: mse(m, X.clone().requires_grad_()))[0] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_rounding_is_no_reader(dtype):
    assert said(Model(twice).to(dtype), lambda m: mse(m, X.to(dtype)))[0] == 0


def test_under_autocast():
    def loss(model):
        with torch.autocast("cpu", torch.bfloat16):
            return mse(model)

    assert said(Model(twice), loss)[0] == 0
    assert said(Model(tied), loss)[0] == 1


def test_tied_convolution_and_nonlinear_penalty():
    def through(layer, x):
        return F.conv_transpose2d(layer(x[..., None, None]), layer.weight)[..., 0, 0]

    assert said(Model(through, nn.Conv2d(32, 16, 1)))[0] == 1
    assert said(Model(twice), lambda m: mse(m) + (weight_of(m).t() @ weight_of(m) - torch.eye(32)).square().sum())[0] == 1


def test_hugging_face_conv1d():
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    assert said(Model(twice, conv1d(32, 32)))[0] == 0
    assert said(Model(lambda layer, x: F.linear(layer(x), layer.weight), conv1d(32, 32)))[0] == 1


def test_held_masks_and_hooks_of_others_are_not_judged():
    """Under a held mask everyone reads the same weight; a hook of somebody else may have changed the gradient."""
    assert said(Model(tied), recipe="asp:2:4")[0] == 0
    model = Model(twice)
    model.layer.weight.register_hook(lambda g: 3 * g)
    assert said(model)[0] == 0


def test_compiled_eagerly_copied_and_pickled():
    assert said(model := Model(twice), run=torch.compile(model, backend="eager", fullgraph=True))[0] == 0
    model = nn.Sequential(nn.Linear(32, 32))
    handle = nm.sparsify_(model, "srste:2:4")
    assert model[0].watch is not None and copy.deepcopy(model)[0].watch is None
    torch.save(model, buffer := io.BytesIO())
    assert torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)[0].watch is None
    handle.remove()
    assert not hasattr(model[0], "watch") and not model[0].weight._backward_hooks


def test_reported_at_the_end_without_optimizer_steps():
    handle = nm.sparsify_(model := Model(tied), "srste:2:4")
    mse(model).backward()
    with pytest.warns(UserWarning) as caught:
        handle.finish()
    assert any("outside the layer" in str(w.message) for w in caught)
    _, handle = said(model := Model(lambda layer, x: layer(x)))
    assert model.layer.watch is None and not model.layer.weight._backward_hooks, "one pass is enough"


def test_the_parameter_is_not_kept_alive():
    """``fully_shard`` gives a layer another one."""
    model = nn.Sequential(nn.Linear(32, 32))
    handle = nm.sparsify_(model, "srste:2:4")
    old = weakref.ref(model[0].weight)
    model[0].weight = nn.Parameter(torch.randn(32, 32))
    gc.collect()
    assert old() is None and handle.layers["0"].watch is not None
