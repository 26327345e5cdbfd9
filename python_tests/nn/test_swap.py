"""The swap in place and back: what a user holds of the dense model stays valid. Encoder fast paths."""

import copy
import itertools

import pytest
import torch
from torch import nn

import nmkernels as nm
from python_tests import naive

X = torch.linspace(-1, 1, 2 * 5 * 32).sin().reshape(2, 5, 32)
PADDING = torch.tensor([[False] * 5, [False, False, False, True, True]])


# ---- the fused paths of encoders


def encoder(**options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, dim_feedforward=64, dropout=0.0, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=not options).eval()


def flags(model):
    layers = [layer.activation_relu_or_gelu for layer in model.layers]
    return [*layers, model.use_nested_tensor]


def test_encoder_in_eval_uses_the_masked_weights():
    ways = itertools.product(
        [{}, {"norm_first": True, "activation": "gelu"}], [None, PADDING], [torch.no_grad, torch.inference_mode, torch.enable_grad]
    )
    for options, padding, mode in ways:
        model = encoder(**options)
        dense = copy.deepcopy(model)
        for layer in dense.layers:
            for linear in (layer.linear1, layer.linear2):
                linear.weight.data.copy_(naive.masked(linear.weight, 2, 4))
        # off the fused path by training mode: dropout is 0
        expected = dense.train()(X, src_key_padding_mask=padding).detach()
        handle = nm.sparsify_(model, "ste:2:4")
        real = slice(None) if padding is None else ~padding
        with mode():
            torch.testing.assert_close(model(X, src_key_padding_mask=padding)[real], expected[real])
        assert all(layer.ran for layer in handle.layers.values()) and len(handle.layers) == 4
        assert sum("never calls" in e.reason for e in handle.report.skipped) == 2
    one = encoder().layers[0]
    handle = nm.sparsify_(one, "ste:2:4")
    with torch.no_grad():
        one(X)
    assert all(layer.ran for layer in handle.layers.values())


def test_encoder_without_sparse_layers_keeps_its_fast_path():
    model = nn.ModuleDict({"dense": encoder(), "sparse": encoder()})
    before = flags(model["dense"])
    assert all(before)
    nm.sparsify_(model, "ste:2:4", lambda module, name: name.startswith("sparse") and "linear" in name)
    assert flags(model["dense"]) == before and not any(flags(model["sparse"]))


@pytest.mark.parametrize("way", ["remove", "densify_", "densify_ of a copy", "both"])
def test_fast_path_is_restored(way):
    model = encoder()
    before, expected = flags(model), model(X).detach()
    handle = nm.sparsify_(model, "ste:2:4")
    nm.nn.swap.switch_fast_paths(model)  # once more, which remembers the first state
    assert not any(flags(model))
    if way == "densify_ of a copy":
        model = nm.densify_(copy.deepcopy(model))
    if way in ("densify_", "both"):
        assert nm.densify_(model) is model
    if way in ("remove", "both"):
        assert handle.remove() is model
    assert flags(model) == before and "_nm_fast_path" not in model.layers[0].__dict__
    torch.testing.assert_close(model(X), expected)


def test_compressed_encoders_stay_off_the_fast_path(tmp_path):
    model = encoder()
    handle = nm.sparsify_(model, "ste:2:4")
    handle.finish(allow_unused=True)
    with torch.no_grad():
        expected = model(X, src_key_padding_mask=PADDING)
        nm.compress_(model)
        for _ in range(2):
            torch.testing.assert_close(model(X, src_key_padding_mask=PADDING)[~PADDING], expected[~PADDING])
            handle.remove()
        nm.save_compressed(model, tmp_path / "m.safetensors")
        assert torch.equal(nm.load_compressed(encoder(), tmp_path / "m.safetensors")(X), model(X))


# ---- the layer


def swapped(**config):
    dense = nn.Linear(32, 16, **config)
    return dense, nn.Sequential(dense)


def test_module_parameters_and_attributes_stay():
    dense, model = swapped()
    weight, bias, outside = dense.weight, dense.bias, [dense]
    dense.label = "mine"
    handle = nm.sparsify_(model, "ste:2:4")
    assert model[0] is outside[0] is dense and isinstance(dense, nm.SparseLinear)
    assert dense.weight is weight and dense.bias is bias
    handle.remove()
    assert type(dense) is nn.Linear and dense.weight is weight and dense.__dict__.keys() - nn.Linear(1, 1).__dict__.keys() == {"label"}
    dense, model = swapped(dtype=torch.bfloat16, device="meta", bias=False)
    dense.eval().weight.requires_grad_(False)
    handle = nm.sparsify_(model, "ste:2:4")
    for _ in range(2):
        weight = model[0].weight
        assert (weight.dtype, weight.device.type, weight.requires_grad, model[0].training) == (torch.bfloat16, "meta", False, False)
        assert model[0].bias is None and model.training
        handle.remove()


def test_hooks_keep_working_both_ways():
    dense, model = swapped()
    seen = []
    hooks = [
        dense.register_forward_pre_hook(lambda m, args: seen.append("pre")),
        dense.register_forward_hook(lambda m, args, y: seen.append("post")),
        dense.register_full_backward_hook(lambda m, gi, go: seen.append("back")),
        dense.register_state_dict_pre_hook(lambda m, prefix, keep: seen.append("saving")),
        dense.register_state_dict_post_hook(lambda m, sd, prefix, meta: seen.append("saved")),
        # bound to the module by a weak reference: it would be dead had the module been exchanged
        dense.register_load_state_dict_pre_hook(lambda m, *rest: seen.append(("loading", m is model[0]))),
        dense.register_load_state_dict_post_hook(lambda m, keys: seen.append("loaded")),
        dense.weight.register_hook(lambda g: seen.append("grad")),
    ]
    del dense
    handle = nm.sparsify_(model, "ste:2:4")
    for _ in range(2):
        seen.clear()
        model(torch.randn(2, 32, requires_grad=True)).sum().backward()
        model.load_state_dict(model.state_dict())
        assert sorted(map(str, seen)) == sorted(["pre", "post", "back", "grad", "saving", "saved", "('loading', True)", "loaded"])
        handle.remove()
    for hook in hooks:
        hook.remove()
    seen.clear()
    model.load_state_dict(model.state_dict())
    model(torch.randn(2, 32)).sum().backward()
    assert not seen


def test_densify_of_layers_that_were_built_sparse():
    model = nn.Sequential(nm.SparseLinear(32, 16), nn.Linear(16, 16))
    weight = model[0].weight
    assert nm.densify_(model) is model and type(model[0]) is nn.Linear and model[0].weight is weight
    assert nm.densify_(model) is model, "nothing to do is no error"
    assert type(nm.densify_(nm.SparseLinear(32, 16))) is nn.Linear


def test_densify_refuses_while_an_optimizer_is_attached():
    _, model = swapped()
    handle = nm.sparsify_(model, "srste:2:4")
    handle.attach(nm.optim.MaskedAdamW(model.parameters(), lr=0.1))
    with pytest.raises(nm.RecipeError, match=r"handle.remove\(\)"):
        nm.densify_(model)
    assert isinstance(model[0], nm.SparseLinear)
    for _ in range(2):
        assert type(handle.remove()[0]) is nn.Linear


def test_make_sparse_refuses_what_it_does_not_know():
    for module in (nn.ReLU(), nm.SparseLinear(32, 16), nn.Bilinear(4, 4, 4)):
        with pytest.raises(nm.RecipeError, match=type(module).__name__):
            nm.nn.swap.make_sparse_(module, "2:4")
    layer = nn.Linear(30, 16)
    with pytest.raises(nm.ShapeError, match="in_features is 30"):
        nm.nn.swap.make_sparse_(layer, "2:4")
    assert type(layer) is nn.Linear


class FromAList(nn.Module):
    """Calls its layers from a plain list, a tuple and a dict of its own, as MaskFormer does."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(32, 32) for _ in range(3))
        self.layers, self.pair, self.named = [self.first, nn.ReLU()], (self.second, nn.ReLU()), {"last": [self.third]}

    def forward(self, x):
        for layer in (*self.layers, *self.pair, *self.named["last"]):
            x = layer(x)
        return x


def test_layers_in_plain_containers_are_replaced(tmp_path):
    model, x = FromAList(), torch.randn(3, 32)
    handle = nm.sparsify_(model, "ste:2:4")
    handle.finish(allow_unused=True)
    y = model(x)
    nm.compress_(model)
    assert [type(m) for m in (model.layers[0], model.pair[0], model.named["last"][0])] == 3 * [nm.CompressedLinear]
    assert model.layers[0] is model.first and model.pair[0] is model.second
    torch.testing.assert_close(model(x), y)
    nm.save_compressed(model, tmp_path / "m.safetensors")
    restored = nm.load_compressed(FromAList(), tmp_path / "m.safetensors")
    assert torch.equal(restored(x), model(x))
    nm.densify_(model)
    assert [type(m) for m in (model.layers[0], model.pair[0], model.named["last"][0])] == 3 * [nn.Linear]
    torch.testing.assert_close(model(x), y)
