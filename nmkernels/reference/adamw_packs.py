"""The packed weights that a step of MaskedAdamW leaves for the next forward and backward pass.

``packs`` are four buffers per param, in this order: ``values``, ``indices``, ``values_t``, ``indices_t``, as ``pack`` returns them: of the
weight after the step under the mask after it, rounded once from the param's dtype to that of ``values``, which may be any float dtype, and
another one for ``values_t``. A pair of empty buffers (numel 0) is not wanted. A skipped step leaves them alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from ..pattern import DtypeError, OptionError, Pattern, PatternError, ShapeError
from ._common import check_float
from .layouts import LAYOUTS, check_layout
from .pack import operand_shapes, pack

BUFFERS = ("values", "indices", "values_t", "indices_t")
"""What ``packs`` has of every param, in order."""


def wanted(packs: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """The pairs among one param's buffers that are wanted: values, indices, and whether they are of the transpose."""
    for k in (0, 2):
        if packs[k].numel() or packs[k + 1].numel():
            yield packs[k], packs[k + 1], k == 2


def write_packs(p: Tensor, kept: Tensor, n: int, m: int, packs: Sequence[Tensor], layout: str) -> None:
    """Write one param's buffers: what ``pack(p, n, m, "given", kept)`` returns, in the dtypes that they have."""
    for values, indices, turned in wanted(packs):
        x, mask = (p.t(), kept.t()) if turned else (p, kept)
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
        for values, indices, turned in wanted(packs[4 * i : 4 * i + 4]):
            if turned and not transposable:
                raise PatternError(
                    f"{op}: packs of the transpose of params[{i}] need transposable=True: by the magnitudes of its rows a weight is not "
                    f"{n}:{m} along its columns."
                )
            _check_pair(op, i, p, values, indices, turned, Pattern(n, m), layout)


def _check_tiles(op: str, params: Sequence[Tensor], pattern: Pattern) -> None:
    for i, p in enumerate(params):
        if p.dim() != 2:
            raise ShapeError(f"{op}: params[{i}] has shape {tuple(p.shape)}; a transposable mask needs a matrix. Step it apart.")
        if p.shape[0] % pattern.m:
            pattern.check_divides(op, int(p.shape[0]), f"the first dimension of params[{i}]")


def _check_pair(op: str, i: int, p: Tensor, values: Tensor, indices: Tensor, turned: bool, pattern: Pattern, layout: str) -> None:
    if p.dim() != 2:
        raise ShapeError(f"{op}: params[{i}] has shape {tuple(p.shape)}; only a matrix is packed. Give it empty packs.")
    rows, cols = p.shape if not turned else (p.shape[1], p.shape[0])
    name = f"packs of {'the transpose of ' if turned else ''}params[{i}]"
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
