"""Tables on disk: read once and tolerantly, merged with what others wrote, never half written."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from nmkernels.tuning import table as _store
from nmkernels.tuning.table import Table


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NMKERNELS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _table(file: str = "t.json", schema: int = 3) -> Table:
    return Table(file, schema, "nothing is known", "store again")


def test_nothing_is_there_before_something_is_stored(cache: Path) -> None:
    table = _table()
    assert table.lines() == {} and table.get("a") is None and not cache.exists()
    assert table.path() == cache / "t.json"


def test_the_folder_of_a_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NMKERNELS_CACHE", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _table().path() == tmp_path / ".cache" / "nmkernels" / "t.json"
    monkeypatch.setenv("NMKERNELS_CACHE", "~/elsewhere")
    assert _table().path() == tmp_path / "elsewhere" / "t.json"


def test_what_is_stored_is_found_by_others(cache: Path) -> None:
    one, two = _table(), _table()
    assert one.store({"b": {"x": 1}, "a": {"y": [2.5, "z"]}}) == cache / "t.json"
    assert one.get("b") == {"x": 1} and two.lines() == {"a": {"y": [2.5, "z"]}, "b": {"x": 1}}
    assert json.loads((cache / "t.json").read_text()) == {"schema": 3, "choices": {"a": {"y": [2.5, "z"]}, "b": {"x": 1}}}
    assert [p.name for p in cache.iterdir()] == ["t.json"]
    assert _table("other.json").lines() == {}


def test_it_is_read_once(cache: Path) -> None:
    table = _table()
    table.store({"a": {"x": 1}})
    _table().store({"a": {"x": 2}, "b": {}})
    assert table.lines() == {"a": {"x": 1}}
    table.forget()
    assert table.lines() == {"a": {"x": 2}, "b": {}}


def test_what_others_wrote_is_kept() -> None:
    one, two = _table(), _table()
    assert one.lines() == two.lines() == {}
    one.store({"a": {"x": 1}, "b": {}})
    two.store({"c": {"x": 3}, "b": None, "nowhere": None})
    assert two.lines() == _table().lines() == {"a": {"x": 1}, "c": {"x": 3}}
    # later too: what was stored once is not stored again
    one.store({"c": {"x": 9}})
    two.store({"d": {}})
    assert two.lines() == _table().lines() == {"a": {"x": 1}, "c": {"x": 9}, "d": {}}


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"schema": 4, "choices": {}}', '{"choices": {}}', '{"schema": 3, "choices": []}', "\x00\xff", "[" * 100000],
    ids=["empty", "cut", "list", "null", "schema", "no schema", "no lines", "no text", "deep"],
)
def test_a_damaged_file_is_told_once_and_replaced(cache: Path, text: str) -> None:
    cache.mkdir()
    (cache / "t.json").write_text(text, encoding="latin-1")
    table = _table()
    with pytest.warns(RuntimeWarning, match=r"t\.json .*; nothing is known. Delete it, or store again, which replaces it"):
        assert table.lines() == {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert table.lines() == {}
        table.store({"a": {"x": 1}})
        assert _table().lines() == {"a": {"x": 1}}


def test_a_file_that_cannot_be_read_is_told(cache: Path) -> None:
    (cache / "t.json").mkdir(parents=True)
    with pytest.warns(RuntimeWarning, match=r"t\.json cannot be read"):
        assert _table().lines() == {}


@pytest.mark.parametrize("linked", [False, True])
def test_a_pipe_is_not_waited_for(cache: Path, pipe: Path, linked: bool) -> None:
    cache.mkdir()
    (cache / "t.json").symlink_to(pipe) if linked else pipe.rename(cache / "t.json")
    with pytest.warns(RuntimeWarning, match=r"t\.json cannot be read .*Not a regular file.*Delete it, or store again"):
        assert _table().lines() == {}
    _table().store({"a": {"x": 1}})
    assert (cache / "t.json").is_file() and not (cache / "t.json").is_symlink() and _table().lines() == {"a": {"x": 1}}


def test_a_pipe_is_no_folder(monkeypatch: pytest.MonkeyPatch, pipe: Path) -> None:
    monkeypatch.setenv("NMKERNELS_CACHE", str(pipe))
    with pytest.warns(RuntimeWarning, match="cannot be read"):
        assert _table().lines() == {}
    table = _table()
    with pytest.raises(OSError, match="pipe"):
        table.store({"a": {}})
    assert table.lines() == {"a": {}}


def test_a_device_is_not_read(cache: Path) -> None:
    cache.mkdir()
    (cache / "t.json").symlink_to("/dev/null")  # as /dev/zero is, which never ends
    with pytest.warns(RuntimeWarning, match=r"t\.json cannot be read .*Not a regular file"):
        assert _table().lines() == {}


def test_a_link_to_nothing_is_no_file(cache: Path) -> None:
    cache.mkdir()
    (cache / "t.json").symlink_to(cache / "none")
    assert _table().lines() == {}
    _table().store({"a": {}})
    assert _table().lines() == {"a": {}} and [p.name for p in cache.iterdir()] == ["t.json"]


def test_a_file_too_large_for_a_table_is_not_read(cache: Path) -> None:
    cache.mkdir()
    (cache / "t.json").touch()
    os.truncate(cache / "t.json", 1 << 40)
    with pytest.warns(RuntimeWarning, match=r"t\.json is no table: it has 1,099,511,627,776 bytes; nothing is known"):
        assert _table().lines() == {}
    _table().store({"a": {}})
    assert _table().lines() == {"a": {}}


def test_a_line_nested_deeper_than_can_be_written_is_left_out(cache: Path) -> None:
    cache.mkdir()
    (cache / "t.json").write_text(f'{{"schema": 3, "choices": {{"a": {{"x": {"[" * 900}{"]" * 900}}}, "b": {{"x": [[1]]}}}}}}')
    assert _table().lines() == {"b": {"x": [[1]]}}


def test_lines_that_are_none_are_left_out(cache: Path) -> None:
    cache.mkdir()
    (cache / "t.json").write_text('{"schema": 3, "choices": {"a": 1, "b": {"x": 1}, "c": null, "d": []}}')
    assert _table().lines() == {"b": {"x": 1}}


def _fails(*args: Any) -> None:
    raise OSError("disk is full")


def test_a_failed_write_leaves_the_old_file_and_holds_here(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = _table()
    table.store({"a": {"x": 1}})
    before = (cache / "t.json").read_bytes()
    with monkeypatch.context() as m:
        m.setattr(os, "replace", _fails)
        with pytest.raises(OSError, match="disk"):
            table.store({"b": {"x": 2}, "a": None})
    assert (cache / "t.json").read_bytes() == before and len(list(cache.iterdir())) == 1
    assert table.lines() == {"b": {"x": 2}}
    # and is written with the next
    table.store({"c": {}})
    assert table.lines() == _table().lines() == {"b": {"x": 2}, "c": {}}
    with monkeypatch.context() as m:
        m.setattr(os, "replace", _fails)
        with pytest.raises(OSError, match="disk"):
            table.store({"d": {}})
    table.forget()
    table.store({"e": {}})
    assert table.lines() == {"b": {"x": 2}, "c": {}, "e": {}}


def test_without_a_folder_it_holds_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NMKERNELS_CACHE", str(tmp_path / "file" / "below"))
    table = _table()
    with pytest.raises(OSError, match="file"):
        table.store({"a": {"x": 1}})
    assert table.lines() == {"a": {"x": 1}}


def test_without_a_home_the_way_out_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NMKERNELS_CACHE", "~nobody-of-that-name/cache")
    with pytest.raises(OSError, match="set NMKERNELS_CACHE"):
        _table().store({"a": {}})
    with pytest.warns(RuntimeWarning, match="set NMKERNELS_CACHE"):
        assert _table().lines() == {}


def test_threads_lose_nothing() -> None:
    table = _table()
    threads = [threading.Thread(target=lambda i=i: [table.store({f"{i} {k}": {}}) for k in range(10)]) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(table.lines()) == len(_table().lines()) == 40


WRITER = """
import sys
from nmkernels.tuning.table import Table
table = Table("t.json", 3, "", "")
for k in range(20):
    table.store({f"{sys.argv[1]} {k}": {}})
"""


def test_processes_lose_nothing(cache: Path) -> None:
    running = [subprocess.Popen([sys.executable, "-c", WRITER, name]) for name in "ab"]
    assert [process.wait(60) for process in running] == [0, 0]
    assert len(_table().lines()) == 40 and [p.name for p in cache.iterdir()] == ["t.json"]


def test_a_stopped_process_does_not_stop_others(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_store, "LONGEST_WAIT", 0.05)
    cache.mkdir()
    handle = os.open(cache, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        _table().store({"a": {}})
    finally:
        os.close(handle)
    assert _table().lines() == {"a": {}}


def test_one_waits_for_another(cache: Path) -> None:
    """Who holds the lock writes first: nothing of it is lost."""
    cache.mkdir()
    handle = os.open(cache, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_SH)
    waiting = threading.Thread(target=lambda: _table().store({"b": {}}))
    waiting.start()
    time.sleep(0.05)
    (cache / "t.json").write_text('{"schema": 3, "choices": {"a": {}}}')
    os.close(handle)
    waiting.join()
    assert _table().lines() == {"a": {}, "b": {}}
