"""What a run says: a progress bar or lines, a CSV file, TensorBoard where asked; at the end its curves, and a summary in words."""

from __future__ import annotations

import csv
import io
import math
import textwrap
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

from ..export.files import atomic_write, writing
from ..pattern import NMError
from ..recipes.registry import find

ABOUT = {
    "model.safetensors": "the sparse model, compressed; nm.load_compressed(model, file) reads it",
    "model-dense.safetensors": "the same model in dense layout, for any other program",
    "curves.png": "loss and mask changes over the steps",
    "log.csv": "the same as numbers",
    "result.json": "everything above as data",
    "sample.txt": "text that the model wrote",
}
SAMPLE_LINES, SAMPLE_COLUMNS = 8, 100
LOG = "log.csv"
PHASES = ("dense phase", "sparse phase", "fixed mask")
COLUMNS = ("step", "loss", "val_loss", "lr", "tokens_per_s", "phase", "flip_rate", "density", "decay_ratio")

Rows = list[dict[str, float]]


def title(recipe: str) -> str:
    """A recipe as a text names it: ``STEP 2:4``."""
    name, _, pattern = recipe.partition(":")
    return f"{find(name).__name__} {pattern}"


def summary(result: dict[str, Any]) -> str:
    """The table, the sample and the list of files, as text."""
    config, sparse, baseline = result["config"], result["sparse"], result["baseline"]
    tokens = config["steps"] * config["batch"] * config["context"]
    head = (
        f"{title(config['recipe'])} on {result['corpus']['source']}: {result['parameters']:,} parameters, {config['steps']:,} steps, "
        f"{tokens:,} bytes of text, {sparse['seconds']:.0f} s of training."
    )
    if sparse.get("switch_step"):
        head += f" Dense until step {sparse['switch_step']}, sparse from there."
    if sparse.get("remark"):
        head += f"\n\n{sparse['remark']}"
    files = "\n".join([f"Files in {result['out']}/", *(f"  {name:<23}  {ABOUT[name]}" for name in ABOUT if name in result["files"])])
    parts = [head, _table(sparse, baseline), _gains(sparse, baseline), _remarks(sparse, baseline), _sample(sparse["sample"]), files]
    return "\n\n".join(part for part in parts if part)


def _table(sparse: dict[str, Any], baseline: dict[str, Any] | None) -> str:
    rows = [("", "dense", "sparse", "ratio")]

    def add(what: str, dense: float, own: float, digits: int = 0) -> None:
        rows.append((what, f"{dense:,.{digits}f}", f"{own:,.{digits}f}", f"{own / dense:.3f}"))

    if baseline is not None:
        add("validation loss, nats per byte", baseline["val_loss"], sparse["val_loss"], 4)
        add("training, bytes of text per second", baseline["train_tokens_per_s"], sparse["train_tokens_per_s"])
    if f := sparse.get("flops"):
        add("training, GFLOPs in all", f["dense_training"] / 1e9, f["training"] / 1e9)
        add("inference, kFLOPs per byte of text", f["dense_inference"] / 1e3, f["inference"] / 1e3)
    if b := sparse.get("bytes"):
        add("weights of the sparse layers, bytes", b["layers_dense"], b["layers_compressed"])
        add("file, bytes", b["file_dense"], b["file_compressed"])
        speed = sparse["tokens_per_s"]
        add("generating text, bytes per second", speed["dense"], speed["compressed"])
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in (1, 2, 3))]).rstrip() for row in rows)


def _gains(sparse: dict[str, Any], baseline: dict[str, Any] | None) -> str:
    """What the table says, in words: size, speed and loss against dense, as far as they are known."""
    lines = []
    if b := sparse.get("bytes"):
        small, large = b["file_compressed"], b["file_dense"]
        lines.append(f"  size   the file has {small / 1e6:.2f} MB instead of {large / 1e6:.2f}, {1 - small / large:.0%} less")
        gain = sparse["tokens_per_s"]["compressed"] / sparse["tokens_per_s"]["dense"]
        slower = ": at this size, on this machine, the compressed form saves memory and not time" if gain < 1 else ""
        lines.append(f"  speed  text is generated {gain:.2f} times as fast{slower}")
    if baseline is not None:
        more = sparse["val_loss"] / baseline["val_loss"] - 1
        lines.append(f"  loss   {abs(more):.1%} {'higher' if more > 0 else 'lower'} on validation text")
    return "\n".join(["Against the dense model:", *lines]) if lines else ""


def _remarks(sparse: dict[str, Any], baseline: dict[str, Any] | None) -> str:
    lines = [f"A model that knows nothing has a loss of {math.log(256):.2f}: it takes each of the 256 bytes for equally likely."]
    if baseline is None:
        lines.insert(0, f"The validation loss is {sparse['val_loss']:.4f} nats per byte.")
        lines.append("Add --baseline to train a dense model on the same text and compare.")
    if "reload" in sparse:
        difference = sparse["reload"]["max_difference_to_dense"]
        away = f"within {difference:.1e} of" if difference else "also"
        lines.append(f"The file was read back: the same logits to the last bit, and {away} those of the same weights stored dense.")
    return "\n".join(lines)


def _sample(text: str) -> str:
    lines = [line.expandtabs(4)[:SAMPLE_COLUMNS].rstrip() for line in text.splitlines()]
    lines = [line for line in lines if line][:SAMPLE_LINES]
    printable = "\n".join("".join(c if c.isprintable() else "?" for c in line) for line in lines)
    return 'The model continues "def ":\n' + textwrap.indent(printable, "  | ", lambda _: True)


def plot(path: Path, sparse: Rows, baseline: Rows, title: str, switch_step: int = 0) -> bool:
    """Draw loss and flip rate over steps, a line at the phase change, and the baseline where there is one; False without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    loss, flips = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for rows, label, color in ((baseline, "dense baseline", "tab:gray"), (sparse, "sparse", "tab:blue")):
        if rows:
            loss.plot(*_column(rows, "loss"), color=color, alpha=0.5, linewidth=1, label=f"{label}, training")
            loss.plot(*_column(rows, "val_loss"), color=color, marker="o", markersize=3, label=f"{label}, validation as deployed")
    loss.set_ylabel("loss (nats per byte)")
    loss.set_title(title)
    flips.plot(*_column(sparse, "flip_rate", 100), color="tab:blue")
    flips.set_ylabel("mask flips per step (%)")
    flips.set_xlabel("step")
    for axes in (loss, flips):
        for i, step in enumerate([switch_step] if switch_step else switches(sparse)):
            axes.axvline(step, color="tab:red", linestyle="--", linewidth=1, label="phase change" if i == 0 else None)
        axes.grid(alpha=0.3)
    loss.legend()
    atomic_write(path, figure.savefig)
    return True


def switches(rows: Rows) -> list[float]:
    """Steps of the first rows of each later phase."""
    with_phase = [row for row in rows if "phase" in row]
    return [b["step"] for a, b in pairwise(with_phase) if a["phase"] != b["phase"]]


def _column(rows: Rows, name: str, scale: float = 1.0) -> tuple[list[float], list[float]]:
    have = [row for row in rows if name in row]
    return [row["step"] for row in have], [scale * row[name] for row in have]


def read_log(path: Path) -> Rows:
    """The rows of a CSV log, empty cells left out; a torn or damaged line is no row, and a missing file has none."""
    lines = path.read_text("ascii", "replace").splitlines(keepends=True) if path.is_file() else []
    return [row for line in lines if line.endswith("\n") and (row := _row(line))]


def _row(line: str) -> dict[str, float]:
    """One line as numbers by name; empty if it is not a row."""
    try:
        row = {name: float(cell) for name, cell in zip(COLUMNS, line.rstrip().split(","), strict=True) if cell}
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
    """Takes rows of metrics (by name, ``COLUMNS``) and shows them everywhere.

    Args:
        folder: gets ``log.csv``. Rows after step ``start``, of a run that was cut off later, are dropped; each new row is appended in
            one piece, so that a kill costs the last one at most.
        label: what the bar is called.
        stream: where the bar or the lines go; a bar only where that is a terminal.
    """

    def __init__(self, folder: Path, label: str, start: int, steps: int, stream: TextIO, tensorboard: bool = False) -> None:
        self.label, self.steps, self.stream = label, steps, stream
        self.path, board = folder / LOG, folder / "tensorboard"
        with writing(self.path):
            folder.mkdir(parents=True, exist_ok=True)
            # written anew beside the old one where that has a torn line or later rows
            text = (",".join(COLUMNS) + "\r\n").encode() + _text([row for row in read_log(self.path) if row["step"] <= start])
            if not self.path.is_file() or self.path.read_bytes() != text:
                atomic_write(self.path, lambda temporary: temporary.write_bytes(text))
            self._file = self.path.open("ab", buffering=0)
        with writing(board):
            self._board = board_writer()(str(board), purge_step=start + 1) if tensorboard else None
        self._bar = _bar(label, start, steps, stream)

    def __enter__(self) -> Log:
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        if self._bar is not None:
            self._bar.close()
        self._file.close()
        if self._board is not None:
            with suppress(OSError) if kind is not None else writing(Path(self._board.log_dir)):
                self._board.close()

    def tick(self) -> None:
        if self._bar is not None:
            self._bar.update()

    def row(self, row: dict[str, Any]) -> None:
        with writing(self.path):
            rest = _text([row])
            while rest:  # a disk that is nearly full takes a part
                rest = rest[self._file.write(rest) :]
        if self._board is not None:
            with writing(Path(self._board.log_dir)):
                for name, value in row.items():
                    if name != "step":
                        self._board.add_scalar(name, value, row["step"])
        parts = [f"loss {row['loss']:.3f}"]
        if "val_loss" in row:
            parts.append(f"validation {row['val_loss']:.3f}")
        if "phase" in row:
            parts.append(PHASES[int(row["phase"])])
            parts += [f"mask changes {100 * row['flip_rate']:.2f}%"] if row["phase"] == 1 and row["flip_rate"] >= 0 else []  # or NaN
        text = "  ".join([*parts, f"{row['tokens_per_s'] / 1000:.1f}k bytes/s"])
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
        else:
            print(f"{self.label}  step {row['step']:>{len(str(self.steps))}}/{self.steps}  {text}", file=self.stream, flush=True)


@contextmanager
def notes(stream: TextIO) -> Iterator[None]:
    """Print warnings as lines of the log: of a command, the line of code that warns says nothing to its user."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: print(f"note: {message}", file=stream, flush=True)
        yield


@contextmanager
def quiet_threads() -> Iterator[None]:
    """Print no traceback for an OSError of another thread: TensorBoard's raises what it met in the main thread too."""
    before = threading.excepthook
    threading.excepthook = lambda args: None if issubclass(args.exc_type, OSError) else before(args)
    try:
        yield
    finally:
        threading.excepthook = before


def _bar(label: str, start: int, steps: int, stream: TextIO) -> Any:
    if not stream.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=steps, initial=start, desc=label, unit="step", file=stream, dynamic_ncols=True)


def board_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise NMError("--tensorboard needs the tensorboard package: pip install tensorboard, or leave the option out.") from error
    return SummaryWriter
