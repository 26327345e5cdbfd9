"""What torch.nn.utils does to a layer's weight is refused in one sentence at every stage, before anything has changed; once undone, all
goes on."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, remove_spectral_norm, remove_weight_norm, spectral_norm, weight_norm

import nmkernels as nm
from nmkernels.pattern import RecipeError
from python_tests.moe import mixture


class Twice(nn.Module):
    def forward(self, w):
        return 2 * w


def parametrized(key):
    return lambda layer: parametrize.register_parametrization(layer, key, Twice())


SURGERY = {
    "prune": (lambda layer: prune.l1_unstructured(layer, "weight", amount=0.3), lambda layer: prune.remove(layer, "weight"), "prune"),
    "parametrize": (parametrized("weight"), lambda layer: parametrize.remove_parametrizations(layer, "weight"), "parametrize (Twice)"),
    "weight_norm": (parametrizations.weight_norm, lambda layer: parametrize.remove_parametrizations(layer, "weight"), "_WeightNorm"),
    "spectral_norm": (parametrizations.spectral_norm, lambda layer: parametrize.remove_parametrizations(layer, "weight"), "_SpectralNorm"),
    "old weight_norm": (weight_norm, remove_weight_norm, "remove_weight_norm(layer)"),
    "old spectral_norm": (spectral_norm, remove_spectral_norm, "remove_spectral_norm(layer)"),
}
pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")


def build(kind):
    torch.manual_seed(0)
    if kind == "linear":
        return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)), torch.randn(8, 16)
    return nn.Sequential(nn.Conv2d(16, 32, 1), nn.GELU(), nn.Conv2d(32, 16, 1)), torch.randn(2, 16, 3, 3)


def step(model, optimizer, x):
    optimizer.zero_grad()
    (model(x) - x).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("name", SURGERY)
@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_refused_with_the_true_reason_and_the_way_back(name, kind):
    operate, undo, said = SURGERY[name]

    def refused(call, *args):
        with pytest.raises(RecipeError) as error:
            call(*args)
        assert said in str(error.value) and "FSDP" not in str(error.value)

    model, x = build(kind)
    operate(model[0])
    refused(nm.sparsify_, model, "srste:2:4", lambda module, name: name == "0")
    model, x = build(kind)
    handle, optimizer = nm.sparsify_(model, "srste:2:4"), torch.optim.SGD(model.parameters(), lr=0.1)
    operate(model[0])
    refused(handle.attach, optimizer)
    undo(model[0])
    optimizer = handle.attach(torch.optim.SGD(model.parameters(), lr=0.1))  # an old norm leaves another Parameter
    step(model, optimizer, x)
    operate(model[0])
    for call in (model, handle.finish, handle.remove):
        refused(call, *[x] * (call is model))
    undo(model[0])
    step(model, optimizer, x)
    handle.finish()
    assert nm.ops.is_nm(model[0].grouped.detach(), "2:4")
    operate(model[0])
    model(x)
    for call in (nm.compress_, nm.densify_):
        refused(call, model)
    undo(model[0])
    nm.compress_(model)(x)


def test_computed_bias(tmp_path):
    model, x = build("linear")
    handle = nm.sparsify_(model, "srste:2:4")
    parametrized("bias")(model[0])
    prune.random_unstructured(model[2], "bias", amount=0.5)
    step(model, handle.attach(torch.optim.SGD(model.parameters(), lr=0.1)), x)
    with pytest.raises(RecipeError, match="its bias is computed by .*parametrize"):
        handle.remove()
    handle.finish()
    for call in (nm.compress_, lambda m: nm.save_dense(m, tmp_path / "m"), nm.densify_):
        with pytest.raises(RecipeError, match="its bias is computed by .*parametrize"):
            call(model)
    parametrize.remove_parametrizations(model[0], "bias")
    prune.remove(model[2], "bias")
    nm.compress_(model)(x)


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_compressed_layers_say_that_their_weight_is_no_parameter(kind):
    model, x = build(kind)
    nm.sparsify_(model, "ste:2:4").finish(allow_unused=True)
    nm.compress_(model)
    want = model(x)
    with pytest.raises(RecipeError, match=r"before compress_, or make the model dense by nm\.densify_"):
        prune.l1_unstructured(model[0], "weight", amount=0.3)
    with pytest.raises(AttributeError, match=r"not a tensor.*\.dense\(\).*densify_"):
        prune.global_unstructured([(model[0], "weight")], prune.L1Unstructured, amount=0.3)
    for _ in range(2):
        assert torch.equal(model(x), want)
    for operate in (parametrized("bias"), lambda layer: prune.random_unstructured(layer, "bias", amount=1.0)):
        model, x = build(kind)
        nm.sparsify_(model, "ste:2:4").finish(allow_unused=True)
        nm.compress_(model)
        for _ in range(2):
            model(x)  # the second call goes a shorter way
        operate(model[2])
        bias = model[2].bias
        for _ in range(2):
            got = model(x)
        plain = nn.functional.linear if kind == "linear" else nn.functional.conv2d
        hidden = model[:2](x)
        weight = model[2].dense() if kind == "linear" else model[2].dense()[:, :, None, None]
        assert torch.allclose(got, plain(hidden, weight, bias), atol=1e-6)
        with pytest.raises(RecipeError, match="its bias is computed"):
            nm.densify_(model)


def test_a_bare_sparse_layer_may_be_normalised():
    """Without a recipe, torch differentiates through the mask's input."""
    torch.manual_seed(0)
    layer = parametrizations.weight_norm(nm.nn.SparseLinear(16, 8))
    layer(torch.randn(4, 16)).sum().backward()
    assert layer.parametrizations.weight.original0.grad.abs().sum() > 0


def test_stacked_experts():
    model = mixture(dtype=torch.float32)
    handle = nm.sparsify_(model, "srste:2:4")
    owner = next(iter(handle.layers.values())).owner
    key = next(key for key, _ in owner.named_parameters(recurse=False))
    x = torch.randn(4, 16)
    optimizer = handle.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    prune.l1_unstructured(owner, key, amount=0.3)
    for call in (lambda: model(x), handle.finish, handle.remove):
        with pytest.raises(RecipeError, match=rf"its {key} is computed by torch\.nn\.utils\.prune"):
            call()
    prune.remove(owner, key)
    model(x).square().mean().backward()
    optimizer.step()
    handle.finish()
    nm.compress_(model)(x)
