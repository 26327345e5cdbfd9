"""The one table of calls of every op: in all dtypes, patterns, layouts and options that kernels tell apart.

``table`` lists the kinds of calls, their tensors on the meta device. ``made`` makes a call of a kind: valid arguments on the CPU, the same
ones every time. ``small`` makes a small call of the kind, or of the kind of any real call: same dtypes, pattern, layout and options, sizes
divisible by the same powers of two. It is valid whenever the given one is, and a backend runs both with the same kernel.

The check of a kernel at its first use, ``doctor``, ``doctor --verify``, ``bench.smoke`` and tests read it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..layouts import transposed
from ..pattern import Pattern
from ..reference.adamw import AdamWArgs, bits_of
from ..reference.adamw_pack import FormArgs, split
from ..reference.common import compute_dtype
from ..reference.compress import compress
from ..reference.integers import quantize_values
from ..reference.layouts import EIGHT_BIT, WARPS, index_dtype, layout_of, operand_shapes, to_layout
from ..reference.mask import mask as largest
from ..reference.mask import soft_threshold_scale
from ..reference.pack import pack
from ..reference.quantize import quantize, quantize_pack, scale_for
from ..reference.transposable import transposable_mask
from ..timing.modes import outside_modes

DTYPES = torch.float32, torch.bfloat16, torch.float16
PATTERNS = (2, 4), (1, 4), (1, 8), (4, 8), (3, 5)
TOKENS = 1, 3, 8, 13, 64, 333
LAYOUTS = tuple(name for name in WARPS if name != EIGHT_BIT)
EIGHT_BITS = (torch.int8, torch.int8), (torch.float8_e4m3fn, torch.float8_e4m3fn), (torch.float8_e5m2, torch.float8_e4m3fn)
"""Dtypes of x and of the weight."""
ESTIMATES = ("nm_mvue",), ("nm_mvue_compress", "canonical")

ABOUT = 128
"""Approximate size of a dimension of a small call: a millisecond's, with a full and a partial tile of every kernel."""

MOST_PARAMS = 8
"""Most kinds of params from one optimizer step."""

Args = tuple[Any, ...]


def made(op: str, args: Sequence[Any]) -> Args:
    """Arguments like those of ``op(*args)``, of a kind in the table; does not use torch's global generators."""
    with outside_modes():
        return MAKERS[op](Draw(), *args)


def small(op: str, args: Sequence[Any]) -> Args:
    """Arguments of a small call like ``op(*args)``; does not use torch's global generators."""
    with outside_modes():
        return MAKERS[op](Draw(small=True), *args)


def samples() -> dict[str, Args]:
    """A small call of every op; all together take well under a second."""
    return {op: small(op, kinds[0]) for op, kinds in table(64, 128, DTYPES[:1], PATTERNS[:1]).items()}


def hyper(lr: float = 1e-3, clamp: float = 0.0) -> Tensor:
    """Numbers of a step of ``nm_masked_adamw_``, no two equal."""
    return torch.tensor([lr, 0.9, 0.999, 1e-8, 0.1, 2e-4, 5.0, clamp, 0.0], dtype=torch.float64, device="cpu")


# ---- the table


def table(
    rows: int,
    cols: int,
    dtypes: Sequence[torch.dtype] = DTYPES,
    patterns: Sequence[tuple[int, int]] = PATTERNS,
    tokens: Sequence[int] = TOKENS,
    layouts: Sequence[str] = LAYOUTS,
) -> dict[str, list[Args]]:
    """The kinds of calls of every op, with weights ``(rows, cols)`` that the tiles of every layout divide; the first pattern is 2:4."""
    calls: dict[str, list[Args]] = {}

    def add(op: str, *args: Any) -> None:
        calls.setdefault(op, []).append(args)

    for dtype in dtypes:
        _weights(add, dtype, rows, cols, patterns, layouts)
        _gemms(add, dtype, rows, cols, patterns, layouts, tokens)
        _integers(add, dtype, rows, cols, patterns)
        _optimizers(add, dtype, rows, cols, patterns)
    _packing_steps(add, rows, cols, layouts)
    _eight_bits(add, rows, cols)
    return calls


def _empty(dtype: torch.dtype) -> Callable[..., Tensor]:
    return partial(torch.empty, dtype=dtype, device="meta")


def _weights(add: Callable[..., None], dtype: torch.dtype, rows: int, cols: int, patterns: Any, layouts: Sequence[str]) -> None:
    """Masks, thresholds, compression, estimates."""
    of, half = _empty(dtype), dtype.itemsize == 2
    w, one = of((rows, cols)), of(())
    for n, m in patterns:
        x = of((rows, cols // m * m))
        for op in ("nm_mask", "nm_prune", "nm_soft_threshold", "nm_soft_threshold_scale"):
            add(op, x, n, m)
        add("nm_compress", x, n, m)
        add("nm_compress", x, n, m, x)
        add("nm_decompress", *_operand(dtype, rows, cols, n, m))
        for op, *layout in ESTIMATES:
            add(op, w, n, m, 0, None, "exact", *layout)
    for (op, *layout), method in product(ESTIMATES, ("exact", "approx")):
        add(op, w, 2, 4, 1, None, method, *layout)
    for name in layouts if half else ():
        add("nm_mvue_compress", of((cols, rows)), 2, 4, 0, None, "exact", name)
    add("nm_transposable_mask", w, 2, 4)
    for name in ("canonical", *layouts):
        to = None if name == "canonical" else dtype if half else torch.bfloat16
        for select, mask, scale in (("magnitude", None, None), ("threshold", None, one), ("transposable", None, None), ("given", w, None)):
            add("nm_pack", w, 2, 4, select, mask, scale, to, True, select in ("transposable", "given"), name)
        add("nm_pack", w, 2, 4, "magnitude", None, None, to, True, False, name, True)
        if to is not None:
            add("nm_metadata", _operand(dtype, rows, cols, 2, 4)[1], cols, name)


def _operand(dtype: torch.dtype, rows: int, cols: int, n: int, m: int, layout: str = "canonical") -> Args:
    """A compressed matrix of whole groups, its pattern and its number of columns."""
    cols = cols // m * m
    values, indices = operand_shapes(Pattern(n, m), rows, cols, layout)
    return _empty(dtype)(values), _empty(index_dtype(layout))(indices), n, m, cols


def _gemms(
    add: Callable[..., None], dtype: torch.dtype, rows: int, cols: int, patterns: Any, layouts: Sequence[str], tokens: Sequence[int]
) -> None:
    of, half = _empty(dtype), dtype.itemsize == 2
    canonical = [_operand(dtype, rows, cols, n, m) for n, m in patterns]
    ordered = [_operand(dtype, rows, cols, 2, 4, layout) for layout in layouts if half]
    for operand, count in product((*canonical, *ordered), tokens):
        add("nm_linear", of((count, operand[4])), *operand, of((rows,)))
    for operand, count in product(canonical, tokens):
        add("nm_linear_dgrad", of((count, rows)), *operand)
    for operand, activation, count in product((canonical[0], *ordered), ("gelu", "silu", "relu2"), (1, 8, 64)):
        add("nm_linear", of((count, cols)), *operand, of((rows,)), activation, of((count, rows)))
    for operand, width, out in product((*canonical, *ordered), (128, 104), (None, torch.float32) if half else (None,)):
        add("nm_linear_wgrad", *operand, of((operand[4], width)), out)


def _integers(add: Callable[..., None], dtype: torch.dtype, rows: int, cols: int, patterns: Any) -> None:
    """Integers as values, with one step per row and with several."""
    of = _empty(dtype)
    for (n, m), bits, steps in product(patterns, (8, 4), (1, 2)):
        values, indices, *rest = _operand(dtype, rows, cols // (2 * m) * 2 * m, n, m)
        stored = values.shape[1]
        integers = _empty(torch.int8)((rows, stored)) if bits == 8 else _empty(torch.uint8)((rows, -(-stored // 2)))
        step = _empty(torch.float32)((rows, steps))
        add("nm_quantize_values", values, bits, steps)
        add("nm_dequantize_values", integers, step, stored, dtype)
        for count in (1, 4, 16, 64):
            add("nm_linear_integers", of((count, rest[2])), integers, indices, step, *rest, of((rows,)))


def _optimizers(add: Callable[..., None], dtype: torch.dtype, rows: int, cols: int, patterns: Any) -> None:
    step, state = _step(dtype, rows, cols), _empty(torch.float32)
    add("nm_masked_adamw_", *step)
    add("nm_masked_adamw_", *step._replace(max_exp_avg_sqs=step.exp_avgs))
    flags: dict[str, Any] = {"frozen": True, "eps_inside": True, "maximize": True, "geometric": True}
    add("nm_masked_adamw_", *step._replace(**flags, grad_scale=state((1,)), found_inf=state((1,))))
    for n, m in patterns:
        if cols % m == 0:
            add("nm_masked_adamw_", *step._replace(n=n, m=m))
    for fixed in (False, True):
        add("nm_masked_adamw_", *step._replace(masks=step.params, fixed=fixed))
    for stochastic in (False, True):
        states = _step(dtype, rows, cols, torch.bfloat16)
        add("nm_masked_adamw_", *states._replace(max_exp_avg_sqs=states.exp_avgs, n=2, m=4, stochastic=stochastic))


def _step(dtype: torch.dtype, rows: int, cols: int, states: torch.dtype = torch.float32) -> AdamWArgs:
    w, state, scalar = _empty(dtype)((rows, cols)), _empty(states)((rows, cols)), _empty(torch.float32)(())
    return AdamWArgs([w], [w], [state], [state], [], [scalar], scalar, 0, 0)


def _packing_steps(add: Callable[..., None], rows: int, cols: int, layouts: Sequence[str]) -> None:
    """Every rule, alone and with the form that dgrad reads."""
    step, part, scale = _step(torch.float32, rows, cols), [_empty(torch.bfloat16)(())], [_empty(torch.float32)(())]
    for select, back, layout in product(("magnitude", "threshold", "held"), (False, True), ("canonical", *layouts)):
        held, scales = select == "held", scale if select == "threshold" else []
        columns, dense = part if back and held else [], part if back and not held else []
        forms = FormArgs(2, 4, select, layout, scales, part, part, columns, columns, dense)
        add("nm_masked_adamw_pack_", *forms, *(step._replace(masks=step.params) if held else step._replace(n=2, m=4)))
        add("nm_pack_forms_", *forms, step.params, step.params if held else None)


def _eight_bits(add: Callable[..., None], rows: int, cols: int) -> None:
    w, x, of = _empty(torch.float32)((rows, cols)), _empty(torch.float32)((64, cols)), _empty(torch.float32)
    for (dense, sparse), by_row in product(EIGHT_BITS, (False, True)):
        scale = of((64,) if by_row else ())
        for transpose in (False, True):
            add("nm_quantize", x, scale, dense, transpose)
        add("nm_quantize_pack", w, scale, sparse)
        packed = _empty(sparse)((rows, cols // 2)), _empty(torch.int32)(()), scale
        for transpose, fast in product((False, True), (False, True)):
            add("nm_linear_quantized", _empty(dense)((64, cols)), scale, *packed, None, torch.bfloat16, transpose, fast)


# ---- calls of a kind


class Draw:
    """Draws the tensors of a call, in the sizes of the given ones or in ``small`` ones: random numbers, some of them zero or equal."""

    def __init__(self, small: bool = False, seed: int = 0) -> None:
        self.small, self.generator = small, torch.Generator().manual_seed(seed)

    def __call__(self, like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Random tensor with ``like``'s dtype, stored transposed if ``like`` is."""
        x = torch.randn(math.prod(shape), generator=self.generator, dtype=torch.float32, device="cpu")
        x[::7] = 0.0
        x[1::5] = (4 * x[1::5]).round() / 4
        x = x.to(dtype or like.dtype)
        return x.view(shape[::-1]).t() if len(shape) == 2 and transposed(like) else x.view(shape)

    def size(self, size: int, m: int = 1) -> int:
        """Small: near ``ABOUT``, divisible by the same powers of two up to that, and by M if ``size`` is."""
        unit = math.gcd(size, ABOUT)
        unit = unit if size % m else math.lcm(unit, m)
        return unit * (-(-ABOUT // unit) | 1) if self.small else size

    def tokens(self, count: int) -> int:
        """Small: the fewest that run the same kernel; some kernels take up to 4 or 16, some 8 at a time."""
        if not self.small or 0 < count <= 4:
            return count
        eights = count % 8 == 0
        return 1 if not count else (8 if eights else 13) if count <= 16 else 64 if eights else 45

    def groups(self, cols: int, steps: int, m: int = 1) -> tuple[int, int]:
        """Columns, and the steps that they share; small: one step, or three."""
        return (3 * (cols // steps), 3) if self.small and steps > 1 else (self.size(cols, m), steps)

    def matrix(self, w: Tensor, m: int, both: bool = False, n: int = 2) -> tuple[int, int]:
        """A weight's shape; ``both``: its columns are grouped too, and small, two tiles suffice if that is a matching problem."""
        if self.small and both and (n, m) != (2, 4):
            return m, 2 * m
        cols = w.shape[-1] if w.dim() else 1
        return self.size(w.numel() // cols if cols else 0, m if both else 1), self.size(cols, m)

    def packed(self, values: Tensor, indices: Tensor, n: int, m: int, cols: int) -> Args:
        """A compressed operand in the given one's layout, its pattern and its number of dense columns; the last group may be partial."""
        width = self.size(cols, m)
        drawn, positions = _compressed(self.size(values.shape[:-1].numel()), width, n, m, values.dtype)
        return drawn, to_layout(positions, -(-width // m) * m, layout_of(indices)), n, m, width

    def around(self, x: Tensor, cols: int, width: int, rows: int, bias: Tensor | None, activation: str, residual: Tensor | None) -> Args:
        """The input of a layer with ``width`` columns instead of ``cols``, and what its GEMM does to the result."""
        tokens = self.tokens(x.numel() // cols if cols else 0)
        more = None if bias is None else self(bias, rows), activation, None if residual is None else self(residual, tokens, rows)
        return self(x, tokens, width), *more


@lru_cache(maxsize=8)  # many calls multiply the same weight
def _compressed(rows: int, cols: int, n: int, m: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return compress(Draw(seed=1)(_empty(dtype)(0), rows, -(-cols // m) * m), n, m)


def _of_groups(draw: Draw, w: Tensor, n: int, m: int) -> Args:
    return draw(w, *draw.matrix(w, m)), n, m


def _of_tiles(draw: Draw, w: Tensor, n: int, m: int) -> Args:
    return draw(w, *draw.matrix(w, m, True, n)), n, m


def _compress(draw: Draw, w: Tensor, n: int, m: int, mask: Tensor | None = None) -> Args:
    x = draw(w, *draw.matrix(w, m))
    return x, n, m, None if mask is None else largest(x, n, m)


def _pack(
    draw: Draw, w: Tensor, n: int, m: int, select: str, mask: Tensor | None, scale: Tensor | None,
    dtype: torch.dtype | None, rows: bool, columns: bool, layout: str, dense: bool = False,
) -> Args:  # fmt: skip
    x = draw(w, *draw.matrix(w, m, select == "transposable" or columns, n))
    if mask is not None:
        mask = largest(x.t(), n, m).t() if not (rows or dense) else transposable_mask(x, n, m) if columns else largest(x, n, m)
    if scale is not None:
        scale = soft_threshold_scale(x, n, m).reshape(scale.shape)
    return x, n, m, select, mask, scale, dtype, rows, columns, layout, dense


def _metadata(draw: Draw, indices: Tensor, cols: int, layout: str) -> Args:
    width = draw.size(cols)
    return compress(draw(indices, draw.size(indices.shape[0]), width, dtype=torch.float32), 2, 4)[1], width, layout


def _linear(
    draw: Draw, x: Tensor, values: Tensor, indices: Tensor, n: int, m: int, cols: int, bias: Tensor | None = None, activation: str = "",
    residual: Tensor | None = None,
) -> Args:  # fmt: skip
    operand = draw.packed(values, indices, n, m, cols)
    x, *more = draw.around(x, cols, operand[4], len(operand[0]), bias, activation, residual)
    return x, *operand, *more


def _linear_dgrad(draw: Draw, g: Tensor, values: Tensor, *others: Any) -> Args:
    operand, rows = draw.packed(values, *others), values.shape[0]
    return draw(g, draw.tokens(g.numel() // rows if rows else 0), len(operand[0])), *operand


def _linear_wgrad(
    draw: Draw, values: Tensor, indices: Tensor, n: int, m: int, cols: int, x: Tensor, out_dtype: torch.dtype | None = None
) -> Args:
    operand = draw.packed(values, indices, n, m, cols)
    return *operand, draw(x, operand[4], draw.size(x.shape[1])), out_dtype


def _mvue(draw: Draw, g: Tensor, n: int, m: int, dim: int, seed: Tensor | None, method: str, *layout: str) -> Args:
    dim %= g.dim()
    before, after = g.shape[:dim].numel(), g.shape[dim + 1 :].numel()
    shape = [draw.size(g.shape[dim], m)]
    if dim < g.dim() - 1:
        shape.append(draw.size(after))
    if before > 1 or len(shape) == 1:
        shape.insert(0, draw.size(before) if len(shape) == 1 else 3)
    seed = torch.tensor([7, 3], dtype=torch.int64, device="cpu")
    return draw(g, *shape), n, m, len(shape) - (1 if dim == g.dim() - 1 else 2), seed, method, *layout


def _quantize(draw: Draw, x: Tensor, scale: Tensor, dtype: torch.dtype, transposed: bool) -> Args:
    y = draw(x, draw.size(x.shape[0]), draw.size(x.shape[1]))
    return y, _scale(y.t() if transposed else y, dtype, scale), dtype, transposed


def _quantize_pack(draw: Draw, w: Tensor, scale: Tensor, dtype: torch.dtype) -> Args:
    y = draw(w, draw.size(w.shape[0]), draw.size(w.shape[1]))
    return y, _scale(y, dtype, scale), dtype


def _scale(x: Tensor, dtype: torch.dtype, like: Tensor) -> Tensor:
    """One scale per row if ``like`` has several."""
    rows = like.numel() > 1
    return scale_for(x, dtype, rows) if rows else scale_for(x, dtype).reshape(like.shape)


def _linear_quantized(
    draw: Draw, x: Tensor, x_step: Tensor, values: Tensor, meta: Tensor, step: Tensor, bias: Tensor | None, dtype: torch.dtype,
    transposed: bool, fast: bool,
) -> Args:  # fmt: skip
    cols = draw.size(x.shape[1])
    y, w = (draw(x, draw.size(high), cols, dtype=torch.float32) for high in (x.shape[0], values.shape[0]))
    scale, scale_w = _scale(y, x.dtype, x_step), _scale(w, values.dtype, step)
    packed = *quantize_pack(w, scale_w, values.dtype), 1.0 / scale_w
    b = None if bias is None else draw(bias, w.shape[0])
    return quantize(y, scale, x.dtype), 1.0 / scale, *packed, b, dtype, transposed, fast


def _quantize_values(draw: Draw, values: Tensor, bits: int, steps: int) -> Args:
    cols, steps = draw.groups(values.shape[-1], steps)
    return draw(values, draw.size(values.shape[:-1].numel()), cols), bits, steps


def _dequantize_values(draw: Draw, values: Tensor, step: Tensor, kept: int, dtype: torch.dtype) -> Args:
    floats = step.new_empty(*values.shape[:-1], kept, dtype=torch.float32)
    w, *how = _quantize_values(draw, floats, 8 if values.dtype == torch.int8 else 4, step.shape[-1])
    return *quantize_values(w, *how), w.shape[-1], dtype


def _linear_integers(
    draw: Draw, x: Tensor, values: Tensor, indices: Tensor, step: Tensor, n: int, m: int, cols: int, bias: Tensor | None = None,
    activation: str = "", residual: Tensor | None = None,
) -> Args:  # fmt: skip
    width, steps = draw.groups(cols, step.shape[-1], m)
    drawn, positions = _compressed(draw.size(values.shape[0]), width, n, m, torch.float32)
    integers, step = quantize_values(drawn, 8 if values.dtype == torch.int8 else 4, steps)
    x, *more = draw.around(x, cols, width, drawn.shape[0], bias, activation, residual)
    positions = positions if m > 1 else positions[..., :0]  # dense integers have none
    return x, integers, positions, step, n, m, width, *more


def _masked_adamw(draw: Draw, *args: Any) -> Args:
    a, kinds = AdamWArgs(*args), dict[Any, tuple[int, tuple[int, ...]]]()
    lists = [xs for xs in (a.params, a.grads, a.exp_avgs, a.exp_avg_sqs, a.max_exp_avg_sqs) if xs]
    for i, p in enumerate(a.params):
        shape: tuple[int, ...] = draw.matrix(p, a.m or 1, False, a.n)
        shape = shape if p.dim() > 1 else shape[1:] if p.dim() else (1,)
        kinds.setdefault((shape, *((xs[i].dtype, transposed(xs[i])) for xs in lists)), (i, shape))
    chosen = list(kinds.values())[:MOST_PARAMS]  # a step of hundreds of params has a few kinds

    def each(xs: Sequence[Tensor]) -> list[Tensor]:
        return [draw(xs[i], *shape) for i, shape in chosen] if xs else []

    def squares(xs: Sequence[Tensor]) -> list[Tensor]:
        return [x.abs() for x in each(xs)]

    def scalar(like: Tensor | None, number: float) -> Tensor | None:
        return None if like is None else torch.full(like.shape, number, dtype=torch.float32, device="cpu")

    return tuple(
        a._replace(
            params=each(a.params),
            grads=each(a.grads),
            exp_avgs=each(a.exp_avgs),
            exp_avg_sqs=squares(a.exp_avg_sqs),
            max_exp_avg_sqs=squares(a.max_exp_avg_sqs),
            steps=[torch.full(a.steps[i].shape, 4.0, dtype=torch.float32, device="cpu") for i, _ in chosen],
            hyper=hyper(),
            grad_scale=scalar(a.grad_scale, 8.0),
            found_inf=scalar(a.found_inf, 0.0),
            masks=[bits_of(draw(a.params[i], *shape) > 0) for i, shape in chosen] if a.masks else None,
            seed=7 if a.stochastic else 0,  # any seed: it does not change the kind of call
        )
    )


def _masked_adamw_pack(draw: Draw, *args: Any) -> Args:
    to, a = split(args)
    step = AdamWArgs(*_masked_adamw(draw, *a))
    forms, masks = _forms(draw, to, step.params)
    return *forms, *step._replace(masks=masks)


def _pack_forms(draw: Draw, *args: Any) -> Args:
    to, weights = FormArgs(*args[:-2]), args[-2]
    chosen = [draw(w, *draw.matrix(w, to.m, True)) for w in weights[:MOST_PARAMS]]
    forms, masks = _forms(draw, to, chosen)
    return *forms, chosen, masks


def _forms(draw: Draw, to: FormArgs, weights: Sequence[Tensor]) -> tuple[FormArgs, list[Tensor] | None]:
    """Forms to be overwritten, and for held masks such that are N:M along rows and columns."""
    rows, columns, dense = (bool(part) for part in to.parts[::2])
    made = [pack(w, to.n, to.m, "magnitude", None, None, to.dtype, rows, False, to.layout, dense) for w in weights]
    back = [pack(w.t(), to.n, to.m, "magnitude", None, None, to.dtype, columns, False, to.layout) for w in weights]
    parts = zip(*((*along[:2], *down[:2], along[4]) for along, down in zip(made, back, strict=True)), strict=True)
    lists = [list(part) if wanted else [] for part, wanted in zip(parts, to.parts, strict=True)]
    scales = [torch.full((), 1.37, dtype=compute_dtype(w.dtype), device="cpu") for w in weights] if to.scales else []
    masks = [bits_of(transposable_mask(draw(w, *w.shape), to.n, to.m)) for w in weights] if to.select == "held" else None
    return FormArgs(*to[:4], scales, *lists), masks


MAKERS: dict[str, Callable[..., Args]] = {
    "nm_mask": _of_groups,
    "nm_prune": _of_groups,
    "nm_transposable_mask": _of_tiles,
    "nm_compress": _compress,
    "nm_decompress": Draw.packed,
    "nm_pack": _pack,
    "nm_metadata": _metadata,
    "nm_linear": _linear,
    "nm_linear_dgrad": _linear_dgrad,
    "nm_linear_wgrad": _linear_wgrad,
    "nm_soft_threshold": _of_groups,
    "nm_soft_threshold_scale": _of_groups,
    "nm_mvue": _mvue,
    "nm_mvue_compress": _mvue,
    "nm_quantize": _quantize,
    "nm_quantize_pack": _quantize_pack,
    "nm_linear_quantized": _linear_quantized,
    "nm_quantize_values": _quantize_values,
    "nm_dequantize_values": _dequantize_values,
    "nm_linear_integers": _linear_integers,
    "nm_masked_adamw_": _masked_adamw,
    "nm_masked_adamw_pack_": _masked_adamw_pack,
    "nm_pack_forms_": _pack_forms,
}
"""Op → function that makes a call like a given one."""
