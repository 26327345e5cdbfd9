"""compress and decompress in Triton."""

from __future__ import annotations

import torch

from python_tests.backends.kernel_suites import CompressSuite


class TestCompress(CompressSuite):
    patterns = ["2:4", "1:4", "3:4", "4:4", "1:1", "2:3", "1:8", "2:8", "4:8"]
    patterns += ["3:5", "5:16", "12:16", "1:32", "3:32", "4:32", "8:256", "128:256"]
    dtypes = [torch.float32, torch.bfloat16]
    wide = 300
    # 9 rows: one line of memory or rows of their own, by the pattern; 2500 elements cross tiles
    sizes = staticmethod(lambda m: [(9, 5 * m), (2, 2500 // m * m + m)])
