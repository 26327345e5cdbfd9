"""What a run says while it trains: a progress bar or plain lines, a CSV file, and TensorBoard where asked."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from ..pattern import NMError

COLUMNS = ("step", "loss", "val_loss", "lr", "tokens_per_s", "phase", "flip_rate", "density", "decay_ratio")


def read_log(path: Path) -> list[dict[str, float]]:
    """The rows of a CSV log; empty cells are left out."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]


class Log:
    """Takes rows of figures (by name, ``COLUMNS``) and shows them everywhere.

    Args:
        folder: gets ``log.csv``; rows after step ``start``, of a run that was cut off later, are dropped.
        label: what the bar is called.
        stream: where the bar or the lines go; a bar only where that is a terminal.
    """

    def __init__(self, folder: Path, label: str, start: int, steps: int, stream: TextIO, tensorboard: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.label, self.steps, self.stream = label, steps, stream
        rows = [row for row in read_log(folder / "log.csv") if row["step"] <= start] if start else []
        self._file = (folder / "log.csv").open("w", newline="")
        self._csv = csv.DictWriter(self._file, COLUMNS, extrasaction="ignore")
        self._csv.writeheader()
        for row in rows:
            self._csv.writerow({**row, "step": int(row["step"]), **({"phase": int(row["phase"])} if "phase" in row else {})})
        self._board = _board(folder / "tensorboard", start) if tensorboard else None
        self._bar = _bar(label, start, steps, stream)

    def __enter__(self) -> Log:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()
        if self._board is not None:
            self._board.close()
        self._file.close()

    def tick(self) -> None:
        """One step is done."""
        if self._bar is not None:
            self._bar.update()

    def row(self, row: dict[str, Any]) -> None:
        """Show and keep the figures of one row."""
        self._csv.writerow(row)
        self._file.flush()
        if self._board is not None:
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


def _board(folder: Path, start: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise NMError("--tensorboard needs the tensorboard package: pip install tensorboard, or leave the option out.") from error
    return SummaryWriter(str(folder), purge_step=start + 1)


def default_stream(json: bool) -> TextIO:
    """Standard output, or standard error where standard output is kept for the JSON result."""
    return sys.stderr if json else sys.stdout
