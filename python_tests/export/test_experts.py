"""Stacks of experts in compressed files: checked before anything is changed."""

import json

import pytest
import torch
from torch import nn

import nmkernels as nm
from nmkernels.nn import CompressedExperts
from nmkernels.pattern import CheckpointError
from python_tests.export.editing import edited, layers, parts
from python_tests.moe import Experts, mixture

X = torch.randn(7, 16, generator=torch.Generator().manual_seed(0))


def compressed(values=None, **options):
    model = mixture(dtype=torch.float32, **options)
    nm.sparsify_(model, "ste:2:4").finish(allow_unused=True)
    return nm.compress_(model, values=values)


@pytest.fixture
def file(tmp_path):
    nm.save_compressed(compressed(), tmp_path / "m")
    return tmp_path / "m"


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("meta", [False, True])
def test_round_trip(tmp_path, transposed, meta):
    model = compressed(transposed=transposed, bias=True)
    nm.save_compressed(model, tmp_path / "m")
    tensors, metadata = parts(tmp_path / "m")
    table = json.loads(metadata["layers"])
    layout = "experts_t" if transposed else "experts"
    assert table["experts.down_proj"] == {"pattern": "2:4", "shape": [3, 16, 24], "dtype": "float32", "layout": layout}
    assert metadata["version"] == "6" and tensors["experts.nm_down_proj.values"].shape == (3, 16, 12)
    with torch.device("meta" if meta else "cpu"):
        fresh = mixture(dtype=torch.float32, transposed=transposed, bias=True, seed=1)
    loaded = nm.load_compressed(fresh, tmp_path / "m")
    assert isinstance(loaded.experts, CompressedExperts) and torch.equal(loaded(X), model(X))
    nm.save_compressed(loaded, tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "m").read_bytes()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("meta", [False, True])
def test_integers(tmp_path, monkeypatch, transposed, meta):
    model, path = compressed("int4", transposed=transposed), tmp_path / "m"
    nm.save_compressed(model, path)
    tensors, metadata = parts(path)
    entry = json.loads(metadata["layers"])["experts.down_proj"]
    assert (entry["shape"], entry["dtype"], entry["values"], entry["group"]) == ([3, 16, 24], "float32", "int4", 0)
    assert metadata["version"] == "8" and tensors["experts.nm_down_proj.values"].shape == (3, 16, 6)
    assert (tensors["experts.nm_down_proj.step"].dtype, tensors["experts.nm_down_proj.step"].shape) == (torch.bfloat16, (3, 16, 1))
    with torch.device("meta" if meta else "cpu"):
        fresh = mixture(dtype=torch.float32, transposed=transposed, seed=1)
    loaded = nm.load_compressed(fresh, path)
    assert torch.equal(loaded(X), model(X)) and loaded.experts.stacks["down_proj"].dtype == torch.float32
    nm.save_compressed(loaded, tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == path.read_bytes()
    nm.save_dense(model, tmp_path / "dense")
    dense = mixture(dtype=torch.float32, transposed=transposed, seed=1)
    dense.load_state_dict(parts(tmp_path / "dense")[0])
    torch.testing.assert_close(dense(X), model(X))
    monkeypatch.setattr("nmkernels.export.safetensors.VERSION", 7)
    with pytest.raises(CheckpointError, match="format version 8; this one reads up to 7"):
        nm.load_compressed(fresh, path)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t, m: t["experts.nm_down_proj.step"][1].fill_(torch.nan), "a step is NaN or infinite; the file is damaged"),
        (lambda t, m: t.pop("experts.nm_down_proj.step"), "the file lacks its step"),
        (lambda t, m: t.update({"experts.nm_down_proj.step": t["experts.nm_down_proj.step"].flatten(0, 1)}), "the file has step"),
        (lambda t, m: t["experts.nm_down_proj.values"].fill_(255), "the spare half of a row's last byte of integers is not 0"),
        (layers('"values": "int4", "group": 0', '"values": "int4", "group": 5'), "values 'int4' and group 5 for 20 columns"),
        (layers('"values": "int4", "group": 0', '"values": "int2", "group": 0'), "values 'int2' and group 0 for 20 columns"),
        (layers('"values": "int4", "group": 0', '"values": "int8", "group": 0'), "has values torch.uint8"),
        (layers(', "values": "int4", "group": 0', ""), "the file has values torch.uint8|does not announce its step"),
    ],
)
def test_damaged_integers(tmp_path, edit, message):
    model = mixture(dtype=torch.float32, inner=20)
    model.experts.gate_up_proj.requires_grad_(False)
    other = mixture(dtype=torch.float32, inner=20)
    nm.sparsify_(other, "ste:1:4", filter_fn=lambda module, name: name.endswith("down_proj")).finish(allow_unused=True)
    nm.save_compressed(nm.compress_(other, values="int4", group=0), tmp_path / "m")
    nm.load_compressed(mixture(dtype=torch.float32, inner=20), tmp_path / "m")
    with pytest.raises(CheckpointError, match=rf"(?s)layer 'experts.down_proj': .*{message}"):
        nm.load_compressed(model, edited(tmp_path / "m", edit))
    assert type(model.experts) is Experts


def test_one_module_under_two_names(tmp_path):
    def twice(experts):
        return nn.ModuleDict({"a": experts, "b": experts})

    nm.save_compressed(twice(compressed().experts), tmp_path / "m")
    loaded = nm.load_compressed(twice(Experts()), tmp_path / "m")
    assert loaded.a is loaded.b and isinstance(loaded.a, CompressedExperts)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t, m: t.pop("experts.nm_down_proj.indices"), "layer 'experts.down_proj': the file lacks its indices"),
        (lambda t, m: t["experts.nm_down_proj.indices"].fill_(255), "layer 'experts.down_proj': the indices of a group do not increase"),
        (lambda t, m: t["experts.nm_down_proj.indices"].zero_(), "layer 'experts.down_proj': the indices of a group do not increase"),
        (layers("[3, 16, 24]", "[3, 24, 16]"), "layer 'experts.down_proj': the file's weight is"),
        (layers("[3, 16, 24]", "[3, 16]"), r"layer 'experts.down_proj': its entry in the metadata is damaged \(ValueError: shape"),
        (layers("[3, 16, 24]", "[0, 16, 24]"), "layer 'experts.down_proj': its entry in the metadata is damaged"),
        (layers("[3, 16, 24]", "[48, 24]"), "layer 'experts.down_proj': its entry in the metadata is damaged"),
        (layers('"experts"', '"experts_t"'), r"the file holds a stack of experts \(layout experts_t\), the model an experts"),
        (layers('"experts"', '"linear"'), "layer 'experts.down_proj'"),
        (layers('"experts"', '["experts"]'), "layer 'experts.down_proj': its entry in the metadata is damaged"),
        (layers("experts.down_proj", "head.down_proj"), r"'head.down_proj': the file holds a stack of experts .*, the model a linear"),
        (layers("2:4", "1:4"), r"has values torch.float32 \(3, 48, 8\); its entry in the metadata says torch.float32 \(3, 48, 4\)"),
    ],
)
def test_damaged(file, edit, message):
    model = mixture(dtype=torch.float32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=message):
        nm.load_compressed(model, edited(file, edit))
    assert type(model.experts) is Experts
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_models_that_do_not_fit(file):
    for model, message in (
        (mixture(dtype=torch.float64), "the file's weight is torch.float32, the model's torch.float64"),
        (mixture(dtype=torch.float32, count=4), r"the file's weight is \(3, 16, 24\) \(experts, out, in\), the model's \(4, 16, 24\)"),
        (mixture(dtype=torch.float32, apart=True), "layer 'experts.down_proj': the file holds a stack of experts"),
        (compressed(), "it is already a CompressedExperts"),
        (nn.Sequential(nn.Linear(4, 4)), "the model has no such module"),
    ):
        with pytest.raises(CheckpointError, match=message):
            nm.load_compressed(model, file)
