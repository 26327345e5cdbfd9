"""The table on disk: read once and tolerantly, merged with what others wrote, never half written."""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import nmkernels as nm
from nmkernels.timing import table
from nmkernels.timing.table import Table, device_name, key, machine, versions
from python_tests.for_each import for_each

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def file(cache: Path) -> Path:
    """The table's file, in a folder that is there."""
    cache.mkdir()
    return cache / "tuning.json"


def test_the_folder_of_a_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NMKERNELS_CACHE", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Table().path() == tmp_path / ".cache" / "nmkernels" / "tuning.json"
    monkeypatch.setenv("NMKERNELS_CACHE", "~/elsewhere")
    assert Table().path() == tmp_path / "elsewhere" / "tuning.json"
    monkeypatch.setenv("NMKERNELS_CACHE", "~nobody-of-that-name/cache")
    with pytest.raises(OSError, match="set NMKERNELS_CACHE"):
        Table().store({"a": {}})
    with pytest.warns(RuntimeWarning, match="set NMKERNELS_CACHE"):
        assert Table().lines() == {}


def test_what_is_stored_is_found_by_others_and_read_once(cache: Path) -> None:
    assert Table().lines() == {} and Table().get("a") is None and not cache.exists()
    one, two = Table(), Table()
    assert one.store({"b": {"x": 1}, "a": {"y": [2.5, "z"]}}) == cache / "tuning.json"
    assert one.get("b") == {"x": 1} and two.lines() == {"a": {"y": [2.5, "z"]}, "b": {"x": 1}}
    assert json.loads((cache / "tuning.json").read_text()) == {"schema": 3, "lines": {"a": {"y": [2.5, "z"]}, "b": {"x": 1}}}
    assert [p.name for p in cache.iterdir()] == ["tuning.json"]
    two.store({"a": {"x": 2}})
    assert one.get("a") == {"y": [2.5, "z"]}
    one.forget()
    assert one.get("a") == {"x": 2}


def test_what_others_wrote_is_kept() -> None:
    one, two = Table(), Table()
    assert one.lines() == two.lines() == {}
    one.store({"a": {"x": 1}, "b": {}})
    two.store({"c": {"x": 3}, "b": None, "nowhere": None})
    assert two.lines() == Table().lines() == {"a": {"x": 1}, "c": {"x": 3}}
    # later too: what was stored once is not stored again
    one.store({"c": {"x": 9}})
    two.store({"d": {}})
    assert two.lines() == Table().lines() == {"a": {"x": 1}, "c": {"x": 9}, "d": {}}


@for_each("text", ["", "{", "null", '{"schema": 9, "lines": {}}', '{"schema": 3, "lines": []}', "\x00\xff", "[" * 100000, None])
def test_a_damaged_file_is_reported_once_and_replaced(cache: Path, text: str | None) -> None:
    cache.mkdir(exist_ok=True)
    file = cache / "tuning.json"
    file.write_text(text or "", encoding="latin-1")
    if text is None:
        os.truncate(file, 1 << 40)  # too large for a table: it is not read
    table = Table()
    with pytest.warns(RuntimeWarning, match=r"tuning\.json .*; measurements are ignored. Delete it, or run nm\.tune again, which") as said:
        assert table.lines() == {}
    assert text is not None or "it has 1,099,511,627,776 bytes" in str(said[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert table.lines() == {}
        table.store({"a": {"x": 1}})
        assert Table().lines() == {"a": {"x": 1}}


@pytest.mark.parametrize("what", ["folder", "pipe", "link to a pipe", "device", "link to nothing"])
def test_a_pipe_is_refused_without_waiting(file: Path, pipe: Path, what: str) -> None:
    if what == "folder":
        file.mkdir()
    elif what == "pipe":
        pipe.rename(file)
    else:
        # as /dev/zero is, which never ends
        file.symlink_to({"link to a pipe": pipe, "device": "/dev/null"}.get(what, file.parent / "none"))
    with nullcontext() if what == "link to nothing" else pytest.warns(RuntimeWarning, match=r"tuning\.json cannot be read"):
        assert Table().lines() == {}
    if what != "folder":
        Table().store({"a": {"x": 1}})
        assert file.is_file() and not file.is_symlink() and Table().lines() == {"a": {"x": 1}}


def test_a_pipe_is_no_folder(monkeypatch: pytest.MonkeyPatch, pipe: Path) -> None:
    monkeypatch.setenv("NMKERNELS_CACHE", str(pipe))
    with pytest.warns(RuntimeWarning, match="cannot be read"):
        assert Table().lines() == {}
    table = Table()
    with pytest.raises(OSError, match="pipe"):
        table.store({"a": {}})
    assert table.lines() == {"a": {}}, "it holds here"


def test_lines_that_are_none_are_left_out(file: Path) -> None:
    file.write_text('{"schema": 3, "lines": {"a": 1, "b": {"x": [[1]]}, "c": null, "d": []}}')
    assert Table().lines() == {"b": {"x": [[1]]}}


def test_a_failed_write_leaves_the_old_file_and_holds_here(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(lines: Any) -> None:
        with monkeypatch.context() as m, pytest.raises(OSError, match="disk"):
            m.setattr(os, "replace", Mock(side_effect=OSError("disk is full")))
            table.store(lines)

    table = Table()
    before = table.store({"a": {"x": 1}}).read_bytes()
    refused({"b": {"x": 2}, "a": None})
    assert table.path().read_bytes() == before and len(list(cache.iterdir())) == 1
    assert table.lines() == {"b": {"x": 2}}
    # and is written with the next
    table.store({"c": {}})
    assert table.lines() == Table().lines() == {"b": {"x": 2}, "c": {}}
    refused({"d": {}})
    table.forget()
    table.store({"e": {}})
    assert table.lines() == {"b": {"x": 2}, "c": {}, "e": {}}


def test_threads_lose_nothing() -> None:
    table = Table()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: [table.store({f"{i} {k}": {}}) for k in range(10)], range(4)))
    assert len(table.lines()) == len(Table().lines()) == 40


@pytest.mark.parametrize("stopped", [False, True])
def test_one_waits_for_another_but_not_for_ever(file: Path, monkeypatch: pytest.MonkeyPatch, stopped: bool) -> None:
    """Who holds the lock writes first: nothing of it is lost."""
    handle = os.open(file.parent, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_SH)
    if stopped:
        monkeypatch.setattr(table, "LONGEST_WAIT", 0.05)
        Table().store({"b": {}})
        os.close(handle)
        assert Table().lines() == {"b": {}}
        return
    waiting = threading.Thread(target=lambda: Table().store({"b": {}}))
    waiting.start()
    time.sleep(0.05)
    file.write_text('{"schema": 3, "lines": {"a": {}}}')
    os.close(handle)
    waiting.join()
    assert Table().lines() == {"a": {}, "b": {}}


# ---- what a line is called


def test_a_line_is_of_a_machine_and_its_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    name = device_name(CPU)
    for size, next_power in zip((0, 1, 2, 3, 4, 5, 20, 8193), (1, 1, 2, 4, 4, 8, 32, 16384), strict=True):
        assert key("gemm", CPU, "fprop", size) == f"gemm|{name}|{versions('cpu')}|fprop|{next_power}"
    assert f"nmkernels {nm.__version__}" in versions("cpu") and f"torch {torch.__version__}" in versions("cpu")
    assert table.capability.core_build() in versions("cpu")  # a rebuilt kernel is measured again
    assert "triton" not in versions("cpu") and f", {torch.get_num_threads()} threads, " in name
    assert machine(CPU) == name.replace(f", {torch.get_num_threads()} threads", ""), "right with one thread is right with two"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    monkeypatch.setattr(table, "_cpu_model", lambda: "a CPU")
    assert device_name(CPU).startswith("a CPU, 77 threads, ")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    assert device_name(torch.device("cuda")) == machine(torch.device("cuda")) == "a GPU" and device_name(torch.device("meta")) == "meta"
    monkeypatch.setattr(table.capability, "instruction_set", Mock(side_effect=ValueError("NMKERNELS_ISA=sve is unknown")))
    with pytest.raises(nm.BackendError, match="The CPU kernels cannot run: NMKERNELS_ISA=sve is unknown"):
        device_name(CPU)
