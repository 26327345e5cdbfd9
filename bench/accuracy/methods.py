"""The methods: names, each with a recipe and what the harness does besides. A name says what is done, so defaults may change under it."""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import sys
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from nmkernels import recipes
from nmkernels.recipes import Recipe
from nmkernels.recipes.contract import Stage, State
from nmkernels.recipes.methods.step import STEP

from .spec import DENSE, unknown


class Thawed(STEP):
    """STEP without what defines it: after T₀ Adam's second moment goes on. A control, which isolates the freeze."""

    def stage(self, state: State) -> Stage:
        stage = super().stage(state)
        return replace(stage, rule=replace(stage.rule, frozen=False, v_step=0, eps_inside=False, clamp=0.0))


@dataclass(frozen=True)
class Method:
    """One way of training.

    Args:
        recipe: name in the package's registry, or a class.
        config: its settings.
        note: a description in one line, for the page.
        prune: the method of ``nm.prune_``, for dense training that is pruned at ``at``, a share of the steps, and then trained on: with the
            masks held if the recipe is ``asp``, which only counts FLOPs, else by the recipe.
        window: with the β₂ that ``STEP.optimizer`` chooses, instead of the task's.
        dense_v: take Adam's second moment from gradients of the dense weights, at every step.
    """

    recipe: str | type[Recipe]
    config: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    prune: str = ""
    at: float = 0.0
    dense_v: bool = False
    window: bool = False

    def build(self, pattern: str, steps: int) -> Recipe:
        """The recipe of a run of ``steps`` steps that ends with ``pattern``."""
        if isinstance(self.recipe, type):
            return self.recipe(pattern, total_steps=steps, **self.config)
        return recipes.get(self.recipe, total_steps=steps, **({} if pattern == DENSE else {"pattern": pattern}), **self.config)


def _pruned(prune: str, at: float, note: str) -> Method:
    return Method("asp", {"start": at}, note, prune, at)


def _step(switch: str = "fixed", **config: Any) -> dict[str, Any]:
    return {"switch": switch, "bias_corrected": True, "clamp": 2.0, "eps_mode": "outside", **config}


HALF = 0.5
DECAYS = {f"srste-{decay}": float(decay) for decay in ("2e-4", "2e-3", "2e-2", "2e-1", "2e0")}
"""SR-STE by λ; that of the paper is the first."""

SRSTE = "srste"
"""Stands for SR-STE at the λ that is best for the task and optimizer."""

VARIANTS = {SRSTE: tuple(DECAYS)}
"""Name -> the methods of which the one that is best for the task and optimizer stands for it, at most as many as SR-STE has λ."""

METHODS = {
    "dense": Method("dense", note="dense training"),
    "oneshot-magnitude": _pruned("magnitude", 1.0, "dense training, then the largest magnitudes are kept"),
    "oneshot-wanda": _pruned("wanda", 1.0, "the same with Wanda's score"),
    "oneshot-sparsegpt": _pruned("sparsegpt", 1.0, "the same with SparseGPT"),
    "oneshot-admm": _pruned("admm", 1.0, "the same with ADMM, the default of `nm.prune_`"),
    "asp": _pruned("magnitude", HALF, "ASP: pruned by magnitude after half of the steps, then the mask is held"),
    "asp-wanda": _pruned("wanda", HALF, "the same with Wanda's score"),
    "asp-sparsegpt": _pruned("sparsegpt", HALF, "the same with SparseGPT"),
    "asp-admm": _pruned("admm", HALF, "the same with ADMM, the default of `nm.prune_`"),
    "admm-held": _pruned("admm", 0.0, "a trained model is pruned by ADMM, then trained with the masks held"),
    "admm-srste": Method("srste", {"decay": 0.2}, "a trained model is pruned by ADMM, then trained by SR-STE, λ = 0.2", prune="admm"),
    "ste": Method("ste", note="straight-through estimator"),
    **{name: Method("srste", {"decay": decay}, f"SR-STE, λ = {decay:g}") for name, decay in DECAYS.items()},
    "step-10": Method("step", _step(start=0.1), "STEP, T₀ at 10 %"),
    "step-25": Method("step", _step(start=0.25), "STEP, T₀ at 25 %"),
    "step-50": Method("step", _step(start=0.5), "STEP, T₀ at 50 %"),
    "step-auto": Method(
        "step",
        _step("relative", t_min="window"),
        "STEP as it is by default: T₀ by a test that has no unit, β₂ with a window of a tenth of the run",
        window=True,
    ),
    "step-paper": Method("step", _step("paper", t_min=0.1), "STEP, T₀ by the paper's AutoSwitch, option I"),
    "step-10-thawed": Method(Thawed, _step(start=0.1), "10 % dense, then STE, Adam's v goes on"),
    "step-25-thawed": Method(Thawed, _step(start=0.25), "25 % dense, then STE, Adam's v goes on"),
    "step-25-raw": Method("step", _step(start=0.25, bias_corrected=False, clamp=None), "STEP, T₀ at 25 %, v* not bias-corrected, no clamp"),
    "step-25-raw-clamp": Method("step", _step(start=0.25, bias_corrected=False), "STEP, T₀ at 25 %, v* not bias-corrected, clamp 2"),
    "step-25-noclamp": Method("step", _step(start=0.25, clamp=None), "STEP, T₀ at 25 %, no clamp"),
    "step-25-inside": Method("step", _step(start=0.25, eps_mode="inside"), "STEP, T₀ at 25 %, √(v̂* + ε)"),
    "oracle": Method("ste", note="STE's update, Adam's v from gradients of the dense weights at every step", dense_v=True),
    "sste": Method("sste", note="S-STE, exact MVUE of the output gradient"),
    "mdgf-chain": Method("mdgf", {"gradient": "chain", "end": 0.75}, "mask decay, chain rule, the last quarter with the binary mask"),
    "mdgf-ste": Method("mdgf", {"gradient": "ste", "end": 1.0}, "mask decay to the end of the run, straight-through gradient"),
    "fst-nm": Method("fst", {"end": None}, "FST without its dense end: transposable masks, MVUE; leaves N:M weights"),
    "fst": Method("fst", note="FST as published, with a dense end: leaves a dense model"),
    "slope": Method("slope", note="SLoPe: a mask chosen at the start, adapters at the end"),
}
"""The methods of the page. Another recipe of the registry is a method under its own name, with its defaults."""


def load(path: Path) -> str:
    """Add the recipe of a Python file to the methods, under the name it registers or else the file's, and return that name.

    A class attribute ``grid = {"decay": (0.02, 0.2)}`` has settings to choose from, as SR-STE's λ is chosen.

    Raises:
        ValueError: there is no such file, it does not define exactly one recipe, its name is that of another method, or its grid has more
            settings than SR-STE's λ, or names what is no setting.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    before = set(recipes.names())
    spec = importlib.util.spec_from_file_location(f"recipe_of_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file; its name has to end with .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    mine = [c for c in vars(module).values() if inspect.isclass(c) and issubclass(c, Recipe) and c.__module__ == module.__name__]
    mine = list(dict.fromkeys(mine))
    registered = {c: c.name for c in mine if "name" in vars(c) and c.name in recipes.names()}
    if len(registered or mine) != 1:
        names = ", ".join(c.__name__ for c in registered or mine) or "none"
        raise ValueError(
            f"{path} has to define one recipe, and defines {names}. A recipe is a subclass of nmkernels.recipes.Recipe, such as "
            "nmkernels.recipes.STE; of several classes, decorate the one to run with @nmkernels.recipes.recipe('name')."
        )
    cls = next(iter(registered or mine))
    name = registered.get(cls, path.stem)
    if name in METHODS or name in before:
        raise ValueError(f"{path}: there is a method {name!r} already; choose another name for yours")
    METHODS[name] = Method(cls, note=f"the recipe of {path.name}")
    grid = getattr(cls, "grid", {})
    choices = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())] if grid else []
    settings = {f.name for f in fields(cls)}
    if len(choices) > len(DECAYS) or not set(grid) <= settings:
        wrong = f"has {len(choices)} settings, and SR-STE's λ, the budget of all, has {len(DECAYS)}"
        unknown = ", ".join(sorted(set(grid) - settings))
        raise ValueError(f"{path}: the grid {f'names {unknown}, which the recipe does not have' if unknown else wrong}")
    for config in choices:
        METHODS[f"{name}({', '.join(f'{key}={value}' for key, value in config.items())})"] = Method(cls, config, f"with {config}")
    if choices:
        VARIANTS[name] = tuple(METHODS)[-len(choices) :]
    return name


def get(name: str) -> Method:
    """The method of that name.

    Raises:
        ValueError: the name is unknown; the nearest one is suggested.
    """
    if name in METHODS:
        return METHODS[name]
    if name in recipes.names():
        return Method(name, note="with its defaults")
    raise ValueError(unknown("method", name, [*METHODS, *recipes.names()]))
