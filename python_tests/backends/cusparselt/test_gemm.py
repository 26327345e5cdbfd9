"""compress and matmul: every layout and dtype of the library, and what they refuse."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F

from nmkernels import DtypeError, ShapeError, ops, testing
from nmkernels.backends.cusparselt import compress, matmul
from nmkernels.pattern import OptionError
from python_tests.for_each import for_each

FLOATS = (torch.float16, torch.bfloat16)
EIGHTS = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
RESULTS = [
    *((d, d) for d in FLOATS),
    *((torch.int8, out) for out in (torch.int32, torch.int8, torch.float16, torch.bfloat16)),
    *((d, out) for d in EIGHTS[1:] for out in (torch.bfloat16, torch.float16, torch.float32)),
]


def normal(*shape, dtype=torch.bfloat16, seed=2, scale=3.0):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (scale * x).round().to(dtype) if dtype == torch.int8 else x.to(dtype)


def sparse(rows, cols, dtype, dim):
    w = normal(rows, cols, dtype=torch.float32, seed=1)
    kept = ops.prune(w if dim else w.t().contiguous(), "2:4")
    kept = kept if dim else kept.t().contiguous()
    return (3 * kept).round().to(dtype) if dtype == torch.int8 else kept.to(dtype)


def dense_product(layout, w, x, dtype):
    w, x = w.to(dtype), x.to(dtype)
    return x @ w.t() if layout == "nt" else x @ w if layout == "nn" else w.t() @ x


def check(y, layout, w, x, f=lambda y: y):
    exact = f(dense_product(layout, w, x, torch.float64))
    if y.dtype.is_floating_point:
        own = w.dtype if w.dtype == y.dtype else torch.float32
        testing.assert_no_worse(y, f(dense_product(layout, w, x, own)).to(y.dtype), exact)
    else:
        limits = torch.iinfo(y.dtype)
        assert torch.equal(y.double(), exact.clamp(limits.min, limits.max))


def operands(layout, dtype, width, rows=32, cols=64):
    """A sparse and a dense operand."""
    w = sparse(rows, cols, dtype, dim=1) if layout == "nt" else sparse(cols, rows, dtype, dim=0)
    return w, normal(cols, width, dtype=dtype) if layout == "tn" else normal(width, cols, dtype=dtype)


@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
def test_layouts_dtypes_and_padded_widths(fake, layout) -> None:
    for dtype, out in RESULTS:
        w, x = operands(layout, dtype, 16)
        blob = compress(w, layout)
        assert (blob.rows, blob.cols, blob.layout) == (32, 64, layout)
        y = matmul(blob, x, out_dtype=out)
        assert y.dtype == out and y.is_contiguous(), (dtype, out)
        assert y.shape == ((32, 16) if layout == "tn" else (16, 32))
        check(y, layout, w, x)
    for dtype, width in product((torch.bfloat16, torch.int8), (1, 5, 17)):
        w, x = operands(layout, dtype, width)
        r = normal(*((32, width) if layout == "tn" else (width, 32)), seed=5)
        y = matmul(compress(w, layout), x, residual=r, out_dtype=torch.bfloat16)
        check(y, layout, w, x, lambda y, r=r: y + r.to(y.dtype))


@pytest.mark.parametrize("activation", ["", "relu", "gelu"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.int8, torch.float8_e4m3fn])
def test_epilogues(fake, dtype, activation) -> None:
    w, x = sparse(32, 64, dtype, dim=1), normal(16, 64, dtype=dtype)
    bias = normal(32, dtype=torch.float32 if dtype == torch.int8 else torch.float16)
    y = matmul(compress(w), x, bias, activation, out_dtype=torch.float16, alpha=0.25)
    f = {"": lambda y: y, "relu": F.relu, "gelu": F.gelu}[activation]
    check(y, "nt", w, x, lambda y: f(0.25 * y + bias.to(y.dtype)))


def test_bias_of_the_other_layouts(fake) -> None:
    bias = normal(32, seed=3)
    for layout, b in (("nn", bias), ("tn", bias[:, None])):
        w, x = operands(layout, torch.bfloat16, 16)
        check(matmul(compress(w, layout), x, bias), layout, w, x, lambda y, b=b: y + b.to(y.dtype))


@for_each("dtype", [*FLOATS, *EIGHTS])
def test_from_a_mask(fake, dtype) -> None:
    w = normal(32, 64, dtype=dtype, seed=7)
    mask = ops.mask(w.float(), "2:4")
    kept = torch.where(mask, w.float(), 0).to(dtype)
    x = normal(16, 64, dtype=dtype)
    assert torch.equal(matmul(compress(w, mask=mask), x), matmul(compress(kept), x))


def test_what_is_not_two_of_four(fake) -> None:
    w = torch.zeros(32, 32, dtype=torch.float16)
    w[3, 4:7] = 1
    with pytest.raises(ShapeError, match="a group of 4 along the last dimension keeps more than 2 values"):
        compress(w)
    compress(w, "nn")
    with pytest.raises(ShapeError, match="a group of 4 along the first dimension keeps more than 2 values"):
        compress(w.t().contiguous(), "tn")
    with pytest.raises(ShapeError, match="keeps more than 2"):
        compress(w, mask=torch.ones(32, 32, dtype=torch.bool))
    w[3, 4] = torch.nan
    with pytest.raises(ShapeError, match="keeps more than 2"):
        compress(w)


def test_a_capture_does_not_wait_for_the_check(fake, capture) -> None:
    w, x = sparse(32, 64, torch.float16, dim=1), normal(16, 64, dtype=torch.float16)
    first = matmul(compress(w), x)
    capture(True)
    assert torch.equal(matmul(compress(w), x), first)


@for_each(
    "change, error, words",
    [
        ({"dense": torch.ones(16, 16)}, DtypeError, "float16, bfloat16, int8, float8_e4m3fn, float8_e5m2, not torch.float32"),
        ({"dense": torch.ones(16, 24).half()}, ShapeError, r"multiples of 16, not \(16, 24\)"),
        ({"dense": torch.ones(16, 32).to(torch.int8)}, ShapeError, r"multiples of 32, not \(16, 32\)"),
        ({"dense": torch.ones(16).half()}, ShapeError, r"needs a matrix"),
        ({"mask": torch.ones(16, 8, dtype=torch.bool)}, ShapeError, "a bool mask of the same shape"),
        ({"mask": torch.ones(16, 16)}, ShapeError, "a mask .* of torch.float32"),
        ({"layout": "tt"}, OptionError, "layout 'tt' is unknown"),
    ],
)  # fmt: skip
def test_what_compress_refuses(fake, change, error, words) -> None:
    with pytest.raises(error, match=words):
        compress(**{"dense": torch.zeros(16, 16).half(), **change})


@for_each(
    "change, error, words",
    [
        ({"dense": normal(16, 32)}, ShapeError, r"has shape \(16, 32\); nt with this blob needs \(tokens, 64\)"),
        ({"dense": normal(0, 64)}, ShapeError, "the dense operand has shape"),
        ({"dense": normal(16, 64, dtype=torch.float16)}, DtypeError, "the blob is torch.bfloat16"),
        ({"out_dtype": torch.float32}, DtypeError, "the result of torch.bfloat16 may be torch.bfloat16, not torch.float32"),
        ({"activation": "silu"}, OptionError, "activation 'silu' is unknown"),
        ({"activation": "relu", "residual": normal(16, 32)}, OptionError, "add it afterwards"),
        ({"bias": normal(16)}, ShapeError, r"the bias is torch.bfloat16 \(16,\)"),
        ({"bias": normal(32, dtype=torch.float32)}, ShapeError, r"it must be torch.bfloat16 \(32,\)"),
        ({"residual": normal(32, 16)}, ShapeError, "the residual is"),
    ],
)
def test_what_matmul_refuses(fake, change, error, words) -> None:
    blob = compress(sparse(32, 64, torch.bfloat16, dim=1))
    with pytest.raises(error, match=words):
        matmul(blob, **{"dense": normal(16, 64), **change})
    eight = compress(sparse(32, 64, torch.int8, dim=1))
    with pytest.raises(OptionError, match="a bias and GELU have fractions"):
        matmul(eight, normal(16, 64, dtype=torch.int8), bias=normal(32, dtype=torch.float32))
