"""The folder of a run: its lock, its checkpoints, how it is recognised, and what ``--overwrite`` removes from it.

A run writes the files of ``SIGNATURES``, checkpoints, TensorBoard's events, and the lock file ``.nmkernels-train``, which also marks the
folder as a run's. A folder without the lock file is a run's if a log, a result or a checkpoint in it has the right first bytes.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ..files import atomic_write, lock_file, writing
from ..pattern import CheckpointError, NMError
from .deploy import DENSE_FILE, FILE, PROMPT, SAMPLE_FILE
from .log import COLUMNS, LOG
from .ranks import Ranks
from .sharded import FILES, RUN, write_shards

LOCK, RESULT, CURVES = ".nmkernels-train", "result.json", "curves.png"
BASELINE, CHECKPOINTS, BOARD = "baseline", "checkpoints", "tensorboard"

FORMAT = "nmkernels-train-1"
KEEP = 2
WHOLE, SHARDED = ".pt", ".dcp"
CHECKPOINT = rf"step-\d{{8,}}({WHOLE}|{SHARDED})"
REQUIRED = {"format", "step", "config", "corpus", "rng", "seconds", "unlogged"}
TENSORS = {"model", "optimizer"}

SIGNATURES = {
    RESULT: b'"nmkernels"',
    LOG: ",".join(COLUMNS).encode(),
    f"{BASELINE}/{LOG}": ",".join(COLUMNS).encode(),
    CURVES: b"Matplotlib",
    SAMPLE_FILE: PROMPT,
    FILE: b'"nmkernels"',
    DENSE_FILE: b'"nm":',
}
"""Files of a run by their path in its folder, and what their first bytes contain unless they are empty."""

FOLDERS = (f"{BASELINE}/{CHECKPOINTS}", f"{BASELINE}/{BOARD}", BASELINE, CHECKPOINTS, BOARD)  # of a run, inner ones first
# files of a run that have no fixed name
NUMBERED = re.compile(rf"({BASELINE}/)?({CHECKPOINTS}/{CHECKPOINT}(\.aside)?(/{FILES})?|{BOARD}/events\.out\.tfevents\..+)")
TEMPORARY = re.compile(r"\.(.+)\.\w+\.tmp")  # what atomic_write leaves when it is killed; the group is the name of the file
HEAD = 1 << 16


class Store:
    """The checkpoints in one folder: each is written whole or not at all, and the last two are kept.

    ``step-00000100.pt`` is one file, ``step-00000100.dcp`` a folder into which each rank of a sharded run wrote its part; a run of either
    kind can resume from both. All ranks call ``save`` and ``load``.
    """

    def __init__(self, folder: Path, ranks: Ranks | None = None) -> None:
        self.folder, self.ranks = folder, ranks or Ranks()

    def paths(self) -> list[Path]:
        """All checkpoints, oldest step first."""
        found = (p for p in self.folder.glob("step-*") if re.fullmatch(CHECKPOINT, p.name))
        return sorted((p for p in found if p.suffix == WHOLE or (p / RUN).is_file()), key=_step)

    def save(self, state: dict[str, Any]) -> Path:
        """Write ``state``, which has a ``"step"``, atomically, and remove all but the last two checkpoints."""
        sharded = self.ranks.sharded
        path = self.folder / f"step-{state['step']:08}{SHARDED if sharded else WHOLE}"
        try:
            if sharded:
                temporary = path.with_name(f".{path.name}.shards.tmp")
                write_shards({name: state[name] for name in TENSORS}, temporary, path)
                rest = {name: value for name, value in state.items() if name not in TENSORS}
                self.ranks.on_main(lambda: self._seal(rest, temporary, path))
            else:
                self.ranks.on_main(lambda: self._write(state, path))
        except CheckpointError as error:
            if last := self.paths()[-1:]:
                raise CheckpointError(f"{error} {last[0]} is complete: --resume continues from it.") from error
            raise
        return path

    def _write(self, state: dict[str, Any], path: Path) -> None:
        with writing(path):
            self.folder.mkdir(parents=True, exist_ok=True)
            atomic_write(path, lambda temporary: torch.save({"format": FORMAT, **state}, temporary))
            self.drop()

    def _seal(self, rest: dict[str, Any], temporary: Path, path: Path) -> None:
        """Turn a folder into which every rank has written into a checkpoint."""
        with writing(path):
            atomic_write(temporary / RUN, lambda file: torch.save({"format": FORMAT, **rest}, file))
            if path in self.paths():  # a folder with anything else is left, and replace() fails
                _remove(path)
            temporary.replace(path)
            self.drop()

    def drop(self) -> None:
        """Remove all checkpoints but the last two."""
        for old in self.paths()[:-KEEP]:
            _remove(old)

    def load(self, path: Path | None = None) -> dict[str, Any]:
        """The checkpoint at ``path``, or the newest one. A sharded one has ``"shards"``, its folder, instead of the tensors."""
        if path is None:
            if not self.paths():
                raise CheckpointError(
                    f"there is no checkpoint in {self.folder} to resume from; leave --resume out to start a new run, "
                    "with --overwrite if --out holds one."
                )
            path = self.paths()[-1]
        try:
            state = torch.load(_header_of(path), map_location="cpu", weights_only=True)
        except FileNotFoundError as error:
            raise CheckpointError(f"there is no checkpoint {path}.") from error
        except Exception as error:  # depending on the damage: EOFError, RuntimeError, UnpicklingError, KeyError
            cause = ": ".join([type(error).__name__, *(line[:120] for line in str(error).strip().splitlines()[:1])])
            raise CheckpointError(f"{path} is damaged or not a checkpoint ({cause}). {self._way_out(path)}") from error
        needs = REQUIRED if path.is_dir() else REQUIRED | TENSORS
        if not isinstance(state, dict) or state.get("format") != FORMAT or not state.keys() >= needs:
            raise CheckpointError(f"{path} was not written by this version of `nmkernels train`. {self._way_out(path)}")
        return {**state, "shards": path} if path.is_dir() else state

    def set_aside(self, after: int) -> None:
        """Rename checkpoints later than step ``after``: a run that resumes before them must not take them for its own."""
        for path in self.paths():
            if _step(path) > after:
                aside = path.with_name(f"{path.name}.aside")
                _remove(aside)
                path.replace(aside)

    def _way_out(self, path: Path) -> str:
        earlier = [p for p in self.paths() if re.fullmatch(CHECKPOINT, path.name) and _step(p) < _step(path)]
        if earlier:
            return f"An earlier one exists: --resume {earlier[-1]}"
        return "There is no earlier one; start a new run with --overwrite."


def _step(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def _header_of(path: Path) -> Path:
    """The file of a checkpoint that identifies it."""
    return path / RUN if path.is_dir() else path


def _remove(path: Path) -> None:
    """Remove a checkpoint; a sharded one is renamed first, so that half of it never has its name."""
    if path.is_dir():
        gone = path.with_name(f".{path.name}.old.tmp")
        path.replace(gone)
        shutil.rmtree(gone)
    else:
        path.unlink(missing_ok=True)


class Folder:
    """The folder ``--out``; a context manager that releases the lock at the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._lock is not None:
            with suppress(OSError):
                os.ftruncate(self._lock, 0)
            os.close(self._lock)
            self._lock = None

    def check(self, *, resume: bool, overwrite: bool) -> None:
        """Lock a folder that holds a run, after checking that no other file would be overwritten; a new or empty folder is not touched.

        Raises:
            NMError: the folder is in use, holds other files, or holds a run and neither ``resume`` nor ``overwrite`` is set.
        """
        names, out = self._names(), self.path
        signed = any(name in names and self._signed(name) == "signed" for name in (RESULT, LOG))
        if LOCK in names or signed or any(FORMAT.encode() in _head(_header_of(path)) for path in Store(out / CHECKPOINTS).paths()):
            self.take()
            if overwrite and not resume:
                self._spare()
            elif not resume:
                self._protect()
        elif names:
            some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise NMError(f"--out {out} holds files that `nmkernels train` did not write ({some}); pass a new or an empty folder.")

    def _names(self) -> list[str]:
        out = self.path
        try:
            if out.is_symlink() and not out.exists():
                raise NMError(f"--out {out} is a link to {os.readlink(out)}, which does not exist; create that folder, or pass another.")
            if out.exists() and not out.is_dir():
                raise NMError(f"--out {out} is a file; pass a folder.")
            return sorted(name for name in os.listdir(out) if not _temporary(name)) if out.exists() else []
        except OSError as error:
            raise NMError(f"--out {out} cannot be used: {error.strerror or error}.") from error

    def _signed(self, name: str) -> str:
        """What the file ``name`` of ``SIGNATURES`` is: "signed" (a run wrote it), "empty", or "" for anything else."""
        path = self.path / name
        if path.is_symlink() or not path.is_file():
            return ""
        return "signed" if SIGNATURES[name] in _head(path) else "" if path.stat().st_size else "empty"

    def _protect(self) -> None:
        """Refuse to start a new run in a folder that holds one."""
        out = self.path
        if (out / RESULT).exists():
            raise NMError(f"{out} holds a finished run: see {out / RESULT}. Use another --out, or --overwrite to replace it.")
        if Store(out / CHECKPOINTS).paths():
            raise NMError(f"{out} holds a run that was stopped. Continue it with --resume, or replace it with --overwrite.")
        if self._names() != [LOCK]:
            raise NMError(f"{out} holds a run that stopped before its first checkpoint. Use another --out, or --overwrite to replace it.")

    def _spare(self) -> None:
        """Refuse to overwrite a file that has the name of a run's file and was not written by one."""
        for name in (*SIGNATURES, *FOLDERS):
            path = self.path / name
            ours = bool(self._signed(name)) if name in SIGNATURES else path.is_dir() and not path.is_symlink()
            if os.path.lexists(path) and not ours:
                raise NMError(f"{path} was not written by a run and would be overwritten; move it elsewhere, or use another --out.")

    def take(self) -> None:
        """Create the folder, lock it, and remove unfinished files of runs that were killed; does nothing if this process has the lock."""
        if self._lock is not None:
            return
        path = self.path / LOCK
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise NMError(f"--out {self.path} cannot be created: {error.strerror or error}.") from error
        self._lock = lock_file(path, "another --out")
        for name, left in self._entries():
            if _temporary(name) and not left.is_symlink():
                with suppress(OSError):
                    shutil.rmtree(left) if left.is_dir() else left.unlink()

    def clear(self) -> None:
        """Remove the run in the folder, and nothing else; ``check`` has verified that a run wrote its files."""
        with writing(self.path):
            for name, path in self._entries():
                if _known(name) and path.is_file() and not path.is_symlink():
                    path.unlink()
        for name in list(self._folders()):
            with suppress(OSError):  # it holds a user's file, or was never created
                (self.path / name).rmdir()

    def _folders(self) -> Iterator[str]:
        """The folders of a run, inner ones first; those of sharded checkpoints have no fixed names."""
        for outer in (f"{BASELINE}/{CHECKPOINTS}", CHECKPOINTS):
            names = (f"{outer}/{path.name}" for path in (self.path / outer).glob(f"step-*{SHARDED}*") if path.is_dir())
            yield from sorted(filter(_known, names))
        yield from FOLDERS

    def _entries(self) -> Iterator[tuple[str, Path]]:
        """The contents of a run's folders, links not followed. The result comes first: once it is removed the run counts as stopped."""
        for folder in ("", *self._folders()):
            directory = self.path / folder
            if not directory.is_dir() or (folder and directory.is_symlink()):
                continue
            for path in sorted(directory.iterdir(), key=lambda p: (p.name != RESULT, p.name)):
                yield f"{folder}/{path.name}" if folder else path.name, path


def _known(name: str) -> bool:
    """Whether a run writes a file with this path in its folder."""
    return name in SIGNATURES or NUMBERED.fullmatch(name) is not None


def _temporary(name: str) -> bool:
    """Whether this is an unfinished file of ``atomic_write`` for such a path."""
    folder, _, last = name.rpartition("/")
    match = TEMPORARY.fullmatch(last)
    return match is not None and _known(f"{folder}/{match[1]}" if folder else match[1])


def _head(path: Path) -> bytes:
    """The first bytes of a regular file; empty for anything else, such as a pipe that would never end."""
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        return file.read(HEAD)
