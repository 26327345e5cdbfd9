"""CompressedLinear multiplies the present weight, with the right gradients, whatever happened before in whatever order."""

import copy
import itertools
import random

import pytest
import torch
import torch.nn.functional as F

import nmkernels as nm

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
    return layer


def copied_in_inference_mode(layer):
    with torch.inference_mode():
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


def loaded_in_inference_mode(layer):
    with torch.inference_mode():
        return loaded(layer)


def assigned(layer):
    return loaded(layer, assign=True)


def assigned_in_inference_mode(layer):
    with torch.inference_mode():
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


def moved_in_inference_mode(layer):
    with torch.inference_mode():
        return layer.to(torch.float64).to(torch.float32)


def by_meta(layer):
    state = {k: torch.randn_like(v) if v.is_floating_point() else v.clone() for k, v in layer.state_dict().items()}
    layer.to("meta").to_empty(device="cpu").load_state_dict(state)
    return layer


def written_unseen(layer):
    with writing(layer):
        layer.values.data.copy_(torch.randn_like(layer.values))
    return layer.eval()


EVENTS = [
    nothing,
    copied_in_place, copied_in_inference_mode, given_other_memory, given_other_memory_twice, swapped, loaded, loaded_in_inference_mode,
    assigned, assigned_in_inference_mode, loaded_by_a_hook, there_and_back, moved_in_inference_mode, by_meta, written_unseen, copy.deepcopy,
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


def check(layer, grad=True, autocast=False):
    dtype = torch.bfloat16 if autocast else torch.float32
    x = torch.randn(TOKENS, IN, requires_grad=grad)
    layer.zero_grad()
    with torch.autocast("cpu", dtype, enabled=autocast):
        y = layer(x)
    want = expected_of(layer, x, dtype)
    tolerance = {"rtol": 3e-2, "atol": 3e-1} if autocast else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(y.detach(), want[0], **tolerance)
    if grad:
        y.float().square().sum().backward()
        scale = want[1].abs().max()
        torch.testing.assert_close(x.grad / scale, want[1] / scale, **tolerance)
        torch.testing.assert_close(layer.bias.grad / scale, want[2] / scale, **tolerance)


def trained(layer):
    check(layer)


def trained_under_autocast(layer):
    check(layer, autocast=True)


def without_grad(layer):
    with torch.no_grad():
        check_no_grad(layer)


def inferred(layer):
    with torch.inference_mode():
        check_no_grad(layer)


def inferred_under_autocast(layer):
    with torch.inference_mode():
        check_no_grad(layer, autocast=True)


def check_no_grad(layer, autocast=False):
    dtype = torch.bfloat16 if autocast else torch.float32
    x = torch.randn(TOKENS, IN)
    with torch.autocast("cpu", dtype, enabled=autocast):
        y = layer(x)
    with torch.inference_mode(False), torch.enable_grad():
        want = expected_of(layer, x.clone(), dtype)[0]
    torch.testing.assert_close(y.clone(), want, **({"rtol": 3e-2, "atol": 3e-1} if autocast else {"rtol": 1e-4, "atol": 1e-4}))


CALLS = [trained, trained_under_autocast, without_grad, inferred, inferred_under_autocast]


def made(inference, **kwargs):
    with torch.inference_mode(inference):
        return nm.CompressedLinear(fresh(), torch.randn(OUT), **kwargs)


@pytest.mark.quick(1, per="event")
@pytest.mark.parametrize("event", EVENTS, ids=lambda f: f.__name__)
def test_an_event_between_any_two_calls(event, monkeypatch):
    for how in ["plain", "keep_dense", "columns"]:
        for inference in [False, True]:
            monkeypatch.setenv("NMKERNELS_CHOICE", "dense" if how == "keep_dense" else "")
            for first, second in itertools.product(CALLS, repeat=2):
                options = {"keep_dense": how == "keep_dense", "columns": torch.randperm(IN) if how == "columns" else None}
                layer = made(inference, **options)
                first(layer)
                second(event(layer))


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_events_and_calls(seed, monkeypatch):
    draw = random.Random(seed)
    monkeypatch.setenv("NMKERNELS_CHOICE", draw.choice(["dense", ""]))
    layer = made(draw.random() < 0.5, keep_dense=draw.random() < 0.5)
    for _ in range(40):
        if draw.random() < 0.5:
            layer = draw.choice(EVENTS)(layer)
        draw.choice(CALLS)(layer)
