"""Checkpoints of a model that ranks share: each writes its shards into one folder, by ``torch.distributed.checkpoint``.

The tensors have the names of the dense model's parameters, so any number of ranks reads what any other wrote, and so does one process.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..export.files import write_error
from ..pattern import CheckpointError

RUN = "run.pt"
"""What is no tensor of the model or the optimizer, in the folder of a sharded checkpoint."""
FILES = rf"(\.metadata|__\d+_\d+\.distcp|{RUN.replace('.', '[.]')})"


def shards_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What this rank holds of ``model`` and of ``optimizer``, by parameter names."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def write_shards(state: dict[str, Any], folder: Path, path: Path) -> None:
    """Write this rank's shards of ``state`` into ``folder``, which is to become ``path``, as every rank does at the same time."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    with _told(path):
        save(state, storage_writer=FileSystemWriter(folder, overwrite=True))


def load_shards(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load ``state``: with ``shards``, a folder of theirs, each rank reads what it needs; else it holds the whole of one process."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load

    if "shards" in state:
        found = shards_of(model, optimizer)
        with _told(state["shards"]), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load(found, checkpoint_id=state["shards"])
    else:
        found = {"model": state["model"], "optimizer": _named(state["optimizer"], model, optimizer)}
    options = StateDictOptions(full_state_dict="shards" not in state)
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"], options=options)


def _named(saved: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an optimizer with names of parameters in the place of numbers."""
    names = {id(p): name for name, p in model.named_parameters()}
    here = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    groups = saved["param_groups"]
    if [len(group["params"]) for group in groups] != list(map(len, here)):
        raise CheckpointError("the optimizer of the checkpoint has other parameters.")
    by_number = {i: name for group, own in zip(groups, here, strict=True) for i, name in zip(group["params"], own, strict=True)}
    return {
        "state": {by_number[i]: value for i, value in saved["state"].items()},
        "param_groups": [{**group, "params": own} for group, own in zip(groups, here, strict=True)],
    }


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Turn what a rank met on the way into words; torch's own exception is none of ``Exception``'s kind."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        first = next(failure for failure, _ in error.failures.values())
        if isinstance(first, OSError):
            raise write_error(path, first.strerror or str(first)) from error
        said = next(iter(str(first).strip().splitlines()), "")[:200]
        raise CheckpointError(f"{path}: {type(first).__name__}: {said}") from error
