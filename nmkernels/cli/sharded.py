"""Checkpoints of a sharded model: each rank writes its shards into one folder, by ``torch.distributed.checkpoint``.

Tensors are stored under the parameter names of the dense model, so a checkpoint can be loaded by any number of ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..files import write_error
from ..pattern import CheckpointError

RUN = "run.pt"
"""The file in the folder of a sharded checkpoint for everything except the tensors of the model and the optimizer."""
FILES = rf"(\.metadata|__\d+_\d+\.distcp|{RUN.replace('.', '[.]')})"


def shards_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """This rank's shards of ``model`` and ``optimizer``, by parameter name."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def write_shards(state: dict[str, Any], folder: Path, path: Path) -> None:
    """Write this rank's shards of ``state`` into ``folder``, which will be renamed to ``path``; called by all ranks together."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    with _checkpoint_errors(path):
        save(state, storage_writer=FileSystemWriter(folder, overwrite=True))


def load_shards(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load ``state``. With ``"shards"`` (a folder) each rank reads what it needs; else ``state`` holds the whole tensors of one process."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load

    if "shards" in state:
        tensors = shards_of(model, optimizer)
        with _checkpoint_errors(state["shards"]), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load(tensors, checkpoint_id=state["shards"])
    else:
        tensors = {"model": state["model"], "optimizer": _by_name(state["optimizer"], model, optimizer)}
    options = StateDictOptions(full_state_dict="shards" not in state)
    set_state_dict(model, optimizer, model_state_dict=tensors["model"], optim_state_dict=tensors["optimizer"], options=options)


def _by_name(saved: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state dict of an optimizer with parameter names instead of numbers."""
    names = {id(p): name for name, p in model.named_parameters()}
    here = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    groups = saved["param_groups"]
    if [len(group["params"]) for group in groups] != list(map(len, here)):
        raise CheckpointError("the optimizer in the checkpoint has other parameters.")
    by_number = {i: name for group, own in zip(groups, here, strict=True) for i, name in zip(group["params"], own, strict=True)}
    return {
        "state": {by_number[i]: value for i, value in saved["state"].items()},
        "param_groups": [{**group, "params": own} for group, own in zip(groups, here, strict=True)],
    }


@contextmanager
def _checkpoint_errors(path: Path) -> Iterator[None]:
    """Raise torch's CheckpointException, which is not an ``Exception``, as a CheckpointError that names the first cause."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        first = next(failure for failure, _ in error.failures.values())
        if isinstance(first, OSError):
            raise write_error(path, first.strerror or str(first)) from error
        message = next(iter(str(first).strip().splitlines()), "")[:200]
        raise CheckpointError(f"{path}: {type(first).__name__}: {message}") from error
