"""Calibration and held-out samples for ``prune``: windows of tokens from text, JSON lines, or files of token ids."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..pattern import NMError
from ..prune.data import first_line

TEXT, LINES, TOKENS = {".txt", ".md", ".rst", ".text"}, {".jsonl", ".ndjson", ".json"}, {".npy", ".pt", ".safetensors"}
UTF8 = "utf-8-sig"
"""A byte order mark may come first, as some programs write it."""
PIECE = 1 << 16
"""Characters that are tokenized together, and tokens of a long document that are drawn together."""
CHARACTERS = 4
"""Of a token, about, where text and token ids are compared."""
SHORTEST = 16
"""Tokens of the shortest held-out window."""

Document = str | Tensor
"""A text, or token ids: ``(tokens,)``, or ``(samples, length)``."""


@dataclass(frozen=True)
class Samples:
    """``calibration`` and ``held_out``, both ``(samples, length)``; the latter has no row where there was too little text."""

    calibration: Tensor
    held_out: Tensor


def read(path: Path) -> list[Document]:
    """The documents in a file, or in all files of a folder and its subfolders, sorted by name.

    Raises:
        NMError: a file cannot be read, or there is none.
    """
    if not path.exists():
        raise NMError(f"--data {path}: there is no such file or folder.")
    if path.is_file():
        return _checked(path, list(_read(path)))
    known = TEXT | LINES | TOKENS
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.suffix.lower() in known and not _hidden(file, path))
    if not files:
        raise NMError(f"--data {path}: the folder has no files that end in {', '.join(sorted(known))}.")
    return _checked(path, [document for file in files for document in _read(file)])


def _checked(path: Path, documents: list[Document]) -> list[Document]:
    full = [d for d in documents if (d.strip() if isinstance(d, str) else d.numel())]
    if not full:
        raise NMError(f"--data {path} is empty.")
    return full


def _hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def _read(file: Path) -> Iterator[Document]:
    kind = file.suffix.lower()
    try:
        if kind in TOKENS:
            yield _ids(file, _load(file))
        elif kind in LINES:
            yield from _records(file, file.read_text(encoding=UTF8))
        else:
            yield file.read_text(encoding=UTF8)
    except UnicodeDecodeError as error:
        raise NMError(f"--data {file} is not text in UTF-8; files of token ids end in {', '.join(sorted(TOKENS))}.") from error
    except OSError as error:
        raise NMError(f"--data {file} cannot be read: {error.strerror or error}.") from error


def _records(file: Path, text: str) -> Iterator[str]:
    """The texts of JSON lines, or of one JSON value that may take many lines: a record, or an array of records."""
    try:
        records = json.loads(text) if text.strip() else []
    except ValueError:
        for number, line in enumerate(text.split("\n"), 1):  # a text may have other line separators inside
            if line.strip():
                yield _text(f"{file}, line {number}", _line(file, number, line))
        return
    if isinstance(records, list):
        yield from (_text(f"{file}, record {number}", record) for number, record in enumerate(records, 1))
    else:
        yield _text(f"{file}, line 1", records)


def _line(file: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise NMError(f"--data {file}, line {number} is not JSON; write one object in each line, or one array of them.") from error


def _text(where: str, record: Any) -> str:
    text = record.get("text") if isinstance(record, dict) else record
    if not isinstance(text, str):
        raise NMError(f'--data {where} has no "text"; write lines such as {{"text": "..."}}.')
    return text


def _load(file: Path) -> Any:
    try:
        if file.suffix.lower() == ".npy":
            import numpy as np

            return torch.from_numpy(np.load(file, allow_pickle=False).astype("int64", casting="same_kind"))
        if file.suffix.lower() == ".pt":
            return torch.load(file, map_location="cpu", weights_only=True)
        from safetensors.torch import load_file

        tensors = load_file(file)
        return tensors["input_ids"] if "input_ids" in tensors else next(iter(tensors.values()), None)
    except OSError:
        raise
    except Exception as error:  # depends on the format and the damage
        raise NMError(f"--data {file} cannot be read as token ids: {first_line(error)}.") from error


def _ids(file: Path, value: Any) -> Tensor:
    if isinstance(value, dict):
        value = value.get("input_ids")
    if not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex() or value.dim() not in (1, 2):
        what = f"{value.dtype}{tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise NMError(f"--data {file} has no token ids, which are integers of shape (tokens,) or (samples, length); it has {what}.")
    return value.long()


def draw(
    documents: Sequence[Document],
    tokenize: Callable[[str], list[int]] | None,
    *,
    samples: int,
    length: int,
    seed: int = 0,
    share: float = 0.1,
) -> Samples:
    """Draw ``samples`` windows of ``length`` tokens for calibration, and a quarter as many from the last ``share`` of the documents.

    Where all documents are ``(samples, length)`` of one length, their rows are the windows.

    Raises:
        NMError: there is too little text for one window, or text and no tokenizer.
    """
    if tokenize is None and any(isinstance(d, str) for d in documents):
        raise NMError("the model's folder has no tokenizer, which text needs; pass token ids (.npy, .pt, .safetensors), or add its files.")
    generator = torch.Generator().manual_seed(seed)
    most = -(-samples // 4) if share > 0 else 0
    rows = [d for d in documents if not isinstance(d, str) and d.dim() == 2]
    if len(rows) == len(documents) and len({d.shape[1] for d in rows}) == 1:
        table = torch.cat(rows)[:, :length]
        held = min(int(len(table) * share), len(table) - 1)
        chosen = torch.randperm(len(table) - held, generator=generator)[:samples].sort().values
        return Samples(table[chosen], table[len(table) - held :][:most])
    first, last = _divided([piece for d in documents for piece in _pieces(d)], share)
    order = torch.randperm(len(first), generator=generator).tolist()
    stream = _stream((first[i] for i in order), tokenize, samples * length)
    if len(stream) < length:
        raise NMError(
            f"--data has {len(stream):,} tokens for calibration, and one sample takes {length:,}; pass more, or a smaller --length."
        )
    held_stream = _stream(iter(last), tokenize, most * length)
    width = min(length, len(held_stream))
    held_out = held_stream[: len(held_stream) // width * width].view(-1, width) if width >= SHORTEST else stream.new_empty(0, length)
    return Samples(stream[: len(stream) // length * length].view(-1, length), held_out)


def _pieces(document: Document) -> Iterator[Document]:
    if isinstance(document, Tensor):
        yield from document.reshape(-1).split(PIECE // CHARACTERS)
        return
    start = 0
    while start < len(document):
        end = start + PIECE
        if end < len(document):
            end = _space(document, start, end)
        yield document[start:end]
        start = end


def _space(text: str, start: int, end: int) -> int:
    """Where to cut ``text`` at or before ``end``: after the last white space, if there is any after ``start``."""
    last = max(text.rfind(" ", start, end), text.rfind("\n", start, end))
    return last + 1 if last > start else end


def _size(piece: Document) -> int:
    return len(piece) if isinstance(piece, str) else CHARACTERS * len(piece)


def _divided(pieces: list[Document], share: float) -> tuple[list[Document], list[Document]]:
    """The pieces before and in the last ``share`` of all; one of them may be cut."""
    left = int(sum(map(_size, pieces)) * share)
    first, last = list(pieces), list[Document]()
    while left > 0 and first:
        piece = first.pop()
        if _size(piece) <= left:
            last.append(piece)
            left -= _size(piece)
            continue
        cut = len(piece) - (left if isinstance(piece, str) else left // CHARACTERS)
        if isinstance(piece, str):
            cut = _space(piece, 0, cut)
        first.append(piece[:cut])
        last.append(piece[cut:])
        left = 0
    return first, last[::-1]


def _stream(pieces: Iterator[Document], tokenize: Callable[[str], list[int]] | None, most: int) -> Tensor:
    """The tokens of the pieces one after the other, the first ``most``."""
    parts, count = [torch.empty(0, dtype=torch.int64)], 0
    for piece in pieces:
        if count >= most:
            break
        if isinstance(piece, str):
            assert tokenize is not None
            parts.append(torch.tensor(tokenize(piece), dtype=torch.int64))
        else:
            parts.append(piece)
        count += len(parts[-1])
    return torch.cat(parts)[:most]


def share(word: str) -> float:
    """A number from 0 to 0.5, as an argument."""
    value = float(word) if re.fullmatch(r"[0-9.]+", word) else -1.0
    if not 0 <= value <= 0.5:
        raise NMError(f"--held-out {word} is not a share from 0 to 0.5.")
    return value
