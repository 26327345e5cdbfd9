"""Safetensors files written tensor by tensor."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from nmkernels.export.stream import ShardWriter
from nmkernels.pattern import CheckpointError
from nmkernels.testing import equal_bits

TENSORS = {
    "b": torch.randn(5, 3).bfloat16(), "a": torch.arange(7, dtype=torch.uint8), "c": torch.tensor(3.5, dtype=torch.float64),
    "empty": torch.empty(0), "t": torch.randn(4, 6).t(), "flag": torch.tensor([True, False]), "i": torch.arange(4),
}  # fmt: skip
META = {"format": "pt", "layers": "{}"}


def written(folder, shard, order=None):
    writer = ShardWriter(folder, {name: t.to("meta") for name, t in TENSORS.items()}, META, shard)
    for name in order or TENSORS:
        writer.write(name, TENSORS[name])
    writer.close()
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("order", [list(TENSORS), sorted(TENSORS, reverse=True)])
def test_one_file(tmp_path, order):
    assert written(tmp_path, 10**6, order) == ["model.safetensors"]
    read = load_file(tmp_path / "model.safetensors")
    assert read.keys() == TENSORS.keys() and all(equal_bits(read[name], TENSORS[name]) for name in read)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == META


def test_the_bytes_are_those_of_safetensors(tmp_path):
    tensors = {name: t.contiguous() for name, t in TENSORS.items() if t.dtype not in (torch.bool, torch.int64)}
    save_file(tensors, tmp_path / "theirs", {"format": "pt"})
    writer = ShardWriter(tmp_path, tensors, {"format": "pt"})
    for name, t in tensors.items():
        writer.write(name, t)
    writer.close()
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_shards(tmp_path):
    files = written(tmp_path, 70)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert files == sorted({*index["weight_map"].values(), "model.safetensors.index.json"}) and len(files) == 4
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in TENSORS.values())
    for name, file in index["weight_map"].items():
        assert equal_bits(load_file(tmp_path / file)[name], TENSORS[name])


@pytest.mark.parametrize("damage", ["zeros", "cut", "another file"])
def test_what_another_process_has_changed_is_noticed(tmp_path, damage):
    """As when two runs write one file, or a disk loses a page."""
    writer = ShardWriter(tmp_path, {name: t.to("meta") for name, t in TENSORS.items()}, META)
    for name, t in TENSORS.items():
        writer.write(name, t)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    if damage == "another file":
        save_file({"b": TENSORS["b"]}, path)
    else:
        path.write_bytes(whole[:-3] + bytes(3) if damage == "zeros" else whole[:-3])
    said = {
        "zeros": r"was changed while it was written: 'flag' is not|'a' is not",
        "cut": "cannot be read back",
        "another file": "'a' is not",
    }
    with pytest.raises(CheckpointError, match=said[damage]):
        writer.close()


def test_what_cannot_be_written(tmp_path):
    with pytest.raises(CheckpointError, match=r"'x' is torch\.complex64, which cannot be written"):
        ShardWriter(tmp_path, {"x": torch.zeros(1, dtype=torch.complex64)}, META)
    writer = ShardWriter(tmp_path, {"x": torch.zeros(2)}, META)
    with pytest.raises(CheckpointError, match="'x' was not written"):
        writer.close()
    with pytest.raises(CheckpointError, match=r"'x' is torch\.float32\(3,\), not torch\.float32\(2,\)"):
        writer.write("x", torch.zeros(3))
    with pytest.raises(CheckpointError, match="could not be written: No such file"):
        ShardWriter(tmp_path / "nowhere", {"x": torch.zeros(2)}, META)
