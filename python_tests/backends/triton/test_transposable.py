"""transposable_mask in Triton."""

from __future__ import annotations

from python_tests.backends.kernel_suites import TransposableSuite


class TestTransposableMask(TransposableSuite):
    # programs of 128 and 256 tiles: one less, one more, tall ones, and none
    shapes = [shape for tiles in (512, 1024) for shape in ((4, tiles - 4), (8, tiles + 4), (tiles + 4, 4), (3, tiles // 8, 20))]
    shapes += [(2, 44, 64), (2, 76, 64), (0, 8), (4, 0), (0, 4, 4), (3, 0, 8)]
