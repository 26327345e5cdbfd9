"""What the tests of the reference share: edge cases and comparison of bits."""

import pytest
import torch

INTS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}
DTYPES = list(INTS)


def _canonical(x):
    if x.dtype not in INTS:
        return x
    return torch.where(x.isnan(), float("nan"), x).contiguous().view(INTS[x.dtype])


@pytest.fixture
def same_bits():
    """A comparison where NaN equals NaN and -0.0 differs from 0.0; dtype, shape and contiguity count."""

    def compare(got, want):
        assert got.dtype == want.dtype and got.shape == want.shape
        return torch.equal(_canonical(got), _canonical(want))

    return compare


@pytest.fixture
def edge():
    """Rows drawn from ties, both zeros, NaNs of both signs, infinities, denormals, extremes and ordinary numbers."""

    def make(rows, cols, dtype, seed=0):
        info, generator = torch.finfo(dtype), torch.Generator().manual_seed(seed)
        odd = [0.0, -0.0, 1.0, -1.0, 1 + info.eps, float("nan"), -float("nan"), float("inf"), -float("inf"), info.max, -info.max]
        odd += [info.tiny, -info.tiny, info.smallest_normal * info.eps, -info.smallest_normal * info.eps]
        table = torch.cat(
            [torch.tensor(odd, dtype=torch.float64).to(dtype), torch.randn(20, generator=generator, dtype=torch.float64).to(dtype)]
        )
        x = table[torch.randint(len(table), (rows, cols), generator=generator)]
        if rows > 3:
            x[0], x[1], x[2] = 0.0, 1.0, torch.where(torch.arange(cols) % 2 == 0, 0.0, -0.0)
        return x

    return make
