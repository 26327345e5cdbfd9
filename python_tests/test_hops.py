"""The way of a tensor from the public call to the kernel is short: so many Python calls in so many files, and no more."""

import pytest
import torch

import nmkernels as nm
from nmkernels.capability import compiled_core
from python_tests.hops import hops

pytestmark = pytest.mark.skipif(not compiled_core().ok, reason="the compiled core is not built")


def model_of(recipe):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    handle = nm.sparsify_(model, recipe)
    return model, handle.attach(recipe.optimizer(model.parameters(), lr=1e-3))


@pytest.mark.parametrize(("packed", "calls", "files"), [(True, 35, 10), (False, 15, 10)])
def test_forward_of_a_layer(packed, calls, files):
    model, _ = model_of(nm.recipes.SRSTE("2:4", packed=packed))
    x = torch.randn(8, 64)
    count, where = hops(lambda: model[0](x))
    assert count <= calls and len(where) <= files, (count, where)


def test_compress():
    w = torch.randn(64, 64)
    count, where = hops(lambda: nm.ops.compress(w, "2:4"))
    assert count <= 12, (count, where)


def test_step_of_two_layers():
    model, optimizer = model_of(nm.recipes.SRSTE("2:4"))
    x = torch.randn(8, 64)

    def step():
        model(x).sum().backward()
        count, where = hops(optimizer.step, warm=0)
        optimizer.zero_grad()
        return count, where

    for _ in range(4):
        count, where = step()
    assert count <= 110, (count, where)
