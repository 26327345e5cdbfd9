"""Damaged, foreign and ill-fitting files: each is refused in words, and the model is left as it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import nmkernels as nm
from nmkernels.pattern import CheckpointError
from nmkernels.testing import equal_bits

Edit = Callable[[dict[str, Tensor], dict[str, str]], object]


def dense() -> nn.Sequential:
    return nn.Sequential(nn.Linear(24, 12), nn.Linear(12, 8))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = dense()
    for i, pattern in enumerate(["2:3", "2:4"]):
        model[i] = nm.nn.CompressedLinear(nm.ops.compress(model[i].weight.detach(), pattern), model[i].bias)
    nm.save_compressed(model, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def refused(file: Path, message: str, model: nn.Module | None = None) -> None:
    model = model or dense()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    kinds = [type(m) for m in model.modules()]
    with pytest.raises(CheckpointError, match=message):
        nm.load_compressed(model, file)
    assert [type(m) for m in model.modules()] == kinds
    for key, value in model.state_dict().items():
        assert equal_bits(value, before[key]), key


def edited(file: Path, edit: Edit) -> Path:
    with safe_open(file, "pt") as source:
        tensors, metadata = {name: source.get_tensor(name) for name in source.keys()}, dict(source.metadata())  # noqa: SIM118
    edit(tensors, metadata)
    save_file(tensors, file, metadata)
    return file


def test_the_untouched_file_loads(file):
    model = nm.load_compressed(dense(), edited(file, lambda t, m: None))
    assert isinstance(model[1], nm.nn.CompressedLinear)


def test_missing(tmp_path):
    refused(tmp_path / "none", "cannot be read: No such file")
    refused(tmp_path, "cannot be read: Is a directory")


@pytest.mark.parametrize("keep", [0, 5, 8, 40, -100, -1])
def test_truncated(file, keep):
    data = file.read_bytes()
    file.write_bytes(data[:keep])
    refused(file, r"truncated.*bytes")


def test_bytes_after_the_end(file):
    file.write_bytes(file.read_bytes() + b"more")
    refused(file, "not a sound safetensors file")


@pytest.mark.parametrize(
    "content",
    [
        b"PK\x03\x04 a zip file, such as torch.save writes",
        b"\x10" + b"\0" * 7 + b"[1, 2, 3, 4, 5] ",
        b"x" * 300,
        b"\x02" + b"\0" * 7 + b"{]",
    ],
)
def test_not_safetensors(tmp_path, content):
    (tmp_path / "f").write_bytes(content)
    refused(tmp_path / "f", "not a safetensors file")


def test_foreign_safetensors(tmp_path):
    save_file(dense().state_dict(), tmp_path / "f.safetensors")
    refused(tmp_path / "f.safetensors", "not one that nm.save_compressed wrote")
    nm.save_dense(dense(), tmp_path / "f.safetensors")
    refused(tmp_path / "f.safetensors", "load it with safetensors.torch.load_model")


def test_versions(file):
    refused(edited(file, lambda t, m: m.update(version="4")), "format version 4; this one reads up to 3: upgrade")
    refused(edited(file, lambda t, m: m.update(version="x")), "metadata is damaged")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t, m: m.update(layers="{"), "'layers' is damaged"),
        (lambda t, m: m.update(layers="[1]"), "'layers' is not a table"),
        (lambda t, m: m.update(layers='{"0": 3}'), "layer '0': its entry in the metadata is damaged"),
        (lambda t, m: m.update(layers=m["layers"].replace("2:3", "3:2")), "layer '0': its entry in the metadata is damaged"),
        (lambda t, m: m.update(layers=m["layers"].replace("2:3", "2:4")), "are not those of a 2:4 weight"),
        (lambda t, m: m.update(layers=m["layers"].replace("float32", "float16")), "torch.float16 and torch.uint8 were announced"),
        (lambda t, m: m.update(layers=m["layers"].replace('"linear"', '"conv1d"')), "the file holds a conv1d layer, the model a linear"),
        (lambda t, m: m.update(aliases='{"a": "b"}'), "'a' is said to be the same as 'b', which the file does not hold"),
        (lambda t, m: t.pop("1.weight.values"), "layer '1': the file lacks its values"),
        (lambda t, m: t.pop("1.weight.indices"), "layer '1': the file lacks its indices"),
        (lambda t, m: t.pop("0.bias"), "the file lacks '0.bias'"),
        (lambda t, m: t.update(extra=torch.ones(1)), "the model has no 'extra'"),
        (lambda t, m: t.update({"0.bias": torch.ones(5)}), r"'0.bias' has shape \(5,\) in the file, \(12,\)"),
        (lambda t, m: t.update({"0.bias": torch.ones(12).double()}), r"'0.bias' is torch.float64 .* model.to\(torch.float64\)"),
        (lambda t, m: t["0.weight.indices"].fill_(0xFF), "index 3 is out of range for groups of 3"),
        (lambda t, m: t["1.weight.indices"].fill_(0x00), "do not rise"),
        (lambda t, m: t["1.weight.indices"][0, -1].fill_(0xF4), "spare bits"),
    ],
)
def test_damaged_contents(file, edit, message):
    refused(edited(file, edit), message)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            nn.Sequential(nn.Linear(24, 12), nn.Linear(12, 16)),
            r"layer '1': the file's weight is \(8, 12\) \(out, in\), the model's \(16, 12\)",
        ),
        (nn.Sequential(nn.Linear(24, 12)), "layer '1': the model has no such module"),
        (nn.Sequential(nn.Linear(24, 12), nn.Linear(12, 8, bias=False)), "the model has no '1.bias'"),
        (nn.Sequential(nn.Linear(24, 12), nn.Embedding(8, 12)), "the file holds a linear layer, the model a Embedding"),
        (
            dense().bfloat16(),
            r"the file's weight is torch.float32, the model's torch.bfloat16; build the model with model.to\(torch.float32\)",
        ),
        (dense().append(nn.LayerNorm(8)), "the file lacks '2.weight'"),
    ],
)
def test_models_that_do_not_fit(file, model, message):
    refused(file, message, model)


def test_a_sparse_or_compressed_model_is_not_a_dense_one(file):
    model = nm.load_compressed(dense(), file)
    refused(file, "a CompressedLinear already; load into a freshly built dense model", model)
    sparse = dense()
    nm.sparsify_(sparse, "ste:2:4", lambda module, name: name == "1")
    refused(file, "a SparseLinear already", sparse)


def test_many_problems_are_counted(file):
    def edit(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        tensors.update({f"x{i}": torch.ones(1) for i in range(9)})

    refused(edited(file, edit), "and 4 more")


def test_metadata_is_checked_as_json(file):
    layers = json.dumps({"0": {"pattern": "2:3", "shape": "ab", "dtype": "float32", "layout": "linear"}})
    refused(edited(file, lambda t, m: m.update(layers=layers)), "layer '0': its entry")
