"""Files are written completely or not at all, no temporary files stay, and an error names the file, the reason and the free space."""

from __future__ import annotations

import os
import resource

import pytest
import torch
from safetensors.torch import save_file

from nmkernels.export import atomic_write
from nmkernels.files import write_error
from nmkernels.pattern import CheckpointError

SMALL = 20_000


TENSORS = {"a": torch.ones(9000), "b": torch.ones(9000)}
SAVES = [lambda path: torch.save(TENSORS, path), lambda path: save_file(TENSORS, path), lambda path: path.write_bytes(bytes(2 * SMALL))]


@pytest.fixture
def small_files():
    """The system refuses to let any file grow beyond 20 kB, as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("save", SAVES, ids=["torch", "safetensors", "bytes"])
def test_a_disk_that_is_full_is_named_and_the_old_file_stays(tmp_path, small_files, save):
    path = tmp_path / "a.pt"
    path.write_bytes(b"old")
    with pytest.raises(CheckpointError) as caught:
        atomic_write(path, save)
    said = str(caught.value)
    assert said.startswith(f"{path} could not be written: File too large (") and said.endswith(f"B free in {tmp_path}).")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["a.pt"]


def test_torch_s_refusal_that_cannot_be_repeated(tmp_path):
    def write(path):
        path.touch()
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")

    with pytest.raises(CheckpointError, match=r"a\.pt could not be written: a write failed\."):
        atomic_write(tmp_path / "a.pt", write)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("error", [RuntimeError("no such layer"), TypeError("no tensor"), KeyboardInterrupt()], ids=repr)
def test_what_is_not_the_system_s_doing_is_raised_as_it_is(tmp_path, error):
    def write(path):
        path.write_bytes(b"half")
        raise error

    with pytest.raises(type(error)) as caught:
        atomic_write(tmp_path / "a.pt", write)
    assert caught.value is error
    assert os.listdir(tmp_path) == []


def test_only_a_regular_file_is_replaced(tmp_path):
    with pytest.raises(CheckpointError, match="is a folder; pass the name of a file in it"):
        atomic_write(tmp_path, SAVES[2])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="pipe is not a regular file and would be replaced by one"):
        atomic_write(tmp_path / "pipe", SAVES[2])
    with pytest.raises(CheckpointError, match="/dev/null is not a regular file"):
        atomic_write("/dev/null", SAVES[2])
    with pytest.raises(CheckpointError, match="the folder .*nowhere does not exist"):
        atomic_write(tmp_path / "nowhere" / "a", SAVES[2])
    with pytest.raises(CheckpointError, match="could not be written: File name too long."):
        atomic_write(tmp_path / ("a" * 254), SAVES[2])


AMOUNTS = {0: "0 bytes", 999: "999 bytes", 1000: "1 kB", 4096: "4.1 kB", 999e6: "999 MB", 1e9: "1.0 GB", 1.25e12: "1,250.0 GB"}


@pytest.mark.parametrize("free", AMOUNTS)
def test_free_space_is_readable(tmp_path, monkeypatch, free):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("usage", (), {"free": free}))
    said = f"{tmp_path / 'a'} could not be written: {os.strerror(28)} ({AMOUNTS[free]} free in {tmp_path})."
    assert str(write_error(tmp_path / "a", os.strerror(28))) == said
    assert " free in " not in str(write_error(tmp_path / "a", "Permission denied"))
