"""Compressed and dense files: what goes in comes out, bit for bit, and what cannot be saved is refused with the way out."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_model
from torch import nn

import nmkernels as nm
from nmkernels.export import load_compressed, save_compressed, save_dense
from nmkernels.pattern import CheckpointError, RecipeError
from nmkernels.testing import equal_bits
from python_tests.export.editing import Net, edited, parts, saved


def dense(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 16, bias=False), nn.LayerNorm(16), nn.Linear(16, 8)).to(dtype)


def compressed(pattern: str = "2:4", dtype: torch.dtype = torch.float32, rank: int = 0) -> nn.Sequential:
    """The last layer with an adapter of that rank."""
    torch.manual_seed(0)
    model = dense(dtype)
    nn.init.normal_(model[1].weight)
    adapter = (torch.randn(16, rank, dtype=dtype), torch.randn(rank, 8, dtype=dtype)) if rank else None
    for i in (0, 2):
        packed = nm.ops.compress(model[i].weight.detach(), pattern)
        model[i] = nm.CompressedLinear(packed, model[i].bias, adapter=adapter if i else None)
    return model


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("pattern", "dtype", "rank", "integers"),
    [
        ("2:4", torch.float32, 0, {}),
        ("1:4", torch.bfloat16, 2, {}),
        ("3:8", torch.float16, 0, {}),
        ("1:16", torch.float64, 0, {}),
        ("2:4", torch.float32, 2, {}),
        ("2:4", torch.bfloat16, 2, {"values": "int8", "group": 0}),
        ("2:4", torch.bfloat16, 2, {"values": "int4", "group": 16}),
        ("1:8", torch.bfloat16, 0, {"values": "int4", "group": 0}),
        ("1:16", torch.bfloat16, 2, {"values": "int8", "group": 16}),
    ],
)
def test_round_trip(tmp_path, pattern, dtype, rank, integers, device):
    path, model, same = tmp_path / "m.safetensors", compressed(pattern, dtype, rank), dense(dtype).to(device).eval()
    bias, plain = same[1].bias, dense(dtype)
    if integers:
        nm.compress_(model, **integers)
    save_dense(model, tmp_path / "dense.safetensors")
    load_model(plain, tmp_path / "dense.safetensors")
    assert equal_bits(plain[0].weight.detach(), model[0].dense())
    save_compressed(model, path)
    entry = json.loads(parts(path)[1]["layers"])["0"]
    assert entry["dtype"] == str(dtype).removeprefix("torch.") and integers.items() <= entry.items()
    assert load_compressed(same, path) is same and not same[0].training
    assert (same[1].bias is bias) == (device == "cpu") and str(same[0].pattern) == pattern
    with path.open("r+b") as file:  # nothing of the model stays in it
        file.write(bytes(path.stat().st_size))
    assert same.state_dict().keys() == model.state_dict().keys()
    for key, value in model.state_dict().items():
        assert equal_bits(same.state_dict()[key], value), key
    x = torch.randn(3, 32, dtype=dtype)
    assert equal_bits(model(x), same(x)) and (same[2].adapter is None) == (not rank)


def test_what_has_data_is_filled_in_place(tmp_path):
    """Next to parts on the meta device, as accelerate's ``init_empty_weights`` leaves Parameters; nothing stays part of the mapped file."""
    model, same = compressed(), dense()
    for each in (model, same):
        each.append(nn.BatchNorm1d(8, device="meta" if each is same else None))
        each.register_buffer("table", torch.randn(64, 64))
    save_compressed(model, tmp_path / "m.safetensors")
    same[0].to("meta")
    before = {name: (t, t.data_ptr()) for name, t in same.state_dict(keep_vars=True).items() if name in ("table", "1.weight", "2.bias")}
    load_compressed(same, tmp_path / "m.safetensors")
    after, wanted = same.state_dict(keep_vars=True), model.state_dict()
    assert all(after[name] is t and t.data_ptr() == address for name, (t, address) in before.items())
    assert after.keys() == wanted.keys() and all(torch.equal(t, wanted[name]) for name, t in after.items())


def test_names_and_metadata_of_the_file(tmp_path):
    path = tmp_path / "m.safetensors"
    save_compressed(compressed(), path)
    tensors, about = parts(path)
    names = {"0.values", "0.indices", "1.weight", "1.bias", "2.values", "2.indices", "2.bias"}
    assert tensors.keys() == names == compressed().state_dict().keys() and tensors["0.indices"].dtype == torch.uint8
    assert (about["format"], about["version"]) == ("nmkernels", "6")
    entry = {"pattern": "2:4", "shape": [16, 32], "dtype": "float32", "layout": "linear"}
    assert json.loads(about["layers"])["0"] == entry
    before = path.read_bytes()
    for again in (compressed(), load_compressed(dense(), path)):  # the same model gives the same bytes, onto its own file too
        save_compressed(again, path)
        assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    save_compressed(compressed(rank=2), path)
    tensors, about = parts(path)
    assert tensors.keys() == names | {"2.nm_left", "2.nm_right"}
    assert json.loads(about["layers"]) == {"0": entry, "2": {**entry, "shape": [8, 16], "rank": 2}}


def test_tied_tensors_are_stored_once_and_stay_tied(tmp_path):
    saved(tmp_path / "m")
    tensors, metadata = parts(tmp_path / "m")
    aliases = json.loads(metadata["aliases"])
    assert aliases["head.weight"] == "embed.weight" and aliases["again.bias"] == "a.bias" and not aliases.keys() & tensors.keys()
    fresh = load_compressed(Net(), tmp_path / "m")
    assert fresh.a is fresh.again and fresh.head.weight is fresh.embed.weight
    assert equal_bits(fresh.a.values, tensors["a.values"]) and equal_bits(fresh.head.weight, tensors["embed.weight"])


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_save_pretrained_leaves_out_what_the_model_ties(tmp_path, device):
    saved(tmp_path / "m")
    edited(tmp_path / "m", lambda tensors, metadata: (metadata.update(format="pt"), metadata.pop("aliases")))
    with torch.device(device):
        fresh = Net()
    load_compressed(fresh, tmp_path / "m")
    assert fresh.a is fresh.again and fresh.head.weight is fresh.embed.weight
    with pytest.raises(CheckpointError, match="layer 'again': the file lacks its values"):
        load_compressed(Net(), edited(tmp_path / "m", lambda tensors, metadata: metadata.update(format="nmkernels")))


def test_a_dense_file_of_a_hugging_face_gpt2(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=8, vocab_size=32)
    torch.manual_seed(0)
    model, plain = (transformers.GPT2LMHeadModel(config).eval() for _ in range(2))
    ids = torch.randint(32, (2, 8))
    nm.sparsify_(model, "ste:2:4").finish(allow_unused=True)
    masked = model(ids).logits
    save_dense(nm.compress_(model), tmp_path / "dense")
    load_model(plain, tmp_path / "dense")
    assert torch.equal(plain(ids).logits, masked)
    assert nm.ops.is_nm(plain.transformer.h[0].mlp.c_fc.weight.detach().t(), "2:4")


def test_unsavable_models_are_refused(tmp_path):
    class Odd(nn.Module):
        def get_extra_state(self):
            return {"a": 1}

    def refused(save, model, error, message):
        with pytest.raises(error, match=message):
            save(model, tmp_path / "m")

    model = dense()
    refused(save_compressed, model, RecipeError, "no compressed layer")
    handle = nm.sparsify_(model, "ste:2:4", lambda module, name: isinstance(module, nn.Linear))
    model(torch.randn(2, 32))
    refused(save_compressed, model, RecipeError, r"layer '0' is not compressed; call handle.finish\(\)")
    refused(save_dense, model, RecipeError, r"layer '0' is not 2:4; call handle.finish\(\)")
    handle.finish()
    refused(save_compressed, model, RecipeError, "compress_")
    refused(save_compressed, compressed()[0], RecipeError, "put it in an nn")
    refused(save_compressed, compressed().append(Odd()), CheckpointError, r"_extra_state.*dict")
    refused(save_compressed, compressed().append(nn.Linear(2, 2, device="meta")), CheckpointError, "meta device")
    assert not list(tmp_path.iterdir())


def test_dense_file_has_exact_zeros(tmp_path):
    model, fresh = dense(), dense()
    nm.sparsify_(model, "ste:2:4", lambda module, name: name == "0").finish(allow_unused=True)
    save_dense(model, tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"; its zeros are N:M but its weights are dense: load it with safetensors\.torch"):
        nm.load_compressed(dense(), tmp_path / "a")
    load_model(fresh, tmp_path / "a")
    for key, value in model.state_dict().items():
        assert equal_bits(fresh.state_dict()[key], value)
    assert nm.ops.is_nm(fresh[0].weight.detach(), "2:4") and json.loads(parts(tmp_path / "a")[1]["nm"]) == {"0": "2:4"}
    save_dense(nm.compress_(model), tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    save_dense(dense(), tmp_path / "unpruned")
    with pytest.raises(CheckpointError, match=r"compressed model; its weights are dense: load it with safetensors\.torch"):
        nm.load_compressed(dense(), tmp_path / "unpruned")


def test_a_dense_file_holds_the_folded_weight_of_an_adapter(tmp_path):
    model, fresh, x = compressed(rank=2), dense(), torch.randn(3, 32)
    save_dense(model, tmp_path / "m")
    assert json.loads(parts(tmp_path / "m")[1]["nm"]) == {"0": "2:4"}, "a folded weight is not N:M and not said to be"
    load_model(fresh, tmp_path / "m")
    torch.testing.assert_close(fresh(x), model(x))
