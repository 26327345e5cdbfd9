"""CompressedLinear with its inputs in another order, in memory and in files."""

import copy
import json

import pytest
import torch
from torch import nn

import nmkernels as nm
from nmkernels.nn import CompressedLinear
from nmkernels.nn.compressed import is_order
from python_tests.export.editing import edited

ORDER = torch.randperm(16, generator=torch.Generator().manual_seed(0))


def layer(columns=ORDER, **keywords):
    weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    bias = torch.randn(8, generator=torch.Generator().manual_seed(2))
    return CompressedLinear(nm.ops.compress(weight, "2:4"), bias, columns=columns, **keywords)


def dense_of(made):
    """The weight for inputs in their own order, column by column."""
    packed, dense = made.weight.dense(), torch.zeros(8, 16)
    for j, k in enumerate(ORDER.tolist()):
        dense[:, k] = packed[:, j]
    return dense


def test_gemm():
    for tokens in [1, 3, 70]:
        for keep_dense in [False, True]:
            made = layer(keep_dense=keep_dense)
            x = torch.randn(2, tokens, 16)
            assert torch.equal(made.dense(), dense_of(made))
            torch.testing.assert_close(made(x), x @ dense_of(made).t() + made.bias)
            assert torch.equal(made(x), layer(None)(x[..., ORDER])), "the very same as reordering by hand"
            assert torch.equal(layer(None).dense(), layer(None).weight.dense())
    left, right = torch.randn(16, 2), torch.randn(2, 8)
    torch.testing.assert_close(layer(adapter=(left, right))(x), made(x) + x @ left @ right / 2)


def test_life_of_the_layer():
    made, x = layer(), torch.randn(3, 16)
    assert "inputs reordered" in repr(made) and "inputs reordered" not in repr(layer(None))
    other = layer(ORDER.flip(0))
    other.load_state_dict(made.state_dict())
    assert torch.equal(other(x), made(x))
    double = copy.deepcopy(made).to(torch.float64)
    assert double.columns.dtype == torch.int32
    torch.testing.assert_close(double(x.double()).float(), made(x))


def test_invalid_orders():
    for columns in [torch.arange(15), torch.zeros(16, dtype=torch.int64), torch.arange(1, 17), torch.arange(16).float(), ORDER[None]]:
        assert not is_order(columns, 16)
        with pytest.raises(nm.pattern.ShapeError, match="permutation of the 16 inputs"):
            layer(columns)


def announce(about):
    layers = json.loads(about["layers"])
    del layers["0"]["columns"]
    about["layers"] = json.dumps(layers)


def test_damaged_files(tmp_path):
    for change, said in [
        (lambda t, m: t.pop("0.columns"), "the file lacks its columns"),
        (lambda t, m: announce(m), "does not announce its columns"),
        (lambda t, m: t["0.columns"].zero_(), "not a permutation of 16; the file is damaged"),
        (lambda t, m: t.update({"0.columns": torch.arange(8)}), r"columns torch.int64 \(8,\)"),
    ]:
        nm.save_compressed(nn.Sequential(layer()), tmp_path / "m.safetensors")
        with pytest.raises(nm.CheckpointError, match=said):
            nm.load_compressed(nn.Sequential(nn.Linear(16, 8)), edited(tmp_path / "m.safetensors", change))
