"""distance: piece by piece it is what it is as a whole."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from nmkernels import reference
from python_tests.each import each


@each("chunk", [1, 7, 20, 1 << 24])
@each("dtype", [torch.float32, torch.bfloat16])
def test_pieces(chunk: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["nmkernels.reference.common"], "WINDOW", chunk)
    y, z = torch.randn(11, 5).to(dtype), torch.randn(11, 5, dtype=torch.float64)
    for row in (0, 6, 10):
        z[row, row % 5] += 100
        assert reference.distance(y, z) == (y.double() - z).abs().max().item()
        z[row, row % 5] -= 100


def test_nan_and_empty() -> None:
    y = torch.zeros(3, 4)
    y[1, 2] = torch.nan
    assert math.isnan(reference.distance(y, torch.zeros(3, 4)))
    assert reference.distance(y[:0], y[:0]) == reference.distance(y[:, :0], y[:, :0]) == 0.0
