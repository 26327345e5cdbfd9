"""Checkpoints of a run: written whole or not at all, the last two kept, damage answered in words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from ..export import atomic_write
from ..export.files import write_error
from ..pattern import CheckpointError

FORMAT = "nmkernels-train-1"
KEPT = 2
NAME = r"step-\d{8,}\.pt"
REQUIRED = {"format", "step", "config", "corpus", "model", "optimizer", "rng", "seconds"}


class Store:
    """The checkpoints ``step-00000100.pt`` in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def paths(self) -> list[Path]:
        """All checkpoints, oldest step first."""
        if not self.folder.is_dir():
            return []
        return sorted((p for p in self.folder.iterdir() if re.fullmatch(NAME, p.name)), key=_step)

    def save(self, state: dict[str, Any]) -> Path:
        """Write ``state`` (it has a ``step``) atomically, then drop all but the last two.

        Raises:
            CheckpointError: the system refuses; the message names the last checkpoint, which is as it was.
        """
        path = self.folder / f"step-{state['step']:08}.pt"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            atomic_write(path, lambda temporary: torch.save({"format": FORMAT, **state}, temporary))
            self.drop()
        except OSError as error:
            raise write_error(Path(error.filename or path), error.strerror or str(error)) from error
        except CheckpointError as error:
            if last := self.paths()[-1:]:
                raise CheckpointError(f"{error} {last[0]} is whole: --resume goes on from there.") from error
            raise
        return path

    def drop(self) -> None:
        """Remove all but the last two."""
        for old in self.paths()[:-KEPT]:
            old.unlink()

    def load(self, path: Path | None = None) -> dict[str, Any]:
        """The checkpoint at ``path``, or the newest one.

        Raises:
            CheckpointError: there is none, or it is damaged; then the one before it is named.
        """
        if path is None:
            if not self.paths():
                raise CheckpointError(
                    f"there is no checkpoint in {self.folder} to resume from; leave --resume out to start, "
                    "with --overwrite if --out holds a run."
                )
            path = self.paths()[-1]
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except FileNotFoundError as error:
            raise CheckpointError(f"there is no checkpoint {path}.") from error
        except Exception as error:  # torch.load raises whatever the damage leads to: EOFError, RuntimeError, UnpicklingError, KeyError
            raise CheckpointError(f"{path} is damaged or not a checkpoint ({_first_line(error)}). {self._way_out(path)}") from error
        if not isinstance(state, dict) or state.get("format") != FORMAT or not state.keys() >= REQUIRED:
            raise CheckpointError(f"{path} was not written by this version of `nmkernels train`. {self._way_out(path)}")
        return state

    def set_aside(self, after: int) -> None:
        """Rename checkpoints later than step ``after``: a run that resumes before them would otherwise mistake them for its own."""
        for path in self.paths():
            if _step(path) > after:
                path.replace(path.with_suffix(".pt.aside"))

    def _way_out(self, path: Path) -> str:
        earlier = [p for p in self.paths() if re.fullmatch(NAME, path.name) and _step(p) < _step(path)]
        if earlier:
            return f"The one before it is there: --resume {earlier[-1]}"
        return "There is no earlier one; start again with --overwrite."


def _step(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:120]}" if text else type(error).__name__
