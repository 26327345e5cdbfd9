"""The compiled kernels of groups under every instruction set and on any number of threads: edge cases, patterns inside, across and
beyond 64-bit words, ragged sizes, unaligned memory; each equals the reference to the bit."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from nmkernels import reference
from nmkernels.backends.cpu import core as cpu_core
from nmkernels.capability import Probe
from nmkernels.dispatch import implementations
from nmkernels.pattern import Pattern, ShapeError
from nmkernels.reference.compress import pack_indices, unpack_indices
from nmkernels.testing import assert_equal_bits, cases, fill_poison
from python_tests.backends.gemm_calls import unaligned
from python_tests.backends.kernel_suites import TransposableSuite
from python_tests.for_each import for_each

TUNED = ["2:4", "1:4", "2:8", "1:8", "4:8", "1:16", "1:32"]
ODD = ["1:1", "1:2", "3:4", "4:4", "7:8", "2:16", "8:16", "15:16", "3:32", "20:32", "1:64", "9:64"]
ODD += ["3:5", "7:12", "5:48", "2:96", "3:128", "100:256", "1:256", "7:256"]
CASED = [*TUNED, "3:5", "4:4", "1:256", "7:256"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SPECIAL = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0, float("inf"), -float("inf"), float("nan"), 1e-40, -6e-8, 65504.0])
GROUPWISE = {"nm_mask": reference.mask, "nm_prune": reference.prune, "nm_soft_threshold": reference.soft_threshold}

every_pattern = for_each("text", TUNED + ODD)
every_dtype = for_each("dtype", DTYPES)


def inputs(text: str, dtype: torch.dtype) -> Iterator[Tensor]:
    """The edge-case cases as they are; then, unaligned, odd rows, one group, parts of words, several spans of plain and edge-case
    numbers."""
    if text in CASED:
        yield from (case.x for case in cases(text, dtype))
    m, gen = Pattern(text).m, torch.Generator().manual_seed(1)
    for rows, groups in ((1, 1), (3, 1), (17, 3), (1, 64 // m + 1), (3, 200 // m + 1), (2, 5000 // m + 1)):
        shape = (rows, groups * m)
        normal = torch.randn(shape, generator=gen)
        edge = SPECIAL[torch.randint(len(SPECIAL), shape, generator=gen)]
        for x in (normal, edge, torch.where(torch.rand(shape, generator=gen) < 0.2, edge, normal)):
            yield unaligned(x.to(dtype))


@pytest.mark.quick(1, per="cpu")
@every_dtype
@every_pattern
def test_elementwise_ops(cpu, text, dtype):
    p = Pattern(text)
    for w in inputs(text, dtype):
        for op, want in GROUPWISE.items():
            expected = want(w, p.n, p.m)
            assert_equal_bits(cpu(op)(w, p.n, p.m), expected, op)
            out = unaligned(fill_poison(torch.empty_like(expected)))
            assert cpu(op)(w, p.n, p.m, out=out) is out
            assert_equal_bits(out, expected, f"{op} into unaligned memory")


@pytest.mark.quick(1)
@every_dtype
@every_pattern
@pytest.mark.slow
def test_compressed_form(cpu, text, dtype):
    p, gen = Pattern(text), torch.Generator().manual_seed(2)
    for w in inputs(text, dtype):
        values, indices = reference.compress(w, p.n, p.m)
        out = unaligned(fill_poison(torch.empty_like(values))), unaligned(fill_poison(torch.empty_like(indices)))
        cpu("nm_compress")(w, p.n, p.m, None, out=out)
        assert_equal_bits(out, (values, indices))
        dense = unaligned(fill_poison(torch.empty(w.shape, dtype=dtype)))
        cpu("nm_decompress")(unaligned(values), unaligned(indices), p.n, p.m, w.shape[-1], out=dense)
        assert_equal_bits(dense, reference.decompress(values, indices, p.n, p.m, w.shape[-1]))
        full = reference.mask(torch.randn(w.shape, generator=gen), p.n, p.m)
        for mask in (full, full & (torch.rand(w.shape, generator=gen) < 0.8), torch.zeros_like(full)):
            assert_equal_bits(cpu("nm_compress")(w, p.n, p.m, unaligned(mask)), reference.compress(w, p.n, p.m, mask))
        if p.n < p.m and w.numel():
            full[..., -p.m :] = True
            with pytest.raises(ShapeError, match=f"keeps more than {p.n} elements"):
                cpu("nm_compress")(w, p.n, p.m, full)


@every_pattern
def test_decompress_partial_unordered_and_damaged(cpu, text):
    p, gen = Pattern(text), torch.Generator().manual_seed(3)
    values, indices = reference.compress(torch.randn(5, 300 // p.m * p.m + p.m, generator=gen), p.n, p.m)
    for cols in (1, p.m // 2 + 1, p.m + 1, 130, 300):
        packed = values[:, : p.kept(cols)].contiguous(), indices[:, : p.index_bytes(cols)].contiguous()
        assert_equal_bits(cpu("nm_decompress")(*packed, p.n, p.m, cols), reference.decompress(*packed, p.n, p.m, cols))
    cols = 20 * p.m
    values, indices = reference.compress(torch.randn(6, cols, generator=gen), p.n, p.m)
    where = unpack_indices(indices, p.index_bits, values.shape[-1]).unflatten(-1, (-1, p.n)).flip(-1).flatten(-2)
    reversed_groups = values.unflatten(-1, (-1, p.n)).flip(-1).flatten(-2).contiguous(), pack_indices(where, p.index_bits)
    assert_equal_bits(cpu("nm_decompress")(*reversed_groups, p.n, p.m, cols), reference.decompress(values, indices, p.n, p.m, cols))
    if 1 << p.index_bits > p.m:  # else every index exists
        for at in (0, indices.numel() // 2, indices.numel() - 1):
            damaged = indices.clone()
            damaged.view(-1)[at] |= 0xFF if at + 1 < indices.numel() else 0xFF >> (-p.kept(cols) * p.index_bits % 8)
            with pytest.raises(ShapeError, match="does not exist"):
                cpu("nm_decompress")(values, damaged, p.n, p.m, cols)


@every_dtype
def test_the_scale_has_the_same_bits_everywhere(cpu, dtype):
    for text in CASED:
        p = Pattern(text)
        for case in cases(text, dtype):
            assert_equal_bits(cpu("nm_soft_threshold_scale")(case.x, p.n, p.m), reference.soft_threshold_scale(case.x, p.n, p.m), case.id)
    core = cpu_core.core()
    for text in ("2:4", "3:5", "1:16", "100:256"):
        p, gen = Pattern(text), torch.Generator().manual_seed(4)
        for groups in (1, 3, 9001 // p.m):
            w = unaligned(torch.randn(1, groups * p.m, generator=gen).to(dtype))
            found = cpu("nm_soft_threshold_scale")(w, p.n, p.m)
            torch.testing.assert_close(found, reference.soft_threshold_scale(w, p.n, p.m), rtol=1e-6, atol=0)
            here = core.isa()
            core.use_isa("portable")
            plain = cpu("nm_soft_threshold_scale")(w, p.n, p.m)
            core.use_isa(here)
            assert_equal_bits(found, plain)


@pytest.mark.slow
@for_each("offset", [0, 1])
def test_outputs_larger_than_the_caches(cpu, offset):
    """From 16 MB on they are streamed."""
    w = torch.randn(4_300_032 + offset, generator=torch.Generator().manual_seed(5))[offset:].view(3, -1)
    out = fill_poison(torch.empty(w.numel() + offset))[offset:].view(w.shape)
    wide = w.expand(4, *w.shape).reshape(12, -1)
    for n, m in ((2, 4), (15, 16)):
        assert_equal_bits(cpu("nm_prune")(w, n, m, out=out), reference.prune(w, n, m))
        assert_equal_bits(cpu("nm_soft_threshold")(w, n, m, out=out), reference.soft_threshold(w, n, m))
        packed = cpu("nm_compress")(wide, n, m, None)
        assert_equal_bits(packed, tuple(x.repeat(4, 1) for x in reference.compress(w, n, m)))
        assert_equal_bits(cpu("nm_decompress")(*packed, n, m, w.shape[-1]), reference.prune(wide, n, m))
    assert_equal_bits(cpu("nm_mask")(wide.expand(2, *wide.shape), 2, 4)[1], reference.mask(w, 2, 4).repeat(4, 1))


class TestTransposableMask(TransposableSuite):
    shapes = [(4, 4), (1200, 4), (4, 1028), (2, 3, 8, 12), (0, 4), (2, 3, 8, 0)]


@for_each("text", ["1:4", "3:4", "4:4", "2:8", "5:8", "3:5", "2:16", "12:16", "5:32"])
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


@pytest.mark.quick(1, per="cpu")
@every_dtype
@for_each("text", ["2:4", "3:5", "7:256"])
def test_many_chunks_on_any_number_of_threads(cpu, on_threads, text, dtype):
    for op, args, expected in _many_chunks(text, dtype):
        for found in on_threads(lambda op=op, args=args: cpu(op)(*args)):
            assert_equal_bits(found, expected, op)


def test_a_lazily_negated_tensor_is_read_negated(cpu):
    x = torch.complex(torch.zeros(8), torch.tensor([1.0, -2, 3, 4, 0.5, 0, -1, 2])).conj().imag
    assert x.is_neg()
    assert_equal_bits(cpu("nm_prune")(x, 2, 4), reference.prune(x.resolve_neg(), 2, 4))


def test_declines_with_a_reason(monkeypatch):
    entry = next(i for i in implementations("nm_mask") if i.backend == "cpu")
    for w, reason in (
        (torch.zeros(4, dtype=torch.float64), "float64"),
        (torch.zeros(4, device="meta"), "on meta"),
        (torch.zeros(2, 4).to_sparse(), "to_dense"),
    ):
        can, why = entry.supports(w, 2, 4)
        assert not can and reason in why
    monkeypatch.setattr(cpu_core, "compiled_core", lambda: Probe(False, "nmkernels._C is not built"))
    assert entry.supports(torch.zeros(4), 2, 4) == (False, "nmkernels._C is not built")
