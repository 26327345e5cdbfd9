"""The table on disk of what was measured on a machine: lines keyed by text, read once, merged with what other processes wrote.

Nothing is read at import. What cannot be read counts as empty, with a warning: the table only makes calls faster, so losing it costs time
and never a result. Whoever asks for a line checks it, since somebody may have edited it.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import stat
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from .. import capability
from .._version import __version__
from ..pattern import BackendError

try:
    import fcntl
except ImportError:  # no such locks on Windows: a line may be lost there when two processes store at once
    fcntl = None  # type: ignore[assignment]

CACHE = "NMKERNELS_CACHE"
FILE, SCHEMA = "tuning.json", 2
LONGEST_WAIT = 2.0
"""Seconds to wait for another process that stores; a stopped one must not stop this one, and each file is whole in any case."""

LARGEST = 1 << 24
"""Bytes of a file that may be a table; the largest of ours have a few hundred thousand."""
DEEPEST = 8
"""Levels of a line; ours have three."""

Line = dict[str, Any]


def regular_size(path: Path) -> int:
    """The size of a file in bytes; OSError for a folder, a pipe or a device: reading those fails late, waits for ever, or never ends."""
    about = path.stat()
    if stat.S_ISDIR(about.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(about.st_mode):
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return about.st_size


def folder() -> Path:
    """Where the tables are: ``NMKERNELS_CACHE``, or ``~/.cache/nmkernels``; OSError where there is neither, nor a home."""
    given = os.environ.get(CACHE)
    try:
        return Path(given).expanduser() if given else Path.home() / ".cache" / "nmkernels"
    except RuntimeError as error:
        raise OSError(f"{error}; set {CACHE} to a folder") from error


class Table:
    """Lines, each a JSON object under a text, in one file: ``{"schema": 2, "lines": {"text": {...}}}``.

    Safe to use from several threads, and from several processes: ``store`` keeps what the others stored.
    """

    def __init__(self) -> None:
        self._lines: dict[str, Line] | None = None
        self._unwritten: dict[str, Line | None] = {}
        self._lock = threading.Lock()

    def path(self) -> Path:
        """The file."""
        return folder() / FILE

    def lines(self) -> Mapping[str, Line]:
        """Every line, read at the first call; later ones see what this process stored, and not what others did until ``forget``."""
        found = self._lines
        if found is None:
            with self._lock:
                if self._lines is None:
                    self._lines = self._read()
                found = self._lines
        return found

    def get(self, key: str) -> Line | None:
        """One line, or None."""
        return self.lines().get(key)

    def _read(self, quiet: bool = False) -> dict[str, Line]:
        """The lines of the file as it is now; none, with a warning, where it cannot be read or is damaged."""
        try:
            path = self.path()
            size = regular_size(path)
            if size > LARGEST:
                return self._refused(quiet, f"is no table: it has {size:,} bytes")
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return {}
        except (OSError, UnicodeDecodeError) as error:
            return self._refused(quiet, f"cannot be read ({error})")
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            return self._refused(quiet, f"is damaged ({error})")
        if not isinstance(found, dict) or found.get("schema") != SCHEMA or not isinstance(found.get("lines"), dict):
            return self._refused(quiet, f"is not a table of schema {SCHEMA}")
        return {key: line for key, line in found["lines"].items() if isinstance(line, dict) and _shallow(line)}

    def _refused(self, quiet: bool, why: str) -> dict[str, Line]:
        with suppress(OSError):
            why = f"{self.path()} {why}"
        text = f"nmkernels: {why}; nothing measured is followed. Delete it, or run nm.tune again, which replaces it."
        if not quiet:
            warnings.warn(text, RuntimeWarning, stacklevel=4)
        return {}

    def store(self, lines: Mapping[str, Line | None]) -> Path:
        """Add lines to the file, or take out those that are None, at one stroke; from now on this process follows them.

        Where the file cannot be written (OSError) too; it tries again with the next ones.
        """
        with self._lock:
            self._unwritten.update(lines)
            with suppress(OSError):
                folder().mkdir(parents=True, exist_ok=True)
            with _alone():
                both = {**self._read(quiet=True), **self._unwritten}  # what is damaged is replaced
                self._lines = kept = {key: line for key, line in sorted(both.items()) if line is not None}
                target = self.path()
                target.parent.mkdir(parents=True, exist_ok=True)
                _replace(target, {"schema": SCHEMA, "lines": kept})
            self._unwritten.clear()
        return target

    def forget(self) -> None:
        """Read the file anew at the next call; what could not be written is lost."""
        with self._lock:
            self._lines = None
            self._unwritten.clear()


TABLE = Table()
"""Of this process."""


def key(space: str, device: torch.device, problem: str, size: int) -> str:
    """The line of a problem: who asks (``space``), what it runs on and with, and its size, tokens mostly, rounded up to a power of two."""
    return f"{space}|{device_name(device)}|{versions(device.type)}|{problem}|{size_class(size)}"


def size_class(size: int) -> int:
    """The next power of two, at least 1."""
    return 1 << max(0, size - 1).bit_length()


def device_name(device: torch.device) -> str:
    """What measurements on this device hold for: the GPU's model, or the CPU's with its threads and the core's instruction set."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    if device.type == "xpu":
        return str(torch.xpu.get_device_name(device))
    if device.type != "cpu":
        return device.type
    try:
        return f"{_cpu_model()}, {torch.get_num_threads()} threads, {capability.instruction_set()}"
    except ValueError as error:
        raise BackendError(f"The CPU kernels cannot run as asked: {error}.") from None


@cache
def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(encoding="utf-8", errors="replace"), re.M) if info.exists() else None
    return found[1].strip() if found else platform.processor() or platform.machine()


@cache
def versions(kind: str) -> str:
    """What a speed depends on besides the device: this package, torch, and on a GPU Triton and cuSPARSELt."""
    parts = [f"nmkernels {__version__}", f"torch {torch.__version__}"]
    if kind != "cpu":
        parts += [probe.reason.split(",")[0] for probe in (capability.triton(), capability.cusparselt()) if probe.ok]
    return ", ".join(parts)


def _shallow(value: Any, levels: int = DEEPEST) -> bool:
    """Whether a value is nested no deeper than that: what can be read cannot always be written again."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels > 0 and all(_shallow(item, levels - 1) for item in inside)


def _replace(target: Path, content: Any) -> None:
    """Readers see the old file or the new one, and never a part."""
    handle, part = tempfile.mkstemp(prefix=target.name, dir=target.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
        os.replace(part, target)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise


@contextmanager
def _alone() -> Iterator[None]:
    """Inside, no other process stores into the folder; without a lock where the file system has none."""
    handle = None
    if fcntl is not None:
        with suppress(OSError):
            # of the folder itself: nothing is left lying about, and what is no folder is never opened
            handle = os.open(folder(), os.O_RDONLY | os.O_DIRECTORY)
            _wait(handle)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _wait(handle: int) -> None:
    end = time.monotonic() + LONGEST_WAIT
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                return
            time.sleep(0.01)
