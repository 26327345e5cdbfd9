"""What pruning has finished: the compressed layers of each unit, in memory or in a folder from which an interrupted run resumes.

A folder holds ``run.json``, which says what is pruned and how, and for each unit ``unit-0000.safetensors``: per layer ``name.values`` and
``name.indices``, for integers also ``name.integers`` and ``name.step``, and as metadata a digest of these, the rows of the report and the
orders of permuted channels. ``.lock`` names the process that uses the folder.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from math import inf, isclose
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..export.tensors import quote, read, write
from ..files import atomic_write, lock_file, writing
from ..ops import Compressed
from ..pattern import CheckpointError, Pattern
from ..train.layer_names import listed
from ..train.report import Pruned
from .ranks import by_first, ranks

FORMAT = "nmkernels-prune-2"
ROUNDING = {"rounding": "with error compensation"}
"""What marks a run that also rounds. Earlier versions kept no integers, and their blocks saw inputs from floating-point weights."""
ENDS = "values", "indices"
ROUNDED = "integers", "step"
RUN, LOCK = "run.json", ".lock"
CLOSE = 1e-2
"""The relative difference of two machines' rounding, at most, in the inputs of a layer."""


@contextmanager
def owned(folder: Path | None) -> Iterator[None]:
    """No other run uses ``folder``, which is created; ranks use it together. CheckpointError if another run does."""
    if folder is None:
        yield
        return
    handle = by_first(_own, folder)
    try:
        yield
    finally:
        if ranks()[1] == 0:
            (folder / LOCK).unlink(missing_ok=True)
            os.close(handle)


def _own(folder: Path) -> int:
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return lock_file(folder / LOCK, "another folder")


@dataclass
class Done:
    """The result of one unit: its layers' compressed matrices, and the rows of the report by problem."""

    layers: dict[str, Compressed] = field(default_factory=dict)
    rounded: dict[str, Compressed] = field(default_factory=dict)
    """The same with integers, of the layers that are rounded."""
    rows: dict[str, Pruned] = field(default_factory=dict)
    orders: list[tuple[str, list[int]]] = field(default_factory=list)
    """Of channels that were permuted before: (the name of a layer that reads them, their order)."""
    gains: dict[str, str] = field(default_factory=dict)
    """What that brought, or why it was left, by layer."""


class Results:
    """The results of all units, by number; in ``folder`` if there is one, which the first rank alone reads and writes for all.

    ``identity``: what must agree for an earlier run to be continued; else it raises CheckpointError, as for damaged or other files.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, identity: Mapping[str, Any]) -> None:
        self.folder = None if folder is None else Path(folder)
        self._memory: dict[int, Done] = {}
        if self.folder is not None:
            rounding = {} if identity.get("values") is None else ROUNDING
            by_first(self._claim, self.folder, {"format": FORMAT, **identity, **rounding})

    def _claim(self, folder: Path, identity: dict[str, Any]) -> None:
        path = folder / RUN
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            entries = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
        if not path.exists():
            if entries:
                raise CheckpointError(
                    f"prune_: folder={str(folder)!r} holds other files ({', '.join(entries[:3])}); pass an empty or a new folder."
                )
            atomic_write(path, lambda temporary: temporary.write_text(json.dumps(identity, indent=2)))
            return
        before = _read_json(path)
        for key, value in identity.items():
            if before.get(key) != value:
                raise CheckpointError(
                    f"{folder} holds the results of another run: its {key} is {quote(before.get(key))}, not {quote(value)}. Pass another "
                    "folder, or delete this one."
                )

    def recognise(self, behaviour: Mapping[str, float]) -> None:
        """The model must do what it did when the results were made: ``behaviour`` has, for each layer, a number that its inputs give.

        Files and settings say what a model is, but not what code runs it: the user's ``forward=``, or a library's version.
        """
        if self.folder is not None:
            by_first(self._recognise, self.folder, dict(behaviour))

    def _recognise(self, folder: Path, behaviour: dict[str, float]) -> None:
        run = _read_json(folder / RUN)
        before = run.get("behaviour")
        if before is None:
            run["behaviour"] = behaviour
            atomic_write(folder / RUN, lambda temporary: temporary.write_text(json.dumps(run, indent=2)))
            return
        strange = next((name for name, value in behaviour.items() if not isclose(value, before.get(name, inf), rel_tol=CLOSE)), None)
        if strange is not None:
            raise CheckpointError(
                f"{folder} holds the results of another run: layer {strange!r} of the dense model got different inputs then. Has forward= "
                "or a library changed? Pass another folder, or delete this one."
            )

    def path(self, number: int) -> Path:
        """The file of a unit."""
        assert self.folder is not None
        return self.folder / f"unit-{number:04}.safetensors"

    def __contains__(self, number: int) -> bool:
        return number in self._memory if self.folder is None else by_first(self.path(number).exists)

    def save(self, number: int, done: Done) -> None:
        """Keep the result of a unit."""
        if self.folder is None:
            self._memory[number] = done
        else:
            by_first(self._write, number, done)

    def _write(self, number: int, done: Done) -> None:
        tensors = {f"{name}.{end}": getattr(c, end) for name, c in done.layers.items() for end in ENDS}
        for name, c in done.rounded.items():
            assert c.step is not None
            tensors |= {f"{name}.integers": c.values, f"{name}.step": c.step}
        layers = {name: [str(c.pattern), *c.shape] for name, c in done.layers.items()}
        rows = {name: asdict(row) for name, row in done.rows.items()}
        about = {"digest": digest(tensors), "layers": layers, "rows": rows, "orders": done.orders, "gains": done.gains}
        # a unit may have no layer, and safetensors no file without a tensor
        write(self.path(number), tensors or {"": torch.empty(0)}, {"nmkernels": json.dumps(about)})

    def load(self, number: int, layers: Sequence[str] | None = None) -> Done:
        """The result of a finished unit, which has these ``layers`` if they are known."""
        return self._memory[number] if self.folder is None else by_first(self._read, number, layers)

    def _read(self, number: int, expected: Sequence[str] | None) -> Done:
        path = self.path(number)
        if not path.exists():
            raise CheckpointError(f"{path} was deleted meanwhile; start again, and this unit is pruned again.")
        try:
            contents = read(path)
            about = json.loads(contents.metadata["nmkernels"])
            rounded = [name for name in about["layers"] if f"{name}.step" in contents.tensors]
            keys = [f"{name}.{end}" for names, ends in ((about["layers"], ENDS), (rounded, ROUNDED)) for name in names for end in ends]
            tensors = {key: contents.tensors[key] for key in keys}
        except (CheckpointError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is damaged ({error}); delete it, and this unit is pruned again.") from error
        if about.get("digest") != digest(tensors):
            raise CheckpointError(f"{path} is damaged: it does not hold what was written; delete it, and this unit is pruned again.")
        if expected is not None and sorted(about["layers"]) != sorted(expected):
            raise CheckpointError(f"{path} holds {listed(about['layers'])}, not {listed(expected)}; delete {path.parent} to start again.")
        layers = {
            name: Compressed(tensors[f"{name}.values"], tensors[f"{name}.indices"], Pattern(pattern), tuple(shape))
            for name, (pattern, *shape) in about["layers"].items()
        }
        integers = {
            name: Compressed(tensors[f"{name}.integers"], (c := layers[name]).indices, c.pattern, c.shape, tensors[f"{name}.step"])
            for name in rounded
        }
        rows = {name: Pruned(**row) for name, row in about["rows"].items()}
        return Done(layers, integers, rows, [(name, order) for name, order in about["orders"]], about["gains"])


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); delete {path.parent} to start again.") from error


def digest(values: Any) -> str:
    """The first 16 hexadecimal digits of a SHA-256 over all tensors and plain values in ``values``; of one without memory its form."""
    sha = hashlib.sha256()
    leaves, structure = pytree.tree_flatten(values)
    sha.update(repr(structure).encode())
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            sha.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            if not leaf.is_meta:
                plain: Any = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
                sha.update(plain)
        else:
            sha.update(repr(leaf).encode())
    return sha.hexdigest()[:16]
