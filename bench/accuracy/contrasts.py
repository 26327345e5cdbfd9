"""The contrasts on STEP's claim, fixed before their runs. Only they are tested; everything else on the pages is description."""

from __future__ import annotations

from dataclasses import dataclass

from .plan import Results
from .spec import DENSE, Case
from .stats import LEVEL, Estimate, combined, holm, verdict
from .studies import EPOCHS, LONG, SHORT, case, resolve
from .tasks.base import settings

Terms = tuple[tuple[float, Case], ...]


@dataclass(frozen=True)
class Contrast:
    """Σ coefficient · loss, paired by seed, each case at its own best rate; below 0, ``ours`` is better."""

    what: str
    terms: Terms

    @property
    def task(self) -> str:
        """The task of all terms."""
        return self.terms[0][1].task


def place(task: str, pattern: str, beta2: float | None = None, steps: int | None = None) -> str:
    """Where something was measured, for the tables; β₂ and steps if given."""
    return f"`{task}` {pattern}" + (f", β₂ = {beta2:g}" if beta2 else "") + (f", {steps:,} steps" if steps else "")


def _at(ours: str, theirs: str, where: tuple[tuple[str, str], ...], beta2: float | None = None, steps: int | None = None) -> list[Contrast]:
    signs = ((1.0, ours), (-1.0, theirs))
    return [Contrast(place(t, p, beta2), tuple((s, case(t, m, p, beta2=beta2, steps=steps)) for s, m in signs)) for t, p in where]


def _long(ours: str, theirs: str) -> list[Contrast]:
    places = (("mlp", "2:4"), ("mlp", "1:8"), ("gpt", "2:4"))
    found = [c for beta2 in (SHORT, 0.999) for c in _at(ours, theirs, places, beta2, LONG)]
    return [*found, *_at(ours, theirs, (("translation", "2:4"),), SHORT), *_at(ours, theirs, (("sentiment", "1:4"),), SHORT, EPOCHS)]


FROZEN, THAWED = "step-25", "step-25-thawed"
PLACES = (("mlp", "2:4"), ("mlp", "1:8"), ("finetune", "2:4"), ("vit", "2:4"), ("gpt", "2:4"))


GAP = ((1.0, "srste", "adamw"), (-1.0, DENSE, "adamw"), (-1.0, "srste", "sgd"), (1.0, DENSE, "sgd"))
"""(SR-STE − dense) under Adam, minus (SR-STE − dense) under SGD."""

FAMILIES: dict[str, list[Contrast]] = {
    "freeze": _at(FROZEN, THAWED, PLACES),
    "oracle": _at("oracle", "ste", PLACES),
    "long-freeze": _long(FROZEN, THAWED),
    "long-oracle": _long("oracle", "ste"),
    "premise": [Contrast(f"`mlp` {p}", tuple((sign, case("mlp", m, p, o)) for sign, m, o in GAP)) for p in ("2:4", "1:8", "1:16")],
}
"""Name -> contrasts that are corrected together."""


@dataclass(frozen=True)
class Finding:
    """The result of a contrast.

    Args:
        p: after Holm's correction over its family.
        verdict: ``level``, ``ahead``, ``behind`` or ``not known``; ahead and behind only with p below 5 %.
    """

    contrast: Contrast
    estimate: Estimate
    p: float
    verdict: str


def findings(results: Results, family: str) -> list[Finding]:
    """The results of a family, corrected over all of it, including the contrasts not measured yet."""
    every = FAMILIES[family]
    found = [combined([(c, losses(results, each)) for c, each in contrast.terms]) for contrast in every]
    adjusted = holm([e.p for e in found])
    return [Finding(c, e, p, _verdict(e, p, settings(c.task).margin)) for c, e, p in zip(every, found, adjusted, strict=True)]


def _verdict(e: Estimate, p: float, margin: float) -> str:
    said = verdict(e, margin)
    return "not known" if said in ("ahead", "behind") and not p < 1 - LEVEL else said


def losses(results: Results, case: Case) -> dict[int, float]:
    """Evaluation seed -> loss at the case's best rate; empty if it has none yet."""
    known = resolve(case, results)
    return {seed: row.val_loss for seed, row in results.best(known).items()} if known else {}
