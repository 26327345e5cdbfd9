"""The options of ``train``: ``--set KEY=VALUE`` typed by the recipe's fields, and errors that tell the way out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from nmkernels import cli
from nmkernels.cli.config import option
from nmkernels.pattern import PatternLike, RecipeError
from nmkernels.recipes import STEP, Dense, Recipe, get, names
from nmkernels.recipes.registry import find, spec

from ._text import train


@dataclass(frozen=True)
class Every(Recipe):
    """One keyword of each kind."""

    flag: bool = False
    count: int = 1
    share: float | int = 0.5
    rate: float | None = None
    word: str | None = None
    choice: Literal["a", "b"] = "a"
    other: PatternLike = "2:4"
    table: dict[str, str] | None = None
    inner: Recipe | str | None = None


def test_values_have_the_type_of_their_field():
    values = {"flag=true": True, "flag=No": False, "count=12": 12, "share=3": 3, "share=0.3": 0.3, "rate=1": 1.0, "rate=2e-4": 2e-4}
    values |= {"rate=None": None, "word=none": None, "word=a=b": "a=b", "choice=b": "b", "other=1:4": "1:4", "inner=srste:2:4": "srste:2:4"}
    for text, value in {**values, "table={'fc': '1:4'}": {"fc": "1:4"}}.items():
        _, got = option(Every, text)
        assert got == value and type(got) is type(value), text


@pytest.mark.parametrize(
    ("recipe", "text", "message"),
    [
        (STEP, "decay", "write it as KEY=VALUE"),
        (STEP, "two words=1", "write it as KEY=VALUE"),
        (STEP, "decai=1", "step has no keyword 'decai'; did you mean 'decay'? It takes inner, switch, "),
        (Dense, "decay=1", "dense has no keyword 'decay'. It takes none; see `python -m nmkernels recipes dense`."),
        (STEP, "decay=much", "decay of step is a number, and 'much' is not."),
        (STEP, "clamp=much", "clamp of step is a number or none, and 'much' is not."),
        (STEP, "bias_corrected=1.5", "bias_corrected of step is true or false"),
        (Every, "count=1.5", "count of  is a whole number, and '1.5'"),
        (Every, "table=3", "table of  is dict or none, and '3' is not."),
        (STEP, "pattern=1:4", "--recipe NAME:N:M"),
        (STEP, "total_steps=10", "the length of the run, --steps"),
    ],
)
def test_what_does_not_fit_is_told(recipe, text, message):
    with pytest.raises(RecipeError) as error:
        option(recipe, text)
    assert message in str(error.value) and str(error.value).startswith(f"--set {text}: ")


@pytest.mark.parametrize("name", names())
def test_every_keyword_of_every_recipe_can_be_set_to_its_default(name):
    default = get(name, total_steps=1000)
    texts = [f"{key}={value}" for key, value in spec(default).items() if key not in ("recipe", "pattern", "total_steps")]
    assert get(name, total_steps=1000, **dict(option(find(name), text) for text in texts)) == default


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
        (["--set", "colour=red"], "step has no keyword 'colour'. It takes inner, switch, t_min"),
        (["--set", "switch=sometimes"], "switch='sometimes' is unknown"),
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
    refused(capsys, "Give more text with --data, or a smaller --context", "--data", str(tmp_path / "tiny"), "--out", out)
    assert not Path(out).exists()
