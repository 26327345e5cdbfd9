"""Files of layers with a low-rank adapter: carried in the compressed file, folded into the dense one, refused where they do not fit."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_model
from torch import nn

import nmkernels as nm
from nmkernels.pattern import CheckpointError
from nmkernels.testing import equal_bits
from python_tests.export.editing import edited, parts


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 16), nn.GELU(), nn.Linear(16, 8, bias=False))


def adapted() -> nn.Sequential:
    """Two compressed layers, the first with an adapter of rank 2."""
    torch.manual_seed(0)
    model = build()
    adapter = torch.randn(32, 2), torch.randn(2, 16)
    model[0] = nm.CompressedLinear(nm.ops.compress(model[0].weight.detach(), "2:4"), model[0].bias, adapter=adapter)
    model[2] = nm.CompressedLinear(nm.ops.compress(model[2].weight.detach(), "1:4"))
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compressed_file_carries_the_adapter(tmp_path, dtype):
    model = adapted().to(dtype)
    nm.save_compressed(model, tmp_path / "m")
    tensors, metadata = parts(tmp_path / "m")
    assert {"0.nm_left", "0.nm_right"} < set(tensors) and metadata["version"] == "2"
    assert json.loads(metadata["layers"])["0"]["rank"] == 2 and "rank" not in json.loads(metadata["layers"])["2"]
    x = torch.randn(3, 32, dtype=dtype)
    for device in ("cpu", "meta"):
        same = nm.load_compressed(build().to(dtype).to(device), tmp_path / "m")
        assert equal_bits(same(x), model(x)) and same[2].adapter is None
        for key, value in model.state_dict().items():
            assert equal_bits(same.state_dict()[key], value), key


def test_a_file_without_adapters_is_written_as_version_1(tmp_path):
    model = adapted()
    model[0] = nm.CompressedLinear(model[0].weight, model[0].bias)
    nm.save_compressed(model, tmp_path / "m")
    assert parts(tmp_path / "m")[1]["version"] == "1"


def without(tensors, metadata, layer="0"):
    about = json.loads(metadata["layers"])
    del about[layer]["rank"]
    metadata["layers"] = json.dumps(about)


def ranked(rank):
    def edit(tensors, metadata):
        about = json.loads(metadata["layers"])
        about["0"]["rank"] = rank
        metadata["layers"] = json.dumps(about)

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t, m: t.pop("0.nm_left"), "layer '0': the file lacks its adapter"),
        (lambda t, m: (t.pop("0.nm_left"), t.pop("0.nm_right")), "layer '0': the file lacks its adapter"),
        (without, "layer '0': its entry in the metadata does not announce its adapter"),
        (ranked(3), r"an adapter of rank 3 in torch.float32 was announced, L is \(32, 2\)"),
        (ranked("two"), "an adapter of rank two"),
        (lambda t, m: t.update({"0.nm_left": t["0.nm_left"].double()}), "L is .* in torch.float64"),
        (lambda t, m: t.update({"0.nm_left": torch.zeros(16, 2)}), r"its adapter does not fit a weight \(16, 32\)"),
        (lambda t, m: t.update({"2.nm_left": torch.zeros(16, 2), "2.nm_right": torch.zeros(2, 8)}), "layer '2': .* does not announce"),
    ],
)
def test_what_does_not_fit_is_refused_and_the_model_is_left_as_it_was(tmp_path, edit, message):
    nm.save_compressed(adapted(), tmp_path / "m")
    edited(tmp_path / "m", edit)
    model = build()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=message):
        nm.load_compressed(model, tmp_path / "m")
    assert type(model[0]) is nn.Linear and all(equal_bits(value, before[key]) for key, value in model.state_dict().items())


def test_a_dense_file_holds_the_folded_weight(tmp_path):
    model = adapted()
    nm.save_dense(model, tmp_path / "m")
    assert json.loads(parts(tmp_path / "m")[1]["nm"]) == {"2": "1:4"}, "a folded weight is not N:M and not said to be"
    fresh = build()
    load_model(fresh, tmp_path / "m")
    x = torch.randn(3, 32)
    torch.testing.assert_close(fresh(x), model(x))
    with pytest.raises(CheckpointError, match="not one that nm.save_compressed wrote"):
        nm.load_compressed(build(), tmp_path / "m")
