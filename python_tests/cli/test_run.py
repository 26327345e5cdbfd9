"""``python -m nmkernels run``: other programs in this process."""

import sys

import pytest

from nmkernels.cli import main


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_a_script_gets_its_arguments_and_status(tmp_path, capsys):
    (tmp_path / "beside.py").write_text("WORD = 'beside'\n")
    (tmp_path / "p.py").write_text("import sys, beside\nprint(__name__, sys.argv[1:], beside.WORD)\nsys.exit(3)\n")
    with pytest.raises(SystemExit) as ended:
        main(["run", str(tmp_path / "p.py"), "--model", "x", "-m", "y"])
    assert ended.value.code == 3
    assert capsys.readouterr().out.strip() == "__main__ ['--model', 'x', '-m', 'y'] beside"


def test_a_module(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["run", "-m", "json.tool", "--help"])
    assert not ended.value.code and "json.tool" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no program is named"),
        (["-m", "no_such_module_at_all"], "there is no module"),
        (["no-such-program"], "neither a file nor a program"),
        (["/bin/sh"], "no Python program"),
    ],
)
def test_what_cannot_be_run(words, said, capsys):
    assert main(["run", *words]) == 1
    assert said in capsys.readouterr().err
