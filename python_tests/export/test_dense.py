"""Dense files: ordinary safetensors that any program loads, with exact zeros."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_model
from torch import nn

import nmkernels as nm
from nmkernels.pattern import RecipeError
from nmkernels.testing import equal_bits
from python_tests.export.editing import parts


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))


@pytest.fixture
def trained() -> tuple[nn.Sequential, nm.recipes.Handle]:
    torch.manual_seed(0)
    model = build()
    handle = nm.sparsify_(model, "ste:2:4", lambda module, name: name == "0")
    model(torch.randn(2, 32))
    return model, handle


def test_a_finished_model_loads_as_a_dense_one(trained, tmp_path):
    model, handle = trained
    handle.finish()
    nm.save_dense(model, tmp_path / "m.safetensors")
    fresh = build()
    load_model(fresh, tmp_path / "m.safetensors")
    for key, value in model.state_dict().items():
        assert equal_bits(fresh.state_dict()[key], value)
    assert nm.ops.is_nm(fresh[0].weight.detach(), "2:4")
    assert json.loads(parts(tmp_path / "m.safetensors")[1]["nm"]) == {"0": "2:4"}


def test_compressing_first_gives_the_same_file(trained, tmp_path):
    model, handle = trained
    handle.finish()
    nm.save_dense(model, tmp_path / "a")
    nm.compress_(model)
    nm.save_dense(model, tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_model_in_training_is_refused(trained, tmp_path):
    with pytest.raises(RecipeError, match=r"layer '0' is not 2:4; call handle.finish\(\)"):
        nm.save_dense(trained[0], tmp_path / "m")


@pytest.mark.slow
def test_tied_weights_and_conv1d(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=8, vocab_size=32)
    torch.manual_seed(0)
    model, fresh = transformers.GPT2LMHeadModel(config).eval(), transformers.GPT2LMHeadModel(config).eval()
    ids = torch.randint(32, (2, 8))
    handle = nm.sparsify_(model, "ste:2:4")
    model(ids)
    handle.finish()
    want = model(ids).logits
    nm.compress_(model)
    nm.save_dense(model, tmp_path / "m.safetensors")
    load_model(fresh, tmp_path / "m.safetensors")
    assert torch.equal(fresh(ids).logits, want)
    assert nm.ops.is_nm(fresh.transformer.h[0].mlp.c_fc.weight.detach().t(), "2:4")
