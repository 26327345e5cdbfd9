"""The options of ``train``: ``--set KEY=VALUE`` that fits the recipe's fields, and errors that tell the way out."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from nmkernels import cli
from nmkernels.cli.config import add_arguments, settings
from nmkernels.pattern import RecipeError
from nmkernels.recipes import get, names
from nmkernels.recipes.registry import spec

from .conftest import train


def options_of(recipe: str, *texts: str) -> dict[str, Any]:
    """The options in the settings of a run with these ``--set``."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return settings(parser.parse_args(["--recipe", recipe, *(word for text in texts for word in ("--set", text))])).get("options", {})


def test_values_are_literals_or_words():
    values = {"packed=true": True, "bias_corrected=No": False, "clamp=3": 3, "clamp=0.3": 0.3, "decay=2e-4": 2e-4, "clamp=None": None}
    for text, value in {**values, "t_min=none": None, "switch=fixed": "fixed", "inner=srste:2:4": "srste:2:4"}.items():
        (got,) = options_of("step", text).values()
        assert got == value and type(got) is type(value), text
    assert options_of("layerwise", "given={'fc': '1:4'}") == {"given": {"fc": "1:4"}}
    assert options_of("step:2:4(clamp=1, decay=2)", "clamp=3") == {"clamp": 3, "decay": 2}


@pytest.mark.parametrize(
    ("recipe", "text", "message"),
    [
        ("step", "decay", "write it as KEY=VALUE"),
        ("step", "two words=1", "write it as KEY=VALUE"),
        ("step", "decai=1", "step has no keyword 'decai'; did you mean 'decay'? It takes inner, switch, "),
        ("step:2:4(decai=1)", "decay=1", "step has no keyword 'decai'; did you mean 'decay'?"),
        ("dense", "decay=1", "dense has no keyword 'decay'. It takes none; see `python -m nmkernels recipes dense`."),
        ("step", "decay=much", "decay of step takes float; got 'much'."),
        ("step", "decay=true", "decay of step takes float; got True."),
        ("step", "clamp=much", "clamp of step takes float | None; got 'much'."),
        ("step", "bias_corrected=1", "bias_corrected of step takes bool; got 1."),
        ("ast", "every=1.5", "every of ast takes int; got 1.5."),
        ("layerwise", "given=3", "given of layerwise takes Mapping"),
        ("step", "pattern=1:4", "--recipe NAME:N:M"),
        ("step", "total_steps=10", "the length of the run, --steps"),
    ],
)
def test_wrong_values_are_refused(recipe, text, message):
    with pytest.raises(RecipeError) as error:
        options_of(recipe, text)
    assert message in str(error.value)


@pytest.mark.parametrize("name", names())
def test_every_keyword_of_every_recipe_can_be_set_to_its_default(name):
    default = get(name, total_steps=1000)
    texts = [f"{key}={value}" for key, value in spec(default).items() if key not in ("recipe", "pattern", "total_steps")]
    assert get(name, total_steps=1000, **options_of(name, *texts)) == default


# ---- the other options of train: refused before anything is trained or written, exit status 2, one line, no traceback


def refused(capsys: pytest.CaptureFixture[str], message: str, *words: str) -> None:
    usage = False
    try:
        status = cli.main(["train", "--steps", "2", *words])
    except SystemExit as stop:  # argparse's own way; it prints the usage first
        status, usage = int(stop.code or 0), True
    captured = capsys.readouterr()
    *more, error = captured.err.splitlines()
    assert status == 2 and captured.out == "" and bool(more) == usage
    assert message in error and error.startswith("python -m nmkernels train: error: ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--recipe", "step:4:2"], "pattern 4:2 is not usable"),
        (["--recipe", "nope"], "no recipe is called 'nope'"),
        (["--set", "colour=red"], "srste has no keyword 'colour'. It takes decay, packed"),
        (["--recipe", "step", "--set", "switch=sometimes"], "switch='sometimes' is unknown"),
        (["--width", "30"], "width 30 is not a multiple of heads=4"),
        (["--steps", "0"], "argument --steps: 0 is below 1"),
        (["--batch", "many"], "argument --batch: invalid positive value: 'many'"),
        (["--lr", "nan"], "argument --lr: nan is not a finite"),
        (["--seed", "-1"], "argument --seed: -1 is not between"),
        (["--device", "toaster"], "--device toaster cannot be used here"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
    ],
)
def test_wrong_options(text, tmp_path, capsys, words, message):
    out = tmp_path / "out"
    refused(capsys, message, "--data", str(text), "--out", str(out), *words)
    assert not out.exists()


def test_a_pattern_that_divides_no_layer_lists_the_layers(text, tmp_path, capsys):
    assert train(text, tmp_path / "out", "--recipe", "step:2:200") == 2
    error = capsys.readouterr().err
    assert "no layer of the model can be made 2:200 sparse" in error and "blocks.0.mlp.fc" in error


def test_texts(text, tmp_path, capsys):
    out = str(tmp_path / "out")
    refused(capsys, "No such file", "--data", str(tmp_path / "missing"), "--out", out)
    refused(capsys, "--data is empty", "--data", "", "--out", out)
    (tmp_path / "tiny").write_bytes(b"too little")
    refused(capsys, "Use more text (--data) or a smaller --context", "--data", str(tmp_path / "tiny"), "--out", out)
    assert not Path(out).exists()
