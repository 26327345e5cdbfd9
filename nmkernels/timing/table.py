"""The table of measurements on disk: lines with text keys, read once, merged with those of other processes.

An unreadable table counts as empty, with a warning: losing it costs time, never a result. Readers validate their lines, because a file can
be edited.
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
except ImportError:  # Windows has no such locks: a line may be lost if two processes store at once
    fcntl = None  # type: ignore[assignment]

CACHE = "NMKERNELS_CACHE"
FILE, SCHEMA = "tuning.json", 3
LONGEST_WAIT = 2.0
"""Seconds to wait for another process's lock; without it only lines can be lost, since files are replaced atomically."""

LARGEST = 1 << 24
"""Largest file in bytes that is read as a table; real ones have a few hundred thousand."""
Line = dict[str, Any]


def regular_size(path: Path) -> int:
    """The size of a file in bytes; OSError for a folder, a pipe or a device, which cannot be read safely."""
    about = path.stat()
    if not stat.S_ISREG(about.st_mode):
        code, why = (errno.EISDIR, "Is a directory") if stat.S_ISDIR(about.st_mode) else (errno.EINVAL, "Not a regular file")
        raise OSError(code, why, str(path))
    return about.st_size


def folder() -> Path:
    """The folder of the tables: ``NMKERNELS_CACHE``, or ``~/.cache/nmkernels``; OSError if there is no home folder either."""
    path = os.environ.get(CACHE)
    try:
        return Path(path).expanduser() if path else Path.home() / ".cache" / "nmkernels"
    except RuntimeError as error:
        raise OSError(f"{error}; set {CACHE} to a folder") from error


class Table:
    """Lines in one JSON file: ``{"schema": 2, "lines": {"key": {...}}}``.

    Safe to use from several threads and processes: ``store`` preserves the lines of others. ``revision`` increases with every change, so
    that callers can invalidate what they cached.
    """

    def __init__(self) -> None:
        self.revision = 0
        self._lines: dict[str, Line] | None = None
        self._unwritten: dict[str, Line | None] = {}
        self._lock = threading.Lock()

    def path(self) -> Path:
        return folder() / FILE

    def lines(self) -> Mapping[str, Line]:
        """All lines, read at the first call; later calls see what this process stored, but not other processes' lines until ``forget``."""
        lines = self._lines
        if lines is None:
            with self._lock:
                lines = self._lines = self._read() if self._lines is None else self._lines
        return lines

    def get(self, key: str) -> Line | None:
        return self.lines().get(key)

    def _read(self, quiet: bool = False) -> dict[str, Line]:
        """Read the lines from the file; none, with a warning, if it is unreadable or corrupt."""
        where = "the table"
        try:
            path = self.path()
            where = str(path)
            size = regular_size(path)
            if size > LARGEST:
                raise ValueError(f"it has {size:,} bytes, too many for a table")
            content = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(content, dict) and isinstance(content.get("schema"), int) and content["schema"] < SCHEMA:
                return {}  # of an older version, whose choices are not followed
            if not isinstance(content, dict) or content.get("schema") != SCHEMA or not isinstance(content.get("lines"), dict):
                raise ValueError(f"it is not a table of schema {SCHEMA}")
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            way_out = "measurements are ignored. Delete it, or run nm.tune again, which replaces it."
            if not quiet:
                warnings.warn(f"nmkernels: {where} cannot be read ({error}); {way_out}", RuntimeWarning, stacklevel=3)
            return {}
        return {key: line for key, line in content["lines"].items() if isinstance(line, dict)}

    def store(self, lines: Mapping[str, Line | None]) -> Path:
        """Add lines to the file, or remove those that are None, atomically; this process uses them from now on.

        Also if the file cannot be written (OSError); the next call tries again.
        """
        with self._lock:
            self._unwritten.update(lines)
            with suppress(OSError):
                folder().mkdir(parents=True, exist_ok=True)
            with _alone():
                both = {**self._read(quiet=True), **self._unwritten}  # a corrupt file is replaced
                self._lines = {key: line for key, line in sorted(both.items()) if line is not None}
                self.revision += 1
                target = self.path()
                target.parent.mkdir(parents=True, exist_ok=True)
                handle, part = tempfile.mkstemp(prefix=target.name, dir=target.parent)
                try:
                    with os.fdopen(handle, "w", encoding="utf-8") as file:
                        json.dump({"schema": SCHEMA, "lines": self._lines}, file, indent=1)
                    os.replace(part, target)  # atomic: readers see the old or the new file
                except BaseException:
                    Path(part).unlink(missing_ok=True)
                    raise
            self._unwritten.clear()
        return target

    def forget(self) -> None:
        """Read the file again at the next call; lines that could not be written are lost."""
        with self._lock:
            self._lines = None
            self.revision += 1
            self._unwritten.clear()


TABLE = Table()
"""The table of this process."""


def key(space: str, device: torch.device, problem: str, size: int) -> str:
    """The key of a problem: its kind (``space``), device, versions, and size (usually tokens) rounded up to a power of two."""
    return f"{space}|{device_name(device)}|{versions(device.type)}|{problem}|{1 << max(0, size - 1).bit_length()}"


def device_name(device: torch.device, threads: bool = True) -> str:
    """The name under which timings are stored: the GPU's model, or the CPU's with threads and instruction set."""
    if device.type in ("cuda", "xpu"):
        return getattr(torch, device.type).get_device_name(device)
    if device.type != "cpu":
        return device.type
    count = f", {torch.get_num_threads()} threads" if threads else ""
    try:
        return f"{_cpu_model()}{count}, {capability.instruction_set()}"
    except ValueError as error:
        raise BackendError(f"The CPU kernels cannot run: {error}.") from None


def machine(device: torch.device) -> str:
    """The name under which correctness checks are stored: the same without the threads."""
    return device_name(device, threads=False)


@cache
def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    match = re.search(r"^model name\s*:\s*(.+)$", info.read_text(encoding="utf-8", errors="replace"), re.M) if info.exists() else None
    return match[1].strip() if match else platform.processor() or platform.machine()


@cache
def versions(kind: str) -> str:
    """The versions that a measurement depends on: this package and its core, torch; on a GPU also Triton, cuSPARSELt, driver."""
    probes = [] if kind == "cpu" else [capability.triton(), capability.cusparselt(), capability.driver()]
    libraries = [probe.reason.split(",")[0] for probe in probes if probe.ok]
    ours = " ".join(filter(None, (f"nmkernels {__version__}", capability.core_build())))
    return ", ".join([ours, f"torch {torch.__version__}", *libraries])


@contextmanager
def _alone() -> Iterator[None]:
    """Lock the folder against other processes' stores; continues without a lock if the file system has none or another process holds
    it too long."""
    handle, end = None, time.monotonic() + LONGEST_WAIT
    with suppress(OSError):
        # lock the folder itself: no lock file remains, and only a folder is opened
        handle = os.open(folder(), os.O_RDONLY | os.O_DIRECTORY) if fcntl is not None else None
        while handle is not None:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    break
                time.sleep(0.01)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)
