"""Sparse squared ReLU and the split of features, against small numbers and plain torch."""

import pytest
import torch
import torch.nn.functional as F

from nmkernels.autograd import SplitRule, sparse_relu2, split, split_linear
from nmkernels.pattern import NMError, Pattern, ShapeError
from python_tests.recipes.loop import top_n

P24 = Pattern("2:4")
F64 = torch.float64


# ---- the activation


def test_the_largest_values_are_kept_not_the_largest_magnitudes():
    for values, want in [
        ([3.0, -1.0, 2.0, 1.0], [9.0, 0.0, 4.0, 0.0]),
        ([-4.0, -1.0, 2.0, -3.0], [0.0, 0.0, 4.0, 0.0]),
        ([-4.0, 1.0, 2.0, -9.0], [0.0, 1.0, 4.0, 0.0]),
        ([1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0]),
        ([0.0, -0.0, -1.0, -2.0], [0.0, 0.0, 0.0, 0.0]),
    ]:
        assert sparse_relu2(torch.tensor(values), P24).tolist() == want


def test_nan_shows():
    assert sparse_relu2(torch.tensor([torch.nan, 1.0, 2.0, 3.0]), P24)[0].isnan()


# ---- the split


def plain_split(z, n, m, dense):
    """Groups of consecutive tokens, the busiest features whole."""
    tokens, features = z.shape
    padded = torch.cat([z, z.new_zeros(-tokens % m, features)])
    kept = (padded * top_n(padded.t().contiguous(), n, m).t())[:tokens].clone()
    counts = [int(z[:, i].count_nonzero()) for i in range(features)]
    for i in sorted(range(features), key=lambda i: (-counts[i], i))[:dense]:
        kept[:, i] = z[:, i]
    return kept


def test_split_against_plain_torch():
    for tokens, dense in [(16, 0.0), (18, 0.3), (3, 0.5), (16, 1.0)]:
        z = torch.randn(tokens, 8).relu()
        rule = SplitRule(P24, dense, multiple=2, shuffle=False)
        want = plain_split(z, 2, 4, {0.0: 0, 0.3: 4, 0.5: 4, 1.0: 8}[dense])
        assert torch.equal(split(z, rule), want)


def test_the_number_of_dense_features():
    assert [SplitRule(P24).dense_features(k) for k in (64, 128, 2560, 2561, 16384)] == [64, 128, 128, 256, 896]
    assert SplitRule(P24, 0.05, 1).dense_features(100) == 5


def test_shuffled_groups_are_deterministic():
    torch.manual_seed(0)
    z = torch.zeros(64, 4)
    z[:8] = torch.rand(8, 4) + 1  # neighbours that fire together: in plain groups half of them are lost
    plain, shuffled = (split(z, SplitRule(P24, 0.0, 1, shuffle)) for shuffle in (False, True))
    assert plain.count_nonzero() == 16 and shuffled.count_nonzero() > 20
    assert torch.equal(shuffled, split(z, SplitRule(P24, 0.0, 1)))
    dense = torch.rand(64, 4) + 1
    assert split(dense, SplitRule(P24, 0.0, 1)).count_nonzero() == 128, "two of four tokens, in whatever order"
    assert torch.equal(split(dense, SplitRule(P24, 0.0, 1)).ne(0) * dense, split(dense, SplitRule(P24, 0.0, 1)))


def test_split_linear():
    for side, bias in [("input", True), ("output", True), ("output", False)]:
        rule = SplitRule(P24, 0.25, 4, shuffle=False)
        x = torch.randn(2, 6, 16, dtype=F64, requires_grad=True)
        w = torch.randn(8, 16, dtype=F64, requires_grad=True)
        b = torch.randn(8, dtype=F64, requires_grad=True) if bias else None
        g = torch.randn(2, 6, 8, dtype=F64).relu()
        y = split_linear(x, w, b, rule, side)
        torch.testing.assert_close(y, F.linear(x, w, b))
        dx, dw, *db = torch.autograd.grad(y, [x, w, b] if bias else [x, w], g)
        rows, tokens = g.reshape(12, 8), x.detach().reshape(12, 16)
        if side == "output":
            want_w, want_x = plain_split(rows, 2, 4, 4).t() @ tokens, (g * top_n(g, 2, 4)) @ w
        else:
            want_w, want_x = rows.t() @ plain_split(tokens, 2, 4, 4), g @ w
        torch.testing.assert_close(dw, want_w)
        torch.testing.assert_close(dx, want_x.detach())
        if bias:
            torch.testing.assert_close(db[0], rows.sum(0))


def test_errors():
    for wrong, kind, said in [
        (lambda: sparse_relu2(torch.randn(6), P24), ShapeError, "6"),
        (lambda: sparse_relu2(torch.randn(8), P24, "best"), NMError, "grad='best'"),
        (lambda: SplitRule(P24, dense=1.5), NMError, r"dense=1\.5"),
        (lambda: SplitRule(P24, multiple=0), NMError, "multiple=0"),
        (lambda: split_linear(torch.randn(4, 4), torch.randn(4, 4), None, SplitRule(P24), "left"), NMError, "side='left'"),
        (lambda: split_linear(torch.randn(4, 4), torch.randn(6, 4), None, SplitRule(P24), "output"), ShapeError, "6"),
    ]:
        with pytest.raises(kind, match=said):
            wrong()
