"""Passes of torch that go by exact class: those that would skip a layer are announced, and find plain layers after the way back."""

import warnings

import pytest
import torch
from torch import nn
from torch.ao import quantization

import nmkernels as nm

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated")


def model_of(stage):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    handle = nm.sparsify_(model, "ste:2:4")
    if stage != "training":
        handle.finish(allow_unused=True)
    if stage == "compressed":
        nm.compress_(model)
    return model.eval(), handle


def dynamic(model):
    return quantization.quantize_dynamic(model, {nn.Linear})


def static(model):
    model.qconfig = quantization.get_default_qconfig("fbgemm")
    return quantization.prepare(model)


@pytest.mark.parametrize("quantise", [dynamic, static])
@pytest.mark.parametrize("stage", ["training", "finished", "compressed"])
def test_quantisation_that_passes_over_a_layer_is_announced(stage, quantise):
    model, _ = model_of(stage)
    kind = type(model[0])
    with pytest.warns(UserWarning, match=rf"passes over {kind.__name__}.*handle\.remove\(\).*densify_"):
        quantised = quantise(model)
    assert type(quantised[0]) is kind and not hasattr(model[0], "qconfig")


def test_quantised_after_the_way_back():
    for stage in ("finished", "compressed"):
        model, handle = model_of(stage)
        want = model(x := torch.randn(8, 16))
        handle.remove() if stage == "finished" else nm.densify_(model)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*exact class")
            quantised = dynamic(model)
        assert isinstance(quantised[0], torch.ao.nn.quantized.dynamic.Linear) and torch.allclose(quantised(x), want, atol=0.05)
        assert nm.ops.is_nm(quantised[0].weight().dequantize(), "2:4")


def test_fusing_a_norm_keeps_the_layer_and_what_it_computes():
    torch.manual_seed(0)
    norm, x = nn.BatchNorm1d(32).eval(), torch.randn(4, 16)
    nn.init.uniform_(norm.running_var, 0.5, 2)
    for stage in ("training", "finished"):
        model, _ = model_of(stage)
        fused = nn.utils.fuse_linear_bn_eval(model[0], norm)
        assert torch.allclose(fused(x), norm(model[0](x)), atol=1e-5)
