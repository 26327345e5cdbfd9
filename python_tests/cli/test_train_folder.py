"""``train`` writes to a new or empty folder, or to a run's; other files stay, and a second run is refused with the owner's name."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

from nmkernels.cli import log
from nmkernels.cli.folder import LOCK, SIGNATURES, Folder
from nmkernels.pattern import NMError

from .conftest import train

SIZES = ["--steps", "3", "--batch", "8", "--context", "8", "--width", "16", "--layers", "1", "--heads", "1", "--checkpoint-every", "1"]
OPTIONS = pytest.mark.parametrize("option", [[], ["--overwrite"], ["--resume"]], ids=["plain", "overwrite", "resume"])


@pytest.fixture(scope="module")
def one_run(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "out"
    assert train(text, out, "--baseline", "--tensorboard", sizes=SIZES) == 0
    return out


@pytest.fixture
def run(one_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(one_run, tmp_path / "run"))


def contents(folder: Path) -> dict[str, bytes]:
    files = folder.rglob("*") if os.path.isdir(folder) else ()
    return {str(p.relative_to(folder)): p.read_bytes() for p in files if p.is_file() and p.name != LOCK}


def refused(capsys: pytest.CaptureFixture[str], text: Path, out: Path, *words: str) -> str:
    """The line on standard error of a run that must not start, and must leave ``out`` as it is."""
    before = contents(out)
    assert train(text, out, *words, sizes=SIZES) == 2
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.splitlines()) == 1
    assert contents(out) == before
    return said.err


def fill(folder: Path, name: str, data: bytes = b"mine") -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)


@OPTIONS
def test_a_folder_that_is_no_run_s_is_refused(text, tmp_path, capsys, option):
    others = ["checkpoints/step-00000001.pt", "tensorboard/events.out.tfevents.1", "baseline/a", ".hidden", "notes"]
    for i, name in enumerate([*SIGNATURES, *others]):
        out = tmp_path / str(i)
        fill(out, name)
        said = refused(capsys, text, out, *option)
        assert f"holds files that `nmkernels train` did not write ({name.split('/')[0]}); pass a new or an empty folder" in said
        assert not (out / LOCK).exists()


def test_overwrite_removes_only_what_a_run_writes(text, one_run, run):
    mine = ["notes", "checkpoints/best.pt", "checkpoints/step-1.pt", "baseline/a", "tensorboard/b", "model.safetensors.bak", ".tmpab"]
    mine += [".notes.abcdefgh.tmp", "checkpoints/.best.pt.1.tmp", "log.csv.tmp"]
    # what runs leave that were killed
    temporary = [".log.csv.ab_12xyz.tmp/log.csv", "baseline/.log.csv.abcdefgh.tmp/a", "checkpoints/.step-00000001.pt.4711.tmp"]
    temporary += ["checkpoints/.step-00000002.pt.abcdefgh.tmp/step-00000002.pt", ".model.safetensors.abcdefgh.tmp/.tmp123"]
    for name in (*mine, *temporary, "checkpoints/step-00000001.pt.aside"):
        fill(run, name)
    before = contents(run)
    assert train(text, run, "--overwrite", sizes=SIZES) == 0
    after = contents(run)
    assert all(after[name] == b"mine" for name in mine)
    assert after["result.json"] != before["result.json"] and not (run / "baseline" / "checkpoints").exists()
    wanted = {name for name in contents(one_run) if not name.startswith(("baseline/", "tensorboard/"))}
    assert after.keys() - mine == wanted, "of the old run nothing is left"


def test_overwrite_stops_before_what_only_has_the_name_of_a_file(text, run, capsys):
    for name in SIGNATURES:
        path = run / name
        for make, remove in ((fill, Path.unlink), (Path.mkdir, Path.rmdir), (Path.symlink_to, Path.unlink)):
            path.unlink(missing_ok=True)
            make(*((run, name) if make is fill else (path, text) if make is Path.symlink_to else (path,)))
            assert f"{path} was not written by a run and would be overwritten" in refused(capsys, text, run, "--overwrite")
            remove(path)
        path.touch()  # a run that was killed may leave an empty one
    save_file({"weight": torch.ones(2)}, run / "model.safetensors", {"format": "pt"})
    assert "model.safetensors was not written" in refused(capsys, text, run, "--overwrite")
    (run / "model.safetensors").unlink()
    assert train(text, run, "--overwrite", sizes=SIZES) == 0


@OPTIONS
def test_nothing_is_written_through_a_link_and_no_pipe_is_read(text, tmp_path, capsys, option):
    fill(tmp_path, "mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / LOCK).symlink_to(tmp_path / "mine")
    assert f"{LOCK} could not be written: " in refused(capsys, text, tmp_path / "out", *option)
    assert (tmp_path / "mine").read_bytes() == b"mine"
    (tmp_path / "out" / LOCK).unlink()
    (tmp_path / "out" / "checkpoints").mkdir()
    for name in ("log.csv", "result.json", "checkpoints/step-00000001.pt"):
        os.mkfifo(tmp_path / "out" / name)
    assert "holds files that" in refused(capsys, text, tmp_path / "out", *option)


def test_overwrite_follows_no_link_to_a_folder(text, run, tmp_path, capsys):
    shutil.move(run / "checkpoints", tmp_path / "elsewhere")
    (run / "checkpoints").symlink_to(tmp_path / "elsewhere")
    before = contents(tmp_path / "elsewhere")
    assert f"{run / 'checkpoints'} was not written by a run" in refused(capsys, text, run, "--overwrite")
    assert contents(tmp_path / "elsewhere") == before
    assert train(text, run, "--resume", sizes=SIZES) == 0  # on another disk, for instance


@pytest.mark.parametrize("by", ["log.csv", "result.json", "checkpoints"])
def test_runs_of_versions_without_a_lock_are_recognised(text, run, capsys, by):
    (run / LOCK).unlink()
    for name in ({"log.csv", "result.json", "checkpoints"} - {by}) | {"baseline", "tensorboard"}:
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert "--overwrite" in refused(capsys, text, run)
    assert train(text, run, "--overwrite", sizes=SIZES) == 0


def test_folders_that_cannot_be_used(text, tmp_path, capsys, monkeypatch):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    assert f"is a link to {tmp_path / 'nowhere'}, which does not exist" in refused(capsys, text, link)
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert "--out" in refused(capsys, text, loop)
    assert "is a file; pass a folder" in refused(capsys, text, text)
    assert "cannot be created: Not a directory" in refused(capsys, text, text / "below")
    assert "File name too long" in refused(capsys, text, tmp_path / ("a" * 300))
    for option in (["--out", ""], ["--out", "x", "--resume", ""]):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SystemExit) as stop:
            train(text, tmp_path / "out", *option)
        assert stop.value.code == 2
        assert f"argument {option[-2]}: it is empty; pass a path, . for the current folder" in capsys.readouterr().err
    (tmp_path / "there").mkdir()
    link.unlink()
    link.symlink_to(tmp_path / "there")
    assert train(text, link, sizes=SIZES) == 0  # a link to a folder is a folder
    assert (tmp_path / "there" / "result.json").exists()


def test_a_refused_run_moves_no_checkpoint_aside(text, run, tmp_path, capsys):
    fill(tmp_path, "b.txt", b"something else entirely\n" * 200)
    said = refused(capsys, tmp_path / "b.txt", run, "--resume", str(run / "checkpoints" / "step-00000002.pt"))
    assert "has changed since" in said


def test_resume_into_another_folder(text, run, tmp_path, capsys):
    (run / "checkpoints" / "step-00000003.pt").rename(tmp_path / "a.pt")
    fill(tmp_path / "mine", "model.safetensors")
    assert "holds files that" in refused(capsys, text, tmp_path / "mine", "--resume", str(tmp_path / "a.pt"))
    assert train(text, tmp_path / "new", "--resume", str(tmp_path / "a.pt"), sizes=SIZES) == 0
    assert json.loads((tmp_path / "new" / "result.json").read_text())["sparse"]["train_loss"] is None  # there was nothing to train


def test_the_lock_is_given_back_however_a_run_ends(text, tmp_path, capsys):
    with Folder(tmp_path / "out") as folder:
        folder.take()
        said = refused(capsys, text, tmp_path / "out")
        assert f"is in use: process {os.getpid()} on " in said
        with pytest.raises(NMError, match="is in use"):
            Folder(tmp_path / "out").take()
    assert (tmp_path / "out" / LOCK).read_bytes() == b""
    assert train(text, tmp_path / "out", "--lr", "1e30", sizes=SIZES) in (0, 1)
    assert train(text, tmp_path / "out", "--overwrite", sizes=SIZES) == 0


def test_without_locks_of_the_system_the_file_tells(text, tmp_path, capsys, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def none(handle, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    out = tmp_path / "out"
    with Folder(out) as folder:
        folder.take()
        assert f"or delete {out / LOCK} if that process is gone" in refused(capsys, text, out)
        mine = json.loads((out / LOCK).read_text())
    with Folder(out) as folder:
        folder.take()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for owner, free in (({**mine, "pid": gone.pid}, True), ({**mine, "host": "elsewhere"}, False), ({"half": 1}, True)):
        (out / LOCK).write_text(json.dumps(owner))
        with Folder(out) as folder:
            if free:
                folder.take()
                continue
            with pytest.raises(NMError, match="process .* on elsewhere has been writing to it since"):
                folder.take()


def test_unwritable_events_are_reported(text, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(log, "board_writer", lambda: mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    assert train(text, tmp_path / "out", "--tensorboard", sizes=SIZES) == 1
    assert f"{tmp_path / 'out' / 'tensorboard'} could not be written: No space left on device (" in capsys.readouterr().err
