"""What every backend for GPUs is asked of its kernels, beyond the generic suite: each class is subclassed by the tests of a backend.

    class TestCompress(CompressSuite):
        sizes = staticmethod(lambda m: [(9, 5 * m)])

Modules that use one have the fixtures ``device`` and ``ours``: ``ours("nm_mask")`` is the backend's entry for an op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from nmkernels import Pattern, ShapeError, dispatch, reference, testing
from nmkernels.reference import pack_indices, uniforms24
from nmkernels.reference.integers import pack_integers
from python_tests.backends.gemm_calls import (
    ACTIVATIONS,
    PATTERNS,
    as_good_as_dense,
    hard,
    inputs,
    integer_weight,
    packed,
    product_of_integers,
    unaligned,
)
from python_tests.conformance import moved, slow_interpreted
from python_tests.for_each import for_each
from python_tests.ops.samples import seed

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
INF, NAN = float("inf"), float("nan")
MVUE = ["nm_mvue", "nm_mvue_compress"]
Ours = Callable[[str], dispatch.Impl]


def to(device: str, *xs: Tensor | None) -> list[Any]:
    return [None if x is None else x.to(device) for x in xs]


def skewed(x: Tensor, by: int, device: str) -> Tensor:
    """The same numbers ``by`` elements past the beginning of an allocation."""
    memory = torch.full((x.numel() + 2 * by,), 77, device=device).to(x.dtype)
    return memory[by : by + x.numel()].copy_(x.flatten()).view(x.shape)


def some_mask(rows: int, cols: int, p: Pattern) -> Tensor:
    """Any number of elements up to N kept in each group, at random places."""
    groups = torch.rand(rows, cols // p.m, p.m)
    most = torch.randint(0, p.n + 1, (*groups.shape[:-1], 1))
    return (groups.argsort(-1).argsort(-1) < most).flatten(-2)


def some_mask_both_ways(rows: int, cols: int, p: Pattern) -> Tensor:
    """At most N of M along rows and along columns: circulant tiles with their rows shuffled, some elements left out."""
    circle = (torch.arange(p.m)[:, None] - torch.arange(p.m)) % p.m < p.n
    tiles = [[circle[torch.randperm(p.m)] for _ in range(cols // p.m)] for _ in range(rows // p.m)]
    whole = torch.cat([torch.cat(row, 1) for row in tiles]) if rows and cols else torch.zeros(rows, cols, dtype=torch.bool)
    return whole & (torch.rand(rows, cols) < 0.8)


def ties_and_roundings(dtype: torch.dtype) -> Tensor:
    """256 tiles of each kind where many masks tie, some only after rounding, and where sums overflow or hold NaN and infinity."""
    info = torch.finfo(dtype)
    options: list[list[float]] = [
        [0, 1],
        [1, 2, 3],
        [1, 1 + info.eps, 0.5, 3],
        [1, 2**-12, 2**-24, 2**-23, 2**12],
        [0, info.smallest_normal / 4, info.smallest_normal * 3 / 4, info.smallest_normal],
        [info.max, info.max / 2, info.max / 4, 0, 1],
        [info.max, 1, INF, NAN],
        [INF, 1, 2],
        [NAN, 1, 2],
        [NAN, INF, 0],
    ]
    signed = [torch.tensor([*each, *(-x for x in each)], dtype=torch.float64).to(dtype) for each in options]
    return torch.cat([each[torch.randint(len(each), (8, 512))] for each in signed])


def probabilities(groups: Tensor, n: int) -> Tensor:
    """p_i = min(1, |g_i| / h) that sum to n, in float64."""
    a = groups.double().abs()
    p = n * a / a.sum(-1, keepdim=True)
    for _ in range(n - 1):
        full = p >= 1
        left = a.masked_fill(full, 0.0)
        p = torch.where(full, 1.0, left / left.sum(-1, keepdim=True) * (n - full.sum(-1, keepdim=True)))
    return p


def at_breakpoints(p: Pattern, dtype: torch.dtype, u: Tensor) -> Tensor:
    """For each 24-bit number a group with a running sum of probabilities next to it (modulo 1): the nearest of many."""
    pool = torch.randn(300_000 // p.m, p.m) * torch.logspace(0, -3, p.m, base=2)
    pool[::3] *= torch.randn_like(pool[::3]).exp()
    pool = pool.to(dtype)
    sums = probabilities(pool, p.n).cumsum(-1)[:, :-1].remainder(1)
    order = sums.flatten().argsort()
    at = torch.searchsorted(sums.flatten()[order], u.double() / 2**24).clamp(max=len(order) - 1)
    return pool[order[at] // (p.m - 1)]


class CompressSuite:
    """compress and decompress: every width of index, ragged rows, given masks, damaged indices."""

    patterns: list[str]
    dtypes = [F32, BF16, F16]
    wide: int
    """Elements of a row that no tile ends with."""
    sizes: Callable[[int], list[tuple[int, int]]]
    """Rows and columns for groups of M: that end inside a byte, and that need several tiles."""

    @slow_interpreted
    @pytest.mark.parametrize("sixth", range(6))
    def test_equals_the_reference(self, device: str, ours: Ours, poison: None, sixth: int) -> None:
        for p, dtype, given in product(map(Pattern, self.patterns[sixth::6]), self.dtypes, [False, True]):
            for rows, cols in self.sizes(p.m):
                w = torch.randn(rows, cols).to(dtype)
                w[0, : p.m] = w[0, 0]  # ties
                want = reference.compress(w, p.n, p.m, mask := some_mask(rows, cols, p) if given else None)
                dense = reference.decompress(*want, p.n, p.m, cols)
                x, m, values, indices = to(device, w, mask, *want)
                what = f"{p} {dtype} {rows} x {cols}"
                testing.assert_equal_bits(ours("nm_compress").fn(x, p.n, p.m, m), want, what)
                testing.assert_equal_bits(ours("nm_decompress").fn(values, indices, p.n, p.m, cols), dense, what)

    def test_a_last_group_that_the_end_of_the_row_cuts(self, device: str, ours: Ours, poison: None) -> None:
        for p in map(Pattern, ["2:4", "1:8", "2:8", "1:16", "3:5", "4:32"]):
            for wide, missing in product((p.m, 8 * p.m, self.wide // p.m * p.m), {1, p.m - 1}):
                args = p.n, p.m, wide - missing
                packed = reference.compress(torch.randn(3, wide), p.n, p.m)
                got = ours("nm_decompress").fn(*to(device, *packed), *args)
                testing.assert_equal_bits(got, reference.decompress(*packed, *args), f"{p}, {wide} - {missing}")

    def test_memory_that_is_not_aligned(self, device: str, ours: Ours) -> None:
        for p, given in product(map(Pattern, ["2:4", "2:8", "3:5"]), [False, True]):
            w = torch.randn(4, 40 * p.m).bfloat16()
            mask = some_mask(4, 40 * p.m, p) if given else None
            want = reference.compress(w, p.n, p.m, mask)
            places = skewed(torch.zeros_like(want[0]), 1, device), skewed(torch.zeros_like(want[1]), 3, device)
            there = None if mask is None else skewed(mask, 3, device)
            got = ours("nm_compress").fn(skewed(w, 1, device), p.n, p.m, there, out=places)
            assert all(a is b for a, b in zip(got, places, strict=True))
            testing.assert_equal_bits(got, want, str(p))
            dense = skewed(torch.zeros_like(w), 3, device)
            assert ours("nm_decompress").fn(*places, p.n, p.m, w.shape[1], out=dense) is dense
            testing.assert_equal_bits(dense, reference.decompress(*want, p.n, p.m, w.shape[1]), str(p))

    @slow_interpreted
    def test_a_mask_that_keeps_too_many_is_refused(self, device: str, ours: Ours) -> None:
        for p, rows in product(map(Pattern, ["2:4", "1:8", "2:8", "3:5", "2:32"]), [1, 640]):
            w, mask = torch.randn(rows, 8 * p.m, device=device), torch.zeros(rows, 8 * p.m, dtype=torch.bool, device=device)
            mask[:, p.m - p.n : p.m] = True
            ours("nm_compress").fn(w, p.n, p.m, mask)
            mask[rows - 1, 8 * p.m - p.n - 1 :] = True
            with pytest.raises(ShapeError, match=f"keeps more than {p.n} elements in a group, but {p} stores {p.n}; prune it first"):
                ours("nm_compress").fn(w, p.n, p.m, mask)

    def test_an_index_outside_its_group_writes_nothing(self, device: str, ours: Ours) -> None:
        for (pattern, bad), groups in product([("1:8", 15), ("2:8", 9), ("1:32", 255), ("2:5", 7), ("3:6", 9)], [2, 8]):
            p, memory = Pattern(pattern), torch.full((3, groups * Pattern(pattern).m), 5.0, device=device)
            packed = pack_indices(torch.tensor([[*range(p.n - 1), bad] * groups]).to(torch.uint8), p.index_bits).to(device)
            got = ours("nm_decompress").fn(torch.ones(1, groups * p.n, device=device), packed, p.n, p.m, groups * p.m, out=memory[1:2])
            assert got.sum() == groups * (p.n - 1)
            assert (memory[[0, 2]] == 5).all()


class ScaleSuite:
    """soft_threshold_scale: sums over several blocks, their ragged ends, fp64, values that are not finite, out."""

    patterns: list[str]
    dtypes = [F32, BF16, F16]
    chunk: int
    """Elements of one partial sum of the usual patterns."""
    chunks: list[tuple[int, int]]
    """Numbers of chunks, and of further groups."""

    def check(self, ours: Ours, device: str, w: Tensor, pattern: str) -> None:
        p = Pattern(pattern)
        got, want = ours("nm_soft_threshold_scale").fn(w.to(device), p.n, p.m), reference.soft_threshold_scale(w.resolve_neg(), p.n, p.m)
        assert (got.shape, got.dtype, got.device.type) == ((), F32, device)
        what = f"{tuple(w.shape)} {pattern} {w.dtype}"
        torch.testing.assert_close(got.cpu(), want, rtol=1e-6, atol=0, equal_nan=True, msg=lambda m: f"{m}\n{what}")

    def test_equals_the_reference(self, device: str, ours: Ours, poison: None) -> None:
        for pattern, dtype, (chunks, more) in product(self.patterns, self.dtypes, self.chunks):
            m = Pattern(pattern).m
            self.check(ours, device, torch.randn(max(1, chunks * self.chunk // m + more), m).to(dtype), pattern)

    def test_float64_sums(self, device: str, ours: Ours) -> None:
        """Many small terms and one large: float32 sums would lose them."""
        w = torch.full((2, self.chunk), 1.0)
        w[:, ::4], w[:, 1::4] = 0.999, 0.0
        w[0, 0] = 3e4
        self.check(ours, device, w, "2:4")

    def test_not_finite_and_zero(self, device: str, ours: Ours) -> None:
        for values in [[NAN, 1, 2, 3], [INF, 1, 2, 3], [INF, INF, INF, 3], [0, 0, 0, 0], [1, 1, 1, 1]]:
            w = torch.zeros(2700, 4)
            w[2699] = torch.tensor(values)
            self.check(ours, device, w, "2:4")
            self.check(ours, device, w, "3:4")

    def test_out_and_two_runs(self, device: str, ours: Ours) -> None:
        w, out = torch.randn(1000, 24, device=device), torch.full((), 7.0, device=device)
        scale = ours("nm_soft_threshold_scale").fn
        assert scale(w, 2, 8, out=out) is out
        testing.assert_equal_bits(out, scale(w, 2, 8))
        scale(w[:0], 2, 8, out=out)
        assert out == 0

    def test_unaligned_and_strided(self, device: str, ours: Ours) -> None:
        for w, pattern in (
            (torch.randn(self.chunk * 3 // 12 * 12 + 13)[1:].view(-1, 12), "1:4"),
            (torch.randn(24, 50).t(), "2:4"),
            (torch._neg_view(torch.randn(10, 8)), "2:4"),
        ):
            self.check(ours, device, w, pattern)


class TransposableSuite:
    """transposable_mask: ties of every kind, ragged blocks, unaligned memory."""

    dtypes = [F32, BF16, F16]
    shapes: list[tuple[int, ...]]

    def check(self, ours: Ours, device: str, w: Tensor, out: Tensor | None = None) -> Tensor:
        got = ours("nm_transposable_mask").fn(w.to(device), 2, 4, out=out)
        want = reference.transposable_mask(w.resolve_neg(), 2, 4)
        testing.assert_equal_bits(got.cpu(), want, f"{tuple(w.shape)} {w.dtype}")
        return got

    def test_ties_and_roundings(self, device: str, ours: Ours, poison: None) -> None:
        """The first of the best, where many tie, some only after rounding, and where sums overflow or hold NaN and infinity."""
        for dtype in [F32, BF16, F16]:
            self.check(ours, device, ties_and_roundings(dtype))

    def test_a_smaller_lower_half_may_come_first(self, device: str, ours: Ours) -> None:
        """Two masks below one upper half differ by less than the rounding of the whole: the first is taken, not the larger."""
        w = torch.zeros(4, 4)
        w[0, :2] = w[1, 0] = w[1, 2] = 2.0**26
        w[2, 3] = w[3, 3] = 1.0
        w[3, 1] = 0.5  # rows 2 and 3 take columns (1, 3) and (2, 3), or, worth 0.5 more, (2, 3) and (1, 3)
        want = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1], [0, 0, 1, 1]], dtype=torch.bool)
        assert torch.equal(self.check(ours, device, w).cpu(), want)

    def test_shapes(self, device: str, ours: Ours, poison: None) -> None:
        for shape, dtype in product(self.shapes, self.dtypes):
            self.check(ours, device, torch.randn(shape).to(dtype))

    def test_unaligned_and_negated(self, device: str, ours: Ours) -> None:
        for dtype in self.dtypes:
            self.check(ours, device, torch._neg_view(torch.randn(8, 8).to(dtype)))
            for offset in (0, 1, 2, 3, 4, 8):
                w, room = torch.randn(12 * 24 + offset).to(dtype)[offset:].view(12, 24), torch.ones(400, dtype=torch.bool, device=device)
                out = room[offset : offset + 288].view(12, 24)
                assert self.check(ours, device, w, out) is out
                assert room[:offset].all() and room[offset + 288 :].all(), "written beyond out"


class MvueSuite:
    """mvue and mvue_compress: groups next to every breakpoint, tiles with ragged edges, wide groups, memory anywhere."""

    cases: list[tuple[str, str]]
    """Patterns and methods."""
    shapes = [((13, 120), 1), ((203, 67), 0), ((144, 64), 0), ((2, 45, 9), 1), ((3, 2, 240), -1), ((70, 1), 0)]
    breakpoints: list[str]
    groups = 2048
    """Groups next to breakpoints, of each pattern."""
    wide: list[str]
    lines = 37
    """Lines of wide groups."""
    unaligned = ["2:4"]

    def check(self, ours: Ours, g: Tensor, p: Pattern, dim: int, words: Tensor, method: str, device: str, what: str = "") -> None:
        """Both ops, twice, against the reference."""
        for op in MVUE:
            want = getattr(reference, op.removeprefix("nm_"))(g, p.n, p.m, dim, words, method)
            for run in ("first", "second"):
                got = ours(op).fn(g.to(device), p.n, p.m, dim, words.to(device), method)
                testing.assert_equal_bits(got, want, f"{op} {p} {what} {run} run")

    @slow_interpreted
    @pytest.mark.parametrize("sixth", range(6))
    def test_shapes(self, device: str, ours: Ours, sixth: int) -> None:
        """Tiles that cross rows, columns and the padded tail; a number of groups that no four divide; several tiles."""
        for pattern, method in self.cases:
            p = Pattern(pattern)
            for shape, dim in self.shapes[sixth::6]:
                along = dim % len(shape) == len(shape) - 1 and shape[-1] % p.m
                g = torch.randn((*shape[:-1], 15 * p.m) if along else shape, dtype=BF16)
                self.check(ours, g, p, dim, seed(-3, 2**33), method, device, f"{shape} {dim}")

    def test_wide_groups(self, device: str, ours: Ours) -> None:
        for p, dim in product(map(Pattern, self.wide), [0, 1]):
            g = torch.randn((p.m + 3, self.lines) if dim == 0 else (self.lines - 2, 2 * p.m))
            g *= torch.logspace(0, 9, g.shape[dim], base=2).unsqueeze(1 - dim)
            g[:, 0] = NAN if dim == 0 else 0.0
            self.check(ours, g, p, dim, seed(9), "exact", device)

    def test_unaligned_memory_and_out(self, device: str, ours: Ours) -> None:
        for p, op, dim, dtype, start in product(map(Pattern, self.unaligned), MVUE, [0, 1], [F32, F16], (1, 3, 8)):
            words, shape = seed(1, 2), (24, 16) if p.m != 5 else (20, 15)
            g = skewed(torch.randn(shape).to(dtype), start, device)
            want = getattr(reference, op.removeprefix("nm_"))(g.cpu(), p.n, p.m, dim, words, "exact")
            wants = [want] if op == "nm_mvue" else list(want)
            rooms = [torch.zeros(x.numel() + 32, dtype=x.dtype, device=device) for x in wants]
            outs: list[Any] = [room[start + 8 :][: x.numel()].view(x.shape) for room, x in zip(rooms, wants, strict=True)]
            ours(op).fn(g, p.n, p.m, dim, words.to(device), "exact", out=outs[0] if op == "nm_mvue" else outs)
            testing.assert_equal_bits(outs, wants, f"{op} {p} {start}")
            for room, x in zip(rooms, wants, strict=True):
                assert not room[: start + 8].any() and not room[start + 8 + x.numel() :].any(), "written beyond out"

    @slow_interpreted
    @pytest.mark.quick(1, per="isa")
    @pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
    def test_breakpoints(self, dtype: torch.dtype, device: str, ours: Ours) -> None:
        """What is decided by rough arithmetic is decided rightly, and what is too near is left to the definition."""
        for p in map(Pattern, self.breakpoints):
            words = seed(21, 5)
            g = at_breakpoints(p, dtype, uniforms24(words, self.groups)).flatten()
            self.check(ours, g, p, -1, words, "exact", device, "along memory")
            self.check(ours, g.view(8, -1).t().contiguous(), p, 0, words, "exact", device, "across it")

    def test_strides(self, device: str, ours: Ours) -> None:
        words = seed(4, 4)
        apart = torch.stack([words, words], -1)[:, 0]
        for dim in [0, 1]:
            for g in (torch.randn(24, 40).t(), torch.randn(30, 24).t(), torch.randn(30, 48)[:, ::2], torch.randn(8).expand(20, 8)):
                if dim == 0 or g.shape[1] % 4 == 0:
                    self.check(ours, g, Pattern("2:4"), dim, apart, "exact", device)


class FewTokensSuite:
    """linear of 1 to 4 tokens: every pattern and epilogue, every column, and what an inf or a NaN reaches."""

    def run(
        self, ours: Ours, x: Tensor, values: Tensor, indices: Tensor, text: str, bias: Tensor | None = None, activation: str = ""
    ) -> Tensor:
        y, p = testing.fill_poison(x.new_empty(*x.shape[:-1], values.shape[0])), Pattern(text)
        return ours("nm_linear").fn(x, values, indices, p.n, p.m, x.shape[-1], bias, activation, out=y)

    def check(
        self, ours: Ours, x: Tensor, values: Tensor, indices: Tensor, w: Tensor, text: str, bias: Tensor | None = None,
        activation: str = "",
    ) -> Tensor:  # fmt: skip
        """As good as dense in the same dtype, and twice the same bits; the result."""
        y = self.run(ours, x, values, indices, text, bias, activation)
        as_good_as_dense(y, w, x, bias, activation, what=text)
        testing.assert_equal_bits(self.run(ours, x, values, indices, text, bias, activation), y, f"{text} {tuple(x.shape)}")
        return y

    @pytest.mark.quick(2)
    @pytest.mark.parametrize("text", PATTERNS)
    def test_every_dtype(self, text: str, device: str, ours: Ours) -> None:
        """Columns that end inside a group and inside the last step."""
        m = Pattern(text).m
        for dtype in [F32, BF16, F16]:
            for tokens, rows, cols in ((1, 37, 24 * m), (2, 1, 8 * m), (3, 9, max(16, 160 // m) * m), (4, 16, 9 * m - 1), (2, 131, 16 * m)):
                values, indices, w = packed(text, rows, cols, dtype, device)
                b, activation = (inputs(1, rows, dtype, device)[0], ("", "silu", "relu2", "gelu")[tokens - 1]) if rows > 1 else (None, "")
                self.check(ours, inputs(tokens, cols, dtype, device), values, indices, w, text, b, activation)

    def test_every_column_is_found(self, device: str, ours: Ours) -> None:
        """One-hot inputs return the weight to the bit, so that every thread's choice shows."""
        for text, dtype in product(PATTERNS, [F32, BF16]):
            cols = 3 * Pattern(text).m * 8
            values, indices, w = packed(text, 11, cols, dtype, device)
            eye = torch.eye(cols, dtype=dtype, device=device)
            for tokens, first in ((1, 0), (1, cols // 2), (1, cols - 1), (4, 0), (4, cols // 2), (4, cols - 4)):
                y = self.run(ours, eye[first : first + tokens], values, indices, text)
                testing.assert_equal_bits(y + 0.0, w[:, first : first + tokens].t().contiguous() + 0.0, text)

    def test_inf_and_nan_reach_only_what_they_meet(self, device: str, ours: Ours) -> None:
        for text in PATTERNS:
            cols = 16 * Pattern(text).m
            values, indices, w = packed(text, 8, cols, device=device)
            x, met = inputs(3, cols, device=device), torch.zeros(3, 8, dtype=torch.bool, device=device)
            for token, (bad, column) in enumerate(((INF, 0), (NAN, cols // 2), (-INF, cols - 1))):
                x[token, column] = bad
                met[token] = w[:, column] != 0
            testing.assert_equal_bits(~self.run(ours, x, values, indices, text).isfinite(), met)
            values[3, 7] = NAN
            only = torch.arange(8, device=device).eq(3).expand(3, 8)
            testing.assert_equal_bits(self.run(ours, inputs(3, cols, device=device), values, indices, text).isnan(), only)

    def test_activations_keep_nan_and_zero(self, device: str, ours: Ours) -> None:
        values, indices, _ = packed("2:4", 4, 8, device=device)
        bias = torch.tensor([NAN, 1e30, -1e30, -0.0], device=device)
        for activation in ["gelu", "silu", "relu2"]:
            y = self.run(ours, torch.zeros(1, 8, device=device), values, indices, "2:4", bias, activation)[0]
            testing.assert_equal_bits(y.isnan(), bias.isnan())
            assert y[1] >= 1e30 and y[2].abs() == 0 and y[3] == 0

    def test_empty(self, device: str, ours: Ours) -> None:
        values, indices, _ = packed("2:4", 5, 8, device=device)
        assert self.run(ours, torch.empty(0, 8, device=device), values, indices, "2:4").shape == (0, 5)
        assert self.run(ours, torch.empty(2, 8, device=device), values[:0], indices[:0], "2:4").shape == (2, 0)
        bias = inputs(1, 5, device=device)[0]
        none = self.run(ours, torch.empty(2, 0, device=device), values[:, :0], indices[:, :0], "2:4", bias)
        testing.assert_equal_bits(none, bias.expand(2, 5).contiguous())


class IntegersSuite:
    """Weights of integers with steps: what follows a product, numbers at the ends of their ranges, decoding and rounding."""

    counts = (1, 6, 50)
    """Tokens: one number for each way to multiply them."""
    tuned: Sequence[str] = ("2:4", "1:4")
    """Patterns with kernels of their own."""
    longest = 8192
    """Columns of the longest sums."""

    def run(self, ours: Ours, device: str, *args: Any) -> Tensor:
        """The op's result, every byte of it written."""
        with testing.poison():
            return moved(ours("nm_linear_integers").fn(*moved(args, device)), "cpu")

    def check(self, ours: Ours, device: str, text: str, x: Tensor, operands: Sequence[Tensor], *rest: Any, what: str = "") -> Tensor:
        """As good as the reference in x's dtype, and twice the same bits; the result."""
        p = Pattern(text)
        y = product_of_integers(partial(self.run, ours, device), text, x, operands, *rest, what=what)
        testing.assert_equal_bits(self.run(ours, device, x, *operands, p.n, p.m, x.shape[-1], *rest), y, what)
        return y

    @slow_interpreted
    @pytest.mark.parametrize("bits", [8, 4])
    def test_every_value_is_decoded_and_placed(self, bits: int, device: str, ours: Ours) -> None:
        """One-hot tokens return the weight to the bit, the smallest integers among it."""
        for text, dtype, steps in product(self.tuned, [F32, BF16], (1, 2)):
            p, cols = Pattern(text), 32 * Pattern(text).m
            values, indices, step = integer_weight(text, 11, cols, bits, steps)
            values[2] = integer_weight(text, 11, cols, bits, steps, extreme=True)[0][2]
            w = reference.decompress(reference.dequantize_values(values, step, p.kept(cols), dtype), indices, p.n, p.m, cols)
            for count, first in product((1, 4, 16), (0, cols // 2, -16)):
                y = self.run(ours, device, torch.eye(cols, dtype=dtype)[first:][:count], values, indices, step, p.n, p.m, cols)
                testing.assert_equal_bits(y + 0.0, w[:, first:][:, :count].t().contiguous() + 0.0, f"{text}, {count} tokens")

    @pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
    def test_what_follows_the_product(self, dtype: torch.dtype, device: str, ours: Ours) -> None:
        operands, bias = integer_weight("2:4", 24, 256, 4, 2), inputs(1, 24, dtype)[0]
        for count, activation in product(self.counts, ACTIVATIONS):
            for residual in (None, inputs(count, 24, dtype, seed=7)):
                self.check(ours, device, "2:4", inputs(count, 256, dtype), operands, bias, activation, residual)

    @pytest.mark.quick(1)
    @pytest.mark.parametrize("bits", [8, 4])
    def test_largest_values(self, bits: int, device: str, ours: Ours) -> None:
        """All products of one sign, and every digit at its end."""
        for text, count, cols in product(self.tuned, (1, 2, 4, 12), (512, self.longest)):
            operands = integer_weight(text, 4, cols, bits, 1, extreme=True)
            for largest, dtype in product((255 / 128, -255 / 128, 2047 / 1024, 1.0), (BF16, F16)):
                self.check(ours, device, text, torch.full((count, cols), largest, dtype=dtype), operands)

    @pytest.mark.parametrize("bits", [8, 4])
    def test_one_large_column(self, bits: int, device: str, ours: Ours) -> None:
        operands = integer_weight("2:4", 40, 1024, bits, 8)
        for dtype, count in product((BF16, F16), (1, 4, 9)):
            x = inputs(count, 1024, dtype)
            x[:, 77] *= 100
            self.check(ours, device, "2:4", x, operands)

    def lost(self, text: str, count: int, dtype: torch.dtype, met: Tensor) -> Tensor:
        """Which results of a token with an inf or a NaN are not finite: those whose stored weight meets it."""
        return met

    @slow_interpreted
    @pytest.mark.parametrize("bits", [8, 4])
    def test_tokens_that_are_not_finite(self, bits: int, device: str, ours: Ours) -> None:
        """They reach what they meet, and no other token."""
        for text, (count, dtype) in product(self.tuned, ((2, BF16), (5, BF16), (16, BF16), (6, F32))):
            p, operands = Pattern(text), integer_weight(text, 33, 640, bits, 4 if text == "3:5" else 5)
            met = reference.decompress(torch.ones(33, p.kept(640)), operands[1], p.n, p.m, 640)[:, 133] != 0
            clean, rest = inputs(count, 640, dtype), (*operands, p.n, p.m, 640)
            before, lost = self.run(ours, device, clean, *rest), self.lost(text, count, dtype, met)
            for bad in (NAN, INF, -INF):
                x = clean.clone()
                x[1, 133] = bad
                y = self.run(ours, device, x, *rest)
                others = [t for t in range(count) if t != 1]
                testing.assert_equal_bits(y[others], before[others], f"{text}, {count} tokens")
                assert torch.equal(~y[1].isfinite(), lost), f"{text}, {count} tokens"
                testing.assert_no_worse(y[1][~lost], before[1][~lost], before[1][~lost].double())

    def test_steps_that_are_zero_tiny_or_nan(self, device: str, ours: Ours) -> None:
        for text, bits, count in product(("2:4", "1:8"), (8, 4), sorted({*self.counts, 2})):
            p, (values, indices, step) = Pattern(text), integer_weight(text, 6, 256, bits, 2)
            step[0], step[1, 1], step[2] = 0, 0, 1e-39
            x = inputs(count, 256, BF16)
            assert not self.check(ours, device, text, x, (values, indices, step))[:, 0].any()
            step[3, 1] = NAN
            y = self.run(ours, device, x, values, indices, step, p.n, p.m, 256)
            assert torch.equal(y.isnan(), torch.arange(6).eq(3).expand(count, 6))

    @for_each("scale", [0.0, 1e-39, 1e-37, 1e-30, 1e30])
    def test_extreme_inputs(self, scale: float, device: str, ours: Ours) -> None:
        """Zeros of both signs, and inputs that powers of two do not reach."""
        operands = integer_weight("2:4", 16, 256, 8)
        for count in (1, 3):
            x = (inputs(count, 256) * scale).to(BF16)
            self.check(ours, device, "2:4", x, operands)
            x[:, 128:] = inputs(count, 128, BF16)
            self.check(ours, device, "2:4", x, operands)

    @pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
    def test_dequantize(self, dtype: torch.dtype, device: str, ours: Ours) -> None:
        sizes = (1, 1, 1), (3, 15, 1), (5, 15, 5), (2, 128, 4), (7, 1000, 8), (0, 8, 2), (300, 64, 1), (3, 48, 6), (2, 12, 3), (2, 4100, 1)
        for bits, (rows, kept, steps), move in product((8, 4), sizes, (Tensor.clone, unaligned)):
            gen = torch.Generator().manual_seed(kept)
            values = pack_integers(torch.randint(-8, 8, (rows, kept), generator=gen).to(torch.int8) * (15 if bits == 8 else 1), bits)
            step = torch.randn(rows, steps, generator=gen).to(BF16)
            step[: rows // 2] *= 1e-38
            step[2:3] = 600.0  # beyond float16
            out = testing.fill_poison(move(torch.empty(rows, kept, dtype=dtype, device=device)))
            ours("nm_dequantize_values").fn(move(values.to(device)), step.to(device), kept, dtype, out=out)
            testing.assert_equal_bits(out.cpu(), reference.dequantize_values(values, step, kept, dtype), f"{rows} {kept} {steps}")

    @pytest.mark.quick(1)
    @pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
    def test_quantize(self, dtype: torch.dtype, device: str, ours: Ours) -> None:
        halves = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 63.5]])
        # the step −1 would be better than 1, but the first of the largest is negative
        both = torch.randint(-7, 8, (8, 130))
        both[:, 3], both[:, 100:102] = -8, 8
        cases = [(hard(24, kept), steps) for kept, steps in ((1, 1), (15, 3), (66, 1), (128, 4), (200, 5))]
        cases += [(x, 1) for x in (halves, both, torch.randn(0, 8), torch.randn(2, 3, 24), torch.randn(3, 0))]
        for bits, (w, steps) in product((8, 4), cases):
            with testing.poison():
                got = ours("nm_quantize_values").fn(w.to(dtype).to(device), bits, steps)
            testing.assert_equal_bits(moved(got, "cpu"), reference.quantize_values(w.to(dtype), bits, steps), f"{tuple(w.shape)} {steps}")
