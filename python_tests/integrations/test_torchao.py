"""torch's semi-structured tensors, torchao's pruned models taken over, and what it does to layers of this package."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

import nmkernels as nm
from nmkernels.integrations import torchao_compat as compat
from nmkernels.pattern import DtypeError, RecipeError, ShapeError
from python_tests.for_each import for_each
from python_tests.house.paths import ROOT

NEEDS = "no torchao"


def mlp(size: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(size, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10)).eval()


def finished(pattern: str = "2:4", **config) -> nn.Sequential:
    model = mlp()
    nm.sparsify_(model, nm.recipes.ASP(pattern, **config)).finish(allow_unused=True)
    return model


# ---- torch's own tensors


@pytest.mark.filterwarnings("ignore:The PyTorch API of SparseSemi")
@for_each("dtype", [torch.float16, torch.bfloat16])
def test_semi_structured_tensors_hold_the_same(dtype):
    from torch.sparse._semi_structured_conversions import (
        sparse_semi_structured_from_dense_cutlass,
        sparse_semi_structured_to_dense_cutlass,
    )

    w = nm.ops.prune(torch.randn(64, 128), "2:4").to(dtype)
    w[3, :8] = 0.0
    w[5, :4] = torch.tensor([0.0, 0.0, 7.0, 0.0])
    c = nm.ops.compress(w, "2:4")
    t = compat.semi_structured(c)
    assert t.shape == w.shape and t.dtype == dtype
    assert torch.equal(sparse_semi_structured_to_dense_cutlass(t.packed, t.meta), w)
    again = compat.from_semi_structured(t)
    assert torch.equal(again.values, c.values) and torch.equal(again.indices, c.indices)
    packed, meta = sparse_semi_structured_from_dense_cutlass(w)
    t = type(t)(w.shape, packed, meta, None, None, None)
    assert torch.equal(compat.from_semi_structured(t).dense(), w)


@pytest.mark.filterwarnings("ignore:The PyTorch API of SparseSemi")
@for_each("compressed", [False, True])
def test_a_model_leaves_with_them(compressed):
    model = finished().bfloat16()
    dense = {name: model.get_submodule(name).weight.detach().clone() for name in ("0", "2")}
    if compressed:
        nm.compress_(model)
    bias = model[0].bias
    assert compat.to_semi_structured_(model) is model and model[0].bias is bias and not model[0].training
    for name, w in dense.items():
        layer = model.get_submodule(name)
        assert type(layer) is nn.Linear and "SparseSemiStructured" in type(layer.weight.data).__name__
        assert torch.equal(compat.from_semi_structured(layer.weight.data).dense(), w)


def test_no_such_tensors():
    training = mlp()
    nm.sparsify_(training, "ste:2:4")
    odd = nn.Sequential(nn.Linear(48, 64)).half()
    nm.sparsify_(odd, "ste:2:4").finish(allow_unused=True)
    conv = nn.Sequential(nn.Conv2d(64, 64, 1)).half()
    nm.sparsify_(conv, "ste:2:4").finish(allow_unused=True)
    for model, kind, said in [
        (conv, RecipeError, "'0' is a SparseConv2d"),
        (mlp(), RecipeError, "no sparse linear layer"),
        (training, RecipeError, "'0' is still in training"),
        (finished("1:4"), RecipeError, "'0' is 1:4"),
        (finished(), DtypeError, "fp16 or bf16"),
        (nm.compress_(finished().bfloat16(), values="int8"), DtypeError, "'0' has int8 values.*densify_"),
        (odd, ShapeError, r"\(64, 48\)"),
    ]:
        with pytest.raises(kind, match=said):
            compat.to_semi_structured_(model)
    with pytest.raises(DtypeError, match="a Tensor has no readable indices"):
        compat.from_semi_structured(torch.zeros(4, 4))


# ---- with torchao itself


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_zeros_of_its_sparsifiers_are_adopted():
    sparsity = pytest.importorskip("torchao.sparsity", reason=NEEDS)
    from torch.ao.pruning import WeightNormSparsifier
    from torchao.prototype.sparsity.sparsifier.weight_norm_sparsifier import WeightNormSparsifier as Theirs

    config = [{"tensor_fqn": "0.weight"}, {"tensor_fqn": "2.weight"}]
    x = torch.randn(32, 64)
    for kind in ("torch", "torchao", "wanda", "fake"):
        model = mlp()
        if kind in ("torch", "torchao"):
            sparsifier = (WeightNormSparsifier if kind == "torch" else Theirs)(1.0, (1, 4), 2)
            sparsifier.prepare(model, config)
            with pytest.raises(RecipeError):  # while its parametrization computes the weights
                nm.recipes.adopt(model)
            sparsifier.step()
            sparsifier.squash_mask()
        elif kind == "wanda":
            sparsifier = sparsity.WandaSparsifier(semi_structured_block_size=4)
            sparsifier.prepare(model, config)
            model(x)
            sparsifier.step()
            sparsifier.squash_mask()
        else:
            sparsity.apply_fake_sparsity(model, filter_fn=lambda m, name: name in ("0", "2"))
        masks = {name: model.get_submodule(name).weight != 0 for name in ("0", "2")}
        handle = nm.recipes.adopt(model)
        assert str(handle.recipe.pattern) == "2:4" and list(handle.layers) == ["0", "2"], kind
        optimizer = handle.attach(nm.optim.MaskedAdamW(model.parameters(), lr=1e-2))
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        handle.finish()
        assert all(torch.equal(model.get_submodule(name).weight != 0, mask) for name, mask in masks.items()), kind
        nm.compress_(model)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_quantised_after_finish_and_not_after_compress():
    quantization = pytest.importorskip("torchao.quantization", reason=NEEDS)
    compat.install()
    int8, x = quantization.Int8WeightOnlyConfig(), torch.randn(3, 64)
    model = finished()
    y = model(x)
    quantization.quantize_(model, int8)
    assert 0 < (model(x) - y).abs().max() < 0.02
    assert nm.ops.is_nm(model[0].weight.dequantize(), "2:4")
    with pytest.raises(RecipeError, match=r"'0' is a torchao.*Int8Tensor: it was quantised"):
        nm.compress_(model)
    assert type(nm.densify_(model)[0]) is nn.Linear and torch.isfinite(model(x)).all()

    model = nm.compress_(finished())
    with pytest.warns(UserWarning, match=r"2 compressed layers stay as they are.*before compress_"):
        quantization.quantize_(model, int8)  # the head is dense
    assert "Int8Tensor" in type(model[4].weight).__name__
    for given in (model, model[:4]):
        with pytest.raises(RecipeError, match=r"'0' is compressed.*before compress_"):
            chosen = {"filter_fn": lambda m, name: isinstance(m, nm.CompressedLinear)} if given is model else {}
            quantization.quantize_(given, int8, **chosen)
    model = mlp()
    nm.sparsify_(model, "ste:2:4")
    with pytest.raises(RecipeError, match="'0' is in training"):
        quantization.quantize_(model, int8)


@pytest.mark.slow
@for_each("first", ["nmkernels", "torchao.quantization"])
def test_both_are_installed_in_either_order(first):
    pytest.importorskip("torchao", reason=NEEDS)
    second = {"nmkernels": "torchao.quantization", "torchao.quantization": "nmkernels"}[first]
    code = (
        f"import {first}, {second}, torchao, nmkernels.integrations.torchao_compat\n"
        "assert hasattr(torchao.quantization.quantize_, '_nm_checked')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
