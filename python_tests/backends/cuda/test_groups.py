"""soft_threshold_scale and transposable_mask in CUDA: the shared suites, and every partial sum of the scale alone."""

from __future__ import annotations

import pytest
import torch

from python_tests.backends.kernel_suites import Ours, ScaleSuite, TransposableSuite


class TestScale(ScaleSuite):
    patterns = ["2:4", "1:4", "2:8", "1:8", "1:16", "1:1", "4:4", "3:5", "4:32", "255:256", "256:256"]
    chunk, chunks = 4096, [(0, 1), (1, -1), (1, 0), (2, 1), (5, 3)]

    @pytest.mark.quick(3)
    @pytest.mark.parametrize("at", [0, 256, 600, 1, 255, 257])
    def test_every_partial_sum_is_added_once(self, at: int, device: str, ours: Ours) -> None:
        """More chunks than the last block has threads, one of them unlike the others: left out or added twice it shows."""
        w = torch.ones(601, self.chunk)
        w[:, ::4], w[:, 1::4] = 2.0, 2.0
        w[at, ::4] = 1000.0
        self.check(ours, device, w, "2:4")


class TestTransposableMask(TransposableSuite):
    # blocks that are wide, tall, and ragged at both ends; rows whose length is no multiple of 16 bytes
    shapes = [(4, 4), (8, 12), (2, 12, 8), (4, 1024), (4, 1028), (260, 8), (1024, 4), (36, 2052), (0, 8), (3, 4, 0)]
