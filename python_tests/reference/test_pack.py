"""pack against a loop over groups in plain Python."""

import itertools
import math
import struct

import pytest
import torch

from nmkernels.pattern import DtypeError, OptionError, PatternError, ShapeError
from nmkernels.reference import from_layout, mask, pack, soft_threshold, soft_threshold_scale, transposable_mask, unpack_indices
from python_tests.each import each
from python_tests.reference.conftest import DTYPES

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def bfloat16(x):
    """The nearest bfloat16 of a float32 number, ties to even, on the bits."""
    if math.isnan(x):
        return x
    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def looped(w, n, m, keep):
    """Values and positions of every row of a matrix: kept elements in order, short groups filled with +0.0 at the lowest others."""
    values, places = [], []
    for row, kept in zip(w.tolist(), keep.tolist(), strict=True):
        values.append([]), places.append([])
        for start in range(0, len(row), m):
            on = [i for i in range(m) if kept[start + i]]
            spare = [i for i in range(m) if not kept[start + i]][: n - len(on)]
            for i in sorted(on + spare):
                values[-1].append(row[start + i] if i in on else 0.0)
                places[-1].append(i)
    return torch.tensor(values, dtype=torch.float64), torch.tensor(places, dtype=torch.uint8)


def check(got, w, n, m, keep, dtype, same_bits):
    """One orientation of a result."""
    values, places = looped(w, n, m, keep)
    bits = 2 if m <= 4 else 4 if m <= 16 else 8
    assert same_bits(got[0], values.to(w.dtype).to(dtype)) and got[0].is_contiguous()
    assert torch.equal(unpack_indices(got[1], bits, values.shape[1]), places) and got[1].is_contiguous()


def absent(values, indices, dtype, kind=torch.uint8):
    return (values.shape, values.dtype, indices.shape, indices.dtype) == ((0,), dtype, (0,), kind)


@each("n, m", [(2, 4), (1, 4), (3, 5), (2, 8), (5, 32)])
@each("to", [None, BF16, F16, F32], ids=str)
@each("dtype", DTYPES)
def test_magnitude_one_way_or_the_other(n, m, to, dtype, edge, same_bits):
    w, kind = edge(2 * m, 3 * m, dtype, seed=n), to or dtype
    got = pack(w, n, m, dtype=to)
    check(got[:2], w, n, m, mask(w, n, m), kind, same_bits)
    assert absent(*got[2:], kind)
    got = pack(w, n, m, dtype=to, rows=False, columns=True)
    check(got[2:], w.T, n, m, mask(w.T, n, m), kind, same_bits)
    assert absent(*got[:2], kind)


@each("n, m", [(2, 4), (1, 3)])
@each("ways", [(True, True), (True, False), (False, True)])
@each("dtype", DTYPES)
def test_one_transposable_mask_for_both(n, m, ways, dtype, edge, same_bits):
    w = edge(4 * m, 5 * m, dtype)
    keep = transposable_mask(w, n, m)
    got = pack(w, n, m, "transposable", dtype=BF16, rows=ways[0], columns=ways[1])
    for wanted, result, x, k in ((ways[0], got[:2], w, keep), (ways[1], got[2:], w.T, keep.T)):
        if wanted:
            check(result, x, n, m, k, BF16, same_bits)
        else:
            assert absent(*result, BF16)


@each("density", [0.0, 0.3, 0.7, 1.0])
@each("dtype", DTYPES)
def test_a_given_mask_is_padded_in_each_orientation_on_its_own(density, dtype, edge, same_bits):
    w = edge(12, 20, dtype)
    keep = transposable_mask(torch.randn(12, 20), 2, 4)
    keep &= torch.rand(12, 20, generator=torch.Generator().manual_seed(3)) < density
    got = pack(w, 2, 4, "given", keep, dtype=F16, columns=True)
    check(got[:2], w, 2, 4, keep, F16, same_bits)
    check(got[2:], w.T, 2, 4, keep.T, F16, same_bits)


@each("scale", [None, 1.37, -0.8, 0.0, -0.0, math.inf, math.nan, 1e-30])
@each("ways", [(True, False), (False, True)])
@each("dtype", DTYPES)
def test_threshold_rounds_the_product_then_the_value(scale, ways, dtype, edge, same_bits):
    wide = torch.float64 if dtype == torch.float64 else F32
    w = edge(8, 24, dtype)
    x = w if ways[0] else w.T
    s = soft_threshold(x, 2, 4).to(wide)
    if scale is not None:
        s = torch.tensor([[float(a) * torch.tensor(scale, dtype=wide).item() for a in row] for row in s.tolist()], dtype=torch.float64).to(
            wide
        )
    beta = None if scale is None else torch.tensor(scale, dtype=wide)
    got = pack(w, 2, 4, "threshold", scale=beta, dtype=BF16, rows=ways[0], columns=ways[1])
    check(got[:2] if ways[0] else got[2:], s, 2, 4, mask(x, 2, 4), BF16, same_bits)


def test_a_threshold_of_low_precision_is_rounded_before_it_is_scaled():
    w = torch.tensor([[1.0, 3.0078125, 0.0, 0.00390625]], dtype=BF16)
    s = soft_threshold(w, 2, 4)
    values = pack(w, 2, 4, "threshold", scale=torch.tensor(1.01), dtype=F32)[0]
    assert torch.equal(values, (s.float() * 1.01)[:, :2]) and not torch.equal(s.float(), soft_threshold(w.float(), 2, 4))


def test_ties_and_negative_scales_at_the_threshold():
    w = torch.tensor([[2.0, -2.0, 2.0, 1.0], [3.0, -2.0, 2.0, 1.0]])
    values, indices, *_ = pack(w, 2, 4, "threshold", scale=torch.tensor(-2.0))
    assert values.tolist() == [[0.0, 0.0], [-2.0, 0.0]] and indices.flatten().tolist() == [0x4, 0x4]
    assert values.signbit().all()
    assert not pack(w, 2, 4, "threshold")[0].signbit().any()


def test_scale_makes_the_packed_weight_the_closest():
    w = torch.randn(64, 64)
    beta = soft_threshold_scale(w, 2, 4)
    values = pack(w, 2, 4, "threshold", scale=beta)[0]
    assert torch.equal(values, (soft_threshold(w, 2, 4) * beta)[mask(w, 2, 4)].view(64, 32))


def test_the_master_weight_decides_and_the_cast_is_one_rounding():
    """In bfloat16 these tie and the lower index would stay; in float32 the last two are larger."""
    row = [1.0, 1.0 + 2**-12, 1.0 + 2**-10, 1.0 + 2**-9]
    values, indices, *_ = pack(torch.tensor([row]), 2, 4, dtype=BF16)
    assert indices.item() == 0xE and values.tolist() == [[1.0, 1.0]]
    w = torch.randn(64, 64) * 10.0 ** torch.randint(-30, 30, (64, 64))
    got = pack(w, 4, 4, dtype=BF16)[0]
    assert got.flatten().tolist() == [bfloat16(x) for x in w.flatten().tolist()]


def test_kept_bits_stay_where_the_dtype_does():
    bits = torch.tensor([[0x7FC12345, -(1 << 31), -1, 1]], dtype=torch.int32)
    for select, kwargs in (("magnitude", {}), ("given", {"mask": torch.ones(1, 4, dtype=torch.bool)})):
        values = pack(bits.view(F32), 4, 4, select, **kwargs)[0]
        assert torch.equal(values.view(torch.int32), bits)


@each("layout", ["mma.sp", "wgmma.sp"])
@each("to", [BF16, F16])
def test_layouts_reorder_the_indices_only(layout, to):
    w = torch.randn(128, 64)
    plain, other = (pack(w, 2, 4, "transposable", dtype=to, columns=True, layout=x) for x in ("canonical", layout))
    for i in (0, 2):
        assert torch.equal(plain[i], other[i]) and torch.equal(from_layout(other[i + 1], layout), plain[i + 1])
    assert absent(*pack(w, 2, 4, dtype=to, layout=layout)[2:], to, torch.int32)


def test_strides_and_empty(edge, same_bits):
    w = edge(8, 12, F32)
    for x in (w.T.contiguous().T, torch.stack((w, w), -1)[..., 0]):
        for a, b in zip(pack(x, 2, 4, "transposable", columns=True), pack(w, 2, 4, "transposable", columns=True), strict=True):
            assert same_bits(a, b)
    shapes = [x.shape for x in pack(torch.randn(0, 8), 2, 4, "transposable", columns=True)]
    assert shapes == [(0, 4), (0, 1), (8, 0), (8, 0)]


def test_errors():
    w, full = torch.randn(16, 64), torch.ones(16, 64, dtype=torch.bool)
    half = mask(w, 2, 4)  # two in every group of a row, but not of a column
    one = torch.tensor(1.0)
    wrong = [
        (lambda: pack(w[0], 2, 4), ShapeError, r"pack: .*\(64,\).*matrix"),
        (lambda: pack(w.int(), 2, 4), DtypeError, "int32"),
        (lambda: pack(w, 2, 4, dtype=torch.int8), DtypeError, "int8"),
        (lambda: pack(w, 2, 4, dtype=torch.float8_e4m3fn), DtypeError, "float8"),
        (lambda: pack(w, 5, 4), PatternError, "5:4"),
        (lambda: pack(w, 1, 3), ShapeError, "number of columns is 64.*M=3"),
        (lambda: pack(w, 1, 32, rows=False, columns=True), ShapeError, "number of rows is 16.*M=32"),
        (lambda: pack(w, 1, 32, "transposable"), ShapeError, "number of rows is 16.*M=32"),
        (lambda: pack(w, 2, 4, "largest"), OptionError, "'largest'.*'magnitude'.*'threshold'"),
        (lambda: pack(w, 2, 4, rows=False), OptionError, "neither"),
        (lambda: pack(w, 2, 4, columns=True), PatternError, "'magnitude' cannot pack rows and columns.*transposable"),
        (lambda: pack(w, 2, 4, "threshold", columns=True), PatternError, "'threshold' cannot pack rows and columns.*two different weights"),
        (lambda: pack(w, 2, 4, "given"), OptionError, "without a mask"),
        (lambda: pack(w, 2, 4, mask=full), OptionError, "'magnitude' beside a mask"),
        (lambda: pack(w, 2, 4, "given", full.int()), DtypeError, "int32.*bool"),
        (lambda: pack(w, 2, 4, "given", full[:8]), ShapeError, r"\(8, 64\).*\(16, 64\)"),
        (lambda: pack(w, 2, 4, "given", full), ShapeError, "keeps 4.*2:4"),
        (lambda: pack(w, 2, 4, "given", half, columns=True), ShapeError, "2:4"),
        (lambda: pack(w, 2, 4, scale=one), OptionError, "scale.*threshold"),
        (lambda: pack(w, 2, 4, "threshold", scale=one.double()), ShapeError, "scale is torch.float64.*float32"),
        (lambda: pack(w, 2, 4, "threshold", scale=torch.ones(2)), ShapeError, r"scale.*\(2,\)"),
        (lambda: pack(w, 2, 4, layout="csr"), OptionError, "'csr'"),
        (lambda: pack(w, 1, 4, dtype=BF16, layout="mma.sp"), PatternError, "1:4"),
        (lambda: pack(w, 2, 4, layout="mma.sp"), DtypeError, "16-bit.*float32"),
        (lambda: pack(w, 2, 4, dtype=BF16, layout="wgmma.sp"), ShapeError, r"64 rows.*\(16, 64\)"),
        (lambda: pack(w, 2, 4, rows=False, columns=True, dtype=BF16, layout="mma.sp"), ShapeError, r"\(64, 16\)"),
    ]
    for call, kind, text in wrong:
        with pytest.raises(kind, match=text):
            call()
    assert pack(w, 2, 4, "given", half)[0].shape == (16, 32)


def test_float64_works_throughout():
    w = torch.randn(16, 64, dtype=torch.float64)
    scale = soft_threshold_scale(w, 2, 4)
    assert torch.equal(pack(w, 2, 4, "threshold", scale=scale)[0], (soft_threshold(w, 2, 4) * scale)[mask(w, 2, 4)].view(16, 32))
    for dtype, to in itertools.product(DTYPES, DTYPES):
        assert pack(w.to(dtype), 2, 4, "transposable", dtype=to, columns=True)[2].dtype == to
