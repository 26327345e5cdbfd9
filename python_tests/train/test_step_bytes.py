"""The bytes per weight that a training step moves outside of forward and backward, on the path that GPUs take: they must not grow back.

Counted from the ops that run: what each reads, writes and returns, of tensors as large as a weight. A dense step has 28 bytes in ``AdamW``,
which reads weight, gradient and two moments in float32 and writes all but the gradient, and 6 in the cast of the weight.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import nmkernels as nm
from nmkernels.autograd import transforms
from nmkernels.train import gradients

ROWS, COLS, TOKENS = 256, 128, 64
FORMS = ("values", "indices", "values_t", "indices_t", "spread")
"""What a step overwrites, of ``nm_masked_adamw_pack_``."""
VIEWS = (
    "view",
    "detach",
    "alias",
    "aten.t.",
    "transpose",
    "as_strided",
    "expand",
    "unsqueeze",
    "select",
    "slice",
    "split",
    "permute",
    "empty",
)


class Bytes(TorchDispatchMode):
    """Adds up the bytes that ops move, per weight of the layer, by the op's name."""

    def __init__(self):
        super().__init__()
        self.moved = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = str(func)
        if not any(view in name for view in VIEWS):
            sizes = 0
            for given, value in [
                *zip(func._schema.arguments, args, strict=False),
                *((a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs),
            ]:
                large = [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor) and t.numel() >= ROWS * COLS // 8]
                written = given.alias_info is not None and given.alias_info.is_write
                reads = not (written and (given.is_out or "copy_" in name or given.name in FORMS))
                sizes += sum(t.nbytes for t in large) * (reads + written)
            if not any(r.alias_info is not None for r in func._schema.returns):
                sizes += sum(t.nbytes for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor) and t.numel() >= ROWS * COLS // 8)
            if sizes:
                self.moved[name] = self.moved.get(name, 0.0) + sizes / (ROWS * COLS)
        return result


def on_a_gpu(monkeypatch):
    """Masks by ``where``, no fingerprints, and nothing of a weight that the host could read."""

    def masked(x, mask, out=None):
        zero = torch.zeros((), dtype=x.dtype)
        return torch.where(mask, x, zero).contiguous() if out is None else torch.where(mask, x, zero, out=out)

    monkeypatch.setattr(transforms, "masked", masked)
    monkeypatch.setattr(gradients, "masked", masked)
    monkeypatch.setattr("nmkernels.nn.effective.fingerprint", lambda *tensors: None)
    monkeypatch.setattr("nmkernels.nn.effective.readable", lambda weight: False)
    for caller in ("nmkernels.optim.adamw", "nmkernels.train.ahead"):
        monkeypatch.setattr(f"{caller}.in_one_pass", lambda *args: True)  # so that the reference runs it


def bytes_of_a_step(recipe, of_x, forms="forward", **options):
    """(bytes per weight in the optimizer's step, and in making W̃ for the forward pass after it), by op; ``of_x``: x needs a gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(COLS, ROWS, bias=False))
    chosen = nm.recipes.get(f"{recipe}:2:4", total_steps=1000, **options)
    handle = nm.sparsify_(model, chosen, filter_fn=lambda module, name: True)
    optimizer = handle.attach(chosen.optimizer(model.parameters(), lr=1e-4), forms=forms)
    x = torch.randn(TOKENS, COLS, requires_grad=of_x)

    def forward():
        layer = model[0]
        if layer.plan.fprop == "packed" and not layer.transform.traits.transposable:
            layer.plan = replace(layer.plan, dgrad="dense")  # packed rows in a tensor core's order are of no use to dgrad
        elif layer.plan.fprop == "packed":
            layer.plan = replace(layer.plan, dgrad="columns")
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    for _ in range(3):
        y = forward()
        y.backward(torch.ones_like(y))
        with Bytes() as step:
            optimizer.step()
        optimizer.zero_grad()
    with Bytes() as first:
        forward()
    with Bytes() as again:
        forward()
    making = {name: size - again.moved.get(name, 0.0) for name, size in first.moved.items()}
    return step.moved, {name: size for name, size in making.items() if size}


ADAMW, HELD = 28.0, 28 + 0.125
"""Weight, gradient and two moments in float32; and the bits of a held mask."""
FPROP, BOTH = 4 + 1.125, 4 + 1.125 + 2
"""A reading of the weight, its rows packed in bf16, and W̃ in bf16, which dgrad reads."""
PACKED = {"srste": {}, "sste": {"seed": 0}, "step": {"switch": "fixed", "start": 1}}
"""Recipe -> its settings."""
STEPS = {
    "ste": ({}, ADAMW),
    "mdgf": ({}, ADAMW),
    "sdgf": ({}, ADAMW),
    "asp": ({}, HELD),
    "slope": ({"rank": 0}, HELD),
    "fst": ({"seed": 0, "end": None}, HELD),
    **{recipe: (options, ADAMW) for recipe, options in PACKED.items()},
}
"""Recipe -> its settings, bytes of its step. Not MaskLLM, whose step is about learned logits, several for each weight."""


@pytest.mark.parametrize("recipe", STEPS)
def test_no_op_of_torch_goes_over_a_weight_in_a_step(recipe, monkeypatch):
    on_a_gpu(monkeypatch)
    options, expected = STEPS[recipe]
    step, _ = bytes_of_a_step(recipe, True, **options)
    assert step == {"nmkernels.nm_masked_adamw_.default": expected}


@pytest.mark.parametrize("of_x", [True, False])
@pytest.mark.parametrize("recipe", PACKED)
def test_all_forms_come_from_one_reading(recipe, of_x, monkeypatch):
    on_a_gpu(monkeypatch)
    _, making = bytes_of_a_step(recipe, of_x, packed=True, **PACKED[recipe])
    assert making == {"nmkernels.nm_pack_forms_.default": BOTH if of_x else FPROP}


def test_sums_of_a_whole_step(monkeypatch):
    """Outside of forward and backward, where a dense step has 34. Of a held mask bits are read, and its positions stay as they are."""
    on_a_gpu(monkeypatch)
    for recipe in ("srste", "sste", "step", "fst"):
        options, _ = STEPS[recipe]
        step, making = bytes_of_a_step(recipe, True, packed=True, **options)
        assert making.keys() == {"nmkernels.nm_pack_forms_.default"}
        expected = HELD + 4 + 0.125 + 2 if recipe == "fst" else ADAMW + BOTH
        assert sum(step.values()) + sum(making.values()) == expected <= 36


def test_bytes_of_a_dense_copy(monkeypatch):
    """Masked and in bf16, as a dense GEMM under autocast reads it: in one reading too."""
    on_a_gpu(monkeypatch)
    model = nn.Sequential(nn.Linear(COLS, ROWS, bias=False))
    nm.sparsify_(model, nm.recipes.get("srste:2:4", packed=False, total_steps=1000), filter_fn=lambda module, name: True)
    x = torch.randn(TOKENS, COLS, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16), Bytes() as making:
        model(x)
    making.moved.pop("aten.mm.default")
    assert making.moved == {"nmkernels.nm_pack.default": 6.0}


@pytest.mark.parametrize("recipe", [*PACKED, "fst"])
def test_a_step_that_writes_the_forms(recipe, monkeypatch):
    """The weight is read once; the forward pass makes nothing, but of a first layer's form for dgrad, which nobody reads."""
    on_a_gpu(monkeypatch)
    options, expected = STEPS[recipe]
    for of_x in (True, False):
        back = 1.125 if recipe == "fst" else 2
        step, making = bytes_of_a_step(recipe, of_x, forms="step", packed=True, **options)
        assert step == {"nmkernels.nm_masked_adamw_pack_.default": expected + 1.125 + (back if of_x else 0)}
        assert making == {}
