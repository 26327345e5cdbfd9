"""Writing a file so that a crash leaves either the old one or the new one, never half of one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ..pattern import CheckpointError


def atomic_write(path: str | os.PathLike[str], write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, put it on the disk, and rename it to ``path`` in one step.

    Raises:
        CheckpointError: the folder does not exist, ``path`` is a folder, or the system refuses (full disk, no permission).
    """
    path = Path(path)
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder; give the name of a file in it.")
    if not path.parent.is_dir():
        raise CheckpointError(f"{path}: the folder {path.parent} does not exist; create it first.")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        _sync(temporary)
        os.replace(temporary, path)
        _sync(path.parent)
    except OSError as error:
        raise CheckpointError(f"{path} could not be written: {error.strerror or error}.") from error
    finally:
        temporary.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Flush a file, or a folder's table of names, to the disk; systems that cannot open a folder do not need it."""
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
