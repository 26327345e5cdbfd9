"""Damaged, foreign and ill-fitting files: each is refused in words, and the model is left as it was."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import nmkernels as nm
from nmkernels.export.plan import check_filled
from nmkernels.pattern import CheckpointError
from nmkernels.testing import equal_bits
from python_tests.export.editing import Edit, Net, edited, layers, saved


def dense() -> nn.Sequential:
    return nn.Sequential(nn.Linear(24, 12), nn.Linear(12, 8))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = dense()
    for i, (pattern, adapter) in enumerate([("2:3", None), ("2:4", (torch.randn(12, 2), torch.randn(2, 8)))]):
        model[i] = nm.CompressedLinear(nm.ops.compress(model[i].weight.detach(), pattern), model[i].bias, adapter=adapter)
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


def test_what_cannot_be_read(tmp_path, pipe):
    refused(tmp_path / "none", "cannot be read: No such file")
    refused(tmp_path, "has neither model.safetensors nor")
    refused(tmp_path / "a\0b", "cannot be read: embedded null byte")
    (tmp_path / "link").symlink_to(tmp_path / "link")
    refused(tmp_path / "link", "cannot be read: Too many levels")
    for unopened in (pipe, Path("/dev/zero")):
        refused(unopened, "cannot be read: Not a regular file")


def test_sizes_that_no_machine_has(file):
    """A file may claim what it does not hold, or hold nothing but a hole: neither is read."""
    data = file.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    for size in (1 << 33, 1 << 60):
        start = header["0.bias"]["data_offsets"][0]
        header["0.bias"] = {"dtype": "F32", "shape": [size // 4], "data_offsets": [start, start + size]}
        names = [name for name in header if name != "__metadata__" and header[name]["data_offsets"][0] >= start and name != "0.bias"]
        for name in names:
            del header[name]
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text)
        if size < 1 << 40:
            os.truncate(file, 8 + len(text) + start + size)
            refused(file, "not a valid safetensors file|does not fit the model")
        else:
            refused(file, "is truncated: .*save it again")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("again.values", "'again.values' is tied to 'a.values' in the model, but the file has another tensor for it"),
        ("again.bias", "'again.bias' is tied to 'a.bias' in the model, but the file has another tensor for it"),
        ("head.weight", "'head.weight' is tied to 'embed.weight' in the model, but the file has another tensor for it"),
    ],
)
def test_what_is_one_in_the_model_is_one_in_the_file(tmp_path, name, message):
    """Else one of the two would have been lost in silence."""

    def apart(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        kept = json.loads(metadata.pop("aliases"))
        tensors.update({alias: tensors[stored].clone() for alias, stored in kept.items()})

    saved(tmp_path / "m")
    nm.load_compressed(Net(), edited(tmp_path / "m", apart))
    refused(edited(tmp_path / "m", lambda t, m: t[name].add_(1)), message, Net())
    with torch.device("meta"):
        net = Net()
    with pytest.raises(CheckpointError, match=message):
        nm.load_compressed(net, tmp_path / "m")


@pytest.mark.parametrize("keep", [0, 5, 8, 40, -100, -1])
def test_truncated(file, keep):
    data = file.read_bytes()
    file.write_bytes(data[:keep])
    refused(file, rf"truncated: .* has {len(file.read_bytes()):,} bytes; copy or save it again")


def test_foreign_files_are_refused(file):
    file.write_bytes(file.read_bytes() + b"more")
    refused(file, "not a valid safetensors file")
    for content in (b"PK\x03\x04 a zip file", b"\x10" + b"\0" * 7 + b"[1, 2, 3, 4, 5] ", b"x" * 300, b"\x02" + b"\0" * 7 + b"{]"):
        file.write_bytes(content)
        refused(file, "not a valid safetensors file")
    save_file(dense().state_dict(), file)
    refused(file, "not one that nm.save_compressed wrote")
    nm.save_dense(dense(), file)
    refused(file, "load it with safetensors.torch.load_model")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t, m: m.update(version="9"), "format version 9; this one reads up to 8: upgrade"),
        (lambda t, m: m.update(version="x"), "metadata is damaged"),
        (lambda t, m: m.update(layers="{"), "'layers' is damaged"),
        (lambda t, m: m.update(layers="[1]"), "'layers' is not a table"),
        (lambda t, m: m.update(layers="[" * 100_000), r"'layers' is damaged \(it is nested too deeply\)"),
        (lambda t, m: m.update(layers='{"0": 1, "0": 2}'), r"'layers' is damaged \(it has the name '0' twice\)"),
        (lambda t, m: m.update(layers='{"0": NaN}'), r"'layers' is damaged \(NaN is not a number of JSON\)"),
        (lambda t, m: m.update(layers='{"0": 3}'), "layer '0': its entry in the metadata is damaged"),
        (layers("[12, 24]", "[1e999, 24]"), r"damaged \(ValueError: shape \[inf, 24\]\)"),
        (layers("[12, 24]", '["12", 24]'), r"damaged \(ValueError: shape \['12', 24\]\)"),
        (layers("[12, 24]", '"ab"'), "layer '0': its entry"),
        (layers("2:3", "3:2"), "layer '0': its entry in the metadata is damaged"),
        (layers("2:3", "2:4"), r"values torch.float32 \(12, 16\); its entry in the metadata says torch.float32 \(12, 12\)"),
        (layers("float32", "float16"), "the file's weight is torch.float16, the model's torch.float32; build the model with"),
        (lambda t, m: t.update({"0.indices": t["0.indices"].int()}), r"indices torch.int32 \(12, 4\); its entry .* says torch.uint8"),
        (layers('"linear"', '"conv1d"'), "the file holds a conv1d layer, the model a linear"),
        (layers(', "rank": 2', ""), "layer '1': its entry in the metadata does not announce its nm_left"),
        (layers('"rank": 2', '"rank": 3'), r"nm_left torch.float32 \(12, 2\); its entry in the metadata says torch.float32 \(12, 3\)"),
        (layers('"rank": 2', '"rank": "two"'), "damaged: rank 'two'"),
        (lambda t, m: t.pop("1.nm_left"), "layer '1': the file lacks its nm_left"),
        (
            lambda t, m: t.update({"1.nm_left": torch.zeros(16, 2)}),
            r"nm_left torch.float32 \(16, 2\); its entry .* torch.float32 \(12, 2\)",
        ),
        (lambda t, m: t.update({"0.nm_left": torch.zeros(24, 2), "0.nm_right": torch.zeros(2, 12)}), "layer '0': .* does not announce"),
        (lambda t, m: m.update(aliases='{"1.bias": "0.bias"}'), "'1.bias' is stored as an alias of '0.bias', but the file"),
        (lambda t, m: m.update(aliases='{"a": "b"}'), "'a' is stored as an alias of 'b', which the file does not hold"),
        (lambda t, m: m.update(aliases='{"x": "0.bias", "y": "x"}'), "'y' is stored as an alias of 'x', which the file"),
        (lambda t, m: m.update(aliases='{"x": ["0.bias"]}'), r"'x' is stored as an alias of \['0.bias'\], which the file"),
        (lambda t, m: t.pop("1.values"), "layer '1': the file lacks its values"),
        (lambda t, m: t.pop("1.indices"), "layer '1': the file lacks its indices"),
        (lambda t, m: t.pop("0.bias"), "the file lacks '0.bias'"),
        (lambda t, m: t.update(extra=torch.ones(1)), "the model has no 'extra'"),
        (
            lambda t, m: t.update({"0.bias": torch.ones(5)}),
            r"'0.bias' is torch.float32 \(5,\) in the file, torch.float32 \(12,\) in the model",
        ),
        (lambda t, m: t.update({"0.bias": torch.ones(12).double()}), r"'0.bias' is torch.float64 .*; use model.to\(torch.float64\)"),
        (lambda t, m: t["0.indices"].fill_(0xFF), "index 3 is out of range for groups of 3"),
        (lambda t, m: t["1.indices"].fill_(0x00), "do not increase"),
        (lambda t, m: t["1.indices"][0, -1].fill_(0xF4), "spare bits"),
        (lambda t, m: t.update({f"x{i}": torch.ones(1) for i in range(9)}), "and 4 more"),
    ],
)
def test_damaged_contents(file, edit, message):
    refused(edited(file, edit), message)


@pytest.fixture
def rounded(tmp_path: Path) -> Path:
    """Two layers with integers, the second with 3 of 4 bits per row."""
    model = dense()
    for i, (pattern, values, group) in enumerate([("2:4", "int8", 8), ("1:4", "int4", None)]):
        packed = nm.ops.quantize_values(nm.ops.compress(model[i].weight.detach(), pattern), values, group)
        model[i] = nm.CompressedLinear(packed, model[i].bias)
    nm.save_compressed(model, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t, m: t.pop("0.step"), "layer '0': the file lacks its step"),
        (layers(', "values": "int8", "group": 8', ""), "layer '0': its entry in the metadata does not announce its step"),
        (layers('"int8"', '"int2"'), "layer '0': its entry in the metadata is damaged: values 'int2' and group 8 for 24 columns"),
        (layers('"int8"', "[]"), "layer '0': its entry in the metadata is damaged: values"),
        (layers('"int8"', '"int4"'), "values torch.int8 .*; its entry in the metadata says torch.uint8"),
        (layers('"int4"', '"int8"'), "layer '1': the file has values torch.uint8 .*; its entry in the metadata says torch.int8"),
        (layers(', "group": 8', ""), "damaged: values 'int8' and group None"),
        *(
            (layers('"group": 8', f'"group": {word}'), "layer '0': its entry in the metadata is damaged")
            for word in ("-8", "6", "16", "8.0", "true")
        ),
        (layers('"group": 8', '"group": 24'), r"step torch.bfloat16 \(12, 3\); its entry in the metadata says torch.bfloat16 \(12, 1\)"),
        (layers('"float32"', '"int8"'), "damaged .*dtype 'int8'"),
        (layers('"float32"', '"float16"'), "the file's weight is torch.float16, the model's torch.float32"),
        (lambda t, m: t.update({"0.step": t["0.step"].float()}), r"step torch.float32 \(12, 3\)"),
        (lambda t, m: t.update({"1.values": t["1.values"][:, :1].contiguous()}), r"values torch.uint8 \(8, 1\)"),
        (lambda t, m: t["0.step"][3, 1].fill_(torch.nan), "layer '0': a step is NaN or infinite; the file is damaged"),
        (lambda t, m: t["1.values"][3, 1].fill_(16), "spare half of a row's last byte of integers"),
        (lambda t, m: t["0.indices"].fill_(0), "do not increase"),
    ],
)
def test_damaged_integers(rounded: Path, edit: Edit, message: str) -> None:
    nm.load_compressed(dense(), rounded)
    refused(edited(rounded, edit), message)


@pytest.mark.parametrize(
    ("integers", "changed", "message"),
    [
        (False, {"values": None, "columns": None}, "the file lacks its columns, values"),
        (False, {"values": torch.zeros(8, 8, dtype=torch.int8)}, "values are torch.int8 and indices torch.uint8; expected floating-point"),
        (False, {"indices": torch.zeros(8, 2).int()}, "values are torch.float32 and indices torch.int32; expected floating-point values"),
        (False, {"indices": torch.zeros(8, 2, dtype=torch.uint8)}, "do not increase"),
        (False, {"columns": torch.arange(16).int().clamp(max=14)}, "not a permutation of 16"),
        (True, {"indices": torch.zeros(8, 2, dtype=torch.uint8)}, "do not increase"),
        (True, {"step": torch.full((8, 1), torch.nan, dtype=torch.bfloat16)}, "NaN or infinite"),
        (True, {"step": torch.ones(8, 1)}, "steps torch.float32"),
        (True, {"values": torch.ones(8, 8)}, "no layer with integers"),
    ],
)
def test_a_layer_that_another_library_filled_is_checked(integers, changed, message):
    packed = nm.ops.compress(torch.randn(8, 16), "2:4")
    layer = nm.CompressedLinear(nm.ops.quantize_values(packed) if integers else packed)
    check_filled("a", layer, {}, set())
    check_filled("a", layer, {"indices": layer.indices, "columns": torch.arange(16).int().flip(0)}, set())
    elsewhere = {part: tensor for part, tensor in changed.items() if tensor is not None}
    with pytest.raises(CheckpointError, match=f"layer 'a': .*{message}"):
        check_filled("a", layer, elsewhere, changed.keys() - elsewhere.keys())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.Linear(24, 12), nn.Linear(12, 16)), r"the file's weight is \(8, 12\) \(out, in\), the model's \(16, 12\)"),
        (nn.Sequential(nn.Linear(24, 12)), "layer '1': the model has no such module"),
        (nn.Sequential(nn.Linear(24, 12), nn.Linear(12, 8, bias=False)), "the model has no '1.bias'"),
        (nn.Sequential(nn.Linear(24, 12), nn.Embedding(8, 12)), "the file holds a linear layer, the model an embedding"),
        (dense().bfloat16(), r"weight is torch.float32, the model's torch.bfloat16; build the model with model.to\(torch.float32\)"),
        (dense().append(nn.LayerNorm(8)), "the file lacks '2.weight'"),
    ],
)
def test_models_that_do_not_fit(file, model, message):
    refused(file, message, model)


def test_a_sparse_or_compressed_model_is_not_a_dense_one(file):
    model = nm.load_compressed(dense(), file)
    refused(file, "it is already a CompressedLinear; load into a freshly built dense model", model)
    sparse = dense()
    nm.sparsify_(sparse, "ste:2:4", lambda module, name: name == "1")
    refused(file, "it is already a SparseLinear", sparse)
