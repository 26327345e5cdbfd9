"""The linear' way to a backend's own kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nmkernels.autograd import linear


def test_a_named_backend_computes_as_the_op_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without autocast, which would multiply in another dtype than the one agreed, and without recording."""
    seen = []

    def kernel(x: torch.Tensor, *args: Any) -> torch.Tensor:
        seen.append((torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))
        return x

    monkeypatch.setattr(linear, "function", lambda op, backend, args: kernel if backend == "mine" else None)
    x = torch.ones(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear._by("mine", "nm_linear", x) is x
    assert seen == [(False, False)] and torch.is_grad_enabled()
