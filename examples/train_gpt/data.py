"""Text to train on: the source of Python's standard library, or any file or folder.

A batch depends only on the seed and the step, so a resumed run reads the batches that it would have read.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

VALIDATION_SHARE = 0.1
MAX_BYTES = 1 << 28
"""The most text that is read, 256 MiB."""
FILES_TO_HASH = 20
"""So many files or more are split by file, fewer by bytes."""
SKIPPED_FOLDERS = frozenset(
    ["test", "tests", "idle_test", "idlelib", "turtledemo", "encodings", "site-packages", "dist-packages", "__pycache__"],
)
"""Folders of the standard library that are skipped: tests, installed packages, tables of character codes."""


@dataclass(frozen=True)
class Corpus:
    """Training and validation text as uint8 tensors, with its source and a digest to detect changes."""

    train: Tensor
    val: Tensor
    source: str
    files: int
    digest: str

    def batch(self, seed: int, step: int, size: int, context: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets ``[size, context]`` (int64) of one training step."""
        rng = torch.Generator().manual_seed((seed * 0x9E3779B97F4A7C15 + step) & (2**63 - 1))
        starts = torch.randint(len(self.train) - context, (size, 1), generator=rng)
        return _windows(self.train, starts, context)

    def val_batches(self, context: int, size: int, most: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of up to ``most`` non-overlapping validation windows, spread evenly over the text."""
        count = (len(self.val) - 1) // context
        windows = torch.arange(count) if count <= most else torch.arange(most) * count // most
        for part in windows.split(size):
            yield _windows(self.val, part[:, None] * context, context)


def _windows(text: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    window = text[starts + torch.arange(context + 1)].long()
    return window[:, :-1], window[:, 1:]


def load_corpus(path: str | os.PathLike[str] | None = None) -> Corpus:
    """Read the text at ``path`` (a file, or a folder and its subfolders), or the standard library's source if None.

    A file counts as text if it has no NUL byte; hidden files and folders are skipped. With 20 files or more, whole files go to validation,
    in the order of a hash of their names, up to a tenth of the bytes; with fewer, the last tenth of the text does.
    """
    if path is None:
        return make_corpus(stdlib_texts(), "the Python standard library")
    root = Path(path)
    return make_corpus(_read([root], root.parent) if root.is_file() else _read(_walk(root, frozenset()), root), str(path))


def stdlib_texts() -> dict[str, bytes]:
    """Relative name → source of the Python standard library's files, without tests and tables of character codes."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return _read((file for file in _walk(root, SKIPPED_FOLDERS) if file.suffix == ".py"), root)


def make_corpus(texts: dict[str, bytes], source: str) -> Corpus:
    """Split named texts into training and validation text as in ``load_corpus``; ``source`` names them in messages.

    Raises:
        ValueError: there is no text.
    """
    if not texts:
        raise ValueError(f"{source}: there is no text here; pass a text file, or a folder of them.")
    train, val = _split(texts)
    digest = hashlib.blake2b(train, digest_size=16)
    digest.update(val)
    # torch.frombuffer needs at least one byte
    parts = [torch.frombuffer(bytearray(part or b"\0"), dtype=torch.uint8)[: len(part)] for part in (train, val)]
    return Corpus(parts[0], parts[1], source, len(texts), f"{len(train)}-{digest.hexdigest()}")


def _walk(root: Path, skipped: frozenset[str]) -> Iterator[Path]:
    """Regular files below ``root`` in sorted order."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(d for d in folders if d not in skipped and not d.startswith("."))
        yield from (path for name in sorted(names) if not name.startswith(".") and (path := Path(folder, name)).is_file())


def _read(files: Iterator[Path] | list[Path], root: Path) -> dict[str, bytes]:
    """Name relative to ``root`` → text, for the files that hold text."""
    texts: dict[str, bytes] = {}
    total = 0
    for file in files:
        with file.open("rb") as stream:
            data = stream.read(MAX_BYTES - total)
        if data and b"\0" not in data:
            texts[file.relative_to(root).as_posix()] = data
            total += len(data)
        if total >= MAX_BYTES:
            break
    return texts


def _split(texts: dict[str, bytes]) -> tuple[bytes, bytes]:
    """(training, validation) text, about nine to one."""
    budget = int(sum(map(len, texts.values())) * VALIDATION_SHARE)
    if len(texts) >= FILES_TO_HASH:
        size, chosen = 0, set()
        for name in sorted(texts, key=lambda n: hashlib.blake2b(n.encode(), digest_size=8).digest()):
            if size + len(texts[name]) <= budget:
                chosen.add(name)
                size += len(texts[name])
        if size >= budget // 2:
            parts = [b"\n".join(t for n, t in texts.items() if (n in chosen) is side) for side in (False, True)]
            return parts[0], parts[1]
    whole = b"\n".join(texts.values())
    cut = len(whole) - budget
    return whole[:cut], whole[cut:]
