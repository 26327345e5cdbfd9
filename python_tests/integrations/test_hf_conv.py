"""A ResNet of Hugging Face: trained with sparse convolutions, compressed, saved, loaded by from_pretrained, pruned while it is loaded."""

import copy

import pytest
import torch
from torch import nn

import nmkernels as nm
from nmkernels.nn import CompressedConv2d

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.slow

X = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def resnet():
    torch.manual_seed(0)
    config = transformers.ResNetConfig(embedding_size=16, hidden_sizes=[32, 64], depths=[1, 1], layer_type="basic", num_labels=4)
    return transformers.ResNetForImageClassification(config)


def logits(model):
    with torch.no_grad():
        return model.eval()(X).logits


def test_save_pretrained_and_from_pretrained(tmp_path):
    model = resnet()
    handle = nm.sparsify_(model, "srste:2:4")
    assert len(handle.layers) == 6
    optimizer = handle.attach(handle.recipe.optimizer(model.parameters(), lr=1e-3))
    for _ in range(3):
        model(X, labels=torch.arange(4)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    handle.finish()
    want, dense = logits(model), copy.deepcopy(model.state_dict())
    nm.compress_(model).save_pretrained(tmp_path)
    loaded = transformers.AutoModelForImageClassification.from_pretrained(tmp_path)
    assert sum(isinstance(m, CompressedConv2d) for m in loaded.modules()) == 6
    assert torch.allclose(logits(loaded), want, atol=1e-5)
    assert torch.allclose(logits(nm.load_compressed(resnet(), tmp_path)), want, atol=1e-5)
    again = loaded.dequantize()
    assert {type(m) for m in again.modules()} & {CompressedConv2d, nn.Conv2d} == {nn.Conv2d}
    assert all(torch.equal(value, dense[key]) for key, value in again.state_dict().items())


def test_pruned_while_it_is_loaded(tmp_path):
    dense = resnet()
    dense.save_pretrained(tmp_path)
    config = transformers.quantizers.auto.AUTO_QUANTIZATION_CONFIG_MAPPING["nmkernels"]("2:4")
    loaded = transformers.AutoModelForImageClassification.from_pretrained(tmp_path, quantization_config=config)
    nm.sparsify_(dense, "ste:2:4").finish(allow_unused=True)
    assert sum(isinstance(m, CompressedConv2d) for m in loaded.modules()) == 6
    assert torch.allclose(logits(loaded), logits(dense), atol=1e-5)
