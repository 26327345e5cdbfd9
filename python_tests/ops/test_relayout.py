"""relayout, and GEMMs whose operand lies in the order of tensor cores."""

from __future__ import annotations

import torch

from nmkernels import ops, reference
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
