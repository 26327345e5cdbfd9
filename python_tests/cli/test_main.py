"""The command line: verbs, help, usage errors, and errors as one line."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import pytest

from nmkernels import NMError, __version__, cli

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A verb ``toy`` whose ``run`` the test replaces."""
    module = types.ModuleType("nmkernels.cli.toy")
    module.add_arguments = lambda parser: parser.add_argument("--n", type=int, default=0)  # type: ignore[attr-defined]
    module.run = lambda args: args.n  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(cli, "VERBS", {**cli.VERBS, "toy": "a toy"})
    return module


def test_help_lists_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    text = capsys.readouterr().out
    assert all(name in text and said in text for name, said in cli.VERBS.items())


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0 and capsys.readouterr().out == f"nmkernels {__version__}\n"


def test_every_verb_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in cli.VERBS:
        with pytest.raises(SystemExit) as stop:
            cli.main([verb, "--help"])
        assert stop.value.code == 0 and f"usage: python -m nmkernels {verb}" in capsys.readouterr().out


def test_train_names_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--demo"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "python -m nmkernels: error: train has become a program, examples/train_gpt/train.py in the repository."
    assert (ROOT / "examples/train_gpt/train.py").exists()


def test_unknown_verb_suggests(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["docter"]) == 2
    assert "no verb is called 'docter'; did you mean 'doctor'?" in capsys.readouterr().err
    assert cli.main(["zzz"]) == 2
    assert "no verb is called 'zzz'. Verbs are: prune" in capsys.readouterr().err


def test_what_a_verb_ends_with(verb: types.ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(error: BaseException) -> int:
        verb.run = lambda args: (_ for _ in ()).throw(error)  # type: ignore[attr-defined]
        return cli.main(["toy"])

    assert cli.main(["toy"]) == 0 and cli.main(["toy", "--n", "3"]) == 3
    with pytest.raises(SystemExit) as stop:
        cli.main(["toy", "--m"])
    assert stop.value.code == 2 and capsys.readouterr().err
    assert fails(NMError("no such thing")) == 1
    assert capsys.readouterr().err == "python -m nmkernels toy: error: no such thing\n"
    assert fails(KeyboardInterrupt()) == 130
    with pytest.raises(ZeroDivisionError):
        fails(ZeroDivisionError())


@pytest.mark.slow
def test_reader_that_leaves_is_no_crash() -> None:
    with subprocess.Popen([sys.executable, "-m", "nmkernels", "doctor"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stderr is not None
        child.stdout.close()
        assert child.stderr.read() == b""
    assert child.returncode == 1
