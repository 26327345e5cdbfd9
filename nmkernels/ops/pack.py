"""The forms of a layer's weight that its GEMMs read, in their dtype and layout: packed along rows, along columns, and dense."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .. import reference
from ..pattern import DtypeError, OptionError, Pattern, PatternError, PatternLike, ShapeError
from ..reference.common import compute_dtype
from ..reference.layouts import EIGHT_BIT, index_dtype, meta_shape, operand_shapes
from ..reference.pack import SELECTS
from .check import FLOATS, as_pattern, check_device, check_float, check_indices, check_layout, check_mask, check_matrix, check_ordered
from .compress import Compressed
from .define import Spec, define


def _specs(
    op: str,
    shape: torch.Size,
    p: Pattern,
    dtype: torch.dtype,
    rows: bool,
    columns: bool,
    layout: str,
    tiled: bool = False,
    dense: bool = False,
) -> tuple[Spec, ...]:
    """The shapes and dtypes of values and indices of a packed matrix and of its transpose, and of its dense form; ``(0,)`` for parts not
    requested.

    Raises if it cannot be packed; with ``tiled`` both dimensions must be divisible by M in any case.
    """
    if dtype not in FLOATS:
        raise DtypeError(f"{op}: values cannot be packed in {dtype}; only float16, bfloat16, float32 and float64 are supported.")
    if not (rows or columns or dense):
        raise OptionError(
            f"{op}: neither rows nor columns nor the dense form are wanted, so there is nothing to make. Ask for some of them."
        )
    specs: list[Spec] = []
    height, width = shape
    for wanted, high, wide, what in ((rows, height, width, "columns"), (columns, width, height, "rows")):
        if wanted or tiled or (dense and what == "columns"):
            p.check_divides(op, wide, f"the number of {what}")
        if wanted:
            check_layout(op, layout, high, wide, p, dtype)
        values, indices = operand_shapes(p, high, wide, layout) if wanted else ((0,), (0,))
        specs += [(values, dtype), (indices, index_dtype(layout))]
    return *specs, (tuple(shape) if dense else (0,), dtype)


def _pack(
    w: Tensor, n: int, m: int, select: str, mask: Tensor | None, scale: Tensor | None,
    dtype: torch.dtype | None, rows: bool, columns: bool, layout: str, dense: bool = False,
) -> tuple[Spec, ...]:  # fmt: skip
    op, p = "nm_pack", Pattern(n, m)
    check_float(op, "the weight", w)
    check_matrix(op, "the weight", w)
    if select not in SELECTS:
        raise OptionError(f"{op}: select={select!r} is not known; it is one of {', '.join(map(repr, SELECTS))}.")
    if (mask is not None) != (select in ("given", "held")):
        missing = "without a mask" if mask is None else "with a mask"
        raise OptionError(f'{op}: select={select!r} {missing}; a mask belongs to select="given" or "held", and only there.')
    if mask is not None:
        check_mask(op, mask, w)
    if scale is not None:
        if select != "threshold":
            raise OptionError(f'{op}: select={select!r} with a scale, which only applies to select="threshold".')
        if scale.numel() != 1 or scale.dtype != compute_dtype(w.dtype):
            raise ShapeError(
                f"{op}: scale is {scale.dtype} of shape {tuple(scale.shape)}; it must be one element of {compute_dtype(w.dtype)}, "
                "as soft_threshold_scale returns it."
            )
        check_device(op, w=w, scale=scale)
    if (rows or dense) and columns and select in ("magnitude", "threshold"):
        raise PatternError(
            f"{op}: select={select!r} cannot make rows and columns at once: the largest magnitudes of each row's groups are not {p} "
            'along the columns, so that W and Wᵀ would be two different weights. Take the transposable mask ("transposable"), or give one.'
        )
    return _specs(op, w.shape, p, dtype or w.dtype, rows, columns, layout, select == "transposable", dense)


nm_pack = define(
    "nm_pack",
    "(Tensor w, int n, int m, str select, Tensor? mask, Tensor? scale, ScalarType? dtype, bool rows, bool columns, str layout, "
    "bool dense=False) -> (Tensor values, Tensor indices, Tensor values_t, Tensor indices_t, Tensor spread)",
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
    dense: bool = False,
    layout: str = "canonical",
    check: bool = True,
) -> Packed:
    """Make the forms of a weight that its GEMMs read: packed, its transpose packed, or dense, cast and masked. Backward raises.

    ``rows = compress(cast(W), M)``, ``columns = compress(cast(Wᵀ), Mᵀ)`` and ``dense = decompress(rows)``, with the mask of the uncast w,
    the fp32 master weight. On a GPU all that are asked for come from one read of w where it is 2:4 and they are of 16 bits.

    Args:
        w: the weight ``(out, in)``; any strides.
        mask: ``"magnitude"``: the N largest of every group of the operand. ``"transposable"``: ``transposable_mask(w)``, for W and Wᵀ.
            ``"threshold"``: as magnitude, and the values are ``soft_threshold`` times ``scale`` (S-STE, Hu et al. 2024, arXiv 2409.09099).
            Or a bool tensor of w's shape; a group with fewer than N stores zeros at its lowest unkept positions.
        scale: only for ``"threshold"``: one fp32 element (fp64 for fp64 weights) on w's device.
        dtype: of the values, rounded once to nearest even; default w's own, unchanged.
        rows: pack W.
        columns: pack Wᵀ. Both at once need ``"transposable"`` or a mask, as do columns with ``dense``.
        dense: make M ⊙ W in dense layout, +0.0 where not kept.
        check: False skips the check that a bool mask is N:M, for which the host waits for a GPU. The result of a wrong mask is undefined.
        layout: ``"canonical"``; or ``"mma.sp"`` or ``"wgmma.sp"`` for 2:4 with 16-bit values, in tiles of 16 or 64 rows and 64 columns.

    Raises:
        ShapeError, DtypeError: ``w``, ``mask``, ``scale`` or ``dtype`` does not fit; the mask keeps more than N in a group.
        PatternError: rows and columns by magnitude, which would be two different weights; a device layout with a pattern other than 2:4.
        OptionError: ``mask`` or ``layout`` is unknown, ``scale`` comes with another mask, or no form is requested.

    Example:
        >>> p = pack(torch.tensor([[1.0, 0.0, -2.0, 3.0]]), "2:4", dtype=torch.bfloat16)
        >>> p.rows.values, p.rows.indices, p.columns
        (tensor([[-2.,  3.]], dtype=torch.bfloat16), tensor([[14]], dtype=torch.uint8), None)
    """
    p = as_pattern(pattern)
    select, explicit = ("given" if check else "held", mask) if isinstance(mask, Tensor) else (mask, None)
    buffers = nm_pack(w, p.n, p.m, select, explicit, scale, dtype, rows, columns, layout, dense)
    return _packed(buffers, w.shape, p, rows, columns, layout, dense)


def _packed(buffers: Sequence[Tensor], shape: torch.Size, p: Pattern, rows: bool, columns: bool, layout: str, dense: bool) -> Packed:
    def part(values: Tensor, indices: Tensor, shape: torch.Size) -> Operand:
        if layout == "canonical":
            return Compressed.trusted(values, indices, p, shape)
        return DeviceCompressed.trusted(values, indices, layout, p, shape)

    values, indices, values_t, indices_t, spread = buffers
    down = part(values_t, indices_t, shape[::-1]) if columns else None
    return Packed(part(values, indices, shape) if rows else None, down, spread if dense else None)


@dataclass(frozen=True, eq=False)
class DeviceCompressed:
    """A 2:4 matrix of 16-bit values with its positions in the order that tensor cores read.

    It is immutable, compares by identity and is a pytree of (values, meta). To save it, use ``compressed()``.

    Args:
        values: ``(rows, cols/2)``, as in ``Compressed``.
        meta: int32; ``"mma.sp"``: ``(rows/16, cols/64, 32)``, ``"wgmma.sp"``: ``(rows/64, cols/64, 128)``.
        layout: ``"mma.sp"`` (mma.sp m16n8k32) or ``"wgmma.sp"`` (wgmma.mma_async.sp m64nNk32).
        pattern, shape: 2:4, and the dense shape ``(rows, cols)``.

    Raises:
        OptionError, PatternError, DtypeError, ShapeError: layout, pattern, dtype or shapes do not match.

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
        if self.meta.dtype != torch.int32:
            raise DtypeError(f"DeviceCompressed: the metadata has dtype {self.meta.dtype}; it is int32. Make it with nm.ops.pack.")
        check_ordered("DeviceCompressed", self.values, self.meta, self.pattern, self.layout, *self.shape)

    @classmethod
    def trusted(cls, *fields: Any) -> DeviceCompressed:
        """Create without checks or conversions, from the results of an op or the leaves of a ``tree_map``."""
        d = object.__new__(cls)
        for name, value in zip(("values", "meta", "layout", "pattern", "shape"), fields, strict=True):
            object.__setattr__(d, name, value)
        return d

    def compressed(self) -> Compressed:
        """The canonical form, sharing the values."""
        return Compressed(self.values, reference.from_layout(self.meta, self.layout), self.pattern, self.shape)

    def dense(self) -> Tensor:
        """The dense matrix."""
        return self.compressed().dense()


Operand = Compressed | DeviceCompressed


def positions(c: Operand) -> Tensor:
    """The tensor with the positions of the values: packed indices or metadata."""
    return c.indices if isinstance(c, Compressed) else c.meta


@dataclass(frozen=True, eq=False)
class Packed:
    """The result of ``pack``: a weight W ``(out, in)`` in the forms that the GEMMs of a layer read. A pytree of its three parts.

    Args:
        rows: W, of shape ``(out, in)``, groups along ``in``: the operand of the forward pass, or None.
        columns: Wᵀ, of shape ``(in, out)``, groups along ``out``: the operand of the input gradient, or None.
        dense: W in dense layout, that operand where Wᵀ is not N:M, or None.

    Example:
        >>> from nmkernels import ops
        >>> p = ops.pack(torch.eye(4), "2:4", "transposable", columns=True)
        >>> torch.equal(p.rows.dense(), p.columns.dense().T)
        True
    """

    rows: Operand | None
    columns: Operand | None
    dense: Tensor | None = None

    @property
    def layout(self) -> str:
        """The layout of its parts: ``"canonical"`` or a device layout."""
        return next((part.layout for part in (self.rows, self.columns) if isinstance(part, DeviceCompressed)), "canonical")

    def buffers(self) -> list[Tensor | None]:
        """Values and indices (or metadata) of the rows, then of the columns; None for a part that is not packed."""
        pairs = [(None, None) if part is None else (part.values, positions(part)) for part in (self.rows, self.columns)]
        return [x for pair in pairs for x in pair]


pytree.register_pytree_node(
    DeviceCompressed,
    lambda d: ([d.values, d.meta], (d.layout, d.pattern, torch.Size(d.shape))),
    lambda leaves, context: DeviceCompressed.trusted(*leaves, *context),
    serialized_type_name="nmkernels.DeviceCompressed",
    to_dumpable_context=lambda context: [context[0], str(context[1]), list(context[2])],
    from_dumpable_context=lambda dumped: (dumped[0], Pattern(dumped[1]), torch.Size(dumped[2])),
)
pytree.register_pytree_node(
    Packed, lambda p: ([p.rows, p.columns, p.dense], None), lambda leaves, _: Packed(*leaves), serialized_type_name="nmkernels.Packed"
)


_HARDWARE = Pattern(2, 4)


def _metadata(indices: Tensor, cols: int, layout: str) -> tuple[Spec, ...]:
    op = "nm_metadata"
    check_indices(op, indices)
    if indices.dim() != 2 or indices.shape[1] * 8 != cols:
        raise ShapeError(f"{op}: indices of shape {tuple(indices.shape)} are not those of {cols} columns at 2:4, (rows, {cols // 8}).")
    if layout == "canonical":
        raise ShapeError(f"{op}: canonical indices are in that order already; ask for 'mma.sp', 'wgmma.sp' or 'wgmma.sp.8bit'.")
    check_layout(op, layout, indices.shape[0], cols, _HARDWARE, torch.int8 if layout == EIGHT_BIT else torch.float16)
    return ((meta_shape(indices.shape[0], cols, layout), torch.int32),)


nm_metadata = define("nm_metadata", "(Tensor indices, SymInt cols, str layout) -> Tensor", _metadata, floats=False)


def tensor_core_pattern(pattern: PatternLike) -> bool:
    """Whether every weight of the pattern is also 2:4, that is N ≤ 2 and M a multiple of 4.

    Example:
        >>> [tensor_core_pattern(p) for p in ("2:4", "1:4", "2:8", "1:16", "4:8", "1:2")]
        [True, True, True, True, False, False]
    """
    p = as_pattern(pattern)
    return p.n <= 2 and p.m % 4 == 0


def relayout(c: Compressed, layout: str) -> DeviceCompressed:
    """Convert a compressed matrix to a tensor-core layout, with positions as metadata of ``mma.sp`` or ``wgmma.sp``.

    2:4 keeps its values. A pattern with N ≤ 2 and M a multiple of 4 (1:4, 2:8, 1:16, ...) is packed as a 2:4 matrix with explicit zeros, so
    half of all columns are stored, regardless of the pattern.

    Args:
        c: ``(rows, cols)`` in 16 bits, rows a multiple of 16 (wgmma.sp: 64), cols of 64.
        layout: see ``DeviceCompressed``.

    Raises:
        OptionError: the layout is unknown.
        PatternError, ShapeError, DtypeError: tensor cores cannot read such a matrix.

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
    check_matrix(op, "the operand", c.values)
    if p == _HARDWARE:
        return DeviceCompressed(c.values, nm_metadata(c.indices, c.shape[1], layout), layout, p, c.shape)
    values, meta, *_ = nm_pack(c.dense(), 2, 4, "magnitude", None, None, None, True, False, layout)
    return DeviceCompressed(values, meta, layout, _HARDWARE, c.shape)
