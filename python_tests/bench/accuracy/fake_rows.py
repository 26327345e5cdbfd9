"""Made-up rows of the plan's runs, whose losses follow a known formula."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterator

from bench.accuracy import tasks
from bench.accuracy.plan import pending, plan
from bench.accuracy.rows import RunRow
from bench.accuracy.spec import RunSpec

SETTINGS = {
    "mlp": tasks.Settings(
        steps=1000,
        lr=3e-3,
        start=(1e-3, 3e-3, 1e-2),
        start_sgd=(0.03, 0.1, 0.3),
        seeds=6,
        methods=("dense", "srste", "step", "step-25", "step-25-thawed"),
        sgd_methods=("dense", "srste"),
        patterns=("1:8", "1:16"),
        lengths=(1, 2, 4),
        seconds=1.0,
    ),
    "sentiment": tasks.Settings(
        steps=500, tune_steps=250, lr=1e-4, start=(5e-5, 1e-4, 2e-4), factor=2, methods=("dense", "srste", "step-25"), patterns=("1:4",)
    ),
}

BEST = {"adamw": 1e-2, "sgd": 0.1}
EXTRA = {"dense": 0.0, "srste": 0.1, "step": 0.2, "step-25": 0.15, "step-25-thawed": 0.12}
"""Loss over dense at 1:8; under SGD half as much again."""


def noise(*words: object) -> float:
    """From −1 to 1, always the same for the same words."""
    digest = hashlib.sha256(repr(words).encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**31 - 1


def loss(spec: RunSpec) -> float:
    """The loss of a run: shared noise of the seed, a little of the run's own, a parabola in log lr, and the method's own part."""
    best = BEST[spec.optimizer] if spec.task == "mlp" else 1e-4
    scale = (1.5 if spec.optimizer == "sgd" else 1.0) * (2 if spec.pattern == "1:16" else 1)
    extra = EXTRA.get(spec.method, 0.1) * scale * (spec.task == "mlp")
    shape = 0.2 * math.log10(spec.lr / best) ** 2 - 0.02 * math.log(spec.steps / 1000)
    return 0.3 + extra + shape + 0.05 * noise(spec.task, spec.seed) + 0.004 * noise(spec.key)


def row(spec: RunSpec, value: float | None = None, **more: object) -> RunRow:
    """The row of a run."""
    blank = {f.name: {"int": 0, "float": 0.0, "str": "x"}[str(f.type)] for f in dataclasses.fields(RunRow)}
    known = {name: getattr(spec, name) for name in ("task", "method", "pattern", "optimizer", "beta2", "lr", "steps", "seed", "purpose")}
    flops = spec.steps * (1.0 if spec.method == "dense" else 0.75) * 1e6
    switch = {"switch_step": 51, "switch_reason": "t_min"} if spec.method == "step" else {"switch_reason": ""}
    value = loss(spec) if value is None else value
    results = {
        "val_loss": value,
        "accuracy": 90 - 10 * value,
        "status": "ok" if math.isfinite(value) else "diverged",
        "training_flops": flops,
    }
    return RunRow(**{**blank, **known, **switch, **results, "seconds": 36.0, "done": spec.steps, **more})  # type: ignore[arg-type]


def rows(task: str = "mlp", stages: tuple[str, ...] = ("tune", "tuned", "shared", "controls", "lengths")) -> list[RunRow]:
    """What the stages of the plan ask for, done."""
    done: list[RunRow] = []
    for stage in stages:
        while todo := pending(plan(stage, task, done), done):
            done += [row(spec) for spec in todo]
    return done


def registered() -> Iterator[tuple[str, type[tasks.Task]]]:
    """Tasks that only have settings."""
    for name, settings in SETTINGS.items():
        yield name, type(name, (tasks.Task,), {"settings": settings, "name": name, "tokens": 1})
