"""compress and decompress in CUDA."""

from __future__ import annotations

import pytest
import torch

from nmkernels import Pattern, reference, testing
from python_tests.backends.kernel_suites import CompressSuite, Ours

SMALL = ["2:4", "1:4", "1:8", "2:8", "1:16"]
ANY = ["3:4", "4:4", "1:1", "2:3", "4:8", "3:5", "5:16", "12:16", "1:32", "3:33", "8:256", "128:256"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class TestCompress(CompressSuite):
    patterns, wide = SMALL + ANY, 5000
    # the long row ends inside a chunk and needs several blocks
    sizes = staticmethod(lambda m: [(9, 5 * m), (5, 8 * m), (1, (33000 if m < 20 else 5000) // m * m)])

    def test_edge_numbers(self, device: str, ours: Ours) -> None:
        for p in map(Pattern, [*SMALL, "3:5", "4:32"]):
            for dtype in DTYPES:
                for case in testing.cases(p, dtype):
                    got, want = ours("nm_compress").fn(case.x.to(device), p.n, p.m), reference.compress(case.x, p.n, p.m)
                    testing.assert_equal_bits(got, want, f"{p} {case.id}")


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
