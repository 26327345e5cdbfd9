"""Fetching: what is missing is downloaded, checked and put in place whole; offline errors say what to do."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.accuracy import __main__ as command
from bench.accuracy import data
from python_tests.bench.accuracy.conftest import deb


@dataclass(frozen=True)
class FakeSource(data.Source):
    """A source whose download has this content, or fails if it is None."""

    content: bytes | None = None

    def download(self, scratch: Path) -> Path:
        if self.content is None:
            raise OSError("no route to host")
        (scratch / "any name").write_bytes(self.content)
        return scratch / "any name"


def fake_source(meant: bytes, content: bytes | None) -> FakeSource:
    return FakeSource("words", "1.0", "words.txt", len(meant), hashlib.sha256(meant).hexdigest(), content=content)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(data.VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_fetch_downloads_once_and_replaces_a_broken_file(folder, monkeypatch):
    monkeypatch.setattr(data, "SOURCES", {"task": (fake_source(b"a b c", b"a b c"),)})
    with pytest.raises(RuntimeError, match=r"words.txt.*run: python -m bench.accuracy fetch task"):
        data.files("task")
    messages: list[str] = []
    for _ in range(2):
        data.fetch(["task"], messages.append)
    assert data.files("task")["words"].read_bytes() == b"a b c" and [p.name for p in folder.iterdir()] == ["words.txt"]
    assert [line.partition(": ")[2][:6] for line in messages] == ["0 of 1", "", "1 of 1"]
    (folder / "words.txt").write_bytes(b"a b")
    with pytest.raises(RuntimeError, match="fetch task"):
        data.files("task")
    data.fetch()
    assert data.files("task")["words"].read_bytes() == b"a b c"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (fake_source(b"a", None), r"no route to host.*by hand: words.txt, SHA-256 ca978"),
        (fake_source(b"a", b"b"), "is not the expected file"),
    ],
)
def test_what_fails_leaves_nothing_behind(folder, monkeypatch, capsys, source, message):
    monkeypatch.setattr(data, "SOURCES", {"task": (source,)})
    with pytest.raises(RuntimeError, match=message):
        data.fetch()
    assert not list(folder.iterdir())
    assert command.main(["fetch", "task"]) == 2 and "error: words" in capsys.readouterr().err
    monkeypatch.setenv(data.VARIABLE, str(folder / "file" / "below"))
    (folder / "file").write_text("in the way")
    assert command.main(["fetch"]) == 2 and "set NMKERNELS_DATA to use another one" in capsys.readouterr().err
    assert command.main(["fetch", "tusk"]) == 2 and "did you mean 'task'" in capsys.readouterr().err


def test_a_debian_package_is_read_without_dpkg(tmp_path):
    path = deb(tmp_path / "p.deb", {"./usr/share/de.mo": b"abc", "./usr/bin/tool": b"abc"})
    assert list(data.deb_files(path, lambda name: name.endswith(".mo"))) == [("./usr/share/de.mo", b"abc")]
    path.write_bytes(b"PK")
    with pytest.raises(ValueError, match="not a Debian package"):
        list(data.deb_files(path, bool))


def test_run_refuses_a_task_whose_data_is_missing(folder, tmp_path, capsys):
    assert command.main(["run", "--tasks", "sentiment", "--out", str(tmp_path / "out")]) == 2
    assert "run: python -m bench.accuracy fetch sentiment" in capsys.readouterr().err and not (tmp_path / "out").exists()
