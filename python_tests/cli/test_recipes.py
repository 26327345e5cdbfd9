"""``recipes``: every method with its paper, patterns, state and cost; one with its keywords; the nearest of an unknown name."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest

from nmkernels import cli, recipes
from nmkernels.cli.recipes import describe
from nmkernels.recipes.registry import find

FACTS = ("summary", "paper", "patterns", "extra_state", "cost")
ALL = [describe(find(name)) for name in recipes.names()]


def test_the_list_has_all_of_them(capsys):
    assert cli.main(["recipes"]) == 0
    text = capsys.readouterr().out
    joined = " ".join(text.split())
    assert all(" ".join(r[key].split()) in joined for r in ALL for key in FACTS)
    assert [line.split()[0] for line in text.splitlines()[:-1] if line[:1].strip()] == recipes.names()


def test_one_with_its_keywords(capsys):
    assert cli.main(["recipes", "SR-STE:1:4"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("srste  ") and "decay       = 0.2            float\n" in text and "λ only matters where" in text
    assert cli.main(["recipes", "step"]) == 0
    text = capsys.readouterr().out
    assert all(f.name in text for f in fields(recipes.STEP)) and "t_max          = 0.5            float | int, or None" in text


def test_json(capsys):
    assert cli.main(["recipes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == ALL
    assert cli.main(["recipes", "asp", "--json"]) == 0
    one = json.loads(capsys.readouterr().out)
    assert one["name"] == "asp" and one["keywords"][2] == {"name": "score", "type": "str", "default": "magnitude"}


@pytest.mark.parametrize(("word", "near"), [("stpe", "step"), ("srst", "srste"), ("MDFG:1:8", "mdgf"), ("quux", None)])
def test_an_unknown_name_suggests_the_nearest(word, near, capsys):
    assert cli.main(["recipes", word]) == 1
    error = capsys.readouterr().err
    assert (f"did you mean {near!r}?" in error) if near else ("did you mean" not in error)
    assert f"Recipes are {recipes.names()[0]}, " in error and len(error.splitlines()) == 1
