"""soft_threshold_scale in Triton: the shared suite, and the kernel that adds the sums of programs."""

from __future__ import annotations

import torch

from nmkernels.backends.triton.groups import BLOCK, ELEMENTS, TILES, scale_kernel
from nmkernels.backends.triton.launch import launch
from python_tests.backends.kernel_suites import ScaleSuite


class TestScale(ScaleSuite):
    patterns = ["2:4", "1:1", "1:8", "3:5", "4:32", "255:256", "256:256"]
    dtypes = [torch.float32, torch.bfloat16]
    chunk, chunks = ELEMENTS * TILES, [(0, 1), (1, 1)]


def test_more_partial_sums_than_are_added_at_once(device: str) -> None:
    """The second kernel alone, on powers of two: one left out or added twice shows."""
    for programs in (0, 1, BLOCK, 2 * BLOCK + 1):
        sums, got = torch.zeros(2, programs, dtype=torch.float64), torch.full((), 7.0, device=device)
        if programs:
            sums[0, [0, programs // 2, -1]] = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
            sums[1, [0, programs // 2, -1]] = torch.tensor([8.0, 16.0, 32.0], dtype=torch.float64)
        launch(scale_kernel, 1, (sums.to(device), got, programs), BLOCK=BLOCK)
        want = sums[0].sum() / sums[1].sum() if programs else torch.zeros(())
        assert got.cpu() == want.float()
