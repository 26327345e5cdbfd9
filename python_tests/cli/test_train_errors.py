"""What cannot work is refused before anything is trained or written: exit status 2, one line, no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from nmkernels import cli

from ._text import train


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
def test_options(text, tmp_path, capsys, words, message):
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
