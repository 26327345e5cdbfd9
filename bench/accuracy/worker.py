"""Does one run: from a spec to a row and a trace."""

from __future__ import annotations

import math
import os
import time
import warnings
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import nn

import nmkernels as nm
from nmkernels.recipes import Recipe
from nmkernels.recipes.methods.step import REASONS

from . import methods, tasks, traces
from .rows import RunRow, stamp
from .spec import EVALUATION_SEEDS, TUNING_SEEDS, RunSpec
from .tasks import Settings, Task
from .traces import Trace

DIGITS = {"val_loss": 6, "other_loss": 6, "accuracy": 4, "bleu": 3}
"""Values that a task's ``evaluate`` may return, and the digits that are stored."""

LAST = 50
"""Steps whose training loss is averaged for the row."""

TRACED = {"tune": 1, "tuned": 2, "shared": 2, "controls": 1, "variants": 1, "lengths": 1}
"""The number of seeds whose traces are stored, by stage; traces are the larger files."""

MOMENTUM = 0.9
"""Of SGD."""


@dataclass
class Outcome:
    """The result of a run: its row and the lines of its trace, or why it failed."""

    spec: RunSpec
    row: RunRow | None = None
    trace: list[dict[str, str]] | None = None
    error: str = ""


def learning_rate(settings: Settings, peak: float, step: int, steps: int) -> float:
    """The learning rate of ``step``, counted from 1: a linear warm-up, then cosine or linear decay to ``settings.floor`` of the peak."""
    warmup = max(1, round(settings.warmup * steps))
    if step <= warmup:
        return peak * step / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    left = 1 - progress if settings.decay == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return peak * (settings.floor + (1 - settings.floor) * left)


def param_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups: matrices with weight decay, and everything else (including a recipe's learned tensors) without."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.dim() == 2 and not name.rpartition(".")[2].startswith("nm_")]
    ids = set(map(id, matrices))
    return [{"params": matrices}, {"params": [p for _, p in named if id(p) not in ids], "weight_decay": 0.0}]


def make_optimizer(spec: RunSpec, settings: Settings, recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    """The run's optimizer, not attached yet: the recipe's AdamW, or SGD with momentum."""
    groups = param_groups(model)
    if spec.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=spec.lr, momentum=MOMENTUM, weight_decay=settings.weight_decay)
    betas = (settings.betas[0], spec.beta2)
    return recipe.optimizer(groups, lr=spec.lr, betas=betas, weight_decay=settings.weight_decay)


def run(spec: RunSpec) -> Outcome:
    """Train, and evaluate the deployable weights.

    Raises:
        ValueError: the task or the method is unknown. NMError: the recipe cannot be built, or does not fit the model or the optimizer.
    """
    task, method = tasks.get(spec.task), methods.get(spec.method)
    settings = task.settings
    begin = time.process_time()
    torch.manual_seed(spec.seed)
    model = task.model()
    recipe = method.build(spec.pattern, spec.steps)
    handle = nm.sparsify_(model, recipe, task.filter_fn)
    optimizer = handle.attach(make_optimizer(spec, settings, recipe, model))
    trace = Trace(spec.key, spec.pattern, handle.layers, traces.stride(spec.steps)) if traced(spec) else None
    losses: list[float] = []
    for step in range(1, spec.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, spec.lr, step, spec.steps)
        losses.append(train_step(task, model, optimizer, spec.seed, step))
        if not math.isfinite(losses[-1]):
            break
        if trace is not None:
            trace.after(step, losses[-1], handle, optimizer)
    result = _evaluate(task, model, handle, spec.tuning) if math.isfinite(losses[-1]) else {"val_loss": math.nan}
    ok = all(map(math.isfinite, result.values()))
    value = {name: round(result.get(name, math.nan), digits) if ok else math.nan for name, digits in DIGITS.items()}
    last = losses[-LAST:]
    row = RunRow(
        task=spec.task,
        pattern=spec.pattern,
        method=spec.method,
        optimizer=spec.optimizer,
        beta2=spec.beta2,
        lr=spec.lr,
        steps=spec.steps,
        seed=spec.seed,
        purpose=spec.purpose,
        val_loss=value["val_loss"],
        other_loss=value["other_loss"],
        accuracy=value["accuracy"],
        bleu=value["bleu"],
        train_loss=round(sum(last) / len(last), 6),
        switch_step=int(handle.state.get("switch_step", 0)),
        switch_reason=REASONS[handle.state.get("switch_reason", 0)],
        status="ok" if ok else "diverged",
        done=len(losses),
        seconds=round(time.process_time() - begin, 2),
        training_flops=0.0,
        inference_flops=0.0,
        data=task.data(),
        **stamp(),
    )
    return Outcome(spec, row, trace.lines if trace else None)


def traced(spec: RunSpec) -> bool:
    """Whether the run's trace is stored."""
    return spec.seed in (TUNING_SEEDS if spec.tuning else EVALUATION_SEEDS)[: TRACED.get(spec.purpose, 0)]


def train_step(task: Task, model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, step: int) -> float:
    """One optimizer step; if the loss is not finite, nothing is updated."""
    loss = task.loss(model, task.batch(seed, step))
    value = loss.item()
    if math.isfinite(value):
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if task.settings.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), task.settings.clip)
        optimizer.step()
    return value


def _evaluate(task: Task, model: nn.Module, handle: Any, tuning: bool) -> dict[str, float]:
    model.eval()
    with handle.deployable():
        result = task.evaluate(model, tuning)
    model.train()
    return result


def settle_process(threads: int = 1) -> None:
    """Set up a worker process: one thread, low priority, and no warning about what the row records."""
    torch.set_num_threads(threads)
    os.nice(19)
    warnings.filterwarnings("ignore", message="STEP: the switch came at")


def attempt(spec: RunSpec) -> Outcome:
    """``run`` with FLOPs counted, and with errors as text, so that one bad run does not end the others."""
    try:
        outcome = run(spec)
        return replace(outcome, row=outcome.row and with_flops(outcome.row))
    except Exception as error:
        return Outcome(spec, error=f"{type(error).__name__}: {error}")


@cache
def run_flops(task: str, method: str, pattern: str, steps: int, switch_step: int = 0) -> tuple[float, float]:
    """(training FLOPs of the whole run, inference FLOPs per token) of the linear layers.

    Args:
        switch_step: STEP's T₀, 0 if there is none.
    """
    it = tasks.get(task)
    recipe = methods.get(method).build(pattern, steps)
    cost = nm.flops(it.model(), recipe, steps, tokens=it.tokens, rows=it.shares, filter_fn=it.filter_fn, switch_step=switch_step or None)
    return cost.training, cost.inference


def with_flops(row: RunRow) -> RunRow:
    """The row with its FLOPs; a diverged run counts the steps that it did."""
    training, inference = run_flops(row.task, row.method, row.pattern, row.steps, row.switch_step)
    return replace(row, training_flops=training * row.done / row.steps, inference_flops=inference)
