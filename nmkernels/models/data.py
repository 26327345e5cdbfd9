"""Training text: the standard library's source by default, or any file or folder.

Batches depend only on (seed, step), so resuming a run needs no sampler state.
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

from ..pattern import NMError

VALIDATION_SHARE = 0.1
MAX_BYTES = 1 << 28
"""The most text that is read, 256 MiB: enough for these small models, and it fits a laptop."""
MIN_CONTEXTS = 4
SKIPPED_FOLDERS = frozenset(
    ["test", "tests", "idle_test", "idlelib", "turtledemo", "encodings", "site-packages", "dist-packages", "__pycache__"],
)
"""Folders of the standard library that are skipped: tests, installed packages, tables of character codes."""
FILES_TO_HASH = 20


class DataError(NMError, ValueError):
    """The text to train on is missing, empty, too small, binary or unreadable."""


@dataclass(frozen=True)
class Corpus:
    """Training and validation text as uint8 tensors, with its source and a digest to detect changes."""

    train: Tensor
    val: Tensor
    source: str
    files: int
    digest: str

    def check(self, context: int) -> None:
        """Raise ``DataError`` unless both parts are long enough for sequences of ``context`` tokens."""
        need = {"training": (self.train, MIN_CONTEXTS * (context + 1)), "validation": (self.val, context + 1)}
        for name, (tokens, least) in need.items():
            if len(tokens) < least:
                raise DataError(
                    f"{self.source}: the {name} text is {len(tokens)} bytes, and a context of {context} needs at least {least}. "
                    "Use more text (--data) or a smaller --context."
                )

    def batch(self, seed: int, step: int, size: int, context: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets ``[size, context]`` (int64) of one training step, a function of (seed, step)."""
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

    A file counts as text if it has no NUL byte. Hidden files and folders are skipped. With 20 files or more, whole files go to validation,
    in the order of a hash of their names, up to a tenth of the bytes; with fewer, the last tenth of the text does.

    Raises:
        DataError: the path does not exist, or contains no usable text.
    """
    if path is None:
        return make_corpus(stdlib_texts(), "the Python standard library")
    if not os.fspath(path):
        raise DataError("--data is empty; give a file or a folder, or leave it out.")
    root = Path(path)
    try:
        root.stat()
    except OSError as error:
        raise DataError(f"{root}: {error.strerror or error}.") from error
    if not root.is_file() and not root.is_dir():
        raise DataError(f"{root}: neither a file nor a folder.")
    files = [root] if root.is_file() else list(_walk(root, frozenset()))
    if not files:
        raise DataError(f"{root}: the folder holds no files.")
    return make_corpus(_read(files, root, str(path)), str(path))


def stdlib_texts() -> dict[str, bytes]:
    """Relative name → source of the Python standard library's files, without tests and tables of character codes."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [f for f in _walk(root, SKIPPED_FOLDERS) if f.suffix == ".py"]
    if not files:
        raise DataError("the source text of the Python standard library is not on this machine; give text with --data FILE_OR_FOLDER.")
    return _read(files, root, "the Python standard library")


def make_corpus(texts: dict[str, bytes], source: str) -> Corpus:
    """Split named texts into training and validation text as in ``load_corpus``; ``source`` names them in error messages.

    Example:
        >>> len(make_corpus({"a.txt": b"x" * 100}, "an example").val)
        10
    """
    train, val = _split(texts)
    digest = hashlib.blake2b(train, digest_size=16)
    digest.update(val)
    # torch.frombuffer needs at least one byte
    parts = [torch.frombuffer(bytearray(part or b"\0"), dtype=torch.uint8)[: len(part)] for part in (train, val)]
    return Corpus(parts[0], parts[1], source, len(texts), f"{len(train)}-{digest.hexdigest()}")


def _walk(root: Path, skipped: frozenset[str]) -> Iterator[Path]:
    """Regular files below ``root`` in sorted order, without pipes and devices, which might never end."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(d for d in folders if d not in skipped and not d.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _read(files: list[Path], root: Path, source: str) -> dict[str, bytes]:
    """Name relative to ``root`` → text, in a fixed order."""
    texts: dict[str, bytes] = {}
    total, problem = 0, "empty"
    for file in files:
        try:
            with file.open("rb") as stream:
                data = stream.read(MAX_BYTES - total)
        except OSError as error:
            problem = f"unreadable ({error.strerror or error})"
            continue
        if b"\0" in data:
            problem = "binary, not text"
        elif data:
            texts[file.relative_to(root).as_posix() if file != root else file.name] = data
            total += len(data)
        if total >= MAX_BYTES:
            break
    if not texts:
        what = f"the file is {problem}" if len(files) == 1 else f"none of the {len(files)} files holds text; the last problem: {problem}"
        raise DataError(f"{source}: {what}. Give a text file, or a folder of them.")
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
