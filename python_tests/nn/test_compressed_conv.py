"""CompressedConv2d: equal to the dense convolution in both ways, chosen by rule, deployed from models and loaded from files."""

import copy
import itertools
import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_model
from torch import nn

import nmkernels as nm
from nmkernels.gemm import estimate
from nmkernels.gemm.choose import forget
from nmkernels.gemm.methods import EXPAND
from nmkernels.layouts import as_matrix, as_stored, ordered
from nmkernels.nn import CompressedConv2d, conv
from nmkernels.nn.conv import PATCHES
from python_tests.export.editing import edited

KINDS = {
    "3x3": {"kernel_size": 3, "padding": 1},
    "stride": {"kernel_size": 3, "stride": 2, "padding": 1, "bias": False},
    "1x1": {"kernel_size": 1},
    "1x1, stride": {"kernel_size": 1, "stride": 2},
    "dilated, same": {"kernel_size": (3, 5), "dilation": (2, 1), "padding": "same"},
    "even, same": {"kernel_size": 4, "padding": "same"},
    "reflect": {"kernel_size": (3, 2), "padding": (2, 1), "padding_mode": "reflect"},
    "circular": {"kernel_size": 3, "padding": (1, 2), "padding_mode": "circular", "stride": (2, 1)},
}


def pair(kind, pattern="2:4", channels=(16, 12), dtype=torch.float32, keep_dense=False):
    """(dense layer with an N:M weight, the compressed one)."""
    torch.manual_seed(0)
    dense = nn.Conv2d(*channels, **KINDS[kind], dtype=dtype)
    dense.weight.data = ordered(dense.weight.data, "conv2d")
    c = nm.ops.compress(as_matrix(dense.weight.detach(), "conv2d"), pattern)
    dense.weight.data = as_stored(c.dense(), "conv2d", dense.weight.shape)
    options = {key: value for key, value in KINDS[kind].items() if key not in ("kernel_size", "bias")}
    return dense, CompressedConv2d(c, KINDS[kind]["kernel_size"], dense.bias, **options, keep_dense=keep_dense)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:Using padding=.same")
@pytest.mark.parametrize("way", [EXPAND, PATCHES, "dense"])
def test_both_ways_equal_the_dense_convolution(kind, way, monkeypatch):
    dense, layer = pair(kind)
    monkeypatch.setattr(CompressedConv2d, "_how", lambda self, x: way)
    for last in (False, True):
        x = torch.randn(2, 16, 9, 10).to(memory_format=torch.channels_last if last else torch.contiguous_format)
        own, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        got, want = layer(own), dense(theirs)
        assert got.shape == want.shape and torch.allclose(got, want, atol=1e-5)
        assert torch.allclose(layer(x[0]), want[0], atol=1e-5)
        (got.square().sum()).backward()
        (want.square().sum()).backward()
        assert torch.allclose(own.grad, theirs.grad, atol=1e-3)
    assert "kernel_size" in repr(layer) and "pattern=2:4" in repr(layer)


def test_what_does_not_fit_is_refused():
    c = nm.ops.compress(torch.randn(4, 72), "2:4")
    for make, said in [
        (lambda: CompressedConv2d(c, 5), r"kernel \(5, 5\)"),
        (lambda: CompressedConv2d(nm.ops.compress(torch.randn(4, 24), "2:4"), 2), "in_channels is 6"),
        (lambda: CompressedConv2d(c, 3)(torch.randn(1, 4, 5, 5)), r"must be \(batch, 8, height, width\)"),
        (lambda: nm.CompressedLinear(c, layout="conv2d"), "'conv2d' is unknown"),
    ]:
        with pytest.raises(nm.ShapeError, match=said):
            make()
    with pytest.raises(nm.DtypeError, match="x is torch.float64"):
        CompressedConv2d(c, 3)(torch.randn(1, 8, 5, 5).double())


def test_autocast_and_half():
    dense, layer = pair("3x3")
    x = torch.randn(2, 16, 9, 10)
    with torch.autocast("cpu", torch.bfloat16):
        got, want = layer(x), dense(x)
    assert got.dtype == want.dtype == torch.bfloat16 and torch.allclose(got, want, atol=0.05)
    dense.bfloat16(), layer.bfloat16()
    assert torch.allclose(layer(x.bfloat16()), dense(x.bfloat16()), atol=0.05) and layer.indices.dtype == torch.uint8


def test_which_way_follows_the_estimate_or_the_environment(monkeypatch):
    dense, layer = pair("3x3")
    monkeypatch.setattr(conv, "SMALL_BYTES", 0)
    told, tokens = {"sparse": 1.0, EXPAND: 2.0, "dense": 2.0}, []
    monkeypatch.setattr(estimate, "seconds", lambda method, p: (tokens.append(p.tokens), told[method])[1])
    done, by = [], CompressedConv2d._by
    monkeypatch.setattr(CompressedConv2d, "_by", lambda self, how, *args: (done.append(how), by(self, how, *args))[1])
    x = torch.randn(2, 16, 9, 10)

    def how():
        assert torch.allclose(layer(x), dense(x), atol=1e-5)
        return done[-1]

    assert how() == PATCHES
    for kind in KINDS:
        other, packed = pair(kind)
        assert packed._how(x) == PATCHES and tokens[-1] * 12 == other(x).numel(), kind
    told["sparse"] = 1.7
    assert how() == PATCHES, "estimated once for inputs of this shape"
    forget()
    assert how() == EXPAND, "a gain of less than 1.25 is not relied on"
    for setting, want in (("dense", EXPAND), ("packed", PATCHES)):
        monkeypatch.setenv("NMKERNELS_CHOICE", setting)
        assert how() == want
    monkeypatch.delenv("NMKERNELS_CHOICE")
    told["sparse"] = 1.0
    forget()
    torch.use_deterministic_algorithms(True)
    try:
        assert how() == EXPAND
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.allclose(torch.compile(layer, backend="eager", fullgraph=True)(x), dense(x), atol=1e-5)


# ---- models


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, (3, 1), stride=2, padding=1, bias=False), nn.BatchNorm2d(32),
        nn.Conv2d(32, 32, 1), nn.Flatten(), nn.Linear(32 * 15, 16),
    )  # fmt: skip


def finished():
    model = net()
    handle = nm.sparsify_(model, "srste:2:4")
    handle.finish(allow_unused=True)
    return model.eval()


X = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(0))


def test_finish_compress_and_save_dense(tmp_path):
    model = finished()
    called = []
    model[2].register_forward_hook(lambda *args: called.append(1))
    want, state = model(X), {key: value.clone() for key, value in model.state_dict().items()}
    nm.compress_(model)
    assert [type(m).__name__ for m in model if hasattr(m, "values")] == ["CompressedConv2d", "CompressedConv2d", "CompressedLinear"]
    assert torch.allclose(model(X), want, atol=1e-5) and len(called) == 2 and isinstance(model[2], CompressedConv2d)
    assert set(model.state_dict()) >= {"2.values", "2.indices", "4.bias", "0.weight"} and "2.weight" not in model.state_dict()
    for given in (model, finished()):
        nm.save_dense(given, tmp_path / "dense.safetensors")
        dense = net().eval()
        load_model(dense, tmp_path / "dense.safetensors")
        assert all(torch.equal(value, state[key]) for key, value in dense.state_dict().items())


@pytest.mark.slow
def test_torch_export_and_pickle():
    model = finished()
    want = model(X)
    for given in (model, nm.compress_(copy.deepcopy(model))):
        assert torch.allclose(torch.export.export(given, (X,)).module()(X), want, atol=1e-5)
        assert torch.allclose(pickle.loads(pickle.dumps(given))(X), want, atol=1e-5)


def test_files_that_do_not_fit_are_refused(tmp_path):
    model, path, number = finished(), tmp_path / "m.safetensors", itertools.count()
    nm.save_compressed(nm.compress_(model), path)

    def layers(**changes):
        def change(tensors, metadata):
            about = json.loads(metadata["layers"])
            for key, value in changes.items():
                about["2"].pop(key)
                if value is not None:
                    about["2"][key] = value
            metadata["layers"] = json.dumps(about)

        return edited(Path(shutil.copy(path, tmp_path / f"odd{next(number)}.safetensors")), change)

    for file, said in [
        (layers(kernel=[1, 3]), r"kernel is \(1, 3\), the model's \(3, 1\)"),
        (layers(kernel=[0, 3]), "kernel"), (layers(kernel=[3]), "damaged"), (layers(kernel=None), "damaged"),
        (layers(kernel="31"), "damaged"),
        (layers(kernel=[5, 1]), "kernel"), (layers(layout="linear"), "a linear layer, the model a conv2d"),
        (layers(layout="conv3d"), "damaged"),
    ]:  # fmt: skip
        fresh = net()
        before = copy.deepcopy(fresh.state_dict())
        with pytest.raises(nm.CheckpointError, match=said):
            nm.load_compressed(fresh, file)
        assert all(torch.equal(value, before[key]) for key, value in fresh.state_dict().items())
    for place, other, said in [
        (2, nn.Conv2d(16, 32, 3), "kernel is"), (2, nn.Conv2d(16, 32, (3, 1), groups=2), "the model a Conv2d"),
        (2, nn.Conv2d(32, 32, (3, 1)), r"\(32, 48\) \(out, in\), the model's \(32, 96\)"),
        (4, nn.Linear(32, 32), "a conv2d layer, the model a linear"),
        (4, nn.ConvTranspose2d(32, 32, 1), "the model a ConvTranspose2d"),
    ]:  # fmt: skip
        fresh = net()
        fresh[place] = other
        with pytest.raises(nm.CheckpointError, match=said):
            nm.load_compressed(fresh, path)


def test_audit_flops_report_and_tune_count_convolutions():
    model = net()
    cost = nm.flops(model, "srste:2:4", 10, rows={"2": 12.0, "4": 12.0})
    assert {part.name: part.sparse for part in cost.layers} == {"2": True, "4": True, "6": True}
    part = cost.layers[0]
    assert part.shape == (32, 16, 3, 1) and part.dense_inference == 2 * 32 * 48 * 12 and part.inference == part.dense_inference / 2
    handle = nm.sparsify_(model, "srste:2:4")
    assert "3 of 3" in str(handle.report) and "Conv2d" in str(handle.report)
    assert nm.flops(model, "srste:2:4", 10, rows={"2": 12.0, "4": 12.0}).layers == cost.layers
    found = nm.tune(model, tokens=8)
    assert {(entry.shape, bool(entry.gemm)) for entry in found.choices} == {((32, 48), False), ((32, 32), False), ((16, 480), True)}
    handle.finish(allow_unused=True)
    nm.compress_(model)
    assert nm.flops(model, "srste:2:4", 10, rows={"2": 12.0, "4": 12.0}).inference == cost.inference
    found = nm.audit(net(), 64, "srste:2:4", device="H100", rows={"2": 12.0, "4": 12.0})
    assert (found.layers[0].names, found.layers[0].shape) == (("2",), (32, 16, 3, 1))
