"""Compression by the library's own entry point, and what comes of it: a blob whose order only the library knows.

The blob of a packed weight, 9/16 of the dense weight's bytes beside it, is made when it is first multiplied, and again after a change: it
is remembered by the identity, version counters and addresses of ``values`` and ``indices``. While a CUDA graph is captured, it is used only
if neither tensor was ever written in place. Otherwise compressing is recorded into the graph, so that a replay sees what an optimizer's
step, replayed before it, has written.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...dispatch import implementations
from ...reference.layouts import from_layout, layout_of
from ..shared import aligned
from .context import CODES, LAYOUTS, Here, capturing, failures

Sizes = tuple[int, int, int]
"""N, M and the dense columns."""


@dataclass
class _Entry:
    values: weakref.ref[Tensor]
    indices: weakref.ref[Tensor]
    state: tuple[Any, ...]
    blob: Blob
    made: Any
    """The event after which the blob is there, for other streams; None on the CPU."""
    streams: set[int]
    """The stream that made it, and those that have waited for it."""
    captured: bool = False
    """Whether a graph reads the blob."""
    kept: Blob | None = None
    """An earlier blob that a graph reads, as long as the values live. There is one at most: later ones are of written tensors."""


_entries: dict[int, _Entry] = {}


def expanded(values: Tensor, indices: Tensor, sizes: Sizes) -> Tensor:
    """The dense operand of a packed one, whose positions are canonical indices or the metadata of tensor cores."""
    canonical = from_layout(indices, layout_of(indices))
    return by_another("nm_decompress", values, canonical, *sizes)


def blob_of(values: Tensor, indices: Tensor, sizes: Sizes, here: Here, stream: int) -> Blob:
    """The blob of a packed weight for layout nt, remembered or made."""
    entry = _entries.get(id(values))
    if entry is not None and entry.values() is not values:
        entry = None
    if entry is not None and entry.indices() is indices and entry.state == _state(values, indices, sizes):
        if not capturing(values):
            if stream not in entry.streams:
                if values.is_cuda:
                    current = torch.cuda.current_stream(values.device)
                    current.wait_event(entry.made)
                    entry.blob.data.record_stream(current)
                entry.streams.add(stream)
            return entry.blob
        if entry.state[:2] == (0, 0):
            # no waiting for another stream: whoever captures has waited for all earlier work
            entry.captured = True
            return entry.blob
    blob = compress_as("nt", expanded(values, indices, sizes), here, stream)
    # what a graph records exists in its replays only; and tensors of inference mode do not tell when they are written
    if capturing(values) or values.is_inference() or indices.is_inference():
        return blob
    event = None
    if values.is_cuda:
        event = torch.cuda.Event()
        event.record()
    kept = None if entry is None else entry.blob if entry.captured else entry.kept
    key = id(values)
    reference = weakref.ref(values, lambda dead: _forget(key, dead))
    _entries[key] = _Entry(reference, weakref.ref(indices), _state(values, indices, sizes), blob, event, {stream}, kept=kept)
    return blob


def _state(values: Tensor, indices: Tensor, sizes: Sizes) -> tuple[Any, ...]:
    return values._version, indices._version, values.data_ptr(), indices.data_ptr(), values.dtype, sizes


def _forget(key: int, dead: weakref.ref[Tensor]) -> None:
    entry = _entries.get(key)
    if entry is not None and entry.values is dead:
        del _entries[key]


@dataclass(frozen=True, eq=False)
class Blob:
    """A 2:4 matrix as cuSPARSELt keeps it: for this version of the library and this kind of GPU, never for a file.

    Args:
        data: uint8, 9/16 of the dense bytes in 16 bits, 5/8 in 8.
        rows, cols: of the sparse operand S, 2:4 along its columns.
        dtype: of its values.
        layout: which GEMM it was made for: ``"nt"``, ``"nn"`` or ``"tn"``, see ``compress``.
        stored: the layout of its plan; another one where the library reads 8 bits along the sum only.
    """

    data: Tensor
    rows: int
    cols: int
    dtype: torch.dtype
    layout: str
    stored: str

    @cached_property
    def address(self) -> int:
        return self.data.data_ptr()


def by_another(op: str, *args: Any) -> Tensor:
    """An op that the library does not have, by the first backend that runs it; whoever forced this one did not mean that op."""
    return next(entry for entry in implementations(op) if entry.supports(*args)[0]).fn(*args)


def compress_as(stored: str, dense: Tensor, here: Here, stream: int, layout: str = "") -> Blob:
    """Compress a dense 2:4 operand that lies as a plan's layout has it; it is not checked."""
    dense = aligned(dense)
    transposed = LAYOUTS[stored][0]
    rows, cols = dense.shape[::-1] if transposed else dense.shape
    form = rows, cols, CODES[dense.dtype], transposed
    with failures():
        size, buffer = here.context.compressed_size(*form)
        data, scratch = (dense.new_empty(max(1, n), dtype=torch.uint8) for n in (size, buffer))
        here.context.compress(*form, dense.data_ptr(), data.data_ptr(), scratch.data_ptr(), stream)
    return Blob(data, rows, cols, dense.dtype, layout or stored, stored)
