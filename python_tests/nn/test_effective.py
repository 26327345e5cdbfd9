"""The life of the effective weight: made once per optimizer step. That it is never stale: recipes/test_never_stale.py."""

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
from nmkernels.autograd import HardMask
from python_tests import plain
from python_tests.copies import WAYS, copied


class Prunes(TorchDispatchMode):
    """Counts how often a weight is pruned."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.name() in ("nmkernels::nm_prune", "nmkernels::nm_prune_out")
        return func(*args, **(kwargs or {}))


def model_of(optimizer=None, recipe="ste:2:4", **config):
    """A one-layer model, its layer, and the attached optimizer (None: not attached)."""
    model = nn.Sequential(nn.Linear(32, 16))
    handle = nm.sparsify_(model, recipe)
    opt = handle.attach(optimizer(model.parameters(), lr=0.05, **config)) if optimizer else None
    return model, model[0], opt


def right(layer, dtype=torch.float32):
    """Whether the layer would multiply the mask of the weight that it has now."""
    return torch.equal(layer.effective_weight(dtype), plain.masked(layer.weight, 2, 4).to(dtype))


def fused(params, lr):
    return torch.optim.AdamW(params, lr=lr, fused=True)


OPTIMIZERS = [torch.optim.AdamW, fused, torch.optim.SGD, nm.optim.MaskedAdamW]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_one_prune_per_optimizer_step_with_accumulation_and_checkpointing(make):
    for autocast in [False, True]:
        model, layer, opt = model_of(make)
        x = torch.randn(4, 32, requires_grad=True)
        counts = []
        for _ in range(4):
            with Prunes() as prunes:
                with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
                    for _ in range(3):
                        checkpoint(model, x, use_reentrant=False).sum().backward()
                    with torch.no_grad():
                        model(x)
                opt.step()
                assert right(layer, torch.bfloat16 if autocast else torch.float32)
            counts.append(prunes.count)
        assert counts == [2, 1, 1, 1], "the first weight and then one per step"


def test_after_a_step_the_next_copy_takes_the_memory_of_the_last():
    for make in OPTIMIZERS:
        model, layer, opt = model_of(make)
        buffer = layer.effective_weight()
        for _ in range(3):
            model(torch.randn(4, 32)).sum().backward()
            opt.step()
            assert layer.effective_weight() is buffer and right(layer)


def test_but_not_where_a_backward_pass_may_still_need_it():
    model, layer, _ = model_of(torch.optim.AdamW)
    x = torch.randn(4, 32, requires_grad=True)
    before = plain.masked(layer.weight, 2, 4).detach()
    y = model(x)
    mine = layer.weight.detach().clone()
    for values in (torch.randn(16, 32), mine):  # an average is swapped in, evaluated, and swapped out
        layer.weight.data.copy_(values)
        assert right(layer)
        model(x)
    y.sum().backward()
    torch.testing.assert_close(x.grad, before.sum(0).expand(4, 32))


def test_nothing_is_kept_without_an_optimizer():
    _, layer, _ = model_of()
    x = torch.randn(4, 32)
    with Prunes() as prunes:
        layer(x)
        with torch.no_grad():
            layer(x), layer(x)
    assert prunes.count == 3 and not layer.effective.kept


def test_writes_that_bump_no_version_are_noticed_when_unattached():
    for grad in [True, False]:
        for unattached in [fused, torch.optim.AdamW, None]:
            model, layer, _ = model_of()
            opt = unattached(model.parameters(), lr=0.5) if unattached else None
            with torch.set_grad_enabled(grad):
                assert right(layer)
            model(torch.randn(4, 32)).sum().backward()
            with torch.no_grad():
                model(torch.randn(4, 32))
            if opt:
                opt.step()
            else:
                layer.weight.data.copy_(torch.randn(16, 32))
            with torch.set_grad_enabled(grad):
                assert right(layer)


def test_optimizer_of_a_replaced_parameter_does_not_fill_the_copy_of_the_new_one():
    _, layer, opt = model_of(nm.optim.MaskedAdamW)
    old = layer.weight
    layer.load_state_dict({"weight": torch.randn(16, 32), "bias": torch.zeros(16)}, assign=True)
    layer.effective_weight()
    old.grad = torch.ones_like(old)
    before = layer.effective_weight().clone()
    opt.step()
    assert right(layer) and torch.equal(layer.effective_weight(), before)


def test_casting_releases_the_copy():
    _, layer, _ = model_of(torch.optim.AdamW)
    layer.effective_weight()
    layer.to(torch.float64)
    assert not layer.effective.kept and layer.effective_weight().dtype == torch.float64


@pytest.mark.parametrize("kind", [torch.Tensor, nn.Parameter])
def test_functional_call_uses_the_weights_given(kind):
    _, layer, _ = model_of(torch.optim.AdamW)
    eye, bias = torch.eye(32), torch.zeros(16)
    layer(eye)
    for _ in range(20):  # short-lived weights have one address and one version
        w = kind(torch.randn(16, 32))
        assert torch.equal(functional_call(layer, {"weight": w, "bias": bias}, (eye,)), plain.masked(w, 2, 4).t())
        del w
    assert kind is nn.Parameter or not layer.effective.kept, "only a Parameter's copy is kept"
    assert right(layer)


@pytest.mark.parametrize("how", WAYS)
def test_copies_share_nothing_and_do_not_go_stale(how):
    model, layer, opt = model_of(torch.optim.AdamW)
    buffer = layer.effective_weight()
    baseline = copied(model, how)
    assert not baseline[0].effective.attached and not baseline[0].effective.kept and right(baseline[0])
    # an average of the weights, updated as such averages are
    with torch.no_grad():
        baseline(torch.randn(2, 32))
        for a, b in zip(baseline.parameters(), model.parameters(), strict=True):
            a.data.lerp_(b.data + 1.0, 0.5)
        assert right(baseline[0])
    assert layer.effective_weight() is buffer
    model(torch.randn(4, 32)).sum().backward()
    opt.step()
    assert right(layer) and right(baseline[0])


def test_evaluation_before_training():
    for mode in [torch.inference_mode, torch.no_grad]:
        for make in [None, torch.optim.AdamW]:
            model, layer, _ = model_of(make)
            with mode():
                before = model(torch.ones(1, 32))
            y = model(torch.ones(1, 32))
            y.sum().backward()
            assert torch.equal(y, before) and not layer.effective_weight().is_inference()


def test_model_built_in_inference_mode():
    with torch.inference_mode():
        model, layer, _ = model_of()
        assert right(layer)
        model(torch.ones(1, 32))


@pytest.mark.parametrize("how", ["deployable", "transform"])
def test_evaluation_of_another_form_leaves_the_backward_pass_intact(how):
    model = nn.Sequential(nn.Linear(32, 16))
    handle = nm.sparsify_(model, "ste:2:4")
    handle.attach(torch.optim.AdamW(model.parameters()))
    x = torch.randn(4, 32, requires_grad=True)
    y = model(x)
    with torch.no_grad():
        if how == "deployable":
            with handle.deployable():
                assert torch.equal(model(x), y)
        else:
            model[0].transform = HardMask(nm.Pattern("1:4"))
            assert not torch.equal(model(x), y)
    y.sum().backward()
    torch.testing.assert_close(x.grad[0], plain.masked(model[0].weight, 2, 4).sum(0))


def test_the_copy_does_not_keep_the_parameter_alive():
    _, layer, opt = model_of(torch.optim.AdamW)
    layer.effective_weight()
    gone = weakref.ref(layer.weight)
    opt.param_groups.clear()
    layer.weight = nn.Parameter(torch.randn(16, 32))
    gc.collect()
    assert gone() is None
