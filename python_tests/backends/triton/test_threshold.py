"""soft_threshold_scale in Triton."""

from __future__ import annotations

import torch

from nmkernels.backends.triton.groups import ELEMENTS, TILES
from python_tests.backends.kernel_suites import ScaleSuite


class TestScale(ScaleSuite):
    patterns = ["2:4", "1:1", "1:8", "3:5", "4:32", "255:256", "256:256"]
    dtypes = [torch.float32, torch.bfloat16]
    chunk, chunks = ELEMENTS * TILES, [(0, 1), (1, 1)]
