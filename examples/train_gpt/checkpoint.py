"""Checkpoints by torch.distributed.checkpoint, which any number of processes can resume, however they share the model.

A checkpoint is written into a hidden folder, which is renamed once it is complete: a process may be killed at any moment, and the newest
folder with a name of its own is a whole checkpoint.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from parallel import Ranks

KEEP = 2
PROGRESS = "progress.json"
"""What is no tensor: the step, the time, the rows of the log."""


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """By the names of the dense model's parameters. What the recipe keeps is in the optimizer's state."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: dict[str, Any], ranks: Ranks) -> None:
    """Write a checkpoint of the step ``progress["step"]``, all processes together, and remove all but the last ones."""
    path = folder / f"step-{progress['step']:08}"
    part = folder / f".{path.name}"
    dcp.save(_tensors(model, optimizer), checkpoint_id=part)
    if ranks.rank == 0:
        (part / PROGRESS).write_text(json.dumps(progress))
        part.rename(path)
        _clean(folder)
    ranks.barrier()


def _clean(folder: Path) -> None:
    """Remove all but the last checkpoints, and what is left of those that a killed process was writing or removing."""
    for old in sorted(folder.glob("step-*"))[:-KEEP]:
        old.rename(folder / f".{old.name}")
    for part in folder.glob(".step-*"):
        shutil.rmtree(part)


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks) -> dict[str, Any] | None:
    """Load the newest checkpoint and return its ``progress``; None if there is none."""
    if ranks.rank == 0:
        _clean(folder)
    ranks.barrier()
    path = max(folder.glob("step-*"), default=None)
    if path is None:
        return None
    state = _tensors(model, optimizer)
    # a parameter that has had no gradient yet, as an adapter that is added late, has no state there
    saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    moments = state["optimizer"]["state"]
    for name in [name for name in moments if not any(key.startswith(f"optimizer.state.{name}.") for key in saved)]:
        del moments[name]
    dcp.load(state, checkpoint_id=path)
    options = StateDictOptions(strict=False)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=options)
    progress: dict[str, Any] = json.loads((path / PROGRESS).read_text())
    return progress
