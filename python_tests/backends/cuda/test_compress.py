"""compress and decompress in CUDA, and canonical indices in the orders of tensor cores."""

from __future__ import annotations

import pytest
import torch

from nmkernels import Pattern, reference, testing
from nmkernels.backends.cuda.compress import metadata
from nmkernels.reference.layouts import EIGHT_BIT
from python_tests.backends.gemm_calls import unaligned
from python_tests.backends.kernel_suites import CompressSuite, Ours

SMALL = ["2:4", "1:4", "1:8", "2:8", "1:16"]
ANY = ["3:4", "4:4", "1:1", "2:3", "4:8", "3:5", "5:16", "12:16", "1:32", "3:33", "8:256", "128:256"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class TestCompress(CompressSuite):
    patterns, wide = SMALL + ANY, 5000
    # the long row ends inside a chunk and needs several blocks
    sizes = staticmethod(lambda m: [(9, 5 * m), (5, 8 * m), (1, (33000 if m < 20 else 5000) // m * m)])


@pytest.mark.parametrize("pattern", [*SMALL, "3:5"])
def test_nans_tie_whatever_their_bits(pattern: str, device: str, ours: Ours) -> None:
    for dtype in DTYPES:
        p, ints = Pattern(pattern), torch.int32 if dtype == torch.float32 else torch.int16
        infinity = int(torch.tensor(float("inf"), dtype=dtype).view(ints))
        payloads = torch.randint(1, torch.iinfo(ints).max - infinity, (9, 16 * p.m)).to(ints)
        nans = torch.where(torch.rand(payloads.shape) < 0.5, infinity + payloads, -1 - payloads).to(ints).view(dtype)
        assert nans.isnan().all()
        w = torch.where(torch.rand(payloads.shape) < 0.6, nans, torch.randn(payloads.shape).to(dtype))
        testing.assert_equal_bits(ours("nm_compress").fn(w.to(device), p.n, p.m), reference.compress(w, p.n, p.m))


@pytest.mark.gpu
def test_captured_in_a_graph(device: str, ours: Ours) -> None:
    """A replay packs what the memory then holds; a given mask is not checked there."""
    if device == "cpu":
        pytest.skip("graphs are a GPU's")
    w, mask = torch.randn(64, 512, device=device), torch.ones(64, 512, dtype=torch.bool, device=device)
    ours("nm_compress").fn(w, 2, 4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = ours("nm_compress").fn(w, 2, 4)
        ours("nm_compress").fn(w, 2, 4, mask)
    w.copy_(torch.randn(64, 512))
    graph.replay()
    testing.assert_equal_bits(got, reference.compress(w.cpu(), 2, 4))


@pytest.mark.parametrize("layout", ["mma.sp", "wgmma.sp", EIGHT_BIT])
def test_every_word(device, layout):
    """Any bytes: a permutation looks at none of them."""
    wide = 128 if layout == EIGHT_BIT else 64
    sizes = [(64, wide), (192, 5 * wide), (128, 9 * wide), (0, wide), (64, 0), *([(16, 128), (80, 128)] if layout == "mma.sp" else [])]
    for rows, cols in sizes:
        indices = torch.randint(256, (rows, cols // 8), dtype=torch.uint8).to(device)
        expected = reference.to_layout(indices, cols, layout)
        testing.assert_equal_bits(metadata(indices, cols, layout), expected)
        testing.assert_equal_bits(metadata(unaligned(indices), cols, layout), expected)
        testing.assert_equal_bits(metadata(torch.stack([indices, indices], -1)[..., 0], cols, layout), expected)
        out = testing.fill_poison(torch.empty_like(expected))
        assert metadata(indices, cols, layout, out=out) is out
        testing.assert_equal_bits(out, expected)
