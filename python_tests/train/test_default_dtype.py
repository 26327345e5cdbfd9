"""``torch.set_default_dtype``: every recipe trains a model of that dtype, and others as if it had not been called."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

import nmkernels as nm
from nmkernels.recipes import Recipe
from nmkernels.recipes.contrib.proxsparse import prox
from python_tests.recipes.roster import ROSTER, STEPS

DTYPES = (torch.bfloat16, torch.float16, torch.float64)


@contextmanager
def default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.fixture(autouse=True)
def _same_kernels() -> Iterator[None]:
    """Not those that were faster this time."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def trained(recipe: Recipe, dtype: torch.dtype, steps: int = STEPS) -> tuple[nn.Module, list[Tensor]]:
    """The finished model, and the metrics of each step."""
    g = torch.Generator().manual_seed(0)
    middle = nm.nn.SquaredReLU() if isinstance(recipe, nm.recipes.Activation24) else nn.ReLU()
    model = nn.Sequential(nn.Linear(32, 64, dtype=dtype), middle, nn.Linear(64, 32, dtype=dtype))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g, dtype=torch.float64) * 0.2)
    torch.manual_seed(0)
    handle, metrics = nm.sparsify_(model, recipe), []
    optimizer = handle.attach(recipe.optimizer(model.parameters(), lr=1e-3))
    for _ in range(steps):
        optimizer.zero_grad()
        y = model(torch.randn(16, 32, generator=g, dtype=torch.float64).to(dtype))
        y.square().mean().backward()
        optimizer.step()
        metrics += [value for _, value in sorted(handle.metrics().items())]
    with handle.deployable():
        assert model(torch.zeros(3, 32, dtype=dtype)).dtype == y.dtype == dtype
    handle.finish()
    return model, metrics


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", ROSTER)
def test_a_model_of_another_dtype_is_unaffected(name):
    """To the bit, with metrics of the same dtypes."""
    recipe = ROSTER[name].recipe
    want, expected = trained(recipe, torch.float32)
    for dtype in (torch.bfloat16, torch.float64):
        with default(dtype):
            model, metrics = trained(recipe, torch.float32)
        for a, b in zip([*model.parameters(), *metrics], [*want.parameters(), *expected], strict=True):
            assert a.dtype == b.dtype and torch.equal(a.nan_to_num(-1.0), b.nan_to_num(-1.0))


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", nm.recipes.names())
def test_a_model_of_that_dtype_trains(name):
    for dtype in DTYPES:
        with default(dtype):
            recipe = nm.recipes.get(f"{name}:2:4", total_steps=4)
            model, _ = trained(recipe, dtype, steps=5)
            assert {p.dtype for p in model.parameters()} == {dtype}
            if recipe.final != "dense":
                nm.compress_(model)
                assert model(torch.zeros(3, 32)).dtype == dtype


def test_a_small_decay_does_not_vanish():
    """As 1e-9 does in fp16; without a regulariser ``prox`` has no thresholds."""
    w = torch.tensor([[3.0, -0.1, 2.0, 0.2]])
    want = prox(w, 1e-9)
    with default(torch.float16):
        assert torch.equal(prox(w, 1e-9), want)
