"""``doctor --verify``: check every kernel against the reference, with sizes of real layers and with those of the check at first use.

The results are recorded: kernels that are wrong are switched off on this machine; those that are right are switched on again if they were
off, and are not checked again at first use.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..dispatch import Impl, implementations
from ..ops import verify
from ..ops.small import small
from ..reference.adamw import bits_of
from ..reference.layouts import EIGHT_BIT, WARPS
from ..reference.quantize import scale_for

SIZES = {"cpu": (512, 1024), "cuda": (1024, 4096)}
"""Rows and columns of the weights, by device: multiples of the tiles of every layout."""

DTYPES = torch.float32, torch.bfloat16, torch.float16
PATTERNS = (2, 4), (1, 4), (1, 8), (4, 8), (3, 5)
TOKENS = 1, 3, 8, 13, 64, 333
LAYOUTS = [name for name in WARPS if name != EIGHT_BIT]
EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e4m3fn), (torch.float8_e5m2, torch.float8_e4m3fn), (torch.int8, torch.int8)
"""Dtypes of x and of the weight."""

Call = tuple[str, tuple[Any, ...]]


def run(device: torch.device, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Check every call on every backend that can run it; one dict per check. ``say`` is called with a line for each op and backend."""
    checks: list[dict[str, Any]] = []
    worst: dict[str, str] = {}
    grouped: dict[str, list[tuple[Any, ...]]] = {}
    for op, args in calls(*SIZES[device.type]):
        grouped.setdefault(op, []).append(args)
    for op, calls_of_op in grouped.items():
        start, rows = time.perf_counter(), len(checks)
        hosts: list[tuple[int, ...]] = [(), tuple(verify.HOST[op])] if op in verify.HOST and device.type != "cpu" else [()]
        for args, on_host in product(calls_of_op, hosts):
            on_device = verify.placed(args, device, on_host)
            entries = [i for i in implementations(op) if verify.concerned(i, device) and i.can(*on_device)[0]]
            truths = [verify.truth(op, args), verify.truth(op, small(op, args))] if entries else []
            for entry in entries:
                name = verify.family(entry, on_device)
                call, wrong = _first_wrong(entry, truths, device, on_host)
                worst[name] = worst.get(name) or wrong
                checks.append({"op": op, "backend": entry.backend, "call": call, "wrong": wrong})
        verify.record(worst)
        for backend in dict.fromkeys(row["backend"] for row in checks[rows:]):
            own = [row for row in checks[rows:] if row["backend"] == backend]
            bad = [row for row in own if row["wrong"]]
            seconds = time.perf_counter() - start
            say(f"  {op:<24}{backend:<12}{len(own) - len(bad):>4} of {len(own):>3} calls right  ({seconds:.1f} s)")
            for row in bad:
                say(f"    WRONG: {row['call']}: {row['wrong']}")
    return checks


def _first_wrong(entry: Impl, truths: list[verify.Truth], device: torch.device, on_host: tuple[int, ...]) -> tuple[str, str]:
    """(call, problem) of the first call with a wrong result; (the first call, "") if all are right."""
    for true in truths:
        if entry.can(*verify.placed(true.args, device, on_host))[0]:
            wrong = verify.examine(entry, true, device, on_host)
            if wrong:
                return verify.words(true.op, true.args), wrong
    return verify.words(truths[0].op, truths[0].args), ""


def calls(rows: int, cols: int) -> Iterator[Call]:
    """Calls of every op in its dtypes, patterns, layouts and options, on the CPU."""
    gen = torch.Generator().manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=gen, dtype=torch.float32, device="cpu").to(dtype)

    for dtype in DTYPES:
        w = normal(rows, cols, dtype=dtype)
        yield from _of_weights(w)
        yield from _of_gemms(w, partial(normal, dtype=dtype))
        yield from _of_optimizers(dtype, normal, rows, cols)
        yield from _of_integers(w, partial(normal, dtype=dtype))
    yield from _of_8_bits(normal, rows, cols)


def _of_weights(w: Tensor) -> Iterator[Call]:
    """Masks, thresholds, compression, estimates."""
    seed = torch.tensor([7, 3], device="cpu")
    for n, m in PATTERNS:
        x = w[:, : w.shape[1] // m * m].contiguous()
        yield from ((op, (x, n, m)) for op in ("nm_mask", "nm_prune", "nm_soft_threshold", "nm_soft_threshold_scale"))
        yield from (("nm_compress", (x, n, m, mask)) for mask in (None, reference.mask(x, n, m)))
        yield "nm_decompress", (*reference.compress(x, n, m), n, m, x.shape[1])
        yield from ((op, (w, n, m, 0, seed, "exact")) for op in ("nm_mvue", "nm_mvue_compress"))
    yield from ((op, (w, 2, 4, 1, seed, how)) for op, how in product(("nm_mvue", "nm_mvue_compress"), ("exact", "approx")))
    for layout in LAYOUTS if w.dtype.itemsize == 2 else ():
        yield "nm_mvue_compress", (w.t().contiguous(), 2, 4, 0, seed, "exact", layout)
    yield "nm_transposable_mask", (w, 2, 4)
    scale, kept = reference.soft_threshold_scale(w, 2, 4), reference.transposable_mask(w, 2, 4)
    for layout in ("canonical", *LAYOUTS):
        to = None if layout == "canonical" else w.dtype if w.dtype.itemsize == 2 else torch.bfloat16
        yield "nm_pack", (w, 2, 4, "magnitude", None, None, to, True, False, layout)
        yield "nm_pack", (w, 2, 4, "threshold", None, scale, to, True, False, layout)
        yield "nm_pack", (w, 2, 4, "transposable", None, None, to, True, True, layout)
        yield "nm_pack", (w, 2, 4, "given", kept, None, to, True, True, layout)
        yield "nm_pack", (w, 2, 4, "magnitude", None, None, to, True, False, layout, True)
        if to is not None:
            yield "nm_metadata", (reference.compress(w, 2, 4)[1], w.shape[1], layout)


def _of_gemms(w: Tensor, normal: Callable[..., Tensor]) -> Iterator[Call]:
    rows, cols = w.shape
    operands: list[tuple[Any, ...]] = [(*reference.compress(w[:, : cols // m * m], n, m), n, m, cols // m * m) for n, m in PATTERNS]
    if w.dtype.itemsize == 2:
        values, indices = operands[0][:2]
        operands += [(values, reference.to_layout(indices, cols, layout), 2, 4, cols) for layout in LAYOUTS]
    bias = normal(rows)
    for operand, tokens in product(operands, TOKENS):
        yield "nm_linear", (normal(tokens, operand[4]), *operand, bias)
        if operand[1].dtype == torch.uint8:
            yield "nm_linear_dgrad", (normal(tokens, rows), *operand)
    for operand, activation, tokens in product(operands[:1] + operands[len(PATTERNS) :], ("gelu", "silu", "relu2"), (1, 8, 64)):
        yield "nm_linear", (normal(tokens, cols), *operand, bias, activation, normal(tokens, rows))
    for operand, width in product(operands, (128, 104)):
        yield "nm_linear_wgrad", (*operand, normal(operand[4], width))
        if w.dtype.itemsize == 2:
            yield "nm_linear_wgrad", (*operand, normal(operand[4], width), torch.float32)


def _of_integers(w: Tensor, normal: Callable[..., Tensor]) -> Iterator[Call]:
    """Integers as values, with one step per row and with several."""
    rows = w.shape[0]
    bias = normal(rows)
    for (n, m), bits in product(PATTERNS, (8, 4)):
        cols = w.shape[1] // (2 * m) * 2 * m
        values, indices = reference.compress(w[:, :cols], n, m)
        for steps in (1, 2):
            yield "nm_quantize_values", (values, bits, steps)
            integers, step = reference.quantize_values(values, bits, steps)
            yield "nm_dequantize_values", (integers, step, values.shape[1], w.dtype)
            for tokens in (1, 4, 16, 64):
                yield "nm_linear_integers", (normal(tokens, cols), integers, indices, step, n, m, cols, bias)


def _of_optimizers(dtype: torch.dtype, normal: Callable[..., Tensor], rows: int, cols: int) -> Iterator[Call]:
    shape = rows, cols
    hyper = torch.tensor([1e-3, 0.9, 0.999, 1e-8, 0.1, 2e-4, 5.0, 0.0, 0.0], dtype=torch.float64, device="cpu")

    def call(n: int, m: int, *flags: Any, largest: bool = False, states: torch.dtype = torch.float32) -> Call:
        p, g, state = normal(*shape, dtype=dtype), normal(*shape, dtype=dtype), normal(*shape)
        moments = [[x.to(states)] for x in (state, state.square(), state.square() + 0.1)]
        lists = [p], [g], *moments[:2], moments[2] if largest else [], [torch.full((), 4.0, dtype=torch.float32)]
        return "nm_masked_adamw_", (*lists, hyper, n, m, *flags)

    usual = False, False, False, False, None, None
    yield call(0, 0, *usual)
    yield call(0, 0, *usual, largest=True)
    yield call(0, 0, True, True, True, True, torch.full((1,), 8.0, dtype=torch.float32), torch.zeros(1, dtype=torch.float32))
    for n, m in PATTERNS[:-1]:
        yield call(n, m, *usual)
    bits = bits_of(normal(*shape) > 0)
    for fixed in (False, True):
        yield call(0, 0, *usual, [bits], fixed)
    for stochastic in (False, True):
        yield call(2, 4, *usual, None, False, stochastic, 5, largest=True, states=torch.bfloat16)
    if dtype == torch.float32:
        yield from _of_steps_that_pack(call, usual)


def _of_steps_that_pack(call: Callable[..., Call], usual: tuple[Any, ...]) -> Iterator[Call]:
    """Every rule, alone and with the form that dgrad reads."""
    scale = torch.full((), 1.37, dtype=torch.float32, device="cpu")
    for select, back, layout in product(("magnitude", "threshold", "held"), (False, True), ("canonical", *LAYOUTS)):
        held = select == "held"
        _, step = call(0, 0, *usual) if held else call(2, 4, *usual)
        kept = reference.transposable_mask(step[0][0], 2, 4)
        parts = reference.pack(step[0][0], 2, 4, "held", kept, None, torch.bfloat16, True, back and held, layout, back and not held)
        lists = [[part] if part.numel() else [] for part in parts]
        scales = [scale] if select == "threshold" else []
        yield "nm_masked_adamw_pack_", (2, 4, select, layout, scales, *lists, *step, [bits_of(kept)] if held else None, False)


def _of_8_bits(normal: Callable[..., Tensor], rows: int, cols: int) -> Iterator[Call]:
    w, tokens = normal(rows, cols), 64
    for (dense, sparse), by_row in product(EIGHT_BITS, (False, True)):
        x = normal(tokens, cols)
        scale, scale_w = scale_for(x, dense, by_row), scale_for(w, sparse, by_row)
        yield from (
            ("nm_quantize", (x, scale if not turned else scale_for(x.t(), dense, by_row), dense, turned)) for turned in (False, True)
        )
        yield "nm_quantize_pack", (w, scale_w, sparse)
        packed = *reference.quantize_pack(w, scale_w, sparse), 1.0 / scale_w
        for turned, fast in product((False, True), (False, True)):
            eight = reference.quantize(x, scale, dense), 1.0 / scale
            yield "nm_linear_quantized", (*eight, *packed, None, torch.bfloat16, turned, fast)
