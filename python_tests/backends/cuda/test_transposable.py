"""transposable_mask in CUDA."""

from __future__ import annotations

from python_tests.backends.kernel_suites import TransposableSuite


class TestTransposableMask(TransposableSuite):
    # blocks that are wide, tall, and ragged at both ends; rows whose length is no multiple of 16 bytes
    shapes = [(4, 4), (8, 12), (2, 12, 8), (4, 1024), (4, 1028), (260, 8), (1024, 4), (36, 2052), (0, 8), (3, 4, 0)]
