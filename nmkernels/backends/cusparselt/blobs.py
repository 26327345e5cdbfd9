"""Compression by the library's own entry point, and what comes of it: a blob whose order only the library knows.

The blob of a packed weight, 9/16 of the dense weight's bytes in addition to it, is made when it is first multiplied, and again after a
change: it is remembered by the identity, version counters and addresses of ``values`` and ``indices``, between streams and in CUDA graphs
as ``streams`` has it.
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
from .. import streams
from ..shared import aligned
from ..streams import MadeOf
from .context import CODES, LAYOUTS, Here, failures

Sizes = tuple[int, int, int]
"""N, M and the dense columns."""


@dataclass
class _Entry:
    values: weakref.ref[Tensor]
    indices: weakref.ref[Tensor]
    blob: MadeOf[Blob]


_entries: dict[int, _Entry] = {}


def expanded(values: Tensor, indices: Tensor, sizes: Sizes) -> Tensor:
    """The dense operand of a packed one, whose positions are canonical indices or the metadata of tensor cores."""
    canonical = from_layout(indices, layout_of(indices))
    return by_another("nm_decompress", values, canonical, *sizes)


def blob_of(values: Tensor, indices: Tensor, sizes: Sizes, here: Here, stream: int) -> Blob:
    """The blob of a packed weight for layout nt, remembered or made."""

    def make() -> tuple[Blob, list[Tensor]]:
        blob = compress_as("nt", expanded(values, indices, sizes), here, stream)
        return blob, [blob.data]

    if values.is_inference() or indices.is_inference():  # which do not tell when they are written
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
