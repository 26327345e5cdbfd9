"""Weights as other libraries stored them: kept values, their positions, and scales. See ``Foreign`` for what becomes of them.

``bitmask`` (compressed-tensors up to 0.14, ``sparse-24-bitmask``): ``NAME.compressed`` ``(out, in/2)``, the two of each four in order;
``NAME.bitmask`` uint8 ``(out, ⌈in/8⌉)``, a bit per dense weight, the lowest first; ``NAME.shape`` int64 ``(2, 1)``; if values are int8 or
float8, ``NAME.weight_scale``, one number, ``(out, 1)`` or ``(out, groups)``.

``marlin24`` (the same library, ``marlin-24``): ``NAME.weight_packed`` int32 ``(in/32, 2·out·bits/4)``, kept integers plus 2^(bits-1) in the
order in which the threads of Marlin's kernel read them; ``NAME.meta`` int16 ``(in/32, 2·out)``, positions in CUTLASS's order for tensor
cores; ``NAME.scale_packed`` float16 ``(groups, out)``, in the order of threads too if there are more kept columns than a group has.

``masked``: any dense weight, with zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .. import ops
from ..gemm.problem import plain
from ..ops import Compressed
from ..ops.check import FLOATS
from ..pattern import CheckpointError, Pattern
from ..reference.integers import pack_integers
from .tensors import quote

SCALED = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
"""Dtypes of values that have a scale."""
PIECE = 1 << 20
"""Weights that are converted at a time, so that copies of other dtypes take little memory."""

_NIBBLES = {1 << low | 1 << high: low | high << 2 for low in range(4) for high in range(low + 1, 4)}
"""The indices of two of four, by the mask."""
_NONE = 0
"""The indices 0, 0, which no group has."""
_TABLE = np.array([_NIBBLES.get(b & 15, _NONE) | _NIBBLES.get(b >> 4, _NONE) << 4 for b in range(256)], np.uint8)
"""Packed indices of two groups, by the byte that is their mask."""
_WHOLE = np.isin(np.arange(256), [low | high << 4 for low in _NIBBLES.values() for high in _NIBBLES.values()])
"""Which bytes of packed indices are two groups'."""


def damaged(name: str, what: str) -> CheckpointError:
    return CheckpointError(f"layer {quote(name)}: {what}.")


@dataclass(frozen=True)
class Foreign:
    """A weight ``(out, in)`` of another library: values · scale.

    ``values``: ``(out, kept)`` in floating point, of 8 bits too, or int8; ``bits``: of these integers, 0 for floating point; ``scale``:
    None, or ``(out, steps)``, each for as many neighbouring columns; ``indices``: as in ``Compressed``.
    """

    name: str
    values: Tensor
    indices: Tensor
    pattern: Pattern
    shape: tuple[int, int]
    bits: int = 0
    scale: Tensor | None = None

    def __post_init__(self) -> None:
        if not all(bool(self.values[rows].float().isfinite().all()) for rows in self._pieces()):
            raise damaged(self.name, "a value is NaN or infinite; the file is damaged")

    @property
    def kind(self) -> str:
        """What the values are, in words."""
        kind = f"int{self.bits}" if self.bits else plain(self.values.dtype)
        if self.scale is None:
            return kind
        per = "row" if self.scale.shape[1] == 1 else f"{self.shape[1] // self.scale.shape[1]} columns"
        return f"{kind}, a {plain(self.scale.dtype)} scale per {per}"

    def converted(self, dtype: torch.dtype, exact: bool) -> Compressed:
        """The weight in the form of this package.

        Floating-point values stay as they are, and 8-bit ones become ``dtype``. Integers stay, and their scales become bfloat16 steps;
        ``exact``: if that would change one, integers become ``dtype`` too, and so do other values.
        """
        if self.bits and not (exact and not keeps_steps(self.scale)):
            assert self.scale is not None
            values, step = pack_integers(self.values, self.bits), self.scale.to(torch.bfloat16).contiguous()
            return Compressed(values, self.indices, self.pattern, self.shape, step)
        return self.decoded(dtype if exact or self.scale is not None else self.values.dtype)

    def decoded(self, dtype: torch.dtype) -> Compressed:
        """The weight with values in floating point."""
        if self.scale is None and self.values.dtype == dtype:
            return Compressed(self.values, self.indices, self.pattern, self.shape)
        values = torch.cat([self._products(rows).to(dtype) for rows in self._pieces()])
        if not bool(values.isfinite().all()):
            raise damaged(self.name, f"a weight is too large for {dtype}; use --exact, which writes float32")
        return Compressed(values, self.indices, self.pattern, self.shape)

    def error(self, c: Compressed) -> float:
        """‖W' - W‖ / ‖W‖ of what ``converted`` or ``decoded`` returned; 0 only if they are equal."""
        if c.values is self.values and c.step is None:
            return 0.0
        total, size = 0.0, 0.0
        for rows in self._pieces():
            step = None if c.step is None else c.step[rows]
            part = Compressed(c.values[rows], c.indices[rows], c.pattern, (rows.stop - rows.start, c.shape[1]), step)
            now = (part if step is None else ops.dequantize_values(part, torch.float32)).values.double()
            before = self._products(rows)
            total, size = total + float((now - before).square().sum()), size + float(before.square().sum())
        return (total / size) ** 0.5 if size else 0.0

    def _products(self, rows: slice) -> Tensor:
        values = self.values[rows].double()
        if self.scale is None:
            return values
        return (values.unflatten(1, (self.scale.shape[1], -1)) * self.scale[rows].double().unsqueeze(-1)).flatten(1)

    def _pieces(self) -> list[slice]:
        rows, each = self.shape[0], max(1, PIECE // max(1, self.shape[1]))
        return [slice(i, min(i + each, rows)) for i in range(0, rows, each)]


def keeps_steps(scale: Tensor | None) -> bool:
    """Whether scales are bfloat16 numbers."""
    return scale is None or torch.equal(scale.to(torch.bfloat16).to(scale.dtype), scale)


def bitmask(name: str, compressed: Tensor, mask: Tensor, shape: Tensor, scale: Tensor | None) -> Foreign:
    """A layer of ``sparse-24-bitmask``."""
    sizes = shape.flatten().tolist() if shape.numel() == 2 and not shape.is_floating_point() else []
    if not sizes or min(sizes) < 1 or sizes[1] % 4:
        raise damaged(name, f"its shape is {quote(shape.flatten().tolist()[:4])}, not that of a matrix with a multiple of 4 columns")
    rows, cols = sizes
    for part, tensor, wanted in (("compressed", compressed, (rows, cols // 2)), ("bitmask", mask, (rows, -(-cols // 8)))):
        if tuple(tensor.shape) != wanted:
            raise damaged(name, f"its {part} has shape {tuple(tensor.shape)}, and for a weight of {(rows, cols)} it has {wanted}")
    if mask.dtype != torch.uint8:
        raise damaged(name, f"its bitmask is {mask.dtype}, not torch.uint8")
    indices = torch.from_numpy(_TABLE[mask.numpy()])
    valid = _WHOLE[indices.numpy()]
    if cols % 8:  # half of the last byte is spare
        valid[:, -1] = _WHOLE[indices[:, -1].numpy() << 4 | indices[:, -1].numpy()] & (mask[:, -1].numpy() < 16)
    if not valid.all():
        row = int(valid.all(1).argmin())
        raise damaged(name, f"row {row} of its bitmask has a group of four without exactly two bits; the file is damaged")
    return Foreign(name, compressed, indices, Pattern("2:4"), (rows, cols), *_scaled(name, compressed, scale, rows, cols))


def marlin24(name: str, packed: Tensor, scale: Tensor, meta: Tensor) -> Foreign:
    """A layer of ``marlin-24``."""
    rows = scale.shape[1] if scale.dim() == 2 else 0
    lines, width = packed.shape if packed.dim() == 2 else (0, 0)
    cols, bits = 32 * lines, 2 * width // rows if rows else 0
    if packed.dtype != torch.int32 or bits not in (4, 8) or 2 * width != bits * rows or rows % 64 or not cols:
        what = f"its weight_packed is {packed.dtype} {tuple(packed.shape)} and its scale_packed {tuple(scale.shape)}"
        raise damaged(name, f"{what}, which no layer of marlin-24 has, with 4 or 8 bits and a multiple of 64 rows")
    groups = scale.shape[0]
    if not scale.is_floating_point() or (groups != 1 and groups * 128 != cols):
        raise damaged(
            name, f"its scale_packed is {scale.dtype} {tuple(scale.shape)}; a row has one scale, or one for 128 of {cols} columns"
        )
    if meta.dtype != torch.int16 or tuple(meta.shape) != (lines, 2 * rows):
        raise damaged(
            name, f"its meta is {meta.dtype} {tuple(meta.shape)}, and for a weight of {(rows, cols)} torch.int16 {(lines, 2 * rows)}"
        )
    integers = packed.contiguous().view(torch.uint8)
    if bits == 4:
        integers = torch.stack([integers & 15, integers >> 4], -1)
    # 64 rows by 16 kept columns lie as (row / 16, bit 3 of the row, bits 1 and 2 of the column, bits 0 and 1 of the row), then bit 2 of the
    # row and bits 0 and 3 of the column, in two orders
    halves = (7, 6, 8) if bits == 4 else (6, 7, 8)
    tiles = integers.view(lines, rows // 64, 4, 2, 4, 4, 2, 2, 2).permute(1, 2, 3, halves[0], 5, 0, halves[2], 4, halves[1])
    values = tiles.reshape(rows, cols // 2)
    values = values.view(torch.int8) - 8 if bits == 4 else (values ^ 128).view(torch.int8)
    # 64 rows by 2 words: bit 1 of the row, bits 3 to 5, bit 0, bit 0 of the column, bit 2 of the row
    words = meta.reshape(lines, rows // 64, 2, 8, 2, 2, 2).permute(1, 3, 6, 2, 4, 0, 5).reshape(rows, cols // 16)
    indices = words.contiguous().view(torch.uint8)
    if not _WHOLE[indices.numpy()].all():
        raise damaged(name, "the positions of a group of four in its meta do not increase; the file is damaged")
    if groups > 1 and cols // 2 > 128:
        scale = scale.reshape(groups, rows // 8, 4, 2).transpose(2, 3).reshape(groups, rows)
    by_row = scale.t().contiguous()
    return Foreign(name, values, indices, Pattern("2:4"), (rows, cols), *_scaled(name, values, by_row, rows, cols, bits))


def masked(name: str, weight: Tensor, pattern: Pattern, scale: Tensor | None = None) -> Foreign:
    """A dense weight ``(out, in)`` whose zeros are ``pattern``."""
    (rows, cols), wide = weight.shape, torch.float32 if weight.dtype in SCALED else weight.dtype
    each = max(1, PIECE // max(1, cols))
    parts = [ops.compress(weight[i : i + each].to(wide), pattern) for i in range(0, rows, each)]
    values = torch.cat([part.values.to(weight.dtype) for part in parts])
    indices = torch.cat([part.indices for part in parts])
    return Foreign(name, values, indices, pattern, (rows, cols), *_scaled(name, values, scale, rows, cols))


def _scaled(name: str, values: Tensor, scale: Tensor | None, rows: int, cols: int, bits: int = 8) -> tuple[int, Tensor | None]:
    """(bits of integers, the scales ``(out, steps)``) of ``values``; a scale of others was used in training only."""
    if values.dtype in FLOATS:
        return 0, None
    if values.dtype not in SCALED:
        raise damaged(name, f"its values are {values.dtype}; floating point, int8 and float8 are known")
    if scale is None:
        raise damaged(name, f"its values are {values.dtype}, and the files lack its weight_scale")
    if not scale.is_floating_point() or not bool(scale.float().isfinite().all()):
        raise damaged(
            name, "a scale is NaN or infinite; the file is damaged" if scale.is_floating_point() else f"its scales are {scale.dtype}"
        )
    wide: Tensor = scale.reshape(1, 1).expand(rows, 1) if scale.numel() == 1 else scale.unsqueeze(-1) if scale.dim() == 1 else scale
    steps = wide.shape[1] if wide.dim() == 2 else 0
    if not steps or wide.shape[0] != rows or (steps > 1 and cols % (4 * steps)):
        raise damaged(
            name,
            f"its scales have shape {tuple(scale.shape)}; for {rows} rows of {cols} columns they are (1,), ({rows}, 1) or more per row",
        )
    return bits if values.dtype == torch.int8 else 0, wide.contiguous()
