"""A weight packed for the forward pass, its transpose for the backward one; and what a step of MaskedAdamW leaves of both.

``packs`` are four buffers per param, in this order: ``values``, ``indices``, ``values_t``, ``indices_t``, as ``pack`` returns them: of the
weight after the step under the mask after it, rounded once from the param's dtype to that of ``values``, which may be any float dtype, and
another one for ``values_t``. A pair of empty buffers (numel 0) is not wanted. A skipped step leaves them alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..pattern import DtypeError, OptionError, Pattern, PatternError, ShapeError
from .common import FLOATS, check_float, compute_dtype
from .compress import check_mask, compress
from .layouts import LAYOUTS, check_layout, meta_shape, to_layout
from .mask import mask as nm_mask
from .threshold import soft_threshold
from .transposable import transposable_mask

SELECTS = ("magnitude", "transposable", "given", "held", "threshold")
"""What decides which weights are kept."""


def pack(
    w: Tensor, n: int, m: int, select: str = "magnitude", mask: Tensor | None = None, scale: Tensor | None = None,
    dtype: torch.dtype | None = None, rows: bool = True, columns: bool = False, layout: str = "canonical",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Compress W along its rows, or Wᵀ along its rows (the columns of W), or both, and cast what is kept: see ``nm.ops.pack``.

    What is kept, by ``select``; the comparison is always in w's own dtype, that of the master weight:

    * ``"magnitude"``: ``mask`` of the operand that is packed, W or Wᵀ.
    * ``"transposable"``: M = ``transposable_mask(w)`` for W, Mᵀ for Wᵀ.
    * ``"given"``: the ``mask`` argument for W, its transpose for Wᵀ, filled up as ``compress`` does, in each orientation on its own.
    * ``"held"``: the same, of a mask that is N:M for certain: nothing is checked where the host would wait for that.
    * ``"threshold"``: as magnitude, but the value is ``soft_threshold`` of the operand, rounded to w's dtype as that op writes it,
      times ``scale``, the GEMM rounded once to the compute dtype (float32; float64 for float64).

    The GEMM is IEEE's: a kept S of +0.0 (a tie at the threshold) gives +0.0, -0.0 for a negative scale, NaN for an infinite one; a
    GEMM that underflows keeps its sign. ``scale=None`` multiplies nothing. A value is rounded once to ``dtype``, to nearest even,
    overflow to infinity, denormals kept; where the dtype is w's own its bits stay. (float64 to 16 bits goes through float32, as in torch.)

    Returns values, indices, and those of Wᵀ; what is not wanted has shape ``(0,)``.
    """
    check_pack("pack", w, n, m, select, mask, scale, dtype, rows, columns, layout)
    kept = transposable_mask(w, n, m) if select == "transposable" else mask
    operands = (w, kept) if rows else None, (w.t(), None if kept is None else kept.t()) if columns else None
    results = [_nothing(w, dtype, layout) if o is None else _operand(*o, n, m, select, scale, dtype or w.dtype, layout) for o in operands]
    return (*results[0], *results[1])


def _operand(
    w: Tensor, kept: Tensor | None, n: int, m: int, select: str, scale: Tensor | None, dtype: torch.dtype, layout: str
) -> tuple[Tensor, Tensor]:
    """Values and indices of one orientation."""
    kept = nm_mask(w, n, m) if kept is None else kept
    if select == "threshold":
        w = soft_threshold(w, n, m)
        if scale is not None:
            w = w.to(compute_dtype(w.dtype)) * scale.reshape(())
    values, indices = compress(w.to(dtype), n, m, kept)
    return values, to_layout(indices, w.shape[1], layout)


def _nothing(w: Tensor, dtype: torch.dtype | None, layout: str) -> tuple[Tensor, Tensor]:
    return w.new_empty(0, dtype=dtype or w.dtype), w.new_empty(0, dtype=torch.uint8 if layout == "canonical" else torch.int32)


def check_pack(
    op: str, w: Tensor, n: int, m: int, select: str, mask: Tensor | None, scale: Tensor | None,
    dtype: torch.dtype | None, rows: bool, columns: bool, layout: str,
) -> Pattern:  # fmt: skip
    """The pattern n:m, after every check of ``pack`` but how full a given mask is; errors name ``op``."""
    pattern = Pattern(n, m)
    check_float(op, "the weight", w)
    if w.dim() != 2:
        raise ShapeError(f"{op}: the weight has shape {tuple(w.shape)}; it must be a matrix, (out, in). Reshape it.")
    _check_select(op, select, mask, scale, w)
    if rows and columns and select in ("magnitude", "threshold"):
        raise PatternError(
            f"{op}: select={select!r} cannot pack rows and columns at once: the largest magnitudes of each row's groups are not {pattern} "
            'along the columns, so that W and Wᵀ would be two different weights. Take the transposable mask ("transposable"), or give one.'
        )
    check_operands(op, w.shape, pattern, dtype or w.dtype, rows, columns, layout)
    if select == "transposable":
        check_operands(op, w.shape, pattern, dtype or w.dtype, True, True, "canonical")
    return pattern


def check_operands(op: str, shape: Sequence[int], pattern: Pattern, dtype: torch.dtype, rows: bool, columns: bool, layout: str) -> None:
    """Raise unless a matrix of that shape can be packed so: the groups of what is wanted divide, the layout's tiles too."""
    if dtype not in FLOATS:
        raise DtypeError(f"{op}: values cannot be packed in {dtype}; only float16, bfloat16, float32 and float64 are supported.")
    if not (rows or columns):
        raise OptionError(f"{op}: neither rows nor columns are wanted, so there is nothing to pack. Ask for one of them, or both.")
    sides = (shape[0], "the number of rows"), (shape[1], "the number of columns")
    for wanted, height, width in ((rows, 0, 1), (columns, 1, 0)):
        size, what = sides[width]
        if wanted and size % pattern.m:
            pattern.check_divides(op, int(size), what)
        if wanted:
            check_layout(op, layout, sides[height][0], size, pattern, dtype)


def operand_shapes(pattern: Pattern, rows: int, cols: int, layout: str) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    """The shape of the values and of the indices of a dense ``(rows, cols)``, and the dtype of the latter."""
    values = (rows, cols // pattern.m * pattern.n)
    if layout == "canonical":
        return values, (rows, pattern.index_bytes(cols)), torch.uint8
    return values, meta_shape(rows, cols, layout), torch.int32


def _check_select(op: str, select: str, mask: Tensor | None, scale: Tensor | None, w: Tensor) -> None:
    if select not in SELECTS:
        raise OptionError(f"{op}: select={select!r} is not known; it is one of {', '.join(map(repr, SELECTS))}.")
    if (mask is not None) != (select in ("given", "held")):
        missing = "without a mask" if mask is None else "beside a mask"
        raise OptionError(f'{op}: select={select!r} {missing}; a mask belongs to select="given" or "held", and only there.')
    if mask is not None:
        check_mask(op, mask, w)
    if scale is None:
        return
    if select != "threshold":
        raise OptionError(f'{op}: select={select!r} beside a scale, which multiplies the soft threshold only (select="threshold").')
    if scale.numel() != 1 or scale.dtype != compute_dtype(w.dtype):
        raise ShapeError(
            f"{op}: scale is {scale.dtype} of shape {tuple(scale.shape)}; it must be one element of {compute_dtype(w.dtype)}, "
            "as soft_threshold_scale returns it."
        )


BUFFERS = ("values", "indices", "values_t", "indices_t")
"""What ``packs`` has of every param, in order."""


def wanted(packs: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """The pairs among one param's buffers that are wanted: values, indices, and whether they are of the transpose."""
    for k in (0, 2):
        if packs[k].numel() or packs[k + 1].numel():
            yield packs[k], packs[k + 1], k == 2


def write_packs(p: Tensor, kept: Tensor, n: int, m: int, packs: Sequence[Tensor], layout: str) -> None:
    """Write one param's buffers: what ``pack(p, n, m, "given", kept)`` returns, in the dtypes that they have."""
    for values, indices, transposed in wanted(packs):
        x, mask = (p.t(), kept.t()) if transposed else (p, kept)
        packed = pack(x, n, m, "given", mask, dtype=values.dtype, layout=layout)
        values.copy_(packed[0])
        indices.copy_(packed[1])


def check_packs(op: str, params: Sequence[Tensor], n: int, m: int, transposable: bool, packs: Sequence[Tensor] | None, layout: str) -> None:
    """Raise unless the params have transposable masks where they are asked for, and the buffers fit the params; errors name ``op``."""
    if layout not in LAYOUTS:
        raise OptionError(f"{op}: layout {layout!r} is not known; it is one of {', '.join(map(repr, LAYOUTS))}.")
    if (transposable or packs) and not n:
        raise PatternError(f"{op}: without a pattern there are no transposable masks and no packed weights. Give one, e.g. '2:4'.")
    if transposable:
        _check_tiles(op, params, Pattern(n, m))
    if not packs:
        return
    if len(packs) != 4 * len(params):
        raise ShapeError(f"{op}: {len(params)} params and {len(packs)} packs; four belong to each: {', '.join(BUFFERS)}.")
    for i, p in enumerate(params):
        for values, indices, transposed in wanted(packs[4 * i : 4 * i + 4]):
            if transposed and not transposable:
                raise PatternError(
                    f"{op}: packs of the transpose of params[{i}] need transposable=True: by the magnitudes of its rows a weight is not "
                    f"{n}:{m} along its columns."
                )
            _check_pair(op, i, p, values, indices, transposed, Pattern(n, m), layout)


def _check_tiles(op: str, params: Sequence[Tensor], pattern: Pattern) -> None:
    for i, p in enumerate(params):
        if p.dim() != 2:
            raise ShapeError(f"{op}: params[{i}] has shape {tuple(p.shape)}; a transposable mask needs a matrix. Step it apart.")
        if p.shape[0] % pattern.m:
            pattern.check_divides(op, int(p.shape[0]), f"the first dimension of params[{i}]")


def _check_pair(op: str, i: int, p: Tensor, values: Tensor, indices: Tensor, transposed: bool, pattern: Pattern, layout: str) -> None:
    if p.dim() != 2:
        raise ShapeError(f"{op}: params[{i}] has shape {tuple(p.shape)}; only a matrix is packed. Give it empty packs.")
    rows, cols = p.shape if not transposed else (p.shape[1], p.shape[0])
    name = f"packs of {'the transpose of ' if transposed else ''}params[{i}]"
    check_float(op, f"{name}, values:", values)
    check_layout(op, layout, rows, cols, pattern, values.dtype)
    *shapes, kind = operand_shapes(pattern, rows, cols, layout)
    if [tuple(values.shape), tuple(indices.shape)] != shapes:
        raise ShapeError(
            f"{op}: {name} have shapes {tuple(values.shape)} and {tuple(indices.shape)}; {pattern} of ({rows}, {cols}) in {layout!r} "
            f"has {shapes[0]} and {shapes[1]}. Make them with nm.ops.empty_packed."
        )
    if indices.dtype != kind:
        raise DtypeError(f"{op}: {name} have indices in {indices.dtype}; layout {layout!r} has them in {kind}.")
