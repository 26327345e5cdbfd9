"""What every recipe is: frozen values found by name, text that makes it again, and what a resumed run may change.

What every recipe does is in ``test_conformance``.
"""

import dataclasses

import pytest

import nmkernels as nm
from nmkernels.cli.recipes import FINAL, describe
from nmkernels.recipes import SRSTE, STEP, Recipe, get, names
from nmkernels.recipes.compose import ADAMW, check_state
from nmkernels.recipes.registry import parse, resolve, spec
from python_tests.recipes.loop import mlp


def default(name):
    return get(f"{name}:2:8" if name == "vnm" else name, total_steps=100)


ALL = pytest.mark.parametrize("recipe", [default(name) for name in names()], ids=names())


# ---- the class


@ALL
def test_values_checked_and_found_by_name(recipe):
    assert recipe == dataclasses.replace(recipe) and hash(recipe) == hash(dataclasses.replace(recipe))
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.pattern = "1:4"
    cls = type(recipe)
    with pytest.raises(TypeError, match="patern"):
        cls(patern="2:4", total_steps=5)
    for bad in ("4:2", "0:4", "x"):
        with pytest.raises(nm.PatternError):
            cls(bad, total_steps=5)
    for bad in (0, -3, 2.5, True, "10"):
        with pytest.raises(nm.RecipeError, match="total_steps"):
            cls(recipe.pattern, total_steps=bad)
    assert getattr(nm.recipes, cls.__name__) is cls and cls.__name__ in nm.recipes.__all__ and cls.__name__ in dir(nm.recipes)


@ALL
def test_switches_are_true_or_false(recipe):
    """A word without quotes is text, and any text would count as True."""
    for name in (f.name for f in dataclasses.fields(recipe) if f.type == "bool"):
        for bad in ("false", "0", "None"):
            with pytest.raises(nm.RecipeError, match=f"{name}={bad}|{name}='{bad}' must be True or False"):
                get(f"{recipe.name}({name}={bad})", pattern=recipe.pattern, total_steps=100)


@ALL
def test_text_and_plain_values_make_the_recipe_again(recipe):
    assert get(nm.recipes.text(recipe)) == recipe
    plain = spec(recipe)
    assert all(v is None or isinstance(v, (str, int, float, bool)) for v in plain.values())
    assert get(plain.pop("recipe"), **plain) == recipe


@ALL
def test_what_the_command_line_tells(recipe):
    about = describe(type(recipe))
    assert all(about[key] and "\n" not in about[key] for key in ("summary", "paper", "patterns", "extra_state", "cost"))
    assert about["final"] in FINAL and "Example:" in about["doc"]


def test_the_base_has_few_members():
    """What only one method needs is in that method's file: in its ``Hooks``, its own ``Stage``, its transform."""
    members = {name for name in (*vars(Recipe), *Recipe.__annotations__) if not name.startswith("_")}
    assert len(members) <= 14, sorted(members)


def test_a_recipe_without_stages_is_an_error():
    with pytest.raises(nm.RecipeError, match="Recipe defines no stage"):
        nm.sparsify_(mlp(), Recipe("2:4"))


# ---- resuming

SCHEDULED = {name for name in names() if isinstance(default(name), nm.recipes.schedule.ScheduledRecipe)}
MAY_CHANGE = {"asp": {"total_steps", "score", "start", "permute", "escapes", "seed"}, "fst": {"packed"}, "sdgf": {"packed"}}
MUST_MATCH = {
    "vnm": {"pattern", "v"},
    "step": {"pattern", "switch"},
    "layerwise": {"pattern", "inner"},
    "proxsparse": {"pattern", "anchor", "final_values"},
}


@ALL
def test_which_settings_a_resumed_run_may_change(recipe):
    """Those of a schedule may not, as its steps were counted by them; others may, or the table says so."""
    fields = {f.name for f in dataclasses.fields(recipe)}
    settled = fields - MAY_CHANGE.get(recipe.name, set()) if recipe.name in SCHEDULED else MUST_MATCH.get(recipe.name, {"pattern"})
    theirs, state = spec(recipe), recipe.first_state(ADAMW)
    check_state(recipe, {"spec": theirs, **state}, ADAMW)
    for name in fields:
        other = {"spec": {**theirs, name: "ste" if name == "inner" else "another"}, **state}
        if name in settled:
            with pytest.raises(nm.CheckpointError, match=f"{name} is another there|the checkpoint is of"):
                check_state(recipe, other, ADAMW)
        else:
            check_state(recipe, other, ADAMW)


@ALL
def test_a_state_that_no_run_can_go_on_from(recipe):
    state = {"spec": spec(recipe), **recipe.first_state(ADAMW)}
    for bad in (None, 3, {}, {"spec": {}}, {**state, "spec": "text"}):
        with pytest.raises(nm.CheckpointError, match="did not write"):
            check_state(recipe, bad, ADAMW)
    for key in set(state) - {"spec", *recipe._optional_state}:
        with pytest.raises(nm.CheckpointError, match=f"has no {key}"):
            check_state(recipe, {k: v for k, v in state.items() if k != key}, ADAMW)


def test_checkpoints_of_steps_former_names_can_be_resumed():
    """By the present name only; they have no window yet, and a setting that is gone."""
    for old, new in (("arithmetic", "paper"), ("geometric", "paper_geometric")):
        recipe = STEP("2:4", total_steps=100, switch=new)
        state = {"spec": {**spec(recipe), "switch": old, "t_min": 0.1, "freeze": True}, **recipe.first_state(ADAMW)}
        del state["window"]
        check_state(recipe, state, ADAMW)
        with pytest.raises(nm.CheckpointError, match=f"switch is {new} there and relative here"):
            check_state(STEP("2:4", total_steps=100), state, ADAMW)


# ---- names


def test_get():
    assert names() == sorted(names())
    assert get("srste:2:8", decay=1e-4) == SRSTE("2:8", decay=1e-4) and get(" SR-STE:1:4") == SRSTE("1:4")
    assert get("step", pattern="1:4", total_steps=100) == STEP("1:4", total_steps=100)
    recipe = SRSTE("2:4")
    assert resolve(recipe) is recipe and resolve("srste:2:4") == recipe
    with pytest.raises(nm.RecipeError, match="got int"):
        resolve(3)


def test_a_name_that_text_could_not_read_again_is_refused():
    before = nm.recipes.names()
    with pytest.raises(nm.RecipeError, match="got 'my_recipe'; call it 'myrecipe'"):
        nm.recipes.recipe("my_recipe")(nm.recipes.STE)
    assert nm.recipes.names() == before and nm.recipes.STE.name == "ste"


def test_unknown_names_patterns_and_keywords():
    with pytest.raises(nm.RecipeError, match=r"'stepp'; did you mean 'step'.*asp, .*dense, .*step:2:4"):
        get("stepp:2:4")
    for bad in ("ste:4:2", "ste:", "ste:2", "ste:a:b"):
        with pytest.raises(nm.PatternError):
            get(bad)
    with pytest.raises(TypeError, match="decai"):
        get("srste:2:4", decai=1.0)
    for text, keywords in (("ste:2:4", {"pattern": "1:4"}), ("mdgf(gradient=ste)", {"gradient": "chain"})):
        with pytest.raises(nm.RecipeError, match="given twice"):
            get(text, total_steps=10, **keywords)
    for text in ("srste:2:4(pattern='1:4')", "srste:2:4(decay=1e-3, decay=2)", "layerwise:2:4(inner=srste(decay=1, decay=2))"):
        with pytest.raises(nm.RecipeError, match="(the pattern|decay) is given twice in .srste"):
            get(text)


def test_parse():
    for text, want in [
        ("ste", ("ste", None, {})),
        (" SR-STE:2:8 ", ("SR-STE", "2:8", {})),
        ("mdgf:1:8(end=0.75, gradient=ste)", ("mdgf", "1:8", {"end": 0.75, "gradient": "ste"})),
        ("step(inner=mdgf(residual=1e-3), clamp=None)", ("step", None, {"inner": "mdgf(residual=0.001)", "clamp": None})),
        ("step(inner='mdgf:1:8(total_steps=7)')", ("step", None, {"inner": "mdgf:1:8(total_steps=7)"})),
        ("sdgf()", ("sdgf", None, {})),
    ]:
        assert parse(text) == want


def test_not_a_recipe():
    for text in ["mdgf(", "mdgf(0.5)", "mdgf(a=b=c)", "mdgf(**x)", "mdgf(a=1) + 2", "mdgf(a=[x for x in y])", "mdgf(a=1", "mdgf(a=1)(b=2)"]:
        with pytest.raises(nm.RecipeError, match="write it as name:N:M"):
            parse(text)
