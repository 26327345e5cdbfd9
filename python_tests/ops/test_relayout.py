"""relayout, and GEMMs whose operand lies in the order of tensor cores."""

from __future__ import annotations

import pytest
import torch

from nmkernels import DtypeError, PatternError, ShapeError, ops, reference
from nmkernels.testing import assert_equal_bits
from python_tests.each import each


@each("pattern", ["2:4", "1:4", "2:8", "1:16", "1:64"])
@each("layout", ["mma.sp", "wgmma.sp"])
def test_relayout(pattern: str, layout: str) -> None:
    w = ops.prune(torch.randn(64, 192), pattern).bfloat16()
    c = ops.compress(w, pattern)
    d = ops.relayout(c, layout)
    assert d.layout == layout and str(d.pattern) == "2:4"
    assert (d.values is c.values) == (pattern == "2:4")
    assert_equal_bits(d.dense(), w)
    x, r = torch.randn(5, 192).bfloat16(), torch.randn(5, 64).bfloat16()
    for activation in (None, "gelu", "relu2"):
        expected = reference.linear(x, *reference.compress(w, 2, 4), 2, 4, 192, r[0], activation or "", r)
        assert_equal_bits(ops.linear(x, d, r[0], activation, r), expected)
    t = torch.randn(192, 8).bfloat16()
    assert_equal_bits(ops.linear_wgrad(d, t), reference.linear_wgrad(*reference.compress(w, 2, 4), 2, 4, 192, t))


def test_gradient_of_the_input_from_packed_columns() -> None:
    w, g = torch.randn(64, 128), torch.randn(6, 64).bfloat16()
    packed = ops.pack(w, "2:4", "transposable", dtype=torch.bfloat16, columns=True, layout="mma.sp")
    assert packed.rows is not None and packed.columns is not None
    assert_equal_bits(ops.linear(g, packed.columns), ops.linear_dgrad(g, packed.rows.compressed()))


raw = torch.ops.nmkernels
RELAYOUT = {
    "pattern": (
        lambda: ops.relayout(ops.compress(torch.ones(16, 64).bfloat16(), "3:8"), "mma.sp"),
        PatternError,
        "3:8.*at most 2 of every M",
    ),
    "rows": (lambda: ops.relayout(ops.compress(torch.ones(8, 64).bfloat16(), "2:4"), "mma.sp"), ShapeError, r"16 rows.*\(8, 64\)"),
    "dtype": (lambda: ops.relayout(ops.compress(torch.ones(16, 64), "2:4"), "mma.sp"), DtypeError, "16-bit"),
    "layout": (lambda: ops.relayout(ops.compress(torch.ones(16, 64).half(), "2:4"), "coo"), ops.OptionError, "'coo'.*'mma.sp'"),
    "batch": (lambda: ops.relayout(ops.compress(torch.ones(2, 16, 64).half(), "2:4"), "mma.sp"), ShapeError, "matrix"),
    "dgrad": (lambda: ops.linear_dgrad(torch.ones(1, 16).half(), ordered()), ops.OptionError, "packed.columns"),
    "shape": (
        lambda: torch.ops.nmkernels.nm_linear(torch.ones(1, 128).half(), ordered().values, ordered().meta, 2, 4, 128),
        ShapeError,
        "128",
    ),
    "raw": (lambda: raw.nm_metadata(torch.zeros(16, 8).byte(), 64, "canonical"), ShapeError, "in that order already"),
    "residual": (
        lambda: ops.linear(torch.ones(2, 64).half(), ordered(), residual=torch.ones(2, 8).half()),
        ShapeError,
        r"residual.*\(2, 16\)",
    ),
    "residual_dtype": (lambda: ops.linear(torch.ones(2, 64).half(), ordered(), residual=torch.ones(2, 16)), DtypeError, "residual"),
}


def ordered() -> ops.DeviceCompressed:
    return ops.relayout(ops.compress(torch.ones(16, 64).half(), "2:4"), "mma.sp")


@each("name", RELAYOUT)
def test_wrong_call(name: str) -> None:
    call, kind, text = RELAYOUT[name]
    with pytest.raises(kind, match=text):
        call()
