"""What is compared: the cases of each study, in the order in which they are run. Every claim of the page is about one of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from . import methods
from .methods import SRSTE, VARIANTS
from .plan import Results, cost, mean_loss
from .spec import DENSE, OPTIMIZERS, TUNING_SEEDS, Case, RunSpec
from .tasks.base import settings
from .tasks.code import LARGER, WIDTHS

TASKS = ("mlp", "finetune", "vit", "gpt", "translation")
"""The tasks of the main matrix."""

MATRIX = (
    *(DENSE, "ste", SRSTE, "step-auto", "sste", "mdgf-chain", "mdgf-ste"),
    *("asp", "asp-wanda", "asp-sparsegpt", "asp-admm", "fst-nm", "fst", "slope"),
    *("oneshot-magnitude", "oneshot-wanda", "oneshot-sparsegpt", "oneshot-admm"),
)
"""The methods of the main matrix."""

LONG = 20_000
"""Steps of the runs that are long for STEP: its dense phase lasts several windows 1/(1 − β₂)."""


EPOCHS = 1503
"""Steps of three epochs of ``sentiment``."""

SHORT = 0.98
"""A β₂ whose window is 50 steps."""

FREEZE = (DENSE, "ste", "oracle", "step-25", "step-25-thawed")
"""What tells whether a dense v and its freeze help."""


CODE = tuple(f"code-{width}" for width in WIDTHS)
GPU = tuple(LARGER)
"""Models for a GPU: each larger one after a dense one of half its weights."""

SPARSE = ("asp", "srste-2e-1", "asp-admm")
"""What is compared with smaller dense models."""

LENGTHS = (1000, 3000, 10_000, 30_000)
"""Steps of runs that differ in nothing else but the rate."""


@dataclass(frozen=True)
class Study:
    """A list of cases: every method on every task at every pattern.

    Args:
        what: in a line, for the command line.
        methods, tasks: names.
        patterns: the task's own, those that are in both.
        optimizers, beta2s, steps: other than the task's own.
    """

    what: str
    methods: tuple[str, ...]
    tasks: tuple[str, ...] = TASKS
    patterns: tuple[str, ...] = ("2:4",)
    optimizers: tuple[str, ...] = OPTIMIZERS[:1]
    beta2s: tuple[float | None, ...] = (None,)
    steps: int | None = None

    def only(self, methods: Sequence[str] = (), tasks: Sequence[str] = (), patterns: Sequence[str] = ()) -> Study:
        """The study with others in place of its methods, tasks and patterns, where given."""
        return replace(
            self, methods=tuple(methods) or self.methods, tasks=tuple(tasks) or self.tasks, patterns=tuple(patterns) or self.patterns
        )


STUDIES = {
    "matrix": Study("the main matrix, 2:4", MATRIX),
    "matrix-1:8": Study("the same at 1:8", MATRIX, patterns=("1:8",)),
    "premise": Study("SR-STE under Adam and SGD", (DENSE, SRSTE), ("mlp", "resnet"), ("2:4", "1:8", "1:16"), OPTIMIZERS),
    "freeze": Study(
        "STEP with its second moment frozen and not, and a second moment from dense gradients",
        ("ste", "oracle", "step-10", "step-10-thawed", "step-25", "step-25-thawed"),
        ("mlp", "finetune", "vit", "gpt"),
        ("2:4", "1:8"),
    ),
    "long": Study(
        "the same in long runs",
        FREEZE,
        ("mlp", "gpt"),
        ("2:4", "1:8"),
        beta2s=(SHORT, 0.999),
        steps=LONG,
    ),
    "long-text": Study("the same where texts are learned, with a short window", FREEZE, ("translation",), beta2s=(SHORT,)),
    "epochs": Study("the same in three epochs of fine-tuning BERT", FREEZE, ("sentiment",), ("1:4",), beta2s=(SHORT,), steps=EPOCHS),
    "long-gpt": Study(
        "other methods in long runs of a GPT, SR-STE with the paper's λ and larger ones too",
        (DENSE, "ste", "srste-2e-4", "srste-2e-2", "srste-2e-1", SRSTE, "sste", "slope", "mdgf-chain", "asp"),
        ("gpt",),
        steps=LONG,
    ),
    "finetune-low": Study(
        "fine-tuning at rates far below those of pretraining",
        (DENSE, "admm-held", "admm-srste", "oneshot-admm", "mdgf-chain", SRSTE, "asp", "sste", "slope", "ste"),
        ("finetune-low",),
    ),
    "sizes": Study("dense models of several widths", (DENSE,), CODE),
    "sizes-2:4": Study("sparse ones of those widths", SPARSE, CODE[2:]),
    "sizes-1:4": Study("sparser ones", SPARSE[:1], CODE[3:], ("1:4",)),
    **{
        f"length-{steps}": Study(f"after {steps} steps at rates of their own", (DENSE, "ste", *SPARSE), ("code",), steps=steps)
        for steps in LENGTHS
    },
    "gpu-sizes": Study("models of 2 to 19 million weights", (DENSE, *SPARSE[:2]), GPU[1::2]),
    "gpu-smaller": Study("dense ones of half the weights", (DENSE,), GPU[::2]),
    "gpu-finetune": Study("training a pretrained language model", (DENSE, "admm-held", "srste-2e-1", "mdgf-chain"), ("smollm2-code",)),
    "gpu-masks": Study("learned masks for it", ("oneshot-admm", "maskllm"), ("smollm2-code",)),
    "switch": Study(
        "when STEP switches, and its settings",
        (
            "step-auto",
            "step-paper",
            "step-10",
            "step-25",
            "step-50",
            "step-25-raw",
            "step-25-raw-clamp",
            "step-25-noclamp",
            "step-25-inside",
        ),
        ("mlp", "finetune", "vit"),
    ),
    "resnet": Study("convolutions", (DENSE, "ste", SRSTE, "step-10", "sste", "mdgf-chain", "mdgf-ste", "asp"), ("resnet",), ("1:8",)),
    "sentiment": Study(
        "fine-tuning BERT", (DENSE, "ste", SRSTE, "step-25", "step-25-thawed", "mdgf-chain", "asp"), ("sentiment",), ("2:4", "1:4")
    ),
}
"""The studies, in the order of their value."""


def case(task: str, method: str, pattern: str, optimizer: str = "adamw", beta2: float | None = None, steps: int | None = None) -> Case:
    """A case of a task's own length and β₂ unless stated."""
    s = settings(task)
    steps = steps or s.steps
    if beta2 is None:
        windowed = method in methods.METHODS and methods.METHODS[method].window
        beta2 = 1 - 1 / max(10, min(1000, steps // 10)) if windowed else s.betas[1]
    return Case(task, method, pattern, steps, optimizer, round(beta2, 6))


def cases(study: Study, task: str) -> Iterator[Case]:
    """The cases of a task, each once; SR-STE's is that of ``SRSTE``, which has no λ yet."""
    s = settings(task)
    patterns = [p for p in study.patterns if p in s.patterns]
    found = [
        case(task, method, pattern, optimizer, beta2, study.steps)
        for optimizer in study.optimizers
        for beta2 in study.beta2s
        for pattern in patterns
        for method in study.methods
        if method not in s.without
    ]
    yield from dict.fromkeys(found)


def variants(it: Case) -> list[Case]:
    """The cases of which one stands for ``it``, at the task's first pattern and own length: it is chosen once per task and optimizer."""
    return [case(it.task, name, settings(it.task).patterns[0], it.optimizer) for name in VARIANTS[it.method]]


def variant_losses(case: Case, results: Results) -> dict[Case, float]:
    """The mean loss on the tuning seeds of each variant, at the best rate of the first one; empty before all are known."""
    every = variants(case)
    if _variants_todo(every, results):
        return {}
    lr = results.search(every[0]).best
    return {c: mean_loss({k: row for k, row in results.cases[c][lr].items() if k in TUNING_SEEDS}) for c in every}


def resolve(case: Case, results: Results) -> Case | None:
    """The case itself; for one with variants that of least mean loss by ``variant_losses``, or None before it is known."""
    if case.method not in VARIANTS:
        return case
    losses = variant_losses(case, results)
    return replace(case, method=min(losses, key=lambda c: losses[c]).method) if losses else None


def _variants_todo(every: list[Case], results: Results) -> list[RunSpec]:
    found = results.search(every[0])
    if found.todo:
        return results.todo(every[0])
    seeds = TUNING_SEEDS[: settings(every[0].task).tuning_seeds]
    return [RunSpec(c, found.best, k) for c in every for k in seeds if k not in results.cases.get(c, {}).get(found.best, {})]


def todo(case: Case, results: Results, seeds: int | None = None) -> list[RunSpec]:
    """The runs that a case of a study needs now."""
    known = resolve(case, results)
    return _variants_todo(variants(case), results) if known is None else results.todo(known, seeds)


def hours_left(cases: Iterable[Case], results: Results) -> float:
    """About how many CPU-hours the cases still need."""
    left = 0.0
    for each in cases:
        known = resolve(each, results)
        if known is None:  # the search of one variant, then one run per seed for each of the others
            first, *others = variants(each)
            left += cost(first, results.foreseen(first) + len(others) * settings(each.task).tuning_seeds)
        left += cost(each, results.foreseen(known or each))
    return left
