"""SparseLinear: an nn.Linear in everything but the weight that it multiplies."""

import math
import warnings
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nmkernels as nm
from nmkernels.nn.sharding import HOOKS, Gather
from nmkernels.testing import equal_bits
from python_tests import naive


def reference(layer, x, n=2, m=4):
    """The same layer in plain torch, its gradients passed straight through: (y, grads of x, weight, bias for y.square().sum())."""
    x = x.detach().requires_grad_()
    used = naive.masked(layer.weight, n, m).requires_grad_()
    bias = None if layer.bias is None else layer.bias.detach().requires_grad_()
    y = F.linear(x, used, bias)
    return y, torch.autograd.grad(y.square().sum(), [t for t in (x, used, bias) if t is not None])


def test_forward_and_straight_through_gradients():
    shapes = [(3, 5, 32), (32,), (0, 32), (2, 0, 32), (1, 32)]
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    inputs += [inputs[0].transpose(0, 1), inputs[-1].expand(6, 32), torch.randn(6, 64, dtype=torch.float64)[:, ::2]]
    cases = [(True, "2:4", x) for x in inputs] + [(bias, p, inputs[0]) for bias in (True, False) for p in ("1:4", nm.Pattern("2:8"), "4:4")]
    for bias, pattern, given in cases:
        layer, p = nm.SparseLinear(32, 16, bias=bias, pattern=pattern, dtype=torch.float64), nm.Pattern(pattern)
        if not given.is_contiguous():
            layer.weight = nn.Parameter(torch.randn(32, 16, dtype=torch.float64).t())
        x = given.detach().requires_grad_()
        want, grads = reference(layer, x, p.n, p.m)
        y = layer(x)
        y.square().sum().backward()
        got = [x.grad, layer.weight.grad] + ([layer.bias.grad] if bias else [])
        torch.testing.assert_close([y, *got], [want, *grads], rtol=1e-12, atol=1e-12)


def test_every_constructor_argument():
    layer = nm.SparseLinear(in_features=8, out_features=4, bias=False, pattern="1:4", device="meta", dtype=torch.bfloat16)
    assert (layer.in_features, layer.out_features, layer.bias) == (8, 4, None)
    assert layer.pattern == nm.Pattern("1:4") and layer.weight.device.type == "meta" and layer.weight.dtype == torch.bfloat16
    assert nm.SparseLinear(8, 4).pattern == nm.Pattern("2:4") and nm.SparseLinear(8, 4).bias.shape == (4,)
    assert layer(torch.empty(3, 8, device="meta", dtype=torch.bfloat16)).shape == (3, 4)
    layers = []
    for kind in (nm.SparseLinear, nn.Linear):
        torch.manual_seed(1)
        layers.append(kind(16, 8))
    assert isinstance(layers[0], nn.Linear) and equal_bits(*(dict(layer.state_dict()) for layer in layers)), "it starts as nn.Linear does"


def test_wrong_pattern_size_or_dtype():
    with pytest.raises(nm.PatternError):
        nm.SparseLinear(16, 8, pattern="4:2")
    with pytest.raises(nm.ShapeError, match=r"in_features is 18.*M=4.*Pad it to 20"):
        nm.SparseLinear(18, 8)
    for dtype in [torch.int32, torch.complex64]:
        layer = nm.SparseLinear(8, 4)
        layer.weight = nn.Parameter(torch.ones(4, 8).to(dtype), requires_grad=False)
        with pytest.raises(nm.DtypeError, match=str(dtype)):
            layer(torch.ones(1, 8))


def test_mask_from_master_weight():
    # four weights that are one number in bf16: only the fp32 master knows the order, and rounding first would keep 0 and 1
    eps = 2.0**-12
    layer = nm.SparseLinear(16, 1, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 1 + eps, 1 + 2 * eps, 1 + 3 * eps]] * 4).reshape(1, 16))
    assert layer.weight.bfloat16().unique().numel() == 1
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(torch.eye(16))
    assert torch.equal(y.flatten() != 0, torch.tensor([False, False, True, True] * 4)) and y.dtype == torch.bfloat16


def test_autocast_dtypes():
    for dtype in [torch.bfloat16, torch.float16]:
        layer, x = nm.SparseLinear(32, 16), torch.randn(4, 32, requires_grad=True)
        dense = nn.Linear(32, 16)
        dense.load_state_dict({"weight": naive.masked(layer.weight, 2, 4), "bias": layer.bias.detach()})
        x2 = x.detach().requires_grad_()
        with torch.autocast("cpu", dtype):
            y, y2 = layer(x), dense(x2)
        assert y.dtype == y2.dtype == dtype and torch.equal(y, y2)
        y.float().square().sum().backward()
        y2.float().square().sum().backward()
        for a, b in ((x, x2), (layer.weight, dense.weight), (layer.bias, dense.bias)):
            assert a.grad.dtype == torch.float32
            torch.testing.assert_close(a.grad, b.grad, rtol=2e-2, atol=2e-2)
        narrow, x = layer.to(dtype), x.detach().to(dtype)
        assert torch.equal(narrow(x), F.linear(x, naive.masked(narrow.weight, 2, 4), narrow.bias))


def test_autocast_leaves_float64_and_disabled_regions_alone():
    layer, x = nm.SparseLinear(32, 16).double(), torch.randn(4, 32, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
        assert y.dtype == torch.float64 and torch.equal(y, F.linear(x, naive.masked(layer.weight, 2, 4), layer.bias))
        with torch.autocast("cpu", enabled=False):
            assert layer.float()(x.float()).dtype == torch.float32
        for wrong in (x, torch.ones(4, 32, dtype=torch.int64)):
            with pytest.raises((RuntimeError, nm.DtypeError)):  # as nn.Linear: autocast casts neither of them
                layer(wrong)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_equals_eager(backend):
    layer, x = nm.SparseLinear(32, 16), torch.randn(4, 32)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for run in (compiled, layer):
        run(x).square().mean().backward()
    torch.testing.assert_close(layer.weight.grad / 2, reference(layer, x)[1][1] / 64, rtol=1e-5, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        assert backend == "inductor" or equal_bits(compiled(x), layer(x))


def test_repr_tells_pattern_and_use():
    layer = nm.SparseLinear(8, 4)
    texts = [repr(layer)]
    layer.transform = None
    texts.append(repr(layer))
    layer.finished = True
    texts.append(repr(layer))
    assert all("pattern=2:4" in t and "in_features=8" in t for t in texts)
    assert all(a != b for a, b in pairwise(texts)) and texts[2].endswith("uses=finished)")


def finished(columns=None):
    """A layer as ``handle.finish()`` leaves it."""
    layer = nm.SparseLinear(32, 256)
    layer.use(None, layer.plan)
    weight = nm.ops.prune(layer.weight.detach(), "2:4")
    with torch.no_grad():
        layer.weight.copy_(weight if columns is None else weight[:, columns.argsort()])
    layer.finished, layer.columns, layer.adapts = True, columns, True
    return layer


def merge(layer):
    """What ``merge_and_unload`` of PEFT does: no version is bumped, and no method of the layer called."""
    layer.weight.data += torch.randn(256, 4) @ torch.randn(4, 32)


def finds(layer, act):
    """What ``act`` warns of."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        act(layer)
    return [str(w.message) for w in found]


def test_a_merged_lora_does_not_lose_the_pattern_in_silence():
    for act in (nn.Module.eval, nn.Module.state_dict, nm.nn.swap.make_dense_, lambda layer: nn.Sequential(layer).eval()):
        for columns in (None, torch.randperm(32)):
            assert finds(finished(columns=columns), act) == []
            layer = finished(columns=columns)
            merge(layer)
            (message,) = finds(layer, act)
            assert message.startswith("SparseLinear (256, 32) (out, in): the weight was 2:4 when the recipe finished and is not any more")
            assert "nm.nn.adapter.set_adapter" in message and "densify_" in message


def test_only_a_finished_layer_is_checked():
    training = nm.SparseLinear(32, 256)
    assert finds(training, nn.Module.eval) == finds(training, nn.Module.state_dict) == []
    layer = finished()
    merge(layer)
    assert finds(layer, nn.Module.train) == [], "a training loop calls it at every step"
    assert finds(layer.to("meta"), nn.Module.eval) == []


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_many_rows_are_sampled_from_first_to_last(monkeypatch):
    seen = []
    monkeypatch.setattr("nmkernels.nn.weight.is_nm", lambda rows, pattern: not seen.append(rows))
    for out in (0, 1, 64, 65, 200, 1000):
        layer = nm.SparseLinear(32, out)
        layer.finished = True
        layer.eval()
        rows, step = seen.pop(), max(1, math.ceil(out / 64))
        assert torch.equal(rows, layer.weight.detach()[::step]) and len(rows) <= 64 and not seen


def test_the_advice_for_a_lora_keeps_pattern_and_result():
    layer, x = finished(), torch.randn(3, 32)
    a, b, r, scaling = torch.randn(4, 32), torch.randn(256, 4), 4, 1.5
    want = layer(x) + scaling * x @ a.t() @ b.t()
    nm.nn.adapter.set_adapter(layer, a.t(), r * scaling * b.t(), 256, 32)
    model = nn.Sequential(layer)
    assert finds(model, nn.Module.eval) == [] and nm.ops.is_nm(layer.weight.detach(), "2:4")
    for one in (model, nm.compress_(model)):
        torch.testing.assert_close(one(x), want, rtol=1e-4, atol=1e-4)


@pytest.fixture
def mesh():
    """The second of two ranks, of which the other is not there."""
    if not torch.distributed.is_available():
        pytest.skip("torch is built without distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield init_device_mesh("cpu", (2,))
    torch.distributed.destroy_process_group()


def shared(tensor, mesh, shard=None):
    """``tensor`` as a DTensor, replicated, or this rank's half of its rows."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    return DTensor.from_local(tensor, mesh, [Replicate() if shard is None else Shard(shard)], run_check=False)


def test_buffers_loaded_into_a_sharded_layer(mesh):
    layer, mask, plain = nm.SparseLinear(16, 8), torch.arange(128.0).reshape(8, 16), torch.ones(3)

    def taken(**buffers):
        layer._buffers.update(buffers)
        layer.take_buffers()
        return [layer._buffers[name] for name in buffers]

    whole, number, same = taken(nm_mask=shared(mask, mesh), nm_beta=shared(torch.tensor(2.0), mesh), nm_other=plain)
    assert type(whole) is type(number) is torch.Tensor and torch.equal(whole, mask) and number == 2 and same is plain
    layer.weight = nn.Parameter(shared(layer.weight.detach()[4:], mesh, 0))
    part, number = taken(nm_mask=shared(mask, mesh), nm_beta=shared(torch.tensor(2.0), mesh))
    assert type(part) is torch.Tensor and torch.equal(part, mask[4:]) and number == 2


def test_fsdp_hooks_survive_loading_by_assignment(mesh):
    layer = nm.SparseLinear(16, 8)
    param = SimpleNamespace(offload_to_cpu=False, all_gather_outputs=None, _init_extensions=lambda: None)
    layer.adopt_parameter()
    assert layer.gather is None, "a whole weight is not gathered"
    for rows in (layer.weight.detach()[4:], torch.randn(4, 16)):
        layer.weight = nn.Parameter(shared(rows, mesh, 0))
        if layer.gather is None:
            layer.gather = Gather(layer, param)  # as attach does
        layer.adopt_parameter()
        assert layer.gather.parameter is layer.weight
        assert [getattr(layer.weight._local_tensor, name) for name in HOOKS] == [getattr(layer.gather, name) for name in HOOKS]
    layer.detach()
    assert layer.gather is None and not any(hasattr(layer.weight._local_tensor, name) for name in HOOKS)
