"""torch.jit.trace, torch.fx and make_fx at every stage: the graph computes the same, for other batches too, and as the model trains on."""

import copy
import io
from contextlib import nullcontext

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import nmkernels as nm
from nmkernels.autograd import SplitRule

STAGES = ["training", "finished", "compressed"]


def mlp():
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)), torch.randn(4, 16)


def cnn():
    return nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 16, 1)), torch.randn(2, 16, 4, 4)


def conv1d():
    kind = pytest.importorskip("transformers.pytorch_utils").Conv1D
    return nn.Sequential(kind(32, 16), nn.GELU(), kind(16, 32)), torch.randn(2, 3, 16)


def no_bias():
    return nn.Sequential(nn.Linear(16, 32, False), nn.GELU(), nn.Linear(32, 16, False)), torch.randn(4, 16)


KINDS = {
    "no bias": (no_bias, "srste:2:4"),
    "linear": (mlp, "srste:2:4"),
    "packed": (mlp, "ste:2:4(packed=True)"),
    "conv": (cnn, "srste:2:4"),
    "conv1d": (conv1d, "srste:2:4"),
    "adapter": (mlp, "slope:2:4(total_steps=2)"),
    "reordered": (mlp, "complementary:2:4"),
}


def model_of(kind, stage):
    torch.manual_seed(0)
    make, recipe = KINDS[kind]
    model, x = make()
    handle = nm.sparsify_(model, recipe, lambda module, name: True)
    optimizer = handle.attach(handle.recipe.optimizer(model.parameters(), lr=1e-2))
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    if stage != "training":
        handle.finish()
    if stage == "compressed":
        nm.compress_(model)
    return model.eval(), x, optimizer


def same(graph, model, x):
    for batch in (x, torch.cat([x, 2 * x])):
        assert torch.allclose(graph(batch), model(batch), atol=1e-5)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_jit_trace(kind, stage):
    model, x, _ = model_of(kind, stage)
    for mode in (nullcontext, torch.no_grad):
        with mode():
            trace = torch.jit.trace(model, x)
            torch.jit.save(trace, buffer := io.BytesIO())
            same(torch.jit.load(io.BytesIO(buffer.getvalue())), model, x)
    assert "nmkernels::" not in str(trace.inlined_graph), "it runs where the package is not"


def test_a_trace_is_of_its_moment():
    model, x, optimizer = model_of("no bias", "training")
    trace, want = torch.jit.trace(model, x), model(x).detach()
    model.train()(x).square().mean().backward()
    optimizer.step()
    assert not torch.allclose(model(x), want, atol=1e-5) and torch.allclose(trace(x), want, atol=1e-6)


def test_jit_trace_under_autocast():
    for stage in STAGES:
        model, x, _ = model_of("linear", stage)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            trace = torch.jit.trace(model, x)
            assert torch.allclose(trace(x), model(x), atol=1e-2) and trace(x).dtype == torch.bfloat16


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_fx_sees_one_call(kind, stage):
    model, x, optimizer = model_of(kind, stage)
    graph = fx.symbolic_trace(model)
    assert [node.target for node in graph.graph.nodes if node.op == "call_module"] == ["0", "1", "2"]
    same(graph, model, x)
    same(copy.deepcopy(graph), model, x)
    if stage == "training":
        model(x).square().mean().backward()
        optimizer.step()
        same(graph, model, x)


def test_fx_of_a_single_layer_and_of_sparse_activations():
    for layer in (nm.nn.SparseLinear(16, 16), nm.nn.CompressedLinear(nm.ops.compress(torch.randn(16, 16), "2:4"))):
        with pytest.raises(nm.NMError, match=r"put it in nn\.Sequential"):
            fx.symbolic_trace(layer)
    model, x = nn.Sequential(nm.nn.SquaredReLUMLP(16, 32)), torch.randn(8, 16)
    for rule in (None, nm.nn.ActivationRule("2:4"), nm.nn.ActivationRule("2:4", split=SplitRule(nm.Pattern("2:4")))):
        model[0].act.rule = rule
        same(fx.symbolic_trace(model), model, x)
        if rule is None or rule.split is None:
            same(torch.jit.trace(model, x), model, x)


@pytest.mark.quick(1, per=("kind", "stage"))
@pytest.mark.parametrize("mode", ["symbolic", "real", "fake"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_make_fx(kind, stage, mode):
    model, x, _ = model_of(kind, stage)
    with torch.no_grad():
        graph = make_fx(model, tracing_mode=mode, _allow_non_fake_inputs=True)(x)
        assert torch.allclose(graph(x), model(x), atol=1e-5), "and the model is as before"


def test_jit_script_is_refused_in_one_sentence():
    for stage in STAGES:
        model, _, _ = model_of("linear", stage)
        with pytest.raises(nm.NMError, match=r"torch\.jit\.trace\(model, example\) works at every stage.*densify_"):
            torch.jit.script(model)
    torch.jit.script(nm.densify_(model))
    torch.jit.script(nm.nn.SquaredReLU())
    with pytest.raises(nm.NMError, match="SquaredReLU"):
        torch.jit.script(nm.nn.SquaredReLU("2:4"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*(legacy TorchScript|dynamo=False).*")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_onnx_by_tracing_and_tensorboard(kind, stage, tmp_path):
    onnx = pytest.importorskip("onnx")
    reference = pytest.importorskip("onnx.reference")
    model, x, _ = model_of(kind, stage)
    torch.onnx.export(model, (x,), path := tmp_path / "m.onnx", dynamo=False)
    proto = onnx.load(path)
    (y,) = reference.ReferenceEvaluator(proto).run(None, {proto.graph.input[0].name: x.numpy()})
    assert torch.allclose(torch.from_numpy(y), model(x), atol=1e-5)
    writer = pytest.importorskip("torch.utils.tensorboard").SummaryWriter(tmp_path)
    writer.add_graph(model, x)
    writer.close()
