"""nm.explain, asked by the public function, the raw op or the layer."""

import pytest
import torch
from torch import nn

import nmkernels as nm
from nmkernels import explain, ops
from nmkernels.ops.define import CALLS
from nmkernels.ops.explain import OPS_OF
from python_tests.for_each import for_each

W, X = torch.randn(64, 128), torch.randn(8, 128)
C = ops.compress(W, "2:4")
RAW = "nm_linear", X, C.values, C.indices, 2, 4, 128


def adamw():
    p = torch.randn(4, 8)
    state = [[torch.zeros(4, 8)] for _ in range(3)]
    return [p], *state, [torch.zeros(())], torch.zeros(9, dtype=torch.float64), "2:4"


OF_A_WEIGHT = ("mask", "prune", "transposable_mask", "soft_threshold", "soft_threshold_scale", "compress", "mvue", "mvue_compress", "pack")
CALLED = dict.fromkeys(OF_A_WEIGHT, (W, "2:4")) | {
    "decompress": (C,),
    "linear": (X, C),
    "linear_dgrad": (torch.randn(8, 64), C),
    "linear_wgrad": (ops.mvue_compress(torch.randn(8, 64), "2:4", dim=0, seed=0), X),
    "relayout": (ops.compress(W.bfloat16(), "2:4"), "mma.sp"),
    "quantize": (X, torch.int8),
    "quantize_pack": (W, torch.int8),
    "linear_quantized": (ops.quantize(X, torch.int8), ops.quantize_pack(W, torch.int8)),
    "masked_adamw_": adamw(),
    "masked_adamw_pack_": (*adamw(), [ops.pack(torch.randn(4, 8), "2:4")]),
    "quantize_values": (C,),
    "dequantize_values": (ops.quantize_values(C),),
}


def test_every_public_function_that_has_an_op():
    # what a training step calls has no public function
    assert {op for name in CALLED for op in OPS_OF.get(name, (f"nm_{name}",))} | {"nm_pack_forms_"} == set(CALLS)
    for name, args in CALLED.items():
        before = torch.get_rng_state()
        first, *lines = explain(name, *args).splitlines()
        assert first == f"{OPS_OF.get(name, (f'nm_{name}',))[0]}:" and sum("chosen" in line for line in lines) == 1, name
        assert torch.equal(torch.get_rng_state(), before), "what it draws on the way is given back"
    assert explain("relayout", ops.compress(W.bfloat16(), "1:4"), "mma.sp").startswith("nm_pack:")


def test_nothing_is_run():
    params, *rest = adamw()
    before = params[0].clone()
    explain("masked_adamw_", params, *rest)
    explain("mask", W, "2:4", out=torch.empty(1))  # a wrong out is not looked at
    assert torch.equal(params[0], before)


def test_the_same_as_the_raw_op():
    said = explain(*RAW)
    assert said.startswith("nm_linear:\n") and explain("linear", X, C) == explain("linear", c=C, x=X) == said
    assert explain("mask", W, "2:4") == explain("nm_mask", W, 2, 4) == explain("nm_mask", W, n=2, m=4)
    assert explain("prune", nn.Parameter(W), nm.Pattern("2:4")) == explain("nm_prune", W, 2, 4)
    assert "activation" not in said and explain("linear", X, C, activation="gelu", bias=torch.zeros(64)).startswith("nm_linear:")


@for_each("choice", ["packed", "dense"])
def test_layers(choice, monkeypatch):
    monkeypatch.setenv("NMKERNELS_CHOICE", choice)
    nm.gemm.choose.forget()
    said, dense = explain(*RAW), choice == "dense"
    sparse = nm.SparseLinear(128, 64)
    for layer in (nm.CompressedLinear(C), nm.CompressedLinear(C, torch.zeros(64)), sparse):
        lines = explain(layer, X)
        assert lines.startswith(said) and ("not called by this layer" in lines) == dense, lines
        assert lines == said or dense
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = explain("linear", X.bfloat16(), C.to(torch.bfloat16))
        assert explain(nm.CompressedLinear(C), X).startswith(half) and explain(sparse, X).startswith(half)
    conv, point = (nm.nn.CompressedConv2d(ops.compress(torch.randn(8, cols), "2:4"), size) for cols, size in ((72, 3), (16, 1)))
    assert ("not called" in explain(conv, torch.randn(1, 8, 6, 6))) == dense
    assert all(explain(*call).startswith("nm_linear:") for call in ((conv, torch.randn(8, 6, 6)), (point, torch.randn(1, 16, 6, 6))))
    assert not sparse.ran, "asking is not running"


def test_layers_that_call_no_op():
    finished = nm.SparseLinear(128, 64)
    finished.use(None, finished.plan)
    with pytest.raises(nm.NMError, match="torch multiplies its weight"):
        explain(finished, X)
    with pytest.raises(nm.NMError, match="SparseConv2d is not a layer"):
        explain(nm.nn.SparseConv2d(8, 8, 3), torch.randn(1, 8, 6, 6))
    model = nn.Sequential(nn.ReLU(), nm.CompressedLinear(C))
    with pytest.raises(nm.NMError, match=r"Sequential is not a layer .*\('1'\): nm.explain\(model.get_submodule"):
        explain(model, X)
    with pytest.raises(nm.NMError, match="Linear is not a layer"):
        explain(nn.Linear(3, 4), X)


@for_each(
    "args, said",
    [
        (("nm_mask", W, "2:4"), r"'nm_mask' takes \(Tensor w, int n, int m\) and got \(a tensor \(64, 128\), '2:4'\)"),
        (("nm_mask",), r"takes \(Tensor w"),
        (("mask", W), r"'mask' takes \(w, pattern, out=None\) and got"),
        (("mask", None, "2:4"), "'mask' takes"),
        (("mask", W, "9:4"), "pattern 9:4"),
        (("linear", X, W), r"'linear' takes \(x, c, bias=None"),
        (("linear", torch.randn(3, 7), C), "x has shape"),
        (("nm_linear", torch.randn(3, 7), *RAW[2:]), "x has shape"),
        (("linear", X.double(), C), "float64"),
        (("is_nm", W, "2:4"), "plain torch"),
        (("nm_maks", W, 2, 4), "no op is called 'nm_maks'; .*mask"),
        (("Compressed", W), "no op is called"),
        ((3, X), "no op is called 3"),
        ((C, X), "no op is called"),
        ((nm.CompressedLinear(C),), "takes its input x"),
        ((nm.CompressedLinear(C), "x"), "takes its input x"),
        ((nm.CompressedLinear(C), torch.randn(3, 7)), "x has shape"),
        ((nm.SparseLinear(128, 64), torch.randn(3, 7)), "x has shape"),
        ((nm.CompressedLinear(C), X.double()), "float64"),
    ],
)
def test_wrong_arguments_say_what_it_takes(args, said):
    with pytest.raises(nm.NMError, match=said):
        explain(*args)
