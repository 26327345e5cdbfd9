"""The effective weight is never stale: whatever wrote the weights, the next forward pass multiplies the present ones.

A table of writers × recipes × packed or not × ways of computing, against the transform of the current weight, computed again.
"""

import gc
import operator
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import optimizer
from torch.utils.checkpoint import checkpoint

import nmkernels as nm
from nmkernels.nn.adapter import adapter_of, add_adapter
from nmkernels.recipes import attach
from python_tests.recipes.roster import ROSTER
from python_tests.recipes.training import DATA32, F32, run

RECIPES = [
    *("ste", "srste", "srste_packed", "step", "step_sste", "sste", "sste_packed", "fst", "fst_packed", "mdgf", "bimask", "vnm"),
    *("complementary", "maskllm", "lbc", "maxq", "ast", "slope_adapters", "layerwise"),
]
"""Every way of making an effective weight; held masks and scales stay what they are, the weights under them change."""

# ---- ways in which training code writes weights, most of them unseen by version counters: write(model, values, optimizer)


def each_of(write):
    """A writer that does ``write(parameter, value)`` for every parameter."""

    def written(model, values, optimizer):
        for p, v in zip(model.parameters(), values, strict=True):
            write(p, v)

    return written


def other_parameters(model, values, optimizer):
    for (name, p), v in zip(list(model.named_parameters()), values, strict=True):
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, nn.Parameter(v.clone(), p.requires_grad))


def load_state_dict(model, values, optimizer, assign=False):
    names = (name for name, _ in model.named_parameters())
    model.load_state_dict({**model.state_dict(), **{name: v.clone() for name, v in zip(names, values, strict=True)}}, assign=assign)


def load_by_a_hook(model, values, optimizer):
    # the hook fills the weights by itself
    hook = model.register_load_state_dict_pre_hook(lambda *_: copy_to_data(model, values, optimizer))
    model.load_state_dict({}, strict=False)
    hook.remove()


def cast_there_and_back(model, values, optimizer):
    # the second cast may well land at the address that the weights had at first
    copy_to_data(model, values, optimizer)
    model.to(torch.bfloat16).to(torch.float32)


def stepped(optimizer_of):
    """A step of an optimizer, by gradients of its own."""

    def written(model, values, optimizer):
        parameters = [p for p in model.parameters() if p.requires_grad]
        before = [p.grad for p in parameters]
        for p in parameters:
            p.grad = torch.randn_like(p)
        optimizer_of(model, optimizer).step()
        for p, g in zip(parameters, before, strict=True):
            p.grad = g

    return written


copy_to_data = each_of(lambda p, v: p.data.copy_(v))  # diffusers' EMAModel.copy_to and restore, torch_ema's too
UNSEEN = {
    "copy_to_data": copy_to_data,
    "foreach": lambda model, values, _: torch._foreach_copy_([p.data for p in model.parameters()], [v.data for v in values]),
    "inference tensors": torch.inference_mode()(each_of(lambda p, v: p.data.copy_(v + 0.0))),
    "numpy": each_of(lambda p, v: operator.setitem(p.detach().numpy(), ..., v.numpy())),
    "storage": each_of(lambda p, v: p.untyped_storage().copy_(v.contiguous().untyped_storage())),
}
"""Those that leave no trace but the contents."""

WRITERS = {
    **UNSEEN,
    "copy_ in no_grad": torch.no_grad()(each_of(lambda p, v: p.copy_(v))),
    "copy_ in inference_mode": torch.inference_mode()(each_of(lambda p, v: p.copy_(v.clone()))),
    "other data": each_of(lambda p, v: setattr(p, "data", v.clone())),
    "one vector": lambda model, values, _: nn.utils.vector_to_parameters(torch.cat([v.flatten() for v in values]), model.parameters()),
    "other parameters": other_parameters,
    "load_state_dict": load_state_dict,
    "load_state_dict, assign": partial(load_state_dict, assign=True),
    "load_by_a_hook": load_by_a_hook,
    "cast_there_and_back": cast_there_and_back,
    "another optimizer": stepped(lambda model, _: torch.optim.SGD(model.parameters(), lr=0.5)),
    "another fused optimizer": stepped(lambda model, _: torch.optim.AdamW(model.parameters(), lr=0.5, fused=True)),
    "the attached optimizer": stepped(lambda _, attached: attached),
}

# ---- ways of computing


X = DATA32[0][0][:3]


def as_on_a_gpu(monkeypatch):
    """The host cannot read weights without waiting."""
    monkeypatch.setattr("nmkernels.nn.effective.fingerprint", lambda *tensors: None)
    monkeypatch.setattr("nmkernels.nn.effective.readable", lambda state: False)


@pytest.fixture(autouse=True)
def forget_choices():
    nm.gemm.choose.forget()
    yield
    nm.gemm.choose.forget()


def begun(key):
    return run(ROSTER[key].recipe, F32, DATA32[:9])


def recomputed(model, x):
    """What the model computes, from the weights that it has now and nothing kept."""
    for layer in model:
        if not isinstance(layer, nm.nn.NMWeight):
            x = layer(x)
            continue
        w = layer.weight.detach() if layer.transform is None else layer.transform(layer.master.detach(), *layer._extras(layer.transform))
        y = F.linear(x, w, layer.bias)
        adapter = adapter_of(layer) if layer.adapts else None
        x = y if adapter is None else add_adapter(y, x, *adapter)
    return x.detach()


def eval_mode(model, x):
    model.eval()
    y = model(x)
    model.train()
    return y


def checkpointed(model, x):
    y = checkpoint(model, x.clone().requires_grad_(), use_reentrant=False)
    y.sum().backward()
    return y


MODES = {
    "training": lambda model, x: model(x),
    "eval": eval_mode,
    "no_grad": torch.no_grad()(lambda model, x: model(x)),
    "inference_mode": torch.inference_mode()(lambda model, x: model(x).clone()),
    "checkpointed": checkpointed,
}
DEPLOYED = ["training", "no_grad"]


def check(model, handle, modes=MODES, deployed=DEPLOYED, before=lambda: None, name=""):
    """Every way of computing gives what the present weights give; ``before`` each of them, something happens."""
    x = X

    def compare(mode):
        before()
        want = recomputed(model, x)
        torch.testing.assert_close(MODES[mode](model, x).detach(), want, rtol=1e-4, atol=1e-4, msg=lambda text: f"{name}, {mode}: {text}")

    for mode in modes:
        compare(mode)
        model.zero_grad()
    for mode in deployed:
        with handle.deployable():
            MODES[mode](model, x)  # so that something may be kept
            compare(mode)
        compare("training")
        model.zero_grad()


def writes(write, model, optimizer):
    """A function that gives the model other weights, others each time, by ``write``."""
    generator = torch.Generator().manual_seed(7)
    return lambda: write(model, [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in model.parameters()], optimizer)


@pytest.mark.quick(4)
@pytest.mark.parametrize("key", RECIPES)
def test_the_next_forward_pass_multiplies_the_present_weight(key):
    for name, write in WRITERS.items():
        model, handle, optimizer = begun(key)
        check(model, handle, DEPLOYED, [])  # which fills what is kept
        check(model, handle, before=writes(write, model, optimizer), name=name)


@pytest.mark.quick(2)
@pytest.mark.parametrize("key", ["srste", "fst_packed", "maskllm", "layerwise", "srste_packed", "sste", "sste_packed", "fst"])
def test_without_fingerprints_too_as_on_a_gpu(key, monkeypatch):
    as_on_a_gpu(monkeypatch)
    for name, write in WRITERS.items():
        model, handle, optimizer = begun(key)
        again = writes(write, model, optimizer)
        # within one training step, what leaves no trace but the contents needs refresh()
        unseen = name in UNSEEN
        modes = [mode for mode in MODES if not (unseen and mode in ("training", "checkpointed"))]
        check(model, handle, modes, [] if unseen else DEPLOYED, again, name)
        check(model, handle, before=lambda again=again, handle=handle: (again(), handle.refresh()), name=name)


@pytest.mark.parametrize("key", ["srste", "sste"])
def test_without_the_compiled_core_nothing_is_used_again(key, monkeypatch):
    monkeypatch.setattr("nmkernels.nn.effective.fingerprint", lambda *tensors: None)
    model, handle, optimizer = begun(key)
    check(model, handle, before=writes(copy_to_data, model, optimizer))


def test_what_a_mask_is_learned_from_counts_as_well():
    model, handle, _ = begun("maskllm")
    check(model, handle)
    for layer in handle.layers.values():
        layer.nm_logits.data.copy_(torch.randn_like(layer.nm_logits) * 50)
    check(model, handle)


@pytest.mark.parametrize("mode", ["accumulation", "checkpointing", "evaluation"])
def test_without_fingerprints_reuse_stays_where_it_pays(mode, monkeypatch):
    as_on_a_gpu(monkeypatch)
    monkeypatch.setenv("NMKERNELS_CHOICE", "dense")  # what a transform makes in dense layout is counted
    nm.gemm.choose.forget()
    model, _, optimizer = begun("srste")
    x, made = X.clone().requires_grad_(), []
    transform = type(model[0].transform)
    original = transform.__call__
    monkeypatch.setattr(transform, "__call__", lambda self, *args, **kw: made.append(1) or original(self, *args, **kw))
    with torch.no_grad() if mode == "evaluation" else nullcontext():
        for _ in range(4):
            y = checkpoint(model, x, use_reentrant=False) if mode == "checkpointing" else model(x)
            if mode != "evaluation":
                y.sum().backward()
    # a GPU cannot tell whether an evaluation's weights are those of the last one
    assert len(made) == (8 if mode == "evaluation" else 2)
    made.clear()
    optimizer.step()
    model(x).sum().backward()
    assert len(made) == 2


def test_a_swap_undone_before_backward():
    model, _, _ = begun("srste")
    x = X.clone().requires_grad_()
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


def test_other_optimizers_are_watched_while_attached():
    watched = attach._attached
    gc.collect()
    before, hooks = len(watched), len(optimizer._global_optimizer_post_hooks)
    for ending in ("finish", "remove", None):
        model, handle, _ = begun("srste")
        assert len(watched) == before + 1 and len(optimizer._global_optimizer_post_hooks) <= max(hooks, 1)
        if ending is not None:
            getattr(handle, ending)()
            assert len(watched) == before and len(optimizer._global_optimizer_post_hooks) == hooks
    del model, handle, _  # thrown away as it is, it leaves nothing behind either
    gc.collect()
    assert len(watched) == before and len(optimizer._global_optimizer_post_hooks) == hooks
