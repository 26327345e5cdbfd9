"""Does one run: from a spec to a row."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import nmkernels as nm
from nmkernels.recipes.methods.step import REASONS

from . import methods, tasks
from .data import save
from .dense_v import AdamWithDenseV
from .place import HERE, Place
from .rows import RunRow, stamp
from .spec import DENSE, Case, RunSpec
from .tasks import Settings

DIGITS = {"val_loss": 6, "accuracy": 4, "bleu": 3, "int8": 6, "int4": 6}
"""Values that a task's ``evaluate`` may return, and the digits that are stored."""

MOMENTUM = 0.9
"""Of SGD."""

CALIBRATION = 32
"""Training batches, the first ones of the run, on which ``nm.prune_`` computes its Hessians."""

TRAINED = Path("build") / "accuracy"
"""Folder of densely trained weights, which several methods prune."""


@dataclass
class Attempt:
    """The row of a run, or why it failed."""

    spec: RunSpec
    row: RunRow | None = None
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
    """Parameter groups: matrices and kernels of convolutions with weight decay; all else, and a recipe's learned tensors, without."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.dim() in (2, 4) and not name.rpartition(".")[2].startswith("nm_")]
    ids = set(map(id, matrices))
    return [{"params": matrices}, {"params": [p for _, p in named if id(p) not in ids], "weight_decay": 0.0}]


class Training:
    """A model in training: its step, and where it is.

    Raises:
        ValueError: several processes are to share a model, and the method needs it whole.
    """

    def __init__(self, spec: RunSpec, place: Place = HERE) -> None:
        self.spec, self.place = spec, place
        self.task, self.method = tasks.get(spec.case.task), methods.get(spec.case.method)
        if place.parallel and (self.method.prune or self.method.dense_v):
            what = "prunes a whole model" if self.method.prune else "computes gradients of a second model"
            raise ValueError(f"the method {spec.case.method!r} {what}, in one process only; run it without torchrun")
        self.settings = self.task.settings
        torch.manual_seed(spec.seed)
        self.model = self.task.model().to(place.device)
        self.recipe = self.method.build(spec.case.pattern, spec.case.steps)
        self.handle: Any = None if self.method.prune else nm.sparsify_(self.model, self.recipe, self.task.filter_fn)
        self.wrapped = place.wrap(self.model)
        groups, case, s = param_groups(self.model), spec.case, self.settings
        make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW if self.method.prune else self.recipe.optimizer
        options: dict[str, Any] = {"betas": (s.betas[0], case.beta2)}
        if case.optimizer == "sgd":
            make, options = torch.optim.SGD, {"momentum": MOMENTUM}
        elif self.method.dense_v:
            make = AdamWithDenseV
        self.optimizer = make(groups, lr=spec.lr, weight_decay=s.weight_decay, **options)
        if self.handle is not None:
            self.handle.attach(self.optimizer)
        self.twin = self.task.model().to(place.device) if self.method.dense_v else None

    def step(self, step: int) -> float:
        """The training loss of a step, counted from 1; if it is not finite, nothing is updated."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.settings, self.spec.lr, step, self.spec.case.steps)
        parts = self.place.parts(self.task.batch(self.spec.seed, step), self.task.most)
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for part in map(self.place.move, parts):
            loss = self._loss(self.wrapped, part) / len(parts)
            value = self.place.mean(loss)
            total += value
            if not math.isfinite(value):
                return value
            loss.backward()
        if self.twin is not None:
            self._dense_gradients(self.twin, parts)
        if self.settings.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        self.optimizer.step()
        return total

    def _loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        with self.place.autocast():
            return self.task.loss(model, batch)

    def _dense_gradients(self, twin: nn.Module, parts: list[tuple[Tensor, ...]]) -> None:
        """Give the optimizer the gradients of the dense weights on the same batch, clipped by their own norm."""
        with torch.no_grad():
            for mine, theirs in zip(twin.parameters(), self.model.parameters(), strict=True):
                mine.copy_(theirs)
        twin.zero_grad(set_to_none=True)
        for part in map(self.place.move, parts):
            (self._loss(twin, part) / len(parts)).backward()
        if self.settings.clip is not None:
            nn.utils.clip_grad_norm_(twin.parameters(), self.settings.clip)
        assert isinstance(self.optimizer, AdamWithDenseV)
        self.optimizer.dense = {p: q.grad for p, q in zip(self.model.parameters(), twin.parameters(), strict=True)}

    def prune(self) -> None:
        """Prune the dense model; the optimizer then goes on with the masks held, or as the recipe says."""
        every = (self.task.batch(self.spec.seed, step) for step in range(1, CALIBRATION + 1))
        batches = [self.place.move(part) for batch in every for part in self.place.parts(batch, self.task.most)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of layers with few tokens
            self.handle = nm.prune_(
                self.model, self.spec.case.pattern, batches, self.task.filter_fn, method=self.method.prune, forward=self._loss
            )
        if self.method.recipe != "asp":  # which goes on from the pruned weights
            self.handle.finish(allow_unused=True)
            self.handle.remove()
            self.handle = nm.sparsify_(self.model, self.recipe, self.task.filter_fn)
        self.handle.attach(self.optimizer)

    def evaluate(self) -> dict[str, float]:
        """The values of the deployable weights."""
        self.model.eval()
        with self.handle.deployable() if self.handle is not None else nullcontext(), self.place.autocast():
            return self.task.evaluate(self.model, self.spec.tuning)


def run(spec: RunSpec, place: Place = HERE) -> Attempt:
    """Train, and evaluate the deployable weights.

    Raises:
        ValueError: the task or the method is unknown. NMError: the recipe cannot be built, or does not fit the model or the optimizer.
    """
    begin, case = place.clock(), spec.case
    it = Training(spec, place)
    prune_at = round(it.method.at * case.steps) if it.method.prune else None
    loss, done = 0.0, 0
    if prune_at == case.steps:
        weights, done = _trained(replace(spec, case=replace(case, method=DENSE)), place), case.steps
        if weights is None:
            loss = math.nan
        else:
            it.model.load_state_dict(weights)
    for step in range(done + 1, case.steps + 1):
        if step - 1 == prune_at:
            it.prune()
        loss, done = it.step(step), step
        if not math.isfinite(loss):
            break
    if prune_at == case.steps and math.isfinite(loss):
        it.prune()
    if case.method == DENSE and not place.parallel and math.isfinite(loss):
        save({name: value.cpu() for name, value in it.model.state_dict().items()}, _file(spec, place))
    result = it.evaluate() if math.isfinite(loss) else {"val_loss": math.nan}
    ok = all(map(math.isfinite, result.values()))
    value = {name: round(result.get(name, math.nan), digits) if ok else math.nan for name, digits in DIGITS.items()}
    state = it.handle.state if it.handle is not None else {}
    switch = int(state.get("switch_step", 0))
    training, inference = run_flops(case, switch)
    made: dict[str, Any] = {**asdict(case), **value, **stamp()}
    row = RunRow(
        lr=spec.lr,
        seed=spec.seed,
        switch_step=switch,
        switch_reason=REASONS[state.get("switch_reason", 0)],
        status="ok" if ok else "diverged",
        done=done,
        seconds=round(place.clock() - begin, 2),
        training_flops=training * done / case.steps,
        inference_flops=inference,
        data=it.task.digest,
        **made,
    )
    return Attempt(spec, place.row(row))


def _trained(spec: RunSpec, place: Place) -> dict[str, Tensor] | None:
    """The weights of a dense run, from its file if it was done here before; None if it diverges."""
    file = _file(spec, place)
    if not file.exists():
        run(spec, place)
    return torch.load(file, weights_only=True) if file.exists() else None


def _file(spec: RunSpec, place: Place) -> Path:
    data = tasks.get(spec.case.task).digest
    where = "" if place == HERE else f"-{place.device}" + "-bf16" * place.bf16
    return TRAINED / (f"{spec.key}-{data}{where}.pt".replace("/", "-").replace(" ", "-"))


def settle_process(threads: int = 1) -> None:
    """Set up a worker process: one thread, low priority, and no warning about what the row records."""
    torch.set_num_threads(threads)
    os.nice(19)
    warnings.filterwarnings("ignore", message="STEP: AutoSwitch switched")


def attempt(spec: RunSpec, place: Place = HERE) -> Attempt:
    """``run`` with errors as text, so that one bad run does not end the others.

    Of several processes that share a model, one may fail alone, as for lack of memory, and the others would wait for it; so there only
    errors that all of them raise become text, and torchrun ends the others after any other error.
    """
    try:
        return run(spec, place)
    except Exception as error:
        if place.parallel and not isinstance(error, (ValueError, nm.NMError)):
            raise
        return Attempt(spec, error=f"{type(error).__name__}: {error}")


@cache
def run_flops(case: Case, switch_step: int = 0) -> tuple[float, float]:
    """(training FLOPs of the whole run, inference FLOPs per token) of the linear layers.

    Args:
        switch_step: STEP's T₀, 0 if there is none.
    """
    it, method = tasks.get(case.task), methods.get(case.method)
    recipes = [method.build(case.pattern, case.steps)]
    if method.dense_v:
        recipes.append(methods.get(DENSE).build(DENSE, case.steps))
    costs = [
        nm.flops(it.model(), recipe, case.steps, tokens=it.tokens, rows=it.shares, filter_fn=it.filter_fn, switch_step=switch_step or None)
        for recipe in recipes
    ]
    return sum(cost.training for cost in costs), costs[0].inference
