"""Compressed files: what goes in comes out, bit for bit, and everything else is refused before the model is touched."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import nmkernels as nm
from nmkernels.export import load_compressed, save_compressed
from nmkernels.pattern import CheckpointError, RecipeError
from nmkernels.testing import equal_bits
from python_tests.export.editing import parts


def dense(dtype: torch.dtype = torch.float32, bias: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 16, bias=bias), nn.LayerNorm(16), nn.Linear(16, 8)).to(dtype)


def compressed(pattern: str = "2:4", dtype: torch.dtype = torch.float32, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    model = dense(dtype, bias)
    nn.init.normal_(model[1].weight)
    for i in (0, 2):
        model[i] = nm.nn.CompressedLinear(nm.ops.compress(model[i].weight.detach(), pattern), model[i].bias)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("pattern", ["2:4", "1:4", "3:8", "1:16"])
def test_round_trip(tmp_path, pattern, dtype):
    model = compressed(pattern, dtype)
    save_compressed(model, tmp_path / "m.safetensors")
    same = dense(dtype)
    assert load_compressed(same, tmp_path / "m.safetensors") is same
    assert same.state_dict().keys() == model.state_dict().keys()
    for key, value in model.state_dict().items():
        assert equal_bits(same.state_dict()[key], value), key
    x = torch.randn(3, 32, dtype=dtype)
    assert equal_bits(model(x), same(x))
    assert str(same[0].pattern) == pattern


def test_names_and_metadata_of_the_file(tmp_path):
    save_compressed(compressed(bias=False), tmp_path / "m.safetensors")
    tensors, about = parts(tmp_path / "m.safetensors")
    names = ("0.weight.values", "0.weight.indices", "1.weight", "1.bias", "2.weight.values", "2.weight.indices", "2.bias")
    assert set(tensors) == set(names) and tensors["0.weight.indices"].dtype == torch.uint8
    assert (about["format"], about["version"]) == ("nmkernels", "1")
    assert json.loads(about["layers"])["0"] == {"pattern": "2:4", "shape": [16, 32], "dtype": "float32", "layout": "linear"}


def test_the_file_is_at_most_60_percent_of_the_dense_weights(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nm.nn.CompressedLinear(nm.ops.compress(torch.randn(512, 512), "2:4")))
    save_compressed(model, tmp_path / "m.safetensors")
    assert (tmp_path / "m.safetensors").stat().st_size <= 0.54 * 512 * 512 * 4


def test_the_same_model_gives_the_same_bytes(tmp_path):
    files = [tmp_path / f"{i}.safetensors" for i in range(6)]
    for file in files:
        save_compressed(compressed(), file)
    assert len({file.read_bytes() for file in files}) == 1 and set(tmp_path.iterdir()) == set(files)


def test_tied_tensors_are_stored_once_and_stay_tied(tmp_path):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(64, 16)
            self.fc = nn.Linear(16, 16)
            self.again = self.fc
            self.head = nn.Linear(16, 64, bias=False)
            self.head.weight = self.embed.weight

    torch.manual_seed(0)
    model, fresh = Tied(), Tied()
    packed = nm.nn.CompressedLinear(nm.ops.compress(model.fc.weight.detach(), "2:4"), model.fc.bias)
    model.fc = model.again = packed
    save_compressed(model, tmp_path / "m.safetensors")
    tensors, metadata = parts(tmp_path / "m.safetensors")
    assert len(tensors) == 4 and json.loads(metadata["aliases"])["head.weight"] == "embed.weight"
    load_compressed(fresh, tmp_path / "m.safetensors")
    assert fresh.fc is fresh.again
    assert fresh.head.weight is fresh.embed.weight
    assert equal_bits(fresh.fc.values, packed.values)
    assert equal_bits(fresh.head.weight, model.head.weight)


def test_a_hugging_face_gpt2_round_trips(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=8, vocab_size=32)
    torch.manual_seed(0)
    model, fresh = transformers.GPT2LMHeadModel(config).eval(), transformers.GPT2LMHeadModel(config).eval()
    ids = torch.randint(32, (2, 8))
    handle = nm.sparsify_(model, "ste:2:4")
    model(ids)
    handle.finish()
    nm.compress_(model)
    save_compressed(model, tmp_path / "m.safetensors")
    load_compressed(fresh, tmp_path / "m.safetensors")
    layer = fresh.transformer.h[0].mlp.c_fc
    assert (layer.layout, layer.in_features, layer.out_features) == ("conv1d", 16, 64)
    assert equal_bits(model(ids).logits, fresh(ids).logits)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_nothing_of_the_model_stays_in_the_file(tmp_path, device):
    path, model = tmp_path / "m.safetensors", compressed()
    save_compressed(model, path)
    with torch.device(device):
        fresh = dense()
    load_compressed(fresh, path)
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    for key, value in model.state_dict().items():
        assert equal_bits(fresh.state_dict()[key], value), key


def test_mode_and_bias_parameter_are_kept(tmp_path):
    save_compressed(compressed(), tmp_path / "m.safetensors")
    fresh = dense().eval()
    bias = fresh[0].bias
    load_compressed(fresh, tmp_path / "m.safetensors")
    assert fresh[0].bias is bias
    assert not fresh[0].training


def test_saving_onto_the_file_a_model_was_loaded_from(tmp_path):
    path = tmp_path / "m.safetensors"
    save_compressed(compressed(), path)
    before = path.read_bytes()
    save_compressed(load_compressed(dense(), path), path)
    assert path.read_bytes() == before


def test_a_model_in_training_is_refused_with_the_way_out(tmp_path):
    model = dense()
    with pytest.raises(RecipeError, match="no CompressedLinear"):
        save_compressed(model, tmp_path / "m")
    handle = nm.sparsify_(model, "ste:2:4", lambda module, name: isinstance(module, nn.Linear))
    with pytest.raises(RecipeError, match=r"layer '0' is not compressed; call handle.finish\(\)"):
        save_compressed(model, tmp_path / "m")
    model(torch.randn(2, 32))
    handle.finish()
    with pytest.raises(RecipeError, match="compress_"):
        save_compressed(model, tmp_path / "m")
    with pytest.raises(RecipeError, match="put it in an nn"):
        save_compressed(compressed()[0], tmp_path / "m")
    assert not list(tmp_path.iterdir())


def test_state_that_is_not_a_tensor(tmp_path):
    class Odd(nn.Module):
        def get_extra_state(self):
            return {"a": 1}

    with pytest.raises(CheckpointError, match=r"_extra_state.*dict"):
        save_compressed(compressed().append(Odd()), tmp_path / "m")
    with pytest.raises(CheckpointError, match="meta device"):
        save_compressed(compressed().append(nn.Linear(2, 2, device="meta")), tmp_path / "m")
