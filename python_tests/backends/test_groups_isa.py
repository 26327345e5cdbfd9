"""The group kernels under every instruction set: patterns inside, across and beyond 64-bit words, ragged sizes, unaligned memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from nmkernels import reference
from nmkernels.pattern import Pattern, ShapeError
from nmkernels.reference.compress import pack_indices, unpack_indices
from nmkernels.testing import assert_equal_bits, fill_poison

TUNED = ["2:4", "1:4", "2:8", "1:8", "4:8", "1:16", "1:32"]
ODD = [
    "1:1",
    "1:2",
    "3:4",
    "7:8",
    "2:16",
    "8:16",
    "15:16",
    "3:32",
    "20:32",
    "1:64",
    "9:64",
    "3:5",
    "7:12",
    "5:48",
    "2:96",
    "3:128",
    "100:256",
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SPECIAL = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0, float("inf"), -float("inf"), float("nan"), 1e-40, -6e-8, 65504.0])

every_pattern = pytest.mark.parametrize("text", TUNED + ODD)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def unaligned(x: Tensor) -> Tensor:
    """The same tensor one element off any alignment."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def inputs(text: str, dtype: torch.dtype) -> Iterator[Tensor]:
    """Odd rows, one group, parts of words, several spans; plain numbers and nasty ones."""
    m, gen = Pattern(text).m, torch.Generator().manual_seed(1)
    for rows, groups in ((1, 1), (3, 1), (17, 3), (1, 64 // m + 1), (3, 200 // m + 1), (2, 5000 // m + 1)):
        shape = (rows, groups * m)
        normal = torch.randn(shape, generator=gen)
        nasty = SPECIAL[torch.randint(len(SPECIAL), shape, generator=gen)]
        for x in (normal, nasty, torch.where(torch.rand(shape, generator=gen) < 0.2, nasty, normal)):
            yield unaligned(x.to(dtype))


@every_dtype
@every_pattern
def test_elementwise_ops(cpu, text, dtype):
    p = Pattern(text)
    for w in inputs(text, dtype):
        for op, want in (("mask", reference.mask), ("prune", reference.prune), ("soft_threshold", reference.soft_threshold)):
            expected = want(w, p.n, p.m)
            assert_equal_bits(cpu(f"nm_{op}")(w, p.n, p.m), expected, op)
            out = unaligned(fill_poison(torch.empty_like(expected)))
            cpu(f"nm_{op}")(w, p.n, p.m, out=out)
            assert_equal_bits(out, expected, f"{op} into unaligned memory")


@every_dtype
@every_pattern
def test_compressed_form(cpu, text, dtype):
    p = Pattern(text)
    for w in inputs(text, dtype):
        values, indices = reference.compress(w, p.n, p.m)
        out = unaligned(fill_poison(torch.empty_like(values))), unaligned(fill_poison(torch.empty_like(indices)))
        cpu("nm_compress")(w, p.n, p.m, None, out=out)
        assert_equal_bits(out, (values, indices))
        dense = unaligned(fill_poison(torch.empty_like(w)))
        cpu("nm_decompress")(unaligned(values), unaligned(indices), p.n, p.m, w.shape[-1], out=dense)
        assert_equal_bits(dense, reference.decompress(values, indices, p.n, p.m, w.shape[-1]))


@every_dtype
@every_pattern
def test_a_given_mask(cpu, text, dtype):
    p, gen = Pattern(text), torch.Generator().manual_seed(2)
    for w in inputs(text, dtype):
        full = reference.mask(torch.randn(w.shape, generator=gen), p.n, p.m)
        thin = full & (torch.rand(w.shape, generator=gen) < 0.9)
        for mask in (full, thin, torch.zeros_like(full)):
            assert_equal_bits(cpu("nm_compress")(w, p.n, p.m, unaligned(mask)), reference.compress(w, p.n, p.m, mask))
        if p.n < p.m:
            full[-1, -p.m :] = True
            with pytest.raises(ShapeError, match="keeps more than"):
                cpu("nm_compress")(w, p.n, p.m, full)


@every_pattern
def test_decompress_of_a_partial_last_group(cpu, text):
    p, gen = Pattern(text), torch.Generator().manual_seed(3)
    values, indices = reference.compress(torch.randn(5, 300 // p.m * p.m + p.m, generator=gen), p.n, p.m)
    for cols in (1, p.m // 2 + 1, p.m + 1, 130, 300):
        packed = values[:, : p.kept(cols)].contiguous(), indices[:, : p.index_bytes(cols)].contiguous()
        assert_equal_bits(cpu("nm_decompress")(*packed, p.n, p.m, cols), reference.decompress(*packed, p.n, p.m, cols))


@pytest.mark.parametrize("text", ["2:4", "2:8", "4:8", "3:12", "2:32"])
def test_decompress_takes_indices_in_any_order(cpu, text):
    p = Pattern(text)
    values, indices = reference.compress(torch.randn(6, 96 * 8), p.n, p.m)
    where = unpack_indices(indices, p.index_bits, values.shape[-1]).unflatten(-1, (-1, p.n)).flip(-1).flatten(-2)
    turned = values.unflatten(-1, (-1, p.n)).flip(-1).flatten(-2).contiguous(), pack_indices(where, p.index_bits)
    assert_equal_bits(cpu("nm_decompress")(*turned, p.n, p.m, 768), reference.decompress(values, indices, p.n, p.m, 768))


@pytest.mark.parametrize("text", ["1:2", "2:8", "4:8", "1:32", "1:64", "3:5", "7:12", "5:48"])
def test_decompress_notices_an_index_outside_its_group(cpu, text):
    p = Pattern(text)
    values, indices = reference.compress(torch.randn(3, 20 * p.m), p.n, p.m)
    for at in (0, indices.numel() // 2, indices.numel() - 1):
        damaged = indices.clone()
        damaged.view(-1)[at] |= 0xFF if at + 1 < indices.numel() else 0xFF >> (-p.kept(20 * p.m) * p.index_bits % 8)
        with pytest.raises(ShapeError, match="does not exist"):
            cpu("nm_decompress")(values, damaged, p.n, p.m, 20 * p.m)


@every_dtype
def test_the_scale_has_the_same_bits_everywhere(cpu, dtype):
    from nmkernels import _C

    for text in ("2:4", "3:5", "1:16", "100:256"):
        p, gen = Pattern(text), torch.Generator().manual_seed(4)
        for groups in (1, 3, 9001 // p.m):
            w = unaligned(torch.randn(1, groups * p.m, generator=gen).to(dtype))
            found = cpu("nm_soft_threshold_scale")(w, p.n, p.m)
            torch.testing.assert_close(found, reference.soft_threshold_scale(w, p.n, p.m), rtol=1e-6, atol=0)
            here = _C.isa()
            _C.use_isa("portable")
            plain = cpu("nm_soft_threshold_scale")(w, p.n, p.m)
            _C.use_isa(here)
            assert_equal_bits(found, plain)


@pytest.mark.parametrize("offset", [0, 1])
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
