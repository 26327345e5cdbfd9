import pytest

import nmkernels as nm
from nmkernels.cli.recipes import FINAL, describe
from nmkernels.recipes import SRSTE, STEP, get, names
from nmkernels.recipes.registry import find, resolve


def test_names():
    assert names() == sorted(names())
    assert {"dense", "ste", "srste", "asp", "step"} <= set(names())


def test_get():
    assert get("srste:2:8", decay=1e-4) == SRSTE("2:8", decay=1e-4)
    assert get("step", pattern="1:4", total_steps=100) == STEP("1:4", total_steps=100)
    assert get(" SR-STE:1:4") == SRSTE("1:4")
    assert get("ste").pattern == nm.Pattern("2:4")


@pytest.mark.parametrize("name", [n for n in names()])
def test_every_recipe_takes_pattern_and_total_steps(name):
    pattern = "2:4" if find(name).patterns == "2:4" else "1:4"
    recipe = get(f"{name}:{pattern}", total_steps=100)
    assert recipe.name == name and recipe.pattern == nm.Pattern(pattern) and recipe.total_steps == 100


def test_unknown_names_patterns_and_keywords():
    with pytest.raises(nm.RecipeError, match=r"'stepp'; did you mean 'step'.*asp, .*dense, .*step:2:4"):
        get("stepp:2:4")
    for bad in ("ste:4:2", "ste:", "ste:2", "ste:a:b"):
        with pytest.raises(nm.PatternError):
            get(bad)
    with pytest.raises(TypeError, match="decai"):
        get("srste:2:4", decai=1.0)
    with pytest.raises(nm.RecipeError, match="given twice"):
        get("ste:2:4", pattern="1:4")


def test_resolve():
    recipe = SRSTE("2:4")
    assert resolve(recipe) is recipe and resolve("srste:2:4") == recipe
    with pytest.raises(nm.RecipeError, match="got int"):
        resolve(3)


ABOUT = [describe(find(name)) for name in names()]


@pytest.mark.parametrize("about", ABOUT, ids=[r["name"] for r in ABOUT])
def test_every_recipe_tells_what_it_is(about):
    """The lines of ``python -m nmkernels recipes``: class variables of the recipe, and the first line of its docstring."""
    for key in ("summary", "paper", "patterns", "extra_state", "cost"):
        text = about[key]
        assert text and text == text.strip() and "\n" not in text and not text.endswith("."), f"{key} of {about['name']}: {text!r}"
        assert len(text) <= 140
    assert any(c.isdigit() for c in about["paper"]) or about["name"] == "dense", "a paper has a year or a number"
    assert about["final"] in FINAL and "Example:" in about["doc"]
    assert len({r["summary"] for r in ABOUT}) == len(ABOUT)
