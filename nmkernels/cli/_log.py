"""What a run says while it trains: a progress bar or plain lines, a CSV file, and TensorBoard where asked."""

from __future__ import annotations

import csv
import io
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from ..export._files import atomic_write, write_error
from ..pattern import NMError

LOG = "log.csv"
COLUMNS = ("step", "loss", "val_loss", "lr", "tokens_per_s", "phase", "flip_rate", "density", "decay_ratio")


def read_log(path: Path) -> list[dict[str, float]]:
    """The rows of a CSV log, empty cells left out; a torn or damaged line is no row, and a missing file has none."""
    if not path.is_file():
        return []
    lines = path.read_text("ascii", "replace").splitlines(keepends=True)
    names = tuple(lines[0].rstrip().split(",")) if lines else ()
    if "step" not in names:
        names = COLUMNS
    return [row for line in lines if line.endswith("\n") and (row := _row(line, names))]


def _row(line: str, names: tuple[str, ...]) -> dict[str, float]:
    """One line as figures by name; empty if it is not a row."""
    try:
        row = {name: float(cell) for name, cell in zip(names, line.rstrip().split(","), strict=True) if cell}
    except ValueError:
        return {}
    return row if row.get("step", 0.5).is_integer() else {}


def _text(rows: list[dict[str, Any]]) -> bytes:
    """Rows as lines of the file, without its header."""
    text = io.StringIO()
    for row in rows:
        whole = {name: int(row[name]) for name in ("step", "phase") if float(row.get(name, "nan")).is_integer()}
        csv.DictWriter(text, COLUMNS, extrasaction="ignore").writerow({**row, **whole})
    return text.getvalue().encode()


class Log:
    """Takes rows of figures (by name, ``COLUMNS``) and shows them everywhere.

    Args:
        folder: gets ``log.csv``. Rows after step ``start``, of a run that was cut off later, are dropped; each new row is appended in
            one piece, so that a kill costs the last one at most.
        label: what the bar is called.
        stream: where the bar or the lines go; a bar only where that is a terminal.
    """

    def __init__(self, folder: Path, label: str, start: int, steps: int, stream: TextIO, tensorboard: bool = False) -> None:
        self.label, self.steps, self.stream = label, steps, stream
        self.path, board = folder / LOG, folder / "tensorboard"
        with _writing(self.path):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._open(start)
        with _writing(board):
            self._board = board_writer()(str(board), purge_step=start + 1) if tensorboard else None
        self._bar = _bar(label, start, steps, stream)

    def _open(self, start: int) -> FileIO:
        """The file, ready to be appended to; written anew beside the old one where that has a torn line or later rows."""
        text = (",".join(COLUMNS) + "\r\n").encode() + _text([row for row in read_log(self.path) if row["step"] <= start])
        if not self.path.is_file() or self.path.read_bytes() != text:
            atomic_write(self.path, lambda temporary: temporary.write_bytes(text))
        return self.path.open("ab", buffering=0)

    def __enter__(self) -> Log:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()
        self._file.close()
        if self._board is not None:
            with suppress(OSError) if error is not None else _writing(Path(self._board.log_dir)):
                self._board.close()

    def tick(self) -> None:
        """One step is done."""
        if self._bar is not None:
            self._bar.update()

    def row(self, row: dict[str, Any]) -> None:
        """Show and keep the figures of one row."""
        with _writing(self.path):
            rest = _text([row])
            while rest:  # a disk that is nearly full takes a part
                rest = rest[self._file.write(rest) :]
        if self._board is not None:
            with _writing(Path(self._board.log_dir)):
                for name, value in row.items():
                    if name != "step":
                        self._board.add_scalar(name, value, row["step"])
        text = describe(row)
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
        else:
            print(f"{self.label}  step {row['step']:>{len(str(self.steps))}}/{self.steps}  {text}", file=self.stream, flush=True)

    def say(self, text: str) -> None:
        """A line of its own, above the bar."""
        if self._bar is not None:
            self._bar.write(text, file=self.stream)
        else:
            print(text, file=self.stream, flush=True)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn the system's refusal to write ``path`` into words."""
    try:
        yield
    except OSError as error:
        raise write_error(Path(error.filename or path), error.strerror or str(error)) from error


@contextmanager
def quiet_threads() -> Iterator[None]:
    """Print no traceback for an OSError of another thread: TensorBoard's raises what it met in the main thread too."""
    before = threading.excepthook
    threading.excepthook = lambda args: None if issubclass(args.exc_type, OSError) else before(args)
    try:
        yield
    finally:
        threading.excepthook = before


def describe(row: dict[str, Any]) -> str:
    """The figures that fit on one line."""
    parts = [f"loss {row['loss']:.3f}"]
    if "val_loss" in row:
        parts.append(f"val {row['val_loss']:.3f}")
    if "phase" in row:
        parts.append(f"phase {row['phase']:.0f}  flips {100 * row['flip_rate']:.2f}%")
    return "  ".join([*parts, f"{row['tokens_per_s'] / 1000:.1f}k tok/s"])


def _bar(label: str, start: int, steps: int, stream: TextIO) -> Any:
    if not stream.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=steps, initial=start, desc=label, unit="step", file=stream, dynamic_ncols=True)


def board_writer() -> Any:
    """The class that writes TensorBoard's files.

    Raises:
        NMError: the package is missing.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise NMError("--tensorboard needs the tensorboard package: pip install tensorboard, or leave the option out.") from error
    return SummaryWriter


def default_stream(json: bool) -> TextIO:
    """Standard output, or standard error where standard output is kept for the JSON result."""
    return sys.stderr if json else sys.stdout
