"""Hugging Face's Conv1D stores its weight (in, out): every recipe trains it as it trains the same nn.Linear."""

import pytest
import torch

from nmkernels.optim import MaskedAdamW
from nmkernels.recipes import ASP, AST, FST, SRSTE, SSTE, STEP, MaxQ, ProxSparse, SLoPe
from python_tests.recipes.loop import batches, mlp
from python_tests.recipes.training import metrics_of, run

Conv1D = pytest.importorskip("transformers.pytorch_utils").Conv1D


def transposed():
    model = mlp()
    for i in (0, 2):
        linear = model[i]
        layer = Conv1D(linear.out_features, linear.in_features).double()
        with torch.no_grad():
            layer.weight.copy_(linear.weight.t())
            layer.bias.copy_(linear.bias)
        model[i] = layer
    return model


RECIPES = [
    SRSTE(decay=0.1),
    STEP(t_min=2, t_max=4, threshold=1e-30),
    ASP(start=3),
    MaxQ(total_steps=10, end=6, decay=0.1),
    AST(decay=0.3, end=4, every=3),
    ProxSparse(decay=0.8, anchor=0.3),
    SLoPe(total_steps=10, rank=2, start=4, every=3, seed=1),
    SRSTE(decay=0.1, packed=True),
    SSTE(mvue=None, packed=True),
    FST(every=3, decay=0.1, end=None, mvue=None, packed=True),
    FST(total_steps=10, every=3, decay=0.1, end=6, seed=0),
]


@pytest.mark.parametrize("make", [MaskedAdamW, torch.optim.AdamW])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_equals_linear(recipe, make):
    make = recipe.optimizer if recipe.setup.optimizer else make
    results = []
    for model in (mlp(), transposed()):
        _, handle, _ = run(recipe, data=batches(10), model=model, make=make)
        results.append(metrics_of(handle))
        handle.finish()
        results.append(model)
    theirs, a, ours, b = results
    assert ours == pytest.approx(theirs, rel=1e-9)
    for i in (0, 2):
        assert (a[i].weight - b[i].weight.t()).abs().max() < 1e-12
        assert torch.equal(a[i].weight != 0, b[i].weight.t() != 0)
