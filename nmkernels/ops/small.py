"""Make a small call like a given one: same dtypes, pattern, layout and options, with sizes divisible by the same powers of two.

One function per op makes the small call's arguments, on the CPU and deterministically, from those of the given call. They are valid
whenever the given ones are, and a backend runs both with the same kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..reference.adamw import AdamWArgs, bits_of
from ..reference.adamw_pack import split
from ..reference.common import compute_dtype
from ..reference.compress import compress
from ..reference.integers import quantize_values
from ..reference.layouts import layout_of, to_layout
from ..reference.mask import mask as largest
from ..reference.mask import soft_threshold_scale
from ..reference.pack import pack
from ..reference.quantize import quantize, quantize_pack, scale_for
from ..reference.transposable import transposable_mask

ABOUT = 128
"""Approximate size of a dimension: small enough for a millisecond, large enough for a full and a partial tile of every kernel."""

MOST_PARAMS = 8
"""Most kinds of params from one optimizer step."""

Args = tuple[Any, ...]


@contextmanager
def alone() -> Iterator[None]:
    """Create plain tensors, unaffected by inference mode, torch function modes, default device or autocast."""
    with torch.inference_mode(False), torch.no_grad(), torch._C._DisableAutocast(), torch._C.DisableTorchFunction():
        yield


def small(op: str, args: Sequence[Any]) -> Args:
    """Arguments of a small call like ``op(*args)``; does not use torch's global generators."""
    with alone():
        return SMALL[op](_Draw(), *args)


def transposed(x: Tensor) -> bool:
    """Whether a matrix is stored transposed."""
    return x.dim() == 2 and not x.is_contiguous() and x.t().is_contiguous()


class _Draw:
    """Draws random numbers, some of them zero or equal."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Random tensor with ``like``'s dtype, stored transposed if ``like`` is."""
        x = torch.randn(math.prod(shape), generator=self.generator, dtype=torch.float32, device="cpu")
        x[::7] = 0.0
        x[1::5] = (4 * x[1::5]).round() / 4
        x = x.to(dtype or like.dtype)
        return x.view(shape[::-1]).t() if len(shape) == 2 and transposed(like) else x.view(shape)


def _size(size: int, m: int = 1) -> int:
    """A size near ``ABOUT``, divisible by the same powers of two up to that, and by M if ``size`` is."""
    unit = math.gcd(size, ABOUT)
    unit = unit if size % m else math.lcm(unit, m)
    return unit * (-(-ABOUT // unit) | 1)


def _tokens(count: int) -> int:
    """The fewest tokens that run the same kernel: some kernels take up to 4 or 16, some 8 at a time."""
    if count <= 4:
        return max(1, count)
    whole = count % 8 == 0
    return (8 if whole else 13) if count <= 16 else 64 if whole else 45


def _matrix(w: Tensor, m: int, both: bool = False, n: int = 2) -> tuple[int, int]:
    """A weight's shape; with ``both`` its columns are grouped too, and two tiles suffice if that is a matching problem."""
    if both and (n, m) != (2, 4):
        return m, 2 * m
    cols = w.shape[-1] if w.dim() else 1
    return _size(w.numel() // cols if cols else 0, m if both else 1), _size(cols, m)


def _packed(draw: _Draw, values: Tensor, indices: Tensor, n: int, m: int, cols: int) -> tuple[Tensor, Tensor, int]:
    """A compressed operand in the given one's layout, and its number of dense columns; the last group may be partial."""
    rows, width = _size(values.shape[:-1].numel()), _size(cols, m)
    whole = -(-width // m) * m
    kept, positions = compress(draw(values.new_empty(0), rows, whole), n, m)
    return kept, to_layout(positions, whole, layout_of(indices)), width


def _of_groups(draw: _Draw, w: Tensor, n: int, m: int) -> Args:
    return draw(w, *_matrix(w, m)), n, m


def _of_tiles(draw: _Draw, w: Tensor, n: int, m: int) -> Args:
    return draw(w, *_matrix(w, m, True, n)), n, m


def _compress(draw: _Draw, w: Tensor, n: int, m: int, mask: Tensor | None = None) -> Args:
    x = draw(w, *_matrix(w, m))
    return x, n, m, None if mask is None else largest(x, n, m)


def _decompress(draw: _Draw, values: Tensor, indices: Tensor, n: int, m: int, cols: int) -> Args:
    kept, positions, width = _packed(draw, values, indices, n, m, cols)
    return kept, positions, n, m, width


def _pack(
    draw: _Draw, w: Tensor, n: int, m: int, select: str, mask: Tensor | None, scale: Tensor | None,
    dtype: torch.dtype | None, rows: bool, columns: bool, layout: str, dense: bool = False,
) -> Args:  # fmt: skip
    x = draw(w, *_matrix(w, m, select == "transposable" or columns, n))
    if mask is not None:
        mask = largest(x.t(), n, m).t() if not (rows or dense) else transposable_mask(x, n, m) if columns else largest(x, n, m)
    if scale is not None:
        scale = soft_threshold_scale(x, n, m).reshape(scale.shape)
    return x, n, m, select, mask, scale, dtype, rows, columns, layout, dense


def _metadata(draw: _Draw, indices: Tensor, cols: int, layout: str) -> Args:
    width = _size(cols)
    return compress(draw(indices, _size(indices.shape[0]), width, dtype=torch.float32), 2, 4)[1], width, layout


def _linear(
    draw: _Draw, x: Tensor, values: Tensor, indices: Tensor, n: int, m: int, cols: int, bias: Tensor | None = None, activation: str = "",
    residual: Tensor | None = None,
) -> Args:  # fmt: skip
    kept, positions, width = _packed(draw, values, indices, n, m, cols)
    tokens, rows = _tokens(x.numel() // cols if cols else 0), kept.shape[0]
    more = None if bias is None else draw(bias, rows), activation, None if residual is None else draw(residual, tokens, rows)
    return draw(x, tokens, width), kept, positions, n, m, width, *more


def _linear_dgrad(draw: _Draw, g: Tensor, values: Tensor, indices: Tensor, n: int, m: int, cols: int) -> Args:
    kept, positions, width = _packed(draw, values, indices, n, m, cols)
    rows = values.shape[0]
    return draw(g, _tokens(g.numel() // rows if rows else 0), kept.shape[0]), kept, positions, n, m, width


def _linear_wgrad(
    draw: _Draw, values: Tensor, indices: Tensor, n: int, m: int, cols: int, x: Tensor, out_dtype: torch.dtype | None = None
) -> Args:
    kept, positions, width = _packed(draw, values, indices, n, m, cols)
    return kept, positions, n, m, width, draw(x, width, _size(x.shape[1])), out_dtype


def _mvue(draw: _Draw, g: Tensor, n: int, m: int, dim: int, seed: Tensor, method: str) -> Args:
    dim %= g.dim()
    before, after = g.shape[:dim].numel(), g.shape[dim + 1 :].numel()
    shape = [_size(g.shape[dim], m)]
    if dim < g.dim() - 1:
        shape.append(_size(after))
    if before > 1 or len(shape) == 1:
        shape.insert(0, _size(before) if len(shape) == 1 else 3)
    seed = torch.tensor([7, 3], dtype=torch.int64, device="cpu")
    return draw(g, *shape), n, m, len(shape) - (1 if dim == g.dim() - 1 else 2), seed, method


def _mvue_compress(draw: _Draw, g: Tensor, n: int, m: int, dim: int, seed: Tensor, method: str, layout: str = "canonical") -> Args:
    return *_mvue(draw, g, n, m, dim, seed, method), layout


def _quantize(draw: _Draw, x: Tensor, scale: Tensor, dtype: torch.dtype, transposed: bool) -> Args:
    y = draw(x, _size(x.shape[0]), _size(x.shape[1]))
    return y, _scale(y.t() if transposed else y, dtype, scale), dtype, transposed


def _quantize_pack(draw: _Draw, w: Tensor, scale: Tensor, dtype: torch.dtype) -> Args:
    y = draw(w, _size(w.shape[0]), _size(w.shape[1]))
    return y, _scale(y, dtype, scale), dtype


def _scale(x: Tensor, dtype: torch.dtype, like: Tensor) -> Tensor:
    """One scale per row if ``like`` has several."""
    rows = like.numel() > 1
    return scale_for(x, dtype, rows) if rows else scale_for(x, dtype).reshape(like.shape)


def _linear_quantized(
    draw: _Draw, x: Tensor, x_step: Tensor, values: Tensor, meta: Tensor, step: Tensor, bias: Tensor | None, dtype: torch.dtype,
    transposed: bool, fast: bool,
) -> Args:  # fmt: skip
    cols = _size(x.shape[1])
    y, w = (draw(x, _size(high), cols, dtype=torch.float32) for high in (x.shape[0], values.shape[0]))
    scale, scale_w = _scale(y, x.dtype, x_step), _scale(w, values.dtype, step)
    packed = *quantize_pack(w, scale_w, values.dtype), 1.0 / scale_w
    b = None if bias is None else draw(bias, w.shape[0])
    return quantize(y, scale, x.dtype), 1.0 / scale, *packed, b, dtype, transposed, fast


def _quantize_values(draw: _Draw, values: Tensor, bits: int, steps: int) -> Args:
    rows, cols = _size(values.shape[:-1].numel()), values.shape[-1]
    return draw(values, rows, _size(cols)) if steps == 1 else draw(values, rows, 3 * (cols // steps)), bits, 1 if steps == 1 else 3


def _dequantize_values(draw: _Draw, values: Tensor, step: Tensor, kept: int, dtype: torch.dtype) -> Args:
    steps = step.shape[-1]
    bits = 8 if values.dtype == torch.int8 else 4
    w, _, steps = _quantize_values(draw, step.new_empty(*values.shape[:-1], kept, dtype=torch.float32), bits, steps)
    return *quantize_values(w, bits, steps), w.shape[-1], dtype


def _linear_integers(
    draw: _Draw, x: Tensor, values: Tensor, indices: Tensor, step: Tensor, n: int, m: int, cols: int, bias: Tensor | None = None,
    activation: str = "", residual: Tensor | None = None,
) -> Args:  # fmt: skip
    steps = step.shape[-1]
    width = _size(cols, m) if steps == 1 else 3 * (cols // steps)
    whole = -(-width // m) * m
    kept, positions = compress(draw(x.new_empty(0), _size(values.shape[0]), whole, dtype=torch.float32), n, m)
    integers, step = quantize_values(kept, 8 if values.dtype == torch.int8 else 4, 1 if steps == 1 else 3)
    tokens, rows = _tokens(x.numel() // cols if cols else 0), kept.shape[0]
    more = None if bias is None else draw(bias, rows), activation, None if residual is None else draw(residual, tokens, rows)
    return draw(x, tokens, width), integers, positions, step, n, m, width, *more


def _masked_adamw(draw: _Draw, *args: Any) -> Args:
    a, kinds = AdamWArgs(*args), dict[Any, tuple[int, tuple[int, ...]]]()
    lists = [xs for xs in (a.params, a.grads, a.exp_avgs, a.exp_avg_sqs, a.max_exp_avg_sqs) if xs]
    for i, p in enumerate(a.params):
        shape: tuple[int, ...] = _matrix(p, a.m or 1, False, a.n)
        shape = shape if p.dim() > 1 else shape[1:] if p.dim() else (1,)
        kinds.setdefault((shape, *((xs[i].dtype, transposed(xs[i])) for xs in lists)), (i, shape))
    chosen = list(kinds.values())[:MOST_PARAMS]  # a step of hundreds of params has a few kinds

    def each(xs: Sequence[Tensor]) -> list[Tensor]:
        return [draw(xs[i], *shape) for i, shape in chosen] if xs else []

    def squares(xs: Sequence[Tensor]) -> list[Tensor]:
        return [x.abs() for x in each(xs)]

    def scalar(like: Tensor | None, number: float) -> Tensor | None:
        return None if like is None else torch.full(like.shape, number, dtype=torch.float32, device="cpu")

    hyper = torch.tensor([1e-3, 0.9, 0.999, 1e-8, 0.1, 2e-4, 5.0, 0.0, 0.0], dtype=torch.float64, device="cpu")
    return tuple(
        a._replace(
            params=each(a.params),
            grads=each(a.grads),
            exp_avgs=each(a.exp_avgs),
            exp_avg_sqs=squares(a.exp_avg_sqs),
            max_exp_avg_sqs=squares(a.max_exp_avg_sqs),
            steps=[torch.full(a.steps[i].shape, 4.0, dtype=torch.float32, device="cpu") for i, _ in chosen],
            hyper=hyper,
            grad_scale=scalar(a.grad_scale, 8.0),
            found_inf=scalar(a.found_inf, 0.0),
            masks=[bits_of(draw(a.params[i], *shape) > 0) for i, shape in chosen] if a.masks else None,
            seed=7 if a.stochastic else 0,  # any: it is no kind of call
        )
    )


def _masked_adamw_pack(draw: _Draw, *args: Any) -> Args:
    to, a = split(args)
    step = AdamWArgs(*_masked_adamw(draw, *a))
    if step.masks:  # N:M along rows and columns
        step = step._replace(masks=[bits_of(transposable_mask(draw(w, *w.shape), to.n, to.m)) for w in step.params])
    rows, columns, dense = (bool(part) for part in to.parts[::2])
    made = [pack(w, to.n, to.m, "magnitude", None, None, to.dtype, rows, False, to.layout, dense) for w in step.params]
    back = [pack(w.t(), to.n, to.m, "magnitude", None, None, to.dtype, columns, False, to.layout) for w in step.params]
    parts = zip(*((*along[:2], *down[:2], along[4]) for along, down in zip(made, back, strict=True)), strict=True)
    lists = [list(part) if wanted else [] for part, wanted in zip(parts, to.parts, strict=True)]
    scales = [torch.full((), 1.37, dtype=compute_dtype(w.dtype), device="cpu") for w in step.params] if to.scales else []
    return *to[:4], scales, *lists, *step


SMALL: dict[str, Callable[..., Args]] = {
    "nm_mask": _of_groups,
    "nm_prune": _of_groups,
    "nm_transposable_mask": _of_tiles,
    "nm_compress": _compress,
    "nm_decompress": _decompress,
    "nm_pack": _pack,
    "nm_metadata": _metadata,
    "nm_linear": _linear,
    "nm_linear_dgrad": _linear_dgrad,
    "nm_linear_wgrad": _linear_wgrad,
    "nm_soft_threshold": _of_groups,
    "nm_soft_threshold_scale": _of_groups,
    "nm_mvue": _mvue,
    "nm_mvue_compress": _mvue_compress,
    "nm_quantize": _quantize,
    "nm_quantize_pack": _quantize_pack,
    "nm_linear_quantized": _linear_quantized,
    "nm_quantize_values": _quantize_values,
    "nm_dequantize_values": _dequantize_values,
    "nm_linear_integers": _linear_integers,
    "nm_masked_adamw_": _masked_adamw,
    "nm_masked_adamw_pack_": _masked_adamw_pack,
}
"""Op → function that makes its small call."""
