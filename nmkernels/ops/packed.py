"""Packed: a weight compressed along its rows, its columns or both; DeviceCompressed: one of them in a tensor core's order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .. import reference
from ..pattern import DtypeError, Pattern, ShapeError
from ..reference.layouts import check_layout, meta_shape
from ._check import as_pattern, check_device
from .compressed import Compressed


@dataclass(frozen=True, eq=False)
class DeviceCompressed:
    """A 2:4 matrix of 16-bit values whose positions lie in the order in which tensor cores read them.

    It is immutable, compares by identity and is a pytree of (values, meta). It is not for files: ``compressed()`` is.

    Args:
        values: ``(rows, cols/2)``, as ``Compressed`` has them.
        meta: int32; ``"mma.sp"``: ``(rows/16, cols/64, 32)``, ``"wgmma.sp"``: ``(rows/64, cols/64, 128)``.
        layout: ``"mma.sp"`` (mma.sp m16n8k32) or ``"wgmma.sp"`` (wgmma.mma_async.sp m64nNk32).
        pattern: 2:4.
        shape: the dense shape ``(rows, cols)``.

    Raises:
        OptionError, PatternError, DtypeError, ShapeError: layout, pattern, dtype or shapes do not belong together.

    Example:
        >>> from nmkernels import ops
        >>> d = ops.pack(torch.randn(64, 128), "2:4", dtype=torch.bfloat16, layout="wgmma.sp").rows
        >>> d.meta.shape, d.compressed()
        (torch.Size([1, 2, 128]), Compressed((64, 128), "2:4", torch.bfloat16, 9216 bytes))
    """

    values: Tensor
    meta: Tensor
    layout: str
    pattern: Pattern
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "pattern", as_pattern(self.pattern))
        object.__setattr__(self, "shape", torch.Size(self.shape))
        if torch.compiler.is_compiling():
            return  # the op that made the parts has checked them
        if len(self.shape) != 2 or self.layout == "canonical":
            raise ShapeError(f"DeviceCompressed: {self.layout!r} of shape {tuple(self.shape)}; it holds matrices in a device layout.")
        rows, cols = self.shape
        check_layout("DeviceCompressed", self.layout, rows, cols, self.pattern, self.values.dtype)
        if self.meta.dtype != torch.int32:
            raise DtypeError(f"DeviceCompressed: the metadata has dtype {self.meta.dtype}; it is int32. Make it with nm.ops.pack.")
        expected = (rows, cols // 2), meta_shape(rows, cols, self.layout)
        if (tuple(self.values.shape), tuple(self.meta.shape)) != expected:
            raise ShapeError(
                f"DeviceCompressed: values {tuple(self.values.shape)} and metadata {tuple(self.meta.shape)} are not {self.layout!r} of "
                f"{tuple(self.shape)}, which has {expected[0]} and {expected[1]}. Make them with nm.ops.pack."
            )
        check_device("DeviceCompressed", values=self.values, meta=self.meta)

    def compressed(self) -> Compressed:
        """The canonical form; the values are shared."""
        return Compressed(self.values, reference.from_layout(self.meta, self.layout), self.pattern, self.shape)

    def dense(self) -> Tensor:
        """The dense matrix, zeros included."""
        return self.compressed().dense()


@dataclass(frozen=True, eq=False)
class Packed:
    """What ``pack`` returns: a weight W ``(out, in)`` compressed for the products of a layer. A pytree of its two parts.

    Args:
        rows: W, of shape ``(out, in)``, groups along ``in``: the operand of the forward pass. None where not asked for.
        columns: Wᵀ, of shape ``(in, out)``, groups along ``out``: the operand of the gradient of the input. None where not asked for.

    Example:
        >>> from nmkernels import ops
        >>> p = ops.pack(torch.eye(4), "2:4", "transposable", columns=True)
        >>> torch.equal(p.rows.dense(), p.columns.dense().T)
        True
    """

    rows: Compressed | DeviceCompressed | None
    columns: Compressed | DeviceCompressed | None

    @property
    def layout(self) -> str:
        """``"canonical"``, or the device layout of its parts, which have the same."""
        return next((part.layout for part in (self.rows, self.columns) if isinstance(part, DeviceCompressed)), "canonical")

    def buffers(self) -> list[Tensor | None]:
        """values and indices (or metadata) of the rows, then of the columns; None for those of a part that is None."""
        both = [
            (None, None) if x is None else (x.values, x.indices if isinstance(x, Compressed) else x.meta) for x in (self.rows, self.columns)
        ]
        return [x for pair in both for x in pair]


def _unflatten_device(leaves: Any, context: tuple[str, Pattern, tuple[int, ...]]) -> DeviceCompressed:
    # leaves may be anything that a tree_map returned, so nothing is checked here
    d = object.__new__(DeviceCompressed)
    for name, value in zip(("values", "meta", "layout", "pattern", "shape"), (*leaves, *context), strict=True):
        object.__setattr__(d, name, value)
    return d


pytree.register_pytree_node(
    DeviceCompressed,
    lambda d: ([d.values, d.meta], (d.layout, d.pattern, torch.Size(d.shape))),
    _unflatten_device,
    serialized_type_name="nmkernels.DeviceCompressed",
    to_dumpable_context=lambda context: [context[0], str(context[1]), list(context[2])],
    from_dumpable_context=lambda dumped: (dumped[0], Pattern(dumped[1]), torch.Size(dumped[2])),
)
pytree.register_pytree_node(
    Packed, lambda p: ([p.rows, p.columns], None), lambda leaves, _: Packed(*leaves), serialized_type_name="nmkernels.Packed"
)

__all__ = ["DeviceCompressed", "Packed"]
