"""The blobs of packed weights, remembered as long as the packed tensors live and are not written.

A blob takes 9/16 of the dense weight's bytes, beside the packed weight itself. A weight is compressed when it is first multiplied, and
again after a change: the memory is by the identity, version counters and addresses of ``values`` and ``indices``. While a CUDA graph is
captured, a remembered blob is used only if neither tensor was ever written in place. Otherwise compressing is recorded into the graph, so
that a replay sees what an optimizer's step, replayed before it, has written.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...reference.layouts import from_layout, layout_of
from ._compress import Blob, by_another, compress_as
from ._context import Here, capturing

Sizes = tuple[int, int, int]
"""N, M and the dense columns."""


@dataclass
class _Entry:
    values: weakref.ref[Tensor]
    indices: weakref.ref[Tensor]
    state: tuple[int, ...]
    sizes: Sizes
    blob: Blob
    stream: int
    made: Any
    """The event after which the blob is there, for other streams; None on the CPU."""
    streams: set[int] = field(default_factory=set)
    """Other streams that have waited for it."""
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
    if (
        entry is not None
        and entry.values() is values
        and entry.indices() is indices
        and entry.state == (values._version, indices._version, values.data_ptr(), indices.data_ptr())
        and entry.sizes == sizes
        and entry.blob.dtype is values.dtype
    ):
        if not capturing(values):
            if stream != entry.stream:
                _await(entry, values, stream)
            return entry.blob
        if entry.state[:2] == (0, 0):
            # no waiting for another stream: whoever captures has waited for all earlier work
            entry.captured = True
            return entry.blob
    return _made(entry, values, indices, sizes, here, stream)


def _made(entry: _Entry | None, values: Tensor, indices: Tensor, sizes: Sizes, here: Here, stream: int) -> Blob:
    blob = compress_as("nt", expanded(values, indices, sizes), here, stream)
    # what a graph records exists in its replays only; and tensors of inference mode do not tell when they are written
    if capturing(values) or values.is_inference() or indices.is_inference():
        return blob
    event = None
    if values.is_cuda:
        event = torch.cuda.Event()
        event.record()
    key = id(values)
    state = values._version, indices._version, values.data_ptr(), indices.data_ptr()
    same = entry is not None and entry.values() is values
    kept = None if entry is None or not same else entry.blob if entry.captured else entry.kept
    reference = weakref.ref(values, lambda dead: _forget(key, dead))
    _entries[key] = _Entry(reference, weakref.ref(indices), state, sizes, blob, stream, event, kept=kept)
    return blob


def _forget(key: int, dead: weakref.ref[Tensor]) -> None:
    entry = _entries.get(key)
    if entry is not None and entry.values is dead:
        del _entries[key]


def _await(entry: _Entry, values: Tensor, stream: int) -> None:
    """Order this stream after the compression, and keep the blob's memory for it."""
    if values.is_cuda and stream not in entry.streams:
        current = torch.cuda.current_stream(values.device)
        current.wait_event(entry.made)
        entry.blob.data.record_stream(current)
    entry.streams.add(stream)


def forget() -> None:
    """Forget every blob."""
    _entries.clear()
