"""The folder of a run: whose it is, who writes in it now, its checkpoints, and what of it ``--overwrite`` removes.

A run writes the files of ``SIGNS``, checkpoints, TensorBoard's events, and ``.nmkernels-train``, the lock file, which also says that
the folder is a run's. A folder without it is a run's where a log, a result or a checkpoint in it is recognised by its first bytes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from ..export.files import atomic_write, writing
from ..pattern import CheckpointError, NMError
from .deploy import DENSE_FILE, FILE, PROMPT, SAMPLE_FILE
from .log import COLUMNS, LOG
from .sharded import FILES, RUN, write_shards
from .world import World

LOCK, RESULT, CURVES = ".nmkernels-train", "result.json", "curves.png"
BASELINE, CHECKPOINTS, BOARD = "baseline", "checkpoints", "tensorboard"

FORMAT = "nmkernels-train-1"
KEPT = 2
WHOLE, SHARDED = ".pt", ".dcp"
CHECKPOINT = rf"step-\d{{8,}}({WHOLE}|{SHARDED})"
REQUIRED = {"format", "step", "config", "corpus", "rng", "seconds", "unlogged"}
TENSORS = {"model", "optimizer"}

SIGNS = {
    RESULT: b'"nmkernels"',
    LOG: ",".join(COLUMNS).encode(),
    f"{BASELINE}/{LOG}": ",".join(COLUMNS).encode(),
    CURVES: b"Matplotlib",
    SAMPLE_FILE: PROMPT,
    FILE: b'"nmkernels"',
    DENSE_FILE: b'"nm":',
}
"""Files of a run, by their path in its folder, and what stands in their first bytes, unless they are empty."""

FOLDERS = (f"{BASELINE}/{CHECKPOINTS}", f"{BASELINE}/{BOARD}", BASELINE, CHECKPOINTS, BOARD)  # of a run, the inner ones first
# the files of a run that have no fixed name
MANY = re.compile(rf"({BASELINE}/)?({CHECKPOINTS}/{CHECKPOINT}(\.aside)?(/{FILES})?|{BOARD}/events\.out\.tfevents\..+)")
TEMPORARY = re.compile(r"\.(.+)\.\w+\.tmp")  # what atomic_write leaves where it is killed; the group is the name of the file
HEAD = 1 << 16


class Store:
    """The checkpoints in one folder: written whole or not at all, the last two kept, damage answered in words.

    ``step-00000100.pt`` is one file, ``step-00000100.dcp`` a folder in which each rank of a sharded run wrote its part; a run of either
    kind goes on from both. All ranks of ``world`` call ``save`` and ``load``.
    """

    def __init__(self, folder: Path, world: World | None = None) -> None:
        self.folder, self.world = folder, world or World()

    def paths(self) -> list[Path]:
        """All checkpoints, oldest step first."""
        found = (p for p in self.folder.glob("step-*") if re.fullmatch(CHECKPOINT, p.name))
        return sorted((p for p in found if p.suffix == WHOLE or (p / RUN).is_file()), key=_step)

    def save(self, state: dict[str, Any]) -> Path:
        """Write ``state`` (it has a ``step``) atomically, then drop all but the last two."""
        sharded = self.world.sharded
        path = self.folder / f"step-{state['step']:08}{SHARDED if sharded else WHOLE}"
        try:
            if sharded:
                temporary = path.with_name(f".{path.name}.shards.tmp")
                write_shards({name: state[name] for name in TENSORS}, temporary, path)
                rest = {name: value for name, value in state.items() if name not in TENSORS}
                self.world.lead(lambda: self._seal(rest, temporary, path))
            else:
                self.world.lead(lambda: self._write(state, path))
        except CheckpointError as error:
            if last := self.paths()[-1:]:
                raise CheckpointError(f"{error} {last[0]} is whole: --resume goes on from there.") from error
            raise
        return path

    def _write(self, state: dict[str, Any], path: Path) -> None:
        with writing(path):
            self.folder.mkdir(parents=True, exist_ok=True)
            atomic_write(path, lambda temporary: torch.save({"format": FORMAT, **state}, temporary))
            self.drop()

    def _seal(self, rest: dict[str, Any], temporary: Path, path: Path) -> None:
        """Make a checkpoint of a folder in which every rank has written."""
        with writing(path):
            atomic_write(temporary / RUN, lambda file: torch.save({"format": FORMAT, **rest}, file))
            if path in self.paths():  # a folder with anything else stays, and refuses
                _remove(path)
            temporary.replace(path)
            self.drop()

    def drop(self) -> None:
        """Remove all but the last two."""
        for old in self.paths()[:-KEPT]:
            _remove(old)

    def load(self, path: Path | None = None) -> dict[str, Any]:
        """The checkpoint at ``path``, or the newest one; of a sharded one what is no tensor, and the folder as ``shards``."""
        if path is None:
            if not self.paths():
                raise CheckpointError(
                    f"there is no checkpoint in {self.folder} to resume from; leave --resume out to start, "
                    "with --overwrite if --out holds a run."
                )
            path = self.paths()[-1]
        try:
            state = torch.load(_described(path), map_location="cpu", weights_only=True)
        except FileNotFoundError as error:
            raise CheckpointError(f"there is no checkpoint {path}.") from error
        except Exception as error:  # torch.load raises whatever the damage leads to: EOFError, RuntimeError, UnpicklingError, KeyError
            said = ": ".join([type(error).__name__, *(line[:120] for line in str(error).strip().splitlines()[:1])])
            raise CheckpointError(f"{path} is damaged or not a checkpoint ({said}). {self._way_out(path)}") from error
        needs = REQUIRED if path.is_dir() else REQUIRED | TENSORS
        if not isinstance(state, dict) or state.get("format") != FORMAT or not state.keys() >= needs:
            raise CheckpointError(f"{path} was not written by this version of `nmkernels train`. {self._way_out(path)}")
        return {**state, "shards": path} if path.is_dir() else state

    def set_aside(self, after: int) -> None:
        """Rename checkpoints later than step ``after``: a run that resumes before them would otherwise mistake them for its own."""
        for path in self.paths():
            if _step(path) > after:
                aside = path.with_name(f"{path.name}.aside")
                _remove(aside)
                path.replace(aside)

    def _way_out(self, path: Path) -> str:
        earlier = [p for p in self.paths() if re.fullmatch(CHECKPOINT, path.name) and _step(p) < _step(path)]
        if earlier:
            return f"The one before it is there: --resume {earlier[-1]}"
        return "There is no earlier one; start again with --overwrite."


def _step(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def _described(path: Path) -> Path:
    """The file of a checkpoint that says what it is."""
    return path / RUN if path.is_dir() else path


def _remove(path: Path) -> None:
    """Remove a checkpoint, a sharded one without leaving half of it under its name."""
    if path.is_dir():
        gone = path.with_name(f".{path.name}.old.tmp")
        path.replace(gone)
        shutil.rmtree(gone)
    else:
        path.unlink(missing_ok=True)


class Folder:
    """``--out``. As a context manager it gives the lock back at the end."""

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
        """Lock a folder with a run, once it is clear that nothing in it would be harmed; a new or empty one is left as it is."""
        names, out = self._names(), self.path
        signed = any(name in names and self._signed(name) == "signed" for name in (RESULT, LOG))
        if LOCK in names or signed or any(FORMAT.encode() in _head(_described(path)) for path in Store(out / CHECKPOINTS).paths()):
            self.take()
            if overwrite and not resume:
                self._spare()
            elif not resume:
                self._protect()
        elif names:
            some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise NMError(f"--out {out} holds what no run of `nmkernels train` wrote ({some}); give a new or an empty folder.")

    def _names(self) -> list[str]:
        out = self.path
        try:
            if out.is_symlink() and not out.exists():
                raise NMError(f"--out {out} is a link to {os.readlink(out)}, which does not exist; create that folder, or give another.")
            if out.exists() and not out.is_dir():
                raise NMError(f"--out {out} is a file; give a folder.")
            return sorted(name for name in os.listdir(out) if not _temporary(name)) if out.exists() else []
        except OSError as error:
            raise NMError(f"--out {out} cannot be used: {error.strerror or error}.") from error

    def _signed(self, name: str) -> str:
        """What the file ``name`` of ``SIGNS`` is: "signed" by a run, "empty", or "" for anything else."""
        path = self.path / name
        if path.is_symlink() or not path.is_file():
            return ""
        return "signed" if SIGNS[name] in _head(path) else "" if path.stat().st_size else "empty"

    def _protect(self) -> None:
        """Refuse to start in a folder with a run."""
        out = self.path
        if (out / RESULT).exists():
            raise NMError(f"{out} holds a finished run: see {out / RESULT}. Use another --out, or --overwrite to replace it.")
        if Store(out / CHECKPOINTS).paths():
            raise NMError(f"{out} holds a run that was stopped. Continue it with --resume, or replace it with --overwrite.")
        if self._names() != [LOCK]:
            raise NMError(f"{out} holds the beginning of a run, without a checkpoint. Use another --out, or --overwrite to replace it.")

    def _spare(self) -> None:
        """Refuse to overwrite where something bears the name of a run's file and is none."""
        for name in (*SIGNS, *FOLDERS):
            path = self.path / name
            ours = bool(self._signed(name)) if name in SIGNS else path.is_dir() and not path.is_symlink()
            if os.path.lexists(path) and not ours:
                raise NMError(f"{path} is not what a run wrote, and would be in its way; move it elsewhere, or use another --out.")

    def take(self) -> None:
        """Create the folder, lock it, and remove what runs that were killed had begun to write; nothing if it is locked already."""
        if self._lock is not None:
            return
        path = self.path / LOCK
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise NMError(f"--out {self.path} cannot be created: {error.strerror or error}.") from error
        with writing(path):
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            try:
                self._claim(lock)
            except BaseException:
                os.close(lock)
                raise
        self._lock = lock
        for name, left in self._entries():
            if _temporary(name) and not left.is_symlink():
                with suppress(OSError):
                    shutil.rmtree(left) if left.is_dir() else left.unlink()

    def _claim(self, lock: int) -> None:
        """Lock the open lock file, and write into it who has it."""
        owner = _owner(lock)
        try:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until the handle is closed or the process ends, however it does
            taken, stale = False, ""
        except (BlockingIOError, PermissionError):
            taken, stale = True, ""
        except (ImportError, OSError):  # there are no such locks here
            taken, stale = _alive(owner), f", or delete {self.path / LOCK} if that process is gone"
        if taken:
            who = "process {pid} on {host} has been writing in it since {since}" if owner else "another process writes in it"
            raise NMError(f"{self.path} is in use: {who.format(**owner or {})}. Wait for it to end, or use another --out{stale}.")
        mine = {"pid": os.getpid(), "host": socket.gethostname(), "since": datetime.now().astimezone().isoformat(" ", "seconds")}
        os.ftruncate(lock, 0)
        os.pwrite(lock, json.dumps(mine).encode() + b"\n", 0)

    def clear(self) -> None:
        """Remove the run that is in the folder, and nothing else; ``check`` has seen that its files are what their names say."""
        with writing(self.path):
            for name, path in self._entries():
                if _known(name) and path.is_file() and not path.is_symlink():
                    path.unlink()
        for name in list(self._folders()):
            with suppress(OSError):  # a user's file is in it, or it was never made
                (self.path / name).rmdir()

    def _folders(self) -> Iterator[str]:
        """The folders of a run, the inner ones first; those of sharded checkpoints have no fixed names."""
        for outer in (f"{BASELINE}/{CHECKPOINTS}", CHECKPOINTS):
            names = (f"{outer}/{path.name}" for path in (self.path / outer).glob(f"step-*{SHARDED}*") if path.is_dir())
            yield from sorted(filter(_known, names))
        yield from FOLDERS

    def _entries(self) -> Iterator[tuple[str, Path]]:
        """What lies in the folders of a run, links not followed, the result first: without it the run counts as stopped."""
        for folder in ("", *self._folders()):
            place = self.path / folder
            if not place.is_dir() or (folder and place.is_symlink()):
                continue
            for path in sorted(place.iterdir(), key=lambda p: (p.name != RESULT, p.name)):
                yield f"{folder}/{path.name}" if folder else path.name, path


def _known(name: str) -> bool:
    """Whether a run writes a file of that path in its folder."""
    return name in SIGNS or MANY.fullmatch(name) is not None


def _temporary(name: str) -> bool:
    """Whether that path is what ``atomic_write`` left of such a file."""
    folder, _, last = name.rpartition("/")
    made = TEMPORARY.fullmatch(last)
    return made is not None and _known(f"{folder}/{made[1]}" if folder else made[1])


def _head(path: Path) -> bytes:
    """The first bytes of a file; none of what is no file, a pipe that would never end for instance."""
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        return file.read(HEAD)


def _owner(handle: int) -> dict[str, Any] | None:
    """Who wrote a lock file last and has not given it back."""
    try:
        owner = json.loads(os.pread(handle, HEAD, 0))
        return {key: owner[key] for key in ("pid", "host", "since")}
    except (ValueError, TypeError, KeyError):
        return None


def _alive(owner: dict[str, Any] | None) -> bool:
    """Whether that process may still run; of another machine that is not known. Only asked where the file system has no locks."""
    if owner is None or owner["host"] != socket.gethostname():
        return owner is not None
    try:
        os.kill(int(owner["pid"]), 0)
    except ProcessLookupError:
        return False
    except (OSError, ValueError):
        pass
    return True
