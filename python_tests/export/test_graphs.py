"""What other programs run: ONNX, torch.export and AOTInductor."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn

import nmkernels as nm
from nmkernels.export import save_aoti, save_onnx
from nmkernels.pattern import RecipeError
from python_tests.for_each import for_each

BATCH = ({0: torch.export.Dim("batch")},)


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).eval()
    handle = nm.sparsify_(model, "ste:2:4", lambda module, name: True)
    if kind != "training":
        handle.finish(allow_unused=True)
    if kind == "int4":
        return nm.compress_(model, values=kind)
    return nm.compress_(model) if kind == "compressed" else model


@for_each("kind", ["finished", "compressed", "int4"])
def test_torch_export_for_any_number_of_tokens(kind):
    model, x = model_of(kind), torch.randn(5, 16)
    with torch.no_grad():
        for _ in range(3):
            model(x)  # what eager calls remember is not the graph's business
        program = torch.export.export(model, (x,), dynamic_shapes=BATCH)
        called = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
        ops = called.count("nmkernels.nm_linear.default"), called.count("nmkernels.nm_linear_integers.default")
        assert ops == {"finished": (0, 0), "compressed": (2, 0), "int4": (0, 2)}[kind]
        for rows in (5, 2, 9):
            x = torch.randn(rows, 16)
            assert torch.allclose(program.module()(x), model(x), atol=1e-6)


def test_refused_with_the_way_out(tmp_path):
    x = (torch.randn(5, 16),)
    for save in (save_onnx, save_aoti):
        with pytest.raises(RecipeError, match=r"layer '0' is still in training.*handle\.finish\(\)"):
            save(model_of("training"), tmp_path / "model", x)
    with pytest.raises(RecipeError, match=r"layer '0' is compressed.*before compress_.*save_dense"):
        save_onnx(model_of("compressed"), tmp_path / "model.onnx", x)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_onnx_computes_the_same(tmp_path):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    reference = pytest.importorskip("onnx.reference")
    path, model = tmp_path / "model.onnx", model_of("finished")
    save_onnx(model, path, (torch.randn(5, 16),), dynamic_shapes=BATCH, verbose=False)
    proto = onnx.load(path)
    weights = [onnx.numpy_helper.to_array(t) for t in proto.graph.initializer if len(t.dims) == 2]
    assert len(weights) == 2 and all(nm.ops.is_nm(torch.tensor(w), "2:4") for w in weights)
    for rows in (5, 3):
        x = torch.randn(rows, 16)
        (y,) = reference.ReferenceEvaluator(proto).run(None, {proto.graph.input[0].name: x.numpy()})
        assert torch.allclose(torch.from_numpy(y), model(x), atol=1e-5)


@pytest.mark.slow
@for_each("kind", ["training", "compressed", "int4"])
def test_torch_onnx_is_refused(kind):
    pytest.importorskip("onnxscript")
    with pytest.raises(Exception, match=r"ONNX has neither masks nor N:M weights.*handle\.finish\(\).*nm\.save_dense"):
        torch.onnx.export(model_of(kind), (torch.randn(5, 16),), dynamo=True, verbose=False)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler")
@for_each("kind", ["compressed", "int4"])
def test_a_package_of_aotinductor_computes_the_same(kind, tmp_path):
    model = model_of(kind)
    path = save_aoti(model, tmp_path / "model.pt2", (torch.randn(5, 16),), dynamic_shapes=BATCH)
    compiled = torch._inductor.aoti_load_package(path)
    with torch.no_grad():
        for rows in (5, 3):
            x = torch.randn(rows, 16)
            assert torch.allclose(compiled(x), model(x), atol=1e-5)
