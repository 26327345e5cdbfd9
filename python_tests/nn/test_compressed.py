"""CompressedLinear and compress_: the deployed layer equals the finished one."""

import copy
import gc
import json
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nmkernels as nm
from nmkernels.nn.compressed import is_order
from nmkernels.nn.conv import CompressedConv2d
from nmkernels.nn.experts import CompressedStack
from nmkernels.testing import assert_no_worse, equal_bits
from python_tests import naive
from python_tests.copy_model import COPY_METHODS, copy_model
from python_tests.export.editing import edited


def layer_of(dtype=torch.float32, pattern="2:4", bias=True):
    """A CompressedLinear 32 -> 16 and its dense weight and bias."""
    p = nm.Pattern(pattern)
    w = naive.masked(torch.randn(16, 32).to(dtype), p.n, p.m)
    b = torch.randn(16).to(dtype) if bias else None
    return nm.CompressedLinear(nm.ops.compress(w, p), b), w, b


def finished(*layers):
    """A model whose STE recipe is finished."""
    model = nn.Sequential(*layers)
    handle = nm.sparsify_(model, "ste:2:4")
    handle.finish(allow_unused=True)
    return model, handle


def test_equals_the_dense_layer():
    for dtype in [torch.float32, torch.bfloat16, torch.float16, torch.float64]:
        for pattern, bias in [("2:4", True), ("2:4", False), ("1:4", True), ("2:8", True), ("1:16", False), ("4:4", True)]:
            layer, w, b = layer_of(dtype, pattern, bias)
            x = torch.randn(5, 32).to(dtype)
            assert_no_worse(layer(x), F.linear(x, w, b), F.linear(x.double(), w.double(), None if b is None else b.double()))


def test_inputs_of_any_shape_and_stride():
    layer, w, b = layer_of()
    for shape in [(32,), (1, 32), (0, 32), (2, 0, 32), (2, 3, 32)]:
        x = torch.randn(shape, requires_grad=True)
        layer.zero_grad()
        y = layer(x)
        y.square().sum().backward()
        torch.testing.assert_close(y, F.linear(x, w, b))
        torch.testing.assert_close(x.grad, 2 * y.detach() @ w, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(layer.bias.grad, 2 * y.detach().reshape(-1, 16).sum(0))
    for x in (torch.randn(32, 6).t(), torch.randn(1, 32).expand(6, 32), torch.randn(6, 64)[:, ::2]):
        torch.testing.assert_close(layer(x), F.linear(x, w, b))


def test_constructor_arguments():
    c, bias = nm.ops.compress(torch.randn(16, 32), "2:4"), nn.Parameter(torch.zeros(16))
    layer = nm.CompressedLinear(weight=c, bias=bias, layout="conv1d")
    assert layer.bias is bias and layer.layout == "conv1d" and layer.weight is c and layer.pattern == c.pattern
    assert (layer.in_features, layer.out_features) == (32, 16) and "pattern=2:4" in repr(layer) and "layout=conv1d" in repr(layer)
    other = nm.CompressedLinear(c, torch.zeros(16))
    assert isinstance(other.bias, nn.Parameter) and other.layout == "linear" and nm.CompressedLinear(c).bias is None
    kept = nm.CompressedLinear(c, torch.zeros(16), keep_dense=True)
    assert kept.state_dict().keys() == other.state_dict().keys() and "keep_dense=True" in repr(kept) and "keep_dense" not in repr(other)
    for arguments, said in [
        ((c, None, "rows"), "layout 'rows'"),
        ((c, torch.zeros(4)), r"bias has shape \(4,\)"),
        ((nm.ops.compress(torch.randn(2, 4, 8), "2:4"),), "must be a matrix"),
    ]:
        with pytest.raises(nm.ShapeError, match=said):
            nm.CompressedLinear(*arguments)


def test_dtypes_and_autocast():
    layer, w, b = layer_of()
    x = torch.randn(4, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y, y2 = layer(x), layer(x.detach().bfloat16())
        cast = layer.weight.layout("torch.bfloat16", lambda c: pytest.fail("the weight is cast once"))
    assert y.dtype == torch.bfloat16 and torch.equal(y, y2) and cast.values.dtype == torch.bfloat16
    bf = [t.bfloat16() for t in (x.detach(), w, b)]
    assert_no_worse(y, F.linear(*bf), F.linear(*(t.double() for t in bf)))
    y.sum().backward()
    assert x.grad.dtype == layer.bias.grad.dtype == torch.float32 and layer.values.dtype == torch.float32
    with pytest.raises(nm.DtypeError, match=r"x is torch.bfloat16.*torch.float32.*autocast"):
        layer(torch.randn(2, 32).bfloat16())
    wide, w, b = layer_of(torch.float64)
    x = torch.randn(4, 32, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(wide(x), F.linear(x, w, b))
        for wrong in (torch.ones(2, 32, dtype=torch.int64), torch.ones(2, 32)):
            with pytest.raises(nm.DtypeError):
                wide(wrong)


def test_casts_and_copies():
    layer, w, _ = layer_of()
    for how in COPY_METHODS:
        other = copy_model(layer, how)
        other.values.zero_()
        assert equal_bits(layer.weight.dense(), w) and not other.weight.dense().any() and other.weight.values is other.values
    layer.to(torch.bfloat16)
    assert layer.weight.values is layer.values and layer.bias.dtype == torch.bfloat16 and layer.indices.dtype == torch.uint8
    assert equal_bits(layer.weight.dense(), w.to(torch.bfloat16))


@pytest.mark.parametrize("kind", [nm.CompressedLinear, CompressedConv2d, CompressedStack])
def test_type_casts_values_only(kind):
    layer = made_of(kind, nm.ops.compress(torch.randn(12, 16), "2:4"))
    if kind is nm.CompressedLinear:
        layer.register_buffer("columns", torch.randperm(16).int())
    held = {name: t.clone() for name, t in layer.named_buffers()}
    want = layer.dense().half()
    assert layer.type(torch.float16) is layer and equal_bits(layer.dense(), want) and layer.dtype == torch.float16
    for name, t in layer.named_buffers():
        assert name == "values" or (equal_bits(t, held[name]) and t.dtype == held[name].dtype)


def test_a_state_dict_without_values_misses_them():
    layer, w, _ = layer_of()
    assert set(layer.load_state_dict({}, strict=False).missing_keys) == {"values", "indices", "bias"}
    assert equal_bits(layer.weight.dense(), w)


def made_of(kind, weight):
    """A layer of ``kind`` with ``weight``, a matrix."""
    return kind(weight, *{CompressedConv2d: (1,), CompressedStack: (2,)}.get(kind, ()))


@pytest.mark.parametrize("kind", [nm.CompressedLinear, CompressedConv2d, CompressedStack])
@pytest.mark.parametrize(("theirs", "own"), [("1:2", "2:4"), ("2:4", "1:2"), ("4:8", "8:16"), ("1:8", "2:16"), ("3:6", "4:8")])
def test_a_state_dict_of_another_pattern_is_refused(kind, theirs, own):
    source, layer = (made_of(kind, nm.ops.compress(torch.randn(4, 96), pattern)) for pattern in (theirs, own))
    state, held = source.state_dict(), {name: t.clone() for name, t in layer.named_buffers()}
    assert state["indices"].shape == layer.indices.shape, "otherwise torch refuses it"
    for options in ({}, {"strict": False}, {"assign": True}):
        with pytest.raises(RuntimeError, match=f"0.indices do not fit the pattern {own} of this layer .*: build a model with the pattern"):
            nn.Sequential(layer).load_state_dict({f"0.{name}": t for name, t in state.items()}, **options)
        assert all(equal_bits(t, held[name]) for name, t in layer.named_buffers())


@pytest.mark.parametrize("pattern", ["1:1", "2:3", "2:4", "4:4", "3:6", "1:8", "4:8", "8:16", "4:32"])
@pytest.mark.parametrize("kind", [nm.CompressedLinear, CompressedConv2d, CompressedStack])
def test_state_dicts_of_the_same_pattern_load(kind, pattern):
    w = torch.randn(4, 96)
    full = nm.ops.compress(w, pattern)
    few = nm.ops.compress(w, pattern, mask=(torch.rand(4, 96) < 0.3) & (full.dense() != 0))  # groups with fewer than N weights
    n, m = full.pattern.n, full.pattern.m
    wide = nm.ops.compress(F.pad(w, (0, -96 % m + m)), pattern)
    short = nm.ops.Compressed(wide.values, wide.indices, wide.pattern, (4, wide.shape[1] - m + n))  # the last group has N columns
    for weight in (full, few) if kind is CompressedConv2d else (full, few, short, nm.ops.quantize_values(full)):
        source = made_of(kind, weight)
        layer = copy.deepcopy(source).to("meta")
        layer.load_state_dict(layer.state_dict())
        layer.load_state_dict(source.state_dict(), assign=True)
        assert equal_bits(layer.dense(), source.dense())
        layer.load_state_dict(copy.deepcopy(layer).to("meta").state_dict(), assign=True)
        assert layer.values.is_meta


def test_compile_equals_eager():
    for autocast in [False, True]:
        layer, _, _ = layer_of()
        compiled = torch.compile(copy.deepcopy(layer), fullgraph=True, backend="aot_eager")
        results = []
        for one in (layer, compiled):
            x = torch.ones(3, 32, requires_grad=True)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                y = one(x)
            y.float().square().sum().backward()
            results.append([y.detach(), x.grad])
        torch.testing.assert_close(*results)


# ---- inputs in another order

ORDER = torch.randperm(16, generator=torch.Generator().manual_seed(0))


def reordered(columns=ORDER, **keywords):
    weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    bias = torch.randn(8, generator=torch.Generator().manual_seed(2))
    return nm.CompressedLinear(nm.ops.compress(weight, "2:4"), bias, columns=columns, **keywords)


def dense_of(made):
    """The weight for inputs in their own order, column by column."""
    packed, dense = made.weight.dense(), torch.zeros(8, 16)
    for j, k in enumerate(ORDER.tolist()):
        dense[:, k] = packed[:, j]
    return dense


def test_gemm_with_reordered_inputs():
    for tokens in [1, 3, 70]:
        for keep_dense in [False, True]:
            made = reordered(keep_dense=keep_dense)
            x = torch.randn(2, tokens, 16)
            assert torch.equal(made.dense(), dense_of(made))
            torch.testing.assert_close(made(x), x @ dense_of(made).t() + made.bias)
            assert torch.equal(made(x), reordered(None)(x[..., ORDER])), "the very same as reordering by hand"
            assert torch.equal(reordered(None).dense(), reordered(None).weight.dense())
    left, right = torch.randn(16, 2), torch.randn(2, 8)
    torch.testing.assert_close(reordered(adapter=(left, right))(x), made(x) + x @ left @ right / 2)


def test_life_of_a_layer_with_reordered_inputs():
    made, x = reordered(), torch.randn(3, 16)
    assert "inputs reordered" in repr(made) and "inputs reordered" not in repr(reordered(None))
    other = reordered(ORDER.flip(0))
    other.load_state_dict(made.state_dict())
    assert torch.equal(other(x), made(x))
    double = copy.deepcopy(made).to(torch.float64)
    assert double.columns.dtype == torch.int32
    torch.testing.assert_close(double(x.double()).float(), made(x))


def test_invalid_orders():
    for columns in [torch.arange(15), torch.zeros(16, dtype=torch.int64), torch.arange(1, 17), torch.arange(16).float(), ORDER[None]]:
        assert not is_order(columns, 16)
        with pytest.raises(nm.ShapeError, match="permutation of the 16 inputs"):
            reordered(columns)


def announce(about):
    layers = json.loads(about["layers"])
    del layers["0"]["columns"]
    about["layers"] = json.dumps(layers)


def test_damaged_files_of_reordered_inputs(tmp_path):
    for change, said in [
        (lambda t, m: t.pop("0.columns"), "the file lacks its columns"),
        (lambda t, m: announce(m), "does not announce its columns"),
        (lambda t, m: t["0.columns"].zero_(), "not a permutation of 16; the file is damaged"),
        (lambda t, m: t.update({"0.columns": torch.arange(8)}), r"columns torch.int64 \(8,\)"),
    ]:
        nm.save_compressed(nn.Sequential(reordered()), tmp_path / "m.safetensors")
        with pytest.raises(nm.CheckpointError, match=said):
            nm.load_compressed(nn.Sequential(nn.Linear(16, 8)), edited(tmp_path / "m.safetensors", change))


# ---- compress_


def test_compress_keeps_outputs_bias_mode_and_frees_the_weights():
    shared = nn.Linear(32, 32)
    model, handle = finished(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32, bias=False), shared, shared)
    model[0].bias.requires_grad_(False)
    model[2].eval()
    x, bias, weight = torch.randn(4, 32), model[0].bias, weakref.ref(model[0].weight)
    before = model(x).detach()
    assert nm.compress_(model) is model
    torch.testing.assert_close(model(x), before)
    assert type(model[0]) is type(model[2]) is type(model[3]) is nm.CompressedLinear
    assert model[0].bias is bias and model[2].bias is None and model[3] is model[4]
    assert not bias.requires_grad and model[0].training and not model[2].training
    del handle
    gc.collect()
    assert weight() is None


def test_compress_carries_hooks_over():
    model, _ = finished(nn.Linear(32, 16))
    seen = []
    hooks = [
        model[0].register_forward_pre_hook(lambda m, args: seen.append("pre")),
        model[0].register_forward_hook(lambda m, args, kwargs, y: seen.append("post"), with_kwargs=True),
        model[0].register_full_backward_hook(lambda m, gi, go: seen.append("back")),
        model[0].register_full_backward_pre_hook(lambda m, go: seen.append("before")),
    ]
    nm.compress_(model)
    model(torch.randn(2, 32, requires_grad=True)).sum().backward()
    assert seen == ["pre", "post", "before", "back"]
    for hook in hooks:
        hook.remove()
    model(torch.randn(2, 32))
    assert len(seen) == 4


def test_compress_refuses_and_changes_nothing():
    training = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16))
    nm.sparsify_(training, "ste:2:4")
    changed, _ = finished(nn.Linear(32, 32), nn.Linear(32, 16))
    with torch.no_grad():
        changed[1].weight.add_(1.0)
    bare = nm.SparseLinear(32, 16)
    bare.finished = True
    for model, said in [
        (training, r"'0' is still in training.*finish"),
        (changed, r"'1'.*changed after finish"),
        (nn.Sequential(nn.Linear(32, 32)), "no SparseLinear"),
        (bare, "itself is one sparse layer"),
    ]:
        kinds = [type(m) for m in model.modules()]
        with pytest.raises(nm.RecipeError, match=said):
            nm.compress_(model)
        assert [type(m) for m in model.modules()] == kinds


@pytest.mark.parametrize("values", [None, "int8", "int4"])
@pytest.mark.parametrize("columns", [12, 15, 17])
def test_an_input_of_another_width_is_refused_without_gradients_too(values, columns):
    model = nn.Sequential(nn.Linear(16, 8))
    nm.sparsify_(model, "ste:2:4", filter_fn=lambda name, layer: True).finish(allow_unused=True)
    nm.compress_(model, values=values)
    for grad in (False, True):
        with torch.set_grad_enabled(grad), pytest.raises(nm.ShapeError, match="must be 16"):
            model(torch.randn(2, columns))
