"""The life of the effective weight, dense and packed: made once per optimizer step. That it is never stale: recipes/test_never_stale.py."""

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import nmkernels as nm
from nmkernels.autograd import GemmPlan, HardMask
from nmkernels.gemm.route import route
from nmkernels.optim import MaskedAdamW
from nmkernels.recipes.contrib.bimask import BiMasked
from python_tests import naive
from python_tests.copy_model import COPY_METHODS, copy_model

P24 = nm.Pattern("2:4")
DENSE, PACKED, PACKED_SSTE = "srste:2:4(packed=False)", "srste:2:4(packed=True)", "sste:2:4(packed=True)"
HELD = "fst:2:4(packed=True, end=None, every=2)"
MIXED = GemmPlan(fprop="packed", dgrad="dense", n=2, m=4)
BOTH_WAYS = GemmPlan(fprop="packed", dgrad="columns", n=2, m=4)


class Calls(TorchDispatchMode):
    """Counts calls of the package's operations by name."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name().startswith("nmkernels::nm_"):
            self.names.append(func.name().removeprefix("nmkernels::nm_"))
        return func(*args, **(kwargs or {}))

    @property
    def packs(self):
        return sum(name.removesuffix("_out") in ("pack", "compress") for name in self.names)

    @property
    def dense(self):
        """Transformations into the dense layout."""
        return sum(name.removesuffix("_out") in ("prune", "soft_threshold") for name in self.names)


def model_of(make=torch.optim.AdamW, recipe=DENSE, plan=None):
    """A one-layer model, its layer, and the attached optimizer (None: not attached)."""
    model = nn.Sequential(nn.Linear(32, 16))
    handle = nm.sparsify_(model, recipe)
    optimizer = handle.attach(make(model.parameters(), lr=0.05)) if make else None
    if plan is not None:
        model[0].use(model[0].transform, plan)
    return model, model[0], optimizer


def fused(params, lr):
    return torch.optim.AdamW(params, lr=lr, fused=True)


def right(layer):
    """Whether the layer would multiply the mask of the weight that it has now."""
    return torch.equal(layer.effective_weight(), naive.masked(layer.weight, 2, 4))


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.randn(4, 32)).square().sum().backward()
    optimizer.step()


def every_kind_of_forward(model, x, autocast=False):
    """Seven calls."""
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        model(x).sum().backward()
        for reentrant in (False, True):
            checkpoint(model, x, use_reentrant=reentrant).sum().backward()
        with torch.no_grad():
            model(x)
        model.eval()
        with torch.inference_mode():
            model(x)
        model.train()


@pytest.mark.parametrize(
    ("recipe", "plan", "packs", "dense"),
    [(DENSE, None, 0, 1), (PACKED, None, 1, 0), (PACKED_SSTE, None, 1, 0), (HELD, None, 1, 0), (PACKED, MIXED, 1, 1)],
)
def test_one_effective_weight_per_step(recipe, plan, packs, dense):
    for autocast in [False, True]:
        for make in [torch.optim.AdamW, fused, torch.optim.SGD, MaskedAdamW]:
            model, layer, optimizer = model_of(make, recipe, plan)
            x = torch.randn(4, 32, requires_grad=True)
            for _ in range(4):
                with Calls() as calls:
                    every_kind_of_forward(model, x, autocast)
                assert (calls.packs, calls.dense, calls.names.count("linear")) == (packs, dense, 7 * packs)
                assert len(layer.effective.copies) == packs + dense
                optimizer.step()


@pytest.mark.parametrize(("recipe", "plan"), [(DENSE, None), (PACKED, None), (PACKED_SSTE, None), (HELD, BOTH_WAYS)])
def test_after_a_step_the_next_copy_takes_the_memory_of_the_last(recipe, plan):
    for make in [torch.optim.AdamW, fused, MaskedAdamW]:
        model, layer, optimizer = model_of(make, recipe, plan)
        addresses = set()
        for _ in range(4):
            step(model, optimizer)
            model(torch.randn(1, 32))
            (form,) = layer.effective.copies
            addresses.add(tuple(t.data_ptr() for t in ([form] if plan is None and recipe == DENSE else form.buffers()) if t is not None))
        assert len(addresses) == 1


def test_both_orientations_come_of_one_call():
    model, layer, optimizer = model_of(recipe=HELD, plan=BOTH_WAYS)
    x = torch.randn(4, 32, requires_grad=True)
    for _ in range(3):
        with Calls() as calls:
            every_kind_of_forward(model, x)
        assert calls.packs == 1 and calls.names.count("linear") == 7 + 3 and "linear_dgrad" not in calls.names
        x.grad = None
        y = model(x)
        y.backward(g := torch.randn_like(y))
        torch.testing.assert_close(x.grad, g @ (layer.weight * layer.nm_mask))
        optimizer.step()


def test_calls_with_different_forms_share_packing():
    _, layer, optimizer = model_of(recipe=HELD)
    source = layer.master, layer.transform, layer._extras(layer.transform), torch.float32
    for k in range(3):
        with Calls() as calls:
            for _ in range(3):
                assert layer.effective.forms(source, rows=True)[1].rows is not None
                assert layer.effective.forms(source, columns=True)[1].columns is not None
        assert calls.packs == (2 if k == 0 else 1)
        layer.weight.grad = torch.randn_like(layer.weight)
        optimizer.step()


def test_a_separate_dgrad_weight_stays_dense():
    plan, w, x = GemmPlan("packed", "device", n=2, m=4), torch.randn(16, 32), torch.randn(4, 32, requires_grad=True)
    assert route(plan, HardMask(P24), w, w.dtype, x).dgrad == "packed" and route(plan, BiMasked(P24), w, w.dtype, x).dgrad == "dense"
    model, layer, _ = model_of(None, PACKED)
    layer.use(BiMasked(P24, draws=0), plan)
    layer.nm_order = torch.arange(16)
    model(x).sum().backward()
    used = naive.masked(layer.weight, 2, 4)
    back = layer.transform.for_dgrad(used, layer.nm_order)
    torch.testing.assert_close(x.grad, back.sum(0).expand(4, 32))
    assert not torch.equal(back, used)


def test_without_an_optimizer_nothing_is_cached():
    for recipe, plan, forward, evaluation in [
        (DENSE, None, ["prune"], ["prune"]),
        (PACKED, None, ["compress", "linear"], ["compress", "linear"]),
        (PACKED, MIXED, ["compress", "linear", "prune"], ["compress", "linear"]),
    ]:
        model, layer, _ = model_of(None, recipe, plan)
        # the form that dgrad reads is made where x gets a gradient
        for grad, of_x, names in ((True, True, forward), (False, True, evaluation), (True, False, evaluation), (True, True, forward)):
            with Calls() as calls, torch.set_grad_enabled(grad):
                y = model(torch.ones(1, 32, requires_grad=of_x))
            assert sorted(calls.names) == names and not layer.effective.copies
            torch.testing.assert_close(y, naive.masked(layer.weight, 2, 4).sum(1)[None] + layer.bias)
            layer.weight.data.mul_(torch.rand(16, 32))  # bumps no version


def test_a_replaced_parameters_optimizer_is_ignored():
    _, layer, optimizer = model_of(MaskedAdamW)
    old = layer.weight
    layer.load_state_dict({"weight": torch.randn(16, 32), "bias": torch.zeros(16)}, assign=True)
    before = layer.effective_weight().clone()
    old.grad = torch.ones_like(old)
    optimizer.step()
    assert right(layer) and torch.equal(layer.effective_weight(), before)


@pytest.mark.parametrize("kind", [torch.Tensor, nn.Parameter])
def test_functional_call_uses_the_weights_given(kind):
    _, layer, _ = model_of()
    eye, bias = torch.eye(32), torch.zeros(16)
    layer(eye)
    for _ in range(20):  # short-lived weights have one address and one version
        w = kind(torch.randn(16, 32))
        assert torch.equal(functional_call(layer, {"weight": w, "bias": bias}, (eye,)), naive.masked(w, 2, 4).t())
        del w
    assert kind is nn.Parameter or not layer.effective.copies, "only a Parameter's copy is kept"
    assert right(layer)


@pytest.mark.parametrize("how", COPY_METHODS)
def test_copies_share_nothing_and_do_not_go_stale(how):
    model, layer, optimizer = model_of()
    buffer = layer.effective_weight()
    other = copy_model(model, how)
    assert not other[0].effective.attached and not other[0].effective.copies and right(other[0])
    # an average of the weights, updated as such averages are
    with torch.no_grad():
        other(torch.randn(2, 32))
        for a, b in zip(other.parameters(), model.parameters(), strict=True):
            a.data.lerp_(b.data + 1.0, 0.5)
        assert right(other[0])
    assert layer.effective_weight() is buffer
    step(model, optimizer)
    assert right(layer) and right(other[0])


def test_evaluation_and_inference_mode_before_training():
    for mode in [torch.inference_mode, torch.no_grad]:
        for make in [None, torch.optim.AdamW]:
            model, layer, _ = model_of(make)
            with mode():
                before = model(torch.ones(1, 32))
            y = model(torch.ones(1, 32))
            y.sum().backward()
            assert torch.equal(y, before) and not layer.effective_weight().is_inference()
    with torch.inference_mode():
        model, layer, _ = model_of(None)
        assert right(layer)
        model(torch.ones(1, 32))


@pytest.mark.parametrize("recipe", [DENSE, PACKED])
@pytest.mark.parametrize("how", ["deployable", "transform"])
def test_evaluation_between_forward_and_backward(how, recipe):
    model = nn.Sequential(nn.Linear(32, 16))
    handle = nm.sparsify_(model, recipe)
    optimizer = handle.attach(MaskedAdamW(model.parameters()))
    x, layer = torch.randn(4, 32, requires_grad=True), model[0]
    y = model(x)
    with torch.no_grad():
        if how == "deployable":
            with handle.deployable():
                torch.testing.assert_close(model(x), y)
                assert len(layer.effective.copies) == (1 if recipe == DENSE else 2)
        else:
            transform, layer.transform = layer.transform, HardMask(nm.Pattern("1:4"))
            assert not torch.equal(model(x), y)
            layer.transform = transform
    y.sum().backward()
    torch.testing.assert_close(x.grad[0], naive.masked(layer.weight, 2, 4).sum(0))
    optimizer.step()
    model(x)
    assert len(layer.effective.copies) == 1, "a dense copy is not kept up for evaluations"


def test_the_copy_does_not_keep_the_parameter_alive():
    _, layer, optimizer = model_of()
    layer.effective_weight()
    gone = weakref.ref(layer.weight)
    optimizer.param_groups.clear()
    layer.weight = nn.Parameter(torch.randn(16, 32))
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(("make", "recipe"), [(torch.optim.AdamW, PACKED), (MaskedAdamW, PACKED_SSTE)])
def test_a_captured_forward_makes_its_own(make, recipe, monkeypatch):
    model, layer, optimizer = model_of(make, recipe)
    x = torch.randn(4, 32, requires_grad=True)
    step(model, optimizer)
    model(x)
    (before,) = layer.effective.copies
    contents = before.rows.dense()
    with monkeypatch.context() as patch, Calls() as calls:
        patch.setattr("nmkernels.nn.effective._capturing", lambda weight: True)
        losses = [model(x).sum() for _ in range(2)]
    assert calls.packs == 2, "whatever is replayed, the packed weight is that of the weight then"
    assert layer.effective.copies == (before,) and torch.equal(before.rows.dense(), contents), "and a replay does not write into a kept one"
    for loss in losses:
        loss.backward()  # the second forward pass has not overwritten what the first one saved


def test_casting_and_a_dense_phase_give_the_memory_back():
    _, layer, _ = model_of()
    layer.effective_weight()
    layer.to(torch.float64)
    assert not layer.effective.copies and layer.effective_weight().dtype == torch.float64
    model = nn.Sequential(nn.Linear(32, 16))
    handle = nm.sparsify_(model, nm.recipes.FST("2:4", 6, end=3, packed=True))
    optimizer = handle.attach(MaskedAdamW(model.parameters()))
    kept = []
    for _ in range(6):
        step(model, optimizer)
        kept.append(len(model[0].effective.copies))
    assert kept == [1, 1, 0, 0, 0, 0] and handle.run.stage.phase == 0
