"""Calibration and held-out samples for ``prune``: windows of tokens from text, JSON lines, tables, or files of token ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..export.tensors import first_line
from ..pattern import NMError

TEXT, LINES, TOKENS = {".txt", ".md", ".rst", ".text"}, {".jsonl", ".ndjson", ".json"}, {".npy", ".pt", ".safetensors"}
TABLES = {".arrow", ".parquet"}
SPLITS = "dataset_dict.json"
"""Names the splits of a ``DatasetDict`` that ``save_to_disk`` wrote, each in a folder of its name."""
ABOUT = {SPLITS, "dataset_info.json", "state.json"}
"""Files of ``save_to_disk`` that have no samples; neither have ``cache-*.arrow``, which ``map`` and ``filter`` leave there."""
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


def read(path: Path, column: str | None = None) -> list[Document]:
    """The documents in a file, or in all files of a folder and its subfolders, sorted by name; of a ``DatasetDict`` the split "train".

    ``column``: the one of a table, or the key of JSON records, that has the text; default "text", or token ids in a table's "input_ids".

    Raises:
        NMError: a file cannot be read, or there is none.
    """
    files = [path]
    if path.is_dir():
        folder = path
        if (path / SPLITS).is_file():
            folder = path / "train"
            if not folder.is_dir():
                others = ", ".join(sorted(each.name for each in path.iterdir() if each.is_dir()))
                raise NMError(f'--data {path} has no split "train"; pass the folder of one of its splits: {others}.')
        known = TEXT | LINES | TOKENS | TABLES
        named = (file for file in folder.rglob("*") if file.is_file() and file.suffix.lower() in known and file.name not in ABOUT)
        named = (file for file in named if not (file.suffix == ".arrow" and file.name.startswith("cache-")))
        files = sorted(file for file in named if not any(part.startswith(".") for part in file.relative_to(folder).parts))
        if not files:
            raise NMError(f"--data {path}: the folder has no files that end in {', '.join(sorted(known))}.")
    documents = [document for file in files for document in _read(file, column)]
    full = [d for d in documents if (d.strip() if isinstance(d, str) else d.numel())]
    if not full:
        raise NMError(f"--data {path} is empty.")
    return full


def _read(file: Path, column: str | None) -> Iterator[Document]:
    kind = file.suffix.lower()
    try:
        if kind in TOKENS:
            yield _ids(file)
        elif kind in TABLES:
            yield from _rows(file, column)
        elif kind in LINES:
            yield from _records(file, file.read_text(encoding=UTF8), column or "text")
        else:
            yield file.read_text(encoding=UTF8)
    except UnicodeDecodeError as error:
        raise NMError(f"--data {file} is not text in UTF-8; files of token ids end in {', '.join(sorted(TOKENS))}.") from error
    except OSError as error:
        raise NMError(f"--data {file} cannot be read: {error.strerror or first_line(error)}.") from error


def _rows(file: Path, column: str | None) -> Iterator[Document]:
    """The column of texts or token ids in a table of Arrow, as ``datasets`` saves them, or Parquet."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise NMError(f"--data {file} is a table of Arrow or Parquet, which needs pyarrow (pip install pyarrow).") from error
    try:
        if file.suffix.lower() == ".parquet":
            names = parquet.read_schema(file).names
            name = _column(file, names, column)
            values = parquet.read_table(file, columns=[name])[name]
        else:
            source = pa.memory_map(str(file))
            try:
                table = pa.ipc.open_stream(source).read_all()
            except pa.ArrowInvalid:  # Arrow's other form, with the table of contents at its end
                table = pa.ipc.open_file(source).read_all()
            values = table[_column(file, table.column_names, column)]
    except pa.ArrowInvalid as error:
        raise NMError(f"--data {file} is damaged: {first_line(error)}.") from error
    if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        for chunk in values.iterchunks():
            yield from (value for value in chunk.to_pylist() if value is not None)
        return
    lists = pa.types.is_list(values.type) or pa.types.is_large_list(values.type) or pa.types.is_fixed_size_list(values.type)
    if not (lists and pa.types.is_integer(values.type.value_type)):
        raise NMError(f"--data {file} has neither texts nor lists of token ids in the column it is read from, but {values.type}.")
    rows = [torch.tensor(row, dtype=torch.int64) for chunk in values.iterchunks() for row in chunk.to_pylist() if row]
    # rows of one length are the windows
    yield from [torch.stack(rows)] if len({len(row) for row in rows}) == 1 else rows


def _column(file: Path, names: Sequence[str], column: str | None) -> str:
    found = next((name for name in ([column] if column else ["text", "input_ids"]) if name in names), None)
    if found is None:
        raise NMError(f"--data {file} has no column {column or 'text'!r}; name one of its columns with --text-column: {', '.join(names)}.")
    return found


def _records(file: Path, text: str, key: str) -> Iterator[str]:
    """The texts of JSON lines, or of one JSON value that may take many lines: a record, or an array of records."""
    try:
        value = json.loads(text) if text.strip() else []
        what, records = ("record", list(enumerate(value, 1))) if isinstance(value, list) else ("line", [(1, value)])
    except ValueError:
        what, records = "line", []
        for number, line in enumerate(text.split("\n"), 1):  # a text may have other line separators inside
            try:
                records += [(number, json.loads(line))] if line.strip() else []
            except ValueError as error:
                raise NMError(f"--data {file}, line {number} is not JSON; write one object in each line, or one array of them.") from error
    for number, record in records:
        content = record.get(key) if isinstance(record, dict) else record
        if not isinstance(content, str):
            raise NMError(f'--data {file}, {what} {number} has no "{key}"; write lines such as {{"{key}": "..."}}, or pass --text-column.')
        yield content


def _ids(file: Path) -> Tensor:
    value: Any
    try:
        if file.suffix.lower() == ".npy":
            import numpy as np

            value = torch.from_numpy(np.load(file, allow_pickle=False).astype("int64", casting="same_kind"))
        elif file.suffix.lower() == ".pt":
            value = torch.load(file, map_location="cpu", weights_only=True)
        else:
            from safetensors.torch import load_file

            tensors = load_file(file)
            value = tensors.get("input_ids", next(iter(tensors.values()), None))
    except OSError:
        raise
    except Exception as error:  # depends on the format and the damage
        raise NMError(f"--data {file} cannot be read as token ids: {first_line(error)}.") from error
    value = value.get("input_ids") if isinstance(value, dict) else value
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
) -> tuple[Tensor, Tensor]:
    """Draw ``samples`` windows of ``length`` tokens, and a quarter as many, held out, from the last ``share`` of the documents.

    Both are ``(samples, length)``; the latter has no row where there is too little text. Where all documents have that shape and one
    length, their rows are the windows.

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
        return table[chosen], table[len(table) - held :][:most]
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
    return stream[: len(stream) // length * length].view(-1, length), held_out


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
