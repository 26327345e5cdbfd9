"""The methods: names and their recipes, with the package's default settings unless stated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nmkernels import recipes

from .spec import DENSE, unknown


@dataclass(frozen=True)
class Method:
    """One training method.

    Args:
        recipe: name in the package's registry.
        config: its keywords that differ from the defaults.
        note: a description in one line, for the page.
    """

    recipe: str
    config: dict[str, Any] = field(default_factory=dict)
    note: str = ""

    def build(self, pattern: str, steps: int) -> recipes.Recipe:
        """The recipe of a run of ``steps`` steps that ends with ``pattern``."""
        more = {} if pattern == DENSE else {"pattern": pattern}
        return recipes.get(self.recipe, total_steps=steps, **more, **self.config)


CORE = {
    "dense": Method("dense", note="dense baseline"),
    "asp": Method("asp", {"start": 0.5}, note="prune once at half of the steps, then keep the mask"),
    "ste": Method("ste", note="straight-through estimator"),
    "srste": Method("srste", note="SR-STE with the paper's λ = 2e-4"),
    "step": Method("step", note="STEP: AutoSwitch (arithmetic, between 10 % and 50 %), v̂* bias-corrected, clamp 2"),
    "sste": Method("sste", note="S-STE with exact MVUE of the output gradient"),
    "mdgf": Method("mdgf", note="mask decay as in the authors' code: straight-through gradient, no dense tail"),
    "sdgf": Method("sdgf", note="structure decay as in the authors' code: the same, stepwise"),
}
"""The eight methods of the main tables."""

STEPS = {
    "step-10": Method("step", {"switch": "fixed", "start": 0.1}, note="STEP, T₀ fixed at 10 %"),
    "step-25": Method("step", {"switch": "fixed"}, note="STEP, T₀ fixed at 25 %"),
    "step-50": Method("step", {"switch": "fixed", "start": 0.5}, note="STEP, T₀ fixed at 50 %"),
    "step-10-thawed": Method(
        "step", {"switch": "fixed", "start": 0.1, "freeze": False}, note="STE after 10 % of dense steps, Adam's v not frozen"
    ),
    "step-25-thawed": Method("step", {"switch": "fixed", "freeze": False}, note="STE after 25 % of dense steps, Adam's v not frozen"),
    "step-geometric": Method("step", {"switch": "geometric"}, note="STEP, option II"),
    "step-norm": Method("step", {"switch": "relative_norm"}, note="STEP, switched by the relative norm of v"),
    "step-stale": Method("step", {"switch": "staleness"}, note="STEP, switched by the staleness of v"),
    "step-relative": Method("step", {"switch": "relative"}, note="STEP, a threshold relative to the gradient's scale (ours)"),
}
"""STEP with other switches, and its controls, in which Adam's second moment is not frozen."""

KAO = {
    "mdgf-kao": Method("mdgf", {"gradient": "chain", "end": 0.75}, note="mask decay of Kao et al.: chain rule, 25 % dense tail"),
    "sdgf-kao": Method("sdgf", {"gradient": "chain", "end": 0.75}, note="structure decay of Kao et al.: the same"),
}
"""The gradient flow of Kao et al. (2022), before the paper that named it."""

VARIANTS = {
    **STEPS,
    **KAO,
    "step-noclamp": Method("step", {"clamp": None}, note="STEP without the clamp"),
    "step-raw": Method("step", {"clamp": None, "bias_corrected": False}, note="STEP, v* not bias-corrected, no clamp"),
    "step-25-raw": Method(
        "step", {"switch": "fixed", "clamp": None, "bias_corrected": False}, note="STEP, T₀ fixed at 25 %, v* raw, no clamp"
    ),
    "step-decay": Method("step", {"decay": 2e-4}, note="STEP with SR-STE's decay in phase 1"),
    "step-10-decay": Method("step", {"switch": "fixed", "start": 0.1, "decay": 2e-2}, note="STEP, T₀ at 10 %, λ = 2e-2 in phase 1"),
    "step-mdgf": Method("step", {"inner": "mdgf(end=0.75,gradient='chain')"}, note="STEP with Kao's mask decay in phase 1"),
    "srste-2e-3": Method("srste", {"decay": 2e-3}, note="SR-STE, λ = 2e-3"),
    "srste-2e-2": Method("srste", {"decay": 2e-2}, note="SR-STE, λ = 2e-2"),
    "srste-2e-1": Method("srste", {"decay": 2e-1}, note="SR-STE, λ = 0.2"),
    "mdgf-ste": Method("mdgf", {"gradient": "ste", "end": 0.75}, note="mask decay, straight-through gradient, 25 % dense tail"),
    "mdgf-linear": Method("mdgf", {"schedule": "linear", "gradient": "chain", "end": 0.75}, note="mask decay of Kao et al., linear"),
    "sdgf-geometric": Method("sdgf", {"schedule": "geometric", "gradient": "ste"}, note="structure decay, geometric"),
    "sste-dense": Method("sste", {"mvue": None}, note="S-STE with a dense weight gradient"),
    "sste-approx": Method("sste", {"mvue": "approx"}, note="S-STE with approximate MVUE"),
    "sste-top2": Method("sste", {"mvue": "magnitude"}, note="S-STE with the two largest of four gradients (biased)"),
    "t-ste": Method("fst", {"mvue": None, "end": None, "every": 1, "decay": 0.0}, note="STE with transposable masks"),
    "t-srste": Method("fst", {"mvue": None, "end": None, "every": 1, "decay": 2e-4}, note="SR-STE with transposable masks"),
    "t-srste-2e-2": Method("fst", {"mvue": None, "end": None, "every": 1, "decay": 2e-2}, note="the same, λ = 2e-2"),
    "fst-6e-3": Method("fst", {"decay": 6e-3}, note="FST, λ = 6e-3 as the flip-rate search finds on a small GPT"),
    "fst-nm": Method("fst", {"decay": 6e-3, "end": None}, note="the same without the dense end, so that the weights stay N:M"),
}
"""Variants that answer a question."""

ACTIVATIONS = {"act24": Method("act24", note="2:4 activations after 10 % dense steps; for the task gpt-relu2")}
"""Methods that need squared-ReLU activations."""

METHODS = {**CORE, **VARIANTS, **ACTIVATIONS}
"""The named methods; any other recipe of the registry is a method under its own name, with its defaults."""


def others() -> list[str]:
    """The recipes of the registry that no core method uses, sorted."""
    return [name for name in recipes.names() if name not in METHODS]


def get(name: str) -> Method:
    """The method of that name.

    Raises:
        ValueError: the name is unknown; the nearest one is suggested.
    """
    if name in METHODS:
        return METHODS[name]
    if name in others():
        return Method(name, note="with its defaults")
    raise ValueError(unknown("method", name, [*METHODS, *others()]))
