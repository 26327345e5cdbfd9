"""pack is compress of the operand that was cast, under the mask of the one that was not; and what that means in numbers."""

import math

import torch

from nmkernels.reference import compress, decompress, from_layout, mask, pack, soft_threshold, transposable_mask
from nmkernels.testing import assert_equal_bits
from python_tests.for_each import for_each
from python_tests.reference.conftest import DTYPES, edge

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def nothing(dtype, kind=torch.uint8):
    return torch.empty(0, dtype=dtype), torch.empty(0, dtype=kind)


@for_each("n, m", [(2, 4), (1, 4), (3, 5), (2, 8), (5, 32)])
@for_each("to", [None, BF16, F16, F32])
@for_each("dtype", DTYPES)
def test_magnitude_one_way_or_the_other(n, m, to, dtype):
    w, kind = edge(2 * m, 3 * m, dtype, seed=n), to or dtype
    assert_equal_bits(pack(w, n, m, dtype=to)[:4], (*compress(w.to(kind), n, m, mask(w, n, m)), *nothing(kind)))
    columns = pack(w, n, m, dtype=to, rows=False, columns=True)[:4]
    assert_equal_bits(columns, (*nothing(kind), *compress(w.T.to(kind), n, m, mask(w.T, n, m))))
    assert all(x.is_contiguous() for x in columns)


@for_each("n, m", [(2, 4), (1, 3)])
@for_each("rows, columns", [(True, True), (True, False), (False, True)])
@for_each("density", [None, 0.0, 0.3, 0.7, 1.0])
@for_each("dtype", DTYPES)
def test_one_transposable_or_given_mask_for_both(n, m, rows, columns, density, dtype):
    """A given one may keep fewer: it is filled up in each orientation on its own."""
    w = edge(4 * m, 5 * m, dtype)
    keep = transposable_mask(w, n, m)
    if density is not None:
        keep &= torch.rand(w.shape) < density
    how = {"select": "transposable"} if density is None else {"select": "given", "mask": keep}
    expected = [compress(x.to(BF16), n, m, k) if way else nothing(BF16) for way, x, k in ((rows, w, keep), (columns, w.T, keep.T))]
    assert_equal_bits(pack(w, n, m, **how, dtype=BF16, rows=rows, columns=columns)[:4], (*expected[0], *expected[1]))


@for_each("scale", [None, 1.37, -0.8, 0.0, -0.0, math.inf, math.nan, 1e-30])
@for_each("rows", [True, False])
@for_each("dtype", DTYPES)
def test_threshold_rounds_the_scaled_value_then_to_the_dtype(scale, rows, dtype):
    wide = torch.float64 if dtype == torch.float64 else F32
    w = edge(8, 24, dtype)
    x = w if rows else w.T
    s, beta = soft_threshold(x, 2, 4).to(wide), None if scale is None else torch.tensor(scale, dtype=wide)
    if beta is not None:
        s = torch.tensor([[float(a) * beta.item() for a in row] for row in s.tolist()], dtype=torch.float64).to(wide)
    got = pack(w, 2, 4, "threshold", scale=beta, dtype=BF16, rows=rows, columns=not rows)
    assert_equal_bits(got[:2] if rows else got[2:4], compress(s.to(BF16), 2, 4, mask(x, 2, 4)))


def test_kept_bits_stay_where_the_dtype_does():
    bits = torch.tensor([[0x7FC12345, -(1 << 31), -1, 1]], dtype=torch.int32)
    for select, given in (("magnitude", None), ("given", torch.ones(1, 4, dtype=torch.bool))):
        assert torch.equal(pack(bits.view(F32), 4, 4, select, given)[0].view(torch.int32), bits)


@for_each("layout", ["mma.sp", "wgmma.sp"])
@for_each("to", [BF16, F16])
def test_layouts_reorder_the_indices_only(layout, to):
    w = torch.randn(128, 64)
    plain, other = (pack(w, 2, 4, "transposable", dtype=to, columns=True, layout=x) for x in ("canonical", layout))
    assert_equal_bits([other[0], from_layout(other[1], layout), other[2], from_layout(other[3], layout)], [*plain[:4]])
    assert_equal_bits(pack(w, 2, 4, dtype=to, layout=layout)[2:4], nothing(to, torch.int32))


@for_each("n, m", [(2, 4), (1, 8), (3, 5)])
@for_each("select", ["magnitude", "given", "threshold"])
@for_each("dtype", DTYPES)
def test_the_dense_form_is_where_the_rows_are(n, m, select, dtype):
    """Bit for bit, whichever other forms are wanted, in any layout; +0 elsewhere."""
    w, scale = edge(4 * m, 16 * m, dtype), None
    keep = mask(w, n, m) & (torch.rand(w.shape) < 0.8) if select == "given" else None
    if select == "threshold":
        scale = torch.tensor(-0.8, dtype=torch.float64 if dtype == torch.float64 else F32)
    values, indices, *_ = pack(w, n, m, select, keep, scale, BF16)
    want = decompress(values, indices, n, m, w.shape[1])
    assert_equal_bits(pack(w, n, m, select, keep, scale, BF16, False, dense=True)[4], want)
    assert_equal_bits(pack(w, n, m, select, keep, scale, BF16, dense=True), (values, indices, *nothing(BF16), want))
    outside = ~mask(w, n, m) if keep is None else ~keep
    assert not want[outside].view(torch.int16).any(), "+0"
    if select == "magnitude":
        assert_equal_bits(want[~outside], w.to(BF16)[~outside])
