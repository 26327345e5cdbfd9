"""8-bit tensors by hand: every number of a grid and what lies between two, scales, packing, the GEMM."""

import itertools

import pytest
import torch

from nmkernels import NMError, ops, reference
from nmkernels.reference.quantize import LARGEST, rounded, scale_for
from python_tests.for_each import for_each

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
INF, NAN = float("inf"), float("nan")
GRIDS = {E4M3: (4, 3, 7, 448.0), E5M2: (5, 2, 15, 57344.0)}


def grid(dtype):
    """Every finite number of the format, from its exponent, mantissa and bias, in order."""
    exponents, mantissa, bias, largest = GRIDS[dtype]
    numbers = {0.0}
    for e in range(1 << exponents):
        for f in range(1 << mantissa):
            x = f * 2.0 ** (1 - bias - mantissa) if e == 0 else (1 + f / (1 << mantissa)) * 2.0 ** (e - bias)
            numbers |= {x, -x} if x <= largest else set()
    return sorted(numbers)


@for_each("dtype", [E4M3, E5M2])
def test_nearest_and_ties_to_even(dtype):
    numbers = grid(dtype)
    assert rounded(torch.tensor(numbers), dtype).double().tolist() == numbers
    for low, high in itertools.pairwise(numbers):
        middle = (low + high) / 2
        below, tie, above = rounded(torch.tensor([middle - (high - low) / 8, middle, middle + (high - low) / 8]), dtype).double().tolist()
        even = [x for x in (low, high) if int(torch.tensor(x).to(dtype).view(torch.uint8)) % 2 == 0]
        assert (below, above) == (low, high) and tie == even[0], middle


@for_each("dtype", [E4M3, E5M2, torch.int8])
def test_what_is_beyond_the_largest_becomes_it(dtype):
    top = LARGEST[dtype]
    assert rounded(torch.tensor([2 * top, -1.5 * top, INF, -INF]), dtype).float().tolist() == [top, -top, top, -top]
    (odd,) = rounded(torch.tensor([NAN]), dtype).float().tolist()
    assert odd == 0 if dtype == torch.int8 else odd != odd


def test_int8_ties_to_even():
    assert rounded(torch.tensor([0.5, 1.5, -2.5, 126.5, 2.49]), torch.int8).tolist() == [0, 2, -2, 126, 2]


def test_scales():
    x = torch.tensor([[1.0, -2.0], [0.0, 0.0], [1e-45, 0.0], [INF, 1.0], [NAN, 1.0]])
    assert scale_for(x[:2], E4M3) == 224.0 and scale_for(torch.empty(0, 3), E4M3) == 1.0
    found = scale_for(x, E4M3, rows=True).tolist()
    assert found[:4] == [224.0, 1.0, 1.0, 0.0] and found[4] != found[4]
    assert not ops.quantize(x[3:4], E4M3).values.float()[0, 0].isfinite(), "not finite: NaN with an infinite step"


@for_each("rows", [False, True])
@for_each("dtype", list(LARGEST))
def test_quantize_and_pack(dtype, rows):
    """Back on the grid they are near; packed is the same as packing what is rounded, for a weight of few zeros."""
    w = torch.randn(64, 256) * torch.logspace(-2, 2, 64)[:, None]
    q, p = ops.quantize(w, dtype, rows=rows), ops.quantize_pack(w, dtype, rows=rows)
    step = q.step.reshape(-1, 1).expand(64, 1)
    error = (q.values.float() * step - w).abs()
    assert (error <= torch.maximum(w.abs() * 2.0**-3, step)).all() and torch.equal(q.step, p.step)
    turned = ops.quantize(w.t(), dtype, rows=rows, transposed=True)
    assert torch.equal(turned.values.view(torch.uint8), q.values.view(torch.uint8))
    kept = reference.mask(w, 2, 4)
    expanded = reference.decompress(p.values.float(), reference.from_layout(p.meta, "wgmma.sp.8bit"), 2, 4, 256)
    assert torch.equal(expanded, q.values.float() * kept)


def test_the_gemm_by_hand():
    w, x = torch.randn(64, 128), torch.randn(5, 128)
    for dtypes, rows in (((E4M3, E4M3), True), ((E5M2, E4M3), False), ((torch.int8, torch.int8), True)):
        q, p = ops.quantize(x, dtypes[0], rows=rows), ops.quantize_pack(w, dtypes[1], rows=rows)
        dense = reference.decompress(p.values.double(), reference.from_layout(p.meta, "wgmma.sp.8bit"), 2, 4, 128)
        exact = (q.values.double() * q.step.reshape(-1, 1)) @ (dense * p.step.reshape(-1, 1)).T
        bias = torch.randn(64)
        y = ops.linear_quantized(q, p, bias, dtype=torch.float32)
        torch.testing.assert_close(y.double(), exact + bias, rtol=1e-5, atol=1e-4)
        assert torch.equal(ops.linear_quantized(q, p, bias, dtype=torch.float32, transposed=True), y.T)
        assert ops.linear_quantized(q, p).dtype == torch.bfloat16


def compressed(pattern="2:4", rows=64, cols=256, values="int8", group=0):
    return ops.quantize_values(ops.compress(torch.randn(rows, cols), pattern), values, group)


def test_a_compressed_weight_of_int8():
    """Its integers and steps as they are; the layout is made once, and again after a write."""
    c, x = compressed(), ops.quantize(torch.randn(5, 256), torch.int8, rows=True)
    c.step[3] *= -1
    for _ in range(2):
        exact = (x.values.double() * x.step.reshape(-1, 1)) @ c.dense(torch.float64).T
        y = ops.linear_quantized(x, c, dtype=torch.float32)
        torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-5)
        assert torch.equal(ops.linear_quantized(x, c, dtype=torch.float32, transposed=True), y.T)
        packed = c.layout("wgmma.sp.8bit", lambda c: pytest.fail("made again"))
        assert packed.values is c.values and torch.equal(reference.from_layout(packed.meta, "wgmma.sp.8bit"), c.indices)
        c.values.neg_()


ONES = ops.quantize_pack(torch.ones(64, 128), E4M3)
EIGHT = ops.quantize(torch.ones(1, 256), torch.int8)


@for_each("call, word", [
    (lambda: ops.quantize(torch.ones(2, 2), torch.float16), "not an 8-bit dtype"),
    (lambda: ops.quantize(torch.ones(2), E4M3), "must be a matrix"),
    (lambda: ops.quantize_pack(torch.ones(64, 64), E4M3), "128 columns"),
    (lambda: ops.quantize_pack(torch.ones(32, 128), E4M3), "64 rows"),
    (lambda: ops.pack(torch.ones(64, 128).half(), "2:4", layout="wgmma.sp.8bit"), "8-bit values"),
    (lambda: ops.linear_quantized(ops.quantize(torch.ones(1, 256), E4M3), ONES), "must be 128"),
    (lambda: ops.linear_quantized(ops.quantize(torch.ones(1, 128), torch.int8), ONES), "int8 can only be multiplied by int8"),
    (lambda: ops.linear_quantized(ops.quantize(torch.ones(1, 128), E4M3), ONES, torch.ones(64), dtype=torch.float16), "bias"),
    (lambda: ops.linear_quantized(EIGHT, compressed(values="int4")), "int4.*nm.ops.quantize_values"),
    (lambda: ops.linear_quantized(EIGHT, compressed(group=128)), "one step per row"),
    (lambda: ops.linear_quantized(EIGHT, ops.compress(torch.ones(64, 256), "2:4")), "nm.ops.linear, which leaves x"),
    (lambda: ops.linear_quantized(EIGHT, compressed("1:4")), "2:4"),
    (lambda: ops.linear_quantized(EIGHT, compressed(rows=32)), "64 rows and 128 columns"),
])  # fmt: skip
def test_what_is_refused(call, word):
    with pytest.raises(NMError, match=word):
        call()
