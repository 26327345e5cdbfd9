"""SparseConv1D and SparseLinear in real Hugging Face models. Training: recipes/test_conv1d.py; files: export/test_safetensors.py."""

import copy

import pytest
import torch
from torch import nn

import nmkernels as nm
from nmkernels.testing import equal_bits
from python_tests import naive

transformers = pytest.importorskip("transformers")
from transformers.pytorch_utils import Conv1D  # noqa: E402

SMALL = {"num_hidden_layers": 1, "intermediate_size": 64, "num_attention_heads": 2, "hidden_size": 32, "max_position_embeddings": 16}
DRY = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODELS = {
    "GPT2LMHeadModel": ({"n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2, **DRY}, {"lm_head"}),
    "BertForMaskedLM": ({**SMALL, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}, {"cls.predictions.decoder"}),
    "LlamaForCausalLM": ({**SMALL, "num_key_value_heads": 2}, {"lm_head"}),
}


def model_of(name):
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    return kind(kind.config_class(vocab_size=64, **MODELS[name][0]))


def loss_of(model):
    ids = torch.arange(12).reshape(2, 6) % 7
    return model(input_ids=ids, labels=ids).loss


@pytest.mark.parametrize("name", MODELS)
def test_equals_masked_dense_with_straight_through_gradients(name):
    model = model_of(name)
    modules, text, state = list(model.modules()), repr(model), model.state_dict(keep_vars=True)
    dense, handle = copy.deepcopy(model), nm.sparsify_(model, "ste:2:4")
    assert {e.kind for e in handle.report.skipped if not e.linear} == {"Embedding"}
    assert {e.name for e in handle.report.skipped if e.linear} == MODELS[name][1]
    for entry in handle.report.sparse:
        layer = dense.get_submodule(entry.name)
        weight = layer.weight.data.t() if isinstance(layer, Conv1D) else layer.weight.data
        weight.copy_(naive.masked(weight.contiguous(), 2, 4))
    loss, expected = loss_of(model), loss_of(dense)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    grads = {name: p.grad for name, p in dense.named_parameters()}
    for key, p in model.named_parameters():
        torch.testing.assert_close(p.grad, grads[key], rtol=1e-4, atol=1e-7)
    assert all(layer.ran for key, layer in handle.layers.items() if "pooler" not in key)
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(state) and all(after[key] is value for key, value in state.items())
    handle.remove()
    assert repr(model) == text and all(a is b and not isinstance(a, nm.nn.NMWeight) for a, b in zip(model.modules(), modules, strict=True))


def test_one_layer():
    dense = Conv1D(24, 16)
    bias, used = nn.init.normal_(dense.bias), naive.masked(dense.weight.t().contiguous(), 2, 4)
    layer = nm.nn.swap.make_sparse_(dense, "2:4")
    assert layer is dense and (layer.in_features, layer.out_features) == (16, 24) and "in_features=16" in repr(layer)
    for shape in [(16,), (0, 16), (2, 3, 16)]:
        x = torch.randn(shape)
        torch.testing.assert_close(layer(x), x @ used.t() + bias)
    assert equal_bits(layer.effective_weight(), used)


def test_indivisible_along_in_and_subclasses():
    class Own(Conv1D):
        pass

    model = nn.ModuleDict({"a": Conv1D(32, 18), "b": Own(32, 32), "c": Conv1D(18, 32)})
    report = nm.sparsify_(model, "ste:2:4").report
    assert [(e.name, e.shape, e.kind) for e in report.sparse] == [("c", (18, 32), "Conv1D")], "(out, in)"
    reasons = {e.name: e.reason for e in report.skipped}
    assert "in_features=18" in reasons["a"] and "subclass of Conv1D" in reasons["b"]
    with pytest.raises(nm.ShapeError, match="in_features is 18"):
        nm.nn.swap.make_sparse_(Conv1D(32, 18), "2:4")
