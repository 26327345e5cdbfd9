"""Integers with steps, against loops over single weights."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from nmkernels import ops, reference
from nmkernels.pattern import DtypeError, OptionError, ShapeError
from python_tests.for_each import for_each


def fp32(x: float) -> float:
    return torch.tensor(x, dtype=torch.float64).float().item()


def bf16(x: float) -> float:
    return torch.tensor(x, dtype=torch.float32).bfloat16().item()


def by_hand(run: list[float], bits: int) -> tuple[list[int], float]:
    """One run of weights, by the definition; every operation is rounded to fp32."""
    size = max(map(abs, run), default=0.0)
    if size == 0:
        return [0] * len(run), 0.0
    low, high = (-127, 127) if bits == 8 else (-8, 7)

    def rounded(step: float) -> list[int]:
        return [0 if step == 0 else max(low, min(high, round(fp32(w / step)))) for w in run]

    if bits == 8:
        step = bf16(fp32(size / 127))
        return rounded(step), step
    first = next(w for w in run if abs(w) == size)
    factors = [fp32(f / 40) for f in range(20, 43)], [fp32(f / 40) for f in range(24, 43)]
    steps = [bf16(fp32(fp32(size * f) / 7)) for f in factors[0]] + [bf16(fp32(fp32(-first * f) / 8)) for f in factors[1]]
    best, least = steps[0], math.inf
    for step in steps:
        error = 0.0
        for w, q in zip(run, rounded(step), strict=True):
            d = fp32(w - q * step)
            error = fp32(error + fp32(d * d))
        if error < least:
            best, least = step, error
    return rounded(best), best


@for_each("bits, steps", itertools.product((8, 4), (1, 3)))
def test_rounding_is_its_definition(bits: int, steps: int) -> None:
    torch.manual_seed(bits + steps)
    values = torch.cat([torch.randn(5, 12), torch.randn(3, 12) * 1e-3, torch.randint(-4, 5, (4, 12)).float(), torch.zeros(1, 12)])
    stored, step = reference.quantize_values(values, bits, steps)
    integers = reference.unpack_integers(stored, 12)
    for row, got, used in zip(values.tolist(), integers.tolist(), step.tolist(), strict=True):
        wanted = [by_hand(row[i : i + 12 // steps], bits) for i in range(0, 12, 12 // steps)]
        assert got == [q for run, _ in wanted for q in run] and used == [s for _, s in wanted]


def test_values_that_are_not_finite() -> None:
    values = torch.tensor([[1.0, torch.nan, 2.0, 3.0], [torch.inf, 1.0, 2.0, -3.0]])
    for bits in (8, 4):
        stored, step = reference.quantize_values(values, bits, 2)
        assert step.isnan().tolist() == [[True, False], [True, False]]
        assert reference.unpack_integers(stored, 4)[:, :2].eq(0).all() and reference.unpack_integers(stored, 4)[:, 2:].ne(0).all()


def test_four_bits_are_packed_low_half_first() -> None:
    integers = torch.tensor([[-8, 7, -1]], dtype=torch.int8)
    stored = reference.pack_integers(integers, 4)
    assert stored.tolist() == [[0x78, 0x0F]]
    assert torch.equal(reference.unpack_integers(stored, 3), integers)


@for_each(
    "values, group, pattern", [("int8", None, "2:4"), ("int8", 32, "1:4"), ("int4", None, "2:4"), ("int4", 64, "1:8"), ("int4", 0, "4:8")]
)
def test_the_weight_is_near_and_the_product_is_its(values: str, group: int | None, pattern: str) -> None:
    torch.manual_seed(0)
    c = ops.compress(torch.randn(16, 256), pattern)
    q = ops.quantize_values(c, values, group)
    error = float((q.dense() - c.dense()).norm() / c.dense().norm())
    assert 1e-4 < error < (0.01 if values == "int8" else 0.1)
    assert q.indices is c.indices and q.kind == values
    x = torch.randn(3, 256)
    torch.testing.assert_close(ops.linear(x, q), x @ q.dense().T)
    torch.testing.assert_close(ops.linear(x.bfloat16(), q), (x.bfloat16().float() @ q.dense().T).bfloat16())
    torch.testing.assert_close(ops.linear_dgrad(x[:, :16], q), x[:, :16] @ q.dense())
    assert torch.equal(ops.dequantize_values(q, torch.float16).dense(), q.dense(torch.float16))


def test_the_group_that_fits() -> None:
    def group(cols: int, m: int, values: str = "int4") -> int:
        return ops.quantize_values(ops.compress(torch.randn(2, cols), f"1:{m}"), values).group

    assert (group(256, 4), group(192, 4), group(96, 4), group(72, 4), group(256, 256), group(256, 4, "int8")) == (128, 64, 32, 0, 0, 0)


def test_refusals() -> None:
    c = ops.compress(torch.randn(4, 64), "2:4")
    q = ops.quantize_values(c)
    with pytest.raises(OptionError, match="group=24 does not divide 64 columns into whole groups of M=4"):
        ops.quantize_values(c, "int4", 24)
    with pytest.raises(OptionError, match="'int3' is unknown"):
        ops.quantize_values(c, "int3")
    with pytest.raises(DtypeError, match="must be float16"):
        ops.quantize_values(q)
    with pytest.raises(ShapeError, match="steps have shape"):
        ops.Compressed(q.values, q.indices, "2:4", (4, 64), q.step.expand(4, 3))
    with pytest.raises(DtypeError, match="bfloat16 steps"):
        ops.Compressed(q.values, q.indices, "2:4", (4, 64), q.step.float())
    with pytest.raises(DtypeError):
        ops.Compressed(q.values, q.indices, "2:4", (4, 64))
