"""The life of the packed weight: packed once per optimizer step, in the optimizer's own pass where that can, and never stale."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import nmkernels as nm
from nmkernels.autograd import GemmPlan, HardMask, reads
from nmkernels.optim import MaskedAdamW
from nmkernels.recipes.methods.bimask import BiMasked
from python_tests import plain

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
        return self.names.count("pack") + self.names.count("compress")

    @property
    def dense(self):
        """Transformations into the dense layout."""
        return sum(name.removesuffix("_out") in ("prune", "soft_threshold") for name in self.names)


def model_of(make, recipe="srste:2:4(packed=True)", plan=None, transform=None, **config):
    model = nn.Sequential(nn.Linear(32, 16))
    handle = nm.sparsify_(model, recipe)
    optimizer = handle.attach(make(model.parameters(), lr=0.05, **config)) if make else None
    if plan is not None:
        model[0].use(transform or model[0].transform, plan)
    return model, model[0], optimizer


def fused(params, lr):
    return torch.optim.AdamW(params, lr=lr, fused=True)


def ask(layer, dtype=torch.float32, rows=True, columns=False):
    return layer.effective.packed((layer.master, layer.transform, layer._extras(layer.transform), dtype), rows, columns, "canonical")


def right(layer, dtype=torch.float32):
    """Whether the layer would multiply, packed, the mask of the weight that it has now."""
    return torch.equal(ask(layer, dtype).rows.dense(), plain.masked(layer.master, 2, 4).to(dtype))


def step(model, optimizer, x=None):
    optimizer.zero_grad()
    model(torch.randn(4, 32) if x is None else x).square().sum().backward()
    optimizer.step()


# ---- how often


def three_kinds_of_forward(model, x, autocast):
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


@pytest.mark.parametrize("recipe", ["srste:2:4(packed=True)", "sste:2:4(packed=True)", "fst:2:4(packed=True, end=None, every=2)"])
def test_packed_once_per_step_with_accumulation_checkpointing_and_evaluation(recipe):
    for autocast in [False, True]:
        for make in [torch.optim.AdamW, fused, torch.optim.SGD, MaskedAdamW]:
            model, layer, optimizer = model_of(make, recipe)
            x = torch.randn(4, 32, requires_grad=True)
            packs = []
            for _ in range(5):
                with Calls() as calls:
                    three_kinds_of_forward(model, x, autocast)
                assert calls.names.count("linear") == 7 and calls.dense == 0, "no copy in dense layout"
                optimizer.step()
                packs.append(calls.packs)
            assert packs == [1] * 5
            assert len(layer.effective.kept) == 1


def test_dense_and_packed_forms_are_made_once_each():
    for make in [torch.optim.AdamW, MaskedAdamW]:
        model, layer, optimizer = model_of(make, plan=MIXED)
        x = torch.randn(4, 32, requires_grad=True)
        counts = []
        for _ in range(4):
            with Calls() as calls:
                three_kinds_of_forward(model, x, False)
                optimizer.step()
                assert right(layer) and torch.equal(layer.effective_weight(), plain.masked(layer.weight, 2, 4))
            counts.append((calls.packs, calls.dense))
            assert "linear_dgrad" not in calls.names
        assert counts == [(2, 2)] + [(1, 1)] * 3, "the first weight, and then that of each step"


def test_both_orientations_come_of_one_call():
    model, layer, optimizer = model_of(torch.optim.AdamW, "fst:2:4(packed=True, end=None)", BOTH_WAYS)
    x = torch.randn(4, 32, requires_grad=True)
    for _ in range(3):
        with Calls() as calls:
            three_kinds_of_forward(model, x, False)
        assert calls.packs == 1 and calls.names.count("linear") == 7 + 3 and "linear_dgrad" not in calls.names
        x.grad = None
        y = model(x)
        y.backward(g := torch.randn_like(y))
        torch.testing.assert_close(x.grad, g @ (layer.weight * layer.nm_mask))
        optimizer.step()


def test_calls_that_read_different_forms_do_not_pack_in_turns():
    _, layer, optimizer = model_of(torch.optim.AdamW, "fst:2:4(packed=True, end=None)")
    for k in range(3):
        with Calls() as calls:
            for _ in range(3):
                assert ask(layer).rows is not None and ask(layer, rows=False, columns=True).columns is not None
        assert calls.packs == (2 if k == 0 else 1)
        layer.weight.grad = torch.randn_like(layer.weight)
        optimizer.step()


def test_a_transform_with_a_weight_of_its_own_for_dgrad_keeps_it_dense():
    plan, w, x = GemmPlan("packed", "device", n=2, m=4), torch.randn(16, 32), torch.randn(4, 32)
    assert reads(plan, HardMask(nm.Pattern("2:4")), w, w.dtype, x).dgrad == "packed"
    assert reads(plan, BiMasked(nm.Pattern("2:4")), w, w.dtype, x).dgrad == "dense"
    model, layer, _ = model_of(None, plan=plan, transform=BiMasked(nm.Pattern("2:4"), draws=0))
    layer.nm_order = torch.arange(16)
    h = x.clone().requires_grad_()
    model(h).sum().backward()
    used = plain.masked(layer.weight, 2, 4)
    torch.testing.assert_close(h.grad, layer.transform.for_dgrad(used, layer.nm_order).sum(0).expand(4, 32))
    assert not torch.allclose(h.grad, used.sum(0).expand(4, 32))


def test_nothing_is_kept_without_an_optimizer():
    model, layer, _ = model_of(None)
    x = torch.randn(4, 32, requires_grad=True)
    for _ in range(3):
        with Calls() as calls:
            model(x).sum().backward()
        assert calls.packs == 1 and not layer.effective.kept
        layer.weight.data.mul_(torch.rand(16, 32))  # bumps no version
        assert right(layer)
        with Calls() as calls, torch.no_grad():
            model(x)
        assert calls.packs == 1 and not layer.effective.kept


def test_an_evaluation_without_an_optimizer_makes_no_form_for_backward():
    model, _, _ = model_of(None, plan=MIXED)
    with Calls() as calls, torch.no_grad():
        model(torch.randn(4, 32))
    assert calls.names == ["pack", "linear"]
    with Calls() as calls:
        model(torch.randn(4, 32))
    assert sorted(calls.names) == ["linear", "pack", "prune"]


def test_packs_are_right_after_a_skipped_step():
    model, layer, optimizer = model_of(MaskedAdamW, plan=MIXED)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    step(model, optimizer)
    for t in range(6):
        before = layer.weight.detach().clone()
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(4, 32) * (torch.inf if t % 2 else 1.0)).sum()).backward()
        with Calls() as calls:
            scaler.step(optimizer)
            scaler.update()
            assert right(layer) and calls.packs == 1
        assert torch.equal(before, layer.weight) == bool(t % 2)
        assert torch.equal(layer.effective_weight(), plain.masked(layer.weight, 2, 4))


# ---- captured graphs


@pytest.mark.parametrize(("make", "recipe"), [(MaskedAdamW, "srste"), (torch.optim.AdamW, "srste"), (MaskedAdamW, "sste")])
def test_a_captured_forward_makes_its_own(make, recipe, monkeypatch):
    model, layer, optimizer = model_of(make, f"{recipe}:2:4(packed=True)")
    x = torch.randn(4, 32, requires_grad=True)
    for _ in range(2):
        step(model, optimizer)
    model(x)
    (before,) = layer.effective.kept
    contents = before.rows.dense()
    with monkeypatch.context() as patch, Calls() as calls:
        patch.setattr("nmkernels.nn.effective._capturing", lambda weight: True)
        losses = [model(x).sum() for _ in range(2)]
    assert calls.packs == 2, "whatever is replayed, the packed weight is that of the weight then"
    assert layer.effective.kept == (before,) and torch.equal(before.rows.dense(), contents), "and a replay does not write into a kept one"
    for loss in losses:
        loss.backward()  # the second forward pass has not overwritten what the first one saved


# ---- memory


@pytest.mark.parametrize(
    ("make", "recipe"), [(MaskedAdamW, "srste:2:4"), (torch.optim.AdamW, "srste:2:4"), (MaskedAdamW, "sste:2:4"), (MaskedAdamW, "fst:2:4")]
)
def test_packed_in_place(make, recipe):
    recipe += "(packed=True, end=None, every=1)" if recipe.startswith("fst") else "(packed=True)"
    model, layer, optimizer = model_of(make, recipe, BOTH_WAYS if recipe.startswith("fst") else None)
    addresses = set()
    for _ in range(4):
        step(model, optimizer)
        model(torch.randn(1, 32))
        (packed,) = layer.effective.kept
        addresses.add(tuple(x.data_ptr() for x in packed.buffers() if x is not None))
    assert len(addresses) == 1


def test_an_evaluation_of_another_form_leaves_the_backward_pass_and_no_copy():
    model = nn.Sequential(nn.Linear(32, 16))
    handle = nm.sparsify_(model, "srste:2:4(packed=True)")
    optimizer = handle.attach(MaskedAdamW(model.parameters()))
    x, layer = torch.randn(4, 32, requires_grad=True), model[0]
    y = model(x)
    with handle.deployable(), torch.no_grad():
        torch.testing.assert_close(model(x), y)
        assert len(layer.effective.kept) == 2
    y.sum().backward()
    torch.testing.assert_close(x.grad[0], plain.masked(layer.weight, 2, 4).sum(0))
    optimizer.step()
    with Calls() as calls:
        model(x)
    assert calls.packs == 1 and len(layer.effective.kept) == 1, "the dense copy is not kept up for evaluations"


def test_a_dense_phase_has_the_memory_back():
    model = nn.Sequential(nn.Linear(32, 16))
    handle = nm.sparsify_(model, nm.recipes.FST("2:4", 6, end=3, packed=True))
    optimizer = handle.attach(MaskedAdamW(model.parameters()))
    kept = []
    for _ in range(6):
        step(model, optimizer)
        kept.append(len(model[0].effective.kept))
    assert kept == [1, 1, 0, 0, 0, 0] and handle.run.stage.phase == 0
