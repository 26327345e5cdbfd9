"""What the report says of rounding is what compress_ then does, and the model stays as it is."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import nmkernels as nm
from nmkernels.gemm import estimate
from nmkernels.gemm.devices import DEVICES
from nmkernels.gemm.problem import Problem
from nmkernels.nn.experts import by_expert
from nmkernels.testing import equal_bits
from nmkernels.timing import Task
from python_tests.moe import mixture
from python_tests.nn.test_effective import Calls


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.idle = nn.Linear(64, 128), nn.Linear(128, 32, bias=False), nn.Linear(64, 64)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        y: Tensor = self.second(input=self.drop(torch.relu(self.first(x)))) * scale
        return y


def finished() -> Model:
    model = Model()
    nm.sparsify_(model, "ste:2:4").finish(allow_unused=True)
    return model


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize(("values", "group"), [("int8", None), ("int4", None), ("int4", 64)])
def test_the_errors_are_those_of_the_rounded_layers(values: str, group: int | None, compressed: bool) -> None:
    model, batches = finished(), [torch.randn(5, 64), {"x": torch.randn(2, 3, 64), "scale": 2.0}, (torch.randn(1, 64), 3.0)]
    if compressed:
        nm.compress_(model)
    model.second.eval()
    state = {name: t.clone() for name, t in model.state_dict().items()}
    report = nm.quantization_report(model, values, group, batches)
    assert all(equal_bits(t, state[name]) for name, t in model.state_dict().items())
    assert model.training and not model.second.training and not any(m._forward_pre_hooks for m in model.modules())
    inputs = torch.cat([(b["x"] if isinstance(b, dict) else b[0] if isinstance(b, tuple) else b).reshape(-1, 64) for b in batches])
    with torch.no_grad():
        hidden = torch.relu(model.first(inputs))
    before = {n: m.dense() if compressed else m.weight.detach() for n, m in model.named_children() if n != "drop"}
    nm.compress_(model, values=values, group=group)
    for entry, x in zip(report.layers, (inputs, hidden, None), strict=True):
        layer = model.get_submodule(entry.name)
        w, q = before[entry.name].double(), layer.weight.dense(torch.float64)
        assert entry.weight == pytest.approx(float((q - w).norm() / w.norm()), rel=1e-5)
        assert (entry.shape, entry.pattern, entry.group, entry.after) == (tuple(w.shape), "2:4", layer.weight.group, layer.weight.nbytes)
        assert entry.before == w.numel() * 2 + w.numel() // 8  # half the values, of 4 bytes, and 4 bits of indices per group
        if x is None:
            assert entry.output is None
        else:
            x = x.double()
            assert entry.output == pytest.approx(float((x @ (q - w).t()).norm() / (x @ w.t()).norm()), rel=1e-4)
    text = str(report)
    assert "second" in text and f"{100 * report.layers[0].weight:.2f} %" in text and "error of weight" in text


@pytest.mark.parametrize("compressed", [False, True])
def test_errors_of_experts_are_those_on_their_own_tokens(compressed: bool) -> None:
    model, x = mixture(dtype=torch.float32, transposed=True), torch.randn(40, 16)
    nm.sparsify_(model, "ste:2:4").finish(allow_unused=True)
    floats = nm.compress_(copy.deepcopy(model))
    report = nm.quantization_report(floats if compressed else model, "int4", data=[(x, 2)])
    rounded = nm.compress_(copy.deepcopy(model), values="int4")
    assert [entry.name for entry in report.layers] == ["experts.gate_up_proj", "experts.down_proj"]
    numbers = (torch.arange(len(x))[:, None] + torch.arange(2)) % 2
    inputs = {e: (first, last) for e, first, last in by_expert(floats.experts, None, x, numbers, None)}
    assert len(inputs) == 2  # the third expert gets nothing
    for i, entry in enumerate(report.layers):
        w, q = (m.experts.stacks[entry.name.removeprefix("experts.")] for m in (floats, rounded))
        assert (entry.shape, entry.after) == ((3 * w.out_features, w.in_features), q.weight.nbytes)
        difference, outputs = [], []
        for a, b in zip(w.layers, q.layers, strict=True):
            difference.append(b.dense() - a.dense())
            outputs.append(a.dense())
        assert entry.weight == pytest.approx(float(torch.cat(difference).norm() / torch.cat(outputs).norm()), rel=1e-4)
        both = [torch.cat([inputs[e][i] @ part[e].t() for e in range(2)]).norm() for part in (difference, outputs)]
        assert entry.output == pytest.approx(float(both[0] / both[1]), rel=1e-4)


def test_reordered_inputs() -> None:
    layer = nm.CompressedLinear(nm.ops.compress(torch.randn(16, 64), "2:4"), columns=torch.randperm(64))
    x, w = torch.randn(7, 64), layer.dense()
    entry = nm.quantization_report(layer, "int4", data=[x]).layers[0]
    nm.compress_(layer, values="int4")
    assert entry.output == pytest.approx(float((x @ (layer.dense() - w).t()).norm() / (x @ w.t()).norm()), rel=1e-3)


@pytest.mark.parametrize(("values", "group", "nbytes"), [("int8", None, 0.625), ("int4", None, 0.375 + 2 / 128), ("int4", 0, 0.375)])
def test_an_audit_predicts_integers_from_their_bytes(values: str, group: int | None, nbytes: float) -> None:
    model = nn.Sequential(nn.Linear(1024, 512, dtype=torch.bfloat16))
    nm.sparsify_(model, "ste:2:4").finish(allow_unused=True)
    nm.compress_(model, values=values, group=group)
    audit = nm.audit(model, tokens=4, device="H100")
    few, bandwidth = audit.layers[0], 0.85 * 3.35e12
    assert (few.dtype, few.inference[0].form) == ("bfloat16", "sparse") and any("from their bytes" in note for note in audit.notes)
    assert few.inference[0].used == pytest.approx((1024 * 512 * nbytes + 4 * 1536 * 2) / bandwidth + 3e-6)
    many = nm.audit(model, tokens=17, device="H100").layers[0].inference[0]
    assert many.form == "expanded" and many.used - many.dense == pytest.approx(1024 * 512 * (nbytes + 2 + 2) / bandwidth + 2 * 3e-6)
    nm.compress_(model, values=values, group=group, keep_dense=True)
    assert nm.audit(model, tokens=17, device="H100").layers[0].speedup("inference") == 1
    p = Problem("fprop", 4, 512, 1024, 2, 4, torch.bfloat16, torch.device("cuda"), ("rows",), values=values, group=model[0].weight.group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nmkernels.gemm.estimate._gpu", lambda device: DEVICES["H100"])
        assert estimate.seconds(estimate.SPARSE, p) == pytest.approx(few.inference[0].used)
        p = p._replace(tokens=17)
        assert estimate.seconds(estimate.EXPAND, p) == pytest.approx(many.used)


def test_an_audit_measures_the_kernels_of_integers() -> None:
    model = nn.Sequential(nn.Linear(256, 128, dtype=torch.bfloat16))
    nm.sparsify_(model, "ste:2:4").finish(allow_unused=True)
    nm.compress_(model, values="int4")
    called = {}

    def clock(task: Task) -> float:
        with Calls() as calls:
            task.run()
        called[task.name] = calls.names
        return {"fprop op": 2e-6, "fprop dense": 3e-6}.get(task.name, 9e-6)

    layer = nm.audit(model, tokens=4, device="cpu", timer=clock).layers[0]
    assert (layer.measured_inference[0].used, layer.measured_inference[0].dense) == (2e-6, 3e-6)
    assert called["fprop sparse"][-1:] == called["fprop op"][-1:] == ["linear_integers"]
    assert called["expand"] == ["dequantize_values", "decompress"]


def test_it_refuses_what_compress_refuses() -> None:
    training = Model()
    nm.sparsify_(training, "ste:2:4")
    for model, arguments, said in [
        (training, ("int8",), "'first' is still in training"),
        (Model(), ("int8",), "no floating-point N:M weights that can be rounded"),
        (nm.compress_(finished(), values="int8"), ("int8",), "no floating-point N:M weights that can be rounded"),
        (finished(), ("int5",), "values='int5' is unknown"),
        (finished(), ("int4", 12), "quantization_report: layer 'first': group=12"),
    ]:
        with pytest.raises(nm.NMError, match=said):
            nm.quantization_report(model, *arguments)
