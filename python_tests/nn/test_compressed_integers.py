"""CompressedLinear with integers as values: it multiplies the decoded weight, and keeps integers and steps whatever happens to it."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nmkernels as nm
from nmkernels import dispatch
from nmkernels.capability import compiled_core
from nmkernels.gemm import estimate
from nmkernels.gemm.choose import forget, using
from nmkernels.gemm.methods import EXPAND, OP, Method
from nmkernels.nn import compressed
from nmkernels.testing import assert_no_worse, equal_bits
from python_tests.nn.test_effective import Calls

KINDS = (("int8", None), ("int4", None), ("int4", 32))
ROWS, COLS = 16, 128


def layer_of(values: str = "int4", group: int | None = 32, keep_dense: bool = False, **options: Any) -> nm.CompressedLinear:
    c = nm.ops.quantize_values(nm.ops.compress(torch.randn(ROWS, COLS), "2:4"), values, group)
    return nm.CompressedLinear(c, torch.randn(ROWS), keep_dense=keep_dense, **options)


def finished(*layers: nn.Module, pattern: str = "2:4") -> nn.Sequential:
    model = nn.Sequential(*layers)
    nm.sparsify_(model, f"ste:{pattern}").finish(allow_unused=True)
    return model


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize(("values", "group"), KINDS)
def test_equals_the_decoded_weight(values: str, group: int | None, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed, "SMALL_BYTES", 1 << 20 if small else 0)
    layer = layer_of(values, group)
    assert layer.bias is not None
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for shape in [(COLS,), (3, COLS), (2, 20, COLS), (0, COLS)]:
            x, w, b = torch.randn(shape).to(dtype), layer.weight.dense(torch.float64), layer.bias.detach().to(dtype)
            exact = F.linear(x.double(), w, b.double())
            for grad in (False, True, False):  # the second call without gradients takes the short way
                with torch.set_grad_enabled(grad):
                    y = layer(x.requires_grad_(grad))
                assert y.dtype == dtype
                assert_no_worse(y.detach(), F.linear(x.detach(), w.to(dtype), b), exact)
            layer.zero_grad()
            layer(x.requires_grad_()).sum().backward()
            torch.testing.assert_close(x.grad, w.sum(0).to(dtype).expand_as(x), rtol=0.02, atol=0.1 if dtype.itemsize == 2 else 1e-5)
            assert layer.bias.grad is not None and layer.bias.grad.dtype == torch.float32
    assert not any(t.requires_grad for t in layer.buffers())


def test_the_weight_has_no_gradient() -> None:
    layer = layer_of(keep_dense=False)
    layer.step.requires_grad_()
    with pytest.raises(nm.NMError, match="no gradient with respect to the compressed weight"):
        nm.autograd.linear_compressed(torch.randn(3, COLS, requires_grad=True), layer.weight).sum().backward()


def test_autocast_and_adapter() -> None:
    left, right, x = torch.randn(COLS, 2), torch.randn(2, ROWS), torch.randn(3, COLS)
    layer = layer_of(adapter=(left, right))
    w, b = layer.weight.dense(), layer.bias
    want = F.linear(x, w, b) + x @ left @ right / 2
    torch.testing.assert_close(layer(x), want, rtol=1e-4, atol=1e-4)
    low = layer(x.bfloat16())  # the adapter stays in its own dtype
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), want, rtol=0.05, atol=0.3)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    with pytest.raises(nm.DtypeError, match="x is torch.int64"):
        layer(torch.ones(2, COLS, dtype=torch.int64))


@pytest.mark.parametrize("values", ["int8", "int4"])
def test_casts_and_moves_keep_integers_and_steps(values: str) -> None:
    layer = layer_of(values)
    held, x = {name: t.clone() for name, t in layer.named_buffers()}, torch.randn(3, COLS)
    before = layer(x)
    for change, dtype in [
        (nn.Module.half, torch.float16),
        (nn.Module.double, torch.float64),
        (lambda m: m.to(torch.bfloat16), torch.bfloat16),
        (lambda m: m.type(torch.float16), torch.float16),
        (nn.Module.float, torch.float32),
        (lambda m: m.to("cpu"), torch.float32),
    ]:
        change(layer)
        assert all(equal_bits(t, held[name]) and t.dtype == held[name].dtype for name, t in layer.named_buffers())
        assert layer.dtype == layer.bias.dtype == layer.dense().dtype == dtype and f"dtype={dtype}" in repr(layer)
        assert layer(x).dtype == torch.float32
    torch.testing.assert_close(layer(x), before, rtol=0.01, atol=0.01)  # the bias was rounded
    meta = copy.deepcopy(layer).half().to("meta")
    assert meta.step.dtype == torch.bfloat16 and meta.dtype == torch.float16 and meta.step.is_meta
    assert meta.to_empty(device="cpu").step.dtype == torch.bfloat16


def test_steps_that_change_are_seen() -> None:
    for keep_dense in (False, True):
        layer, x = layer_of(keep_dense=keep_dense), torch.randn(40, COLS)
        layer(x)
        for change in (
            lambda layer: setattr(layer, "step", layer.step * 2),
            lambda layer: layer.step.mul_(2),
            lambda layer: setattr(layer.step, "data", layer.step * 2),
        ):
            change(layer)
            for grad in (False, True):
                with torch.set_grad_enabled(grad):
                    torch.testing.assert_close(layer(x), F.linear(x, layer.weight.dense(), layer.bias), rtol=1e-4, atol=1e-4)


def test_state_dicts_do_not_mix_kinds() -> None:
    layer, other, x = layer_of(), layer_of(), torch.randn(3, COLS)
    other.load_state_dict(layer.state_dict())
    assert equal_bits(other(x), layer(x))
    layers = {"int4": layer, "int8": layer_of("int8", 32), "float": nm.CompressedLinear(nm.ops.dequantize_values(layer.weight), layer.bias)}
    for own, one in layers.items():
        for theirs, source in layers.items():
            for strict in (True, False) if own != theirs else ():
                held = {name: t.clone() for name, t in one.state_dict().items()}
                with pytest.raises(RuntimeError, match=f"values are {theirs} in the state dict and {own} in this layer"):
                    one.load_state_dict(source.state_dict(), strict=strict)
                assert all(equal_bits(t, held[name]) for name, t in one.state_dict().items())
    with pytest.raises(RuntimeError, match="size mismatch for step"):
        layer.load_state_dict(layer_of("int4", 64).state_dict())


def test_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        layer, x = layer_of(), torch.randn(3, COLS).to(dtype)
        traced = torch.jit.trace(layer, (torch.randn(2, COLS).to(dtype),))
        torch.testing.assert_close(traced(x), layer(x), rtol=0.02, atol=0.02)


def _truth(layer: nm.CompressedLinear, x: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """y of the dense weight by torch, and the gradient of Σ y²."""
    given, bias = x.to(dtype, copy=True).requires_grad_(), None if layer.bias is None else layer.bias.detach().to(dtype)
    y = F.linear(given, layer.weight.dense(dtype), bias)
    y.square().sum().backward()
    return [y.detach(), given.grad]


@pytest.mark.slow
def test_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs may choose another method than the layer; each must be as exact as torch."""
    for small, values in ((1 << 20, "int8"), (0, "int4")):
        monkeypatch.setattr(compressed, "SMALL_BYTES", small)
        layer, x = layer_of(values), torch.randn(3, COLS)
        near, exact = _truth(layer, x, torch.float32), _truth(layer, x, torch.float64)
        exported = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim("tokens", max=64)},)).module()
        assert_no_worse(exported(torch.cat([x, x]))[3:].detach(), near[0], exact[0])
        for one in (layer, torch.compile(copy.deepcopy(layer), fullgraph=True, backend="aot_eager")):
            given = x.clone().requires_grad_()
            y = one(given)
            y.square().sum().backward()
            for got, *wanted in zip([y.detach(), given.grad], near, exact, strict=True):
                assert_no_worse(got, *wanted)


@pytest.mark.slow
def test_layers_of_several_sizes_compile_with_gradients() -> None:
    """Compiled again for another size, torch has sizes of tensors as symbols, which the choice of a method cannot read."""
    for rows, cols in ((8, 64), (16, 128)):
        c = nm.ops.quantize_values(nm.ops.compress(torch.randn(rows, cols), "2:4"), "int8")
        compiled = torch.compile(nm.CompressedLinear(c), fullgraph=True, backend="aot_eager")
        x = torch.randn(3, cols, requires_grad=True)
        compiled(x).sum().backward()
        torch.testing.assert_close(x.grad, c.dense().sum(0).expand_as(x))


def test_inference_mode_and_vmap() -> None:
    with torch.inference_mode():
        layer = layer_of()
        x = torch.randn(3, COLS)
        torch.testing.assert_close(layer(x), F.linear(x, layer.dense(), layer.bias))
    layer, x = layer_of(), torch.randn(3, COLS)
    w = layer.weight.dense()
    g = torch.func.vmap(torch.func.grad(lambda x: nm.autograd.linear_compressed(x, layer.weight).square().sum()))(x)
    torch.testing.assert_close(g, 2 * (x @ w.t()) @ w, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not compiled_core().ok, reason=compiled_core().reason)
@pytest.mark.usefixtures("cache")
def test_where_the_kernel_is_estimated_slower_the_weight_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed, "SMALL_BYTES", 0)
    monkeypatch.setattr(estimate, "seconds", lambda method, p: {"sparse": float(p.tokens), "expand": 16.5}.get(method, 100.0))
    monkeypatch.setattr(estimate, "margin", lambda method, p: 1.0)
    ran: list[int] = []

    def fn(x: Tensor, *args: Any, out: Tensor | None = None) -> Tensor:
        ran.append(x.shape[0])
        return nm.reference.linear_integers(x, *args)

    layer, entry = layer_of(), dispatch.Impl("nm_linear_integers", "cpu", fn, lambda *args: (True, ""), 10)
    others = dispatch._impls["nm_linear_integers"]
    monkeypatch.setitem(dispatch._impls, "nm_linear_integers", [entry, *(one for one in others if one.backend != "cpu")])
    forget()
    dispatch.forget()
    assert "cpu        chosen\n" in nm.explain(layer, torch.randn(3, COLS)) + "\n"
    assert "not called by this layer: it expands" in nm.explain(layer, torch.randn(17, COLS))
    for grad in (False, True):
        for tokens in (1, 16, 17, 17, 16):
            x = torch.randn(tokens, COLS)
            with torch.set_grad_enabled(grad):
                y = layer(x.requires_grad_(grad))
            torch.testing.assert_close(y, F.linear(x, layer.weight.dense(), layer.bias), rtol=1e-4, atol=1e-4)
        assert ran == [1, 16, 16]
        ran.clear()
    monkeypatch.undo()
    forget()
    dispatch.forget()


@pytest.mark.skipif(not compiled_core().ok, reason=compiled_core().reason)
@pytest.mark.parametrize("values", ["int8", "int4"])
def test_a_small_layer_keeps_no_dense_copy_unasked(values: str) -> None:
    """It takes the memory that ``nm.quantization_report`` says, whatever is fastest."""
    for keep_dense, forms in ((False, ("rows",)), (True, ("dense", "rows"))):
        layer = layer_of(values, keep_dense=keep_dense)
        assert all(p.forms == forms and p.cached for tokens in (1, 16, 2048) for ((p,),) in [layer.problems(tokens)])
        for tokens in (1, 3, 300, 1, 300):
            x = torch.randn(tokens, COLS)
            with torch.no_grad():
                torch.testing.assert_close(layer(x), F.linear(x, layer.dense(), layer.bias), rtol=1e-4, atol=1e-4)
        copies = [name for name in layer.weight._layouts if name.startswith("dense")]
        assert keep_dense or not copies


def test_the_choice_is_measured_per_kind_of_values() -> None:
    problems = [layer_of(*kind).problems(4)[0][0] for kind in KINDS]
    plain = nm.CompressedLinear(nm.ops.compress(torch.randn(ROWS, COLS), "2:4")).problems(4)[0][0]
    keys = {nm.gemm.problem.key(p) for p in (*problems, plain)}
    assert len(keys) == 4 and any("int4/32" in key for key in keys)
    entry = nm.tune(layer_of(), tokens=4).choices[0]
    assert entry.gemm == "fprop" and not entry.refused and entry.choice in ("dense", "op") and entry.pattern == "2:4 int4/32"
    (problem,) = layer_of(keep_dense=True).problems(4)[0]
    layer, x = layer_of(keep_dense=True), torch.randn(4, COLS)
    with using((problem, Method(OP, "rows"))), torch.no_grad(), Calls() as calls:
        layer(x)
        layer(x)
    assert calls.names == ["linear_integers"] * 2
    layer, x = layer_of(keep_dense=True), torch.randn(4, COLS)
    with using((problem, Method(EXPAND, "rows"))), torch.no_grad():
        torch.testing.assert_close(layer(x), F.linear(x, layer.dense(), layer.bias))


# ---- compress_


@pytest.mark.parametrize("already", [False, True])
@pytest.mark.parametrize(("values", "group"), KINDS)
def test_compress_rounds(values: str, group: int | None, already: bool) -> None:
    model = finished(nn.Linear(128, 64), nn.GELU(), nn.Linear(64, 32, bias=False)).bfloat16()
    want = [nm.ops.quantize_values(nm.ops.compress(model[i].weight.detach(), "2:4"), values, group) for i in (0, 2)]
    if already:
        nm.compress_(model)
    kept, x = [model[0], model[2]], torch.randn(3, 128).bfloat16()
    if already:
        model(x)  # caches
    assert nm.compress_(model, values=values, group=group) is model
    for i, c in zip((0, 2), want, strict=True):
        got = model[i].weight
        assert (model[i] is kept[i // 2]) == already
        assert equal_bits(got.values, c.values) and equal_bits(got.step, c.step) and equal_bits(got.indices, c.indices)
        assert model[i].dtype == torch.bfloat16 and f"values={values}, group={c.group or 'row'}" in repr(model[i])
    y = F.linear(F.gelu(F.linear(x, model[0].dense(), model[0].bias)), model[2].dense())
    torch.testing.assert_close(model(x), y, rtol=0.05, atol=0.05)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    nm.compress_(model, values=values)  # the same again
    nm.compress_(model, values=values, group=group)
    assert all(equal_bits(t, state[name]) for name, t in model.state_dict().items())
    dense = model[0].dense()
    nm.densify_(model)
    assert type(model[0]) is nn.Linear and model[0].weight.dtype == torch.bfloat16 and equal_bits(model[0].weight.detach(), dense)


def test_compress_refuses_to_round_and_changes_nothing() -> None:
    linear = nn.Linear(128, 64)
    bad = finished(nn.Linear(128, 128), copy.deepcopy(linear))
    with torch.no_grad():
        bad[1].weight[0] *= float("inf")
        bad[1].weight[0].nan_to_num_(0.0, float("inf"), float("inf"))
    rounded = nm.compress_(finished(copy.deepcopy(linear)), values="int4", group=32)
    for model, arguments, error, said in [
        (bad, {"values": "int8"}, nm.RecipeError, "'1'.*NaN or infinite"),
        (finished(nn.Linear(128, 128), nn.Linear(96, 64)), {"values": "int4", "group": 128}, nm.NMError, "'1'.*group=128"),
        (finished(copy.deepcopy(linear)), {"values": "int2"}, nm.NMError, "values='int2' is unknown"),
        (finished(copy.deepcopy(linear)), {"group": 32}, nm.NMError, "group=32 is for values"),
        (rounded, {"values": "int8"}, nm.RecipeError, "'0' has int4 values already, a step per 32 columns.*densify_"),
        (rounded, {"values": "int4", "group": 64}, nm.RecipeError, "'0' has int4 values already"),
        (rounded, {"values": "int4", "group": 0}, nm.RecipeError, "'0' has int4 values already"),
        (nn.Sequential(nn.Linear(128, 64)), {"values": "int8"}, nm.RecipeError, "no SparseLinear"),
    ]:
        kinds, state = [type(m) for m in model.modules()], {k: v.clone() for k, v in model.state_dict().items()}
        with pytest.raises(error, match=re.compile(said, re.DOTALL)):
            nm.compress_(model, **arguments)
        assert [type(m) for m in model.modules()] == kinds and all(equal_bits(v, state[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("already", [False, True])
@pytest.mark.parametrize(
    ("dtype", "fits", "overflows", "way"), [(torch.float16, 60000, 65504, "cast .*bfloat16"), (torch.float64, 2e38, 1e300, "scale")]
)
@pytest.mark.parametrize("values", ["int8", "int4"])
def test_weights_that_overflow_once_rounded_are_refused(
    values: str, dtype: torch.dtype, fits: float, overflows: float, way: str, already: bool
) -> None:
    model = finished(nn.Linear(64, 16), nn.Linear(64, 16)).to(dtype)
    for layer, size in zip(model, (fits, overflows), strict=True):
        layer.weight.data[0, layer.weight[0].ne(0)] = size
    model = nm.compress_(model) if already else model
    state = {name: t.clone() for name, t in model.state_dict().items()}
    said = f"layer '1' has weights of up to .*, which rounded to {values} overflow {dtype}; {way}.* first, or keep floating-point values"
    with pytest.raises(nm.RecipeError, match=said):
        nm.compress_(model, values=values)
    assert all(equal_bits(t, state[name]) for name, t in model.state_dict().items())
    layer = nm.compress_(nn.Sequential(model[0]), values=values)[0]
    assert layer.weight.kind == values and layer.dense().isfinite().all()


def test_convolutions_stay_floating_point() -> None:
    model = finished(nn.Conv2d(32, 32, 3), nn.Flatten(), nn.Linear(32, 32))
    with pytest.warns(UserWarning, match="compress_: convolutions keep floating-point values, not int8: 0"):
        nm.compress_(model, values="int8")
    assert model[0].weight.kind == "float" and model[2].weight.kind == "int8"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nm.compress_(finished(nn.Linear(32, 32)), values="int8")
    c = nm.ops.quantize_values(nm.ops.compress(torch.randn(8, 8), "2:4"))
    with pytest.raises(nm.DtypeError, match="int8 values"):
        nm.nn.CompressedConv2d(c, 1)


def test_compress_keeps_adapters_columns_and_keep_dense() -> None:
    adapter, order, x = (torch.randn(COLS, 1), torch.randn(1, ROWS)), torch.randperm(COLS), torch.randn(3, COLS)
    layer = nm.CompressedLinear(nm.ops.compress(torch.randn(ROWS, COLS), "2:4"), None, adapter=adapter, columns=order)
    before = layer(x).detach()
    nm.compress_(layer, values="int8", keep_dense=True)  # a model that is one layer, in place
    assert layer.keep_dense and layer.weight.kind == "int8"
    torch.testing.assert_close(layer(x), before, rtol=0.1, atol=0.5)
    assert (layer(x) - before).norm() < 0.02 * before.norm()
