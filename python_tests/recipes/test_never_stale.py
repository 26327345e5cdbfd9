"""The effective weight is never stale: whatever wrote the weights, the next forward pass multiplies the present ones.

A table of writers × recipes × packed or not × ways of computing, against the transform of the present weight, computed anew.
"""

import gc
import itertools
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import optimizer
from torch.utils.checkpoint import checkpoint

import nmkernels as nm
from nmkernels.nn.adapter import adapter_of, add_adapter
from nmkernels.recipes import attach
from python_tests.recipes.writers import UNSEEN, WRITERS, copy_to_data

RECIPES = [
    "ste:2:4",
    "srste:2:4(decay=0.1)",
    "srste:2:4(decay=0.1, packed=True)",
    "srste:1:8(decay=0.1, packed=auto)",
    "step:2:4(t_min=2, t_max=3, threshold=1e30)",
    "sste:2:4(seed=1)",
    "sste:2:4(seed=1, packed=True)",
    "fst:2:4(every=2, end=None, seed=1)",
    "fst:2:4(every=2, end=None, seed=1, packed=True)",
    "mdgf:1:8(start=0)",
    "bimask:2:4(draws=5, every=2, seed=1)",
    "vnm:2:8(v=8, every=1)",
    "complementary:1:4",
    "maskllm:2:4(seed=3)",
    "lbc:2:4(start=0, end=8)",
    "maxq:2:4",
    "ast:2:4",
    "slope:2:4(rank=2, start=0.0, every=2, seed=1)",
    "layerwise:4:16(inner=srste)",
]
"""Every way of making an effective weight; held masks and scales stay what they are, the weights under them change."""


def rows(count=3):
    return torch.randn(count, 32)


def as_on_a_gpu(monkeypatch):
    """The host cannot read weights without waiting."""
    monkeypatch.setattr("nmkernels.nn.effective.fingerprint", lambda *tensors: None)
    monkeypatch.setattr("nmkernels.nn.effective._readable", lambda state: False)


@pytest.fixture(autouse=True)
def forget_choices():
    nm.autograd.gemms.forget()
    yield
    nm.autograd.gemms.forget()


def begun(spec, make=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 16))
    recipe = nm.recipes.get(spec, total_steps=12)
    handle = nm.sparsify_(model, recipe)
    optimizer = handle.attach(recipe.optimizer(model.parameters(), lr=0.05) if make is None else make(model.parameters(), lr=0.05))
    for _ in range(5):
        step(model, optimizer)
    return model, handle, optimizer


def step(model, optimizer):
    optimizer.zero_grad()
    model(rows()).square().sum().backward()
    optimizer.step()


def anew(model, x):
    """What the model computes, from the weights that it has now and nothing kept."""
    for layer in model:
        if not isinstance(layer, nm.nn.NMWeight):
            x = layer(x)
            continue
        w = layer.weight.detach() if layer.transform is None else layer.transformed(layer.transform)
        y = F.linear(x, w, layer.bias)
        adapter = adapter_of(layer) if layer.adapts else None
        x = y if adapter is None else add_adapter(y, x, *adapter)
    return x.detach()


def as_it_is(model, handle, x):
    return model(x)


def eval_mode(model, handle, x):
    model.eval()
    y = model(x)
    model.train()
    return y


def no_grad(model, handle, x):
    with torch.no_grad():
        return model(x)


def inference_mode(model, handle, x):
    with torch.inference_mode():
        return model(x).clone()


def checkpointed(model, handle, x):
    x = x.clone().requires_grad_()
    y = checkpoint(model, x, use_reentrant=False)
    y.sum().backward()
    return y


MODES = [as_it_is, eval_mode, no_grad, inference_mode, checkpointed]
DEPLOYED = [as_it_is, no_grad]


def check(model, handle, modes=MODES, deployed=DEPLOYED, before=lambda: None):
    """Every way of computing gives what the present weights give; ``before`` each of them, something happens."""
    x, name = rows(), getattr(before, "__name__", "")
    for mode in modes:
        before()
        want = anew(model, x)
        torch.testing.assert_close(mode(model, handle, x).detach(), want, msg=lambda text, mode=mode: f"{name}, {mode.__name__}: {text}")
        model.zero_grad()
    for mode in deployed:
        with handle.deployable():
            mode(model, handle, x)  # so that something may be kept
            before()
            want = anew(model, x)
            torch.testing.assert_close(
                mode(model, handle, x).detach(), want, msg=lambda text, mode=mode: f"{name}, deployable, {mode.__name__}: {text}"
            )
        before()
        torch.testing.assert_close(model(x).detach(), anew(model, x))
        model.zero_grad()


def writes(write, model, optimizer):
    """A function that gives the model other weights, others each time, by ``write``."""
    generator = torch.Generator().manual_seed(7)

    def run():
        values = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in model.parameters()]
        write(model, values, optimizer)

    run.__name__ = write.__name__
    return run


@pytest.mark.parametrize("spec", RECIPES)
def test_the_next_forward_pass_multiplies_the_present_weight(spec):
    for write in WRITERS:
        model, handle, optimizer = begun(spec)
        check(model, handle)  # which fills whatever is kept
        check(model, handle, before=writes(write, model, optimizer))


@pytest.mark.quick(4)
@pytest.mark.parametrize("spec", [spec for spec in RECIPES if spec.startswith(("srste", "sste", "fst", "maskllm", "layerwise"))])
def test_without_fingerprints_too_as_on_a_gpu(spec, monkeypatch):
    as_on_a_gpu(monkeypatch)
    for write in WRITERS:
        model, handle, optimizer = begun(spec)
        run = writes(write, model, optimizer)
        # within one training step, what leaves no trace but the contents needs refresh()
        unseen = write in UNSEEN
        check(model, handle, [mode for mode in MODES if not (unseen and mode in (as_it_is, checkpointed))], [] if unseen else DEPLOYED, run)
        check(model, handle, before=lambda run=run, handle=handle: (run(), handle.refresh()))


@pytest.mark.parametrize("spec", ["srste:2:4", "sste:2:4(seed=1)"])
def test_without_the_compiled_core_nothing_is_used_again(spec, monkeypatch):
    monkeypatch.setattr("nmkernels.nn.effective.fingerprint", lambda *tensors: None)
    model, handle, optimizer = begun(spec)
    check(model, handle, before=writes(copy_to_data, model, optimizer))


@pytest.mark.parametrize("fingerprints", [True, False])
@pytest.mark.parametrize(
    "spec", ["srste:2:4", "srste:2:4(packed=True)", "sste:2:4(seed=1)", "fst:2:4(every=2, end=None, seed=1, packed=True)"]
)
def test_training_by_a_second_optimizer_equals_training_without_copies(spec, fingerprints, monkeypatch):
    if not fingerprints:
        as_on_a_gpu(monkeypatch)

    def fused(params, lr):
        return torch.optim.AdamW(params, lr=lr, fused=True)

    def run(make, second, kept):
        model, handle, _ = begun(spec, make)
        new = second(model.parameters(), lr=0.02)
        losses = []
        for t in range(12):
            if not kept:
                handle.refresh()
            loss = (model(torch.randn(8, 32, generator=torch.Generator().manual_seed(t))) - 1.0).square().mean()
            model.zero_grad()
            loss.backward()
            new.step()
            losses.append(loss.item())
        return losses

    for make, second in itertools.product([None, torch.optim.AdamW, fused], [torch.optim.SGD, fused]):
        assert run(make, second, True) == run(make, second, False), (make, second)


def test_what_a_mask_is_learned_from_counts_as_well():
    model, handle, _ = begun("maskllm:2:4(seed=3)")
    check(model, handle)
    for layer in handle.layers.values():
        layer.nm_logits.data.copy_(torch.randn_like(layer.nm_logits) * 50)
    check(model, handle)


@pytest.mark.parametrize("mode", ["accumulation", "checkpointing", "evaluation"])
@pytest.mark.parametrize("fingerprints", [True, False])
def test_reuse_stays_where_it_pays(mode, fingerprints, monkeypatch):
    if not fingerprints:
        as_on_a_gpu(monkeypatch)
    model, _, optimizer = begun("srste:2:4")
    x, made = rows().requires_grad_(), []
    transform = type(model[0].transform)
    original = transform.__call__
    monkeypatch.setattr(transform, "__call__", lambda self, *args, **kw: made.append(1) or original(self, *args, **kw))
    with torch.no_grad() if mode == "evaluation" else nullcontext():
        for _ in range(4):
            y = checkpoint(model, x, use_reentrant=False) if mode == "checkpointing" else model(x)
            if mode != "evaluation":
                y.sum().backward()
    # a GPU cannot tell whether an evaluation's weights are those of the last one
    assert len(made) == (2 if fingerprints or mode != "evaluation" else 8)
    made.clear()
    optimizer.step()
    model(x).sum().backward()
    assert len(made) == 2


def test_a_swap_that_is_taken_back_before_backward_changes_no_gradient():
    model, _, _ = begun("srste:2:4")
    x = rows().requires_grad_()
    mine = [p.detach().clone() for p in model.parameters()]
    model(x).sum().backward()
    want, x.grad = x.grad, None
    y = model(x)
    copy_to_data(model, [torch.randn_like(p) for p in mine], None)
    with torch.no_grad():
        model(x)
    copy_to_data(model, mine, None)
    y.sum().backward()
    torch.testing.assert_close(x.grad, want)


def test_steps_of_other_optimizers_are_watched_only_while_attached():
    watched = attach._watched
    for ending in ("finish", "remove", None):
        gc.collect()
        before, hooks = len(watched), len(optimizer._global_optimizer_post_hooks)
        model, handle, _ = begun("srste:2:4")
        assert len(watched) == before + 2 and len(optimizer._global_optimizer_post_hooks) <= max(hooks, 1)
        if ending is not None:
            getattr(handle, ending)()
        del model, handle, _  # thrown away as it is, it leaves nothing behind either
        gc.collect()
        assert len(watched) == before
