"""Compression by the library, into blobs whose layout only the library knows.

The blob of a packed weight takes another 9/16 of the dense weight's bytes. It is made at the first multiplication and again after a change,
and cached by the identity, version counters and addresses of ``values`` and ``indices``; ``streams`` handles several streams and CUDA
graphs.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...dispatch import implementations
from ...reference.layouts import from_layout, layout_of
from .. import streams
from ..shared import aligned
from ..streams import MadeOf
from .context import CODES, LAYOUTS, Session, failures

Sizes = tuple[int, int, int]
"""N, M and the dense columns."""


@dataclass
class _Entry:
    values: weakref.ref[Tensor]
    indices: weakref.ref[Tensor]
    blob: MadeOf[Blob]


_entries: dict[int, _Entry] = {}


def expanded(values: Tensor, indices: Tensor, sizes: Sizes) -> Tensor:
    """Decompress a packed operand with canonical indices or tensor-core metadata."""
    canonical = from_layout(indices, layout_of(indices))
    return by_other_backend("nm_decompress", values, canonical, *sizes)


def blob_of(values: Tensor, indices: Tensor, sizes: Sizes, session: Session, stream: int) -> Blob:
    """The blob of a packed weight for layout nt, cached."""

    def make() -> tuple[Blob, list[Tensor]]:
        blob = compress_as("nt", expanded(values, indices, sizes), session, stream)
        return blob, [blob.data]

    if values.is_inference() or indices.is_inference():  # they have no version counter
        return make()[0]
    entry = _entries.get(id(values))
    if entry is None or entry.values() is not values or entry.indices() is not indices:
        if streams.capturing(values.device):
            return make()[0]
        key = id(values)
        reference = weakref.ref(values, lambda dead: _forget(key, dead))
        entry = _entries[key] = _Entry(reference, weakref.ref(indices), MadeOf())
    return entry.blob.get(values, indices, (values.dtype, sizes), make)


def _forget(key: int, dead: weakref.ref[Tensor]) -> None:
    entry = _entries.get(key)
    if entry is not None and entry.values is dead:
        del _entries[key]


@dataclass(frozen=True, eq=False)
class Blob:
    """A 2:4 matrix in cuSPARSELt's format, which depends on the library's version and the kind of GPU, so it must not be saved.

    Args:
        data: uint8, 9/16 of the dense bytes for 16-bit dtypes, 5/8 for 8-bit ones.
        rows, cols: of the sparse operand S, which is 2:4 along its columns.
        dtype: of its values.
        layout: the GEMM that it is for: ``"nt"``, ``"nn"`` or ``"tn"``, see ``compress``.
        stored: the layout of its plan, which differs for 8-bit dtypes, since the library supports them only in ``"nt"``.
    """

    data: Tensor
    rows: int
    cols: int
    dtype: torch.dtype
    layout: str
    stored: str


def by_other_backend(op: str, *args: Any) -> Tensor:
    """Run an op that this backend lacks on the first backend that supports it, even if this backend is forced."""
    return next(entry for entry in implementations(op) if entry.supports(*args)[0]).fn(*args)


def compress_as(stored: str, dense: Tensor, session: Session, stream: int, layout: str = "") -> Blob:
    """Compress a dense 2:4 operand, stored as the layout ``stored`` requires, without checking that it is 2:4."""
    dense = aligned(dense)
    transposed = LAYOUTS[stored][0]
    rows, cols = dense.shape[::-1] if transposed else dense.shape
    form = rows, cols, CODES[dense.dtype], transposed
    with failures():
        size, buffer = session.context.compressed_size(*form)
        data, scratch = (dense.new_empty(max(1, n), dtype=torch.uint8) for n in (size, buffer))
        session.context.compress(*form, dense.data_ptr(), data.data_ptr(), scratch.data_ptr(), stream)
    return Blob(data, rows, cols, dense.dtype, layout or stored, stored)
