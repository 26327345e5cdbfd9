"""CompressedLinear multiplies the present weight, with the right gradients, whatever happened before in whatever order."""

import itertools
import random
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import nmkernels as nm
from python_tests.copy_model import COPY_METHODS, copy_model

OUT, IN, TOKENS = 16, 64, 40


def fresh(dtype=torch.float32):
    return nm.ops.compress(torch.randn(OUT, IN, dtype=dtype), "3:4")


def writing(layer):
    """torch writes into what inference mode made in that mode only."""
    return torch.inference_mode() if any(t.is_inference() for t in (*layer.parameters(), *layer.buffers())) else torch.no_grad()


# ---- what may happen to a layer; each returns the layer


def nothing(layer):
    return layer


def copied_in_place(layer):
    with writing(layer):
        layer.values.copy_(torch.randn_like(layer.values))
        layer.indices.copy_(fresh().indices)
    return layer


def given_other_memory(layer):
    layer.values.data = torch.randn_like(layer.values)
    return layer


def given_other_memory_twice(layer):
    # the second may well lie where the first lay
    layer.values.data = layer.values.data.double()
    layer.values.data = (layer.values.data + 1.0).to(layer.bias.dtype)
    return layer


def swapped(layer):
    torch.utils.swap_tensors(layer.values, torch.randn_like(layer.values))
    return layer


def loaded(layer, assign=False):
    c = fresh(layer.values.dtype)
    new = {"values": c.values, "indices": c.indices, "bias": torch.randn(OUT)}
    with torch.enable_grad() if assign else writing(layer):
        layer.load_state_dict({**layer.state_dict(), **new}, assign=assign)
    return layer


def assigned(layer):
    return loaded(layer, assign=True)


def loaded_by_a_hook(layer):
    def fill(module, state, *rest):
        module.values.data.copy_(state["values"])
        state.clear()

    handle = layer.register_load_state_dict_pre_hook(fill)
    with writing(layer):
        layer.load_state_dict({"values": torch.randn_like(layer.values)}, strict=False)
    handle.remove()
    return layer


def there_and_back(layer):
    layer = layer.to(torch.bfloat16).to(torch.float32)
    # torch's own nn.Linear cannot be called with a Parameter of inference mode that was moved outside of it
    layer.bias = torch.nn.Parameter(layer.bias.detach().clone())
    return layer


def moved(layer):
    return layer.to(torch.float64).to(torch.float32)


def by_meta(layer):
    state = {k: torch.randn_like(v) if v.is_floating_point() else v.clone() for k, v in layer.state_dict().items()}
    layer.to("meta").to_empty(device="cpu").load_state_dict(state)
    return layer


def written_unseen(layer):
    with writing(layer):
        layer.values.data.copy_(torch.randn_like(layer.values))
    return layer.eval()


def in_inference_mode(event):
    def run(layer):
        with torch.inference_mode():
            return event(layer)

    run.__name__ = f"{event.__name__}_in_inference_mode"
    return run


EVENTS = [
    nothing, copied_in_place, given_other_memory, given_other_memory_twice, swapped, loaded, assigned, loaded_by_a_hook, there_and_back,
    by_meta, written_unseen, *map(in_inference_mode, (copied_in_place, loaded, assigned, moved)),
    *(partial(copy_model, how=how) for how in COPY_METHODS),
]  # fmt: skip


# ---- how it is called; each compares with a computation that keeps nothing


def expected_of(layer, x, dtype):
    """y and, where asked for, dL/dx and dL/db of L = Σ y², by torch from the weight expanded now."""
    c = nm.ops.Compressed(layer.values.detach().clone(), layer.indices.clone(), layer.pattern, (OUT, IN))
    w, b = c.dense(), layer.bias.detach().clone().requires_grad_()
    if layer.order is not None:
        w = w[:, layer.order.clone().long().argsort()]
    x = x.detach().clone().requires_grad_()
    y = F.linear(x.to(dtype), w.to(dtype), b.to(dtype))
    y.float().square().sum().backward()
    return y.detach(), x.grad, b.grad


def check(layer, mode, autocast):
    grad, dtype = mode is nullcontext, torch.bfloat16 if autocast else torch.float32
    tolerance = {"rtol": 3e-2, "atol": 3e-1} if autocast else {"rtol": 1e-4, "atol": 1e-4}
    layer.zero_grad()
    with mode(), torch.autocast("cpu", dtype, enabled=autocast):
        x = torch.randn(TOKENS, IN, requires_grad=grad)
        y = layer(x)
    want, dx, db = expected_of(layer, x, dtype)
    torch.testing.assert_close(y.detach().clone(), want, **tolerance)
    if grad:
        y.float().square().sum().backward()
        scale = dx.abs().max()
        torch.testing.assert_close(x.grad / scale, dx / scale, **tolerance)
        torch.testing.assert_close(layer.bias.grad / scale, db / scale, **tolerance)


CALLS = [(nullcontext, False), (nullcontext, True), (torch.no_grad, False), (torch.inference_mode, False), (torch.inference_mode, True)]


def made(inference, **kwargs):
    with torch.inference_mode(inference):
        return nm.CompressedLinear(fresh(), torch.randn(OUT), **kwargs)


@pytest.mark.quick(6)
@pytest.mark.parametrize("event", EVENTS, ids=lambda f: getattr(f, "__name__", "copied"))
def test_an_event_between_any_two_calls(event, monkeypatch):
    for how, inference in itertools.product(["plain", "keep_dense", "columns"], [False, True]):
        monkeypatch.setenv("NMKERNELS_CHOICE", "dense" if how == "keep_dense" else "")
        for first, second in itertools.product(CALLS, repeat=2):
            layer = made(inference, keep_dense=how == "keep_dense", columns=torch.randperm(IN) if how == "columns" else None)
            check(layer, *first)
            check(event(layer), *second)


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_events_and_calls(seed, monkeypatch):
    draw = random.Random(seed)
    monkeypatch.setenv("NMKERNELS_CHOICE", draw.choice(["dense", ""]))
    layer = made(draw.random() < 0.5, keep_dense=draw.random() < 0.5)
    for _ in range(40):
        if draw.random() < 0.5:
            layer = draw.choice(EVENTS)(layer)
        check(layer, *draw.choice(CALLS))
