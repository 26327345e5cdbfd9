"""The text of train_gpt: what is read, how it is split, and the error if there is none."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from examples.train_gpt import data
from examples.train_gpt.data import load_corpus

TEXT = b"".join(b"line %06d of a text\n" % i for i in range(400))


@pytest.fixture
def corpus(tmp_path: Path) -> data.Corpus:
    (tmp_path / "a.txt").write_bytes(TEXT)
    return load_corpus(tmp_path / "a.txt")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i in range(40):
        (tmp_path / f"{i:02}.txt").write_bytes(b"%02d " % i * 100)
    return tmp_path


def whole(corpus: data.Corpus) -> bytes:
    return bytes(corpus.train.tolist()) + bytes(corpus.val.tolist())


def test_one_file_is_split_at_nine_tenths(corpus):
    assert whole(corpus) == TEXT and len(corpus.val) == len(TEXT) // 10 and corpus.files == 1


def test_many_files_are_split_by_file_wherever_they_lie(folder, tmp_path_factory, monkeypatch):
    corpus = load_corpus(folder)
    train, val = bytes(corpus.train.tolist()), bytes(corpus.val.tolist())
    for i in range(40):
        text = b"%02d " % i * 100
        assert (text in train) != (text in val)
    assert 0.05 < len(val) / len(train + val) <= 0.1
    other = shutil.copytree(folder, tmp_path_factory.mktemp("other") / "place")
    assert load_corpus(other).digest == corpus.digest
    (other / "07.txt").write_bytes(b"xx " * 100)
    assert load_corpus(other).digest != corpus.digest
    monkeypatch.setattr(data, "MAX_BYTES", 1000)
    assert len(whole(load_corpus(folder))) <= 1000 + 3  # and a line feed between two files


def test_folders_skip_hidden_and_binary_files(tmp_path):
    for name, text in (("deep/er/a.txt", TEXT), (".git/b", b"hidden"), (".c", b"hidden"), ("d.bin", b"bin\0ary"), ("empty", b"")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text)
    corpus = load_corpus(tmp_path)
    assert whole(corpus) == TEXT and corpus.files == 1


def test_a_pipe_does_not_hang(corpus, tmp_path, pipe):
    pipe.rename(tmp_path / "a pipe")
    assert whole(load_corpus(tmp_path)) == TEXT


def test_the_default_is_the_standard_library(tmp_path, monkeypatch):
    corpus = load_corpus()
    assert len(corpus.train) > 1_000_000 and corpus.source == "the Python standard library"
    assert corpus.digest == load_corpus().digest
    assert b"def " in bytes(corpus.val[:100_000].tolist())
    monkeypatch.setattr(data.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ValueError, match="there is no text here"):
        load_corpus()


def test_no_text_is_an_error(tmp_path):
    (tmp_path / "empty").touch()
    (tmp_path / "binary").write_bytes(b"\x7fELF\0\0")
    for path in (tmp_path, tmp_path / "binary", tmp_path / "missing"):
        with pytest.raises(ValueError, match=f"{path}: there is no text here"):
            load_corpus(path)


def test_batches_are_a_function_of_seed_and_step(corpus):
    x, y = corpus.batch(seed=1, step=5, size=3, context=16)
    assert torch.equal(x, corpus.batch(seed=1, step=5, size=3, context=16)[0])
    assert x.shape == y.shape == (3, 16)
    assert torch.equal(x[:, 1:], y[:, :-1])
    for row in range(3):
        assert bytes([*x[row].tolist(), int(y[row, -1])]) in TEXT
    for seed, step in ((1, 6), (2, 5)):
        assert not torch.equal(x, corpus.batch(seed, step, size=3, context=16)[0])


def test_batches_and_validation_cover_the_text():
    corpus = data.Corpus(torch.arange(20, dtype=torch.uint8), torch.arange(101, dtype=torch.uint8), "a test", 1, "")
    starts = torch.cat([corpus.batch(0, step, 50, 16)[0][:, 0] for step in range(5)])
    assert set(starts.tolist()) == {0, 1, 2, 3}
    batches = list(corpus.val_batches(context=10, size=4, most=100))
    assert [len(x) for x, _ in batches] == [4, 4, 2]
    assert torch.cat([y for _, y in batches]).flatten().tolist() == list(range(1, 101))
    few = torch.cat([x for x, _ in corpus.val_batches(context=10, size=4, most=5)])
    assert few[:, 0].tolist() == [0, 20, 40, 60, 80]
