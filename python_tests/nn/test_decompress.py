"""decompress_ and densify_: from compressed layers back to the dense ones that compute the same. Experts: test_experts.py."""

import copy
import importlib.util

import pytest
import torch
from torch import nn

import nmkernels as nm
from nmkernels.export.tensors import read
from nmkernels.nn import CompressedLinear, decompress_
from nmkernels.nn.swap import post_swap_hooks
from nmkernels.pattern import RecipeError
from nmkernels.testing import equal_bits


def finished(recipe="ste:2:4"):
    torch.manual_seed(0)
    shared = nn.Linear(32, 32)
    model = nn.ModuleDict(
        {
            "a": shared,
            "again": shared,
            "b": nn.Linear(32, 16, bias=False),
            "conv": nn.Conv2d(16, 32, (3, 2), stride=2, padding=1, padding_mode="reflect"),
        }
    )
    nm.sparsify_(model, recipe).finish(allow_unused=True)
    return model.eval()


@pytest.mark.parametrize("verb", [decompress_, nm.densify_])
def test_a_compressed_model_turns_dense_again(verb):
    dense = nm.densify_(finished())
    hooked = finished()
    calls = []
    hooked["b"].register_forward_hook(lambda *_: calls.append(1))
    model = nm.compress_(hooked)
    bias = model["a"].bias
    assert verb(model) is model
    assert [type(m) for m in model.modules()] == [type(m) for m in dense.modules()]
    assert model["a"] is model["again"] and model["a"].bias is bias and not model["a"].training
    state, want = model.state_dict(), dense.state_dict()
    assert state.keys() == want.keys() and all(equal_bits(state[key], want[key]) for key in want)
    x = torch.randn(2, 16, 8, 8)
    torch.testing.assert_close(model["conv"](x), dense["conv"](x))
    assert repr(model["conv"]) == repr(dense["conv"])
    model["b"](torch.randn(3, 32))
    assert calls == [1] and all(p.requires_grad for p in model.parameters())


def test_adapters_are_folded_and_orders_undone():
    columns = torch.randperm(32)
    adapter = (torch.randn(32, 3), torch.randn(3, 16))
    layer = CompressedLinear(nm.ops.compress(torch.randn(16, 32), "2:4"), torch.randn(16), adapter=adapter, columns=columns)
    x = torch.randn(5, 32)
    dense = decompress_(nn.Sequential(copy.deepcopy(layer)))[0]
    torch.testing.assert_close(dense(x), layer(x))
    assert type(dense) is nn.Linear and [name for name, _ in dense.named_parameters()] == ["weight", "bias"]


@pytest.mark.parametrize("values", [None, "int8"])
def test_layers_of_one_memory_keep_weights_of_their_own(values, tmp_path):
    whole = nm.ops.compress(torch.randn(16, 16), "2:4" if values is None else "1:1")
    whole = whole if values is None else nm.ops.quantize_values(whole, values)
    half = nm.ops.Compressed(whole.values[:8], whole.indices[:8], whole.pattern, (8, 16), None if values is None else whole.step[:8])
    orders = [torch.arange(16).roll(1), torch.arange(16).flip(0)]
    layers = [CompressedLinear(whole), *(CompressedLinear(whole, columns=order) for order in orders), CompressedLinear(half)]
    if values is not None:
        other_step = nm.ops.Compressed(whole.values, whole.indices, whole.pattern, (16, 16), whole.step * 2)
        layers += [CompressedLinear(other_step), CompressedLinear(whole, dtype=torch.float64)]
    layers += [CompressedLinear(whole, layout="conv1d")]
    nm.save_dense(nn.Sequential(*layers), tmp_path / "dense.safetensors")
    file, want, x = read(tmp_path / "dense.safetensors").tensors, [layer.dense() for layer in layers], torch.randn(3, 16)
    want[-1] = want[-1].t().contiguous()
    if importlib.util.find_spec("transformers") is None:
        layers.pop()
    outputs = [layer(x) for layer in layers]
    for number, dense in enumerate(nm.densify_(nn.Sequential(*layers))):
        assert equal_bits(dense.weight.detach(), want[number]) and equal_bits(file[f"{number}.weight"], want[number])
        torch.testing.assert_close(dense(x.to(dense.weight.dtype)).float(), outputs[number])


def test_decompress_refuses_before_changing_anything():
    layer = CompressedLinear(nm.ops.compress(torch.randn(16, 32), "2:4"))
    with pytest.raises(RecipeError, match="the model itself is one compressed layer"):
        decompress_(layer)
    model = nn.Sequential(layer, copy.deepcopy(layer).to("meta"))
    with pytest.raises(RecipeError, match="layer '1' has an offloaded weight"):
        decompress_(model)
    assert model[0] is layer


def test_post_swap_hooks_are_called_with_the_model(monkeypatch):
    calls = []
    monkeypatch.setattr("nmkernels.nn.swap.post_swap_hooks", [*post_swap_hooks, calls.append])
    model = finished()
    assert calls == [model]
    nm.compress_(model)
    nm.densify_(model)
    nm.densify_(model)
    assert calls == [model] * 3, "the second densify_ changed nothing"
