"""What the tests of the reference share: its dtypes and edge cases. Strides and empty tensors: ``ops/test_exact.py``."""

import torch
from torch import Tensor

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def edge(rows: int, cols: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Rows drawn from ties, both zeros, NaNs of both signs, infinities, denormals, extremes and ordinary numbers."""
    info, generator = torch.finfo(dtype), torch.Generator().manual_seed(seed)
    odd = [0.0, -0.0, 1.0, -1.0, 1 + info.eps, float("nan"), -float("nan"), float("inf"), -float("inf"), info.max, -info.max]
    odd += [info.tiny, -info.tiny, info.smallest_normal * info.eps, -info.smallest_normal * info.eps]
    table = torch.cat([torch.tensor(odd, dtype=torch.float64), torch.randn(20, generator=generator, dtype=torch.float64)]).to(dtype)
    x = table[torch.randint(len(table), (rows, cols), generator=generator)]
    if rows > 3:
        x[0], x[1], x[2] = 0.0, 1.0, torch.where(torch.arange(cols) % 2 == 0, 0.0, -0.0)
    return x
