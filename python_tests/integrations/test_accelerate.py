"""Accelerate: a recipe attached before or after ``accelerator.prepare`` trains as without it, and ``save_state`` keeps all of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import nmkernels as nm
from nmkernels.optim import MaskedAdamW
from python_tests.recipes.loop import Adam, batches, distance, loss_of, mlp, snapshot

pytest.importorskip("accelerate", reason="accelerate is not installed")
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState

R = nm.recipes
F32 = torch.float32
RECIPES = {
    "step": R.STEP("2:4", t_min=2, t_max=6, threshold=1e-30),
    "asp": R.ASP("2:4", start=3),
    "srste": R.SRSTE("2:4", decay=1e-2),
    "sste": R.SSTE("2:4"),
    "slope": R.SLoPe("2:4", total_steps=8, rank=2, start=5),
}
KINDS = [(name, kind) for kind in (MaskedAdamW, torch.optim.AdamW) for name in RECIPES if (name, kind) != ("step", torch.optim.AdamW)]
KEYWORDS = Adam(lr=1e-2).keywords
DATA = batches(8, F32)


@pytest.fixture(autouse=True)
def _anew():
    """Accelerate's state belongs to the process, with the settings of who came first."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def plain(recipe: Any, kind: type[torch.optim.Optimizer], autocast: bool = False) -> tuple[Any, Any]:
    """Two halves of a batch to a step, clipped, with a schedule."""
    model = mlp(F32)
    handle = nm.sparsify_(model, recipe)
    optimizer = handle.attach(kind(model.parameters(), **KEYWORDS))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 8)
    for x, y in DATA:
        for part in zip(x.chunk(2), y.chunk(2), strict=True):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                out = model(part[0])
            (torch.nn.functional.mse_loss(out.float(), part[1]) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model, handle


class Run:
    """The same by Accelerate."""

    def __init__(self, recipe: Any, kind: type[torch.optim.Optimizer], first: bool = False, **given: Any) -> None:
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **given)
        model = mlp(F32)
        self.handle = nm.sparsify_(model, recipe)
        optimizer = kind(model.parameters(), **KEYWORDS)
        if first:
            assert self.handle.attach(optimizer) is optimizer
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 8)
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(model, optimizer, schedule)
        assert type(self.optimizer) is AcceleratedOptimizer
        if not first:
            assert self.handle.attach(self.optimizer) is self.optimizer, "the wrapper comes back"

    def train(self, data: list[Any]) -> None:
        for x, y in data:
            for part in zip(x.chunk(2), y.chunk(2), strict=True):
                with self.accelerator.accumulate(self.model):
                    self.accelerator.backward(loss_of(self.model, part))
                    if self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                    self.optimizer.step()
                    self.schedule.step()
                    self.optimizer.zero_grad()


@pytest.mark.quick(2, per="first")
@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize(("name", "kind"), KINDS, ids=lambda x: getattr(x, "__name__", x))
def test_training_and_resuming_is_a_plain_loop(tmp_path, name, kind, first):
    want, other = plain(RECIPES[name], kind)
    run = Run(RECIPES[name], kind, first)
    run.train(DATA[:4])
    run.accelerator.save_state(str(tmp_path))
    run.train(DATA[4:])
    resumed = Run(RECIPES[name], kind, not first)
    resumed.accelerator.load_state(str(tmp_path))
    resumed.train(DATA[4:])
    for done in (run, resumed):
        assert distance(snapshot(done.model), snapshot(want)) == 0.0
        for key, value in other.metrics().items():
            assert done.handle.metrics()[key].item() == value.item(), key
    other.finish()
    resumed.handle.finish()
    assert distance(snapshot(resumed.model), snapshot(want)) == 0.0
    assert all(nm.ops.is_nm(layer.weight, "2:4") for layer in resumed.handle.layers.values())


def test_bf16(tmp_path):
    want, _ = plain(RECIPES["srste"], MaskedAdamW, autocast=True)
    run = Run(RECIPES["srste"], MaskedAdamW, mixed_precision="bf16")
    run.train(DATA)
    assert distance(snapshot(run.model), snapshot(want)) == 0.0


@pytest.mark.parametrize("kind", [MaskedAdamW, torch.optim.AdamW])
@pytest.mark.parametrize("name", ["srste", "asp"])
def test_a_grad_scaler_that_skips_a_step(name, kind):
    """Accelerate makes its scaler on a GPU only; it hands the optimizer to one all the same."""

    def run(wrap):
        model = mlp(F32)
        handle = nm.sparsify_(model, RECIPES[name])
        optimizer, scaler = kind(model.parameters(), **KEYWORDS), torch.amp.GradScaler("cpu", init_scale=2.0**10)
        wrapped = handle.attach(AcceleratedOptimizer(optimizer, scaler=scaler) if wrap else optimizer)
        for i, batch in enumerate(DATA):
            scaler.scale(loss_of(model, batch) * (float("inf") if i == 2 else 1.0)).backward()
            if wrap:
                wrapped.step()
            else:
                scaler.step(wrapped)
                scaler.update()
            wrapped.zero_grad()
        return model, handle, scaler

    Accelerator(cpu=True)
    want, other, scaler = run(wrap=False)
    model, handle, same = run(wrap=True)
    assert scaler.get_scale() == same.get_scale() == 2.0**9, "one step was skipped"
    assert distance(snapshot(model), snapshot(want)) == 0.0
    if name == "asp":
        assert handle.state["t"] == other.state["t"] == 7
    handle.finish()
    assert all(nm.ops.is_nm(layer.weight, "2:4") for layer in handle.layers.values())


def test_non_optimizers_are_refused():
    run = Run(RECIPES["srste"], MaskedAdamW)
    handle = nm.sparsify_(mlp(F32), RECIPES["srste"])
    with pytest.raises(nm.RecipeError, match="attach: AcceleratedScheduler is neither an optimizer"):
        handle.attach(run.schedule)
    with pytest.raises(nm.RecipeError, match="drives the recipe of another model"):
        run.optimizer.optimizer.add_param_group({"params": list(handle.model.parameters())})
        handle.attach(run.optimizer)
    with pytest.raises(nm.RecipeError, match="freezes the second moment, which AdamW cannot"):
        Run(RECIPES["step"], torch.optim.AdamW)
