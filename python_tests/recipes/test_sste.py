"""S-STE: against the independent loop, its scale, its random streams, emulated FP8, and what it refuses."""

import copy
import json

import pytest
import torch
from torch import nn

import nmkernels as nm
from nmkernels import reference
from nmkernels.optim import MaskedAdamW
from nmkernels.recipes import SSTE
from nmkernels.recipes.contract import stream_key
from python_tests.for_each import for_each
from python_tests.recipes.loop import SPARSE, batches, loss_of, mlp, snapshot
from python_tests.recipes.loop_effective import soft
from python_tests.recipes.training import F32, F64, run, start, through_a_file, train

# ---- the method


def test_flip_rate_and_density():
    model, handle, optimizer = run(SSTE(mvue=None), data=batches(3))
    masks = lambda: torch.cat([nm.ops.mask(layer.weight.detach(), "2:4").flatten() for layer in handle.layers.values()])  # noqa: E731
    before = masks()
    train(model, optimizer, batches(1, seed=9))
    assert handle.metrics()["flip_rate"].item() == (before ^ masks()).double().mean() > 0
    with torch.no_grad():
        model[0].weight[:, :4] = 1.0  # all tie with the threshold: nothing is left of them
    assert handle.metrics()["density"].item() == 0.5 - 2 * 32 / before.numel()


# ---- the scale


def test_scale_is_that_of_the_weight_at_attach_and_frozen():
    model = mlp()
    handle = nm.sparsify_(model, SSTE())
    nn.init.uniform_(model[0].weight)
    first = {k: (w * soft(w, 2, 4)).sum() / soft(w, 2, 4).square().sum() for k, w in snapshot(model).items() if k in SPARSE}
    train(model, handle.attach(MaskedAdamW(model.parameters())), batches(5))
    for k in SPARSE:
        assert float(model.get_submodule(k[0]).nm_scale) == pytest.approx(float(first[k]), rel=1e-12)
    assert {k for k in model.state_dict() if "nm_" in k} == {"0.nm_scale", "2.nm_scale"}


@pytest.mark.parametrize("assign", [False, True])
def test_dense_checkpoint_renews_the_scale(assign):
    model, other = start(SSTE())[0], mlp(seed=7)
    with torch.no_grad():
        other[0].weight.pow_(3)
    model.load_state_dict(copy.deepcopy(other.state_dict()), assign=assign)
    for i in (0, 2):
        assert float(model[i].nm_scale) == float(nm.ops.soft_threshold_scale(other[i].weight.detach(), "2:4"))
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({k: v for k, v in other.state_dict().items() if k != "0.bias"})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_scale_is_not_rounded_with_the_model(dtype):
    model, _, _ = start(SSTE(), F32)
    scales = [model[i].nm_scale.clone() for i in (0, 2)]
    model.to(dtype)
    assert all(torch.equal(model[i].nm_scale, scale) and scale.dtype == F32 for i, scale in zip((0, 2), scales, strict=True))
    model.double().to(dtype)
    assert all(torch.equal(model[i].nm_scale, scale) for i, scale in zip((0, 2), scales, strict=True)) and model[0].weight.dtype == dtype
    again = model.to("meta").to_empty(device="cpu")
    assert again[0].nm_scale.dtype == F32 and not again[0].nm_scale.is_meta


def test_weight_without_a_scale():
    model = mlp()
    nn.init.zeros_(model[2].weight)
    handle = nm.sparsify_(model, SSTE(), lambda module, name: name == "0")
    nn.init.ones_(model[0].weight)  # ties everywhere
    with pytest.raises(nm.RecipeError, match="attach: layer '0'"):
        handle.attach(MaskedAdamW(model.parameters()))
    with pytest.raises(RuntimeError, match=r"layer '0'.*all zero"):
        model.load_state_dict(mlp().state_dict() | {"0.weight": torch.zeros(32, 16)})


def test_meta_device_then_weights():
    with torch.device("meta"):
        model = mlp()
    handle = nm.sparsify_(model, SSTE())
    model.to_empty(device="cpu")
    model.load_state_dict(mlp().state_dict())
    handle.attach(MaskedAdamW(model.parameters()))
    assert float(model[0].nm_scale) == float(nm.ops.soft_threshold_scale(mlp()[0].weight.detach(), "2:4")) and model[0].seed.any()


# ---- the random streams


def test_random_streams():
    model, handle, optimizer = start(SSTE(seed=5))
    assert len({stream_key(s, n, r) for s in (0, 1) for n in ("0", "2") for r in (0, 1)}) == 8
    x, y = batches(1)[0]
    for xs, ys in zip(x.chunk(3), y.chunk(3), strict=True):
        loss_of(model, (xs, ys)).backward()
    with torch.no_grad():
        model(x)
    saved = json.loads(optimizer.state_dict()["param_groups"][0]["nm_recipe"])["streams"]
    for name in ("0", "2"):
        assert handle.state["streams"][name].tolist() == saved[name]["values"] == [stream_key(5, name, 0), 3]


def test_a_layer_that_runs_twice_draws_twice():
    model, _, _ = start(SSTE(seed=5))
    layer, x = model[2], torch.randn(8, 32, dtype=F64)
    g = torch.randn(8, 32, dtype=F64)
    key = int(layer.seed[0])
    (layer(x) + layer(x)).backward(g)
    draws = [reference.mvue(g, 2, 4, 0, torch.tensor([key, i])) for i in (0, 1)]
    torch.testing.assert_close(layer.weight.grad, sum(d.T @ x for d in draws), rtol=1e-12, atol=1e-12)


def test_seed_none_follows_torch_and_draws_nothing_from_it():
    torch.manual_seed(9)
    want = torch.rand(3)
    model = mlp()
    torch.manual_seed(9)
    handle = start(SSTE(), model=model)[1]
    assert handle.state["seed"] == 9 and torch.equal(torch.rand(3), want)


def test_a_resumed_run_may_begin_to_estimate():
    model, _, optimizer = start(SSTE(mvue=None))
    train(model, optimizer, batches(2))
    again, handle, theirs = start(SSTE(seed=5), seed=3)
    again.load_state_dict(model.state_dict())
    theirs.load_state_dict(*through_a_file(optimizer.state_dict()))
    assert handle.layers["0"].seed.tolist() == [stream_key(5, "0", 0), 0]
    train(again, theirs, batches(1, seed=4))
    assert handle.layers["0"].seed.tolist() == [stream_key(5, "0", 0), 1]


def test_checkpoint_of_another_rank_continues_this_ranks_streams(monkeypatch):
    model, _, optimizer = start(SSTE(seed=5))
    train(model, optimizer, batches(2))
    (saved,) = through_a_file(optimizer.state_dict())
    monkeypatch.setattr("nmkernels.train.parts.own_rank", lambda: 1)
    _, again, theirs = start(SSTE(seed=8))
    theirs.load_state_dict(saved)
    assert again.layers["0"].seed.tolist() == [stream_key(5, "0", 1), 2], "the run's seed is the checkpoint's, the rank is ours"
    with pytest.raises(nm.CheckpointError, match="streams belong to other layers"):
        again.load_state_dict({"nm_recipe": {**again.state_dict()["nm_recipe"], "streams": {"0": torch.zeros(2, dtype=torch.int64)}}})


# ---- FP8


def rounded(x, kind):
    dtype, largest = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}[kind]
    scale = largest / x.abs().max()
    return (x * scale).to(dtype).to(x.dtype) / scale


@pytest.mark.parametrize("scheme", ["paper", "hybrid"])
@pytest.mark.parametrize("mvue", [None, "exact"])
def test_fp8_gemms_by_hand(scheme, mvue):
    model, _, _ = start(SSTE(mvue=mvue, fp8=scheme, seed=1))
    layer, x, g = model[0], torch.randn(8, 16, dtype=F64, requires_grad=True), torch.randn(8, 32, dtype=F64)
    key, used = layer.seed[0].clone() if mvue else None, layer.effective_weight()
    y = layer(x)
    y.backward(g)
    estimate = reference.mvue(g, 2, 4, 0, torch.stack([key, torch.tensor(0)])) if mvue else g
    other = "e5m2" if scheme == "paper" else "e4m3"
    a = x.detach()
    torch.testing.assert_close(y, rounded(a, "e4m3") @ rounded(used, "e4m3").T + layer.bias, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(x.grad, rounded(g, "e5m2") @ rounded(used, other), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(layer.weight.grad, rounded(estimate, "e5m2").T @ rounded(a, other), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fp8_of_16_bit_operands_and_of_zeros(dtype):
    layer = nn.Sequential(nn.Linear(32, 16)).to(dtype)
    nm.sparsify_(layer, SSTE(fp8="paper"))
    x = torch.randn(8, 32, dtype=dtype, requires_grad=True)
    y = layer(x)
    y.backward(torch.zeros_like(y))
    assert y.dtype == x.grad.dtype == layer[0].weight.grad.dtype == dtype
    assert not x.grad.any() and not layer[0].weight.grad.any() and torch.isfinite(y).all()


@for_each("fp8", [None, "paper"])
def test_deployed_weight_equals_trained_except_fp8(fp8):
    model, handle, _ = run(SSTE(fp8=fp8), data=batches(2))
    x = batches(1)[0][0]
    trained = model(x)
    with handle.deployable():
        deployed = model(x)
    assert torch.equal(model(x), trained) and (0 < (deployed - trained).abs().max() < 0.5 if fp8 else torch.equal(deployed, trained))
    handle.finish()
    assert torch.equal(model(x), deployed)
