"""Atomic writing: after a crash a file is either the old one or the new one, never half of it. And folders that one process uses."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from .pattern import CheckpointError

FULL = {os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)}


def atomic_write(path: str | os.PathLike[str], write: Callable[[Path], object]) -> None:
    """Call ``write`` with a temporary file, flush that to disk, and rename it to ``path`` in one step.

    The temporary file has the name of ``path`` and is in a new folder ``.NAME.XXXXXXXX.tmp`` next to it, because writers may create
    temporary files too. A process that is killed leaves that folder behind, and never half of ``path``.

    Raises:
        CheckpointError: the folder does not exist, ``path`` is not a regular file, or the system refuses (full disk, no permission).
    """
    path = Path(path)
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder; pass the name of a file in it.")
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} is not a regular file and would be replaced by one; pass another name.")
    if not path.parent.is_dir():
        raise CheckpointError(f"{path}: the folder {path.parent} does not exist; create it first.")
    temporary = None
    try:
        temporary = Path(tempfile.mkdtemp(".tmp", f".{path.name}.", path.parent)) / path.name
        write(temporary)
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    except Exception as error:
        reason = _reason(error, temporary)
        if reason is None:
            raise
        raise write_error(path, reason) from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary.parent, ignore_errors=True)


def write_error(path: Path, reason: str) -> CheckpointError:
    """The error for a failed write of ``path``; if the disk may be full, it names the free space."""
    free = ""
    if reason in FULL:
        with suppress(OSError):
            free = f" ({_amount(shutil.disk_usage(path.parent).free)} free in {path.parent})"
    return CheckpointError(f"{path} could not be written: {reason}{free}.")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError inside the ``with`` block into the CheckpointError of ``write_error``."""
    try:
        yield
    except OSError as error:
        raise write_error(Path(error.filename or path), error.strerror or str(error)) from error


def lock_file(path: Path, instead: str) -> int:
    """Lock ``path``, which is created, for this process until the returned handle is closed or the process ends, however it ends.

    The file names the process that has it. A file system without locks is trusted to have told the truth there.

    Args:
        instead: what else the user can pass, for the message: ``"another --out"``.

    Raises:
        CheckpointError: another process has it.
    """
    while True:
        with writing(path):
            lock = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
            try:
                _claim(path, lock, instead)
                with suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(lock), path.stat()):
                        return lock
            except BaseException:
                os.close(lock)
                raise
        os.close(lock)  # the process before has removed the file between the two calls


def _claim(path: Path, lock: int, instead: str) -> None:
    """Lock the open lock file, and write this process into it."""
    owner = _owner(lock)
    try:
        import fcntl

        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        taken, stale = False, ""
    except (BlockingIOError, PermissionError):
        taken, stale = True, ""
    except (ImportError, OSError):  # no flock on this platform or file system
        taken, stale = _alive(owner), f", or delete {path} if that process is gone"
    if taken:
        who = "process {pid} on {host} has been writing to it since {since}" if owner else "another process is writing to it"
        raise CheckpointError(f"{path.parent} is in use: {who.format(**owner or {})}. Wait for it to end, or use {instead}{stale}.")
    mine = {"pid": os.getpid(), "host": socket.gethostname(), "since": datetime.now().astimezone().isoformat(" ", "seconds")}
    os.ftruncate(lock, 0)
    os.lseek(lock, 0, os.SEEK_SET)
    os.write(lock, json.dumps(mine).encode() + b"\n")


def _owner(handle: int) -> dict[str, Any] | None:
    """The process that the lock file names, or None."""
    try:
        os.lseek(handle, 0, os.SEEK_SET)
        owner = json.loads(os.read(handle, 1 << 16))
        return {key: owner[key] for key in ("pid", "host", "since")}
    except (ValueError, TypeError, KeyError):
        return None


def _alive(owner: dict[str, Any] | None) -> bool:
    """Whether that process may still be running, which for another machine is unknown. Used where the file system has no locks."""
    if owner is None or owner["host"] != socket.gethostname():
        return owner is not None
    try:
        os.kill(int(owner["pid"]), 0)
    except ProcessLookupError:
        return False
    except (OSError, ValueError):
        pass
    return True


def _reason(error: Exception, temporary: Path | None) -> str | None:
    """Why the system failed to write ``temporary``, or None if ``error`` has another cause."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if code := re.search(r"\(os error (\d+)\)", str(error)):  # safetensors
        return os.strerror(int(code[1]))
    if temporary is not None and isinstance(error, RuntimeError) and "inline_container" in str(error):
        try:  # torch does not give the reason; writing more to the file does
            with temporary.open("ab") as file:
                file.write(bytes(1 << 16))
        except OSError as again:
            return again.strerror
        return "a write failed"
    return None


def _amount(size: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.1f} GB"


def sync(path: Path) -> None:
    """Flush a file or a directory to disk; systems that cannot open a directory do not need it."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except PermissionError:
        if path.is_dir():
            return
        raise
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
