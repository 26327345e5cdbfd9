"""SparseConv1D in a real Hugging Face GPT-2: groups along in, weight stored (in, out)."""

import copy

import pytest
import torch
from torch import nn

import nmkernels as nm
from nmkernels.testing import equal_bits
from python_tests import plain

transformers = pytest.importorskip("transformers")
from transformers.pytorch_utils import Conv1D  # noqa: E402


def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return transformers.GPT2LMHeadModel(config)


def loss_of(model):
    ids = torch.arange(12).reshape(2, 6) % 7
    return model(input_ids=ids, labels=ids).loss


def conv1d():
    layer = Conv1D(24, 16)
    nn.init.normal_(layer.bias)
    return layer


def masked_copy(model):
    """A dense copy whose Conv1D weights (in, out) are masked along in."""
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for module in copied.modules():
            if isinstance(module, Conv1D):
                module.weight.copy_(plain.masked(module.weight.t().contiguous(), 2, 4).t())
    return copied


def test_gpt2_layers_taken_and_skipped():
    report = nm.sparsify_(gpt2(), "ste:2:4").report
    assert {e.name.split(".", 3)[-1] for e in report.sparse} == {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}
    assert len(report.sparse) == 8 and {e.kind for e in report.sparse} == {"Conv1D"}
    assert next(e.shape for e in report.sparse if e.name.endswith("c_attn")) == (96, 32), "(out, in)"
    assert [(e.name, "tied" in e.reason) for e in report.skipped if e.linear] == [("lm_head", True)]
    assert {e.name: e.kind for e in report.skipped if not e.linear} == dict.fromkeys(("transformer.wte", "transformer.wpe"), "Embedding")


def test_gpt2_equals_a_masked_dense_copy_with_gradients_straight_through():
    model = gpt2()
    dense, handle = masked_copy(model), nm.sparsify_(model, "ste:2:4")
    loss, expected = loss_of(model), loss_of(dense)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    grads = {name: p.grad for name, p in dense.named_parameters()}
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, grads[name], rtol=1e-4, atol=1e-7)
    assert all(layer.ran for layer in handle.layers.values())


def test_gpt2_state_dict_is_untouched_and_remove_gives_the_model_back():
    model = gpt2()
    before = {name: (value, value.clone()) for name, value in model.state_dict(keep_vars=True).items()}
    modules, text = dict(model.named_modules()), repr(model)
    handle = nm.sparsify_(model, "ste:2:4")
    loss_of(model)
    for _ in range(2):
        after = model.state_dict(keep_vars=True)
        assert list(after) == list(before)
        assert all(after[k] is v and equal_bits(after[k].detach(), c.detach()) for k, (v, c) in before.items())
        handle.remove()
    assert all(a is b and not isinstance(a, nm.nn.NMWeight) for a, b in zip(model.modules(), modules.values(), strict=True))
    assert repr(model) == text and type(model.transformer.h[0].mlp.c_fc) is Conv1D
    assert torch.equal(loss_of(model), loss_of(gpt2()))


def test_gpt2_trains_finishes_and_compresses():
    model = gpt2()
    recipe = nm.recipes.get("srste:2:4")
    handle = nm.sparsify_(model, recipe)
    optimizer = handle.attach(recipe.optimizer(model.parameters(), lr=1e-2))
    losses = []
    for _ in range(4):
        loss = loss_of(model)
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 0.1
    handle.finish()
    for layer in handle.layers.values():
        assert nm.ops.is_nm(layer.weight.detach().t(), "2:4") and not nm.ops.is_nm(layer.weight.detach(), "2:4")
    finished = loss_of(model)
    nm.compress_(model)
    assert model.transformer.h[0].mlp.c_fc.layout == "conv1d"
    torch.testing.assert_close(loss_of(model), finished, rtol=1e-5, atol=0)


@pytest.mark.parametrize("shape", [(16,), (0, 16), (2, 3, 16)])
def test_one_layer(shape):
    dense = conv1d()
    bias, used = dense.bias, plain.masked(dense.weight.t().contiguous(), 2, 4)
    layer = nm.nn.make_sparse_(dense, "2:4")
    assert layer is dense and (layer.in_features, layer.out_features) == (16, 24) and "in_features=16" in repr(layer)
    x = torch.randn(shape)
    torch.testing.assert_close(layer(x), x @ used.t() + bias)
    assert equal_bits(layer.effective_weight(), used)


def test_attached_layer_is_masked_along_in_after_each_step():
    model = nn.Sequential(conv1d())
    for make in (nm.optim.MaskedAdamW, torch.optim.AdamW):
        handle = nm.sparsify_(model, nm.recipes.SRSTE("2:4", decay=0.1))
        optimizer = handle.attach(make(model.parameters(), lr=0.1))
        for _ in range(3):
            model(torch.randn(8, 16)).square().sum().backward()
            optimizer.step()
            assert equal_bits(model[0].effective_weight(), plain.masked(model[0].weight.t().contiguous(), 2, 4))
        handle.remove()


def test_indivisible_along_in_and_subclasses():
    class Own(Conv1D):
        pass

    model = nn.ModuleDict({"a": Conv1D(32, 18), "b": Own(32, 32), "c": Conv1D(18, 32)})
    report = nm.sparsify_(model, "ste:2:4").report
    assert [e.name for e in report.sparse] == ["c"]
    reasons = {e.name: e.reason for e in report.skipped}
    assert "in_features=18" in reasons["a"] and "subclass of Conv1D" in reasons["b"]
    with pytest.raises(nm.ShapeError, match="in_features is 18"):
        nm.nn.make_sparse_(Conv1D(32, 18), "2:4")


@pytest.mark.parametrize(
    ("config", "model"),
    [
        (dict(num_hidden_layers=1, intermediate_size=64, num_attention_heads=2), "BertForMaskedLM"),
        (dict(num_hidden_layers=1, intermediate_size=64, num_attention_heads=2, num_key_value_heads=2), "LlamaForCausalLM"),
    ],
)
def test_bert_and_llama(config, model):
    kind = getattr(transformers, model)
    net = kind(kind.config_class(vocab_size=64, hidden_size=32, max_position_embeddings=16, **config)).eval()
    dense, handle = copy.deepcopy(net), nm.sparsify_(net, "ste:2:4")
    assert {e.kind for e in handle.report.skipped if not e.linear} == {"Embedding"}
    skipped = {e.name for e in handle.report.skipped if e.linear}
    assert skipped == ({"cls.predictions.decoder"} if model == "BertForMaskedLM" else {"lm_head"})
    with torch.no_grad():
        for entry in handle.report.sparse:
            weight = dense.get_submodule(entry.name).weight
            weight.copy_(plain.masked(weight, 2, 4))
    ids = torch.arange(10).reshape(2, 5)
    torch.testing.assert_close(net(input_ids=ids).logits, dense(input_ids=ids).logits)
    assert all(layer.ran for name, layer in handle.layers.items() if "pooler" not in name)
