"""What every recipe shares: frozen, self-validating, with the same keywords."""

import dataclasses

import pytest
import torch

import nmkernels as nm
from nmkernels.autograd import HardMask
from nmkernels.optim import PLAIN, MaskedAdamW
from nmkernels.recipes import ASP, SRSTE, STE, STEP, Dense, Recipe, Stage
from python_tests.recipes.loop import mlp

ALL = [Dense(), STE("1:4"), SRSTE("2:8"), STEP("2:4", total_steps=10), ASP("1:2")]


@pytest.mark.parametrize("recipe", ALL, ids=lambda r: r.name)
def test_frozen_hashable_and_equal_by_value(recipe):
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.pattern = "1:4"
    assert recipe == dataclasses.replace(recipe) and hash(recipe) == hash(dataclasses.replace(recipe))
    assert isinstance(recipe.pattern, nm.Pattern)


@pytest.mark.parametrize("cls", [Dense, STE, SRSTE, STEP, ASP])
def test_unknown_keyword_and_bad_pattern(cls):
    with pytest.raises(TypeError, match="patern"):
        cls(patern="2:4", total_steps=5)
    for bad in ("4:2", "0:4", "x"):
        with pytest.raises(nm.PatternError):
            cls(bad, total_steps=5)
    for bad in (0, -3, 2.5, True, "10"):
        with pytest.raises(nm.RecipeError, match="total_steps"):
            cls("2:4", total_steps=bad)


@pytest.mark.parametrize("recipe", ALL, ids=lambda r: r.name)
def test_spec_is_plain_values_that_make_the_recipe_again(recipe):
    spec = recipe.spec()
    assert all(v is None or isinstance(v, (str, int, float, bool)) for v in spec.values())
    name = spec.pop("recipe")
    assert nm.recipes.get(name, **spec) == recipe


@pytest.mark.parametrize("recipe", ALL, ids=lambda r: r.name)
def test_optimizer_is_masked_adamw_with_adamws_keywords(recipe):
    optimizer = recipe.optimizer(mlp().parameters(), lr=3e-4, betas=(0.8, 0.9), weight_decay=0.5, foreach=False)
    assert type(optimizer) is MaskedAdamW
    assert optimizer.defaults["lr"] == 3e-4 and optimizer.defaults["betas"] == (0.8, 0.9) and optimizer.defaults["weight_decay"] == 0.5


@pytest.mark.parametrize("recipe", ALL, ids=lambda r: r.name)
def test_stage_before_an_optimizer_is_known(recipe):
    stage = recipe.stage({})
    assert (stage.transform is not None) == (recipe.name in ("ste", "srste")) and not stage.fixed


def test_final():
    assert [r.final for r in ALL] == ["dense", "nm", "nm", "nm", "nm"]


def test_a_recipe_of_ones_own():
    """The smallest recipe: a frozen class with one method."""

    @dataclasses.dataclass(frozen=True)
    class Mine(Recipe):
        def stage(self, state):
            return Stage(phase=1, transform=HardMask(self.pattern))

    model = mlp(torch.float32)
    handle = nm.sparsify_(model, Mine("1:4"))
    optimizer = handle.attach(handle.recipe.optimizer(model.parameters()))
    model(torch.randn(3, 16)).sum().backward()
    optimizer.step()
    assert handle.metrics()["density"].item() == 1.0  # the rule is PLAIN: the optimizer knows of no mask
    handle.finish()
    assert nm.ops.is_nm(model[0].weight, "1:4")
    assert Stage(phase=1).rule is PLAIN


def test_a_recipe_without_stages_says_so():
    with pytest.raises(nm.RecipeError, match="Recipe defines no stage"):
        nm.sparsify_(mlp(), Recipe("2:4"))
