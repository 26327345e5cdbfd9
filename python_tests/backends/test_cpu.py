"""Every compiled CPU op equals the reference to the bit, on nasty inputs and for any number of threads."""

from __future__ import annotations

import functools

import pytest
import torch

from nmkernels import reference
from nmkernels.dispatch import implementations
from nmkernels.pattern import Pattern, ShapeError
from nmkernels.testing import assert_equal_bits, assert_no_worse, cases, fill_poison
from python_tests.each import each

PATTERNS = ["2:4", "1:4", "2:8", "1:8", "4:8", "1:16", "1:32", "3:5", "4:4", "1:256", "7:256"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
GROUPWISE = {"nm_mask": reference.mask, "nm_prune": reference.prune, "nm_soft_threshold": reference.soft_threshold}
every_pattern = each("text", PATTERNS)
every_dtype = each("dtype", DTYPES, ids=str)


@functools.cache
def _cases(text: str, dtype: torch.dtype) -> list:
    return cases(text, dtype)


@every_dtype
@every_pattern
@each("op", GROUPWISE)
def test_groupwise_equals_the_reference(cpu, op, text, dtype):
    p = Pattern(text)
    for case in _cases(text, dtype):
        expected = GROUPWISE[op](case.x, p.n, p.m)
        assert_equal_bits(cpu(op)(case.x, p.n, p.m), expected, case.id)
        out = fill_poison(torch.empty_like(expected)) if expected.is_floating_point() else torch.ones_like(expected)
        assert cpu(op)(case.x, p.n, p.m, out=out) is out
        assert_equal_bits(out, expected, f"{case.id}, out=")


@every_dtype
@every_pattern
def test_scale_equals_the_reference(cpu, text, dtype):
    p = Pattern(text)
    for case in _cases(text, dtype):
        result = cpu("nm_soft_threshold_scale")(case.x, p.n, p.m)
        assert_equal_bits(result, reference.soft_threshold_scale(case.x, p.n, p.m), case.id)


@every_dtype
@every_pattern
def test_compress_and_decompress_equal_the_reference(cpu, text, dtype):
    p = Pattern(text)
    for case in _cases(text, dtype):
        values, indices = reference.compress(case.x, p.n, p.m)
        assert_equal_bits(cpu("nm_compress")(case.x, p.n, p.m, None), (values, indices), case.id)
        out = (fill_poison(torch.empty_like(values)), torch.full_like(indices, 255))
        cpu("nm_compress")(case.x, p.n, p.m, None, out=out)
        assert_equal_bits(out, (values, indices), f"{case.id}, out=")
        dense = fill_poison(torch.empty_like(case.x, memory_format=torch.contiguous_format))
        cpu("nm_decompress")(values, indices, p.n, p.m, case.x.shape[-1], out=dense)
        assert_equal_bits(dense, reference.prune(case.x, p.n, p.m), case.id)


@every_dtype
@every_pattern
def test_compress_with_a_given_mask(cpu, text, dtype):
    p = Pattern(text)
    gen = torch.Generator().manual_seed(1)
    for case in _cases(text, dtype):
        mask = reference.mask(case.x, p.n, p.m) & (torch.rand(case.x.shape, generator=gen) < 0.7)
        assert_equal_bits(cpu("nm_compress")(case.x, p.n, p.m, mask), reference.compress(case.x, p.n, p.m, mask), case.id)


def test_compress_rejects_a_mask_that_keeps_too_many(cpu):
    mask = torch.tensor([[True, True, False, False], [True, True, True, False]])
    with pytest.raises(ShapeError, match="more than 2 elements"):
        cpu("nm_compress")(torch.ones(2, 4), 2, 4, mask)


@every_pattern
def test_decompress_drops_the_padding_of_a_partial_group(cpu, text):
    p = Pattern(text)
    values, indices = reference.compress(torch.randn(3, 3 * p.m), p.n, p.m)
    for cols in (2 * p.m + 1, 3 * p.m - 1, 3 * p.m):
        assert_equal_bits(cpu("nm_decompress")(values, indices, p.n, p.m, cols), reference.decompress(values, indices, p.n, p.m, cols))


@each("op", ["nm_decompress", "nm_linear", "nm_linear_dgrad"])
def test_damaged_indices_raise(cpu, op):
    values, indices = reference.compress(torch.randn(2, 10), 3, 5)
    args = (values, indices | 0x0F, 3, 5, 10)
    with pytest.raises(ShapeError, match="does not exist in a group of 5"):
        cpu(op)(*args) if op == "nm_decompress" else cpu(op)(torch.randn(1, 10 if op == "nm_linear" else 2), *args)


@every_dtype
@each("text, method", [(text, "exact") for text in PATTERNS] + [(text, "approx") for text in ("2:2", "2:4", "2:5", "2:8", "2:19")])
def test_mvue_equals_the_reference(cpu, text, dtype, method):
    p = Pattern(text)
    seed = torch.tensor([-(2**61) + 12345, 2**40 + 7])
    for case in _cases(text, dtype):
        expected = reference.mvue(case.x, p.n, p.m, -1, seed, method)
        assert_equal_bits(cpu("nm_mvue")(case.x, p.n, p.m, -1, seed, method), expected, case.id)
        assert_equal_bits(
            cpu("nm_mvue_compress")(case.x, p.n, p.m, -1, seed, method),
            reference.mvue_compress(case.x, p.n, p.m, -1, seed, method),
            case.id,
        )


@each("text", ["2:4", "3:5", "1:16", "7:256"])
@each("shape", [(7, 5), (70, 67), (9, 4, 6), (5, 0), (0, 5), (33, 1), (131, 33)], ids=str)
def test_mvue_along_other_dimensions_pads_the_tail(cpu, text, shape):
    p, seed, g = Pattern(text), torch.tensor([5, 6]), torch.randn(shape)
    for dim in range(-len(shape), -1):
        out = fill_poison(torch.empty(shape))
        cpu("nm_mvue")(g, p.n, p.m, dim, seed, "exact", out=out)
        assert_equal_bits(out, reference.mvue(g, p.n, p.m, dim, seed, "exact"), f"dim {dim}")
        expected = reference.mvue_compress(g, p.n, p.m, dim, seed, "exact")
        room = (fill_poison(torch.empty_like(expected[0])), torch.full_like(expected[1], 255))
        cpu("nm_mvue_compress")(g, p.n, p.m, dim, seed, "exact", out=room)
        assert_equal_bits(room, expected, f"dim {dim}")


@every_dtype
def test_transposable_2_4_equals_the_reference(cpu, dtype):
    gen = torch.Generator().manual_seed(2)
    tied = torch.randint(-2, 3, (4 * 300, 4), generator=gen).to(dtype)
    nasty = torch.tensor([float("nan"), float("inf"), -0.0, 0.0, -1.0, 1.0], dtype=dtype)[torch.randint(6, (400, 8), generator=gen)]
    stacked = torch.randn(2, 3, 8, 12, generator=gen).to(dtype)
    for x in (tied, nasty, stacked, stacked.transpose(-1, -2), tied[:0], stacked[..., :0], torch.zeros(4, 4, dtype=dtype)):
        assert_equal_bits(cpu("nm_transposable_mask")(x, 2, 4), reference.transposable_mask(x, 2, 4), str(tuple(x.shape)))


@each("text", ["1:4", "3:4", "4:4", "2:8", "5:8", "3:5", "2:16", "12:16", "5:32"])
def test_transposable_general_is_optimal(cpu, text):
    p, gen = Pattern(text), torch.Generator().manual_seed(3)
    normal = torch.randn(2 * p.m, 3 * p.m, generator=gen)
    tied = torch.randint(-2, 3, normal.shape, generator=gen).float()
    mixed = torch.where(torch.rand(normal.shape, generator=gen) < 0.2, float("inf"), normal)
    for x in (normal, tied, mixed, normal * 1e-42, normal.exp() ** 8, torch.zeros_like(normal)):
        ours, theirs = cpu("nm_transposable_mask")(x, p.n, p.m), reference.transposable_mask(x, p.n, p.m)
        tiles = ours.view(2, p.m, 3, p.m)
        assert (tiles.sum(1) == p.n).all()
        assert (tiles.sum(3) == p.n).all()
        assert torch.equal((ours & x.isinf()).view_as(tiles).sum((1, 3)), (theirs & x.isinf()).view_as(tiles).sum((1, 3)))
        total = [(x.double().abs().masked_fill(~mask | x.isinf(), 0.0)).view_as(tiles).sum((1, 3)) for mask in (ours, theirs)]
        torch.testing.assert_close(total[0], total[1], rtol=1e-6, atol=0.0)


@every_dtype
@each("text", ["2:4", "1:4", "1:8", "1:16", "3:5", "7:256"])
@each("tokens", [0, 1, 3, 4, 7, 16, 17, 40])
def test_linear_is_as_good_as_dense(cpu, text, dtype, tokens):
    p, gen = Pattern(text), torch.Generator().manual_seed(4)
    cols = 1280 if p.m != 5 else 1285
    w = reference.prune(torch.randn(33, cols, generator=gen).to(dtype), p.n, p.m)
    x, bias = torch.randn(tokens, cols, generator=gen).to(dtype), torch.randn(33, generator=gen).to(dtype)
    values, indices = reference.compress(w, p.n, p.m)
    for b in (None, bias):
        exact = torch.nn.functional.linear(x.double(), w.double(), None if b is None else b.double())
        dense = torch.nn.functional.linear(x, w, b)
        assert_no_worse(cpu("nm_linear")(x, values, indices, p.n, p.m, cols, b), dense, exact)
        out = fill_poison(torch.empty_like(dense))
        assert_no_worse(cpu("nm_linear")(x, values, indices, p.n, p.m, cols, b, out=out), dense, exact)


@every_dtype
def test_linear_gradients_are_as_good_as_dense(cpu, dtype):
    gen = torch.Generator().manual_seed(5)
    w, g = reference.prune(torch.randn(24, 64, generator=gen).to(dtype), 2, 4), torch.randn(2, 9, 24, generator=gen).to(dtype)
    packed = reference.compress(w, 2, 4)
    assert_no_worse(cpu("nm_linear_dgrad")(g, *packed, 2, 4, 64), g @ w, g.double() @ w.double())
    x = torch.randn(18, 10, generator=gen).to(dtype)
    turned = reference.mvue_compress(g.view(18, 24), 2, 4, 0, torch.tensor([1, 2]), "exact")
    dense = reference.decompress(*turned, 2, 4, 18)
    assert_no_worse(cpu("nm_linear_wgrad")(*turned, 2, 4, 18, x), dense @ x, dense.double() @ x.double())


@each("junk", [9.0, float("inf"), float("nan")])
@each("tokens", [1, 4, 9])
def test_linear_uses_damaged_padding_for_nothing(cpu, tokens, junk):
    """A column past the end belongs to a padded tail: its value does not count, whatever it is."""
    values, indices = reference.compress(torch.tensor([[1.0, 0.0, 2.0, 7.0, 0.0, 9.0, 0.0, junk]]), 2, 4)
    y = cpu("nm_linear")(torch.ones(tokens, 6), values, indices, 2, 4, 6, None)
    assert_equal_bits(y, reference.linear(torch.ones(tokens, 6), values, indices, 2, 4, 6))


@each("text", ["2:4", "1:8", "3:5", "200:256"])
@each("tokens", [1, 5])
def test_linear_of_a_partial_last_group(cpu, text, tokens):
    p, gen = Pattern(text), torch.Generator().manual_seed(8)
    values, indices = reference.compress(torch.randn(7, 3 * p.m, generator=gen), p.n, p.m)
    for cols in (1, p.m - 1, p.m + 1, 3 * p.m - 1):
        packed = values[:, : p.kept(cols)], indices[:, : p.index_bytes(cols)]
        x, w = torch.randn(tokens, cols, generator=gen), reference.decompress(*packed, p.n, p.m, cols)
        y = cpu("nm_linear")(x, *packed, p.n, p.m, cols, None)
        assert_no_worse(y, torch.nn.functional.linear(x, w), torch.nn.functional.linear(x.double(), w.double()))


@functools.cache
def _many_chunks(text: str, dtype: torch.dtype) -> list:
    """Calls on a tensor of several chunks, and what the reference makes of each."""
    p, seed = Pattern(text), torch.tensor([3, 4])
    w = torch.randn(40, 1280, generator=torch.Generator().manual_seed(6)).to(dtype)
    packed = reference.compress(w, p.n, p.m)
    expected = [
        *(("nm_" + f.__name__, (w, p.n, p.m), f(w, p.n, p.m)) for f in (*GROUPWISE.values(), reference.soft_threshold_scale)),
        ("nm_compress", (w, p.n, p.m, None), packed),
        ("nm_decompress", (*packed, p.n, p.m, 1280), reference.decompress(*packed, p.n, p.m, 1280)),
    ]
    for dim in (0, 1):
        args = (w, p.n, p.m, dim, seed, "exact")
        expected += [("nm_mvue", args, reference.mvue(*args)), ("nm_mvue_compress", args, reference.mvue_compress(*args))]
    return expected


@every_dtype
@each("text", ["2:4", "3:5", "7:256"])
def test_many_chunks_on_any_number_of_threads(cpu, text, dtype):
    before = torch.get_num_threads()
    for op, args, expected in _many_chunks(text, dtype):
        try:
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                assert_equal_bits(cpu(op)(*args), expected, f"{op}, {count} threads")
        finally:
            torch.set_num_threads(before)


def test_linear_has_the_same_bits_on_any_number_of_threads(cpu):
    before, packed = torch.get_num_threads(), reference.compress(torch.randn(300, 512), 2, 4)
    x, results = torch.randn(5, 512), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(cpu("nm_linear")(x, *packed, 2, 4, 512, None))
    torch.set_num_threads(before)
    assert_equal_bits(results[0], results[1])
    assert_equal_bits(results[0], results[2])


def test_a_lazily_negated_tensor_is_read_as_what_it_says(cpu):
    x = torch.complex(torch.zeros(8), torch.tensor([1.0, -2, 3, 4, 0.5, 0, -1, 2])).conj().imag
    assert x.is_neg()
    assert_equal_bits(cpu("nm_prune")(x, 2, 4), reference.prune(x.resolve_neg(), 2, 4))


@each(
    "w, reason",
    [
        (torch.zeros(4, dtype=torch.float64), "float64"),
        (torch.zeros(4, device="meta"), "on meta"),
        (torch.zeros(2, 4).to_sparse(), "to_dense"),
    ],
    ids=["float64", "meta", "sparse"],
)
def test_declines_with_a_reason(cpu, w, reason):
    entry = next(i for i in implementations("nm_mask") if i.backend == "cpu")
    can, why = entry.supports(w, 2, 4)
    assert not can
    assert reason in why


def test_declines_with_a_reason_when_the_core_is_missing(monkeypatch):
    from nmkernels.backends.cpu import core as module
    from nmkernels.capability import Probe

    monkeypatch.setattr(module, "compiled_core", lambda: Probe(False, "nmkernels._C is not built"))
    entry = next(i for i in implementations("nm_mask") if i.backend == "cpu")
    assert entry.supports(torch.zeros(4), 2, 4) == (False, "nmkernels._C is not built")
