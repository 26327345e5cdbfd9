"""A layer's weight compressed along its rows, its columns or both, in the dtype and order that its GEMMs read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .. import reference
from ..pattern import DtypeError, Pattern, PatternError, PatternLike, ShapeError
from ..reference.common import check_device, check_matrix
from ..reference.layouts import check_indices, check_layout, meta_shape
from ..reference.pack import check_operands, check_pack, operand_shapes
from .check import as_pattern
from .compress import Compressed
from .define import Spec, define

__all__ = ["empty_packed", "pack", "DeviceCompressed", "Packed", "relayout", "tensor_core_pattern"]


def _pack(
    w: Tensor, n: int, m: int, select: str, mask: Tensor | None, scale: Tensor | None,
    dtype: torch.dtype | None, rows: bool, columns: bool, layout: str,
) -> tuple[Spec, ...]:  # fmt: skip
    p = check_pack("nm_pack", w, n, m, select, mask, scale, dtype, rows, columns, layout)
    check_device("nm_pack", w=w, mask=mask, scale=scale)
    height, width = w.shape
    dtype = dtype or w.dtype
    return *_operand(p, height, width, dtype, layout, rows), *_operand(p, width, height, dtype, layout, columns)


def _operand(p: Pattern, rows: int, cols: int, dtype: torch.dtype, layout: str, wanted: bool) -> tuple[Spec, Spec]:
    """The values and the indices, or metadata, of a dense ``(rows, cols)``; both ``(0,)`` where they are not wanted."""
    values, indices, kind = operand_shapes(p, rows, cols, layout)
    return (values if wanted else (0,), dtype), (indices if wanted else (0,), kind)


nm_pack = define(
    "nm_pack",
    "(Tensor w, int n, int m, str select, Tensor? mask, Tensor? scale, ScalarType? dtype, bool rows, bool columns, str layout) "
    "-> (Tensor values, Tensor indices, Tensor values_t, Tensor indices_t)",
    _pack,
)


def pack(
    w: Tensor,
    pattern: PatternLike,
    mask: str | Tensor = "magnitude",
    *,
    scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
    rows: bool = True,
    columns: bool = False,
    layout: str = "canonical",
    check: bool = True,
) -> Packed:
    """A weight packed for the forward pass, its transpose for the backward one, cast on the way; one read where there is a kernel for it.

    ``rows = compress(cast(W), M)`` and ``columns = compress(cast(Wᵀ), Mᵀ)``, the mask taken from w as it is, the fp32 master weight.

    Args:
        w: the weight ``(out, in)``; any strides.
        pattern: ``"N:M"`` or a ``Pattern``.
        mask: ``"magnitude"``: the N largest of every group of the operand. ``"transposable"``: ``transposable_mask(w)``, for W and Wᵀ.
            ``"threshold"``: as magnitude, and the values are ``soft_threshold`` times ``scale`` (S-STE, Hu et al. 2024, arXiv 2409.09099).
            Or a bool tensor of w's shape; a group with fewer than N is filled up with zeros at its lowest unkept positions.
        scale: of ``"threshold"``: one fp32 element (fp64 for fp64 weights) on w's device; the GEMM is rounded to fp32, then ``dtype``.
        dtype: of the values, rounded once to nearest even; w's own if not given, whose bits stay.
        rows: pack W. columns: pack Wᵀ. Both at once need ``"transposable"`` or a mask.
        check: False: a bool mask is N:M for certain, so that the host need not wait for a GPU to say so. One that is not gives anything.
        layout: ``"canonical"``; or ``"mma.sp"`` or ``"wgmma.sp"``: 2:4 and 16-bit values, in tiles of 16, or 64, rows and 64 columns.

    Returns:
        ``Packed``, its parts ``Compressed``, or ``DeviceCompressed`` in a device layout. It has no gradient: backward through it raises.

    Raises:
        ShapeError: ``w`` is no matrix, does not divide, or the mask keeps more than N in a group of an operand that is packed.
        PatternError: rows and columns by magnitudes, which are two different weights; a device layout of another pattern than 2:4.
        DtypeError: ``w`` or ``dtype`` is not floating-point, ``mask`` not bool; a device layout of values that have not 16 bits.
        OptionError: ``mask`` or ``layout`` is not known, ``scale`` stands beside another mask, or neither rows nor columns are wanted.

    Example:
        >>> p = pack(torch.tensor([[1.0, 0.0, -2.0, 3.0]]), "2:4", dtype=torch.bfloat16)
        >>> p.rows.values, p.rows.indices, p.columns
        (tensor([[-2.,  3.]], dtype=torch.bfloat16), tensor([[14]], dtype=torch.uint8), None)
    """
    p = as_pattern(pattern)
    select, given = ("given" if check else "held", mask) if isinstance(mask, Tensor) else (mask, None)
    values, indices, values_t, indices_t = nm_pack(w, p.n, p.m, select, given, scale, dtype, rows, columns, layout)
    height, width = w.shape
    return Packed(
        _form(values, indices, layout, p, (height, width)) if rows else None,
        _form(values_t, indices_t, layout, p, (width, height)) if columns else None,
    )


def _form(values: Tensor, indices: Tensor, layout: str, p: Pattern, shape: tuple[int, int]) -> Compressed | DeviceCompressed:
    return Compressed(values, indices, p, shape) if layout == "canonical" else DeviceCompressed(values, indices, layout, p, shape)


def empty_packed(
    w: Tensor,
    pattern: PatternLike,
    *,
    dtype: torch.dtype | None = None,
    rows: bool = True,
    columns: bool = False,
    layout: str = "canonical",
) -> Packed:
    """Uninitialised buffers of the shape that ``pack`` would return, for ``masked_adamw_(..., packs=)`` to write.

    Args:
        w: the weight ``(out, in)``, of which only shape, dtype and device are looked at. The others as in ``pack``.

    Raises:
        ShapeError, PatternError, DtypeError, OptionError: as ``pack``.

    Example:
        >>> empty_packed(torch.ones(64, 128), "2:4", dtype=torch.float16, columns=True, layout="mma.sp").columns.meta.shape
        torch.Size([8, 1, 32])
    """
    p, dtype = as_pattern(pattern), dtype or w.dtype
    check_matrix("empty_packed", "the weight", w)
    check_operands("empty_packed", w.shape, p, dtype, rows, columns, layout)

    def part(height: int, width: int) -> Compressed | DeviceCompressed:
        values, indices, kind = operand_shapes(p, height, width, layout)
        return _form(w.new_empty(values, dtype=dtype), w.new_empty(indices, dtype=kind), layout, p, (height, width))

    height, width = w.shape
    return Packed(part(height, width) if rows else None, part(width, height) if columns else None)


@dataclass(frozen=True, eq=False)
class DeviceCompressed:
    """A 2:4 matrix of 16-bit values whose positions lie in the order in which tensor cores read them.

    It is immutable, compares by identity and is a pytree of (values, meta). It is not for files: ``compressed()`` is.

    Args:
        values: ``(rows, cols/2)``, as ``Compressed`` has them.
        meta: int32; ``"mma.sp"``: ``(rows/16, cols/64, 32)``, ``"wgmma.sp"``: ``(rows/64, cols/64, 128)``.
        layout: ``"mma.sp"`` (mma.sp m16n8k32) or ``"wgmma.sp"`` (wgmma.mma_async.sp m64nNk32).
        pattern, shape: 2:4, and the dense shape ``(rows, cols)``.

    Raises:
        OptionError, PatternError, DtypeError, ShapeError: layout, pattern, dtype or shapes do not belong together.

    Example:
        >>> from nmkernels import ops
        >>> ops.pack(torch.randn(64, 128), "2:4", dtype=torch.bfloat16, layout="wgmma.sp").rows.meta.shape
        torch.Size([1, 2, 128])
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
    """What ``pack`` returns: a weight W ``(out, in)`` compressed for the GEMMs of a layer. A pytree of its two parts.

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


_HARDWARE = Pattern(2, 4)


def _metadata(indices: Tensor, cols: int, layout: str) -> tuple[Spec, ...]:
    op = "nm_metadata"
    check_indices(op, indices, cols, layout)
    if layout == "canonical":
        raise ShapeError(f"{op}: canonical indices are in that order already; ask for 'mma.sp' or 'wgmma.sp'.")
    return ((meta_shape(indices.shape[0], cols, layout), torch.int32),)


nm_metadata = define("nm_metadata", "(Tensor indices, SymInt cols, str layout) -> Tensor", _metadata, floats=False)


def tensor_core_pattern(pattern: Pattern) -> bool:
    """Whether every weight of the pattern is a 2:4 one too: at most 2 of every M, and M a multiple of 4.

    Example:
        >>> [tensor_core_pattern(Pattern(p)) for p in ("2:4", "1:4", "2:8", "1:16", "4:8", "1:2")]
        [True, True, True, True, False, False]
    """
    return pattern.n <= 2 and pattern.m % 4 == 0


def relayout(c: Compressed, layout: str) -> DeviceCompressed:
    """A compressed matrix for the tensor cores: the same values, their positions as metadata of ``mma.sp`` or ``wgmma.sp``.

    2:4 keeps its values. At most 2 of every M, M a multiple of 4 (1:4, 2:8, 1:16, ...), is a 2:4 matrix with zeros among its values, and
    is packed as one: half of all columns are stored then, whatever the pattern was.

    Args:
        c: ``(rows, cols)`` in 16 bits, rows a multiple of 16 (wgmma.sp: 64), cols of 64. layout: see ``DeviceCompressed``.

    Raises:
        OptionError: there is no such layout. PatternError: a pattern that tensor cores cannot read. ShapeError: no matrix of whole tiles.
        DtypeError: the values have not 16 bits.

    Example:
        >>> from nmkernels import ops
        >>> w = ops.prune(torch.randn(16, 64, dtype=torch.bfloat16), "1:8")
        >>> d = relayout(ops.compress(w, "1:8"), "mma.sp")
        >>> d.pattern, d.meta.shape, torch.equal(d.dense(), w)
        (Pattern("2:4"), torch.Size([1, 1, 32]), True)
    """
    op, p = "nm_metadata", c.pattern
    if not tensor_core_pattern(p):
        raise PatternError(f"{op}: {p} is not always 2:4, which tensor cores read; at most 2 of every M are, with M a multiple of 4.")
    if len(c.shape) != 2:
        raise ShapeError(f"{op}: the operand has shape {tuple(c.shape)}; it must be a matrix.")
    rows, cols = c.shape
    check_layout(op, layout, rows, cols, _HARDWARE, c.dtype)
    if p == _HARDWARE:
        return DeviceCompressed(c.values, nm_metadata(c.indices, cols, layout), layout, p, c.shape)
    values, meta, _, _ = nm_pack(c.dense(), 2, 4, "magnitude", None, None, None, True, False, layout)
    return DeviceCompressed(values, meta, layout, _HARDWARE, c.shape)
