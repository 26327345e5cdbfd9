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
from nmkernels.nn import effective
from nmkernels.nn.adapter import adapter_of, add_adapter
from nmkernels.train import optimizers
from python_tests.recipes.roster import ROSTER
from python_tests.recipes.training import DATA32, F32, run, start

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
    monkeypatch.setattr("nmkernels.train.ahead.in_one_pass", lambda *args: True)  # the reference makes forms ahead


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


STEPPED = ["srste_packed", "sste_packed", "fst_packed"]
"""Recipes whose forms a step can write."""


def packed_by_steps(key, monkeypatch):
    """A model whose optimizer's steps write the forms of W̃ on the path of GPUs; the reference does so here."""
    as_on_a_gpu(monkeypatch)
    monkeypatch.setattr("nmkernels.optim.adamw.in_one_pass", lambda *args: True)
    model, handle, optimizer = begun(key)
    assert handle.attach(optimizer, forms="step") is optimizer
    return model, handle, optimizer


def trained(model, optimizer):
    optimizer.zero_grad()
    model(X).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("key", STEPPED)
def test_forms_that_a_step_wrote_are_those_of_the_present_weight(key, monkeypatch):
    model, handle, optimizer = packed_by_steps(key, monkeypatch)
    for _ in range(3):
        trained(model, optimizer)
    assert len(optimizer.packed) == len(handle.layers)
    made = []
    make = effective._made
    monkeypatch.setattr(effective, "_made", lambda source, *wanted: made.extend(w for w in wanted if w.wanted) or make(source, *wanted))
    torch.testing.assert_close(model(X).detach(), recomputed(model, X), rtol=1e-4, atol=1e-4)
    assert not made, "the step has made all forms"


@pytest.mark.parametrize("key", STEPPED)
def test_writers_between_a_step_that_writes_the_forms_and_the_forward_pass(key, monkeypatch):
    """The promise excludes those that leave no trace but the contents; those that write whole tensors are found and repaired."""
    for name, write in WRITERS.items():
        model, handle, optimizer = packed_by_steps(key, monkeypatch)
        for mode in MODES:
            if len({id(p) for group in optimizer.param_groups for p in group["params"]} & {id(p) for p in model.parameters()}):
                trained(model, optimizer)
                trained(model, optimizer)
            check(model, handle, [mode], [], writes(write, model, optimizer), name)


def row_that_no_check_sees(layer):
    return (layer.effective._checks + 1) % len(layer.weight)


def of_another_optimizer(weight, row, kind=torch.optim.SGD):
    weight.grad = torch.zeros_like(weight)
    weight.grad[row] = 1.0
    kind([weight], lr=1.0).step()


PARTS = {
    "a counted write": lambda weight, row: weight.detach()[row].add_(1.0),
    "other data": lambda weight, row: setattr(
        weight, "data", weight.detach().clone().index_add_(0, torch.tensor([row]), torch.ones(1, 16))
    ),
    "another optimizer": of_another_optimizer,
    "another fused optimizer": partial(of_another_optimizer, kind=partial(torch.optim.AdamW, weight_decay=0.0, fused=True)),
    "excluded by the promise: a row through .data": lambda weight, row: weight.data[row].add_(1.0),
}
"""Writers of a part that the check does not look at."""


@pytest.mark.parametrize("name", PARTS)
def test_a_part_that_is_written_between_the_step_and_the_forward_pass(name, monkeypatch):
    model, handle, optimizer = packed_by_steps("srste_packed", monkeypatch)
    trained(model, optimizer)
    trained(model, optimizer)
    PARTS[name](model[0].weight, row_that_no_check_sees(model[0]))
    got, present = model(X).detach(), recomputed(model, X)
    assert torch.allclose(got, present, rtol=1e-4, atol=1e-4) != name.startswith("excluded")
    handle.refresh()
    torch.testing.assert_close(model(X).detach(), present, rtol=1e-4, atol=1e-4)


def test_a_closure_may_pack_in_the_forward_pass(monkeypatch):
    model, _, optimizer = packed_by_steps("srste_packed", monkeypatch)
    trained(model, optimizer)
    for _ in range(3):

        def closure():
            optimizer.zero_grad()
            loss = model(X).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        assert not optimizer.packed
        torch.testing.assert_close(model(X).detach(), recomputed(model, X), rtol=1e-4, atol=1e-4)


def test_on_a_cpu_steps_write_no_forms():
    model, handle, optimizer = begun("srste_packed")
    handle.attach(optimizer, forms="step")
    for _ in range(3):
        trained(model, optimizer)
        assert not optimizer.packed and not any(target.forms for target in optimizer.targets.values())
    check(model, handle)


def test_a_broken_promise_is_repaired_and_told(monkeypatch):
    model, _, optimizer = packed_by_steps("srste_packed", monkeypatch)
    with pytest.warns(UserWarning, match="between optimizer.step"):
        for _ in range(2 * effective.POLLED + 2):
            trained(model, optimizer)
            for p in model.parameters():
                p.data.mul_(1.01)
            torch.testing.assert_close(model(X).detach(), recomputed(model, X), rtol=1e-4, atol=1e-4)


def test_a_backward_pass_after_the_next_step_raises(monkeypatch):
    model, _, optimizer = packed_by_steps("srste_packed", monkeypatch)
    trained(model, optimizer)
    x = X.clone().requires_grad_()
    y = model(x)
    trained(model, optimizer)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_skipped_step_leaves_forms_and_weights(monkeypatch):
    model, handle, optimizer = packed_by_steps("srste_packed", monkeypatch)
    trained(model, optimizer)
    for bad in (0.0, 1.0, 0.0):
        optimizer.grad_scale, optimizer.found_inf = torch.ones(1), torch.full((1,), bad)
        before = [p.detach().clone() for p in model.parameters()]
        trained(model, optimizer)
        assert all(map(torch.equal, before, model.parameters())) == bool(bad)
        assert len(optimizer.packed) == len(handle.layers)
        torch.testing.assert_close(model(X).detach(), recomputed(model, X), rtol=1e-4, atol=1e-4)


def test_a_skipped_step_offers_no_forms_of_another_weight(monkeypatch):
    model, _, optimizer = packed_by_steps("srste_packed", monkeypatch)
    trained(model, optimizer)
    optimizer.zero_grad()
    model(X).square().sum().backward()
    model[0].weight.detach()[row_that_no_check_sees(model[0])] += 1.0
    optimizer.grad_scale, optimizer.found_inf = torch.ones(1), torch.ones(1)
    optimizer.step()
    torch.testing.assert_close(model(X).detach(), recomputed(model, X), rtol=1e-4, atol=1e-4)


def test_a_hook_that_writes_weights_after_the_step(monkeypatch):
    """It runs before the recipe's own, being older."""
    as_on_a_gpu(monkeypatch)
    monkeypatch.setattr("nmkernels.optim.adamw.in_one_pass", lambda *args: True)

    def with_a_hook(*args, **keywords):
        optimizer = nm.optim.MaskedAdamW(*args, **keywords)
        optimizer.register_step_post_hook(lambda *_: model[0].weight.detach()[row_that_no_check_sees(model[0])].add_(1.0))
        return optimizer

    model, handle, optimizer = start(ROSTER["srste_packed"].recipe, F32, make=with_a_hook)
    handle.attach(optimizer, forms="step")
    for _ in range(3):
        trained(model, optimizer)
        torch.testing.assert_close(model(X).detach(), recomputed(model, X), rtol=1e-4, atol=1e-4)
    assert optimizer.packed


def test_layers_that_share_a_weight(monkeypatch):
    """The step writes the forms of one of them; the other makes its own."""
    as_on_a_gpu(monkeypatch)
    monkeypatch.setattr("nmkernels.optim.adamw.in_one_pass", lambda *args: True)
    monkeypatch.setattr("nmkernels.ops.adamw_pack.renew_changed_forms", lambda *args: None)  # which would repair it
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
    chosen = nm.recipes.get("srste:2:4", packed=True)
    handle = nm.sparsify_(model, chosen, filter_fn=lambda module, name: True)
    model[1].weight = model[0].weight
    optimizer = handle.attach(chosen.optimizer(model.parameters(), lr=0.1), forms="step")
    for _ in range(4):
        trained(model, optimizer)
        torch.testing.assert_close(model(X).detach(), recomputed(model, X), rtol=1e-4, atol=1e-4)
    assert optimizer.packed


def test_it_can_be_left_again(monkeypatch):
    model, handle, optimizer = packed_by_steps("srste_packed", monkeypatch)
    trained(model, optimizer)
    assert optimizer.packed
    handle.attach(optimizer)
    trained(model, optimizer)
    assert not optimizer.packed
    torch.testing.assert_close(model(X).detach(), recomputed(model, X), rtol=1e-4, atol=1e-4)


def test_forms_of_a_step_need_masked_adamw():
    model, handle, _ = begun("srste_packed")
    for forms, said in (("step", "MaskedAdamW"), ("backward", "not known")):
        with pytest.raises(nm.RecipeError, match=said):
            handle.attach(torch.optim.AdamW(model.parameters()), forms=forms)


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
    watched = optimizers._attached
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
