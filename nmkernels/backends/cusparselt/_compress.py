"""Compression by the library's own entry point, and what comes of it: a blob whose order only the library knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..._dispatch import implementations
from ._context import Here, failures
from ._problem import CODES, LAYOUTS


@dataclass(frozen=True, eq=False)
class Blob:
    """A 2:4 matrix as cuSPARSELt keeps it: for this version of the library and this kind of GPU, never for a file.

    Args:
        data: uint8, 9/16 of the dense bytes in 16 bits, 5/8 in 8.
        rows, cols: of the sparse operand S, 2:4 along its columns.
        dtype: of its values.
        layout: which product it was made for: ``"nt"``, ``"nn"`` or ``"tn"``, see ``compress``.
        stored: the layout of its plan; another one where the library reads 8 bits along the sum only.
    """

    data: Tensor
    rows: int
    cols: int
    dtype: torch.dtype
    layout: str
    stored: str
    address: int = 0

    def __post_init__(self) -> None:
        """The address is asked for at every call."""
        object.__setattr__(self, "address", self.data.data_ptr())


def aligned(x: Tensor) -> Tensor:
    """Contiguous, a lazy negation carried out, at an address that is a multiple of 16: as the library takes operands."""
    if x.is_contiguous() and not x.data_ptr() & 15 and not x.is_neg():
        return x
    x = (x.resolve_neg() if x.is_neg() else x).contiguous()
    return x.clone() if x.data_ptr() & 15 else x


def by_another(op: str, *args: Any) -> Tensor:
    """An op that the library does not have, by the first backend that runs it; whoever forced this one did not mean that op."""
    found: Tensor = next(entry for entry in implementations(op) if entry.supports(*args)[0]).fn(*args)
    return found


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
